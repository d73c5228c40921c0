//! The canonical orders of the law, in scalar form.
//!
//! Each function here *is* the definition of its quantity (`docs/numerics.md`, sections 4 and 4a): one
//! declared sequence of binary32 additions, multiplications, divisions, square roots and fused
//! multiply-adds. Nothing may reassociate them. The bodies are `#[inline(always)]`, so that a caller
//! compiled for a wider instruction set can run the very same text: IEEE operations give the same bits
//! there, and each output element keeps its own chain.

use std::cmp::Ordering;

use crate::dot::dot32;
use crate::math;

/// `1 / sqrt(mean(x^2) + eps)` with the sum of squares in `dot32` order.
#[inline(always)]
pub fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot32(x, x) / x.len() as f32 + eps).sqrt()
}

/// `1 / sqrt(sum(x^2) + eps)`: the l2 norm of a GDN head, eps on the sum.
#[inline(always)]
pub fn inverse_l2(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot32(x, x) + eps).sqrt()
}

/// Zero-centred RMS norm of `x` in `groups` equal contiguous groups: `(x * r) * (1 + w)`.
///
/// `x`, `w` and `out` have one length, a multiple of `groups`.
#[inline(always)]
pub fn norm_zero_centred(x: &[f32], w: &[f32], groups: usize, eps: f32, out: &mut [f32]) {
    let size = x.len() / groups;
    for ((x, w), out) in x.chunks_exact(size).zip(w.chunks_exact(size)).zip(out.chunks_exact_mut(size)) {
        let r = inverse_rms(x, eps);
        for ((o, &x), &w) in out.iter_mut().zip(x).zip(w) {
            *o = (x * r) * (1.0 + w);
        }
    }
}

/// The mean of `p` over rising pairs: neighbours are added pairwise, level by level, an odd last one
/// passes up unchanged; then one division by the count. `p` is used as scratch.
#[inline(always)]
pub fn pair_mean(p: &mut [f32]) -> f32 {
    let count = p.len();
    let mut n = count;
    while n > 1 {
        for i in 0..n / 2 {
            p[i] = p[2 * i] + p[2 * i + 1];
        }
        if n % 2 == 1 {
            p[n / 2] = p[n - 1];
        }
        n = n.div_ceil(2);
    }
    p[0] / count as f32
}

/// One causal depthwise convolution output for every channel: an `fma` chain from +0 over the taps,
/// oldest first.
///
/// `taps` is `[taps, channels]`; `input(j)` is the stored input row that tap `j` multiplies.
#[inline(always)]
pub fn conv_taps<'a>(taps: &[f32], input: impl Fn(usize) -> &'a [f32], out: &mut [f32]) {
    let channels = out.len();
    out.fill(0.0);
    for (j, taps) in taps.chunks_exact(channels).enumerate() {
        for ((o, &w), &x) in out.iter_mut().zip(taps).zip(input(j)) {
            *o = w.mul_add(x, *o);
        }
    }
}

/// `out[v] = sum_k h[k][v] * x[k]` in the order of a GDN read: four contiguous quarters of the key
/// index, each an `fma` chain from +0, folded `(p0 + p1) + (p2 + p3)`.
///
/// `h` is `[dk, dv]` with `dk = x.len()` and `dv = out.len()`; `scratch` holds `3 * dv` values.
#[inline(always)]
pub fn gdn_read(h: &[f32], x: &[f32], scratch: &mut [f32], out: &mut [f32]) {
    let (dk, dv) = (x.len(), out.len());
    let (p1, rest) = scratch.split_at_mut(dv);
    let (p2, p3) = rest.split_at_mut(dv);
    let p3 = &mut p3[..dv];
    for (p, part) in [&mut *out, &mut *p1, &mut *p2, &mut *p3].into_iter().enumerate() {
        part.fill(0.0);
        for k in p * dk / 4..(p + 1) * dk / 4 {
            let xk = x[k];
            for (acc, &hv) in part.iter_mut().zip(&h[k * dv..(k + 1) * dv]) {
                *acc = hv.mul_add(xk, *acc);
            }
        }
    }
    for v in 0..dv {
        out[v] = (out[v] + p1[v]) + (p2[v] + p3[v]);
    }
}

