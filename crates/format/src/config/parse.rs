//! From `config.json` to [`Config`].
//!
//! Real repositories nest the text model in `text_config`; text-only exports are flat. Names differ between releases and
//! exporters, so aliases are accepted where they mean the same thing; unknown keys are ignored. Only `norm_topk_prob`
//! (true), `seed` (1234), `split_ngram_parts` (512), `scoring_func` (softmax) and the draft head keys have defaults: the
//! class defaults of the reference implementation describe another model.

use serde_json::Value;

use super::keys::{Keys, nested};
use super::{Activation, Config, GdnConfig, IndexerConfig, LayerKind, MoeConfig, PleConfig, Scoring};
use crate::{Error, ErrorKind, Result, json};

const MODEL_TYPES: [&str; 4] =
    ["qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next", "qwen3_8_flash_next_text"];
const ARCHITECTURES: [&str; 4] = [
    "Qwen4ExpForConditionalGeneration",
    "Qwen4ExpForCausalLM",
    "Qwen3_8FlashNextForConditionalGeneration",
    "Qwen3_8FlashNextForCausalLM",
];

/// Largest hidden size, head size and similar: keeps every product of sizes far below 2^63.
const MAX_DIM: u32 = 1 << 18;
const MAX_LAYERS: u32 = 512;
const MAX_EXPERTS: u32 = 2048;
const MAX_HEADS: u32 = 4096;
const MAX_KERNEL: u32 = 64;
/// N-gram layers at most; with the limits on heads it bounds the search for primes.
const MAX_PLE: usize = 16;

impl Config {
    /// Parses the text of `config.json`; `file` names it in errors.
    pub fn parse(file: &str, text: &[u8]) -> Result<Self> {
        let object = json::object(file, text)?;
        let top = Keys { file, path: "", object: &object };
        check_identity(&top)?;
        let keys = nested(&top, "text_config", "text_config.")?.unwrap_or(top);
        check_unsupported(&keys)?;
        let num_layers = keys.count("num_hidden_layers", MAX_LAYERS)?;
        let vocab_size = keys.count("vocab_size", 1 << 28)?;
        let (heads, kv_heads) =
            (keys.count("num_attention_heads", MAX_HEADS)?, keys.count("num_key_value_heads", MAX_HEADS)?);
        if !heads.is_multiple_of(kv_heads) {
            return Err(keys
                .refuse("num_attention_heads", &format!("a multiple of num_key_value_heads = {kv_heads}")));
        }
        let head_dim = keys.count("head_dim", MAX_DIM)?;
        let indexer = indexer(&keys)?;
        let rope = Rope::parse(&keys, head_dim, indexer.head_dim)?;
        let config = Self {
            vocab_size,
            hidden_size: keys.count("hidden_size", MAX_DIM)?,
            num_layers,
            layer_kinds: layer_kinds(&keys, num_layers)?,
            heads,
            kv_heads,
            head_dim,
            rotary_dim: rope.dim,
            rope_theta: rope.theta,
            rms_eps: keys
                .number("rms_norm_eps", "a number above 0 and below 1", |x| x as f32 > 0.0 && x < 1.0)?
                as f32,
            hc_count: keys.count("hc_count", 64)?,
            hc_lowrank: keys.count("hc_lowrank", MAX_DIM)?,
            gdn: gdn(&keys)?,
            moe: moe(&keys)?,
            ple: ple(&keys, num_layers)?,
            indexer,
            max_position: keys.integer("max_position_embeddings", 1, u64::from(u32::MAX))? as u32,
            eos: tokens(&keys, "eos_token_id", vocab_size)?,
            tie_embeddings: tie(&top, &keys)?,
            mtp_layers: mtp(&keys, rope.theta)?,
        };
        if config.eos.is_empty() {
            return Err(keys.refuse(
                "eos_token_id",
                "a token id or a list of them, the first of which ends n-gram windows",
            ));
        }
        Ok(config)
    }
}

/// Token ids below `vocab`: one, a list, or none when absent.
pub(super) fn tokens(keys: &Keys<'_>, key: &str, vocab: usize) -> Result<Vec<u32>> {
    Ok(keys.integers(key, 0, vocab as u64 - 1)?.into_iter().map(|n| n as u32).collect())
}

