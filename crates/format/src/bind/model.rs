//! The traversal: every tensor of the model by name and shape.

use super::census::Problem;
use super::{Binder, Census, Part};
use crate::ngram::Hash;
use crate::safetensors::Dtype;
use crate::tensors::Tensors;
use crate::{
    Attention, Config, Expert, Gdn, Hyper, Layer, LayerKind, Matrix, MatrixData, Mixer, Moe, Mtp, Ple,
    Result, Weights,
};

const PREFIXES: [&str; 3] = ["model.language_model.", "language_model.model.", "model."];

/// The prefix of the text model: the one that has an embedding, or else any tensor.
pub(crate) fn text_prefix(tensors: &Tensors) -> &'static str {
    let has = |name: &str| tensors.find(name).is_some();
    PREFIXES
        .into_iter()
        .find(|p| has(&format!("{p}embed_tokens.weight")))
        .or_else(|| PREFIXES.into_iter().find(|p| tensors.with_prefix(p).next().is_some()))
        .unwrap_or(PREFIXES[0])
}

/// Shards of an n-gram table in row order, with its scale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TableTensors {
    pub(crate) dtype: Dtype,
    /// Positions in the tensor list.
    pub(crate) shards: Vec<usize>,
    pub(crate) scale: Option<usize>,
}

/// The name of the table of a layer, without `.weight` or `.shard_0.weight`.
pub(crate) fn table_name(prefix: &str, layer: usize) -> String {
    format!("{prefix}layers.{layer}.ple.ple_embedding.ngram_embedding")
}

/// The table of a layer by names alone; `None` when a shard is missing or the first dtype is not a table dtype.
pub(crate) fn find_table(tensors: &Tensors, name: &str) -> Option<TableTensors> {
    let mut shards = shard_list(tensors, name);
    if shards.is_empty() {
        shards.push((0, tensors.find(&format!("{name}.weight"))?));
    }
    if shards.iter().enumerate().any(|(i, &(number, _))| number != i) {
        return None;
    }
    let shards: Vec<usize> = shards.into_iter().map(|(_, id)| id).collect();
    let dtype = tensors.list[*shards.first()?].dtype;
    let scale = tensors.find(&format!("{name}.weight_scale"));
    Some(TableTensors { dtype, shards, scale })
}

/// (number, position) of every `{name}.shard_{number}.weight`, by rising number.
fn shard_list(tensors: &Tensors, name: &str) -> Vec<(usize, usize)> {
    let prefix = format!("{name}.shard_");
    let mut out = Vec::new();
    for id in tensors.with_prefix(&prefix) {
        let middle = tensors.list[id].name.strip_prefix(&prefix).and_then(|t| t.strip_suffix(".weight"));
        // The number must be written as `shard_7`, so that no two names mean the same shard.
        if let Some(number) = middle.and_then(|t| t.parse::<usize>().ok().filter(|n| n.to_string() == t)) {
            out.push((number, id));
        }
    }
    out.sort_unstable();
    out
}

/// Runs the traversal without reading weights.
pub(crate) fn census(tensors: &Tensors, config: &Config) -> Result<Census> {
    let mut binder = Binder::new(tensors, config, false);
    binder.weights();
    binder.finish()
}

/// Runs the traversal and reads small tensors.
pub(crate) fn load(tensors: &Tensors, config: &Config) -> Result<Weights> {
    let mut binder = Binder::new(tensors, config, true);
    let weights = binder.weights();
    binder.finish()?;
    Ok(weights)
}

