//! `config.json` of a quantised checkpoint.

use castiron_format::Bytes;
use serde_json::{Map, Value, json};

use crate::plan::Plan;
use crate::{Error, Result};

/// The configuration with a `quantization_config` that says what `plan` does; the same bytes when it quantises nothing.
///
/// Castiron never reads that key. It is written for other engines, in the words of the published files: `fp8` when block FP8
/// is all there is, else `modelopt` with the list of quantised modules; `castiron` when there is FP8 with a scale a row,
/// which nobody else has.
pub(crate) fn updated(text: &Bytes, plan: &Plan) -> Result<Bytes> {
    if plan.modules.is_empty() {
        return Ok(text.clone());
    }
    let parsed: std::result::Result<Map<String, Value>, _> = serde_json::from_slice(text);
    let mut config = match parsed {
        Ok(config) => config,
        Err(e) => return Error::refused(format!("config.json: {e}")),
    };
    let any = |algorithm: &str| plan.modules.values().any(|a| *a == algorithm);
    if any("FP8") {
        let inner = match config.get_mut("text_config") {
            Some(Value::Object(inner)) => inner,
            _ => &mut config,
        };
        inner.insert("ple_embedding_dtype".into(), json!("float8_e4m3fn"));
    }
    let experts = any("FP8_BLOCK_SCALES") || any("NVFP4");
    // A table alone is told by `ple_embedding_dtype`; what an input says of its other tensors stays true.
    if experts || any("FP8_ROW") {
        config.insert("quantization_config".into(), quantization(plan));
    }
    let text = format!("{:#}\n", Value::Object(config));
    Ok(text.into_bytes().into())
}

fn quantization(plan: &Plan) -> Value {
    let mut algorithms: Vec<&str> = plan.modules.values().copied().filter(|a| *a != "FP8").collect();
    algorithms.sort_unstable();
    algorithms.dedup();
    if algorithms == ["FP8_BLOCK_SCALES"] {
        return json!({
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": plan.kept,
        });
    }
    let layers: Map<String, Value> = plan
        .modules
        .iter()
        .map(|(module, algorithm)| {
            let what = match *algorithm {
                "NVFP4" => json!({ "quant_algo": "NVFP4", "group_size": 16 }),
                "FP8_BLOCK_SCALES" => json!({ "quant_algo": "FP8_BLOCK_SCALES", "group_size": 128 }),
                other => json!({ "quant_algo": other }),
            };
            (module.clone(), what)
        })
        .collect();
    let row = algorithms.contains(&"FP8_ROW");
    json!({
        "quant_method": if row { "castiron" } else { "modelopt" },
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    })
}
