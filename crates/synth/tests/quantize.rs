//! Quantised checkpoints: codes against an independent computation, disk against memory, refusals.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use castiron_format::{Checkpoint, MatrixData, Source};
use castiron_model::{ExpertActivations, Model, Options};
use castiron_synth::{
    Changes, Dense, Draft, Error, Experts, InputScales, Preset, Quantize, Run, Scales, Synth, Table,
    quantize, quantize_in_memory,
};
use common::{digest, disk, rows};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(Source::Dir(path.to_path_buf())).unwrap()
}

fn memory(checkpoint: &Checkpoint, options: &Quantize) -> Checkpoint {
    Checkpoint::open(quantize_in_memory(checkpoint, options, &Run::default()).unwrap().0).unwrap()
}

/// A BF16 checkpoint whose matrices have ragged 128-blocks.
fn ragged() -> Checkpoint {
    let mut config = Preset::Micro.config();
    Changes { hidden: Some(144), intermediate: Some(160), experts: Some(3), ..Changes::default() }
        .apply(&mut config);
    Synth { seed: 3, ..Synth::new(config) }.checkpoint().unwrap()
}

/// Name to (dtype, shape, bytes).
type Tensors = BTreeMap<String, (String, Vec<usize>, Vec<u8>)>;

fn tensors(checkpoint: &Checkpoint) -> Tensors {
    let entry = |t: castiron_format::StoredTensor<'_>| {
        (t.name.to_owned(), (t.dtype.name().to_owned(), t.shape.to_vec(), t.bytes.to_vec()))
    };
    checkpoint.tensors().map(entry).collect()
}

fn floats(bytes: &[u8], dtype: &str) -> Vec<f32> {
    match dtype {
        "BF16" => bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16))
            .collect(),
        "F32" => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        other => panic!("{other} is no plain dtype"),
    }
}

/// The nearest of a table of values in binary64, ties to the even index; beyond the last, the last.
fn nearest(x: f64, table: &[f64]) -> usize {
    let (mut best, mut distance) = (0, f64::INFINITY);
    for (i, v) in table.iter().enumerate() {
        let d = (x.abs() - v).abs();
        if d < distance || d == distance && i % 2 == 0 {
            (best, distance) = (i, d);
        }
    }
    best
}

fn e4m3() -> Vec<f64> {
    (0..127u32)
        .map(|c| {
            let (e, m) = (c >> 3, f64::from(c & 7));
            if e == 0 { m / 512.0 } else { (8.0 + m) / 8.0 * 2f64.powi(e as i32 - 7) }
        })
        .collect()
}

const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// An E4M3 code of `w / scale`, the quotient rounded to f32 first, as documented.
fn fp8_code(w: f32, scale: f32, table: &[f64]) -> u8 {
    let q = w / scale;
    nearest(f64::from(q), table) as u8 | if q.is_sign_negative() { 0x80 } else { 0 }
}

fn bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let low = bits & 0xFFFF;
    let up = low > 0x8000 || low == 0x8000 && bits & 0x1_0000 != 0;
    f32::from_bits((bits & 0xFFFF_0000) + if up { 0x1_0000 } else { 0 })
}

/// `[rows, cols]` of one expert projection out of the fused tensors.
fn expert(all: &Tensors, module: &str) -> (Vec<f32>, usize, usize) {
    let (stem, rest) = module.split_once(".experts.").unwrap();
    let (e, projection) = rest.split_once('.').unwrap();
    let e: usize = e.parse().unwrap();
    let down = projection == "down_proj";
    let fused = if down { "down_proj" } else { "gate_up_proj" };
    let (dtype, shape, bytes) = &all[&format!("{stem}.experts.{fused}")];
    let (rows, cols) = (if down { shape[1] } else { shape[1] / 2 }, shape[2]);
    let first = e * shape[1] * cols + if projection == "up_proj" { rows * cols } else { 0 };
    (floats(bytes, dtype)[first..first + rows * cols].to_vec(), rows, cols)
}