/// Whether the file describes this model at all.
fn check_identity(top: &Keys<'_>) -> Result<()> {
    let known_type = match top.string_opt("model_type")? {
        Some(name) if MODEL_TYPES.contains(&name) => true,
        Some(_) => {
            let accepted = format!("one of {} (another model cannot run here)", MODEL_TYPES.join(", "));
            return Err(top.refuse_as(ErrorKind::Unsupported, "model_type", &accepted));
        }
        None => false,
    };
    let names = top.get("architectures").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let known_architecture = names.iter().filter_map(Value::as_str).any(|n| ARCHITECTURES.contains(&n));
    if (!known_type || !names.is_empty()) && !known_architecture {
        let accepted =
            format!("a list with one of {} (or absent beside a model_type)", ARCHITECTURES.join(", "));
        return Err(top.refuse_as(ErrorKind::Unsupported, "architectures", &accepted));
    }
    Ok(())
}

fn check_unsupported(keys: &Keys<'_>) -> Result<()> {
    if keys.string_opt("hidden_act")? != Some("silu") {
        return Err(keys.refuse_as(
            ErrorKind::Unsupported,
            "hidden_act",
            "\"silu\", the only activation supported",
        ));
    }
    if keys.boolean_opt("attention_bias")? == Some(true) {
        return Err(keys.refuse_as(
            ErrorKind::Unsupported,
            "attention_bias",
            "false: biases are not supported",
        ));
    }
    if keys.integer_opt("indexer_kv_heads", 0, 1 << 20)?.is_some_and(|n| n != 1) {
        return Err(keys.refuse_as(
            ErrorKind::Unsupported,
            "indexer_kv_heads",
            "1, the only count supported",
        ));
    }
    Ok(())
}

fn tie(top: &Keys<'_>, keys: &Keys<'_>) -> Result<bool> {
    let inner = keys.boolean_opt("tie_word_embeddings")?;
    let outer = top.boolean_opt("tie_word_embeddings")?;
    match (outer, inner) {
        (Some(a), Some(b)) if a != b => Err(
            top.refuse("tie_word_embeddings", &format!("the same as {}tie_word_embeddings = {b}", keys.path))
        ),
        (a, b) => Ok(a.or(b).unwrap_or(false)),
    }
}

fn layer_kinds(keys: &Keys<'_>, layers: usize) -> Result<Vec<LayerKind>> {
    let accepted = || {
        format!(
            "a list of {layers} (num_hidden_layers) of linear_attention and full_attention \
             (= indexed_attention = qwen_sparse_attention)"
        )
    };
    let Some(value) = keys.get("layer_types") else {
        let Some(interval) = keys.integer_opt("full_attention_interval", 1, u64::from(MAX_LAYERS))? else {
            return Err(keys.refuse("layer_types", &accepted()));
        };
        let kind = |layer: u64| {
            if (layer + 1).is_multiple_of(interval) { LayerKind::Attention } else { LayerKind::Linear }
        };
        return Ok((0..layers as u64).map(kind).collect());
    };
    let list = value.as_array().filter(|list| list.len() == layers);
    list.and_then(|list| list.iter().map(|v| v.as_str().and_then(layer_kind)).collect())
        .ok_or_else(|| keys.refuse("layer_types", &accepted()))
}

fn layer_kind(name: &str) -> Option<LayerKind> {
    match name {
        "linear_attention" => Some(LayerKind::Linear),
        "full_attention" | "indexed_attention" | "qwen_sparse_attention" => Some(LayerKind::Attention),
        _ => None,
    }
}

struct Rope {
    dim: usize,
    theta: f64,
}