impl Binder<'_> {
    fn weights(&mut self) -> Weights {
        let config = self.config;
        let prefix = text_prefix(self.tensors);
        self.part = Part::Embedding;
        let embed = self.dense(&format!("{prefix}embed_tokens"), config.vocab_size, config.hidden_size);
        self.part = Part::Head;
        let lm_head = self.head(prefix, &embed);
        let mut layers = Vec::new();
        for i in 0..config.num_layers {
            let layer = self.main_layer(prefix, i);
            // A census keeps nothing, so that a config.json of absurd sizes costs no memory.
            if self.read {
                layers.push(layer);
            }
        }
        self.part = Part::Hyper;
        let final_hc = self.hyper(&format!("{prefix}hyper_connection_mixer"), false);
        let mtp = self.draft(prefix);
        Weights { embed, lm_head, layers, final_hc, mtp }
    }

    fn head(&mut self, prefix: &str, embed: &Matrix) -> Matrix {
        // MLX exports keep the head under the text model's outer name.
        let outer = if prefix == "language_model.model." { "language_model.lm_head" } else { "lm_head" };
        let name = if self.any("lm_head.") { "lm_head" } else { outer };
        if !self.config.tie_embeddings {
            return self.dense(name, self.config.vocab_size, self.config.hidden_size);
        }
        let prefix = format!("{name}.");
        if self.any(&prefix) {
            self.ignore(Part::Head, |n| n.starts_with(&prefix));
            self.found(Problem::Unexpected, || {
                format!(
                    "{name}.weight beside tie_word_embeddings = true in config.json: set it to false to use the tensor, \
                     or remove the tensor to use the embedding"
                )
            });
        }
        embed.clone()
    }

    fn main_layer(&mut self, prefix: &str, index: usize) -> Layer {
        let name = format!("{prefix}layers.{index}");
        let number = self.config.ple.as_ref().and_then(|p| p.layers.iter().position(|&l| l == index));
        let ple = number.map(|n| self.ple(prefix, index, n));
        let kind = self.config.layer_kinds[index];
        let mut layer = self.layer(&name, kind, false);
        layer.ple = ple.flatten();
        layer
    }

    fn layer(&mut self, name: &str, kind: LayerKind, draft: bool) -> Layer {
        let part = |part| if draft { Part::Draft } else { part };
        self.part = part(Part::Hyper);
        let attn_hc = self.hyper(&format!("{name}.attn_hyper_connection"), true);
        let mlp_hc = self.hyper(&format!("{name}.mlp_hyper_connection"), true);
        let mixer = match kind {
            LayerKind::Linear => {
                self.part = part(Part::Gdn);
                Mixer::Gdn(Box::new(self.gdn(&format!("{name}.linear_attn"))))
            }
            LayerKind::Attention => {
                self.part = part(Part::Attention);
                Mixer::Attention(Box::new(self.attention(&format!("{name}.self_attn"))))
            }
        };
        let moe = self.moe(&format!("{name}.mlp"), draft);
        Layer { ple: None, attn_hc, mixer, mlp_hc, moe }
    }

    fn hyper(&mut self, name: &str, inject: bool) -> Hyper {
        let (wide, low, streams) = (self.config.wide(), self.config.hc_lowrank, self.config.hc_count);
        Hyper {
            norm: self.vector(&format!("{name}.hc_norm.weight"), wide),
            down: self.dense(&format!("{name}.input_mix_weight_down"), low, wide),
            up: self.dense(&format!("{name}.input_mix_weight_up"), wide, low),
            inject: inject.then(|| self.dense(&format!("{name}.block_inject_weight"), streams, wide)),
        }
    }

    fn gdn(&mut self, name: &str) -> Gdn {
        let (d, c) = (self.config.hidden_size, self.config.gdn_channels());
        let gdn = self.config.gdn.clone();
        let values = gdn.value_heads * gdn.value_head_dim;
        Gdn {
            in_qkv: self.dense(&format!("{name}.in_proj_qkv"), c, d),
            in_z: self.dense(&format!("{name}.in_proj_z"), values, d),
            in_b: self.dense(&format!("{name}.in_proj_b"), gdn.value_heads, d),
            in_a: self.dense(&format!("{name}.in_proj_a"), gdn.value_heads, d),
            conv: self.conv(&format!("{name}.conv1d.weight"), c, gdn.conv_kernel),
            a_log: self.vector(&format!("{name}.A_log"), gdn.value_heads),
            dt_bias: self.vector(&format!("{name}.dt_bias"), gdn.value_heads),
            norm: self.vector(&format!("{name}.norm.weight"), gdn.value_head_dim),
            out: self.dense(&format!("{name}.out_proj"), d, values),
        }
    }

    fn attention(&mut self, name: &str) -> Attention {
        let c = self.config;
        let (d, q, kv) = (c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let (index_dim, index_rows) = (c.indexer.head_dim, (c.indexer.heads + 1) * c.indexer.head_dim);
        Attention {
            q: self.dense(&format!("{name}.q_proj"), 2 * q, d),
            k: self.dense(&format!("{name}.k_proj"), kv, d),
            v: self.dense(&format!("{name}.v_proj"), kv, d),
            o: self.dense(&format!("{name}.o_proj"), d, q),
            q_norm: self.vector(&format!("{name}.q_norm.weight"), c.head_dim),
            k_norm: self.vector(&format!("{name}.k_norm.weight"), c.head_dim),
            index_qk: self.dense(&format!("{name}.indexer.index_qk_proj"), index_rows, d),
            index_q_norm: self.vector(&format!("{name}.indexer.q_layernorm.weight"), index_dim),
            index_k_norm: self.vector(&format!("{name}.indexer.k_layernorm.weight"), index_dim),
        }
    }

    fn moe(&mut self, name: &str, draft: bool) -> Moe {
        self.part = if draft { Part::Draft } else { Part::MoeDense };
        let (d, shared) = (self.config.hidden_size, self.config.moe.shared_intermediate);
        let experts = self.config.moe.experts;
        let router = self.dense(&format!("{name}.gate"), experts, d);
        let shared_gate = self.dense(&format!("{name}.shared_expert_gate"), 1, d);
        let shared = Expert {
            gate: self.dense(&format!("{name}.shared_expert.gate_proj"), shared, d),
            up: self.dense(&format!("{name}.shared_expert.up_proj"), shared, d),
            down: self.dense(&format!("{name}.shared_expert.down_proj"), d, shared),
        };
        self.part = if draft { Part::Draft } else { Part::Experts };
        let experts = self.experts(&format!("{name}.experts"));
        if !draft {
            self.count_formats(&experts);
        }
        Moe { router, shared_gate, shared, experts }
    }

    /// Routed experts: gate and up fused or not, down fused or not, each in its own format.
    fn experts(&mut self, name: &str) -> Vec<Expert> {
        let (count, inner, d) =
            (self.config.moe.experts, self.config.moe.intermediate, self.config.hidden_size);
        let (gates, ups): (Vec<Matrix>, Vec<Matrix>) =
            match self.tensors.find(&format!("{name}.gate_up_proj")) {
                Some(id) => self.fused(id, count, 2 * inner, d).into_iter().map(|m| split_rows(&m)).unzip(),
                None => (0..count)
                    .map(|e| {
                        let gate = self.projection(&format!("{name}.{e}.gate_proj"), inner, d);
                        (gate, self.projection(&format!("{name}.{e}.up_proj"), inner, d))
                    })
                    .unzip(),
            };
        let downs = match self.tensors.find(&format!("{name}.down_proj")) {
            Some(id) => self.fused(id, count, d, inner),
            None => (0..count).map(|e| self.projection(&format!("{name}.{e}.down_proj"), d, inner)).collect(),
        };
        let parts = gates.into_iter().zip(ups).zip(downs);
        parts.map(|((gate, up), down)| Expert { gate, up, down }).collect()
    }

    fn count_formats(&mut self, experts: &[Expert]) {
        for matrix in experts.iter().flat_map(|e| [&e.gate, &e.up, &e.down]) {
            match matrix.data {
                MatrixData::Nvfp4 { input_scale: Some(_), .. } => self.tally.w4a4 += 1,
                MatrixData::Nvfp4 { input_scale: None, .. } => self.tally.unscaled += 1,
                _ => {}
            }
        }
    }

    fn ple(&mut self, prefix: &str, layer: usize, number: usize) -> Option<Ple> {
        self.part = Part::Ple;
        let config = self.config;
        let shape = config.ple.as_ref()?;
        let hash = match Hash::derive(config, number) {
            Ok(hash) => hash,
            Err(error) => {
                self.fail(error);
                return None;
            }
        };
        let name = format!("{prefix}layers.{layer}.ple");
        let (wide, dim) = (config.wide(), shape.embed_dim);
        let ple = Ple {
            key: self.dense(&format!("{name}.key_proj"), wide, dim),
            value: self.dense(&format!("{name}.value_proj"), config.hidden_size, dim),
            norm_key: self.vector(&format!("{name}.norm_key.weight"), wide),
            norm_query: self.vector(&format!("{name}.norm_query.weight"), wide),
            norm_conv: self.vector(&format!("{name}.norm_conv.weight"), wide),
            conv: self.conv(&format!("{name}.conv1d.weight"), wide, shape.conv_kernel),
            hash,
        };
        self.hash_buffers(&format!("{name}.ple_embedding"), &ple.hash);
        self.part = Part::Table;
        self.table(&table_name(prefix, layer), ple.hash.total_rows(), shape.row_dim());
        Some(ple)
    }

    fn hash_buffers(&mut self, name: &str, hash: &Hash) {
        let buffers = [
            ("layer_multipliers", hash.multipliers()),
            ("ngram_heads_vocab_sizes", hash.moduli()),
            ("ngram_heads_offsets", hash.offsets()),
        ];
        for (buffer, derived) in buffers {
            if !self.hash_buffer(&format!("{name}.{buffer}"), derived) {
                self.notes
                    .push(format!("{name}.{buffer} is absent: the value that config.json implies is used"));
            }
        }
    }

    /// The shards of a table: one dtype, `[rows_i, dim]`, together `rows` rows; FP8 has one scalar scale.
    fn table(&mut self, name: &str, rows: u64, dim: usize) {
        let Some(table) = find_table(self.tensors, name) else {
            return self.table_gaps(name);
        };
        let format = match table.dtype {
            Dtype::F8E4M3 => "fp8 with one scale",
            other => super::dense_format(other),
        };
        let accepted = [Dtype::Bf16, Dtype::F32, Dtype::F8E4M3];
        let same = [table.dtype];
        let accepted = if accepted.contains(&table.dtype) { &same[..] } else { &accepted[..] };
        let mut total = 0;
        let mut good = true;
        for &id in &table.shards {
            let have = self.at(id).shape.first().copied().unwrap_or(0);
            good &= self.expect(id, format, accepted, &[&[have, dim]]);
            total += have as u64;
        }
        if good && total != rows {
            self.found(Problem::Shape, || {
                format!("{name} has {total} rows in {} shard(s), not {rows}", table.shards.len())
            });
        }
        if table.dtype == Dtype::F8E4M3 {
            self.scalar(&format!("{name}.weight_scale"), format, &[Dtype::Bf16, Dtype::F32]);
        }
    }

    /// Reports which shards of a table are missing, and marks the others as seen.
    fn table_gaps(&mut self, name: &str) {
        let list = shard_list(self.tensors, name);
        let mut next = 0;
        for &(number, id) in &list {
            if number > next {
                let last = number - 1;
                self.found(Problem::Missing, || {
                    if last > next {
                        format!("{name}.shard_{next}.weight to shard_{last}.weight")
                    } else {
                        format!("{name}.shard_{next}.weight")
                    }
                });
            }
            next = number.saturating_add(1);
            let format = self.at(id).dtype.name();
            self.mark(id, format);
        }
        if list.is_empty() {
            self.found(Problem::Missing, || format!("{name}.shard_0.weight"));
        }
        if let Some(id) = self.tensors.find(&format!("{name}.weight_scale")) {
            self.mark(id, "scale");
        }
    }

    fn draft(&mut self, prefix: &str) -> Option<Mtp> {
        self.part = Part::Draft;
        let name = match prefix {
            "language_model.model." if !self.any("mtp.") => "language_model.mtp.",
            _ => "mtp.",
        };
        if self.config.mtp_layers == 0 {
            let count = self.ignore(Part::Ignored, |n| n.starts_with(name));
            if count > 0 {
                self.notes
                    .push(format!("{count} draft head tensors ignored: config.json declares no draft layer"));
            }
            return None;
        }
        if !self.any(name) {
            self.notes
                .push("no draft head (mtp.*): speculative decoding by draft is not available".to_owned());
            return None;
        }
        let (d, wide) = (self.config.hidden_size, self.config.wide());
        Some(Mtp {
            norm_embedding: self.vector(&format!("{name}pre_fc_norm_embedding.weight"), d),
            norm_hidden: self.vector(&format!("{name}pre_fc_norm_hidden.weight"), wide),
            fc_embedding: self.dense(&format!("{name}fc_embedding"), d, d),
            fc_hidden: self.dense(&format!("{name}fc_hidden"), d, d),
            layer: Box::new(self.layer(&format!("{name}layers.0"), LayerKind::Attention, true)),
            final_hc: self.hyper(&format!("{name}hyper_connection_mixer"), false),
        })
    }
}

/// The upper and lower half of a dense matrix (gate and up).
fn split_rows(fused: &Matrix) -> (Matrix, Matrix) {
    let rows = fused.rows / 2;
    let half = |second: bool| {
        let cut = |bytes: &crate::Bytes| {
            let (len, at) = (bytes.len() / 2, if second { bytes.len() / 2 } else { 0 });
            bytes.slice(at..at + len).unwrap_or_default()
        };
        let data = match &fused.data {
            MatrixData::Bf16(bytes) => MatrixData::Bf16(cut(bytes)),
            MatrixData::F32(bytes) => MatrixData::F32(cut(bytes)),
            other => other.clone(),
        };
        Matrix { rows, cols: fused.cols, data }
    };
    (half(false), half(true))
}
