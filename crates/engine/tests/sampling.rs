//! The rules of sampling on cases small enough to check by hand.

use castiron_engine::logprobs::Logprobs;
use castiron_engine::sampling::{Defaults, ParamError, Params, SampleError, Sampler};
use castiron_engine::stop::{FinishReason, StopIds};

fn sampler(params: Params) -> Sampler {
    Sampler::new(params).expect("valid parameters")
}

fn kept(params: Params, logits: &[f32]) -> Vec<u32> {
    sampler(params).kept(logits).expect("a kept set").iter().map(|c| c.id).collect()
}

fn refused(params: Params) -> ParamError {
    Sampler::new(params).expect_err("a refusal")
}

#[test]
fn every_bad_value_names_field_value_and_range() {
    let base = || Params::neutral(8);
    let cases: Vec<(&str, &str, Params)> = vec![
        ("temperature", "NaN", Params { temperature: f32::NAN, ..base() }),
        ("temperature", "-1", Params { temperature: -1.0, ..base() }),
        ("temperature", "0.001", Params { temperature: 0.001, ..base() }),
        ("temperature", "inf", Params { temperature: f32::INFINITY, ..base() }),
        ("top_p", "NaN", Params { top_p: f32::NAN, ..base() }),
        ("top_p", "0", Params { top_p: 0.0, ..base() }),
        ("top_p", "1.5", Params { top_p: 1.5, ..base() }),
        ("min_p", "NaN", Params { min_p: f32::NAN, ..base() }),
        ("min_p", "-0.1", Params { min_p: -0.1, ..base() }),
        ("min_p", "1.1", Params { min_p: 1.1, ..base() }),
        ("presence_penalty", "NaN", Params { presence_penalty: f32::NAN, ..base() }),
        ("presence_penalty", "2.5", Params { presence_penalty: 2.5, ..base() }),
        ("frequency_penalty", "-inf", Params { frequency_penalty: f32::NEG_INFINITY, ..base() }),
        ("vocab", "0", Params { vocab: 0, ..base() }),
        ("vocab", "4294967296", Params { vocab: 1 << 32, ..base() }),
        ("logit_bias", "8: 1", Params { logit_bias: vec![(8, 1.0)], ..base() }),
        ("logit_bias", "3: 101", Params { logit_bias: vec![(3, 101.0)], ..base() }),
        ("logit_bias", "3: NaN", Params { logit_bias: vec![(3, f32::NAN)], ..base() }),
        ("logit_bias", "3: inf", Params { logit_bias: vec![(3, f32::INFINITY)], ..base() }),
        ("logit_bias", "3", Params { logit_bias: vec![(3, 1.0), (2, 0.0), (3, 2.0)], ..base() }),
    ];
    for (field, value, params) in cases {
        let error = refused(params);
        assert_eq!(error.field(), field);
        let text = error.to_string();
        assert!(text.starts_with(&format!("{field} = {value} is not accepted: give ")), "{text}");
    }
}

#[test]
fn range_ends_are_accepted() {
    for temperature in [0.0, -0.0, 0.01, 100.0] {
        sampler(Params { temperature, ..Params::neutral(1) });
    }
    sampler(Params { top_p: f32::MIN_POSITIVE, min_p: 1.0, top_k: u32::MAX, ..Params::neutral(1) });
    sampler(Params { presence_penalty: -2.0, frequency_penalty: 2.0, ..Params::neutral(1) });
    sampler(Params { logit_bias: vec![(0, -100.0), (1, f32::NEG_INFINITY)], ..Params::neutral(2) });
}

#[test]
fn checkpoint_defaults_then_one_table() {
    let params = |defaults: Defaults| defaults.params(10).expect("valid");
    let silent = Params { temperature: 1.0, top_k: 20, top_p: 0.95, ..Params::neutral(10) };
    assert_eq!(params(Defaults::default()), silent);
    let told =
        Defaults { do_sample: Some(true), temperature: Some(0.6), top_k: Some(0), ..Defaults::default() };
    assert_eq!(params(told), Params { temperature: 0.6, top_k: 0, ..silent.clone() });
    let penalties =
        Defaults { presence_penalty: Some(1.5), frequency_penalty: Some(0.5), ..Defaults::default() };
    assert_eq!(params(penalties), Params { presence_penalty: 1.5, frequency_penalty: 0.5, ..silent.clone() });
    let greedy = Defaults { do_sample: Some(false), temperature: Some(0.6), ..Defaults::default() };
    assert_eq!(params(greedy).temperature, 0.0);

    assert_eq!(params(Defaults { repetition_penalty: Some(1.0), ..Defaults::default() }), silent);
    for (field, bad) in [
        ("repetition_penalty", Defaults { repetition_penalty: Some(1.1), ..Defaults::default() }),
        ("repetition_penalty", Defaults { repetition_penalty: Some(f32::NAN), ..Defaults::default() }),
        ("top_p", Defaults { top_p: Some(0.0), ..Defaults::default() }),
    ] {
        assert_eq!(bad.params(10).expect_err("a refusal").field(), field);
    }
}