impl Rope {
    /// `rope_parameters`, or the older flat keys with `rope_scaling`.
    fn parse(keys: &Keys<'_>, head_dim: usize, index_head_dim: usize) -> Result<Self> {
        let table = nested(keys, "rope_parameters", "rope_parameters.")?;
        let scaling = nested(keys, "rope_scaling", "rope_scaling.")?;
        for object in [table, scaling].into_iter().flatten() {
            for key in ["rope_type", "type"] {
                match object.string_opt(key)? {
                    None | Some("default") => {}
                    Some(_) => {
                        let accepted = "\"default\": scaled rotary positions (yarn and others) are not supported yet, \
                                        remove them to run at the native context length";
                        return Err(object.refuse_as(ErrorKind::Unsupported, key, accepted));
                    }
                }
            }
        }
        let place = |key: &str| match table {
            Some(table) if table.has(key) => table,
            _ if keys.has(key) => *keys,
            _ => table.unwrap_or(*keys),
        };
        let theta = place("rope_theta")
            .number("rope_theta", "a number from 1 to 1e15", |x| (1.0..=1e15).contains(&x))?;
        let factor = place("partial_rotary_factor");
        let share = factor
            .number("partial_rotary_factor", "a number above 0 and at most 1", |x| x > 0.0 && x <= 1.0)?;
        let dim = (head_dim as f64 * share) as usize;
        if dim == 0 || !dim.is_multiple_of(2) || dim > index_head_dim {
            let accepted = format!(
                "such that head_dim {head_dim} times it is an even count of channels, at least 2 and at most \
                 indexer_head_dim = {index_head_dim} (it gives {dim})"
            );
            return Err(factor.refuse("partial_rotary_factor", &accepted));
        }
        Ok(Self { dim, theta })
    }
}

fn gdn(keys: &Keys<'_>) -> Result<GdnConfig> {
    let key_heads = keys.count("linear_num_key_heads", MAX_HEADS)?;
    let value_heads = keys.count("linear_num_value_heads", MAX_HEADS)?;
    if !value_heads.is_multiple_of(key_heads) {
        let accepted = format!("a multiple of linear_num_key_heads = {key_heads}");
        return Err(keys.refuse("linear_num_value_heads", &accepted));
    }
    let gate = match keys.string_opt("output_gate_type")? {
        Some("sigmoid") => Activation::Sigmoid,
        Some("silu" | "swish") => Activation::Silu,
        // An explicit null means hidden_act, which is silu; an absent key is more likely a lost one.
        None if keys.has("output_gate_type") => Activation::Silu,
        _ => return Err(keys.refuse("output_gate_type", "\"sigmoid\", \"silu\" or null (= hidden_act)")),
    };
    Ok(GdnConfig {
        conv_kernel: keys.count("linear_conv_kernel_dim", MAX_KERNEL)?,
        key_head_dim: keys.count("linear_key_head_dim", MAX_DIM)?,
        value_head_dim: keys.count("linear_value_head_dim", MAX_DIM)?,
        key_heads,
        value_heads,
        gate,
    })
}

fn moe(keys: &Keys<'_>) -> Result<MoeConfig> {
    let experts = keys.count("num_experts", MAX_EXPERTS)?;
    let top_k = keys.integer("num_experts_per_tok", 1, experts as u64)? as usize;
    let scoring = match keys.string_opt("scoring_func")? {
        None | Some("softmax") => Scoring::Softmax,
        Some("sigmoid") => Scoring::Sigmoid,
        Some(_) => return Err(keys.refuse("scoring_func", "\"softmax\" or \"sigmoid\"")),
    };
    Ok(MoeConfig {
        experts,
        top_k,
        intermediate: keys.count("moe_intermediate_size", MAX_DIM)?,
        shared_intermediate: keys.count("shared_expert_intermediate_size", MAX_DIM)?,
        norm_topk: keys.boolean_opt("norm_topk_prob")?.unwrap_or(true),
        scoring,
    })
}

fn indexer(keys: &Keys<'_>) -> Result<IndexerConfig> {
    let ratio = keys.count("indexer_compress_ratio", 1 << 16)?;
    let budget = keys.integer("indexer_budget", ratio as u64, u64::from(u32::MAX))? as usize;
    Ok(IndexerConfig {
        heads: keys.count("indexer_n_heads", MAX_HEADS)?,
        head_dim: keys.count("indexer_head_dim", MAX_DIM)?,
        budget,
        ratio,
    })
}

