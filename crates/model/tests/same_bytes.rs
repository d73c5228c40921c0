//! The same bytes: chunks, windows, snapshots, company and levels cannot be seen in logits or states.
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod common;

use castiron_model::{Activations, Error, ExpertActivations, Level, Model, Options, Row, Slot};
use common::{Golden, f32_options, feed, golden, hash, id, law, numerics, open, rows};
use proptest::prelude::*;

/// Checkpoints with the numerics each is tested in.
fn cases() -> Vec<(&'static str, Options)> {
    let mut all = Vec::new();
    for name in ["tiny_a", "tiny_b", "tiny_bf16"] {
        all.extend(numerics().into_iter().map(|(_, o)| (name, o)));
    }
    all.push(("tiny_fp8", Options::default()));
    for experts in [ExpertActivations::W4a4, ExpertActivations::W4a16] {
        for activations in [Activations::Bf16, Activations::F32] {
            all.push(("tiny_nvfp4", Options { experts: Some(experts), activations, ..Options::default() }));
        }
    }
    all
}

/// Ids of a golden, repeated with variation to `count`, eos inside.
fn prompt(model: &Model, count: usize) -> Vec<u32> {
    let eos = model.config().ngram_eos();
    (0..count).map(|i| if i % 17 == 11 { eos } else { id(i as u64, model.vocab()) }).collect()
}

/// Logits hash and state hash after feeding `ids` in chunks of `chunk`.
fn fresh(model: &mut Model, ids: &[u32], chunk: usize) -> (String, String) {
    let slot = model.new_stream().unwrap();
    let logits = feed(model, slot, ids, chunk);
    let state = model.state_hash(slot).unwrap();
    model.free(slot);
    (hash(&logits), state)
}

#[test]
fn prompt_chunks_give_one_hash() {
    for (name, options) in cases() {
        let mut model = golden(name, &options);
        let ids = prompt(&model, 90);
        let whole = fresh(&mut model, &ids, ids.len());
        for chunk in [1, 7, 64] {
            assert_eq!(fresh(&mut model, &ids, chunk), whole, "{name} {options:?} chunk {chunk}");
        }
    }
}

#[test]
fn the_trained_checkpoint_gives_one_hash_past_its_sparse_budget() {
    let mut model = open("assets/tiny", &Options::default());
    let ids = prompt(&model, 300);
    let whole = fresh(&mut model, &ids, 300);
    for chunk in [1, 7, 64] {
        assert_eq!(fresh(&mut model, &ids, chunk), whole, "chunk {chunk}");
    }
}

#[test]
fn every_level_runs_the_bytes_of_the_law() {
    for (name, options) in cases() {
        let ids = prompt(&golden(name, &options), 60);
        let want = fresh(&mut golden(name, &law(&options)), &ids, 60);
        for level in [Level::portable(), Level::detect()] {
            let got = fresh(&mut golden(name, &Options { level, ..options.clone() }), &ids, 60);
            assert_eq!(got, want, "{name} {options:?}");
        }
    }
}

#[test]
fn a_window_kept_for_any_count_equals_plain_steps() {
    for (name, options) in cases() {
        let mut model = golden(name, &Options { streams: 2, ..options.clone() });
        let ids = prompt(&model, 40);
        let (before, window) = (29, 8);
        let plain = model.new_stream().unwrap();
        let base = model.new_stream().unwrap();
        feed(&mut model, base, &ids[..before], before);
        let base_snapshot = model.snapshot(base).unwrap();
        for keep in 0..=window {
            model.restore(base, &base_snapshot).unwrap();
            let held = rows(base, before, &ids[before..before + window]);
            let out = model.forward(&held, &[base]).unwrap();
            assert!(matches!(model.snapshot(base), Err(Error::Held(_))));
            assert!(matches!(model.keep(base, window + 1), Err(Error::Keep { .. })), "too many");
            model.keep(base, keep).unwrap();

            model.reset(plain).unwrap();
            feed(&mut model, plain, &ids[..before], 5);
            let steps = feed(&mut model, plain, &ids[before..before + keep], 1);
            assert_eq!(hash(&out.logits[..steps.len()]), hash(&steps), "{name} keep {keep}: logits");
            assert_eq!(
                model.state_hash(base).unwrap(),
                model.state_hash(plain).unwrap(),
                "{name} {options:?} keep {keep}: state"
            );
            // What follows is the same too.
            let more = feed(&mut model, base, &ids[before + keep..], 3);
            let want = feed(&mut model, plain, &ids[before + keep..], 4);
            assert_eq!(hash(&more), hash(&want), "{name} keep {keep}: after");
        }
    }
}