fn modules(all: &Tensors, end: &str) -> Vec<String> {
    all.keys()
        .filter(|n| n.contains(".experts."))
        .filter_map(|n| n.strip_suffix(end))
        .map(str::to_owned)
        .collect()
}

#[test]
fn block_fp8_is_the_documented_rule() {
    let input = ragged();
    let table = e4m3();
    for scales in [Scales::Bf16, Scales::F32] {
        let made = memory(&input, &Quantize { experts: Experts::Fp8, scales, ..Quantize::default() });
        let (before, after) = (tensors(&input), tensors(&made));
        let modules = modules(&after, ".weight_scale_inv");
        assert_eq!(modules.len(), 5 * 3 * 3, "four layers and the draft head");
        for module in modules {
            let (w, rows, cols) = expert(&before, &module);
            let (dtype, shape, bytes) = &after[&format!("{module}.weight_scale_inv")];
            assert_eq!(shape, &[rows.div_ceil(128), cols.div_ceil(128)]);
            let stored = floats(bytes, dtype);
            let codes = &after[&format!("{module}.weight")].2;
            for (b, &scale) in stored.iter().enumerate() {
                let (r0, c0) = (b / shape[1] * 128, b % shape[1] * 128);
                let cells: Vec<usize> = (r0..rows.min(r0 + 128))
                    .flat_map(|r| (c0..cols.min(c0 + 128)).map(move |c| r * cols + c))
                    .collect();
                let amax = cells.iter().map(|&i| w[i].abs()).fold(0.0, f32::max);
                let want = if scales == Scales::Bf16 { bf16(amax / 448.0) } else { amax / 448.0 };
                assert_eq!(scale, want);
                for i in cells {
                    assert_eq!(codes[i], fp8_code(w[i], scale, &table), "{module} {i}");
                }
            }
        }
    }
}

#[test]
fn nvfp4_is_the_documented_rule() {
    let input = ragged();
    let table = e4m3();
    let options =
        Quantize { experts: Experts::Nvfp4, draft: Draft::As(Experts::Nvfp4), ..Quantize::default() };
    let made = memory(&input, &options);
    let (before, after) = (tensors(&input), tensors(&made));
    let modules = modules(&after, ".weight_scale_2");
    assert_eq!(modules.len(), 5 * 3 * 3);
    assert!(!made.declared_w4a4() && after.keys().all(|n| !n.ends_with("input_scale")), "weights only");
    for module in modules {
        let (w, rows, cols) = expert(&before, &module);
        let amax = w.iter().map(|x| x.abs()).fold(0.0, f32::max);
        let (_, shape, bytes) = &after[&format!("{module}.weight_scale_2")];
        let scale_2 = floats(bytes, "F32")[0];
        assert!(shape.is_empty() && scale_2 == amax / 2688.0);
        let (codes, scales) =
            (&after[&format!("{module}.weight")].2, &after[&format!("{module}.weight_scale")].2);
        assert_eq!((codes.len(), scales.len()), (rows * cols / 2, rows * cols / 16));
        for (g, group) in w.chunks(16).enumerate() {
            let amax = group.iter().map(|x| x.abs()).fold(0.0, f32::max);
            let scale = nearest(f64::from(amax / 6.0 / scale_2), &table);
            assert_eq!(usize::from(scales[g]), scale);
            let step = table[scale] as f32 * scale_2;
            for (i, x) in group.iter().enumerate() {
                let q = x / step;
                let index = nearest(f64::from(q), &E2M1) as u8;
                let want = index | if q < 0.0 && index != 0 { 8 } else { 0 };
                let byte = codes[(g * 16 + i) / 2];
                assert_eq!(if i % 2 == 0 { byte & 15 } else { byte >> 4 }, want, "{module} {g} {i}");
            }
        }
    }
}

