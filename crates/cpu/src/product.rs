//! `y = W x` for a few or many rows, every output a `dot32`.

use castiron_num::dot::{LANES, STRIPE, dot32, fold32};

use crate::level::for_level;
use crate::{Level, Matrix};

/// `y[r, n] = dot32(w_n, x_r)`, then the matrix's output scale where it has one.
///
/// `x` is `[rows, cols]`, `y` is `[rows, w.rows()]`. The bytes of a row of `y` depend on that row of `x`
/// alone.
pub fn product(level: Level, w: &Matrix, x: &[f32], y: &mut [f32]) {
    let rows = x.len() / w.cols();
    debug_assert_eq!(x.len(), rows * w.cols());
    debug_assert_eq!(y.len(), rows * w.rows());
    if level.is_law() { product_law(w, x, y) } else { product_packed(level, w, x, y, rows) }
    let scale = w.output_scale();
    if scale != 1.0 {
        y.iter_mut().for_each(|y| *y *= scale);
    }
}

/// The definition.
fn product_law(w: &Matrix, x: &[f32], y: &mut [f32]) {
    let mut row = vec![0.0; w.cols()];
    for n in 0..w.rows() {
        w.decode_row(n, &mut row);
        for (x, y) in x.chunks_exact(w.cols()).zip(y.chunks_exact_mut(w.rows())) {
            y[n] = dot32(&row, x);
        }
    }
}

for_level! {
    /// The packed form: stripes are transposed so that the 32 lanes of the law lie side by side.
    fn product_packed(w: &Matrix, x: &[f32], y: &mut [f32], rows: usize) = product_packed_body;
}

#[inline(always)]
fn product_packed_body(w: &Matrix, x: &[f32], y: &mut [f32], rows: usize) {
    let (n, k) = (w.rows(), w.cols());
    let padded = k.next_multiple_of(STRIPE);
    let mut packed = vec![0.0f32; rows * padded];
    for (x, p) in x.chunks_exact(k).zip(packed.chunks_exact_mut(padded)) {
        pack_stripes(x, p);
    }
    let mut natural = vec![0.0f32; k];
    let mut row = vec![0.0f32; padded];
    for i in 0..n {
        w.decode_row(i, &mut natural);
        pack_stripes(&natural, &mut row);
        let mut r = 0;
        while r + 2 <= rows {
            let (x0, x1) = packed[r * padded..(r + 2) * padded].split_at(padded);
            let [y0, y1] = dot_packed([x0, x1], &row);
            y[r * n + i] = y0;
            y[(r + 1) * n + i] = y1;
            r += 2;
        }
        if r < rows {
            [y[r * n + i]] = dot_packed([&packed[r * padded..(r + 1) * padded]], &row);
        }
    }
}

/// Element `8 * lane + j` of each stripe goes to `32 * j + lane`; the tail is zero.
#[inline(always)]
fn pack_stripes(x: &[f32], out: &mut [f32]) {
    const PER_LANE: usize = STRIPE / LANES;
    let (whole, tail) = x.as_chunks::<STRIPE>();
    let (out, last) = out.split_at_mut(whole.len() * STRIPE);
    for (x, o) in whole.iter().zip(out.as_chunks_mut::<STRIPE>().0) {
        for lane in 0..LANES {
            for j in 0..PER_LANE {
                o[j * LANES + lane] = x[lane * PER_LANE + j];
            }
        }
    }
    last.fill(0.0);
    for (i, &x) in tail.iter().enumerate() {
        last[i % PER_LANE * LANES + i / PER_LANE] = x;
    }
}

