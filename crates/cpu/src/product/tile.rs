//! Several rows: weights are decoded a tile at a time and every row uses the tile.

use std::ops::Range;

use super::layout::{Layout, transpose_plain};
use crate::level::Set;
use crate::pool::{Columns, Pool};
use castiron_num::bf16;

use crate::simd::{self, Lanes};
use crate::{Level, Matrix, Storage};

/// Outputs of a register block.
const OUTPUTS: usize = 3;
/// Rows of a register block. 3 x 4 accumulators, 3 weights and 1 input fill 16 registers.
const ROWS: usize = 4;
/// Register blocks of outputs in a tile: decoded, the tile stays in a core's second-level cache.
const BLOCKS: usize = 8;
/// Outputs of a tile.
const TILE: usize = OUTPUTS * BLOCKS;

/// Lanes of a vector at this level.
fn width(level: Level) -> usize {
    match level.0 {
        #[cfg(target_arch = "x86_64")]
        Set::Avx512 => simd::x86::Avx512::WIDTH,
        #[cfg(target_arch = "x86_64")]
        Set::Avx2 => simd::x86::Avx2::WIDTH,
        Set::Law | Set::Portable => simd::Portable::WIDTH,
    }
}

/// Lays out one row of f32 values for vectors, `stride` values apart.
pub(super) fn pack(level: Level, layout: &Layout, x: &[f32], out: &mut [f32], stride: usize) {
    // SAFETY: four bytes are a value; every byte pattern is valid, and the length is the same.
    let bytes: &[[u8; 4]] = unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) };
    match level.0 {
        #[cfg(target_arch = "x86_64")]
        Set::Avx2 | Set::Avx512 => {
            #[target_feature(enable = "avx2,fma")]
            fn wide(layout: &Layout, x: &[[u8; 4]], out: &mut [f32], stride: usize) {
                // SAFETY: this function has AVX2.
                layout.pack(x, out, stride, |from, to| unsafe {
                    super::layout::x86::transpose(from, to, stride)
                });
            }
            // SAFETY: these levels are only made where AVX2 and FMA were found.
            unsafe { wide(layout, bytes, out, stride) }
        }
        Set::Law | Set::Portable => {
            layout.pack(bytes, out, stride, |from, to| transpose_plain(from, to, stride, f32::from_ne_bytes));
        }
    }
}

/// Decodes and lays out one row of bf16 values (little-endian bytes), `stride` values apart.
fn pack_bf16(level: Level, layout: &Layout, row: &[[u8; 2]], out: &mut [f32], stride: usize) {
    match level.0 {
        #[cfg(target_arch = "x86_64")]
        Set::Avx2 | Set::Avx512 => {
            #[target_feature(enable = "avx2,fma")]
            fn wide(layout: &Layout, row: &[[u8; 2]], out: &mut [f32], stride: usize) {
                // SAFETY: this function has AVX2.
                layout.pack(row, out, stride, |from, to| unsafe {
                    super::layout::x86::transpose_bf16(from, to, stride)
                });
            }
            // SAFETY: these levels are only made where AVX2 and FMA were found.
            unsafe { wide(layout, row, out, stride) }
        }
        Set::Law | Set::Portable => {
            let decode = |b| bf16::from_bits(u16::from_le_bytes(b));
            layout.pack(row, out, stride, |from, to| transpose_plain(from, to, stride, decode));
        }
    }
}

