//! The Hopper model against an exact formulation, red variants of it, and the split of K.

use castiron_num::hopper::{STEP, mma_k16, mma16, mma16_fp8_block, split_parts};
use castiron_num::philox::philox4x32_10;
use castiron_num::{bf16, fp8};

/// What may differ in a wrong model.
#[derive(Clone, Copy)]
struct Rule {
    bits: i32,
    floor: bool,
    nearest: bool,
}

const LAW: Rule = Rule { bits: 25, floor: false, nearest: false };

/// Exponent of the leading bit as the unit sees it: subnormals keep the smallest normal exponent.
fn exponent(v: f32) -> i32 {
    if v.abs() < f32::MIN_POSITIVE { -126 } else { ((v.to_bits() >> 23) & 0xFF) as i32 - 127 }
}

/// The model in binary64: products are exact, `t / 2^(emax - bits)` truncated is an exact integer.
fn exact(a: &[u16; STEP], b: &[u16; STEP], c: f32, rule: Rule) -> f32 {
    let pairs = a.iter().zip(b).map(|(&x, &y)| (bf16::from_bits(x), bf16::from_bits(y)));
    let mut terms: Vec<(f64, i32)> =
        pairs.map(|(x, y)| (f64::from(x) * f64::from(y), exponent(x) + exponent(y))).collect();
    terms.push((f64::from(c), exponent(c)));
    terms.retain(|t| t.0 != 0.0);
    let Some(largest) = terms.iter().map(|t| t.1).max() else { return 0.0 };
    let unit = 2f64.powi(rule.bits - largest);
    let whole = |v: f64| if rule.floor { (v * unit).floor() } else { (v * unit).trunc() };
    let sum: i128 = terms.iter().map(|t| whole(t.0) as i128).sum();
    let value = sum as f64 / unit;
    let nearest = value as f32;
    if rule.nearest || f64::from(nearest).abs() <= value.abs() { nearest } else { toward_zero(nearest) }
}

fn toward_zero(v: f32) -> f32 {
    f32::from_bits(v.to_bits() - 1)
}

/// Random operands with a spread of exponents, as the measurement on the device used.
fn operands(i: u32, spread: u32) -> ([u16; STEP], [u16; STEP], f32) {
    let value = |j: u32| {
        let w = philox4x32_10([i, j, spread, 0], [1, 2]);
        let shift = if spread == 0 { 0 } else { (w[1] % (2 * spread + 1)) as i32 - spread as i32 };
        (w[0] as i32) as f32 * 2f32.powi(shift - 31)
    };
    let a = std::array::from_fn(|j| bf16::to_bits(value(j as u32)));
    let b = std::array::from_fn(|j| bf16::to_bits(value(16 + j as u32)));
    (a, b, if spread == 3 { 0.0 } else { value(32) })
}

#[test]
fn model_is_exact_and_red_variants_are_not() {
    let wrong = [
        Rule { bits: 24, ..LAW },
        Rule { bits: 26, ..LAW },
        Rule { floor: true, ..LAW },
        Rule { nearest: true, ..LAW },
    ];
    let mut differ = [0; 4];
    for (i, spread) in (0..20_000u32).flat_map(|i| [0, 3, 8, 20].map(|s| (i, s))) {
        let (a, b, c) = operands(i, spread);
        let ours = mma_k16(&a, &b, c).to_bits();
        assert_eq!(ours, exact(&a, &b, c, LAW).to_bits(), "case {i}, spread {spread}");
        for (count, rule) in differ.iter_mut().zip(wrong) {
            *count += u32::from(ours != exact(&a, &b, c, rule).to_bits());
        }
    }
    assert!(differ.iter().all(|&n| n > 1000), "{differ:?}");
}

#[test]
fn a_product_is_not_normalised_before_alignment() {
    // 1.5 * 1.5 = 2.25 has exponent 0 here; were it 1, the last bit kept would be 2^-24 and c would vanish.
    let one = |v: f32| {
        let mut values = [0; STEP];
        values[0] = bf16::to_bits(v);
        values
    };
    let mut a = one(1.5);
    let mut b = one(1.5);
    (a[1], b[1]) = (bf16::to_bits(1.5), bf16::to_bits(-1.5));
    assert_eq!(mma_k16(&a, &b, 2f32.powi(-25)), 2f32.powi(-25));
    assert_eq!(mma_k16(&a, &b, 2f32.powi(-26)), 0.0);
}

