//! The loop around a packed form: what is decoded when, and what stays in which cache.

use std::marker::PhantomData;
use std::ops::Range;

use castiron_num::nvfp4;

use super::layout::{Exponents, Inputs, LANES, SPAN};
use super::{Storage, W4a4Input};
use crate::Matrix;
use crate::matrix::GROUP;

/// An NVFP4 matrix as it lies in the checkpoint.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    rows: usize,
    cols: usize,
    tensor_scale: f32,
}

impl<'a> Source<'a> {
    /// `None` when the matrix is not NVFP4.
    pub fn new(w: &'a Matrix) -> Option<Self> {
        let Storage::Nvfp4 { codes, scales, tensor_scale } = w.storage() else { return None };
        let (codes, scales) = ((**codes).as_ref(), (**scales).as_ref());
        Some(Self { codes, scales, rows: w.rows(), cols: w.cols(), tensor_scale: *tensor_scale })
    }

    /// Row `n`.
    #[inline(always)]
    pub fn row(&self, n: usize) -> Row<'a> {
        let (bytes, groups) = (self.cols / 2, self.cols / GROUP);
        let (codes, codes_left) = self.codes[n * bytes..(n + 1) * bytes].as_chunks();
        let (scales, scales_left) = self.scales[n * groups..(n + 1) * groups].as_chunks();
        Row { codes, scales, codes_left, scales_left }
    }
}

/// A weight row in spans.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub codes: &'a [[u8; SPAN / 2]],
    pub scales: &'a [[u8; LANES]],
    codes_left: &'a [u8],
    scales_left: &'a [u8],
}

impl Row<'_> {
    /// Of the row's scales.
    #[inline(always)]
    pub fn exponents(&self) -> Exponents {
        let (whole, left) =
            (Exponents::bounds(self.scales.as_flattened()), Exponents::bounds(self.scales_left));
        Exponents::between((whole.0.min(left.0), whole.1.max(left.1)))
    }

    /// Whether nothing is left after the whole spans.
    #[inline(always)]
    pub fn is_whole(&self) -> bool {
        self.codes_left.is_empty()
    }

    /// What is left after the whole spans, filled up with zeros that meet zero inputs.
    #[inline(always)]
    pub fn rest(&self) -> Option<([u8; SPAN / 2], [u8; LANES])> {
        if self.is_whole() {
            return None;
        }
        let (mut codes, mut scales) = ([0; SPAN / 2], [0; LANES]);
        codes[..self.codes_left.len()].copy_from_slice(self.codes_left);
        scales[..self.scales_left.len()].copy_from_slice(self.scales_left);
        Some((codes, scales))
    }
}

/// The inner loops, for one instruction set. Rows have `spans` spans.
pub(super) trait Form: Copy {
    /// A decoded span of [`Self::ROWS`] weight rows.
    type Weights: Copy;
    /// Scratch before its first use.
    const ZERO: Self::Weights;
    /// Weight rows that are decoded into one.
    const ROWS: usize;

    /// Decodes the rows of `w` from `first` on, as many as `exponents`.
    fn decode(
        self,
        spans: usize,
        w: Source<'_>,
        first: usize,
        out: &mut [Self::Weights],
        exponents: &mut [Exponents],
    );

    /// Outputs of decoded rows for `N` activation rows.
    fn strip<const N: usize>(
        self,
        spans: usize,
        w: Decoded<'_, Self::Weights>,
        x: InputRows<'_, N>,
        out: &mut [[f32; N]],
    );

    /// Outputs of the rows from `first` on for `N` activation rows, weights decoded on the way.
    fn stream<const N: usize>(self, w: Source<'_>, first: usize, x: InputRows<'_, N>, out: &mut [[f32; N]]);
}

/// Decoded weight rows.
#[derive(Clone, Copy)]
pub(super) struct Decoded<'a, T> {
    pub spans: &'a [T],
    /// Of every row.
    pub exponents: &'a [Exponents],
}

/// Activation rows, of equal length.
#[derive(Clone, Copy)]
pub(super) struct InputRows<'a, const N: usize> {
    pub spans: [&'a [Inputs]; N],
    pub exponents: [Exponents; N],
    /// The activation scale, and the tensor scale of the weights.
    pub scales: (f32, f32),
}

impl<const N: usize> InputRows<'_, N> {
    /// The largest of the rows' ranges.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "the portable form adds in i64"))]
    #[inline(always)]
    pub fn range(&self) -> u8 {
        self.exponents.iter().fold(0, |m, e| m.max(e.range))
    }

    /// Weight rows of a range below this are added in i32 to the end, if that takes `terms` terms.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "the portable form adds in i64"))]
    pub fn narrow_below(&self, terms: usize) -> u8 {
        let fits = |range: &u8| Exponents { shift: 0, range: *range }.terms(self.range()) >= Some(terms);
        (0..=Exponents::NARROW).find(|range| !fits(range)).unwrap_or(Exponents::NARROW + 1)
    }

    /// The outputs of a weight row from exact sums, to which it gives back the exponents taken out.
    #[inline(always)]
    pub fn finish(&self, w: Exponents, sums: [i64; N]) -> [f32; N] {
        let mut out = [0.0; N];
        for r in 0..N {
            // Hidden, so that rows are not put side by side in a vector with lanes left over: what those hold
            // may be subnormal, and costs a hundred cycles.
            let sum = std::hint::black_box(sums[r] << (self.exponents[r].shift + w.shift));
            out[r] = nvfp4::finish(sum, self.scales.0, self.scales.1);
        }
        out
    }
}