#[test]
fn a_table_has_one_scale_and_dense_rows_have_one_each() {
    let input = ragged();
    let made = memory(&input, &Quantize { table: Table::Fp8, dense: Dense::Fp8Row, ..Quantize::default() });
    let (before, after) = (tensors(&input), tensors(&made));
    let table = e4m3();
    let shards: Vec<&String> = after.keys().filter(|n| n.contains("ngram_embedding.shard_")).collect();
    assert_eq!(shards.len(), 4);
    let values = |name: &str| floats(&before[name].2, "BF16");
    let amax = shards.iter().flat_map(|n| values(n)).fold(0.0f32, |m, x| m.max(x.abs()));
    let name = after.keys().find(|n| n.ends_with("ngram_embedding.weight_scale")).unwrap();
    let (dtype, shape, bytes) = &after[name];
    assert_eq!((dtype.as_str(), shape.as_slice()), ("BF16", &[1][..]));
    let scale = floats(bytes, dtype)[0];
    assert_eq!(scale, bf16(amax / 448.0));
    for shard in shards {
        assert_eq!(after[shard].0, "F8_E4M3");
        assert!(values(shard).iter().zip(&after[shard].2).all(|(w, c)| *c == fp8_code(*w, scale, &table)));
    }
    let mut count = 0;
    for (name, (dtype, shape, bytes)) in
        after.iter().filter(|(n, _)| n.ends_with(".weight_scale") && !n.contains("ngram"))
    {
        let weight = format!("{}.weight", name.strip_suffix(".weight_scale").unwrap());
        let (w, cols) = (values(&weight), before[&weight].1[1]);
        assert_eq!((dtype.as_str(), shape.as_slice()), ("F32", &[w.len() / cols, 1][..]));
        for ((row, codes), scale) in
            w.chunks(cols).zip(after[&weight].2.chunks(cols)).zip(floats(bytes, "F32"))
        {
            assert_eq!(scale, row.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 448.0);
            assert!(row.iter().zip(codes).all(|(w, c)| *c == fp8_code(*w, scale, &table)), "{weight}");
        }
        count += 1;
    }
    // 3 linear layers of 3, attention and draft of 4, 5 shared experts of 3, 12 reads of 2, ple and fc of 2, the head.
    assert_eq!(count, 3 * 3 + 2 * 4 + 5 * 3 + 12 * 2 + 2 + 2 + 1);
}

#[test]
fn what_must_not_be_quantised_is_copied_bit_for_bit() {
    let input = open(&golden("tiny_bf16"));
    let options =
        Quantize { experts: Experts::Fp8, table: Table::Fp8, dense: Dense::Fp8Row, ..Quantize::default() };
    let made = memory(&input, &options);
    let (before, after) = (tensors(&input), tensors(&made));
    let kept = [
        "norm",
        "mlp.gate.",
        "shared_expert_gate",
        "block_inject",
        "A_log",
        "dt_bias",
        "conv1d",
        "in_proj_a",
        "in_proj_b",
        "index_qk",
        "embed_tokens",
        "multipliers",
        "ngram_heads",
    ];
    for word in kept {
        let names: Vec<_> = before.keys().filter(|n| n.contains(word)).collect();
        assert!(!names.is_empty(), "{word}");
        assert!(names.iter().all(|n| before[*n] == after[*n]), "{word}");
    }
    let quantised = |t: &(String, Vec<usize>, Vec<u8>)| t.0 == "F8_E4M3";
    assert!(after.iter().all(|(n, t)| quantised(t) || n.contains("scale") || before[n] == *t));
    // Nothing asked: everything is a copy, and so is the configuration.
    let copy = memory(&input, &Quantize::default());
    assert_eq!(tensors(&copy), before);
    assert_eq!(&*copy.file("config.json").unwrap().unwrap(), &*input.file("config.json").unwrap().unwrap());
}

