//! `config.json`: aliases, derived values, and every refusal.

#![allow(
    clippy::unwrap_used,
    reason = "clippy's own exemption covers only #[test] functions, not their helpers"
)]

mod common;

use castiron_format::{Activation, Config, Error, ErrorKind, GenerationConfig, LayerKind, Scoring};
use common::{config_value, golden, tiny};
use serde_json::{Value, json};

fn parse(value: &Value) -> Result<Config, Error> {
    Config::parse("dir/config.json", value.to_string().as_bytes())
}

/// A nested configuration whose text part is changed.
fn changed(key: &str, value: Value) -> Value {
    let mut config = config_value(&tiny());
    config["text_config"][key] = value;
    config
}

#[track_caller]
fn refused(key: &str, value: Value, says: &[&str]) -> ErrorKind {
    let text = value.to_string();
    let error = parse(&changed(key, value)).unwrap_err();
    let message = error.to_string();
    for part in ["dir/config.json", key].iter().chain(says) {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
    assert!(text.len() > 40 || text == "null" || message.contains(&text), "{message:?} does not say {text}");
    error.kind()
}

#[test]
fn reads_the_tiny_checkpoint() {
    let config = parse(&config_value(&tiny())).unwrap();
    assert_eq!((config.vocab_size, config.hidden_size, config.num_layers), (2048, 256, 8));
    assert_eq!((config.heads, config.kv_heads, config.head_dim, config.rotary_dim), (4, 2, 64, 16));
    assert_eq!((config.rope_theta, config.rms_eps, config.hc_count, config.hc_lowrank), (1e7, 1e-6, 4, 32));
    assert_eq!(config.layer_kinds[2..4], [LayerKind::Linear, LayerKind::Attention]);
    assert_eq!((config.gdn.gate, config.gdn_channels(), config.wide()), (Activation::Sigmoid, 640, 1024));
    assert_eq!((config.moe.experts, config.moe.top_k, config.moe.norm_topk), (32, 10, true));
    assert_eq!(config.moe.scoring, Scoring::Softmax);
    let ple = config.ple.as_ref().unwrap();
    assert_eq!(
        (&ple.layers[..], ple.heads(), ple.row_dim(), ple.seed, ple.parts),
        (&[1][..], 16, 16, 1234, 4)
    );
    assert_eq!((config.indexer.top_blocks(), config.max_position, config.mtp_layers), (32, 262_144, 1));
    assert_eq!((config.ngram_eos(), config.tie_embeddings), (2034, false));
}

#[test]
fn reads_flat_configurations_and_lists() {
    let config = parse(&config_value(&golden("tiny_b"))).unwrap();
    assert_eq!((&config.eos[..], config.ngram_eos()), (&[3, 9][..], 3));
    assert_eq!(config.gdn.gate, Activation::Silu, "output_gate_type null is hidden_act");
    assert_eq!(config.ple.unwrap().layers, [1, 4]);
    assert_eq!((config.layer_kinds[0], config.indexer.top_blocks()), (LayerKind::Attention, 5));
}

#[test]
fn accepts_the_spellings_seen_in_the_wild() {
    let plain = parse(&config_value(&tiny())).unwrap();
    for name in ["qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next", "qwen3_8_flash_next_text"] {
        for architecture in ["Qwen4ExpForCausalLM", "Qwen3_8FlashNextForConditionalGeneration"] {
            let mut config = config_value(&tiny());
            config["model_type"] = json!(name);
            config["architectures"] = json!([architecture]);
            assert_eq!(parse(&config).unwrap(), plain);
        }
    }
    for kind in ["indexed_attention", "qwen_sparse_attention"] {
        let text = config_value(&tiny()).to_string().replace("\"full_attention\"", &format!("{kind:?}"));
        assert_eq!(Config::parse("x", text.as_bytes()).unwrap(), plain);
    }
    let mut config = config_value(&tiny());
    let text = config["text_config"].as_object_mut().unwrap();
    let rope = text.remove("rope_parameters").unwrap();
    text.remove("layer_types");
    text.remove("norm_topk_prob");
    text.remove("seed");
    text.insert("rope_theta".into(), rope["rope_theta"].clone());
    text.insert("partial_rotary_factor".into(), rope["partial_rotary_factor"].clone());
    text.insert("rope_scaling".into(), json!({"type": "default"}));
    text.insert("unknown_key".into(), json!({"deep": [1, 2]}));
    assert_eq!(
        parse(&config).unwrap(),
        plain,
        "legacy rope keys, full_attention_interval, defaults, unknown keys"
    );
    config["text_config"]["rope_scaling"] = Value::Null;
    config["text_config"]["mtp"] = json!({"hybrid": true, "layer_types": ["full_attention"], "num_hidden_layers": 1,
        "mtp_use_hidden_state_from_layer": null, "rope_theta": 10000000});
    config["text_config"]["scoring_func"] = json!("softmax");
    assert_eq!(parse(&config).unwrap(), plain);
    assert_eq!(parse(&changed("scoring_func", json!("sigmoid"))).unwrap().moe.scoring, Scoring::Sigmoid);
    assert_eq!(parse(&changed("output_gate_type", json!("silu"))).unwrap().gdn.gate, Activation::Silu);
    assert_eq!(parse(&changed("eos_token_id", json!([5, 6]))).unwrap().eos, [5, 6]);
    assert_eq!(parse(&changed("split_ngram_parts", Value::Null)).unwrap().ple.unwrap().parts, 512);
    assert_eq!(parse(&changed("indexer_budget", json!(130))).unwrap().indexer.top_blocks(), 32);
    assert!(!parse(&changed("norm_topk_prob", json!(false))).unwrap().moe.norm_topk);
}

#[test]
fn ple_layer_ids_are_a_set() {
    let layers = |ids: Value| parse(&changed("ple_layer_ids", ids)).unwrap().ple.unwrap().layers;
    for ids in [json!([2, 5]), json!([5, 2]), json!([2, 5, 5]), json!([5, 2, 2, 5, 2])] {
        assert_eq!(layers(ids.clone()), [1, 4], "{ids}");
    }
    // The limit is on different layers.
    assert_eq!(layers(json!(vec![3; 100])), [2]);
}

#[test]
fn a_model_without_ngram_layers_needs_no_ngram_keys() {
    for ids in [Some(json!([])), Some(Value::Null), None] {
        let mut config = config_value(&tiny());
        let text = config["text_config"].as_object_mut().unwrap();
        let wanted = |key: &str| !key.contains("ngram") && !key.starts_with("ple_") && key != "seed";
        text.retain(|key, _| wanted(key));
        if let Some(ids) = &ids {
            text.insert("ple_layer_ids".into(), ids.clone());
        }
        assert!(parse(&config).unwrap().ple.is_none(), "{ids:?}");
    }
}

#[test]
fn refuses_every_missing_key() {
    let full = config_value(&tiny());
    let optional = [
        "model_type",
        "attention_bias",
        "tie_word_embeddings",
        "full_attention_interval",
        "norm_topk_prob",
        "seed",
        "split_ngram_parts",
        "indexer_kv_heads",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "dtype",
        "bos_token_id",
        "layer_types",
        "rope_parameters",
        "ple_layer_ids",
    ];
    for key in full["text_config"].as_object().unwrap().keys() {
        let mut config = full.clone();
        config["text_config"].as_object_mut().unwrap().remove(key);
        if optional.contains(&key.as_str()) {
            continue;
        }
        let error = parse(&config).unwrap_err();
        assert!(error.to_string().contains(key.as_str()), "{key}: {error}");
    }
    for key in ["rope_theta", "partial_rotary_factor"] {
        let mut config = full.clone();
        config["text_config"]["rope_parameters"].as_object_mut().unwrap().remove(key);
        assert!(
            parse(&config).unwrap_err().to_string().contains(&format!("rope_parameters.{key} is missing"))
        );
    }
    let mut config = full;
    config["text_config"].as_object_mut().unwrap().remove("layer_types");
    config["text_config"].as_object_mut().unwrap().remove("full_attention_interval");
    assert!(parse(&config).unwrap_err().to_string().contains("layer_types is missing"));
}

#[test]
fn refuses_counts_out_of_range() {
    for key in [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "num_experts_per_tok",
        "num_experts",
        "hc_count",
        "hc_lowrank",
        "ple_embed_dim",
        "ple_conv_kernel_size",
        "ngram_size",
        "heads_per_ngram",
        "ngram_vocab_size_base",
        "make_ngram_vocab_size_divisible_by",
        "indexer_n_heads",
        "indexer_head_dim",
        "indexer_budget",
        "indexer_compress_ratio",
        "split_ngram_parts",
    ] {
        for bad in [json!(0), json!(-1), json!(u64::MAX), json!(1.5), json!("4"), json!([4]), json!(true)] {
            assert_eq!(refused(key, bad, &["from"]), ErrorKind::Config, "{key}");
        }
    }
    refused("max_position_embeddings", json!(4_294_967_296u64), &["4294967295"]);
    for eps in [json!(0), json!(-1e-6), json!(1.0), json!(1e-60), json!("1e-6")] {
        refused("rms_norm_eps", eps, &["above 0"]);
    }
    refused("eos_token_id", json!(2048), &["2047"]);
    refused("eos_token_id", json!(-1), &[]);
    refused("eos_token_id", json!([]), &[]);
    refused("eos_token_id", Value::Null, &[]);
    refused("seed", json!(-1), &[]);
}

#[test]
fn refuses_values_that_do_not_fit_together() {
    refused("num_attention_heads", json!(3), &["multiple", "2"]);
    refused("linear_num_value_heads", json!(3), &["multiple"]);
    refused("num_experts_per_tok", json!(33), &["1 to 32"]);
    refused("ple_embed_dim", json!(255), &["multiple", "16"]);
    refused("indexer_budget", json!(3), &["from 4"]);
    refused("ple_layer_ids", json!([0]), &[]);
    refused("ple_layer_ids", json!([9]), &["8"]);
    refused("ple_layer_ids", json!(2), &[]);
    refused("ple_layer_ids", json!("none"), &[]);
    refused("layer_types", json!(["linear_attention"]), &["8"]);
    refused("layer_types", json!(vec!["sliding"; 8]), &["indexed_attention"]);
    for (factor, says) in
        [(0.0, "above 0"), (1.5, "at most 1"), (0.05, "even"), (0.01, "even"), (1.0, "indexer_head_dim")]
    {
        let rope = json!({"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": factor});
        let error = parse(&changed("rope_parameters", rope)).unwrap_err();
        assert!(
            error.to_string().contains(says) && error.to_string().contains("partial_rotary_factor"),
            "{error}"
        );
    }
    refused("norm_topk_prob", json!(1), &["true or false"]);
    refused("scoring_func", json!("tanh"), &["sigmoid"]);
    refused("output_gate_type", json!("gelu"), &["sigmoid"]);
}

#[test]
fn refuses_what_the_engine_lacks() {
    for (key, value, says) in [
        ("hidden_act", json!("gelu"), "silu"),
        ("attention_bias", json!(true), "false"),
        ("indexer_kv_heads", json!(2), "1"),
        ("mtp_use_dedicated_embeddings", json!(true), "false"),
    ] {
        assert_eq!(refused(key, value, &[says]), ErrorKind::Unsupported);
    }
    for (place, object) in [
        (
            "rope_parameters",
            json!({"rope_type": "yarn", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "factor": 4}),
        ),
        ("rope_scaling", json!({"type": "yarn", "factor": 4.0})),
    ] {
        let error = parse(&changed(place, object)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(
            error.to_string().contains("yarn") && error.to_string().contains("not supported yet"),
            "{error}"
        );
    }
    for mtp in [
        json!({"num_hidden_layers": 1, "layer_types": ["linear_attention"]}),
        json!({"rope_theta": 10000}),
        json!({"mtp_use_hidden_state_from_layer": 3}),
    ] {
        assert_eq!(parse(&changed("mtp", mtp)).unwrap_err().kind(), ErrorKind::Unsupported);
    }
    let mut config = config_value(&tiny());
    config["model_type"] = json!("llama");
    assert!(parse(&config).unwrap_err().to_string().contains("model_type = \"llama\""));
    config["model_type"] = Value::Null;
    config["architectures"] = json!(["LlamaForCausalLM"]);
    assert_eq!(parse(&config).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn refuses_bad_json() {
    let text = config_value(&tiny()).to_string();
    for (bad, kind) in [
        ("", ErrorKind::BadJson),
        ("[]", ErrorKind::BadJson),
        ("{\"a\":1", ErrorKind::BadJson),
        ("{\"a\":NaN}", ErrorKind::BadJson),
        ("{\"a\":1e999}", ErrorKind::BadJson),
        ("{\"a\":1,\"a\":1}", ErrorKind::Duplicate),
    ] {
        assert_eq!(Config::parse("x", bad.as_bytes()).unwrap_err().kind(), kind, "{bad}");
    }
    let deep = format!("{{\"a\":{}", "[".repeat(1_000_000));
    assert_eq!(Config::parse("x", deep.as_bytes()).unwrap_err().kind(), ErrorKind::BadJson);
    let twice = text.replacen("\"hidden_size\":256", "\"hidden_size\":256,\"hidden_size\":512", 1);
    let error = Config::parse("x", twice.as_bytes()).unwrap_err();
    assert!(error.kind() == ErrorKind::Duplicate && error.to_string().contains("hidden_size"), "{error}");
    for end in 0..text.len() {
        assert!(Config::parse("x", &text.as_bytes()[..end]).is_err());
    }
}

#[test]
fn generation_configuration() {
    let config = parse(&config_value(&tiny())).unwrap();
    let read = |value: Value| {
        GenerationConfig::parse("generation_config.json", value.to_string().as_bytes(), &config)
    };
    let full = read(json!({"do_sample": true, "temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0, "eos_token_id": [2036, 2034],
        "presence_penalty": 1.5, "transformers_version": "5"}))
    .unwrap();
    assert_eq!(
        (&full.eos[..], full.top_k, full.temperature, full.min_p),
        (&[2036, 2034][..], Some(20), Some(0.7), Some(0.0))
    );
    assert_eq!(read(json!({"eos_token_id": 7})).unwrap().eos, [7]);
    assert_eq!(read(json!({})).unwrap(), GenerationConfig::default());
    for (key, bad) in [
        ("eos_token_id", json!(2048)),
        ("temperature", json!(-0.1)),
        ("top_p", json!(0)),
        ("top_p", json!(1.1)),
        ("top_k", json!(-1)),
        ("min_p", json!(2)),
        ("repetition_penalty", json!(0)),
        ("do_sample", json!("yes")),
    ] {
        let error = read(json!({ key: bad })).unwrap_err();
        assert!(error.kind() == ErrorKind::Config && error.to_string().contains(key), "{error}");
    }
}
