//! Synthetic checkpoints: the same bytes everywhere, and a model that means something.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use castiron_format::{Checkpoint, Config, LayerKind, MatrixData, Mixer, Source, TableMode};
use castiron_model::{Model, Options, Row};
use castiron_synth::{Changes, Error, Experts, Preset, Quantize, Run, Synth, Table, quantize_in_memory};
use common::{digest, disk, owned};

fn micro() -> Config {
    Preset::Micro.config()
}

fn every_format() -> Vec<Synth> {
    let all = [Experts::Keep, Experts::Fp8, Experts::Nvfp4].into_iter();
    all.flat_map(|experts| {
        [Table::Keep, Table::Fp8].map(|table| Synth { experts, table, seed: 7, ..Synth::new(micro()) })
    })
    .collect()
}

#[test]
fn the_bytes_of_a_seed_are_pinned() {
    let source = |synth: &Synth| synth.source(&Run::default()).unwrap();
    let bf16 = Synth { seed: 7, ..Synth::new(micro()) };
    assert_eq!(digest(&source(&bf16)), BF16);
    let fp4 = Synth { experts: Experts::Nvfp4, table: Table::Fp8, ..bf16.clone() };
    assert_eq!(digest(&source(&fp4)), NVFP4);
    assert_ne!(digest(&source(&Synth { seed: 8, ..bf16 })), BF16);
}

const BF16: &str = "f4f9265baec5786eb2c5d7a7137b6a4674fe58f10883339145b36e2eef55d74d";
const NVFP4: &str = "35079283b78cc1326130f4fe7eaedb7e5f8f98cd3e6849b46034b92a4b552b9e";

#[test]
fn files_and_threads_cannot_be_seen() {
    for synth in every_format() {
        let one = synth.source(&Run { threads: 1, shard_bytes: 60_000, ..Run::default() }).unwrap();
        let many = synth.source(&Run { threads: 5, shard_bytes: 60_000, ..Run::default() }).unwrap();
        assert!(owned(&one).len() > 8, "several files");
        assert_eq!(digest(&one), digest(&many));
        // On the disk the same.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let report = synth.write(&path, &Run { shard_bytes: 60_000, ..Run::default() }).unwrap();
        assert_eq!(digest(&one), digest(&disk(&path)));
        assert_eq!(report.digest, Checkpoint::open(one).unwrap().digest());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
    }
}

#[test]
fn a_format_is_the_quantised_bf16() {
    let bf16 = Synth { seed: 7, ..Synth::new(micro()) }.checkpoint().unwrap();
    for synth in every_format() {
        let synth = Synth { input_scales: false, ..synth };
        let options = Quantize { experts: synth.experts, table: synth.table, ..Quantize::default() };
        let (quantised, _) = quantize_in_memory(&bf16, &options, &Run::default()).unwrap();
        assert_eq!(digest(&quantised), digest(&synth.source(&Run::default()).unwrap()), "{options:?}");
    }
}

#[test]
fn every_preset_passes_the_census() {
    for (name, preset) in Preset::ALL {
        let mut config = preset.config();
        // Small enough for a test; the widths stay.
        let changes = Changes {
            layers: Some(config.num_layers.min(4)),
            experts: Some(config.moe.experts.min(2)),
            vocab: Some(config.vocab_size.min(512)),
            table_base: Some(97),
            table_parts: Some(3),
            ..Changes::default()
        };
        changes.apply(&mut config);
        let wide = config.hidden_size > 256;
        if wide {
            // Both kinds of layers once.
            config.num_layers = 2;
            config.layer_kinds = vec![LayerKind::Linear, LayerKind::Attention];
        }
        let formats = [Experts::Nvfp4, Experts::Fp8, Experts::Keep];
        for experts in formats.into_iter().take(if wide { 1 } else { 3 }) {
            let synth = Synth { experts, table: Table::Fp8, ..Synth::new(config.clone()) };
            let checkpoint = synth.checkpoint().unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(checkpoint.config(), &config);
            assert!(checkpoint.notes().is_empty(), "{:?}", checkpoint.notes());
            assert_eq!(checkpoint.declared_w4a4(), experts == Experts::Nvfp4);
            checkpoint.weights().unwrap();
        }
    }
}

#[test]
fn scales_are_those_of_a_real_model() {
    let checkpoint = Synth::new(Preset::Mini.config()).checkpoint().unwrap();
    let weights = checkpoint.weights().unwrap();
    let rms = |v: &[f32]| (v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / v.len() as f64).sqrt();
    let mean = |v: &[f32]| v.iter().map(|x| f64::from(*x)).sum::<f64>() / v.len() as f64;
    let MatrixData::Bf16(embed) = &weights.embed.data else { panic!("bf16") };
    let embed: Vec<f32> = embed
        .as_chunks::<2>()
        .0
        .iter()
        .map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16))
        .collect();
    assert!((rms(&embed) - 0.02).abs() < 2e-4);
    assert!((mean(&weights.layers[0].attn_hc.norm) + 0.06).abs() < 0.01);
    assert!((mean(&weights.mtp.as_ref().unwrap().norm_embedding) + 0.76).abs() < 0.02);
    let Mixer::Gdn(gdn) = &weights.layers[0].mixer else { panic!("layer 0 is linear") };
    assert!((mean(&gdn.norm) - 0.97).abs() < 0.05);
    assert!(gdn.a_log.iter().all(|a| (0.0..2.76).contains(a)));
    assert!(gdn.dt_bias.iter().all(|d| (-6.0..-1.9).contains(d)));
}

