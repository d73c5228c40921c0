//! The trained checkpoint with four-bit experts against an independent model in binary64: logits of every 16th
//! row and the likeliest token of every row of one 258-token prompt.
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod common;

use castiron_model::{Activations, ExpertActivations, Options};
use common::{Golden, argmax, feed, max_diff, open, repo};

/// Share of rows whose likeliest token agrees, and the largest difference over every 16th row.
fn compare(golden: &str, activations: Activations, experts: ExpertActivations) -> (f64, f32) {
    let g = Golden::load(&repo("tests/golden/tiny_w4a4.safetensors"));
    let options = Options { activations, experts: Some(experts), ..Options::default() };
    let mut model = open("assets/tiny", &options);
    let slot = model.new_stream().unwrap();
    let logits = feed(&mut model, slot, &g.input_ids(), 512);
    let rows: Vec<&[f32]> = logits.chunks_exact(model.vocab()).collect();
    let want = g.ids(&format!("argmax.{golden}"));
    let same = rows.iter().zip(want).filter(|(row, want)| i64::from(argmax(row)) == **want).count();
    let chosen: Vec<f32> = rows.iter().step_by(16).flat_map(|r| r.iter().copied()).collect();
    (same as f64 / rows.len() as f64, max_diff(&chosen, g.floats(&format!("every16.{golden}"))))
}

#[test]
fn unrounded_activations_equal_the_reference_in_both_expert_modes() {
    for (golden, experts) in [("w4a4_f32", ExpertActivations::W4a4), ("w4a16", ExpertActivations::W4a16)] {
        let (agree, worst) = compare(golden, Activations::F32, experts);
        assert!(worst <= 5e-5, "{golden}: {worst:e}");
        assert_eq!(agree, 1.0, "{golden}");
    }
}

/// Stored rows flip a quantiser on tiny differences, so only the likeliest token is compared, loosely.
#[test]
fn stored_activations_agree_in_the_likeliest_token() {
    let (agree, _) = compare("w4a4_bf16", Activations::Bf16, ExpertActivations::W4a4);
    assert!(agree >= 0.98, "{agree}");
    let (agree, _) = compare("w4a16", Activations::Bf16, ExpertActivations::W4a16);
    assert!(agree >= 0.98, "{agree}");
}