#[test]
fn streams_together_equal_each_one_alone() {
    for (name, options) in cases() {
        let mut model = golden(name, &Options { streams: 3, ..options.clone() });
        let ids = prompt(&model, 48);
        let parts: [&[u32]; 3] = [&ids[..31], &ids[7..48], &ids[3..20]];
        let alone: Vec<_> = parts.iter().map(|ids| fresh(&mut model, ids, 64)).collect();

        let slots: Vec<Slot> = parts.iter().map(|_| model.new_stream().unwrap()).collect();
        let mut logits: Vec<Vec<f32>> = vec![Vec::new(); 3];
        // Mixed calls: a chunk of one, a step of another, nothing of the third, in changing order.
        let mut call = 0;
        while slots.iter().zip(parts).any(|(s, p)| (model.length(*s).unwrap() as usize) < p.len()) {
            let mut batch: Vec<Row> = Vec::new();
            let mut owners = Vec::new();
            for turn in 0..3 {
                let i = (turn + call) % 3;
                let at = model.length(slots[i]).unwrap() as usize;
                let count = [1, 5, 0, 3, 9][(call + 2 * i) % 5].min(parts[i].len() - at);
                batch.extend(rows(slots[i], at, &parts[i][at..at + count]));
                owners.extend(std::iter::repeat_n(i, count));
            }
            call += 1;
            if batch.is_empty() {
                continue;
            }
            let out = model.forward(&batch, &[]).unwrap();
            for (owner, row) in owners.into_iter().zip(out.logits.chunks_exact(model.vocab())) {
                logits[owner].extend_from_slice(row);
            }
        }
        for (i, (slot, want)) in slots.iter().zip(alone).enumerate() {
            let got = (hash(&logits[i]), model.state_hash(*slot).unwrap());
            assert_eq!(got, want, "{name} {options:?} stream {i}");
        }
    }
}

#[test]
fn a_snapshot_restored_anywhere_goes_on_like_a_fresh_run() {
    for (name, options) in cases() {
        let mut model = golden(name, &Options { streams: 2, ..options.clone() });
        let ids = prompt(&model, 80);
        let whole = fresh(&mut model, &ids, 80);
        let (a, b) = (model.new_stream().unwrap(), model.new_stream().unwrap());
        for cut in [1, 3, 4, 33, 63, 64, 65, 79] {
            model.reset(a).unwrap();
            let mut logits = feed(&mut model, a, &ids[..cut], 7);
            let snapshot = model.snapshot(a).unwrap();
            assert_eq!(snapshot.length() as usize, cut);
            let hash_at_cut = model.state_hash(a).unwrap();
            // Something else is written over the shared pages, then the stream goes back.
            let other: Vec<u32> = ids[cut..].iter().rev().copied().collect();
            feed(&mut model, a, &other, 11);
            model.restore(b, &snapshot).unwrap();
            model.restore(a, &snapshot).unwrap();
            assert_eq!(model.state_hash(b).unwrap(), hash_at_cut);
            logits.extend(feed(&mut model, a, &ids[cut..], 64));
            assert_eq!((hash(&logits), model.state_hash(a).unwrap()), whole, "{name} {options:?} cut {cut}");
            feed(&mut model, b, &ids[cut..], 1);
            assert_eq!(model.state_hash(b).unwrap(), whole.1, "another slot");
        }
    }
}

