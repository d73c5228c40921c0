//! A value that is not a number is reported for its row and stream, and never spreads.
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod common;

use castiron_format::{Checkpoint, Source};
use castiron_model::{DraftRow, Error, FaultKind, Model, Options, Wide};
use common::{f32_options, feed, golden, hash, id, repo, rows};

/// `tiny_a` with element 0 of a tensor set to `value`.
fn poisoned(tensor: &str, value: f32, options: &Options) -> Model {
    let dir = tempfile::tempdir().unwrap();
    let from = repo("tests/golden/tiny_a");
    for file in ["config.json", "mtp.safetensors", "model.safetensors"] {
        std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let at = {
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let data = file.tensor(tensor).unwrap();
        data.data().as_ptr() as usize - bytes.as_ptr() as usize
    };
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let checkpoint = Checkpoint::open(Source::Dir(dir.path().into())).unwrap();
    Model::open(&checkpoint, options).unwrap()
}

fn prompt(count: usize) -> Vec<u32> {
    (0..count).map(|i| id(i as u64, 211)).collect()
}

#[test]
fn a_score_that_is_not_a_number_is_a_fault_of_its_row_from_the_first_comparison_on() {
    for value in [f32::NAN, f32::INFINITY] {
        let mut model =
            poisoned("model.layers.3.self_attn.indexer.index_qk_proj.weight", value, &f32_options());
        let slot = model.new_stream().unwrap();
        let out = model.forward(&rows(slot, 0, &prompt(40)), &[]).unwrap();
        // 16 tokens of budget in blocks of 4: scores are compared once five blocks are complete.
        let first = out.faults.first().expect("a fault");
        assert_eq!((first.row, first.kind), (19, FaultKind::Selection(3)));
        assert!(matches!(model.forward(&rows(slot, 40, &[1]), &[]), Err(Error::Faulty(_))));
        model.reset(slot).unwrap();
        assert!(
            model.forward(&rows(slot, 0, &prompt(10)), &[]).unwrap().faults.is_empty(),
            "below the budget"
        );
    }
}

#[test]
fn a_faulty_stream_changes_no_other() {
    let token = 7u32;
    let embedding = "model.embed_tokens.weight";
    let mut model = poisoned(embedding, f32::NAN, &Options { streams: 2, ..Options::default() });
    // Only token 0 has a poisoned embedding.
    let (bad, good) = (model.new_stream().unwrap(), model.new_stream().unwrap());
    let ids: Vec<u32> = prompt(30).into_iter().map(|t| if t == 0 { token } else { t }).collect();
    let mut batch = rows(bad, 0, &[5, 0, 6]);
    batch.extend(rows(good, 0, &ids));
    let out = model.forward(&batch, &[]).unwrap();
    assert!(out.faults.iter().all(|f| (1..3).contains(&f.row)), "{:?}", out.faults);
    assert_eq!(out.faults[0].row, 1);
    assert!(model.is_faulty(bad).unwrap() && !model.is_faulty(good).unwrap());
    let mut clean = golden("tiny_a", &Options::default());
    let slot = clean.new_stream().unwrap();
    let want = feed(&mut clean, slot, &ids, 64);
    assert_eq!(hash(&out.logits[3 * 211..]), hash(&want), "the other stream's logits");
    assert!(matches!(model.snapshot(bad), Err(Error::Faulty(_))));
    model.reset(bad).unwrap();
    assert_eq!(feed(&mut model, bad, &ids, 64), want, "the slot is whole again");
}

#[test]
fn a_fault_in_a_window_counts_only_when_its_row_is_kept() {
    let mut model = poisoned("model.embed_tokens.weight", f32::NAN, &Options::default());
    let slot = model.new_stream().unwrap();
    feed(&mut model, slot, &[5, 6, 7], 3);
    for (keep, faulty) in [(2, false), (3, true)] {
        let at = model.length(slot).unwrap() as usize;
        let out = model.forward(&rows(slot, at, &[8, 9, 0, 10]), &[slot]).unwrap();
        assert_eq!(out.faults[0].row, 2);
        model.keep(slot, keep).unwrap();
        assert_eq!(model.is_faulty(slot).unwrap(), faulty, "keep {keep}");
    }
}

#[test]
fn a_draft_row_takes_only_its_own_residual() {
    let mut model = golden("tiny_a", &Options { streams: 2, ..Options::default() });
    let (a, b) = (model.new_stream().unwrap(), model.new_stream().unwrap());
    feed(&mut model, b, &prompt(4), 4);
    feed(&mut model, a, &prompt(6), 6);
    let row = |slot, position, wide| DraftRow { slot, position, token: 1, wide, logits: true };
    let refused = |model: &mut Model, row: DraftRow| {
        let before = model.draft_length(row.slot).unwrap();
        assert!(matches!(model.draft(&[row]), Err(Error::Draft(_) | Error::Position { .. })), "{row:?}");
        assert_eq!(model.draft_length(row.slot).unwrap(), before);
    };
    refused(&mut model, row(a, 0, Wide::Kept));
    refused(&mut model, row(b, 0, Wide::Row(0)));
    refused(&mut model, row(a, 0, Wide::Row(1)));
    refused(&mut model, row(a, 0, Wide::Row(99)));
    refused(&mut model, row(a, 0, Wide::Draft(0)));
    let prompt_rows: Vec<_> = (0..6).map(|t| row(a, t as u32, Wide::Row(t))).collect();
    model.draft(&prompt_rows).unwrap();
    refused(&mut model, row(a, 7, Wide::Draft(5)));
    refused(&mut model, row(a, 6, Wide::Draft(4)));
    let chain = model.draft(&[row(a, 6, Wide::Draft(5))]).unwrap();
    assert!(chain.faults.is_empty());
    // Rows written with drafted residuals are replaced: the same call again gives the same bytes.
    model.draft(&[row(a, 5, Wide::Kept)]).unwrap();
    assert_eq!(model.draft(&[row(a, 6, Wide::Draft(0))]).unwrap().logits, chain.logits);
}
