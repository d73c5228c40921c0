use std::sync::Arc;

use castiron_num::{fp4, fp8};
use proptest::prelude::*;

use super::*;

/// Bytes without a pattern.
fn noise(seed: u64) -> impl FnMut() -> u8 {
    let mut s = seed;
    move || {
        s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (s >> 33) as u8
    }
}

/// A matrix in NVFP4 with what it was made from.
struct Case {
    codes: Vec<u8>,
    scales: Vec<u8>,
    rows: usize,
    cols: usize,
    tensor_scale: f32,
}

impl Case {
    fn new(
        rows: usize,
        cols: usize,
        tensor_scale: f32,
        code: impl FnMut() -> u8,
        scale: impl FnMut() -> u8,
    ) -> Self {
        let fill = |n: usize, from: &mut dyn FnMut() -> u8| (0..n).map(|_| from()).collect();
        let (mut code, mut scale) = (code, scale);
        let (codes, scales) = (fill(rows * cols / 2, &mut code), fill(rows * cols / GROUP, &mut scale));
        Self { codes, scales, rows, cols, tensor_scale }
    }

    fn matrix(&self) -> Matrix {
        let storage = Storage::Nvfp4 {
            codes: Arc::new(self.codes.clone()),
            scales: Arc::new(self.scales.clone()),
            tensor_scale: self.tensor_scale,
        };
        Matrix::new(self.rows, self.cols, storage).expect("shapes agree")
    }

    /// The law, from `castiron_num` alone.
    fn law(&self, x: &[f32], a: f32) -> Vec<u32> {
        let mut out = Vec::new();
        let mut row = QuantisedRow::default();
        for x in x.chunks_exact(self.cols) {
            nvfp4::quantise_row(x, a, &mut row).expect("finite");
            for n in 0..self.rows {
                let mut halves = Vec::new();
                nvfp4::unpack_halves(&self.codes[n * self.cols / 2..][..self.cols / 2], &mut halves);
                let scales = &self.scales[n * self.cols / GROUP..][..self.cols / GROUP];
                let units: Vec<u32> = scales.iter().map(|&s| fp8::scale_units(s).unwrap_or(0)).collect();
                let sum = nvfp4::dot_exact(&halves, &units, &row.codes, &row.scales);
                out.push(nvfp4::finish(sum, a, self.tensor_scale).to_bits());
            }
        }
        out
    }

    /// The same from the values' definition in i128, in units of 2^-20.
    fn rational(&self, x: &[f32], a: f32) -> Vec<u32> {
        let units = |code: u8, scale: u8| {
            (fp4::decode(code) * 2.0) as i128 * (f64::from(fp8::decode(scale)) * 512.0) as i128
        };
        let mut out = Vec::new();
        for x in x.chunks_exact(self.cols) {
            let groups = x.as_chunks::<GROUP>().0.iter();
            let groups: Vec<_> = groups.map(|g| nvfp4::quantise_group(g, a).expect("finite")).collect();
            for n in 0..self.rows {
                let term = |i: usize| {
                    let at = n * self.cols + i;
                    let (scale, codes) = groups[i / GROUP];
                    units(self.codes[at / 2] >> (at % 2 * 4) & 15, self.scales[at / GROUP])
                        * units(codes[i % GROUP], scale)
                };
                let sum: i128 = (0..self.cols).map(term).sum();
                out.push((((sum as f32 / 1048576.0) * a) * self.tensor_scale).to_bits());
            }
        }
        out
    }
}

/// Every way this processor has to compute the product.
fn forms(w: &Matrix, x: &W4a4Input) -> Vec<(String, Vec<u32>)> {
    let bits = |y: Vec<f32>| y.iter().map(|y| y.to_bits()).collect();
    let mut out = Vec::new();
    for level in Level::present() {
        let mut y = vec![f32::NAN; x.rows * w.rows()];
        assert!(product_w4a4(level, w, x, &mut y));
        out.push((level.name().to_string(), bits(y)));
        for threads in [2, 3] {
            let mut y = vec![f32::NAN; x.rows * w.rows()];
            assert!(product_w4a4_pooled(level, &Pool::new(threads), w, x, &mut y));
            out.push((format!("{} on {threads} threads", level.name()), bits(y)));
        }
    }
    out
}

fn check(case: &Case, x: &[f32], a: f32) {
    let (input, bad) = W4a4Input::quantise(x, case.cols, a);
    assert!(bad.is_empty());
    let law = case.law(x, a);
    assert_eq!(law, case.rational(x, a), "exact rational");
    for (name, y) in forms(&case.matrix(), &input) {
        assert_eq!(law, y, "{name}");
    }
}

