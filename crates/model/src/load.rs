//! From a checkpoint's typed weights to the operands of the forward pass.

use std::sync::Arc;

use castiron_exec::{
    self as exec, Codes, Exec, ExpertActivations, Gdn, GdnShape, Hyper, Moe, Numerics, Ple, Qsa, QsaShape,
    Storage,
};
use castiron_format::ngram::Hash;
use castiron_format::{self as format, Activation, Checkpoint, Config, MatrixData, NgramTable};

use crate::options::PlantedFault;
use crate::state::Stream;
use crate::{Error, Options, Slot};

/// A model opened for inference.
pub struct Model {
    pub(crate) config: Config,
    pub(crate) exec: Exec,
    pub(crate) context: u32,
    pub(crate) identity: Arc<str>,
    pub(crate) weights: Weights,
    pub(crate) streams: Vec<Option<Stream>>,
    pub(crate) generation: u32,
    /// A fault to compute with, for tests of what finds faults.
    pub(crate) fault: Option<PlantedFault>,
    /// Wide residuals of the rows of the last forward, `[rows, W]`.
    pub(crate) last_wide: Vec<f32>,
    /// Slot and position of those rows.
    pub(crate) last_rows: Vec<(Slot, u32)>,
    /// Wide residuals of the rows of the last draft, `[rows, W]`.
    pub(crate) last_draft: Vec<f32>,
    /// Slot and position of those rows.
    pub(crate) last_drafted: Vec<(Slot, u32)>,
}

pub(crate) struct Weights {
    pub(crate) embed: exec::Matrix,
    pub(crate) lm_head: exec::Matrix,
    pub(crate) layers: Vec<Layer>,
    pub(crate) mixer: Hyper,
    pub(crate) mtp: Option<Mtp>,
}

pub(crate) struct Layer {
    pub(crate) ple: Option<PleLayer>,
    pub(crate) attn_hc: Hyper,
    pub(crate) mixer: Mixer,
    pub(crate) mlp_hc: Hyper,
    pub(crate) moe: Moe,
}

pub(crate) enum Mixer {
    Gdn(Gdn),
    Qsa(Qsa),
}

pub(crate) struct PleLayer {
    pub(crate) dense: Ple,
    pub(crate) hash: Hash,
    pub(crate) table: NgramTable,
}

pub(crate) struct Mtp {
    pub(crate) norm_embedding: Vec<f32>,
    pub(crate) norm_hidden: Vec<f32>,
    pub(crate) fc_embedding: exec::Matrix,
    pub(crate) fc_hidden: exec::Matrix,
    pub(crate) attn_hc: Hyper,
    pub(crate) qsa: Qsa,
    pub(crate) mlp_hc: Hyper,
    pub(crate) moe: Moe,
    pub(crate) mixer: Hyper,
}

impl Model {
    /// Opens the checkpoint's text model.
    ///
    /// # Errors
    /// A tensor that cannot be read, or options that do not fit the checkpoint.
    pub fn open(checkpoint: &Checkpoint, options: &Options) -> Result<Self, Error> {
        let config = checkpoint.config().clone();
        let experts = expert_mode(checkpoint, options)?;
        let context = match options.context {
            Some(0) => return Err(Error::Options("a context of 0 tokens cannot hold a prompt".into())),
            Some(c) if c > config.max_position => {
                return Err(Error::Options(format!(
                    "a context of {c} tokens is longer than the checkpoint's {}; ask for at most that",
                    config.max_position
                )));
            }
            Some(c) => c,
            None => config.max_position,
        };
        if options.streams == 0 {
            return Err(Error::Options("a model needs at least one stream".into()));
        }
        let numerics = Numerics { activations: options.activations, experts };
        let weights = Builder { config: &config, checkpoint, options }.weights(checkpoint.weights()?)?;
        Ok(Self {
            identity: format!("{} {} {}", checkpoint.digest(), options.activations.name(), experts.name())
                .into(),
            exec: Exec::new(numerics, options.level, options.threads),
            context,
            weights,
            streams: (0..options.streams).map(|_| None).collect(),
            generation: 0,
            fault: options.fault,
            config,
            last_wide: Vec::new(),
            last_rows: Vec::new(),
            last_draft: Vec::new(),
            last_drafted: Vec::new(),
        })
    }

    /// The checkpoint's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Logits of a row.
    pub fn vocab(&self) -> usize {
        self.config.vocab_size
    }

    /// Tokens a stream can hold.
    pub fn context(&self) -> u32 {
        self.context
    }

    /// The numerics in force.
    pub fn numerics(&self) -> Numerics {
        self.exec.numerics()
    }

    /// Whether there is a draft head.
    pub fn has_draft(&self) -> bool {
        self.weights.mtp.is_some()
    }