fn ple(keys: &Keys<'_>, num_layers: usize) -> Result<Option<PleConfig>> {
    let accepted = format!(
        "a list of layer numbers from 1 to {num_layers} (one-based), at most {MAX_PLE} different ones; absent, null or \
         empty for a model without n-gram layers"
    );
    let mut ids = match keys.get("ple_layer_ids") {
        Some(Value::Array(_)) => keys.integers("ple_layer_ids", 1, num_layers as u64)?,
        Some(_) => return Err(keys.refuse("ple_layer_ids", &accepted)),
        None => Vec::new(),
    };
    ids.sort_unstable();
    ids.dedup();
    if ids.len() > MAX_PLE {
        return Err(keys.refuse("ple_layer_ids", &accepted));
    }
    if ids.is_empty() {
        return Ok(None);
    }
    let ple = PleConfig {
        layers: ids.into_iter().map(|id| id as usize - 1).collect(),
        embed_dim: keys.count("ple_embed_dim", MAX_DIM)?,
        conv_kernel: keys.count("ple_conv_kernel_size", MAX_KERNEL)?,
        ngram_size: keys.integer("ngram_size", 2, 8)? as usize,
        heads_per_ngram: keys.count("heads_per_ngram", 64)?,
        vocab_base: keys.integer("ngram_vocab_size_base", 2, 1 << 40)?,
        divisor: keys.integer("make_ngram_vocab_size_divisible_by", 1, 1 << 32)?,
        parts: keys.integer_opt("split_ngram_parts", 1, 1 << 20)?.unwrap_or(512) as usize,
        seed: keys.integer_opt("seed", 0, i64::MAX as u64)?.unwrap_or(1234),
    };
    if !ple.embed_dim.is_multiple_of(ple.heads()) {
        let accepted = format!("a multiple of heads_per_ngram * (ngram_size - 1) = {}", ple.heads());
        return Err(keys.refuse("ple_embed_dim", &accepted));
    }
    Ok(Some(ple))
}

/// Draft head layers: `mtp_num_hidden_layers`, or the `mtp` object, or 1.
fn mtp(keys: &Keys<'_>, theta: f64) -> Result<usize> {
    let object = nested(keys, "mtp", "mtp.")?;
    let mut layers = keys.integer_opt("mtp_num_hidden_layers", 0, 1)?;
    if keys.boolean_opt("mtp_use_dedicated_embeddings")? == Some(true) {
        let accepted = "false: a draft head with its own embedding is not supported";
        return Err(keys.refuse_as(ErrorKind::Unsupported, "mtp_use_dedicated_embeddings", accepted));
    }
    if let Some(mtp) = object {
        let inner = mtp.integer_opt("num_hidden_layers", 0, 1)?;
        if layers.is_some() && inner.is_some() && layers != inner {
            return Err(mtp.refuse("num_hidden_layers", "the same as mtp_num_hidden_layers"));
        }
        layers = layers.or(inner);
        check_mtp(&mtp, theta)?;
    }
    Ok(layers.unwrap_or(1) as usize)
}

fn check_mtp(mtp: &Keys<'_>, theta: f64) -> Result<()> {
    let unsupported = |key, accepted: &str| -> Error { mtp.refuse_as(ErrorKind::Unsupported, key, accepted) };
    if mtp.get("mtp_use_hidden_state_from_layer").is_some() {
        return Err(unsupported(
            "mtp_use_hidden_state_from_layer",
            "null: the draft head reads the last layer",
        ));
    }
    if let Some(types) = mtp.get("layer_types") {
        let kinds: Option<Vec<_>> =
            types.as_array().map(|l| l.iter().map(|v| v.as_str().and_then(layer_kind)).collect());
        if kinds.is_none_or(|kinds| kinds.iter().any(|&k| k != Some(LayerKind::Attention))) {
            return Err(unsupported("layer_types", "[\"full_attention\"], the only draft layer supported"));
        }
    }
    if mtp.number_opt("rope_theta", "a number", |_| true)?.is_some_and(|x| x != theta) {
        return Err(unsupported("rope_theta", &format!("that of the main model, {theta}")));
    }
    Ok(())
}