fn logits(checkpoint: &Checkpoint) -> Vec<u32> {
    let mut model = Model::open(checkpoint, &Options::default()).unwrap();
    let slot = model.new_stream().unwrap();
    let rows = rows(slot, 40, model.vocab());
    model.forward(&rows, &[]).unwrap().logits.iter().map(|x| x.to_bits()).collect()
}

/// Every choice that makes a difference.
fn choices() -> Vec<Quantize> {
    let mut all = Vec::new();
    for experts in [Experts::Keep, Experts::Fp8, Experts::Nvfp4] {
        for table in [Table::Keep, Table::Fp8] {
            for dense in [Dense::Keep, Dense::Fp8Row] {
                all.push(Quantize { experts, table, dense, ..Quantize::default() });
            }
        }
    }
    all
}

#[test]
fn converting_and_loading_equals_quantising_at_load() {
    let input = Synth { seed: 11, ..Synth::new(Preset::Micro.config()) }.checkpoint().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for (i, options) in choices().iter().enumerate() {
        let path = dir.path().join(i.to_string());
        let report =
            quantize(&input, options, &path, &Run { shard_bytes: 100_000, ..Run::default() }).unwrap();
        let run = Run { shard_bytes: 100_000, threads: 3, ..Run::default() };
        let (source, other) = quantize_in_memory(&input, options, &run).unwrap();
        assert_eq!(digest(&source), digest(&disk(&path)), "{options:?}");
        assert_eq!(report, other);
        let (on_disk, in_memory) = (open(&path), Checkpoint::open(source).unwrap());
        let hash = logits(&on_disk);
        assert_eq!(hash, logits(&in_memory), "{options:?}");
        assert!(seen.insert(hash), "{options:?} is seen in the logits");
    }
}

#[test]
fn errors_are_small_and_reported_by_kind() {
    let input = open(&golden("tiny_bf16"));
    let options =
        Quantize { experts: Experts::Fp8, table: Table::Fp8, dense: Dense::Fp8Row, ..Quantize::default() };
    let (source, report) = quantize_in_memory(&input, &options, &Run::default()).unwrap();
    let kinds: Vec<&str> = report.errors.iter().map(|e| e.kind.as_str()).collect();
    assert_eq!(
        kinds,
        [
            "dense projections: fp8, a scale a row",
            "draft experts: block fp8",
            "n-gram table: fp8, one scale",
            "routed experts: block fp8"
        ]
    );
    for e in &report.errors {
        // Three fraction bits: half a step is at most 1/16 of a value, a uniform error in it about 0.026 of it.
        assert!(e.relative_rms > 0.005 && e.relative_rms < 0.04, "{e:?}");
        assert!(
            e.max_abs.is_finite() && e.max_abs > 0.0 && e.clipped < 0.01 && e.zero_blocks < 0.01,
            "{e:?}"
        );
    }
    assert_eq!(report.errors[3].tensors, 4 * 16 * 3);
    let logits = logits(&Checkpoint::open(source).unwrap());
    assert!(logits.iter().all(|&x| f32::from_bits(x).is_finite()));
    // NVFP4, where sizes allow it.
    let input = Synth::new(Preset::Micro.config()).checkpoint().unwrap();
    let options = Quantize { experts: Experts::Nvfp4, ..Quantize::default() };
    let (_, report) = quantize_in_memory(&input, &options, &Run::default()).unwrap();
    let e = report.errors.iter().find(|e| e.kind == "routed experts: nvfp4").unwrap();
    assert!((0.05..0.15).contains(&e.relative_rms), "{e:?}");
}

