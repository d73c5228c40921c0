//! The tensors of a shape and the laws of their values.
//!
//! A matrix of fan-in K is a bell of deviation `gain / sqrt(K)`. Gains are 1 but for: the router 3, so that logits spread
//! and picks are not a tie; the head 4, so that some tokens are likelier than others; what writes to the residual
//! `1 / sqrt(2 * layers)`. Norm means are those of the published files.

use castiron_format::ngram::Hash;
use castiron_format::safetensors::Dtype;
use castiron_format::{Config, LayerKind};
use castiron_num::bf16;

use super::noise::{Law, Stream};
use crate::Result;
use crate::origin::{Origin, Tensor};

const PREFIX: &str = "model.language_model.";
/// Deviation of a table row: its largest value over 448 is then close to the published scale.
const TABLE: f32 = 0.025_9;

/// The values of a tensor.
#[derive(Debug, Clone)]
enum Fill {
    /// Logical matrices of `segment` elements one after another, the first of which starts `skip` elements before.
    Draw {
        law: Law,
        segment: u64,
        skip: u64,
        streams: Vec<Stream>,
    },
    Integers(Vec<u64>),
}

/// All tensors of a synthetic checkpoint.
pub(crate) struct Generator {
    tensors: Vec<Tensor>,
    fills: Vec<Fill>,
}

impl Generator {
    /// `config` has passed the reader's checks.
    pub(crate) fn new(config: &Config, seed: u64, sparse: bool) -> Result<Self> {
        let all = Self { tensors: Vec::new(), fills: Vec::new() };
        let mut builder = Builder { c: config, seed, sparse, all };
        builder.model()?;
        Ok(builder.all)
    }
}

struct Builder<'a> {
    c: &'a Config,
    seed: u64,
    sparse: bool,
    all: Generator,
}