#[test]
fn greedy_takes_the_largest_and_ties_go_to_the_lower_id() {
    let mut s = sampler(Params::greedy(5));
    assert_eq!(s.sample(&[1.0, 3.0, 2.0, 3.0, -1.0], 0), Ok(1));
    assert_eq!(s.sample(&[-2.0, -1.0, -2.0, -1.0, -2.0], 1), Ok(1));
    assert_eq!(s.sample(&[-0.0, 0.0, -1.0, 0.0, -0.0], 2), Ok(0), "-0 and +0 are one value");
    assert_eq!(s.sample(&[0.5; 5], 3), Ok(0));
}

#[test]
fn a_row_that_is_not_a_number_is_an_error_and_changes_nothing() {
    for temperature in [0.0, 1.0] {
        for top_k in [0, 2] {
            let mut s = sampler(Params { temperature, top_k, presence_penalty: 1.0, ..Params::neutral(3) });
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let error = s.sample(&[0.0, 1.0, bad], 0).expect_err("an error");
                assert!(matches!(error, SampleError::NonFinite { id: 2, .. }), "{error:?}");
                // Padding columns belong to the row too: a broken product must not hide there.
                assert!(s.sample(&[0.0, 1.0, 2.0, bad], 0).is_err());
            }
            assert!((0..3).all(|id| s.count(id) == 0));
        }
    }
}

#[test]
fn masked_short_and_overflowing_rows_are_errors() {
    let never = (0..3).map(|id| (id, f32::NEG_INFINITY)).collect::<Vec<_>>();
    for (temperature, top_k) in [(0.0, 0), (1.0, 0), (1.0, 5)] {
        let params = Params { temperature, top_k, logit_bias: never.clone(), ..Params::neutral(3) };
        assert_eq!(sampler(params).sample(&[1.0, 2.0, 3.0, 4.0], 0), Err(SampleError::AllMasked));
    }
    let mut s = sampler(Params::neutral(4));
    assert_eq!(s.sample(&[1.0; 3], 0), Err(SampleError::ShortRow { got: 3, need: 4 }));
    let mut cold = sampler(Params { temperature: 0.01, ..Params::neutral(2) });
    assert_eq!(cold.sample(&[0.0, f32::MAX], 0), Err(SampleError::Overflow { id: 1 }));
    let mut far = sampler(Params { top_p: 0.5, ..Params::neutral(2) });
    assert_eq!(far.sample(&[f32::MIN, f32::MAX], 0), Ok(1), "a difference beyond f32 is just unlikely");
}

#[test]
fn ids_the_tokenizer_lacks_are_never_chosen() {
    let row = [0.0, 1.0, 50.0, 60.0];
    assert_eq!(sampler(Params::greedy(2)).sample(&row, 0), Ok(1));
    assert_eq!(kept(Params { top_k: 3, ..Params::neutral(2) }, &row), [1, 0]);
    let s = sampler(Params::neutral(2));
    assert!((0..200).all(|position| s.pick(&row, position).expect("an id") < 2));
}

#[test]
fn bias_then_presence_then_frequency_then_temperature() {
    let params = Params {
        temperature: 0.7,
        presence_penalty: 0.3,
        frequency_penalty: 0.1,
        logit_bias: vec![(0, 0.2)],
        ..Params::neutral(3)
    };
    let mut s = sampler(params);
    for id in [0, 2, 0, 0] {
        s.accept(id);
    }
    let row = [1.1_f32, 2.2, 3.3];
    let value = |id: u32| {
        let all = s.kept(&row).expect("a kept set");
        all.iter().find(|c| c.id == id).expect("kept").value
    };
    assert_eq!(value(0), (((row[0] + 0.2) - 0.3) - 0.1 * 3.0) / 0.7);
    assert_eq!(value(1), row[1] / 0.7);
    assert_eq!(value(2), ((row[2] - 0.3) - 0.1 * 1.0) / 0.7);
}

