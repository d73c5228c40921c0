//! Every form against the definition.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::{Pool, Storage};

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
        3 => Storage::Fp8Row {
            codes: Arc::new((0..rows * cols).map(|_| byte() & 0xBF).collect::<Vec<u8>>()),
            scales: (0..rows).map(|i| 0.01 + i as f32 * 0.003).collect(),
        },
        _ => Storage::Nvfp4 {
            codes: Arc::new((0..rows * cols / 2).map(|_| byte()).collect::<Vec<u8>>()),
            scales: Arc::new(
                (0..rows * cols / 16).map(|_| byte() & 0x7F).map(|c| c.min(0x7E)).collect::<Vec<u8>>(),
            ),
            tensor_scale: 0.003,
        },
    };
    Matrix::new(rows, cols, storage).expect("shapes agree")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn every_level_gives_the_bytes_of_the_law(
        kind in 0u8..5, rows in 1usize..140, k in 1usize..45, m in 1usize..11, seed: u64
    ) {
        let cols = k * 16 + if kind < 4 { seed as usize % 16 } else { 0 };
        let w = matrix(kind, rows, cols, seed);
        let x: Vec<f32> = (0..m * cols).map(|i| ((i as u64 ^ seed).wrapping_mul(0x9E3779B97F4A7C15) >> 40) as f32 / 8e6 - 1.0).collect();
        let run = |level, threads| {
            let mut y = vec![f32::NAN; m * rows];
            product_on(level, &Pool::new(threads), &w, &x, &mut y);
            y.iter().map(|y| y.to_bits()).collect::<Vec<_>>()
        };
        let law = run(Level::law(), 1);
        for level in Level::present() {
            prop_assert_eq!(&law, &run(level, 1), "{}", level.name());
            prop_assert_eq!(&law, &run(level, 3), "{} on three threads", level.name());
        }
        // A row alone gives the same bytes.
        let mut alone = vec![f32::NAN; rows];
        product(Level::detect(), &Pool::new(1), &w, &x[(m - 1) * cols..], &mut alone);
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
    let row = |n: usize| Storage::Fp8Row { codes: bytes(6), scales: vec![1.0; n].into() };
    assert!(Matrix::new(2, 3, row(2)).is_some());
    assert!(Matrix::new(2, 3, row(1)).is_none() && Matrix::new(3, 3, row(3)).is_none());
    let fp4 = |k: usize| Storage::Nvfp4 { codes: bytes(k), scales: bytes(k / 8), tensor_scale: 1.0 };
    assert!(Matrix::new(2, 16, fp4(16)).is_some());
    assert!(Matrix::new(2, 24, fp4(24)).is_none());
}

#[test]
fn a_scale_a_row_is_applied_last() {
    let (rows, cols) = (7, 40);
    let w = matrix(3, rows, cols, 5);
    let Storage::Fp8Row { codes, scales } = w.storage() else { panic!("kind 3 is fp8 by rows") };
    let x: Vec<f32> = (0..2 * cols).map(|i| (i * 37 % 19) as f32 / 7.0 - 1.1).collect();
    for level in Level::present() {
        let mut y = vec![f32::NAN; 2 * rows];
        product(level, &Pool::new(1), &w, &x, &mut y);
        for (r, n) in (0..2 * rows).map(|i| (i / rows, i % rows)) {
            let row: Vec<f32> = (**codes).as_ref()[n * cols..(n + 1) * cols]
                .iter()
                .map(|&c| castiron_num::fp8::decode(c))
                .collect();
            let want = dot32(&row, &x[r * cols..(r + 1) * cols]) * scales[n];
            assert_eq!(y[r * rows + n].to_bits(), want.to_bits(), "{}", level.name());
        }
    }
}