    /// Starts to measure operations by kind, for the benchmark harness.
    pub fn measure(&mut self) -> Arc<castiron_exec::Profile> {
        self.exec.measure()
    }

    /// Ceilings of the threads in use: bytes a second of plain reads, operations a second of fused multiply-adds.
    pub fn peaks(&self, repetitions: usize) -> (f64, f64) {
        self.exec.peaks(repetitions)
    }

    /// Threads of the kernels.
    pub fn threads(&self) -> usize {
        self.exec.threads()
    }

    /// The instruction set in force.
    pub fn level(&self) -> castiron_exec::Level {
        self.exec.level()
    }

    /// Counters of the n-gram table stores, one for each n-gram layer.
    pub fn table_stats(&self) -> Vec<format::TableStats> {
        self.weights.layers.iter().filter_map(|l| l.ple.as_ref()).map(|p| p.table.stats()).collect()
    }
}

/// W4A4 or W4A16: as asked, else as the checkpoint declares.
fn expert_mode(checkpoint: &Checkpoint, options: &Options) -> Result<ExpertActivations, Error> {
    match options.experts {
        Some(ExpertActivations::W4a4) if !checkpoint.declared_w4a4() => Err(Error::Options(
            "w4a4 needs NVFP4 experts that all carry an input_scale, which is not so here; use w4a16".into(),
        )),
        Some(mode) => Ok(mode),
        None if checkpoint.declared_w4a4() => Ok(ExpertActivations::W4a4),
        None => Ok(ExpertActivations::W4a16),
    }
}

struct Builder<'a> {
    config: &'a Config,
    checkpoint: &'a Checkpoint,
    options: &'a Options,
}

impl Builder<'_> {
    fn weights(&self, w: format::Weights) -> Result<Weights, Error> {
        let mut layers = Vec::with_capacity(w.layers.len());
        for (i, l) in w.layers.into_iter().enumerate() {
            layers.push(self.layer(l, i)?);
        }
        Ok(Weights {
            embed: matrix(w.embed, "embed_tokens")?,
            lm_head: matrix(w.lm_head, "lm_head")?,
            layers,
            mixer: self.hyper(w.final_hc)?,
            mtp: w.mtp.map(|m| self.mtp(m)).transpose()?,
        })
    }

    fn layer(&self, l: format::Layer, index: usize) -> Result<Layer, Error> {
        Ok(Layer {
            ple: l.ple.map(|p| self.ple(p, index)).transpose()?,
            attn_hc: self.hyper(l.attn_hc)?,
            mixer: match l.mixer {
                format::Mixer::Gdn(g) => Mixer::Gdn(self.gdn(*g)?),
                format::Mixer::Attention(a) => Mixer::Qsa(self.qsa(*a)?),
            },
            mlp_hc: self.hyper(l.mlp_hc)?,
            moe: self.moe(l.moe)?,
        })
    }

    fn hyper(&self, h: format::Hyper) -> Result<Hyper, Error> {
        Ok(Hyper {
            norm: h.norm,
            down: matrix(h.down, "input_mix_weight_down")?,
            up: matrix(h.up, "input_mix_weight_up")?,
            inject: h.inject.map(|m| matrix(m, "block_inject_weight")).transpose()?,
            streams: self.config.hc_count,
            eps: self.config.rms_eps,
        })
    }

    fn gdn(&self, g: format::Gdn) -> Result<Gdn, Error> {
        let c = &self.config.gdn;
        Ok(Gdn {
            shape: GdnShape {
                key_heads: c.key_heads,
                value_heads: c.value_heads,
                dk: c.key_head_dim,
                dv: c.value_head_dim,
                taps: c.conv_kernel,
                sigmoid_gate: c.gate == Activation::Sigmoid,
            },
            qkv: matrix(g.in_qkv, "in_proj_qkv")?,
            z: matrix(g.in_z, "in_proj_z")?,
            b: matrix(g.in_b, "in_proj_b")?,
            a: matrix(g.in_a, "in_proj_a")?,
            conv: taps_first(&g.conv, c.conv_kernel),
            a_log: g.a_log,
            dt_bias: g.dt_bias,
            norm: g.norm,
            out: matrix(g.out, "out_proj")?,
            eps: self.config.rms_eps,
        })
    }

    fn qsa(&self, a: format::Attention) -> Result<Qsa, Error> {
        let c = self.config;
        Ok(Qsa {
            shape: QsaShape {
                heads: c.heads,
                kv_heads: c.kv_heads,
                head_dim: c.head_dim,
                index_heads: c.indexer.heads,
                index_dim: c.indexer.head_dim,
                ratio: c.indexer.ratio,
                top_blocks: c.indexer.top_blocks(),
                inv_freq: castiron_num::math::inv_freq(c.rope_theta, c.rotary_dim),
            },
            q: matrix(a.q, "q_proj")?,
            k: matrix(a.k, "k_proj")?,
            v: matrix(a.v, "v_proj")?,
            o: matrix(a.o, "o_proj")?,
            q_norm: a.q_norm,
            k_norm: a.k_norm,
            index_qk: matrix(a.index_qk, "index_qk_proj")?,
            index_q_norm: a.index_q_norm,
            index_k_norm: a.index_k_norm,
            eps: c.rms_eps,
        })
    }

    fn moe(&self, m: format::Moe) -> Result<Moe, Error> {
        let c = &self.config.moe;
        Ok(Moe {
            router: matrix(m.router, "mlp.gate")?,
            shared_gate: matrix(m.shared_gate, "shared_expert_gate")?,
            shared: expert(m.shared)?,
            experts: m.experts.into_iter().map(expert).collect::<Result<_, _>>()?,
            top_k: c.top_k,
            scoring: match c.scoring {
                format::Scoring::Softmax => exec::Scoring::Softmax,
                format::Scoring::Sigmoid => exec::Scoring::Sigmoid,
            },
            normalise: c.norm_topk,
        })
    }

    fn ple(&self, p: format::Ple, layer: usize) -> Result<PleLayer, Error> {
        let Some(c) = &self.config.ple else {
            return Err(Error::Weight("ple without ple_layer_ids".into()));
        };
        Ok(PleLayer {
            dense: Ple {
                key: matrix(p.key, "key_proj")?,
                value: matrix(p.value, "value_proj")?,
                norm_key: p.norm_key,
                norm_query: p.norm_query,
                norm_conv: p.norm_conv,
                conv: taps_first(&p.conv, c.conv_kernel),
                dilation: c.ngram_size,
                streams: self.config.hc_count,
                eps: self.config.rms_eps,
            },
            hash: p.hash,
            table: self.checkpoint.ngram_table(layer, self.options.table)?,
        })
    }

    fn mtp(&self, m: format::Mtp) -> Result<Mtp, Error> {
        let layer = *m.layer;
        let format::Mixer::Attention(attention) = layer.mixer else {
            return Err(Error::Weight("mtp.layers.0, which must be an attention layer,".into()));
        };
        Ok(Mtp {
            norm_embedding: m.norm_embedding,
            norm_hidden: m.norm_hidden,
            fc_embedding: matrix(m.fc_embedding, "mtp.fc_embedding")?,
            fc_hidden: matrix(m.fc_hidden, "mtp.fc_hidden")?,
            attn_hc: self.hyper(layer.attn_hc)?,
            qsa: self.qsa(*attention)?,
            mlp_hc: self.hyper(layer.mlp_hc)?,
            moe: self.moe(layer.moe)?,
            mixer: self.hyper(m.final_hc)?,
        })
    }
}