impl Builder<'_> {
    fn push(&mut self, name: String, dtype: Dtype, shape: Vec<usize>, fill: Fill) {
        let mut tensor = Tensor { name, dtype, shape, filled: 0, used: true };
        tensor.filled = tensor.count();
        self.all.tensors.push(tensor);
        self.all.fills.push(fill);
    }

    fn draw(&mut self, name: &str, shape: &[usize], law: Law) {
        let logical = name.strip_prefix(PREFIX).unwrap_or(name);
        let streams = vec![Stream::new(self.seed, logical)];
        let fill = Fill::Draw { law, segment: u64::MAX, skip: 0, streams };
        self.push(name.to_owned(), Dtype::Bf16, shape.to_vec(), fill);
    }

    fn matrix(&mut self, name: String, rows: usize, cols: usize, gain: f32) {
        self.draw(&format!("{name}.weight"), &[rows, cols], Law::bell(0.0, gain / (cols as f32).sqrt()));
    }

    fn norm(&mut self, name: String, len: usize, mean: f32) {
        self.draw(&format!("{name}.weight"), &[len], Law::bell(mean, 0.05));
    }

    fn conv(&mut self, name: String, channels: usize, taps: usize) {
        self.draw(
            &format!("{name}.weight"),
            &[channels, 1, taps],
            Law::bell(0.0, 1.0 / (taps as f32).sqrt()),
        );
    }

    /// Gain of what writes to the residual.
    fn write_gain(&self) -> f32 {
        1.0 / (2.0 * self.c.num_layers as f32).sqrt()
    }

    fn model(&mut self) -> Result<()> {
        let (vocab, d) = (self.c.vocab_size, self.c.hidden_size);
        self.draw(&format!("{PREFIX}embed_tokens.weight"), &[vocab, d], Law::bell(0.0, 0.02));
        if !self.c.tie_embeddings {
            self.matrix("lm_head".into(), vocab, d, 4.0);
        }
        for layer in 0..self.c.num_layers {
            let name = format!("{PREFIX}layers.{layer}");
            let number = self.c.ple.as_ref().and_then(|p| p.layers.iter().position(|&l| l == layer));
            if let Some(number) = number {
                self.ple(&format!("{name}.ple"), number)?;
            }
            self.layer(&name, self.c.layer_kinds[layer]);
        }
        self.hyper(&format!("{PREFIX}hyper_connection_mixer"), false);
        if self.c.mtp_layers > 0 {
            let (d, wide) = (self.c.hidden_size, self.c.wide());
            self.norm("mtp.pre_fc_norm_embedding".into(), d, -0.76);
            self.norm("mtp.pre_fc_norm_hidden".into(), wide, -0.1);
            self.matrix("mtp.fc_embedding".into(), d, d, 1.0);
            self.matrix("mtp.fc_hidden".into(), d, d, 1.0);
            self.layer("mtp.layers.0", LayerKind::Attention);
            self.hyper("mtp.hyper_connection_mixer", false);
        }
        Ok(())
    }

    fn layer(&mut self, name: &str, kind: LayerKind) {
        self.hyper(&format!("{name}.attn_hyper_connection"), true);
        self.hyper(&format!("{name}.mlp_hyper_connection"), true);
        match kind {
            LayerKind::Linear => self.gdn(&format!("{name}.linear_attn")),
            LayerKind::Attention => self.attention(&format!("{name}.self_attn")),
        }
        self.moe(&format!("{name}.mlp"));
    }

    fn hyper(&mut self, name: &str, inject: bool) {
        let (wide, low) = (self.c.wide(), self.c.hc_lowrank);
        self.norm(format!("{name}.hc_norm"), wide, -0.06);
        self.matrix(format!("{name}.input_mix_weight_down"), low, wide, 1.0);
        self.matrix(format!("{name}.input_mix_weight_up"), wide, low, 1.0);
        if inject {
            self.matrix(format!("{name}.block_inject_weight"), self.c.hc_count, wide, 1.0);
        }
    }

    fn gdn(&mut self, name: &str) {
        let (d, channels, g) = (self.c.hidden_size, self.c.gdn_channels(), self.c.gdn.clone());
        let values = g.value_heads * g.value_head_dim;
        self.matrix(format!("{name}.in_proj_qkv"), channels, d, 1.0);
        self.matrix(format!("{name}.in_proj_z"), values, d, 1.0);
        self.matrix(format!("{name}.in_proj_b"), g.value_heads, d, 1.0);
        self.matrix(format!("{name}.in_proj_a"), g.value_heads, d, 1.0);
        self.conv(format!("{name}.conv1d"), channels, g.conv_kernel);
        // Decay rates from 1 to 16 and time steps from 0.002 to 0.13: memories of one to hundreds of tokens.
        self.draw(&format!("{name}.A_log"), &[g.value_heads], Law::Flat { low: 0.0, width: 2.75 });
        self.draw(&format!("{name}.dt_bias"), &[g.value_heads], Law::Flat { low: -6.0, width: 4.0 });
        self.norm(format!("{name}.norm"), g.value_head_dim, 0.97);
        self.matrix(format!("{name}.out_proj"), d, values, self.write_gain());
    }

    fn attention(&mut self, name: &str) {
        let c = self.c;
        let (d, q, kv) = (c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let dim = c.indexer.head_dim;
        self.matrix(format!("{name}.q_proj"), 2 * q, d, 1.0);
        self.matrix(format!("{name}.k_proj"), kv, d, 1.0);
        self.matrix(format!("{name}.v_proj"), kv, d, 1.0);
        self.matrix(format!("{name}.o_proj"), d, q, self.write_gain());
        self.norm(format!("{name}.q_norm"), c.head_dim, 0.28);
        self.norm(format!("{name}.k_norm"), c.head_dim, 0.28);
        self.matrix(format!("{name}.indexer.index_qk_proj"), (c.indexer.heads + 1) * dim, d, 1.0);
        self.norm(format!("{name}.indexer.q_layernorm"), dim, 0.0);
        self.norm(format!("{name}.indexer.k_layernorm"), dim, 0.0);
    }

    fn moe(&mut self, name: &str) {
        let (d, m) = (self.c.hidden_size, self.c.moe.clone());
        self.matrix(format!("{name}.gate"), m.experts, d, 3.0);
        self.matrix(format!("{name}.shared_expert_gate"), 1, d, 1.0);
        self.matrix(format!("{name}.shared_expert.gate_proj"), m.shared_intermediate, d, 1.0);
        self.matrix(format!("{name}.shared_expert.up_proj"), m.shared_intermediate, d, 1.0);
        self.matrix(format!("{name}.shared_expert.down_proj"), d, m.shared_intermediate, self.write_gain());
        let name = format!("{name}.experts");
        self.experts(&name, "gate_up_proj", &["gate_proj", "up_proj"], (m.intermediate, d), 1.0);
        self.experts(&name, "down_proj", &["down_proj"], (d, m.intermediate), self.write_gain());
    }

    /// A fused tensor `[experts, parts * rows, cols]`, each part of each expert with a stream of its own.
    fn experts(&mut self, name: &str, fused: &str, parts: &[&str], (rows, cols): (usize, usize), gain: f32) {
        let logical = name.strip_prefix(PREFIX).unwrap_or(name);
        let count = self.c.moe.experts;
        let names =
            (0..count).flat_map(|e| parts.iter().map(move |part| format!("{logical}.{e}.{part}.weight")));
        let streams = names.map(|n| Stream::new(self.seed, &n)).collect();
        let law = Law::bell(0.0, gain / (cols as f32).sqrt());
        let fill = Fill::Draw { law, segment: (rows * cols) as u64, skip: 0, streams };
        self.push(format!("{name}.{fused}"), Dtype::Bf16, vec![count, parts.len() * rows, cols], fill);
    }

    fn ple(&mut self, name: &str, number: usize) -> Result<()> {
        let Some(ple) = self.c.ple.clone() else { return Ok(()) };
        let hash = Hash::derive(self.c, number)?;
        let (wide, dim) = (self.c.wide(), ple.embed_dim);
        self.matrix(format!("{name}.key_proj"), wide, dim, 1.0);
        self.matrix(format!("{name}.value_proj"), self.c.hidden_size, dim, 1.0);
        for norm in ["norm_key", "norm_query", "norm_conv"] {
            self.norm(format!("{name}.{norm}"), wide, -0.11);
        }
        self.conv(format!("{name}.conv1d"), wide, ple.conv_kernel);
        for (buffer, values) in [
            ("layer_multipliers", hash.multipliers()),
            ("ngram_heads_vocab_sizes", hash.moduli()),
            ("ngram_heads_offsets", hash.offsets()),
        ] {
            let fill = Fill::Integers(values.to_vec());
            self.push(format!("{name}.ple_embedding.{buffer}"), Dtype::I64, vec![values.len()], fill);
        }
        self.table(
            &format!("{name}.ple_embedding.ngram_embedding"),
            hash.total_rows(),
            ple.row_dim(),
            ple.parts,
        );
        Ok(())
    }

    /// Shards of equal size, the last one smaller when the rows do not divide.
    fn table(&mut self, name: &str, rows: u64, dim: usize, parts: usize) {
        let logical = name.strip_prefix(PREFIX).unwrap_or(name);
        let stream = Stream::new(self.seed, logical);
        let each = rows.div_ceil(parts as u64).max(1);
        for shard in 0..rows.div_ceil(each) {
            let first = shard * each;
            let count = each.min(rows - first);
            let fill = Fill::Draw {
                law: Law::bell(0.0, TABLE),
                segment: u64::MAX,
                skip: first * dim as u64,
                streams: vec![stream],
            };
            let shape = vec![count as usize, dim];
            self.push(format!("{name}.shard_{shard}.weight"), Dtype::Bf16, shape, fill);
            if self.sparse
                && let Some(tensor) = self.all.tensors.last_mut()
            {
                tensor.filled = dim as u64;
            }
        }
    }
}