/// `y = W x` for `rows` rows.
pub(super) fn product(level: Level, pool: &Pool, w: &Matrix, x: &[f32], rows: usize, y: &Columns<'_>) {
    let layout = Layout::new(w.cols(), width(level));
    let mut packed = vec![0.0; rows * layout.len];
    {
        let out = Columns::new(&mut packed, layout.len);
        pool.split(rows, 1, |range| {
            for r in range {
                // SAFETY: rows of `packed` are disjoint, and each belongs to one range.
                let row = unsafe { out.row_mut(r) };
                pack(level, &layout, &x[r * w.cols()..(r + 1) * w.cols()], row, layout.width);
            }
        });
    }
    // Few outputs are cut finer than a tile, so that every thread has some.
    let tile = TILE.min(w.rows().div_ceil(pool.threads()).next_multiple_of(OUTPUTS));
    pool.split(w.rows(), tile, |range| {
        let mut scratch = Scratch::new(w, &layout, tile);
        let mut start = range.start;
        while start < range.end {
            let outputs = start..(start + tile).min(range.end);
            start = outputs.end;
            decode(level, w, &layout, outputs.clone(), &mut scratch);
            multiply(level, &layout, &packed, rows, outputs, &mut scratch, y);
        }
    });
}

/// A thread's working memory for one tile.
struct Scratch {
    natural: Vec<f32>,
    /// Blocks of `OUTPUTS` interleaved rows: vector `step * OUTPUTS + output` of a part.
    weights: Vec<f32>,
    /// Accumulators of a tile for `ROWS` rows: 32 lanes for each (output, row).
    lanes: Vec<[f32; 32]>,
}

impl Scratch {
    fn new(w: &Matrix, layout: &Layout, tile: usize) -> Self {
        let tile = tile.next_multiple_of(OUTPUTS);
        Self {
            natural: vec![0.0; w.cols()],
            weights: vec![0.0; tile * layout.len],
            lanes: vec![[0.0; 32]; tile * ROWS],
        }
    }
}

/// Decodes the weights of `outputs` into `scratch.weights`; a block's missing outputs are zero.
fn decode(level: Level, w: &Matrix, layout: &Layout, outputs: Range<usize>, scratch: &mut Scratch) {
    let stride = OUTPUTS * layout.width;
    for i in 0..outputs.len().next_multiple_of(OUTPUTS) {
        let block = &mut scratch.weights[i / OUTPUTS * OUTPUTS * layout.len..][..OUTPUTS * layout.len];
        if outputs.start + i >= outputs.end {
            for v in block.chunks_exact_mut(stride) {
                v[i % OUTPUTS * layout.width..][..layout.width].fill(0.0);
            }
            continue;
        }
        let out = &mut block[i % OUTPUTS * layout.width..];
        if let Storage::Bf16(codes) = w.storage() {
            let row = (**codes).as_ref().as_chunks::<2>().0;
            let n = outputs.start + i;
            pack_bf16(level, layout, &row[n * w.cols()..(n + 1) * w.cols()], out, stride);
        } else {
            decode_row(level, w, outputs.start + i, &mut scratch.natural);
            pack(level, layout, &scratch.natural, out, stride);
        }
    }
}

crate::level::for_level! {
    fn decode_row(w: &Matrix, n: usize, out: &mut [f32]) = decode_row_body;
}

#[inline(always)]
fn decode_row_body(w: &Matrix, n: usize, out: &mut [f32]) {
    w.decode_row(n, out);
}

/// Multiplies every row with the decoded tile.
fn multiply(
    level: Level,
    layout: &Layout,
    x: &[f32],
    rows: usize,
    outputs: Range<usize>,
    scratch: &mut Scratch,
    y: &Columns<'_>,
) {
    match level.0 {
        #[cfg(target_arch = "x86_64")]
        Set::Avx2 => {
            #[target_feature(enable = "avx2,fma")]
            fn wide(
                l: &Layout,
                x: &[f32],
                rows: usize,
                outputs: Range<usize>,
                s: &mut Scratch,
                y: &Columns<'_>,
            ) {
                multiply_with::<simd::x86::Avx2>(l, x, rows, outputs, s, y);
            }
            // SAFETY: this level is only made where AVX2 and FMA were found.
            unsafe { wide(layout, x, rows, outputs, scratch, y) }
        }
        #[cfg(target_arch = "x86_64")]
        Set::Avx512 => {
            #[target_feature(enable = "avx512f,avx2,fma")]
            fn wide(
                l: &Layout,
                x: &[f32],
                rows: usize,
                outputs: Range<usize>,
                s: &mut Scratch,
                y: &Columns<'_>,
            ) {
                multiply_with::<simd::x86::Avx512>(l, x, rows, outputs, s, y);
            }
            // SAFETY: this level is only made where AVX-512F was found.
            unsafe { wide(layout, x, rows, outputs, scratch, y) }
        }
        Set::Law | Set::Portable => multiply_with::<simd::Portable>(layout, x, rows, outputs, scratch, y),
    }
}