/// `dot32` of one packed weight row with `R` packed rows, whose chains run side by side.
#[inline(always)]
fn dot_packed<const R: usize>(x: [&[f32]; R], w: &[f32]) -> [f32; R] {
    let mut acc = [[0.0f32; LANES]; R];
    for (i, w) in w.as_chunks::<LANES>().0.iter().enumerate() {
        for r in 0..R {
            let x = &x[r][i * LANES..(i + 1) * LANES];
            for lane in 0..LANES {
                acc[r][lane] = w[lane].mul_add(x[lane], acc[r][lane]);
            }
        }
    }
    acc.map(fold32)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::Storage;

    fn matrix(kind: u8, rows: usize, cols: usize, seed: u64) -> Matrix {
        let mut s = seed | 1;
        let mut byte = move || {
            s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (s >> 33) as u8
        };
        let storage = match kind {
            0 => Storage::F32(Arc::new(
                (0..rows * cols).flat_map(|_| (byte() as f32 / 77.0 - 1.5).to_le_bytes()).collect::<Vec<u8>>(),
            )),
            1 => Storage::Bf16(Arc::new(
                (0..rows * cols)
                    .flat_map(|_| castiron_num::bf16::to_bits(byte() as f32 / 77.0 - 1.5).to_le_bytes())
                    .collect::<Vec<u8>>(),
            )),
            2 => Storage::Fp8Block {
                codes: Arc::new((0..rows * cols).map(|_| byte() & 0xBF).collect::<Vec<u8>>()),
                scales: (0..rows.div_ceil(128) * cols.div_ceil(128)).map(|i| 0.01 + i as f32 * 0.003).collect(),
            },
            _ => Storage::Nvfp4 {
                codes: Arc::new((0..rows * cols / 2).map(|_| byte()).collect::<Vec<u8>>()),
                scales: Arc::new((0..rows * cols / 16).map(|_| byte() & 0x7F).map(|c| c.min(0x7E)).collect::<Vec<u8>>()),
                tensor_scale: 0.003,
            },
        };
        Matrix::new(rows, cols, storage).expect("shapes agree")
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn every_level_gives_the_bytes_of_the_law(
            kind in 0u8..4, rows in 1usize..140, k in 1usize..45, m in 1usize..6, seed: u64
        ) {
            let cols = k * 16 + if kind < 3 { seed as usize % 16 } else { 0 };
            let w = matrix(kind, rows, cols, seed);
            let x: Vec<f32> = (0..m * cols).map(|i| ((i as u64 ^ seed).wrapping_mul(0x9E3779B97F4A7C15) >> 40) as f32 / 8e6 - 1.0).collect();
            let run = |level| {
                let mut y = vec![f32::NAN; m * rows];
                product(level, &w, &x, &mut y);
                y.iter().map(|y| y.to_bits()).collect::<Vec<_>>()
            };
            let law = run(Level::law());
            prop_assert_eq!(&law, &run(Level::portable()));
            prop_assert_eq!(&law, &run(Level::detect()));
            // A row alone gives the same bytes.
            let mut alone = vec![f32::NAN; rows];
            product(Level::detect(), &w, &x[(m - 1) * cols..], &mut alone);
            prop_assert_eq!(&law[(m - 1) * rows..], &alone.iter().map(|y| y.to_bits()).collect::<Vec<_>>()[..]);
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let bytes = |n: usize| -> crate::Codes { Arc::new(vec![0u8; n]) };
        assert!(Matrix::new(2, 3, Storage::F32(bytes(24))).is_some());
        assert!(Matrix::new(2, 3, Storage::F32(bytes(23))).is_none());
        assert!(Matrix::new(usize::MAX, 3, Storage::Bf16(bytes(2))).is_none());
        let fp8 = |n: usize| Storage::Fp8Block { codes: bytes(200 * 300), scales: vec![1.0; n].into() };
        assert!(Matrix::new(200, 300, fp8(6)).is_some());
        assert!(Matrix::new(200, 300, fp8(5)).is_none());
        let fp4 = |k: usize| Storage::Nvfp4 { codes: bytes(k), scales: bytes(k / 8), tensor_scale: 1.0 };
        assert!(Matrix::new(2, 16, fp4(16)).is_some());
        assert!(Matrix::new(2, 24, fp4(24)).is_none());
    }
}
