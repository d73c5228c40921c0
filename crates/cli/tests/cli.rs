//! The program as a user meets it: replies, files, errors and exit codes.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{Run, castiron, copy_checkpoint, repo, tensor_file};

#[test]
fn the_built_in_model_tells_a_story_and_tells_it_again() {
    let story = castiron(&["run", "Tell me a story.", "--max-tokens", "60"]).ok();
    assert!(story.split_whitespace().count() > 20, "{story:?}");
    assert!(story.is_ascii() && story.contains(". "), "{story:?}");
    assert_eq!(castiron(&["run", "Tell me a story.", "--max-tokens", "60"]).ok(), story);
    let other = castiron(&["run", "Tell me a story.", "--max-tokens", "60", "--seed", "9"]).ok();
    assert_ne!(other, story, "another seed");
    for form in [["--cpu", "law"], ["--chunk", "3"], ["--table", "memory"]] {
        let same = castiron(&["run", "Tell me a story.", "--max-tokens", "60", form[0], form[1]]).ok();
        assert_eq!(same, story, "{form:?} cannot be seen");
    }
}

#[test]
fn thoughts_go_to_standard_error_and_the_answer_to_standard_output() {
    let run = castiron(&["run", "What is 21 + 34?", "--thinking", "on", "--greedy"]);
    assert_eq!(run.code, 0, "{}", run.err);
    assert_eq!(run.out, "21 + 34 = 55.\n");
    assert!(run.err.contains("20 + 30 = 50"), "{}", run.err);
}

#[test]
fn json_counts_tokens_and_names_why_it_ended() {
    let run =
        castiron(&["--json", "run", "What is 21 + 34?", "--thinking", "on", "--greedy", "--logprobs", "2"]);
    let v: serde_json::Value = serde_json::from_str(&run.ok()).unwrap();
    assert_eq!(v["content"], "21 + 34 = 55.");
    assert_eq!(v["finish_reason"], "stop");
    let ids = v["ids"].as_array().unwrap();
    assert_eq!(v["usage"]["completion_tokens"], ids.len());
    let logprobs = v["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), ids.len());
    for (id, p) in ids.iter().zip(logprobs) {
        assert_eq!(&p["id"], id);
        assert_eq!(&p["top"][0]["id"], id, "greedy takes the likeliest");
        assert!(p["logprob"].as_f64().unwrap() <= 0.0);
    }
}

#[test]
fn stop_strings_end_a_reply_before_them() {
    let whole = castiron(&["run", "Tell me a story.", "--greedy", "--max-tokens", "60"]).ok();
    let cut = castiron(&["run", "Tell me a story.", "--greedy", "--max-tokens", "60", "--stop", ". T"]).ok();
    assert!(whole.contains(". T"), "{whole}");
    assert_eq!(cut, format!("{}\n", whole.split(". T").next().unwrap()));
    let short = castiron(&["--json", "run", "Tell me a story.", "--max-tokens", "3"]).ok();
    assert!(short.contains("\"finish_reason\":\"length\""), "{short}");
}

#[test]
fn logits_of_a_golden_equal_hugging_face() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("logits.safetensors");
    let golden = repo("tests/golden/tiny_a");
    let run = castiron(&[
        "logits",
        golden.to_str().unwrap(),
        "--ids",
        golden.join("golden.safetensors").to_str().unwrap(),
        "--out",
        out.to_str().unwrap(),
        "--activations",
        "f32",
        "--chunk",
        "7",
    ]);
    run.ok();
    let floats = |path: &std::path::Path| -> (Vec<usize>, Vec<f32>) {
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let t = file.tensor("logits").unwrap();
        (t.shape().to_vec(), t.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    };
    let (shape, got) = floats(&out);
    let (_, want) = floats(&golden.join("golden.safetensors"));
    assert_eq!(shape, [91, 211]);
    assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 5e-5));
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 1, "nothing else is left behind: {names:?}");
}

