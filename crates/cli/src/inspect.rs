//! `castiron inspect`: what a checkpoint holds, from its headers alone.

use castiron_format::Inventory;

use crate::args::Inspect;
use crate::failure::Failure;
use crate::output::size;
use crate::{open, output};

/// Runs the command.
pub fn inspect(args: &Inspect, json: bool) -> Result<(), Failure> {
    let checkpoint = open::checkpoint(args.model.as_deref())?;
    let inventory = checkpoint.inventory();
    if json {
        let all = serde_json::json!({
            "digest": checkpoint.digest(),
            "config": checkpoint.config(),
            "generation": checkpoint.generation(),
            "inventory": inventory,
            "w4a4": checkpoint.declared_w4a4(),
            "notes": checkpoint.notes(),
        });
        return output::line(&all.to_string());
    }
    let c = checkpoint.config();
    let linear = c.layer_kinds.iter().filter(|k| **k == castiron_format::LayerKind::Linear).count();
    let mut text = format!(
        "digest      {}\nlayers      {} ({linear} Gated DeltaNet, {} attention), hidden {}, {} streams\n\
         experts     {} of {} a token, inner size {}; shared {}\nvocabulary  {} ids, context {} tokens\n\
         attention   {} heads, {} K/V, head size {}; sparse beyond {} tokens in blocks of {}\n",
        checkpoint.digest(),
        c.num_layers,
        c.num_layers - linear,
        c.hidden_size,
        c.hc_count,
        c.moe.top_k,
        c.moe.experts,
        c.moe.intermediate,
        c.moe.shared_intermediate,
        c.vocab_size,
        c.max_position,
        c.heads,
        c.kv_heads,
        c.head_dim,
        c.indexer.budget,
        c.indexer.ratio,
    );
    if checkpoint.declared_w4a4() {
        text.push_str("activations made for 4-bit expert activations (w4a4)\n");
    }
    text.push_str(&table(&inventory));
    output::line(text.trim_end())
}

fn table(inventory: &Inventory) -> String {
    let mut text = format!("\n{:<22} {:>8} {:>12}  formats\n", "component", "tensors", "bytes");
    for c in &inventory.components {
        let formats: Vec<String> =
            c.formats.iter().map(|f| format!("{} {}", f.format, size(f.bytes))).collect();
        text.push_str(&format!(
            "{:<22} {:>8} {:>12}  {}\n",
            c.name,
            c.tensors,
            size(c.bytes),
            formats.join(", ")
        ));
    }
    text.push_str(&format!("{:<22} {:>8} {:>12}\n", "all", inventory.tensors, size(inventory.bytes)));
    text
}
