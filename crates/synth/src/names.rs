//! What a tensor is, from its name. A census has already checked the names against the configuration.

/// What a tensor is to the quantiser.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role<'a> {
    /// `{module}.gate_up_proj` of all experts, `[E, 2I, D]`; `module` ends in `experts`.
    FusedGateUp(&'a str),
    /// `{module}.down_proj` of all experts, `[E, D, I]`.
    FusedDown(&'a str),
    /// `{module}.weight` of one projection of one routed expert.
    Expert(&'a str),
    /// A shard of the n-gram table `name`.
    Table(&'a str),
    /// `{module}.weight` of a dense product that may be FP8 with a scale per row.
    Dense(&'a str),
    /// Copied, whatever the options: embeddings, norms, routers, gates, inject, index projections, convolutions, decays,
    /// hash buffers, scales, everything that is ignored.
    Other,
}

/// Last parts of the modules of [`Role::Dense`]. What is not named here stays as it is.
const DENSE: [&str; 16] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_z",
    "linear_attn.out_proj",
    "shared_expert.gate_proj",
    "shared_expert.up_proj",
    "shared_expert.down_proj",
    ".input_mix_weight_down",
    ".input_mix_weight_up",
    "ple.key_proj",
    "ple.value_proj",
    "mtp.fc_embedding",
    "mtp.fc_hidden",
];

/// Whether a tensor belongs to the draft head.
pub(crate) fn is_draft(name: &str) -> bool {
    name.starts_with("mtp.") || name.starts_with("language_model.mtp.")
}

/// Sorts a tensor that the text model uses.
pub(crate) fn role(name: &str) -> Role<'_> {
    let fused = |end| name.strip_suffix(end).filter(|module| module.ends_with(".mlp.experts"));
    if let Some(module) = fused(".gate_up_proj") {
        return Role::FusedGateUp(module);
    }
    if let Some(module) = fused(".down_proj") {
        return Role::FusedDown(module);
    }
    let Some(module) = name.strip_suffix(".weight") else { return Role::Other };
    if module.contains(".mlp.experts.") {
        return Role::Expert(module);
    }
    if let Some(at) = module.find(".ngram_embedding").map(|at| at + ".ngram_embedding".len()) {
        let rest = &module[at..];
        return if rest.is_empty() || rest.starts_with(".shard_") {
            Role::Table(&module[..at])
        } else {
            Role::Other
        };
    }
    let head = module == "lm_head" || module == "language_model.lm_head";
    if head || DENSE.iter().any(|end| module.ends_with(end)) { Role::Dense(module) } else { Role::Other }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_follow_the_published_names() {
        let p = "model.language_model.layers.7.mlp.";
        assert_eq!(role(&format!("{p}experts.gate_up_proj")), Role::FusedGateUp(&format!("{p}experts")));
        assert_eq!(role(&format!("{p}experts.down_proj")), Role::FusedDown(&format!("{p}experts")));
        assert_eq!(
            role("mtp.layers.0.mlp.experts.3.up_proj.weight"),
            Role::Expert("mtp.layers.0.mlp.experts.3.up_proj")
        );
        assert_eq!(
            role(&format!("{p}shared_expert.down_proj.weight")),
            Role::Dense(&format!("{p}shared_expert.down_proj"))
        );
        let table = "model.layers.1.ple.ple_embedding.ngram_embedding";
        assert_eq!(role(&format!("{table}.shard_12.weight")), Role::Table(table));
        assert_eq!(role(&format!("{table}.weight")), Role::Table(table));
        assert_eq!(role(&format!("{table}.weight_scale")), Role::Other);
        for kept in [
            "gate.weight",
            "shared_expert_gate.weight",
            "x.block_inject_weight.weight",
            "experts.3.gate_proj.weight_scale",
        ] {
            assert_eq!(role(&format!("{p}{kept}")), Role::Other, "{kept}");
        }
        for kept in [
            "model.embed_tokens.weight",
            "model.layers.0.linear_attn.conv1d.weight",
            "model.layers.0.linear_attn.A_log",
        ] {
            assert_eq!(role(kept), Role::Other, "{kept}");
        }
        assert_eq!(role("lm_head.weight"), Role::Dense("lm_head"));
        assert!(is_draft("mtp.norm.weight") && !is_draft("model.mtp.weight"));
    }
}
