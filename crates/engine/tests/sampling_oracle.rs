//! Sampling against slow forms that share no code with it: a binary64 pipeline for the kept set, a Philox and
//! Gumbel draw of their own, frequencies against probabilities, and properties that must hold for any row.

use std::cell::Cell;

use castiron_engine::logprobs::Logprobs;
use castiron_engine::sampling::{Params, Sampler};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

/// Relative distance from a threshold below which f32 and f64 may rightly disagree.
const NEAR: f64 = 1e-4;

/// The kept ids in rank order, or `None` if some decision is too close to call in f32.
fn oracle_kept(p: &Params, counts: &[u32], logits: &[f32]) -> Option<Vec<u32>> {
    let mut all: Vec<(f64, u32)> = Vec::new();
    for id in 0..p.vocab.min(logits.len()) {
        let mut l = f64::from(logits[id]);
        for &(biased, by) in &p.logit_bias {
            if biased as usize == id {
                l += f64::from(by);
            }
        }
        if counts[id] > 0 {
            l -= f64::from(p.presence_penalty) + f64::from(p.frequency_penalty) * f64::from(counts[id]);
        }
        if l > f64::NEG_INFINITY {
            all.push((l / f64::from(p.temperature), id as u32));
        }
    }
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let near = |a: f64, b: f64| (a - b).abs() <= NEAR * (a.abs().max(b.abs()) + 1e-6);
    if all.windows(2).any(|w| near(w[0].0, w[1].0)) {
        return None;
    }
    if p.top_k > 0 {
        all.truncate(p.top_k as usize);
    }
    let z: f64 = all.iter().map(|(l, _)| l.exp()).sum();
    let share: Vec<f64> = all.iter().map(|(l, _)| l.exp() / z).collect();
    let (top_p, min_p) = (f64::from(p.top_p), f64::from(p.min_p));
    let mut kept = Vec::new();
    let mut before = 0.0;
    for (i, &(_, id)) in all.iter().enumerate() {
        let least = min_p * share[0];
        if (i > 0 && min_p > 0.0 && near(share[i], least)) || (top_p < 1.0 && near(before, top_p)) {
            return None;
        }
        if (top_p == 1.0 || before < top_p) && share[i] >= least {
            kept.push(id);
        }
        before += share[i];
    }
    Some(kept)
}

/// Philox4x32-10 in the words of its paper: two multiply-high-low pairs a round, the key bumped in between.
fn oracle_philox(mut c: [u32; 4], k: [u32; 2]) -> [u32; 4] {
    for round in 0..10_u64 {
        let k0 = (u64::from(k[0]) + round * 0x9E37_79B9) as u32;
        let k1 = (u64::from(k[1]) + round * 0xBB67_AE85) as u32;
        let left = 0xD251_1F53_u128 * u128::from(c[0]);
        let right = 0xCD9E_8D57_u128 * u128::from(c[2]);
        let (hi0, lo0) = ((left >> 32) as u32, (left & 0xFFFF_FFFF) as u32);
        let (hi1, lo1) = ((right >> 32) as u32, (right & 0xFFFF_FFFF) as u32);
        c = [hi1 ^ c[1] ^ k0, lo1, hi0 ^ c[3] ^ k1, lo0];
    }
    c
}

/// Gumbel noise in binary64.
fn oracle_noise(seed: u64, position: u32, id: u32) -> f64 {
    let key = [(seed & 0xFFFF_FFFF) as u32, (seed >> 32) as u32];
    let uniform = (f64::from(oracle_philox([position, id, 0, 0], key)[0]) + 0.5) / 4_294_967_296.0;
    let exponential = if uniform < 0.5 { -uniform.ln() } else { -(-(1.0 - uniform)).ln_1p() };
    -exponential.ln()
}

/// The drawn id, or `None` if two sums are too close to call.
fn oracle_draw(seed: u64, position: u32, kept: &[(u32, f32)]) -> Option<u32> {
    let mut sums: Vec<(f64, u32)> =
        kept.iter().map(|&(id, value)| (f64::from(value) + oracle_noise(seed, position, id), id)).collect();
    sums.sort_by(|a, b| b.0.total_cmp(&a.0));
    (sums.len() < 2 || sums[0].0 - sums[1].0 > NEAR).then_some(sums[0].1)
}