#[test]
fn input_scales_make_a_checkpoint_for_four_bit_activations() {
    let input = Synth::new(Preset::Micro.config()).checkpoint().unwrap();
    let dir = tempfile::tempdir().unwrap();
    // Scales from a checkpoint that has them: a synthetic one.
    let full = Synth { experts: Experts::Nvfp4, ..Synth::new(Preset::Micro.config()) };
    let run = Run::default();
    full.write(&dir.path().join("full"), &run).unwrap();
    let scales = InputScales::read(&dir.path().join("full/model-00001-of-00001.safetensors")).unwrap();
    let options = Quantize { experts: Experts::Nvfp4, input_scales: scales.clone(), ..Quantize::default() };
    let (source, _) = quantize_in_memory(&input, &options, &run).unwrap();
    assert_eq!(digest(&source), digest(&disk(&dir.path().join("full"))));
    let checkpoint = Checkpoint::open(source).unwrap();
    assert!(checkpoint.declared_w4a4());
    let model = Model::open(&checkpoint, &Options::default()).unwrap();
    assert_eq!(model.numerics().experts, ExpertActivations::W4a4);
    // One is missing.
    let InputScales::Named(mut named) = scales else { panic!("read from a file") };
    let (lost, _) = named.pop_first().unwrap();
    let options = Quantize { input_scales: InputScales::Named(named), ..options };
    let error = quantize_in_memory(&input, &options, &run).unwrap_err();
    assert!(error.to_string().contains(&lost), "{error}");
    let none = golden("tiny_bf16/model.safetensors");
    assert!(InputScales::read(&none).unwrap_err().to_string().contains("input_scale"));
    assert!(matches!(InputScales::read(Path::new("nowhere")), Err(Error::Io(..))));
}

#[test]
fn side_files_come_along_and_the_configuration_says_what_was_done() {
    let input = open(&golden("tiny_bf16"));
    let config = |options: &Quantize| -> serde_json::Value {
        serde_json::from_slice(&memory(&input, options).file("config.json").unwrap().unwrap()).unwrap()
    };
    let fp8 = config(&Quantize { experts: Experts::Fp8, table: Table::Fp8, ..Quantize::default() });
    assert_eq!(fp8["quantization_config"]["quant_method"], "fp8");
    assert_eq!(fp8["quantization_config"]["weight_block_size"], serde_json::json!([128, 128]));
    let kept = fp8["quantization_config"]["modules_to_not_convert"].as_array().unwrap();
    assert!(
        kept.iter().any(|m| m == "lm_head")
            && kept.iter().all(|m| !m.as_str().unwrap().contains(".experts."))
    );
    assert_eq!(fp8["ple_embedding_dtype"], "float8_e4m3fn");
    let row = config(&Quantize { dense: Dense::Fp8Row, ..Quantize::default() });
    assert_eq!(row["quantization_config"]["quant_method"], "castiron");
    let micro = Synth { experts: Experts::Nvfp4, table: Table::Fp8, ..Synth::new(Preset::Micro.config()) };
    let text = micro.checkpoint().unwrap().file("config.json").unwrap().unwrap();
    let mixed: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(mixed["quantization_config"]["quant_algo"], "MIXED_PRECISION");
    let layers = &mixed["quantization_config"]["quantized_layers"];
    assert_eq!(layers["model.language_model.layers.2.mlp.experts"]["quant_algo"], "NVFP4");
    assert_eq!(layers["mtp.layers.0.mlp.experts"]["quant_algo"], "FP8_BLOCK_SCALES");
    assert_eq!(mixed["text_config"]["ple_embedding_dtype"], "float8_e4m3fn");
    // Every other file, byte for byte.
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    std::fs::create_dir(&from).unwrap();
    for file in ["config.json", "model.safetensors", "mtp.safetensors", "golden.safetensors"] {
        std::fs::copy(golden("tiny_bf16").join(file), from.join(file)).unwrap();
    }
    std::fs::write(from.join("tokenizer.json"), b"{\"x\":1}").unwrap();
    std::fs::create_dir(from.join("folder")).unwrap();
    let report = quantize(
        &open(&from),
        &Quantize { experts: Experts::Fp8, ..Quantize::default() },
        &to,
        &Run::default(),
    );
    assert!(report.unwrap().notes.iter().any(|n| n.contains("folder")));
    assert_eq!(std::fs::read(to.join("tokenizer.json")).unwrap(), b"{\"x\":1}");
    assert!(!to.join("golden.safetensors").exists() && to.join("model.safetensors.index.json").exists());
}