/// The state update of one GDN step of one value head, in place:
/// `H *= decay; delta = beta * (v - H^T k); H = fma(k, delta, H)`.
///
/// `h` is `[dk, dv]`, `decay = exp(g)`; `scratch` holds `4 * dv` values.
#[inline(always)]
pub fn gdn_update(h: &mut [f32], k: &[f32], v: &[f32], decay: f32, beta: f32, scratch: &mut [f32]) {
    let dv = v.len();
    for h in h.iter_mut() {
        *h *= decay;
    }
    let (delta, scratch) = scratch.split_at_mut(dv);
    gdn_read(h, k, scratch, delta);
    for (d, &v) in delta.iter_mut().zip(v) {
        *d = beta * (v - *d);
    }
    for (row, &k) in h.chunks_exact_mut(dv).zip(k) {
        for (h, &d) in row.iter_mut().zip(&*delta) {
            *h = k.mul_add(d, *h);
        }
    }
}

/// Selected tokens in one part of an attention sum.
pub const ATTENTION_PART: usize = 64;

/// Attention of one query head over `n` selected tokens in ascending token order.
///
/// `scores` holds `dot32(q, k) * scale` of each token, `values` is `[n, head_dim]`; `acc` is `head_dim` values
/// of scratch. Parts of 64 tokens with their own maximum and sum, merged under the global maximum in rising
/// part order.
#[inline(always)]
pub fn attend(scores: &[f32], values: &[f32], acc: &mut [f32], out: &mut [f32]) {
    let dim = out.len();
    let top = maximum(scores);
    let mut total = 0.0f32;
    out.fill(0.0);
    for (part, values) in scores.chunks(ATTENTION_PART).zip(values.chunks(ATTENTION_PART * dim)) {
        let m = maximum(part);
        let mut sum = 0.0f32;
        acc.fill(0.0);
        for (&s, v) in part.iter().zip(values.chunks_exact(dim)) {
            let e = math::exp(s - m);
            sum += e;
            for (a, &v) in acc.iter_mut().zip(v) {
                *a = e.mul_add(v, *a);
            }
        }
        let weight = math::exp(m - top);
        total = weight.mul_add(sum, total);
        for (o, &a) in out.iter_mut().zip(&*acc) {
            *o = weight.mul_add(a, *o);
        }
    }
    for o in out.iter_mut() {
        *o /= total;
    }
}

/// The maximum in rising order; a NaN anywhere gives NaN.
#[inline(always)]
fn maximum(x: &[f32]) -> f32 {
    let mut m = f32::NEG_INFINITY;
    for &x in x {
        m = if x > m || x.is_nan() { x } else { m };
    }
    m
}

/// The score of one pooled key from the dot products of a row's index queries with it: relu of each, added in
/// rising head order. Never -0; NaN stays NaN.
#[inline(always)]
pub fn index_score(dots: impl IntoIterator<Item = f32>) -> f32 {
    chain_sum(dots.into_iter().map(|d| if d <= 0.0 { 0.0 } else { d }))
}

/// The total order of every selection: key descending, then id ascending; NaN sorts last.
#[inline(always)]
pub fn descending(a: (f32, u32), b: (f32, u32)) -> Ordering {
    match (a.0.is_nan(), b.0.is_nan()) {
        (false, false) => b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1)),
        (a_nan, b_nan) => a_nan.cmp(&b_nan).then(a.1.cmp(&b.1)),
    }
}

