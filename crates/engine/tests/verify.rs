//! `verify` passes a whole model and names the place of a fault.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use castiron_engine::sampling::Params;
use castiron_engine::verify::{Job, Value, verify};
use castiron_format::{Checkpoint, Source};
use castiron_model::{Level, Model, Options, PlantedFault};

fn job(vocab: usize, tokens: u32) -> Job {
    Job {
        ids: (0..tokens).map(|i| (i * 37 + i * i % 11) % vocab as u32).collect(),
        law_tokens: 9,
        levels: vec![Level::law(), Level::portable(), Level::detect()],
        threads: vec![1, 0],
        chunks: vec![1, 7, 0],
        reply: 6,
        sampled: Params { seed: 5, ..Params::neutral(vocab) },
    }
}

fn checkpoint() -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny_a");
    Checkpoint::open(Source::Dir(path)).unwrap()
}

/// Runs the job with `fault` planted where `level` and `threads` are as given.
fn with_fault(fault: Option<PlantedFault>, level: Level, threads: usize) -> castiron_engine::verify::Report {
    let checkpoint = checkpoint();
    let mut open = |l: Level, t: usize| {
        let fault = fault.filter(|_| (l, t) == (level, threads));
        Model::open(&checkpoint, &Options { level: l, threads: t, fault, ..Options::default() })
    };
    let job = job(checkpoint.config().vocab_size, 40);
    verify(&job, &mut open, |_, _, _| {}).unwrap()
}

#[test]
fn every_form_agrees() {
    let report = with_fault(None, Level::law(), 1);
    assert_eq!(report.difference, None);
    let short: Vec<_> = report.outcomes.iter().filter(|o| o.variant.tokens == 9).collect();
    assert!(short.len() >= 8, "the law and its company: {}", short.len());
    assert!(report.outcomes.iter().filter(|o| o.variant.tokens == 40).count() >= 6);
    assert_ne!(short[0].hashes.greedy, short[0].hashes.sampled, "two replies");
}

#[test]
fn a_planted_fault_is_named_by_layer_tensor_row_and_column() {
    for layer in [0, 2] {
        let fault = PlantedFault { layer, rows: 2 };
        let report = with_fault(Some(fault), Level::portable(), 0);
        let found = report.difference.expect("a difference");
        assert_eq!((found.other.level, found.other.threads), (Level::portable(), 0));
        assert_ne!(found.other.chunk, 1, "calls of one row are whole");
        // Rounding to bf16 may hide it from the logits; the state keeps it.
        assert!(["logits", "state"].contains(&found.what), "{}", found.what);
        let place = found.place.expect("a place");
        assert_eq!((place.layer, place.tensor), (Some(layer), "out"));
        // The first column of the first row whose fused and rounded sums differ: they do so often.
        assert!(place.row < 3 && place.column < 64, "{place:?}");
        let (Value::Float(a), Value::Float(b)) = (place.reference, place.other) else { panic!("{place:?}") };
        assert!(a != b && (a - b).abs() <= a.abs() * 1e-5, "{place:?}");
    }
}

#[test]
fn a_fault_in_single_rows_is_found_in_the_reply() {
    // Only calls of one row are wrong in the law's form: chunks of one row, and every reply.
    let checkpoint = checkpoint();
    let mut open = |level: Level, threads: usize| {
        let fault = (level == Level::portable()).then_some(PlantedFault { layer: 1, rows: 1 });
        Model::open(&checkpoint, &Options { level, threads, fault, ..Options::default() })
    };
    let mut job = job(checkpoint.config().vocab_size, 12);
    (job.levels, job.law_tokens, job.threads) = (vec![Level::law(), Level::portable()], 12, vec![1]);
    let report = verify(&job, &mut open, |_, _, _| {}).unwrap();
    let place = report.difference.and_then(|d| d.place).expect("a place");
    assert_eq!((place.layer, place.tensor), (Some(1), "out"));
}
