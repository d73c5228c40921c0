//! `dot32` against a second form, and the properties that sections 4 and 4a of the law promise.

use castiron_num::dot::{dot32, fold32};
use proptest::prelude::*;

/// The order written the other way round: for every lane its list of indices, then a recursive fold.
fn second_form(w: &[f32], x: &[f32]) -> f32 {
    fn fold(sums: &[f32]) -> f32 {
        if let [one] = sums { *one } else { fold(&sums[..sums.len() / 2]) + fold(&sums[sums.len() / 2..]) }
    }
    let lane = |l: usize| {
        let own = (0..w.len()).filter(|k| k % 256 / 8 == l);
        own.fold(0.0f32, |acc, k| f32::mul_add(w[k], x[k], acc))
    };
    fold(&(0..32).map(lane).collect::<Vec<_>>()) + 0.0
}

/// Deterministic values over a wide range of exponents.
fn values(n: usize, seed: u32) -> Vec<f32> {
    let word = |i: usize| castiron_num::philox::philox4x32_10([i as u32, seed, 0, 0], [7, 9])[0];
    let value = |u: u32| (u as i32) as f32 * 2f32.powi((u % 23) as i32 - 40);
    (0..n).map(|i| value(word(i))).collect()
}

#[test]
fn every_tail_matches_the_second_form() {
    for k in 0..=600 {
        let (w, x) = (values(k, 1), values(k, 2));
        assert_eq!(dot32(&w, &x).to_bits(), second_form(&w, &x).to_bits(), "K = {k}");
    }
}

#[test]
fn the_order_is_not_another() {
    let (w, x) = (values(600, 1), values(600, 2));
    let chain = w.iter().zip(&x).fold(0.0f32, |acc, (a, b)| a.mul_add(*b, acc));
    let products = w.iter().zip(&x).fold(0.0f32, |acc, (a, b)| acc + a * b);
    assert_ne!(dot32(&w, &x).to_bits(), chain.to_bits());
    assert_ne!(dot32(&w, &x).to_bits(), products.to_bits());
}

#[test]
fn fold_joins_neighbours_first() {
    // Neighbours cancel exactly; a fold that starts with lanes 16 apart would lose the 2 in 1e30.
    let mut lanes = [0.0; 32];
    (lanes[0], lanes[1], lanes[2], lanes[16]) = (1e30, -1e30, 1.0, 2.0);
    assert_eq!(fold32(lanes), 3.0);
    assert_eq!(fold32([-0.0; 32]).to_bits(), 0);
}

#[test]
fn an_underflow_below_zero_is_plus_zero() {
    let tiny = f32::from_bits(1);
    for k in [1, 8, 255, 256, 257] {
        assert_eq!(dot32(&vec![tiny; k], &vec![-tiny; k]).to_bits(), 0);
    }
    assert_eq!(dot32(&[], &[]).to_bits(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn padding_is_invisible(pairs in prop::collection::vec((any::<f32>(), any::<f32>()), 0..300), pad in 0usize..300) {
        let (mut w, mut x): (Vec<f32>, Vec<f32>) =
            pairs.into_iter().map(|(a, b)| (a * 1e-20, b * 1e-10)).filter(|p| (p.0 * p.1).is_finite()).unzip();
        let before = dot32(&w, &x).to_bits();
        prop_assert_ne!(before, 0x8000_0000);
        w.resize(w.len() + pad, 0.0);
        x.resize(x.len() + pad, 0.0);
        prop_assert_eq!(before, dot32(&w, &x).to_bits());
    }
}