#[test]
fn what_cannot_be_quantised_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let refuse = |input: &Checkpoint, options: &Quantize, words: &[&str]| {
        let error = quantize(input, options, &out, &Run::default()).unwrap_err().to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{error}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    };
    let nvfp4 = Quantize { experts: Experts::Nvfp4, ..Quantize::default() };
    let fp8 = Quantize { experts: Experts::Fp8, ..Quantize::default() };
    let table = Quantize { table: Table::Fp8, ..Quantize::default() };
    refuse(&open(&golden("tiny_bf16")), &nvfp4, &["24 inputs", "multiple of 16", "fp8"]);
    refuse(&open(&golden("tiny_fp8")), &nvfp4, &["F8_E4M3 already", "experts"]);
    refuse(&open(&golden("tiny_nvfp4")), &fp8, &["U8 already"]);
    refuse(&open(&golden("tiny_fp8")), &table, &["F8_E4M3 already", "keep the table"]);
    // A weight that is not a number, in the experts and in the table, is found wherever it is.
    let synth = Synth::new(Preset::Micro.config());
    for (name, options) in
        [("experts.gate_up_proj", &fp8), ("shard_3.weight", &table), ("experts.down_proj", &nvfp4)]
    {
        let damaged = damage(&synth, name);
        refuse(&damaged, options, &[name, "element 5 is not finite"]);
    }
    std::fs::create_dir(&out).unwrap();
    let error = quantize(&open(&golden("tiny_bf16")), &fp8, &out, &Run::default()).unwrap_err();
    assert!(error.to_string().contains("exists already"));
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 0, "an existing place is not touched");
}

/// A synthetic checkpoint with a NaN at element 5 of the tensor whose name ends in `end`.
fn damage(synth: &Synth, end: &str) -> Checkpoint {
    let source = synth.source(&Run::default()).unwrap();
    let Source::Owned(mut files) = source else { panic!("in memory") };
    let (_, file) = files.iter_mut().find(|(name, _)| name.ends_with(".safetensors")).unwrap();
    let header = castiron_format::safetensors::read_header("x", file).unwrap();
    let tensor = header.tensors.iter().find(|t| t.name.ends_with(end)).unwrap();
    let mut bytes = file.to_vec();
    let at = tensor.range.start + 10;
    bytes[at..at + 2].copy_from_slice(&0x7FC0u16.to_le_bytes());
    *file = bytes.into();
    Checkpoint::open(Source::Owned(files)).unwrap()
}

#[test]
fn row_scales_are_checked_when_read() {
    let input = Synth::new(Preset::Micro.config()).checkpoint().unwrap();
    let (source, _) = quantize_in_memory(
        &input,
        &Quantize { dense: Dense::Fp8Row, ..Quantize::default() },
        &Run::default(),
    )
    .unwrap();
    let head = Checkpoint::open(source.clone()).unwrap().weights().unwrap().lm_head;
    assert!(matches!(head.data, MatrixData::Fp8Row { .. }) && head.format() == "fp8-row");
    let Source::Owned(files) = source else { panic!("in memory") };
    let at = files.iter().position(|(name, _)| name.ends_with(".safetensors")).unwrap();
    let header = castiron_format::safetensors::read_header("x", &files[at].1).unwrap();
    let scale = header.tensors.iter().find(|t| t.name == "lm_head.weight_scale").unwrap().range.start;
    for bad in [0.0f32, -1.0, f32::NAN, f32::INFINITY] {
        let mut bytes = files[at].1.to_vec();
        bytes[scale..scale + 4].copy_from_slice(&bad.to_le_bytes());
        let mut files = files.clone();
        files[at].1 = bytes.into();
        let error = Checkpoint::open(Source::Owned(files)).unwrap().weights().unwrap_err();
        assert!(error.to_string().contains("lm_head.weight_scale"), "{error}");
    }
}
