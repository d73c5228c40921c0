//! `synth` and `quantize` as a user meets them.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::path::Path;

use common::{castiron, repo, tensor_file};
use serde_json::Value;

fn arg(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn hash(model: &Path, dir: &Path) -> String {
    let ids: Vec<u8> = (0..20i64).flat_map(|i| (i * 7 % 97).to_le_bytes()).collect();
    let file = dir.join("ids.safetensors");
    std::fs::write(&file, tensor_file(&[("input_ids", "I64", &[20], &ids)])).unwrap();
    let out = dir.join("logits.safetensors");
    let run = castiron(&["--json", "logits", arg(model), "--ids", arg(&file), "--out", arg(&out)]).ok();
    serde_json::from_str::<Value>(&run).unwrap()["logits_hash"].as_str().unwrap().to_owned()
}

#[test]
fn a_synthetic_checkpoint_runs_and_quantising_it_is_making_it_quantised() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let made = castiron(&["--json", "synth", arg(&at("bf16")), "--layers", "5", "--seed", "3"]).ok();
    let made: Value = serde_json::from_str(&made).unwrap();
    assert_eq!(made["files"], 1);
    let inspect: Value =
        serde_json::from_str(&castiron(&["--json", "inspect", arg(&at("bf16"))]).ok()).unwrap();
    assert_eq!((&inspect["digest"], &inspect["config"]["num_layers"]), (&made["digest"], &5.into()));
    castiron(&["synth", arg(&at("again")), "--layers", "5", "--seed", "3"]).ok();
    assert_eq!(hash(&at("bf16"), dir.path()), hash(&at("again"), dir.path()));
    castiron(&["synth", arg(&at("other")), "--layers", "5", "--seed", "4"]).ok();
    assert_ne!(hash(&at("bf16"), dir.path()), hash(&at("other"), dir.path()));

    let quantised = castiron(&[
        "quantize",
        arg(&at("bf16")),
        arg(&at("q")),
        "--experts",
        "nvfp4",
        "--table",
        "fp8",
        "--json",
    ]);
    let report: Value = serde_json::from_str(&quantised.ok()).unwrap();
    let kinds: Vec<&str> =
        report["errors"].as_array().unwrap().iter().map(|e| e["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["draft experts: block fp8", "n-gram table: fp8, one scale", "routed experts: nvfp4"]);
    assert!(report["errors"][2]["relative_rms"].as_f64().unwrap() < 0.15);
    let flags = ["--layers", "5", "--seed", "3", "--format", "nvfp4", "--table", "fp8", "--weight-only"];
    castiron(&[&["synth", arg(&at("direct"))], &flags[..]].concat()).ok();
    for entry in std::fs::read_dir(at("q")).unwrap() {
        let name = entry.unwrap().file_name();
        assert!(
            std::fs::read(at("q").join(&name)).unwrap() == std::fs::read(at("direct").join(&name)).unwrap()
        );
    }
    let text = castiron(&["quantize", arg(&at("bf16")), arg(&at("rows")), "--dense", "fp8-row"]).ok();
    assert!(text.contains("relative rms") && text.contains("dense projections"), "{text}");
    assert_ne!(hash(&at("rows"), dir.path()), hash(&at("bf16"), dir.path()));
}

#[test]
fn a_shape_can_be_taken_from_a_file_and_a_table_can_be_a_hole() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let shape = repo("tests/golden/tiny_b/config.json");
    let args =
        ["synth", arg(&out), "--shape", arg(&shape), "--table-sparse", "--table-base", "2000003", "--no-mtp"];
    castiron(&args).ok();
    let inspect: Value = serde_json::from_str(&castiron(&["--json", "inspect", arg(&out)]).ok()).unwrap();
    assert_eq!(inspect["config"]["mtp_layers"], 0);
    assert_eq!(inspect["config"]["ple"]["vocab_base"], 2_000_003);
    assert_eq!(hash(&out, dir.path()).len(), 64);
}

#[test]
fn bad_requests_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let bf16 = repo("tests/golden/tiny_bf16");
    castiron(&["synth", arg(dir.path())]).refused(&["exists already"]);
    castiron(&["synth", arg(&out), "--heads", "3"]).refused(&["num_attention_heads", "multiple"]);
    castiron(&["synth", arg(&out), "--format", "nvfp4", "--intermediate", "24"])
        .refused(&["24", "multiple of 16"]);
    castiron(&["synth", arg(&out), "--shape", "nowhere.json"]).refused(&["nowhere.json"]);
    castiron(&["quantize", arg(&bf16), arg(&out)]).refused(&["--experts"]);
    castiron(&["quantize", arg(&bf16), arg(dir.path()), "--experts", "fp8"]).refused(&["exists already"]);
    castiron(&["quantize", arg(&bf16), arg(&out), "--experts", "nvfp4"]).refused(&["24 inputs", "fp8"]);
    let fp8 = repo("tests/golden/tiny_fp8");
    castiron(&["quantize", arg(&fp8), arg(&out), "--table", "fp8"]).refused(&["F8_E4M3 already"]);
    castiron(&["quantize", "nowhere", arg(&out), "--table", "fp8"]).refused(&["nowhere"]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
}