impl Generator {
    /// Values of `from..from + count` to `each`, rounded to bf16.
    fn values(&self, tensor: usize, from: u64, count: u64, mut each: impl FnMut(u16)) {
        let Fill::Draw { law, segment, skip, streams } = &self.fills[tensor] else { return };
        let empty = count.min(from.saturating_add(count).saturating_sub(self.tensors[tensor].filled));
        let mut at = from + skip;
        let end = at + count - empty;
        while at < end {
            let (number, inside) = (at / segment, at % segment);
            let run = (end - at).min(segment - inside);
            if let Some(stream) = streams.get(number as usize) {
                stream.words(inside, run, |word| each(bf16::to_bits(law.value(word))));
            }
            at += run;
        }
        (0..empty).for_each(|_| each(0));
    }
}

impl Origin for Generator {
    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn bytes(&self, tensor: usize, from: u64, count: u64, out: &mut Vec<u8>) {
        out.clear();
        match &self.fills[tensor] {
            Fill::Integers(values) => {
                let part = &values[from as usize..(from + count) as usize];
                out.extend(part.iter().flat_map(|v| v.to_le_bytes()));
            }
            Fill::Draw { .. } => self.values(tensor, from, count, |bits| out.extend(bits.to_le_bytes())),
        }
    }

    fn floats(&self, tensor: usize, from: u64, count: u64, out: &mut Vec<f32>) {
        out.clear();
        self.values(tensor, from, count, |bits| out.push(bf16::from_bits(bits)));
    }
}
