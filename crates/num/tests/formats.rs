//! bfloat16, E4M3FN and E2M1: every code, every rounding boundary, and an independent nearest-value search.

use castiron_num::{bf16, fp4, fp8};
use proptest::prelude::*;

/// The value of a small float written from the definition: `(-1)^s * 2^e * fraction` in binary64.
fn small_float(code: u8, exponent_bits: u32, fraction_bits: u32, bias: i32) -> f64 {
    let fraction = f64::from(code & ((1 << fraction_bits) - 1)) / f64::from(1 << fraction_bits);
    let field = i32::from(code >> fraction_bits) & ((1 << exponent_bits) - 1);
    let negative = code >> (fraction_bits + exponent_bits) & 1 == 1;
    let magnitude =
        if field == 0 { fraction * 2f64.powi(1 - bias) } else { (1.0 + fraction) * 2f64.powi(field - bias) };
    if negative { -magnitude } else { magnitude }
}

/// Nearest of `values[i]` (rising, code = index) to |x|, ties to the even code.
fn nearest(values: &[f64], x: f32) -> u8 {
    // Far beyond every value the differences would all round to x.
    let x = f64::from(x).abs().min(1e6);
    let distance = |i: usize| (values[i] - x).abs();
    let mut best = 0;
    for i in 1..values.len() {
        if distance(i) < distance(best) || (distance(i) == distance(best) && i % 2 == 0) {
            best = i;
        }
    }
    best as u8
}

fn e4m3_values() -> Vec<f64> {
    (0..0x7F).map(|c| small_float(c, 4, 3, 7)).collect()
}

fn e2m1_values() -> Vec<f64> {
    (0..8).map(|c| small_float(c, 2, 1, 1)).collect()
}

fn e4m3_expected(x: f32) -> u8 {
    nearest(&e4m3_values(), x) | if x.is_sign_negative() { 0x80 } else { 0 }
}

fn e2m1_expected(x: f32) -> u8 {
    let code = nearest(&e2m1_values(), x);
    if x < 0.0 && code != 0 { code | 8 } else { code }
}

/// Each value and each midpoint of neighbours, with the f32 on both sides, in both signs.
fn boundaries(values: &[f64]) -> Vec<f32> {
    let mids = values.windows(2).map(|p| (p[0] + p[1]) / 2.0);
    let points = values.iter().copied().chain(mids).chain([1e-30, 1e30]).map(|v| v as f32);
    points.flat_map(|p| [p, p.next_up(), p.next_down()]).flat_map(|p| [p, -p]).collect()
}

#[test]
fn bf16_decodes_every_code() {
    for code in 0..=u16::MAX {
        let (ours, theirs) = (bf16::from_bits(code), half::bf16::from_bits(code).to_f32());
        assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{code:#06x}");
        let back = bf16::to_bits(ours);
        assert_eq!(back, if ours.is_nan() { bf16::NAN_BITS } else { code });
    }
}

#[test]
fn bf16_rounds_every_boundary() {
    for high in 0..=u16::MAX {
        for low in [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
            let x = f32::from_bits(u32::from(high) << 16 | low);
            let expected = if x.is_nan() { 0x7FC0 } else { half::bf16::from_f32(x).to_bits() };
            assert_eq!(bf16::to_bits(x), expected, "{:#010x}", x.to_bits());
            assert_eq!(bf16::round(x).to_bits(), u32::from(expected) << 16);
        }
    }
}

#[test]
fn e4m3_decodes_every_code() {
    for code in 0..=255u8 {
        let value = fp8::decode(code);
        if code & 0x7F == 0x7F {
            assert_eq!(value.to_bits(), 0x7FC0_0000);
            assert_eq!(fp8::encode(f32::from_bits(u32::from(code) << 24 | 0xFF_FFFF)), code);
            assert_eq!(fp8::scale_units(code), None);
            continue;
        }
        assert_eq!(f64::from(value).to_bits(), small_float(code, 4, 3, 7).to_bits(), "{code:#04x}");
        assert_eq!(fp8::encode(value), code);
        let units = (value >= 0.0).then(|| (f64::from(value) * 512.0) as u32);
        assert_eq!(fp8::scale_units(code), units);
    }
    assert_eq!(fp8::scale_units(0x7E), Some(229_376));
}

#[test]
fn e4m3_encodes_every_boundary() {
    for x in boundaries(&e4m3_values()) {
        assert_eq!(fp8::encode(x), e4m3_expected(x), "{x:e}");
    }
    for (x, code) in [(f32::INFINITY, 0x7E), (f32::NEG_INFINITY, 0xFE), (f32::MAX, 0x7E), (-0.0, 0x80)] {
        assert_eq!(fp8::encode(x), code);
    }
}

#[test]
fn e2m1_decodes_and_encodes() {
    for code in 0..=255u8 {
        let value = fp4::decode(code);
        assert_eq!(f64::from(value).to_bits(), small_float(code & 15, 2, 1, 1).to_bits());
        assert_eq!(fp4::encode(value), if code & 15 == 8 { 0 } else { code & 15 });
        assert_eq!(f32::from(fp4::halves(code)), 2.0 * value);
    }
    for x in boundaries(&e2m1_values()) {
        assert_eq!(fp4::encode(x), e2m1_expected(x), "{x:e}");
    }
    assert_eq!(
        (fp4::encode(f32::INFINITY), fp4::encode(f32::NEG_INFINITY), fp4::encode(f32::NAN)),
        (7, 15, 7)
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn encoders_take_the_nearest(bits: u32, spread in -12.0f32..12.0, unit in -1.0f32..1.0) {
        for x in [f32::from_bits(bits), unit * spread.exp2(), unit * 8.0] {
            if !x.is_nan() {
                prop_assert_eq!(fp8::encode(x), e4m3_expected(x));
                prop_assert_eq!(fp4::encode(x), e2m1_expected(x));
                prop_assert_eq!(bf16::to_bits(x), half::bf16::from_f32(x).to_bits());
            }
        }
    }
}