#[test]
fn zeros_subnormals_and_specials_as_assumed() {
    let zero = [0u16; STEP];
    let minus = [0x8000u16; STEP];
    assert_eq!(mma_k16(&zero, &minus, -0.0).to_bits(), 0);
    assert_eq!(mma_k16(&zero, &zero, 1.5), 1.5);
    // A zero product with a huge factor does not move the alignment.
    let mut huge = zero;
    huge[0] = bf16::to_bits(1e38);
    assert_eq!(mma_k16(&huge, &zero, 1e-30), 1e-30);
    let tiny = f32::from_bits(1);
    assert_eq!(mma_k16(&zero, &zero, tiny).to_bits(), 1);
    let with = |v: f32| {
        let mut values = zero;
        values[5] = bf16::to_bits(v);
        values
    };
    assert_eq!(mma_k16(&with(f32::INFINITY), &with(1.0), 0.0), f32::INFINITY);
    assert_eq!(mma_k16(&with(f32::INFINITY), &with(-1.0), 0.0), f32::NEG_INFINITY);
    assert_eq!(mma_k16(&zero, &zero, f32::NEG_INFINITY), f32::NEG_INFINITY);
    for (a, b, c) in [
        (f32::INFINITY, 0.0, 1.0),
        (f32::NAN, 1.0, 1.0),
        (f32::INFINITY, 1.0, f32::NEG_INFINITY),
        (1.0, 1.0, f32::NAN),
    ] {
        assert_eq!(mma_k16(&with(a), &with(b), c).to_bits(), 0x7FC0_0000);
    }
    assert_eq!(mma_k16(&with(2f32.powi(100)), &with(2f32.powi(100)), 0.0), f32::INFINITY);
    // Truncation to the subnormal grid.
    let c = f32::from_bits(0x0080_0001);
    assert_eq!(mma_k16(&with(2f32.powi(-100)), &with(-(2f32.powi(-27))), c).to_bits(), 0x0040_0001);
}

#[test]
fn random_subnormals_match_the_exact_form() {
    for i in 0..20_000u32 {
        let (a, b, c) = operands(i, 8);
        let scale = |v: &[u16; STEP]| v.map(|v| bf16::to_bits(bf16::from_bits(v) * 2f32.powi(-65)));
        let (a, b, c) = (scale(&a), scale(&b), c * 2f32.powi(-130));
        let (ours, theirs) = (mma_k16(&a, &b, c), exact(&a, &b, c, LAW));
        assert!(
            ours.to_bits() == theirs.to_bits() || ours == 0.0 && theirs == 0.0,
            "{i}: {ours:e} {theirs:e}"
        );
    }
}

/// A row of bfloat16 values.
fn row(n: usize, seed: u32) -> Vec<u16> {
    let word = |i: usize| philox4x32_10([i as u32, seed, 5, 0], [3, 4])[0];
    (0..n).map(|i| bf16::to_bits((word(i) as i32) as f32 * 2f32.powi(-31))).collect()
}

#[test]
fn parts_by_the_table() {
    let cases = [(1, 16), (1023, 16), (1024, 4), (8191, 4), (8192, 1), (248_320, 1)];
    assert!(cases.iter().all(|&(n, s)| split_parts(n, 2560) == s));
}

#[test]
fn mma16_follows_the_split() {
    for k in [0, 1, 15, 16, 17, 64, 100, 640, 2560] {
        let (w, x) = (row(k, 1), row(k, 2));
        let (mut wp, mut xp) = (w.clone(), x.clone());
        wp.resize(k.div_ceil(16) * 16, 0);
        xp.resize(k.div_ceil(16) * 16, 0);
        let steps: Vec<_> = wp.as_chunks::<16>().0.iter().zip(xp.as_chunks::<16>().0).collect();
        for n in [8192, 1024, 640] {
            let s = split_parts(n, k);
            let mut expected = 0.0f32;
            for p in 0..s {
                let part = &steps[p * steps.len() / s..(p + 1) * steps.len() / s];
                expected += part.iter().fold(0.0, |acc, (a, b)| mma_k16(a, b, acc));
            }
            assert_eq!(mma16(&w, &x, n).to_bits(), expected.to_bits(), "K {k}, N {n}");
        }
    }
    let (w, x) = (row(2560, 1), row(2560, 2));
    assert_ne!(mma16(&w, &x, 8192), mma16(&w, &x, 640), "the split is visible");
}

#[test]
fn fp8_blocks_are_cut_at_block_boundaries() {
    for k in [128, 300, 640, 2560] {
        let codes: Vec<u8> = row(k, 3).into_iter().map(|v| fp8::encode(bf16::from_bits(v))).collect();
        let scales: Vec<f32> = (0..k.div_ceil(128)).map(|i| 0.01 + 0.003 * i as f32).collect();
        let (w, x): (Vec<u16>, _) =
            (codes.iter().map(|&c| bf16::to_bits(fp8::decode(c))).collect(), row(k, 4));
        // N = 8192 keeps one part, so each block is one plain chain.
        let chain = |b: usize| {
            let r = b * 128..((b + 1) * 128).min(k);
            mma16(&w[r.clone()], &x[r], 8192)
        };
        for n in [8192, 2560, 640] {
            let (s, blocks) = (split_parts(n, k), scales.len());
            let mut expected = 0.0f32;
            for p in 0..s {
                let part = p * blocks / s..(p + 1) * blocks / s;
                expected += part.fold(0.0f32, |acc, b| chain(b).mul_add(scales[b], acc));
            }
            assert_eq!(mma16_fp8_block(&codes, &scales, &x, n).to_bits(), expected.to_bits(), "K {k}, N {n}");
        }
    }
}
