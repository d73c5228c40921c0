//! Weight matrices as they lie in a checkpoint, decoded a row at a time.

use std::sync::Arc;

use castiron_num::{bf16, fp4, fp8};

/// Bytes of a weight, owned or mapped, alive as long as anyone holds them.
pub type Codes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// How the elements of a [`Matrix`] are stored, row-major.
#[derive(Clone)]
pub enum Storage {
    /// Little-endian binary32.
    F32(Codes),
    /// Little-endian bf16.
    Bf16(Codes),
    /// E4M3FN codes with one f32 multiplier for each 128x128 block; `scales` is
    /// `[ceil(rows / 128), ceil(cols / 128)]`.
    Fp8Block {
        /// `[rows, cols]` codes.
        codes: Codes,
        /// Block multipliers, row-major.
        scales: Arc<[f32]>,
    },
    /// Two E2M1 codes a byte (even column in the low nibble), one E4M3 scale for 16 columns, one f32 for
    /// all.
    Nvfp4 {
        /// `[rows, cols / 2]` bytes.
        codes: Codes,
        /// `[rows, cols / 16]` E4M3 codes.
        scales: Codes,
        /// The tensor scale, applied last.
        tensor_scale: f32,
    },
}

/// A weight matrix `[rows, cols]`: `rows` outputs, `cols` inputs.
#[derive(Clone)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    storage: Storage,
}

/// Rows and columns of a block-FP8 scale.
pub(crate) const BLOCK: usize = 128;
/// Columns that share an NVFP4 scale.
pub(crate) const GROUP: usize = 16;

impl Matrix {
    /// A matrix over `storage`, or `None` when a length does not fit `[rows, cols]`.
    pub fn new(rows: usize, cols: usize, storage: Storage) -> Option<Self> {
        let count = rows.checked_mul(cols)?;
        let len = |c: &Codes| (**c).as_ref().len();
        let fits = match &storage {
            Storage::F32(c) => Some(len(c)) == count.checked_mul(4),
            Storage::Bf16(c) => Some(len(c)) == count.checked_mul(2),
            Storage::Fp8Block { codes, scales } => {
                len(codes) == count && scales.len() == rows.div_ceil(BLOCK) * cols.div_ceil(BLOCK)
            }
            Storage::Nvfp4 { codes, scales, .. } => {
                cols.is_multiple_of(GROUP) && len(codes) == count / 2 && len(scales) == count / GROUP
            }
        };
        fits.then_some(Self { rows, cols, storage })
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The storage form.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The factor that the law applies to a finished `dot32`: NVFP4's tensor scale, 1 otherwise.
    pub fn output_scale(&self) -> f32 {
        match self.storage {
            Storage::Nvfp4 { tensor_scale, .. } => tensor_scale,
            _ => 1.0,
        }
    }

    /// Decodes row `n` as the product sees it (without [`Self::output_scale`]), in storage order.
    #[inline(always)]
    pub fn decode_row(&self, n: usize, out: &mut [f32]) {
        let out = &mut out[..self.cols];
        match &self.storage {
            Storage::F32(c) => {
                let row = &(**c).as_ref()[n * self.cols * 4..(n + 1) * self.cols * 4];
                for (o, b) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            Storage::Bf16(c) => {
                let row = &(**c).as_ref()[n * self.cols * 2..(n + 1) * self.cols * 2];
                for (o, b) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                    *o = bf16::from_bits(u16::from_le_bytes(*b));
                }
            }
            Storage::Fp8Block { codes, scales } => {
                let row = &(**codes).as_ref()[n * self.cols..(n + 1) * self.cols];
                let per_row = self.cols.div_ceil(BLOCK);
                let scales = &scales[n / BLOCK * per_row..(n / BLOCK + 1) * per_row];
                for ((o, c), &s) in out.chunks_mut(BLOCK).zip(row.chunks(BLOCK)).zip(scales) {
                    for (o, &c) in o.iter_mut().zip(c) {
                        *o = fp8::DECODE[c as usize] * s;
                    }
                }
            }
            Storage::Nvfp4 { codes, scales, .. } => {
                let row = &(**codes).as_ref()[n * self.cols / 2..(n + 1) * self.cols / 2];
                let scales = &(**scales).as_ref()[n * self.cols / GROUP..(n + 1) * self.cols / GROUP];
                for ((o, c), &s) in out.chunks_exact_mut(GROUP).zip(row.chunks_exact(GROUP / 2)).zip(scales) {
                    let s = fp8::DECODE[s as usize];
                    for (o, &c) in o.chunks_exact_mut(2).zip(c) {
                        o[0] = fp4::decode(c & 15) * s;
                        o[1] = fp4::decode(c >> 4) * s;
                    }
                }
            }
        }
    }

    /// Decodes row `n` of an NVFP4 matrix into halves and scale units (2^-9). False when it is not NVFP4.
    pub(crate) fn decode_row_exact(&self, n: usize, halves: &mut [i8], units: &mut [u32]) -> bool {
        let Storage::Nvfp4 { codes, scales, .. } = &self.storage else { return false };
        let row = &(**codes).as_ref()[n * self.cols / 2..(n + 1) * self.cols / 2];
        for (o, &c) in halves.chunks_exact_mut(2).zip(row) {
            o[0] = fp4::halves(c & 15);
            o[1] = fp4::halves(c >> 4);
        }
        let scales = &(**scales).as_ref()[n * self.cols / GROUP..(n + 1) * self.cols / GROUP];
        for (u, &s) in units.iter_mut().zip(scales) {
            // A checkpoint's scales are checked to be non-negative numbers when it is opened.
            *u = fp8::scale_units(s).unwrap_or(0);
        }
        true
    }
}