/// The first `k` ids of `keys` in [`descending`] order. Every slot is written (NaN keys fill the last ones).
///
/// `picks` is replaced; it holds `min(k, keys.len())` ids afterwards.
pub fn top_k(keys: &[f32], k: usize, picks: &mut Vec<u32>) {
    picks.clear();
    picks.extend(0..keys.len() as u32);
    let by_key = |a: &u32, b: &u32| descending((keys[*a as usize], *a), (keys[*b as usize], *b));
    if k < picks.len() {
        if k == 0 {
            picks.clear();
            return;
        }
        picks.select_nth_unstable_by(k - 1, by_key);
        picks.truncate(k);
    }
    picks.sort_unstable_by(by_key);
}

/// How router logits become expert weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over the picks (the released checkpoints).
    Softmax,
    /// Sigmoid of each picked logit.
    Sigmoid,
}

/// The weights of the picked experts in slot order (`picks` from [`top_k`] on `logits`).
///
/// With `normalise` they sum to 1 up to rounding; without it softmax divides by the sum over all experts
/// and sigmoid is left alone.
pub fn pick_weights(
    logits: &[f32],
    picks: &[u32],
    scoring: Scoring,
    normalise: bool,
    weights: &mut Vec<f32>,
) {
    weights.clear();
    let Some(&first) = picks.first() else { return };
    let top = logits[first as usize];
    match scoring {
        Scoring::Softmax => {
            weights.extend(picks.iter().map(|&e| math::exp(logits[e as usize] - top)));
            let sum = if normalise {
                chain_sum(weights.iter().copied())
            } else {
                chain_sum(logits.iter().map(|&l| math::exp(l - top)))
            };
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        Scoring::Sigmoid => {
            weights.extend(picks.iter().map(|&e| math::sigmoid(logits[e as usize])));
            if normalise {
                let sum = chain_sum(weights.iter().copied());
                weights.iter_mut().for_each(|w| *w /= sum);
            }
        }
    }
}

/// A chain of additions from +0 in the order given.
#[inline(always)]
pub fn chain_sum(x: impl IntoIterator<Item = f32>) -> f32 {
    x.into_iter().fold(0.0, |sum, x| sum + x)
}

/// The signed square root of the PLE gate: `sign(g) * sqrt(max(|g|, 1e-6))`, with sign(0) = 0.
#[inline(always)]
pub fn signed_root(g: f32) -> f32 {
    let root = g.abs().max(1e-6).sqrt();
    if g > 0.0 {
        root
    } else if g < 0.0 {
        -root
    } else if g.is_nan() {
        g
    } else {
        0.0
    }
}

/// Rotary embedding of the first `2 * inv_freq.len()` elements of `x`, pairs `(i, i + half)`:
/// `a' = fma(a, cos, -(b * sin))`, `b' = fma(b, cos, a * sin)`; the rest passes through.
#[inline(always)]
pub fn rope(x: &mut [f32], position: u32, inv_freq: &[f32]) {
    let half = inv_freq.len();
    for (i, &f) in inv_freq.iter().enumerate() {
        let (sin, cos) = math::sin_cos(position as f32 * f);
        let (a, b) = (x[i], x[i + half]);
        x[i] = a.mul_add(cos, -(b * sin));
        x[i + half] = b.mul_add(cos, a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pair_mean_adds_rising_pairs_and_passes_an_odd_last_one_up() {
        let e = f32::EPSILON;
        // ((1 + e/2) + (e/2 + e/2)) differs from a chain: the pair of small terms survives.
        assert_eq!(pair_mean(&mut [1.0, e / 2.0, e / 2.0, e / 2.0]), (1.0 + e) / 4.0);
        assert_eq!(pair_mean(&mut [1.0, 2.0, 4.0]), 7.0 / 3.0);
        assert_eq!(pair_mean(&mut [3.0]), 3.0);
    }

    #[test]
    fn top_k_orders_ties_by_id_and_nan_last_and_writes_every_slot() {
        let mut p = Vec::new();
        top_k(&[1.0, f32::NAN, 3.0, 3.0, -0.0, 0.0], 6, &mut p);
        assert_eq!(p, [2, 3, 0, 4, 5, 1]);
        top_k(&[f32::NAN, f32::NAN, 1.0], 2, &mut p);
        assert_eq!(p, [2, 0]);
        top_k(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN], 3, &mut p);
        assert_eq!(p, [0, 1, 2]);
        top_k(&[1.0, 2.0], 5, &mut p);
        assert_eq!(p, [1, 0]);
        top_k(&[1.0, 2.0], 0, &mut p);
        assert!(p.is_empty());
    }

    #[test]
    fn attention_over_one_part_is_a_softmax() {
        let q = [1.0, 0.0];
        let keys = [0.0, 0.0, 2.0f32.ln(), 0.0];
        let values = [3.0, 0.0, 0.0, 3.0];
        let (mut acc, mut out) = ([0.0; 2], [0.0; 2]);
        let scores: Vec<f32> = keys.chunks(2).map(|k| dot32(&q, k)).collect();
        attend(&scores, &values, &mut acc, &mut out);
        assert!((out[0] - 1.0).abs() < 1e-6 && (out[1] - 2.0).abs() < 1e-6, "{out:?}");
    }

    #[test]
    fn attention_merges_parts_under_the_global_maximum() {
        let n = 3 * ATTENTION_PART + 5;
        let dim = 4;
        let f = |i: usize| ((i * 37 % 101) as f32 / 50.0) - 1.0;
        let q: Vec<f32> = (0..dim).map(f).collect();
        let keys: Vec<f32> = (0..n * dim).map(|i| f(i + 7) * 8.0).collect();
        let values: Vec<f32> = (0..n * dim).map(|i| f(i + 13)).collect();
        let (mut acc, mut out) = (vec![0.0; dim], vec![0.0; dim]);
        let scores: Vec<f32> = keys.chunks(dim).map(|k| dot32(&q, k) * 0.5).collect();
        attend(&scores, &values, &mut acc, &mut out);
        let score = |t: usize| (0..dim).map(|d| q[d] as f64 * keys[t * dim + d] as f64).sum::<f64>() * 0.5;
        let z: f64 = (0..n).map(|t| score(t).exp()).sum();
        for d in 0..dim {
            let want: f64 = (0..n).map(|t| score(t).exp() * values[t * dim + d] as f64).sum::<f64>() / z;
            assert!((out[d] as f64 - want).abs() < 1e-5, "{d}: {} {want}", out[d]);
        }
    }

    #[test]
    fn gdn_step_matches_the_definition() {
        let (dk, dv) = (6, 3);
        let f = |i: usize| ((i * 29 % 83) as f32 / 40.0) - 1.0;
        let mut h: Vec<f32> = (0..dk * dv).map(f).collect();
        let before: Vec<f64> = h.iter().map(|&x| x as f64).collect();
        let k: Vec<f32> = (0..dk).map(|i| f(i + 50)).collect();
        let v: Vec<f32> = (0..dv).map(|i| f(i + 70)).collect();
        let mut scratch = vec![0.0; 4 * dv];
        gdn_update(&mut h, &k, &v, 0.75, 0.5, &mut scratch);
        for c in 0..dv {
            let mem: f64 = (0..dk).map(|r| 0.75 * before[r * dv + c] * k[r] as f64).sum();
            for r in 0..dk {
                let want = 0.75 * before[r * dv + c] + k[r] as f64 * 0.5 * (v[c] as f64 - mem);
                assert!((h[r * dv + c] as f64 - want).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn index_scores_keep_nan_and_never_return_minus_zero() {
        assert_eq!(index_score([-1.0, -0.0]).to_bits(), 0);
        assert!(index_score([f32::NAN, 0.0]).is_nan());
        assert_eq!(index_score([3.0, -5.0, 3.0]), 6.0);
    }

    #[test]
    fn signed_root_has_a_floor_and_no_sign_at_zero() {
        assert_eq!(signed_root(4.0), 2.0);
        assert_eq!(signed_root(-4.0), -2.0);
        assert_eq!(signed_root(0.0).to_bits(), 0);
        assert_eq!(signed_root(-1e-9), -(1e-6f32.sqrt()));
        assert!(signed_root(f32::NAN).is_nan());
    }
}