/// `[channels, taps]` to `[taps, channels]`.
fn taps_first(conv: &[f32], taps: usize) -> Vec<f32> {
    let channels = conv.len() / taps;
    (0..taps).flat_map(|j| (0..channels).map(move |c| conv[c * taps + j])).collect()
}

fn expert(e: format::Expert) -> Result<exec::Expert, Error> {
    let scale = |m: &format::Matrix| match m.data {
        MatrixData::Nvfp4 { input_scale, .. } => input_scale,
        _ => None,
    };
    let input_scales = match (scale(&e.gate), scale(&e.up), scale(&e.down)) {
        (Some(g), Some(u), Some(d)) => Some((g.max(u), d)),
        _ => None,
    };
    Ok(exec::Expert {
        gate: matrix(e.gate, "gate_proj")?,
        up: matrix(e.up, "up_proj")?,
        down: matrix(e.down, "down_proj")?,
        input_scales,
    })
}

fn matrix(m: format::Matrix, name: &str) -> Result<exec::Matrix, Error> {
    let codes = |b: format::Bytes| -> Codes { Arc::new(b) };
    let storage = match m.data {
        MatrixData::F32(b) => Storage::F32(codes(b)),
        MatrixData::Bf16(b) => Storage::Bf16(codes(b)),
        MatrixData::Fp8Block { codes: c, scales, .. } => {
            Storage::Fp8Block { codes: codes(c), scales: scales.into() }
        }
        MatrixData::Fp8Row { codes: c, scales } => Storage::Fp8Row { codes: codes(c), scales: scales.into() },
        MatrixData::Nvfp4 { codes: c, scales, weight_scale_2, .. } => {
            Storage::Nvfp4 { codes: codes(c), scales: codes(scales), tensor_scale: weight_scale_2 }
        }
    };
    exec::Matrix::new(m.rows, m.cols, storage).ok_or_else(|| Error::Weight(name.into()))
}
