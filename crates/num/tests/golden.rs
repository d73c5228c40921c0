//! The golden unit file: formats, block dequantisation, W4A4 and W4A16.

mod common;

use castiron_num::{bf16, dot, fp4, fp8, nvfp4};
use common::{bytes, floats, golden};
use nvfp4::QuantisedRow;

/// Rows of activations, K and N of the `w4a4.*` and `w4a16.*` tensors.
const ROWS: usize = 5;
const K: usize = 64;
const N: usize = 48;

fn assert_same(ours: impl IntoIterator<Item = f32>, golden: &[f32], what: &str) {
    let ours: Vec<f32> = ours.into_iter().collect();
    assert_eq!(ours.len(), golden.len(), "{what}");
    for (i, (a, b)) in ours.iter().zip(golden).enumerate() {
        assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{what}[{i}]: {a:e}, golden {b:e}");
    }
}

#[test]
fn formats() {
    let file = golden();
    assert_same((0..=255).map(fp8::decode), &floats(&file, "e4m3.decode"), "e4m3.decode");
    let encoded: Vec<u8> = floats(&file, "e4m3.encode.in").into_iter().map(fp8::encode).collect();
    assert_eq!(encoded, bytes(&file, "e4m3.encode.out"));
    let encoded: Vec<u8> = floats(&file, "e2m1.encode.in").into_iter().map(fp4::encode).collect();
    assert_eq!(encoded, bytes(&file, "e2m1.encode.out"));
}

#[test]
fn fp8_blocks_with_ragged_edges() {
    let file = golden();
    let (codes, scales) = (bytes(&file, "fp8block.weight"), floats(&file, "fp8block.weight_scale_inv"));
    let value = |i: usize| fp8::decode(codes[i]) * scales[i / 300 / 128 * 3 + i % 300 / 128];
    assert_same((0..200 * 300).map(value), &floats(&file, "fp8block.w_dequant"), "fp8block.w_dequant");
}

/// The golden weight as E2M1 codes (one a byte).
fn weight_codes(file: &[u8]) -> Vec<u8> {
    bytes(file, "w4a4.weight").into_iter().flat_map(|b| [b & 15, b >> 4]).collect()
}

#[test]
fn w4a4_quantiser() {
    let file = golden();
    let (x, a) = (floats(&file, "w4a4.x"), floats(&file, "w4a4.input_scale")[0]);
    let groups: Vec<_> =
        x.as_chunks::<16>().0.iter().map(|g| nvfp4::quantise_group(g, a).expect("finite")).collect();
    let scales: Vec<u8> = groups.iter().map(|g| g.0).collect();
    let codes: Vec<u8> = groups.iter().flat_map(|g| g.1).collect();
    assert_eq!(scales, bytes(&file, "w4a4.x_block_scale"));
    assert_eq!(codes, bytes(&file, "w4a4.x_codes"));
    let value = |i: usize| nvfp4::dequantise(codes[i], scales[i / 16]) * a;
    assert_same((0..x.len()).map(value), &floats(&file, "w4a4.x_dequant"), "w4a4.x_dequant");

    let mut row = QuantisedRow::default();
    for (r, values) in x.chunks(K).enumerate() {
        nvfp4::quantise_row(values, a, &mut row).expect("finite");
        assert!(row.codes.iter().zip(&codes[r * K..]).all(|(&h, &c)| h == fp4::halves(c)));
        assert!(row.scales.iter().zip(&scales[r * 4..]).all(|(&n, &s)| Some(n) == fp8::scale_units(s)));
    }
}

#[test]
fn nvfp4_weights() {
    let file = golden();
    let (codes, scales) = (weight_codes(&file), bytes(&file, "w4a4.weight_scale"));
    let ws2 = floats(&file, "w4a4.weight_scale_2")[0];
    let exact: Vec<f32> = (0..N * K).map(|i| nvfp4::dequantise(codes[i], scales[i / 16])).collect();
    assert!(exact.iter().all(|&v| bf16::round(v).to_bits() == v.to_bits()), "exact in bfloat16");
    assert_same(exact.iter().map(|v| v * ws2), &floats(&file, "w4a4.w_dequant"), "w4a4.w_dequant");
    let mut halves = Vec::new();
    nvfp4::unpack_halves(&bytes(&file, "w4a4.weight"), &mut halves);
    assert!(halves.iter().zip(&codes).all(|(&h, &c)| h == fp4::halves(c)));
}

/// |golden - ours| for a golden summed in f32 in an unknown order: K roundings of the absolute sum, and ours.
fn assert_close(ours: f32, golden: f32, terms: impl Iterator<Item = f64>, what: &str) {
    let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, m), t| (s + t, m + t.abs()));
    let ulp = 2f64.powi(-24);
    assert!(
        (f64::from(golden) - sum).abs() <= (K + 3) as f64 * ulp * magnitude,
        "{what}: golden {golden}, {sum}"
    );
    assert!((f64::from(ours) - sum).abs() <= (K + 3) as f64 * ulp * magnitude, "{what}: ours {ours}, {sum}");
}

#[test]
fn w4a4_products() {
    let file = golden();
    let (x, a) = (floats(&file, "w4a4.x"), floats(&file, "w4a4.input_scale")[0]);
    let ws2 = floats(&file, "w4a4.weight_scale_2")[0];
    let scale = |s: &u8| fp8::scale_units(*s).expect("a scale");
    let w_scales: Vec<u32> = bytes(&file, "w4a4.weight_scale").iter().map(scale).collect();
    let w_codes: Vec<i8> = weight_codes(&file).into_iter().map(fp4::halves).collect();
    let y = floats(&file, "w4a4.y");
    let mut row = QuantisedRow::default();
    for r in 0..ROWS {
        nvfp4::quantise_row(&x[r * K..][..K], a, &mut row).expect("finite");
        for n in 0..N {
            let (w, s) = (&w_codes[n * K..][..K], &w_scales[n * 4..][..4]);
            let sum = nvfp4::dot_exact(w, s, &row.codes, &row.scales);
            let unit = 2f64.powi(-20) * f64::from(a) * f64::from(ws2);
            let term = |k: usize| {
                let codes = f64::from(w[k]) * f64::from(row.codes[k]);
                codes * f64::from(s[k / 16]) * f64::from(row.scales[k / 16]) * unit
            };
            let ours = nvfp4::finish(sum, a, ws2);
            assert_close(ours, y[r * N + n], (0..K).map(term), "w4a4.y");
            let exact = sum as f64 * unit;
            assert!(
                (f64::from(ours) - exact).abs() <= 3.01 * 2f64.powi(-24) * exact.abs(),
                "three roundings"
            );
        }
    }
}

#[test]
fn w4a16_products() {
    let file = golden();
    let (x, y) = (floats(&file, "w4a4.x"), floats(&file, "w4a16.y"));
    let (codes, scales) = (weight_codes(&file), bytes(&file, "w4a4.weight_scale"));
    let ws2 = floats(&file, "w4a4.weight_scale_2")[0];
    let w: Vec<f32> = (0..N * K).map(|i| nvfp4::dequantise(codes[i], scales[i / 16])).collect();
    for r in 0..ROWS {
        for n in 0..N {
            let (wn, xr) = (&w[n * K..][..K], &x[r * K..][..K]);
            let terms = wn.iter().zip(xr).map(|(&a, &b)| f64::from(a) * f64::from(b) * f64::from(ws2));
            assert_close(dot::dot32(wn, xr) * ws2, y[r * N + n], terms, "w4a16.y");
        }
    }
}
