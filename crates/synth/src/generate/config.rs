//! `config.json` and `generation_config.json` in the published layout.

use castiron_format::{Activation, Config, LayerKind, Scoring};
use serde_json::{Value, json};

use crate::{Error, Result};

/// The text of `config.json`. It is read back: a shape that it cannot say, or that the reader refuses, is an error.
pub(crate) fn model(config: &Config) -> Result<Vec<u8>> {
    let mut text = text_config(config);
    if let Some(map) = text.as_object_mut() {
        let ple = config.ple.as_ref();
        let layers: Vec<usize> = ple.map_or(Vec::new(), |p| p.layers.iter().map(|l| l + 1).collect());
        map.insert("ple_layer_ids".into(), json!(layers));
        if let Some(p) = ple {
            map.insert("ple_embed_dim".into(), json!(p.embed_dim));
            map.insert("ple_conv_kernel_size".into(), json!(p.conv_kernel));
            map.insert("ngram_size".into(), json!(p.ngram_size));
            map.insert("heads_per_ngram".into(), json!(p.heads_per_ngram));
            map.insert("ngram_vocab_size_base".into(), json!(p.vocab_base));
            map.insert("make_ngram_vocab_size_divisible_by".into(), json!(p.divisor));
            map.insert("split_ngram_parts".into(), json!(p.parts));
            map.insert("seed".into(), json!(p.seed));
        }
        map.insert("mtp_num_hidden_layers".into(), json!(config.mtp_layers));
        map.insert("mtp_use_dedicated_embeddings".into(), json!(false));
        if config.mtp_layers > 0 {
            let mtp = json!({
                "hybrid": true,
                "layer_types": ["full_attention"],
                "mtp_use_hidden_state_from_layer": null,
                "num_hidden_layers": config.mtp_layers,
                "rope_theta": config.rope_theta,
            });
            map.insert("mtp".into(), mtp);
        }
        if config.moe.scoring == Scoring::Sigmoid {
            map.insert("scoring_func".into(), json!("sigmoid"));
        }
    }
    let all = json!({
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "tie_word_embeddings": config.tie_embeddings,
        "language_model_only": true,
        "text_config": text,
    });
    let text = format!("{all:#}\n").into_bytes();
    let read = Config::parse("config.json of this shape", &text)?;
    if read != *config {
        return Error::refused("this shape cannot be written as a config.json that means the same");
    }
    Ok(text)
}

fn text_config(config: &Config) -> Value {
    let kind = |k: &LayerKind| match k {
        LayerKind::Linear => "linear_attention",
        LayerKind::Attention => "full_attention",
    };
    let kinds: Vec<&str> = config.layer_kinds.iter().map(kind).collect();
    // The shortest decimal that reads back as the same f32.
    let eps: f64 = config.rms_eps.to_string().parse().unwrap_or_default();
    json!({
        "model_type": "qwen4_exp_text",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "layer_types": kinds,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": eps,
        "max_position_embeddings": config.max_position,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": rotary_share(config.head_dim, config.rotary_dim),
        },
        "linear_conv_kernel_dim": config.gdn.conv_kernel,
        "linear_key_head_dim": config.gdn.key_head_dim,
        "linear_value_head_dim": config.gdn.value_head_dim,
        "linear_num_key_heads": config.gdn.key_heads,
        "linear_num_value_heads": config.gdn.value_heads,
        "mamba_ssm_dtype": "float32",
        "output_gate_type": match config.gdn.gate { Activation::Sigmoid => "sigmoid", Activation::Silu => "silu" },
        "num_experts": config.moe.experts,
        "num_experts_per_tok": config.moe.top_k,
        "moe_intermediate_size": config.moe.intermediate,
        "shared_expert_intermediate_size": config.moe.shared_intermediate,
        "norm_topk_prob": config.moe.norm_topk,
        "hc_count": config.hc_count,
        "hc_lowrank": config.hc_lowrank,
        "indexer_n_heads": config.indexer.heads,
        "indexer_kv_heads": 1,
        "indexer_head_dim": config.indexer.head_dim,
        "indexer_budget": config.indexer.budget,
        "indexer_compress_ratio": config.indexer.ratio,
        "bos_token_id": config.ngram_eos(),
        "eos_token_id": ids(&config.eos),
        "pad_token_id": null,
    })
}

/// A share that gives `rotary` again when it is multiplied by `head` and cut.
fn rotary_share(head: usize, rotary: usize) -> f64 {
    let share = rotary as f64 / head as f64;
    if (head as f64 * share) as usize == rotary { share } else { share.next_up() }
}

fn ids(eos: &[u32]) -> Value {
    match eos {
        [one] => json!(one),
        more => json!(more),
    }
}

/// The text of `generation_config.json`: the sampling that the published model suggests.
pub(crate) fn generation(config: &Config) -> Vec<u8> {
    let all = json!({
        "bos_token_id": config.ngram_eos(),
        "do_sample": true,
        "eos_token_id": config.eos,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    });
    format!("{all:#}\n").into_bytes()
}