#[test]
fn a_refused_call_changes_nothing() {
    let mut model = golden("tiny_a", &Options { streams: 2, context: Some(30), ..Options::default() });
    let ids = prompt(&model, 40);
    let slot = model.new_stream().unwrap();
    let other = model.new_stream().unwrap();
    feed(&mut model, slot, &ids[..20], 20);
    let before = model.state_hash(slot).unwrap();
    let vocab = model.vocab() as u32;
    let bad = |at: usize, f: &dyn Fn(&mut Row)| {
        let mut rows = rows(slot, 20, &ids[20..26]);
        f(&mut rows[at]);
        rows
    };
    let refused = [
        model.forward(&bad(3, &|r| r.token = vocab), &[]),
        model.forward(&bad(0, &|r| r.position = 19), &[]),
        model.forward(&bad(4, &|r| r.position = 26), &[]),
        model.forward(&bad(2, &|r| r.slot = other), &[]),
        model.forward(&rows(slot, 20, &ids[20..31]), &[]),
        model.forward(&[], &[]),
        model.forward(&bad(0, &|_| ()), &[other]),
    ];
    let messages: Vec<String> = refused.into_iter().map(|r| r.unwrap_err().to_string()).collect();
    assert!(messages[0].contains("token id 211") && messages[0].contains("211 ids"), "{}", messages[0]);
    assert!(messages[4].contains("context of 30"), "{}", messages[4]);
    assert_eq!(model.state_hash(slot).unwrap(), before);
    assert!(model.new_stream().is_err(), "both slots are taken");
    model.free(other);
    assert!(matches!(model.length(other), Err(Error::Slot(_))), "a stale slot is recognised");
    model.new_stream().expect("a slot came back");
}

#[test]
fn a_snapshot_of_another_model_or_other_numerics_is_refused() {
    let mut a = golden("tiny_a", &Options::default());
    let slot = a.new_stream().unwrap();
    let snapshot = a.snapshot(slot).unwrap();
    for mut other in [golden("tiny_b", &Options::default()), golden("tiny_a", &f32_options())] {
        let slot = other.new_stream().unwrap();
        assert!(matches!(other.restore(slot, &snapshot), Err(Error::Snapshot)));
    }
}

/// What a random program may do to one of three streams.
#[derive(Clone, Debug)]
enum Step {
    Feed(usize, usize),
    Window(usize, usize, usize),
    Save(usize),
    Back(usize),
    Reset(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..3usize, 1..12usize).prop_map(|(s, n)| Step::Feed(s, n)),
        (0..3usize, 1..9usize, 0..9usize).prop_map(|(s, n, k)| Step::Window(s, n, k.min(n))),
        (0..3usize).prop_map(Step::Save),
        (0..3usize).prop_map(Step::Back),
        (0..3usize).prop_map(Step::Reset),
    ];
    prop::collection::vec(step, 1..14)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Whatever happened to a stream, its state is the one of a fresh run over the ids it now holds.
    #[test]
    fn random_programs_leave_the_state_of_a_fresh_run(program in steps(), b: bool) {
        let name = if b { "tiny_b" } else { "tiny_nvfp4" };
        let mut model = golden(name, &Options { streams: 4, ..Options::default() });
        let slots: Vec<Slot> = (0..3).map(|_| model.new_stream().unwrap()).collect();
        let mut held: Vec<Vec<u32>> = vec![Vec::new(); 3];
        let mut saved: Vec<Option<(castiron_model::Snapshot, Vec<u32>)>> = vec![None, None, None];
        let mut seed = 0;
        let vocab = model.vocab();
        let mut new = |n: usize| -> Vec<u32> { (0..n).map(|_| { seed += 1; id(seed, vocab) }).collect() };
        for step in program {
            match step {
                Step::Feed(s, n) => {
                    let ids = new(n);
                    feed(&mut model, slots[s], &ids, n);
                    held[s].extend(ids);
                }
                Step::Window(s, n, k) => {
                    let ids = new(n);
                    model.forward(&rows(slots[s], held[s].len(), &ids), &[slots[s]]).unwrap();
                    model.keep(slots[s], k).unwrap();
                    held[s].extend(&ids[..k]);
                }
                Step::Save(s) => saved[s] = Some((model.snapshot(slots[s]).unwrap(), held[s].clone())),
                Step::Back(s) => if let Some((snapshot, ids)) = &saved[(s + 1) % 3] {
                    model.restore(slots[s], snapshot).unwrap();
                    held[s] = ids.clone();
                },
                Step::Reset(s) => {
                    model.reset(slots[s]).unwrap();
                    held[s].clear();
                }
            }
        }
        for (slot, ids) in slots.iter().zip(&held) {
            let fresh = model.new_stream().unwrap();
            feed(&mut model, fresh, ids, 64);
            prop_assert_eq!(model.state_hash(*slot).unwrap(), model.state_hash(fresh).unwrap());
            model.free(fresh);
        }
    }
}

#[test]
fn the_golden_files_are_there() {
    for name in ["tiny_a", "tiny_b", "tiny_bf16", "tiny_fp8", "tiny_nvfp4"] {
        assert!(!Golden::named(name).input_ids().is_empty());
    }
}
