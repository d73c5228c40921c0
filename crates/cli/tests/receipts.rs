//! `plan`, `verify`, completions and manual pages.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{castiron, repo, tensor_file};
use serde_json::Value;

fn json(args: &[&str]) -> (i32, Value) {
    let run = castiron(&[&["--json"], args].concat());
    (run.code, serde_json::from_str(&run.out).unwrap_or_else(|e| panic!("{e}: {} {}", run.out, run.err)))
}

#[test]
fn a_plan_says_whether_it_fits_and_what_to_change() {
    let (code, plan) = json(&["plan", "--context", "1000", "--host-memory", "1GB"]);
    assert_eq!((code, &plan["fits"]), (0, &Value::Bool(true)));
    let number = |v: &Value, key: &str| v[key].as_u64().unwrap();
    assert_eq!(
        number(&plan, "needed_bytes"),
        number(&plan, "mapped_bytes") + number(&plan, "resident_bytes")
    );
    // Two attention layers of 2 x 64 keys and values, 32 index channels, a pooled key for 4 tokens; bf16.
    assert_eq!(number(&plan, "kv_bytes_per_token"), 2 * 2 * 128 * 2);
    assert_eq!(number(&plan, "index_bytes_per_token"), 2 * 32 * 2 * 5 / 4);
    assert!(plan["advice"].as_array().unwrap().is_empty());
    let smallest = number(&plan, "smallest_machine_bytes").to_string();
    assert_eq!(castiron(&["plan", "--context", "1000", "--host-memory", &smallest]).code, 0);

    let run = castiron(&["plan", "--streams", "8", "--host-memory", "200MB"]);
    assert_eq!(run.code, 1, "{}", run.out);
    for words in ["does not fit", "--context", "n-gram table", "keys and values"] {
        assert!(run.out.contains(words), "{words} in {}", run.out);
    }
    let (code, plan) = json(&["plan", "--host-memory", "10MB"]);
    assert_eq!((code, &plan["fits"]), (1, &Value::Bool(false)));
    assert!(plan["advice"][0].as_str().unwrap().contains("no setting fits"));
    castiron(&["plan", "--context", "999999999"]).refused(&["262144"]);
    castiron(&["plan", "--host-memory", "lots"]).refused(&["lots", "128GiB"]);
    assert_ne!(castiron(&["plan"]).code, 2, "this machine says how much memory it has");
}

#[test]
fn verify_gives_a_receipt() {
    let model = repo("tests/golden/tiny_fp8");
    let (code, receipt) =
        json(&["verify", model.to_str().unwrap(), "--tokens", "20", "--chunks", "1,7", "--full"]);
    assert_eq!(code, 0, "{receipt}");
    assert_eq!(receipt["agree"], true);
    let variants = receipt["variants"].as_array().unwrap();
    assert!(variants.len() >= 12, "levels x threads x chunks: {}", variants.len());
    for variant in variants {
        for key in
            ["logits_hash", "state_hash", "greedy_token_hash", "greedy_state_hash", "sampled_token_hash"]
        {
            assert_eq!(variant[key], variants[0][key], "{key}");
        }
    }
    assert_eq!(receipt["checkpoint_full"].as_str().unwrap().len(), 64);

    // The logits hash is that of `logits`, whatever wrote it.
    let dir = tempfile::tempdir().unwrap();
    let (ids, out) = (dir.path().join("ids.safetensors"), dir.path().join("out.safetensors"));
    let bytes: Vec<u8> = (0..12i64).flat_map(|i| (i * 7).to_le_bytes()).collect();
    std::fs::write(&ids, tensor_file(&[("input_ids", "I64", &[12], &bytes)])).unwrap();
    let (model, ids, out) = (model.to_str().unwrap(), ids.to_str().unwrap(), out.to_str().unwrap());
    let (_, logits) = json(&["logits", model, "--ids", ids, "--out", out]);
    let (_, receipt) =
        json(&["verify", model, "--ids", ids, "--chunks", "5", "--threads", "1", "--law-tokens", "3"]);
    let whole = receipt["variants"].as_array().unwrap().iter().find(|v| v["tokens"] == 12).unwrap();
    assert_eq!(whole["logits_hash"], logits["logits_hash"]);
    assert!(receipt["variants"].as_array().unwrap().iter().any(|v| v["tokens"] == 3 && v["level"] == "law"));
}

#[test]
fn verify_fails_and_names_the_place_of_a_planted_fault() {
    let model = repo("tests/golden/tiny_a");
    let args = ["verify", model.to_str().unwrap(), "--tokens", "24", "--chunks", "1,7", "--plant-fault", "2"];
    let run = castiron(&args);
    assert_eq!(run.code, 1, "{}", run.err);
    for words in ["DIFFERENT: ", "layer 2, tensor out, row", "column"] {
        assert!(run.out.contains(words), "{words} in {}", run.out);
    }
    let (code, receipt) = json(&args);
    assert_eq!(code, 1);
    let first = &receipt["difference"]["first"];
    assert_eq!((&first["layer"], &first["tensor"]), (&Value::from(2), &Value::from("out")));
    assert!(first["row"].is_u64() && first["column"].is_u64() && first["reference"] != first["other"]);
    castiron(&["verify", model.to_str().unwrap(), "--plant-fault", "99"]).refused(&["no such layer"]);
    castiron(&["verify", "--chunks", "0"]).refused(&["chunk of 0"]);
    castiron(&["verify", "--threads", "some"]).refused(&["some"]);
    assert!(!castiron(&["verify", "--help"]).ok().contains("plant"), "not a thing to use");
}

#[test]
fn completions_and_manual_pages_come_from_the_flag_table() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = castiron(&["completions", shell]).ok();
        assert!(script.contains("regenerate") || script.contains("max-tokens"), "{shell}");
    }
    castiron(&["completions", "tcsh"]).refused(&["tcsh"]);
    let page = castiron(&["man"]).ok();
    assert!(page.contains(".TH castiron 1") && page.contains("verify"), "{page}");
    assert!(castiron(&["man", "run"]).ok().contains("max\\-tokens"));
    castiron(&["man", "fly"]).refused(&["fly"]);
    let dir = tempfile::tempdir().unwrap();
    castiron(&["man", "--out", dir.path().to_str().unwrap()]).ok();
    for name in ["castiron.1", "castiron-run.1", "castiron-chat.1", "castiron-plan.1", "castiron-verify.1"] {
        assert!(dir.path().join(name).is_file(), "{name}");
    }
}