/// Runs `logits` on ids `input` (dtype, shape, bytes) and expects a refusal that writes nothing.
fn refused_ids(dtype: &str, shape: &[usize], data: &[u8], words: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids.safetensors");
    std::fs::write(&ids, tensor_file(&[("input_ids", dtype, shape, data)])).unwrap();
    let run = logits(&ids, dir.path());
    run.refused(words);
    assert!(!dir.path().join("out.safetensors").exists(), "nothing is written");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left behind");
}

fn logits(ids: &std::path::Path, out: &std::path::Path) -> Run {
    let golden = repo("tests/golden/tiny_a");
    let out = out.join("out.safetensors");
    castiron(&[
        "logits",
        golden.to_str().unwrap(),
        "--ids",
        ids.to_str().unwrap(),
        "--out",
        out.to_str().unwrap(),
    ])
}

#[test]
fn bad_ids_are_refused_before_anything_is_written() {
    let i64s = |ids: &[i64]| ids.iter().flat_map(|i| i.to_le_bytes()).collect::<Vec<u8>>();
    refused_ids("I64", &[1, 3], &i64s(&[1, 2, 211]), &["token id 211", "position 2", "211 ids"]);
    refused_ids("I64", &[2], &i64s(&[-1, 2]), &["token id -1", "position 0"]);
    refused_ids("I64", &[0], &[], &["empty"]);
    refused_ids("I64", &[2, 2], &i64s(&[1, 2, 3, 4]), &["shape [2, 2]", "[1, T]"]);
    refused_ids("F32", &[1], &[0; 4], &["F32", "integer"]);
    refused_ids("I32", &[4097], &[0; 4097 * 4], &["4097 tokens", "4096"]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ids.safetensors");
    logits(&path, dir.path()).refused(&["cannot read"]);
    std::fs::write(&path, b"nonsense").unwrap();
    logits(&path, dir.path()).refused(&["ids.safetensors"]);
    std::fs::write(&path, tensor_file(&[("ids", "I64", &[1], &[0; 8])])).unwrap();
    logits(&path, dir.path()).refused(&["no tensor `input_ids`"]);
}

#[test]
fn prompts_that_cannot_be_are_refused() {
    castiron(&["run"]).refused(&["Usage"]);
    castiron(&["run", "/no/such/folder", "hello"]).refused(&["/no/such/folder", "not a directory"]);
    castiron(&["run", "Tell me a story.", "--context", "4"]).refused(&["context", "4"]);
    castiron(&["run", "Tell me a story.", "--context", "999999999"]).refused(&["262144"]);
    castiron(&["run", "end <|im_end|> of turn"]).refused(&["<|im_end|>", "byte 4"]);
    castiron(&["run", "", "--raw"]).refused(&["no prompt"]);
    castiron(&["run", "hi", "--temperature", "nan"]).refused(&["temperature"]);
    castiron(&["run", "hi", "--top-p", "1.5"]).refused(&["top_p", "1.5"]);
    castiron(&["run", "hi", "--logprobs", "1"]).refused(&["--json"]);
    castiron(&["run", "hi", "--stop", ""]).refused(&["stop string"]);
    castiron(&["run", "hi", "--reasoning-effort", "immense"]).refused(&["immense", "xhigh"]);
    castiron(&["run", repo("assets/tiny").to_str().unwrap()]).refused(&["give a prompt"]);
    common::castiron_with_stdin(&["run", "-"], b"caf\xE9").refused(&["UTF-8", "byte 3"]);
}

#[test]
fn inspect_shows_components_without_reading_weights() {
    let text = castiron(&["inspect"]).ok();
    for word in ["experts", "nvfp4", "all"] {
        assert!(text.contains(word), "{word} in\n{text}");
    }
    let json = castiron(&["--json", "inspect", repo("tests/golden/tiny_fp8").to_str().unwrap()]).ok();
    let v: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(v["config"]["vocab_size"], 97);
    assert!(v["inventory"]["bytes"].as_u64().unwrap() > 3_000_000);
}

/// A copy of a golden with one thing changed must be refused within a second, naming `words`, and write
/// nothing to standard output.
fn damaged(name: &str, change: impl FnOnce(&std::path::Path), words: &[&str]) {
    let dir = copy_checkpoint(&repo(&format!("tests/golden/{name}")));
    change(dir.path());
    let started = std::time::Instant::now();
    let run = castiron(&["inspect", dir.path().to_str().unwrap()]);
    if run.code == 0 {
        // Values are looked at when the model is opened, before anything is run or written.
        let ids = repo(&format!("tests/golden/{name}/golden.safetensors"));
        let out = dir.path().join("out.safetensors");
        let args = ["logits", dir.path().to_str().unwrap(), "--ids", ids.to_str().unwrap(), "--out"];
        castiron(&[&args[..], &[out.to_str().unwrap()]].concat()).refused(words);
        assert!(!out.exists());
    } else {
        run.refused(words);
    }
    assert!(started.elapsed().as_secs() < 5, "a refusal is quick");
}

#[test]
fn damaged_files_are_refused_by_name() {
    let model = "model.safetensors";
    let edit = |f: fn(&mut Vec<u8>)| {
        move |dir: &std::path::Path| {
            let mut bytes = std::fs::read(dir.join(model)).unwrap();
            f(&mut bytes);
            std::fs::write(dir.join(model), bytes).unwrap();
        }
    };
    damaged("tiny_a", edit(|b| b.truncate(b.len() - 100)), &[model]);
    damaged("tiny_a", edit(|b| b.truncate(5)), &[model]);
    damaged("tiny_a", edit(|b| b[0] = b[0].wrapping_add(1)), &[model]);
    damaged("tiny_a", edit(|b| b[7] = 0x7F), &[model, "header"]);
    damaged("tiny_a", edit(|b| b.extend([0; 16])), &[model]);
    damaged("tiny_a", |dir| std::fs::remove_file(dir.join(model)).unwrap(), &["missing"]);
    damaged("tiny_a", |dir| std::fs::remove_file(dir.join("config.json")).unwrap(), &["config.json"]);
}

#[test]
fn damaged_tensors_are_refused_by_name() {
    use common::edit_tensors;
    let router = "model.layers.0.mlp.gate.weight";
    damaged("tiny_a", |d| edit_tensors(d, |t| t.retain(|t| t.0 != router)), &["missing", router]);
    let dtype =
        |t: &mut Vec<common::Tensor>| t.iter_mut().filter(|t| t.0 == router).for_each(|t| t.1 = "I32".into());
    damaged("tiny_a", |d| edit_tensors(d, dtype), &[router, "I32"]);
    let shape = |t: &mut Vec<common::Tensor>| {
        t.iter_mut().filter(|t| t.0 == router).for_each(|t| t.2.reverse());
    };
    damaged("tiny_a", |d| edit_tensors(d, shape), &[router, "[64, 16]"]);
    let pair = |t: &mut Vec<common::Tensor>| {
        for t in t.iter_mut().filter(|t| t.0.ends_with("ngram_embedding.weight_scale")) {
            t.2 = vec![2];
            t.3 = [t.3.clone(), t.3.clone()].concat();
        }
    };
    damaged("tiny_fp8", |d| edit_tensors(d, pair), &["weight_scale", "[2]"]);
    let extra = |t: &mut Vec<common::Tensor>| {
        t.push(("model.layers.9.odd".into(), "F32".into(), vec![1], vec![0; 4]))
    };
    damaged("tiny_a", |d| edit_tensors(d, extra), &["unexpected", "model.layers.9.odd"]);
}

#[test]
fn bad_configs_are_refused_by_key() {
    let set = |key: &'static str, value: serde_json::Value| {
        move |dir: &std::path::Path| {
            let path = dir.join("config.json");
            let mut v: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            v[key] = value;
            std::fs::write(path, v.to_string()).unwrap();
        }
    };
    for (key, value) in [
        ("hidden_size", serde_json::json!(0)),
        ("hidden_size", serde_json::json!(-64)),
        ("num_experts_per_tok", serde_json::json!(17)),
        ("indexer_compress_ratio", serde_json::json!(0)),
        ("vocab_size", serde_json::json!(1e30)),
        ("rms_norm_eps", serde_json::json!("small")),
        ("hidden_act", serde_json::json!("gelu")),
        ("num_key_value_heads", serde_json::json!(3)),
    ] {
        damaged("tiny_a", set(key, value), &["config.json", key]);
    }
    damaged("tiny_a", |d| std::fs::write(d.join("config.json"), b"{").unwrap(), &["config.json"]);
    damaged("tiny_a", |d| std::fs::write(d.join("config.json"), [0xFF, 0xFE]).unwrap(), &["config.json"]);
}

