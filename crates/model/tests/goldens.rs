//! Parity with Hugging Face: every layer, selection and state of the small random checkpoints.
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod common;

use castiron_model::{DraftRow, Model, Options, Slot, Wide};
use common::{Golden, Record, argmax, f32_options, feed, golden, max_diff, rows};

/// Bounds of one golden: logits, layer outputs, states.
struct Bounds {
    logits: f32,
    layers: f32,
    states: f32,
}

const F32: Bounds = Bounds { logits: 5e-5, layers: 1e-4, states: 1e-4 };

fn run(name: &str, options: &Options) -> (Model, Slot, Golden, Record, Vec<f32>) {
    let mut model = golden(name, options);
    let g = Golden::named(name);
    let slot = model.new_stream().unwrap();
    let mut record = Record::default();
    let out = model.forward_traced(&rows(slot, 0, &g.input_ids()), &[], &mut record).unwrap();
    assert!(out.faults.is_empty());
    (model, slot, g, record, out.logits)
}

fn close(what: &str, got: &[f32], want: &[f32], bound: f32) {
    let d = max_diff(got, want);
    assert!(d <= bound, "{what}: differs by {d:e}, allowed {bound:e}");
}

/// Every float the golden has for a layer.
fn check_layers(g: &Golden, record: &Record, bound: f32) {
    let mut seen = 0;
    for ((layer, name), got) in &record.floats {
        let key = match layer {
            Some(l) => format!("layer.{l}.{name}"),
            None => (*name).to_string(),
        };
        if g.has(&key) {
            close(&key, got, g.floats(&key), bound);
            seen += 1;
        }
    }
    assert!(seen >= 10, "only {seen} traced arrays have a golden");
}

fn check_selections(g: &Golden, record: &Record, layers: usize, top_k: usize) {
    let tokens = g.input_ids().len();
    for l in 0..layers {
        let sets = |ids: &[u64]| -> Vec<Vec<u64>> {
            ids.chunks_exact(top_k)
                .map(|row| {
                    let mut row = row.to_vec();
                    row.sort_unstable();
                    row
                })
                .collect()
        };
        let want: Vec<u64> = g.ids(&format!("layer.{l}.moe.experts")).iter().map(|&e| e as u64).collect();
        assert_eq!(
            sets(&record.ids[&(Some(l), "moe.experts")].concat()),
            sets(&want),
            "experts of layer {l}"
        );
        if let Some(got) = record.ids.get(&(Some(l), "ple.rows")) {
            let want: Vec<u64> = g.ids(&format!("layer.{l}.ple.rows")).iter().map(|&e| e as u64).collect();
            assert_eq!(got.concat(), want, "n-gram rows of layer {l}");
        }
        if let Some(got) = record.ids.get(&(Some(l), "qsa.tokens")) {
            let mask = g.ids(&format!("layer.{l}.qsa.mask"));
            for (t, got) in got.iter().enumerate() {
                let row = &mask[t * tokens..][..=t];
                let want: Vec<u64> = (0..=t as u64).filter(|&i| row[i as usize] != 0).collect();
                assert_eq!(got, &want, "selection of row {t} in layer {l}");
            }
        }
    }
}

fn check_states(model: &Model, slot: Slot, g: &Golden, bound: f32) {
    let mut state = Record::default();
    model.trace_state(slot, &mut state).unwrap();
    // The goldens lie channel-major, ours token-major.
    let transposed = |x: &[f32], columns: usize, skip: usize| -> Vec<f32> {
        let rows = x.len() / columns;
        (skip..columns).flat_map(|c| (0..rows).map(move |r| x[r * columns + c])).collect()
    };
    let mut seen = 0;
    for ((layer, name), got) in &state.floats {
        let key = format!("state.{}.{name}", layer.unwrap());
        if !g.has(&key) {
            continue;
        }
        let want = g.floats(&key);
        match *name {
            "gdn.conv" => {
                let channels = 2 * model.config().gdn.key_heads * model.config().gdn.key_head_dim
                    + model.config().gdn.value_heads * model.config().gdn.value_head_dim;
                let columns = want.len() / channels;
                let skip = columns - got.len() / channels;
                close(&key, got, &transposed(want, columns, skip), bound);
            }
            "ple.conv" => close(&key, got, &transposed(want, want.len() / model.config().wide(), 0), bound),
            _ => close(&key, got, want, bound),
        }
        seen += 1;
    }
    assert!(seen >= 5, "only {seen} states have a golden");
    let history: Vec<i64> = state.ids[&(None, "history")][0].iter().map(|&id| id as i64).collect();
    for l in 0..model.config().num_layers {
        let key = format!("state.{l}.ple.ids");
        if g.has(&key) {
            assert_eq!(history, g.ids(&key), "{key}");
        }
    }
}

