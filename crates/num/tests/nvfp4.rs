//! The W4A4 quantiser's edges, and its exact dot against rational arithmetic.

use castiron_num::nvfp4::{self, NonFinite, QuantisedRow};
use castiron_num::{fp4, fp8};
use proptest::prelude::*;

/// The dot from the definition, over codes: values as fractions with denominators 2 and 512, summed in `i128`.
fn rational(w: &[u8], ws: &[u8], x: &[u8], xs: &[u8]) -> i128 {
    let scale = |s: u8| (f64::from(fp8::decode(s)) * 512.0) as i128;
    let half = |c: u8| (f64::from(fp4::decode(c)) * 2.0) as i128;
    (0..w.len()).map(|k| half(w[k]) * half(x[k]) * scale(ws[k / 16]) * scale(xs[k / 16])).sum()
}

fn dot(w: &[u8], ws: &[u8], x: &[u8], xs: &[u8]) -> i64 {
    let halves = |c: &[u8]| c.iter().map(|&c| fp4::halves(c)).collect::<Vec<_>>();
    let units = |s: &[u8]| s.iter().map(|&s| fp8::scale_units(s).expect("a scale")).collect::<Vec<_>>();
    nvfp4::dot_exact(&halves(w), &units(ws), &halves(x), &units(xs))
}

/// An integer rounded to 24 significant bits, ties to even, by integer arithmetic.
fn nearest_f32(v: i64) -> f32 {
    let magnitude = i128::from(v).abs();
    let drop = (128 - magnitude.leading_zeros()).saturating_sub(24);
    let (quotient, rest, half) = (magnitude >> drop, magnitude & ((1 << drop) - 1), (1i128 << drop) / 2);
    let up = drop > 0 && (rest > half || rest == half && quotient & 1 == 1);
    let value = (quotient + i128::from(up)) as f32 * 2f32.powi(drop as i32);
    if v < 0 { -value } else { value }
}

/// Codes and scales of a pair of rows of `groups` groups.
fn rows(groups: std::ops::Range<usize>) -> impl Strategy<Value = [Vec<u8>; 4]> {
    let codes = |n| prop::collection::vec(0u8..16, n * 16);
    let scales = |n| prop::collection::vec(0u8..0x7F, n);
    groups
        .prop_flat_map(move |n| (codes(n), scales(n), codes(n), scales(n)).prop_map(|t| [t.0, t.1, t.2, t.3]))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn dot_is_exact_and_orderless(row in rows(0..161), rotate: usize) {
        let [w, ws, x, xs] = row;
        let sum = dot(&w, &ws, &x, &xs);
        prop_assert_eq!(i128::from(sum), rational(&w, &ws, &x, &xs));
        let turn = rotate % (ws.len() + 1);
        let (mut w2, mut ws2, mut x2, mut xs2) = (w.clone(), ws.clone(), x.clone(), xs.clone());
        w2.rotate_left(turn.min(ws.len()) * 16);
        x2.rotate_left(turn.min(ws.len()) * 16);
        ws2.rotate_left(turn);
        xs2.rotate_left(turn);
        prop_assert_eq!(sum, dot(&w2, &ws2, &x2, &xs2));
        let cut = turn * 16;
        let parts = dot(&w[..cut], &ws[..turn], &x[..cut], &xs[..turn])
            + dot(&w[cut..], &ws[turn..], &x[cut..], &xs[turn..]);
        prop_assert_eq!(sum, parts);
    }

    #[test]
    fn quantiser_follows_the_rule(x in prop::array::uniform16(-1e4f32..1e4), a in 1e-6f32..10.0) {
        let (scale, codes) = nvfp4::quantise_group(&x, a).expect("finite");
        let amax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        prop_assert_eq!(scale, fp8::encode(f32::min(448.0, (amax / 6.0) / a)));
        let step = fp8::decode(scale) * a;
        for (v, c) in x.into_iter().zip(codes) {
            let expected = if step == 0.0 { 0 } else { fp4::encode((v / step).clamp(-6.0, 6.0)) };
            prop_assert_eq!(c, expected);
        }
    }

    #[test]
    fn finish_rounds_in_the_declared_order(sum: i64, shift in 0u32..63, a in 1e-6f32..1.0, ws2 in 1e-6f32..1.0) {
        let sum = sum >> shift;
        let expected = (nearest_f32(sum) / 1_048_576.0 * a) * ws2;
        prop_assert_eq!(nvfp4::finish(sum, a, ws2).to_bits(), expected.to_bits());
    }
}

#[test]
fn extremes_fit() {
    let (codes, scales) = (vec![15u8; 160 * 16], vec![0x7Eu8; 160]);
    let sum = dot(&codes, &scales, &codes, &scales);
    assert_eq!(i128::from(sum), rational(&codes, &scales, &codes, &scales));
    assert_eq!(sum, 160 * 2304 * 229_376 * 229_376);
    assert!(sum.ilog2() < 55);
}

#[test]
fn edges_of_the_quantiser() {
    let group = |v: f32| {
        let mut g = [0.0; 16];
        g[3] = v;
        g
    };
    assert_eq!(nvfp4::quantise_group(&group(0.0), 1.0), Ok((0, [0; 16])));
    // The scale rounds to zero: 2^-11 is below half of 2^-9.
    assert_eq!(nvfp4::quantise_group(&group(6.0 / 2048.0), 1.0), Ok((0, [0; 16])));
    // A too small: the scale saturates and the value clips.
    let (scale, codes) = nvfp4::quantise_group(&group(-1e6), 1e-3).expect("finite");
    assert_eq!((scale, codes[3]), (0x7E, 15));
    // An overflowing quotient saturates too.
    assert_eq!(nvfp4::quantise_group(&group(f32::MAX), f32::MIN_POSITIVE).map(|q| q.0), Ok(0x7E));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert_eq!(nvfp4::quantise_group(&group(bad), 1.0), Err(NonFinite));
        assert_eq!(nvfp4::quantise_group(&group(1.0), bad), Err(NonFinite));
        let mut row = QuantisedRow::default();
        let x: Vec<f32> = group(1.0).into_iter().chain(group(bad)).collect();
        assert_eq!(nvfp4::quantise_row(&x, 1.0, &mut row), Err(NonFinite));
        assert_eq!(row, QuantisedRow::default(), "nothing of a row in error is left");
    }
    assert_eq!(nvfp4::quantise_group(&group(1.0), 0.0), Err(NonFinite));
}

#[test]
fn every_weight_is_exact_in_bf16() {
    for (code, scale) in (0..16u8).flat_map(|c| (0..0x7Fu8).map(move |s| (c, s))) {
        let value = nvfp4::dequantise(code, scale);
        assert_eq!(f64::from(value), f64::from(fp4::decode(code)) * f64::from(fp8::decode(scale)));
        assert_eq!(castiron_num::bf16::round(value).to_bits(), value.to_bits());
    }
}