/// Where outputs go: `[rows, width]`, of which several threads write different columns.
pub(super) struct Output<'a> {
    data: *mut f32,
    rows: usize,
    width: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: `part` is the only access, and its callers take disjoint columns.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    pub fn new(data: &'a mut [f32], rows: usize, width: usize) -> Self {
        assert_eq!(data.len(), rows * width, "y has a value for each row and output");
        Self { data: data.as_mut_ptr(), rows, width, life: PhantomData }
    }

    /// Columns of a row.
    ///
    /// # Safety
    /// They are inside, and nobody else has these columns meanwhile.
    #[allow(clippy::mut_from_ref, reason = "the caller vouches for disjoint columns")]
    #[inline(always)]
    pub unsafe fn part(&self, row: usize, first: usize, count: usize) -> &mut [f32] {
        debug_assert!(row < self.rows && first + count <= self.width);
        // SAFETY: the place is inside the slice this was made of, and the caller vouches that it is theirs alone.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.width + first), count) }
    }
}

/// Activation rows whose sums are kept in registers together.
const STRIP: usize = 4;
/// Bytes of decoded weights that should stay in the second-level cache while activations pass.
const WARM_WEIGHTS: usize = 192 << 10;
/// Weight rows between two visits to the outputs when weights are not decoded into scratch.
const STREAMED: usize = 64;

/// What stays the same in a product.
#[derive(Clone, Copy)]
struct Job<'a, F> {
    form: F,
    spans: usize,
    w: Source<'a>,
    x: &'a W4a4Input,
    y: &'a Output<'a>,
}

/// Writes the columns `outputs` of `y`, and no other.
pub(super) fn product<F: Form>(form: F, w: Source<'_>, outputs: Range<usize>, x: &W4a4Input, y: &Output<'_>) {
    assert!(outputs.end <= y.width && y.width == w.rows && y.rows == x.rows, "operands of one product");
    let spans = w.cols.div_ceil(SPAN);
    let job = Job { form, spans, w, x, y };
    let tile = match x.rows {
        0..=STRIP => STREAMED,
        _ => (WARM_WEIGHTS / (size_of::<F::Weights>() * spans)).max(1) * F::ROWS,
    };
    let tile = tile.min(outputs.len().max(1));
    let mut exponents = vec![Exponents::default(); tile];
    let mut weights = vec![F::ZERO; if x.rows > STRIP { tile.div_ceil(F::ROWS) * spans } else { 0 }];
    let mut out = vec![0.0; STRIP * tile];
    for first in outputs.clone().step_by(tile) {
        let count = tile.min(outputs.end - first);
        if x.rows > STRIP {
            form.decode(spans, w, first, &mut weights, &mut exponents[..count]);
        }
        let weights = Decoded { spans: &weights, exponents: &exponents[..count] };
        for row in (0..x.rows).step_by(STRIP) {
            match x.rows - row {
                1 => job.strip::<1>(weights, first, row, &mut out[..count]),
                2 => job.strip::<2>(weights, first, row, &mut out[..2 * count]),
                3 => job.strip::<3>(weights, first, row, &mut out[..3 * count]),
                _ => job.strip::<STRIP>(weights, first, row, &mut out[..STRIP * count]),
            }
        }
    }
}

impl<F: Form> Job<'_, F> {
    /// Columns from `first` on, as many as `out` has room for, of the `N` rows from `row` on.
    fn strip<const N: usize>(&self, w: Decoded<'_, F::Weights>, first: usize, row: usize, out: &mut [f32]) {
        let scales = (self.x.scale, self.w.tensor_scale);
        let mut x = InputRows { spans: [&[]; N], exponents: [Exponents::default(); N], scales };
        for i in 0..N {
            x.spans[i] = &self.x.packed[(row + i) * self.spans..(row + i + 1) * self.spans];
            x.exponents[i] = self.x.exponents[row + i];
        }
        let out = out.as_chunks_mut::<N>().0;
        if w.spans.is_empty() {
            self.form.stream(self.w, first, x, out);
        } else {
            self.form.strip(self.spans, w, x, out);
        }
        // Four columns at a time: whole vectors of each row.
        let (blocks, rest) = out.as_chunks::<4>();
        for r in 0..N {
            // SAFETY: `product` cuts rows and columns inside the output, and nobody else has the columns.
            let y = unsafe { self.y.part(row + r, first, out.len()) };
            let (y_blocks, y_rest) = y.as_chunks_mut::<4>();
            for (y, out) in y_blocks.iter_mut().zip(blocks) {
                *y = [out[0][r], out[1][r], out[2][r], out[3][r]];
            }
            for (y, out) in y_rest.iter_mut().zip(rest) {
                *y = out[r];
            }
        }
    }
}