/// Values over `2^-spread..1`, some zero.
fn values(count: usize, spread: u8, mut byte: impl FnMut() -> u8) -> Vec<f32> {
    (0..count)
        .map(|_| {
            let (m, e) = (f32::from(byte() as i8) / 128.0, i32::from(byte() % (spread + 1)));
            if byte() < 20 { 0.0 } else { m * 2f32.powi(-e) }
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]
    #[test]
    fn every_form_gives_the_bytes_of_the_law(
        rows in 1usize..40, groups in 1usize..70, m in 1usize..11, spread in 0u8..24, scales in 0u8..4, seed: u64
    ) {
        let cols = groups * GROUP;
        let mut byte = noise(seed);
        let mut scale = move || match scales {
            0 => byte() & 0x7F,
            1 => 0x38 + byte() % 16,
            2 => if byte() & 1 == 0 { 0 } else { 0x7E },
            _ => byte() % 16,
        };
        let case = Case::new(rows, cols, 0.003, noise(seed ^ 1), move || scale().min(0x7E));
        let x = values(m * cols, spread, noise(seed ^ 2));
        check(&case, &x, 2f32.powi(-i32::from(spread) / 2) * 0.0123);
    }
}

#[test]
fn the_largest_sums_are_exact() {
    // Every half +-12 under the largest scales on both sides, in all four signs; 160 groups and more.
    for cols in [16, 112, 640, 2560, 4096] {
        for (w, x) in [(0x77, 1.0f32), (0x77, -1.0), (0xFF, 1.0), (0xFF, -1.0)] {
            let case = Case::new(3, cols, 1.0, || w, || 0x7E);
            let x = vec![x * 6.0 * 448.0; 3 * cols];
            check(&case, &x, 1.0);
        }
    }
}

#[test]
fn every_spread_of_exponents_with_the_largest_terms() {
    // One group at the lower end of a row's exponents, all others as large as can be: each border between the
    // i32 and the i64 paths is met with full accumulators.
    let groups = 161;
    let code = |g: usize, range: u8| if g == 1 { 0x77 - 8 * range } else { 0x77 };
    let scales = (0..14u8).flat_map(|range| (0..groups).map(move |g| code(g, range))).collect::<Vec<u8>>();
    let mut next = scales.iter();
    let case = Case::new(14, groups * GROUP, 1.0, || 0x77, || *next.next().expect("enough"));
    for range in 0..14 {
        for sign in [1.0, -1.0] {
            let row = (0..groups * GROUP).map(|i| sign * 6.0 * fp8::decode(code(i / GROUP, range)));
            let row: Vec<f32> = row.collect();
            check(&case, &row.repeat(5), 1.0);
        }
    }
}

#[test]
fn one_large_group_among_small_ones_keeps_every_unit() {
    // The largest and the smallest scale in one row: nothing is lost under the large term.
    let mut n = 0;
    let scale = || {
        n += 1;
        if n % 7 == 0 { 0x7E } else { 1 + n as u8 % 3 }
    };
    let case = Case::new(9, 640, 1.0, noise(5), scale);
    let mut x = values(5 * 640, 3, noise(6));
    for (i, x) in x.iter_mut().enumerate() {
        *x *= if (i / GROUP).is_multiple_of(5) { 2600.0 } else { 0.01 };
    }
    check(&case, &x, 1.0);
}

#[test]
fn every_pair_of_scales() {
    // All 127 x 127 pairs, one group each, with the largest halves.
    let mut scales = 0..127u8;
    let case = Case::new(127, GROUP, 0.5, || 0xF7, || scales.next().expect("127"));
    let x: Vec<f32> = (0..127u8)
        .flat_map(|s| (0..GROUP).map(move |i| fp8::decode(s) * if i % 3 == 0 { 6.0 } else { -6.0 }))
        .collect();
    let (input, _) = W4a4Input::quantise(&x, GROUP, 1.0);
    assert_eq!(input.scales, (0..127).collect::<Vec<u8>>());
    check(&case, &x, 1.0);
}

#[test]
fn codes_that_are_no_scale_count_as_zero() {
    let mut scales = 0..=255u8;
    let case = Case::new(16, 256, 1.0, noise(9), || scales.next().expect("256"));
    let x = values(2 * 256, 2, noise(10));
    let (input, _) = W4a4Input::quantise(&x, 256, 0.01);
    let law = case.law(&x, 0.01);
    for (name, y) in forms(&case.matrix(), &input) {
        assert_eq!(law, y, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn rows_are_quantised_as_the_law_says(groups in 1usize..40, spread in 0u8..60, a in -60i32..30, seed: u64) {
        let cols = groups * GROUP;
        let mut x = values(3 * cols, spread, noise(seed));
        // Ends of the codes' intervals, and a value no group can scale.
        let ends = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -0.0];
        x[..GROUP].copy_from_slice(&ends);
        x[cols] = 3e38;
        let a = 2f32.powi(a);
        let (input, bad) = W4a4Input::quantise(&x, cols, a);
        prop_assert!(bad.is_empty());
        let mut row = QuantisedRow::default();
        for (r, x) in x.chunks_exact(cols).enumerate() {
            nvfp4::quantise_row(x, a, &mut row).expect("finite");
            prop_assert_eq!(&row, &input.natural(r));
        }
    }
}

#[test]
fn bad_rows_are_named_and_zero_and_touch_no_other() {
    let cols = 48;
    let case = Case::new(5, cols, 1.0, noise(3), || 0x38);
    let good = values(4 * cols, 2, noise(4));
    let mut x = good.clone();
    (x[cols + 47], x[3 * cols]) = (f32::NAN, f32::NEG_INFINITY);
    let (input, bad) = W4a4Input::quantise(&x, cols, 0.1);
    assert_eq!(bad, [1, 3]);
    let law = case.law(&good, 0.1);
    for (name, y) in forms(&case.matrix(), &input) {
        assert_eq!(law[..5], y[..5], "{name}");
        assert_eq!(law[10..15], y[10..15], "{name}");
        assert_eq!(y[5..10], [0; 5], "{name}");
    }
    for a in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(W4a4Input::quantise(&good, cols, a).1, [0, 1, 2, 3]);
    }
}

#[test]
fn other_matrices_are_left_alone() {
    let w = Matrix::new(1, 16, Storage::F32(Arc::new(vec![0u8; 64]))).expect("fits");
    let (x, _) = W4a4Input::quantise(&[1.0; 16], 16, 1.0);
    let mut y = [7.0];
    assert!(!product_w4a4(Level::detect(), &w, &x, &mut y));
    assert_eq!(y, [7.0]);
}