#[test]
fn the_oracle_knows_the_published_philox_answers() {
    assert_eq!(oracle_philox([0; 4], [0; 2]), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
    let ones = u32::MAX;
    assert_eq!(oracle_philox([ones; 4], [ones; 2]), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
    assert_eq!(
        oracle_philox([0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344], [0xA409_3822, 0x299F_31D0]),
        [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]
    );
}

/// Sum of `(seen - expected)^2 / expected`.
fn chi_square(seen: &[u32], share: &[f64]) -> f64 {
    let n: f64 = seen.iter().map(|&c| f64::from(c)).sum();
    seen.iter().zip(share).map(|(&c, p)| (f64::from(c) - n * p).powi(2) / (n * p)).sum()
}

const SHARES: [f64; 6] = [0.4, 0.25, 0.15, 0.1, 0.07, 0.03];
/// The 99.99 % point of chi-square with 5 degrees of freedom.
const LIMIT_5: f64 = 25.74;

fn share_logits() -> Vec<f32> {
    SHARES.iter().map(|p| p.ln() as f32).collect()
}

#[test]
fn frequencies_over_positions_match_the_probabilities() {
    let s = Sampler::new(Params { seed: 0x0123_4567_89AB_CDEF, ..Params::neutral(6) }).expect("valid");
    let mut seen = [0_u32; 6];
    for position in 0..60_000 {
        seen[s.pick(&share_logits(), position).expect("an id") as usize] += 1;
    }
    assert!(chi_square(&seen, &SHARES) < LIMIT_5, "{seen:?}");
}

#[test]
fn frequencies_over_seeds_match_the_probabilities() {
    // Seeds that differ in the low half, then in the high half only.
    for shift in [0, 32] {
        let mut seen = [0_u32; 6];
        for n in 0..30_000_u64 {
            let s = Sampler::new(Params { seed: n << shift, ..Params::neutral(6) }).expect("valid");
            seen[s.pick(&share_logits(), 17).expect("an id") as usize] += 1;
        }
        assert!(chi_square(&seen, &SHARES) < LIMIT_5, "{shift}: {seen:?}");
    }
}

#[test]
fn neighbouring_positions_are_independent() {
    let s = Sampler::new(Params { seed: 5, ..Params::neutral(3) }).expect("valid");
    let share: [f64; 3] = [0.5, 0.3, 0.2];
    let row: Vec<f32> = share.iter().map(|p| p.ln() as f32).collect();
    let draw = |position| s.pick(&row, position).expect("an id") as usize;
    let mut seen = [0_u32; 9];
    for n in 0..30_000 {
        seen[3 * draw(2 * n) + draw(2 * n + 1)] += 1;
    }
    let joint: Vec<f64> = share.iter().flat_map(|a| share.iter().map(move |b| a * b)).collect();
    // The 99.99 % point with 8 degrees of freedom.
    assert!(chi_square(&seen, &joint) < 31.83, "{seen:?}");
}

#[test]
fn cuts_renormalise() {
    let p = Params { top_k: 4, top_p: 0.85, seed: 77, ..Params::neutral(6) };
    let s = Sampler::new(p).expect("valid");
    let mut seen = [0_u32; 6];
    for position in 0..30_000 {
        seen[s.pick(&share_logits(), position).expect("an id") as usize] += 1;
    }
    assert_eq!(seen[3..], [0, 0, 0]);
    let share: Vec<f64> = SHARES[..3].iter().map(|p| p / 0.8).collect();
    // The 99.99 % point with 2 degrees of freedom.
    assert!(chi_square(&seen[..3], &share) < 18.42, "{seen:?}");
}

prop_compose! {
    fn any_params(vocab: usize)(
        temperature in prop_oneof![Just(1.0_f32), 0.05_f32..3.0],
        top_k in prop_oneof![Just(0_u32), 1_u32..40],
        top_p in prop_oneof![Just(1.0_f32), 0.01_f32..1.0],
        min_p in prop_oneof![Just(0.0_f32), 0.0_f32..1.0],
        presence_penalty in prop_oneof![Just(0.0_f32), -2.0_f32..2.0],
        frequency_penalty in prop_oneof![Just(0.0_f32), -2.0_f32..2.0],
        bias in prop::collection::btree_map(0..vocab as u32, prop_oneof![
            -5.0_f32..5.0, Just(f32::NEG_INFINITY)
        ], 0..4),
        seed: u64,
    ) -> Params {
        Params {
            temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty,
            logit_bias: bias.into_iter().collect(), seed, vocab,
        }
    }
}

fn rows(len: usize) -> impl Strategy<Value = Vec<f32>> {
    prop_oneof![
        prop::collection::vec(-12.0_f32..12.0, len),
        // Few values: ties everywhere.
        prop::collection::vec((-3_i8..3).prop_map(f32::from), len),
    ]
}

fn with_history(p: &Params, history: &[u32]) -> Sampler {
    let mut s = Sampler::new(p.clone()).expect("valid");
    history.iter().for_each(|&id| s.accept(id));
    s
}

const V: usize = 64;

#[test]
fn the_kept_set_is_the_f64_one() {
    let config = ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let (decided, cut) = (Cell::new(0), Cell::new(0));
    let history = prop::collection::vec(0..V as u32, 0..9);
    let checked = runner.run(&(any_params(V), rows(V), history), |(p, row, history)| {
        let mut counts = vec![0; V];
        history.iter().for_each(|&id| counts[id as usize] += 1);
        let kept = with_history(&p, &history).kept(&row).expect("a kept set");
        if let Some(want) = oracle_kept(&p, &counts, &row) {
            decided.set(decided.get() + 1);
            cut.set(cut.get() + u32::from(p.top_p < 1.0 || p.min_p > 0.0));
            prop_assert_eq!(kept.iter().map(|c| c.id).collect::<Vec<_>>(), want);
        }
        Ok(())
    });
    checked.unwrap_or_else(|failure| panic!("{failure}"));
    // The oracle may pass on close calls, but not so often that nothing is compared.
    assert!(decided.get() > 250 && cut.get() > 150, "{decided:?} {cut:?}");
}

#[test]
fn equal_sums_go_to_the_lower_id_whatever_the_rank() {
    // Neighbours in f32 eight apart: the noise often rounds away, and then id 0 may catch up with id 1.
    let row = [1e8_f32, 1e8 + 8.0];
    let s = Sampler::new(Params { top_k: 2, seed: 3, ..Params::neutral(2) }).expect("valid");
    assert_eq!(s.kept(&row).expect("a kept set")[0].id, 1);
    let mut caught_up = 0;
    for position in 0..5000 {
        let sum = |id: u32| (f64::from(row[id as usize]) + oracle_noise(3, position, id)) as f32;
        caught_up += u32::from(sum(0) == sum(1));
        assert_eq!(s.pick(&row, position), Ok(u32::from(sum(1) > sum(0))), "{position}");
    }
    assert!(caught_up > 20, "{caught_up}");
}

#[test]
fn an_id_far_behind_still_wins_where_the_noise_says_so() {
    // Twelve logits behind: about one draw in 160,000; the noise says where.
    let seed = 11;
    let row = [6.0_f32, -6.0];
    let s = Sampler::new(Params { seed, ..Params::neutral(2) }).expect("valid");
    let lead = |at| oracle_noise(seed, at, 1) - oracle_noise(seed, at, 0);
    let at = (0..4_000_000).find(|&at| lead(at) > 12.0).expect("a place");
    assert_eq!(s.pick(&row, at), Ok(1));
    assert!(castiron_num::philox::gumbel(u32::MAX) < 23.0, "the bound behind which no noise is drawn");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn the_drawn_id_is_the_f64_one(p in any_params(V), row in rows(V), position: u32) {
        let s = with_history(&p, &[]);
        let kept: Vec<_> = s.kept(&row).expect("a kept set").iter().map(|c| (c.id, c.value)).collect();
        let got = s.pick(&row, position).expect("an id");
        prop_assert!(kept.iter().any(|&(id, _)| id == got));
        if let Some(want) = oracle_draw(p.seed, position, &kept) {
            prop_assert_eq!(got, want);
        }
    }

    #[test]
    fn a_partial_selection_equals_the_sorted_whole(row in rows(300), k in 1_u32..300) {
        let whole = with_history(&Params::neutral(300), &[]).kept(&row).expect("a kept set");
        let part = with_history(&Params { top_k: k, ..Params::neutral(300) }, &[]).kept(&row).expect("a kept set");
        prop_assert_eq!(&part[..], &whole[..k as usize]);
        let mut sorted: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
        sorted.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("finite").then(a.0.cmp(&b.0)));
        prop_assert!(whole.iter().map(|c| (c.id, c.value)).eq(sorted));
    }

    #[test]
    fn same_seed_position_and_row_give_the_same_id(p in any_params(V), row in rows(V), at: u32) {
        let mut first = with_history(&p, &[]);
        let id = first.pick(&row, at).expect("an id");
        // Whatever the sampler did before, as long as the reply is the same.
        prop_assert_eq!(first.pick(&row, at.wrapping_add(1)).is_ok(), true);
        prop_assert_eq!(first.sample(&row, at), Ok(id));
        prop_assert_eq!(first.count(id), 1);
        first.reset();
        prop_assert_eq!(first.pick(&row, at), Ok(id));
        prop_assert_eq!(with_history(&p, &[]).pick(&row, at), Ok(id));
    }

    #[test]
    fn masked_ids_change_nothing(
        p in any_params(V), row in rows(V), pad in prop::collection::vec(-90.0_f32..90.0, 0..20), at: u32,
    ) {
        let want = with_history(&p, &[]).pick(&row, at);
        let padded = [&row[..], &pad[..]].concat();
        prop_assert_eq!(with_history(&p, &[]).pick(&padded, at), want);
        // The same columns as known ids that the request forbids.
        let forbid = (V as u32..padded.len() as u32).map(|id| (id, f32::NEG_INFINITY));
        let logit_bias = p.logit_bias.iter().copied().chain(forbid).collect();
        let forbidding = Params { vocab: padded.len(), logit_bias, ..p };
        prop_assert_eq!(with_history(&forbidding, &[]).pick(&padded, at), want);
    }

    #[test]
    fn off_values_are_off(row in rows(V), seed: u64, at: u32) {
        let neutral = Params { seed, ..Params::neutral(V) };
        let want = with_history(&neutral, &[]).pick(&row, at);
        // The largest k, the smallest min_p and a top_p no sum can miss take the ranked path; same answer.
        let ranked = Params { top_k: u32::MAX, min_p: 1e-30, ..neutral.clone() };
        prop_assert_eq!(with_history(&ranked, &[]).pick(&row, at), want);
        let one = Params { top_k: 1, ..neutral };
        prop_assert_eq!(with_history(&one, &[]).pick(&row, at), with_history(&Params::greedy(V), &[]).pick(&row, at));
    }

    #[test]
    fn seeds_and_positions_matter(seed: u64, other: u64) {
        prop_assume!(seed != other);
        let flat = vec![0.0_f32; V];
        let reply = |seed, from: u32| -> Vec<u32> {
            let s = with_history(&Params { seed, ..Params::neutral(V) }, &[]);
            (from..from + 40).map(|at| s.pick(&flat, at).expect("an id")).collect()
        };
        prop_assert_ne!(reply(seed, 0), reply(other, 0));
        prop_assert_ne!(reply(seed, 0), reply(seed, 1));
    }

    #[test]
    fn logprobs_are_the_f64_ones(row in rows(200), n in 0_usize..220) {
        let lp = Logprobs::new(&row).expect("finite");
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let z: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
        for id in 0..200_u32 {
            let want = f64::from(row[id as usize]) - f64::from(max) - z.ln();
            prop_assert!((f64::from(lp.of(id).expect("a column")) - want).abs() < 2e-5);
        }
        let mut ids: Vec<u32> = (0..200).collect();
        ids.sort_by(|&a, &b| row[b as usize].partial_cmp(&row[a as usize]).expect("finite").then(a.cmp(&b)));
        ids.truncate(n);
        prop_assert_eq!(lp.top(n).iter().map(|t| t.id).collect::<Vec<_>>(), ids);
    }
}