#[inline(always)]
fn multiply_with<L: Lanes>(
    layout: &Layout,
    x: &[f32],
    rows: usize,
    outputs: Range<usize>,
    scratch: &mut Scratch,
    y: &Columns<'_>,
) {
    let mut r = 0;
    while r < rows {
        let count = ROWS.min(rows - r);
        let x = &x[r * layout.len..(r + count) * layout.len];
        match count {
            1 => row_block::<L, 1>(layout, x, outputs.len(), scratch),
            2 => row_block::<L, 2>(layout, x, outputs.len(), scratch),
            3 => row_block::<L, 3>(layout, x, outputs.len(), scratch),
            _ => row_block::<L, ROWS>(layout, x, outputs.len(), scratch),
        }
        for (n, lanes) in outputs.clone().zip(scratch.lanes.as_chunks::<ROWS>().0) {
            // SAFETY: the level was detected.
            let sums = unsafe { L::fold(lanes) };
            for (m, &sum) in sums.iter().enumerate().take(count) {
                // SAFETY: this thread has these outputs alone.
                unsafe { y.set(r + m, n, sum) };
            }
        }
        r += count;
    }
}

/// All outputs of the tile for `M` rows: part by part, so that the rows' part stays in the first-level cache.
#[inline(always)]
fn row_block<L: Lanes, const M: usize>(layout: &Layout, x: &[f32], outputs: usize, scratch: &mut Scratch) {
    for (part, &(base, steps)) in layout.parts.iter().enumerate().take(layout.count()) {
        for block in 0..outputs.div_ceil(OUTPUTS) {
            let w = &scratch.weights[(block * layout.len + base) * OUTPUTS..][..steps * L::WIDTH * OUTPUTS];
            let x: [&[f32]; M] =
                std::array::from_fn(|m| &x[m * layout.len + base..m * layout.len + base + steps * L::WIDTH]);
            let acc = register_block::<L, M>(w, x, steps);
            for (o, acc) in acc.iter().enumerate() {
                for (m, &v) in acc.iter().enumerate() {
                    let lanes =
                        &mut scratch.lanes[(block * OUTPUTS + o) * ROWS + m][part * L::WIDTH..][..L::WIDTH];
                    // SAFETY: `lanes` holds WIDTH values, and the level was detected.
                    unsafe { L::store(lanes.as_mut_ptr(), v) };
                }
            }
        }
    }
}

/// The chains of one part for `OUTPUTS` outputs and `M` rows.
#[inline(always)]
fn register_block<L: Lanes, const M: usize>(
    w: &[f32],
    x: [&[f32]; M],
    steps: usize,
) -> [[L::Vector; M]; OUTPUTS] {
    debug_assert!(w.len() == steps * OUTPUTS * L::WIDTH && x.iter().all(|x| x.len() == steps * L::WIDTH));
    // SAFETY: the loop reads `steps` steps of `w` and `x`, which have that length; the level was detected.
    unsafe {
        let mut acc = [[L::zero(); M]; OUTPUTS];
        let (mut w, mut x) = (w.as_ptr(), x.map(<[f32]>::as_ptr));
        for _ in 0..steps {
            let weights: [L::Vector; OUTPUTS] = std::array::from_fn(|o| L::load(w.add(o * L::WIDTH)));
            for m in 0..M {
                let v = L::load(x[m]);
                for o in 0..OUTPUTS {
                    acc[o][m] = L::fma(weights[o], v, acc[o][m]);
                }
                x[m] = x[m].add(L::WIDTH);
            }
            w = w.add(OUTPUTS * L::WIDTH);
        }
        acc
    }
}