/// Draft rows for the prompt, then the chain of three drafts.
fn check_mtp(model: &mut Model, slot: Slot, g: &Golden, logits: &[f32], bound: f32) {
    let ids = g.input_ids();
    let (vocab, last) = (model.vocab(), ids.len() - 1);
    let prompt: Vec<DraftRow> = (0..last)
        .map(|t| DraftRow { slot, position: t as u32, token: ids[t + 1], wide: Wide::Row(t), logits: true })
        .collect();
    let draft = model.draft(&prompt).unwrap();
    assert!(draft.faults.is_empty());
    close("mtp.prompt.logits", &draft.logits, g.floats("mtp.prompt.logits"), bound);
    if !g.has("mtp.chain.tokens") {
        return;
    }
    let mut tokens = vec![argmax(&logits[last * vocab..])];
    let mut wide = Wide::Kept;
    for step in 0..3 {
        let row = DraftRow { slot, position: (last + step) as u32, token: tokens[step], wide, logits: true };
        let draft = model.draft(&[row]).unwrap();
        let want = &g.floats("mtp.chain.logits")[step * vocab..(step + 1) * vocab];
        close(&format!("mtp.chain.logits {step}"), &draft.logits, want, bound);
        tokens.push(argmax(&draft.logits));
        wide = Wide::Draft(0);
    }
    let want: Vec<u32> = g.ids("mtp.chain.tokens").iter().map(|&t| t as u32).collect();
    assert_eq!(tokens, want, "the draft chain");
}

fn check_greedy(model: &mut Model, slot: Slot, g: &Golden, logits: &[f32]) {
    let mut token = argmax(&logits[logits.len() - model.vocab()..]);
    let mut got = Vec::new();
    for _ in 0..g.ids("greedy").len() {
        got.push(i64::from(token));
        token = argmax(&feed(model, slot, &[token], 1));
    }
    assert_eq!(got, g.ids("greedy"), "the greedy continuation");
}

fn full(name: &str) {
    let (mut model, slot, g, record, logits) = run(name, &f32_options());
    close("logits", &logits, g.floats("logits"), F32.logits);
    check_layers(&g, &record, F32.layers);
    check_selections(&g, &record, model.config().num_layers, model.config().moe.top_k);
    check_states(&model, slot, &g, F32.states);
    check_mtp(&mut model, slot, &g, &logits, F32.logits);
    check_greedy(&mut model, slot, &g, &logits);
}

#[test]
fn tiny_a_equals_hugging_face_in_f32() {
    full("tiny_a");
}

#[test]
fn tiny_b_equals_hugging_face_in_f32() {
    full("tiny_b");
}

#[test]
fn chunked_goldens_equal_hugging_face_through_its_cache() {
    for name in ["tiny_a", "tiny_b"] {
        let g = Golden::named(name);
        let mut model = golden(name, &f32_options());
        let slot = model.new_stream().unwrap();
        let (mut logits, mut at) = (Vec::new(), 0);
        let ids = g.input_ids();
        for &n in g.ids("chunk_lengths") {
            let n = n as usize;
            logits.extend(feed(&mut model, slot, &ids[at..at + n], n));
            at += n;
        }
        close(name, &logits, g.floats("logits_cached"), F32.logits);
    }
}

/// The reference rounds after every operation, we only where a value is stored: a tolerance, and the greedy
/// tokens and the draft chain must still agree.
#[test]
fn tiny_bf16_is_near_hugging_face_in_bf16() {
    for options in [Options::default(), f32_options()] {
        let (mut model, slot, g, _, logits) = run("tiny_bf16", &options);
        close("logits", &logits, g.floats("logits"), 0.15);
        check_mtp(&mut model, slot, &g, &logits, 0.15);
        check_greedy(&mut model, slot, &g, &logits);
    }
}

#[test]
fn quantised_checkpoints_equal_their_dequantised_references_weight_only() {
    for name in ["tiny_fp8", "tiny_nvfp4"] {
        let (mut model, slot, g, record, logits) = run(name, &f32_options());
        close(name, &logits, g.floats("logits"), 1e-4);
        for l in 0..model.config().num_layers {
            let out = &record.floats[&(Some(l), "out")];
            close(&format!("{name} layer {l}"), out, g.floats(&format!("layer.{l}.out")), 1e-3);
            let moe = &record.floats[&(Some(l), "moe.out")];
            close(&format!("{name} experts {l}"), moe, g.floats(&format!("layer.{l}.moe.out")), 1e-4);
        }
        check_mtp(&mut model, slot, &g, &logits, 1e-4);
    }
}