/// Logits of a few tokens.
fn logits(checkpoint: &Checkpoint, tokens: u32) -> Vec<f32> {
    let mut model = Model::open(checkpoint, &Options::default()).unwrap();
    let slot = model.new_stream().unwrap();
    let rows: Vec<Row> = common::rows(slot, tokens, model.vocab());
    model.forward(&rows, &[]).unwrap().logits
}

#[test]
fn logits_are_finite_and_spread() {
    for synth in every_format() {
        let logits = logits(&synth.checkpoint().unwrap(), 24);
        assert!(logits.iter().all(|x| x.is_finite()));
        let rms = (logits.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / logits.len() as f64).sqrt();
        assert!((0.3..6.0).contains(&rms), "{:?} {rms}", synth.experts);
    }
}

#[test]
fn a_sparse_table_has_rows_at_the_shard_starts_and_zeros_elsewhere() {
    for table in [Table::Keep, Table::Fp8] {
        let dense = Synth { table, ..Synth::new(micro()) };
        let sparse = Synth { sparse_table: true, ..dense.clone() };
        let (a, b) = (dense.checkpoint().unwrap(), sparse.checkpoint().unwrap());
        let open = |c: &Checkpoint| c.ngram_table(1, TableMode::Memory).unwrap();
        let (a, b) = (open(&a), open(&b));
        let each = a.rows().div_ceil(4);
        let row = |t: &castiron_format::NgramTable, r: u64| {
            let mut out = vec![f32::NAN; t.dim()];
            t.gather(&[r], &mut out).unwrap();
            out
        };
        for r in 0..a.rows() {
            let (a, b) = (row(&a, r), row(&b, r));
            assert!(a.iter().any(|v| *v != 0.0));
            if r % each == 0 {
                assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 0.01) && b.iter().any(|v| *v != 0.0));
            } else {
                assert_eq!(b, vec![0.0; b.len()]);
            }
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_sparse_table_of_many_gigabytes_costs_no_disk() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let mut config = micro();
    Changes { table_base: Some(1_000_000_007 / 8), ..Changes::default() }.apply(&mut config);
    let synth = Synth { sparse_table: true, table: Table::Fp8, ..Synth::new(config) };
    let path = dir.path().join("out");
    let report = synth.write(&path, &Run::default()).unwrap();
    assert!(report.bytes > 7_900_000_000, "{}", report.bytes);
    let used: u64 =
        std::fs::read_dir(&path).unwrap().map(|f| f.unwrap().metadata().unwrap().blocks() * 512).sum();
    if used > 64_000_000 {
        println!("skipped: this file system keeps no holes ({used} bytes)");
        return;
    }
    // Opening and running it touches a few rows.
    let checkpoint = Checkpoint::open(Source::Dir(path)).unwrap();
    assert!(logits(&checkpoint, 9).iter().all(|x| x.is_finite()));
}

#[test]
fn impossible_shapes_and_existing_places_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = Synth::new(micro()).write(dir.path(), &Run::default()).unwrap_err();
    assert!(matches!(&error, Error::Refused(t) if t.contains("exists already")), "{error}");
    let odd = |change: &dyn Fn(&mut Config), word: &str| {
        let mut config = micro();
        change(&mut config);
        let synth = Synth { experts: Experts::Nvfp4, ..Synth::new(config) };
        let path = dir.path().join("never");
        let error = synth.write(&path, &Run::default()).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        assert!(!path.exists());
    };
    odd(&|c| c.heads = 3, "num_attention_heads");
    odd(&|c| c.moe.top_k = 99, "num_experts_per_tok");
    odd(&|c| c.moe.intermediate = 24, "multiple of 16");
    odd(&|c| c.layer_kinds.truncate(1), "layer_types");
    odd(&|c| c.eos.clear(), "eos_token_id");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn a_shape_may_have_no_draft_head_and_no_table() {
    let mut config = micro();
    Changes { no_mtp: true, layers: Some(1), ..Changes::default() }.apply(&mut config);
    assert!(config.ple.is_none());
    let checkpoint = Synth::new(config).checkpoint().unwrap();
    assert!(checkpoint.weights().unwrap().mtp.is_none());
    assert!(checkpoint.tensors().all(|t| !t.name.starts_with("mtp.")));
    // A weight does not depend on what else there is.
    let full = Synth::new(micro()).checkpoint().unwrap();
    let name = "model.language_model.layers.0.mlp.experts.gate_up_proj";
    let of = |c: &Checkpoint| c.tensors().find(|t| t.name == name).unwrap().bytes.to_vec();
    assert_eq!(of(&checkpoint), of(&full));
}