#[test]
fn every_step_rounds_by_itself() {
    // One product and one subtraction, and a true division: forms that fuse or use a reciprocal differ here.
    let (temperature, frequency_penalty, presence_penalty) = (0.7_f32, 0.1_f32, 0.3_f32);
    let params = Params { temperature, frequency_penalty, presence_penalty, ..Params::neutral(400) };
    let mut s = sampler(params);
    (0..400).for_each(|id| (0..=id % 7).for_each(|_| s.accept(id)));
    let row: Vec<f32> = (0..400).map(|n| (n as f32 - 150.0) / 37.0).collect();
    for c in s.kept(&row).expect("a kept set") {
        let product = frequency_penalty * (c.id % 7 + 1) as f32;
        assert_eq!(c.value, ((row[c.id as usize] - presence_penalty) - product) / temperature, "{}", c.id);
    }
}

#[test]
fn penalties_count_this_reply_only() {
    let mut s = sampler(Params { presence_penalty: 1.5, ..Params::greedy(3) });
    let row = [2.0, 1.0, 0.0];
    assert_eq!(s.sample(&row, 0), Ok(0));
    assert_eq!(s.sample(&row, 1), Ok(1), "0.5 against 1");
    assert_eq!(s.sample(&row, 2), Ok(0), "0.5 against -0.5 and 0: presence is not counted twice");
    assert_eq!((s.count(0), s.count(1), s.count(2)), (2, 1, 0));
    assert_eq!(s.pick(&row, 3), Ok(0));
    assert_eq!(s.count(0), 2, "a pick is not recorded");
    s.reset();
    assert_eq!(s.sample(&row, 0), Ok(0));
    let mut s = sampler(Params { frequency_penalty: 0.4, ..Params::greedy(3) });
    let reply: Vec<u32> = (0..6).map(|n| s.sample(&row, n).expect("an id")).collect();
    // 2.0, 1.6, 1.2, then 0.8 < 1; then 1 - 0.4 < 0.8; then 0.4 < 0.6.
    assert_eq!(reply, [0, 0, 0, 1, 0, 1]);
}

#[test]
fn reset_keeps_the_bias() {
    let mut s = sampler(Params { logit_bias: vec![(2, 5.0), (0, -5.0)], ..Params::greedy(3) });
    assert_eq!(s.sample(&[4.0, 1.0, 0.0], 0), Ok(2));
    s.reset();
    assert_eq!(s.sample(&[4.0, 1.0, 0.0], 0), Ok(2));
    assert_eq!(s.count(2), 1);
}

#[test]
fn top_k_keeps_exactly_k_and_cuts_ties_by_id() {
    let row = [1.0, 2.0, 1.0, 2.0, 1.0, 0.0];
    let k = |top_k| kept(Params { top_k, ..Params::neutral(6) }, &row);
    assert_eq!(k(0), [1, 3, 0, 2, 4, 5]);
    assert_eq!(k(1), [1]);
    assert_eq!(k(3), [1, 3, 0]);
    assert_eq!(k(4), [1, 3, 0, 2]);
    assert_eq!(k(6), k(0));
    assert_eq!(k(u32::MAX), k(0));
    assert_eq!(
        kept(Params { top_k: 1, ..Params::neutral(3) }, &[-0.0, 0.0, 0.0]),
        [0],
        "-0 is no less than +0"
    );
}

#[test]
fn top_k_cuts_before_top_p_looks() {
    // Probabilities 1/2, 1/4, 1/8, 1/8 (logits are their logarithms, near enough).
    let row = [0.5_f32.ln(), 0.25_f32.ln(), 0.125_f32.ln(), 0.125_f32.ln()];
    let cut = |top_k, top_p| kept(Params { top_k, top_p, ..Params::neutral(4) }, &row);
    assert_eq!(cut(0, 0.45), [0]);
    assert_eq!(cut(0, 0.6), [0, 1]);
    assert_eq!(cut(0, 0.7), [0, 1]);
    assert_eq!(cut(0, 0.8), [0, 1, 2]);
    // After top_k = 2 they are 2/3 and 1/3, so 0.6 is reached at once.
    assert_eq!(cut(2, 0.6), [0]);
    assert_eq!(cut(2, 0.7), [0, 1]);
}