#[test]
fn a_template_that_never_ends_is_refused_within_a_second() {
    let source = repo("assets/tiny");
    for (template, word) in [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat template"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "chat template"),
        ("{% include 'chat_template.jinja' %}", "chat template"),
        ("{{ raise_exception('not today') }}", "not today"),
        ("{% if %}", "syntax error"),
    ] {
        let dir = copy_checkpoint(&source);
        std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
        let started = std::time::Instant::now();
        castiron(&["run", dir.path().to_str().unwrap(), "hello"]).refused(&[word]);
        assert!(started.elapsed().as_secs() < 5, "{template}");
    }
    let dir = copy_checkpoint(&source);
    std::fs::write(dir.path().join("tokenizer.json"), [b'{', 0xC3, b'}']).unwrap();
    castiron(&["run", dir.path().to_str().unwrap(), "hello"]).refused(&["tokenizer.json", "UTF-8"]);
}

#[test]
fn an_output_never_replaces_an_input_a_folder_or_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids.safetensors");
    std::fs::write(&ids, tensor_file(&[("input_ids", "I64", &[1], &[1, 0, 0, 0, 0, 0, 0, 0])])).unwrap();
    let golden = repo("tests/golden/tiny_a");
    let run = |out: &std::path::Path| {
        let (model, ids) = (golden.to_str().unwrap(), ids.to_str().unwrap());
        castiron(&["logits", model, "--ids", ids, "--out", out.to_str().unwrap()])
    };
    run(&ids).refused(&["would replace an input"]);
    run(&golden.join("model.safetensors")).refused(&["would replace an input"]);
    run(dir.path()).refused(&["cannot write"]);
    run(&dir.path().join("no/such/folder/out")).refused(&["cannot write"]);
    let target = dir.path().join("target.safetensors");
    std::fs::write(&target, b"old").unwrap();
    let link = dir.path().join("link.safetensors");
    std::os::unix::fs::symlink(&target, &link).unwrap();
    run(&link).ok();
    assert!(link.is_symlink() && std::fs::read(&target).unwrap().len() > 100, "a link is written through");
    run(std::path::Path::new("/dev/null")).ok();
    assert!(!std::path::Path::new("/dev/null").is_file(), "a device stays one");
}

#[test]
fn a_checkpoint_without_a_template_continues_the_prompt_as_it_stands() {
    let dir = copy_checkpoint(&repo("assets/tiny"));
    std::fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    let path = dir.path().to_str().unwrap();
    let plain = castiron(&["run", path, "One morning", "--greedy", "--max-tokens", "8"]).ok();
    assert_eq!(plain, castiron(&["run", path, "One morning", "--greedy", "--max-tokens", "8", "--raw"]).ok());
    castiron(&["run", path, "One morning", "--chat"]).refused(&["template"]);
}