#[test]
fn min_p_is_a_share_of_the_first_and_ignores_top_p() {
    let row = [0.5_f32.ln(), 0.25_f32.ln(), 0.125_f32.ln(), 0.125_f32.ln()];
    let cut = |min_p, top_p| kept(Params { min_p, top_p, ..Params::neutral(4) }, &row);
    assert_eq!(cut(0.0, 1.0), [0, 1, 2, 3]);
    assert_eq!(cut(0.2, 1.0), [0, 1, 2, 3]);
    assert_eq!(cut(0.3, 1.0), [0, 1]);
    assert_eq!(cut(0.6, 1.0), [0]);
    assert_eq!(cut(0.2, 0.8), [0, 1, 2], "both rules, same softmax");
    assert_eq!(kept(Params { min_p: 1.0, ..Params::neutral(3) }, &[4.0, 4.0, 3.9]), [0, 1]);
}

#[test]
fn top_p_keeps_at_least_one_and_at_most_all() {
    let row = vec![0.0_f32; 1000];
    assert_eq!(kept(Params { top_p: f32::MIN_POSITIVE, ..Params::neutral(1000) }, &row), [0]);
    // A thousand f32 thousandths may sum to less than this; then all stay.
    let nearly = f32::from_bits(1.0_f32.to_bits() - 1);
    assert!(kept(Params { top_p: nearly, ..Params::neutral(1000) }, &row).len() >= 999);
    assert_eq!(kept(Params { top_p: 1.0, min_p: 1e-9, ..Params::neutral(1000) }, &row).len(), 1000);
}

#[test]
fn the_noise_of_an_id_does_not_depend_on_the_others() {
    // Winner among a and b, wherever they stand and whatever else is there but far behind.
    let pair = sampler(Params { seed: 9, ..Params::neutral(2) });
    let many = sampler(Params { seed: 9, ..Params::neutral(500) });
    let mut row = vec![-60.0_f32; 500];
    (row[0], row[1]) = (0.3, 0.1);
    for position in 0..500 {
        assert_eq!(pair.pick(&row[..2], position), many.pick(&row, position));
    }
}

#[test]
fn logprobs_sum_to_one_and_keep_the_order() {
    let row = [1.0_f32, 3.0, -2.0, 3.0, 0.0];
    let lp = Logprobs::new(&row).expect("finite");
    let sum: f64 = (0..5).map(|id| f64::from(lp.of(id).expect("a column")).exp()).sum();
    assert!((sum - 1.0).abs() < 1e-6, "{sum}");
    let top = lp.top(3);
    assert_eq!(top.iter().map(|t| t.id).collect::<Vec<_>>(), [1, 3, 0]);
    assert!(top.iter().all(|t| lp.of(t.id) == Some(t.logprob)));
    assert_eq!(lp.top(0), []);
    assert_eq!(lp.top(99).len(), 5);
    assert_eq!(lp.of(5), None);
    // One column: exp(0) = 1, ln(1) = 0, exactly.
    assert_eq!(Logprobs::new(&[7.5]).expect("finite").of(0), Some(0.0));
    assert!(Logprobs::new(&[0.0, f32::NAN]).is_err());
    assert!(Logprobs::new(&[]).is_err());
}

#[test]
fn stop_ids_are_the_union_of_both_files() {
    let ids = StopIds::new(&[248_046, 248_044], &[248_044]);
    assert_eq!(ids.ids(), [248_044, 248_046]);
    assert!(ids.contains(248_046) && ids.contains(248_044) && !ids.contains(0));
    let only_config = StopIds::new(&[], &[5]);
    assert!(only_config.contains(5));
    let extra = ids.with_extra(&[7, 248_044, 7]).with_extra(&[3]);
    assert_eq!(extra.ids(), [3, 7, 248_044, 248_046]);
    let ignoring = extra.ignore_eos(true);
    assert_eq!(ignoring.ids(), [3, 7, 248_044], "an id the request names itself still stops");
    assert!(!ignoring.contains(248_046) && ignoring.contains(7));
    assert_eq!(ignoring.ignore_eos(false).ids(), [3, 7, 248_044, 248_046]);
}

#[test]
fn finish_reasons_have_words() {
    let reasons = [
        (FinishReason::Stop { id: 5 }, "stop", "stop id 5"),
        (FinishReason::StopString { text: "\n".into() }, "stop", "stop string \"\\n\""),
        (FinishReason::Length, "length", "length"),
        (FinishReason::Cancelled, "cancelled", "cancelled"),
        (FinishReason::Error { message: "no".into() }, "error", "error: no"),
    ];
    for (reason, word, text) in reasons {
        assert_eq!((reason.as_str(), reason.to_string().as_str()), (word, text));
    }
}
