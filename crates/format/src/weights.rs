//! Typed weights: what [`crate::Checkpoint::weights`] returns.
//!
//! Every matrix is row-major `[out, in]` as stored. D is the hidden size, S the number of residual streams, `W = S * D`.
//! Small vectors are widened to f32 (exactly: they are stored as BF16 or F32).

use crate::Bytes;
use crate::ngram::Hash;

/// Side of the square blocks of [`MatrixData::Fp8Block`].
pub const FP8_BLOCK: usize = 128;
/// Columns that share one block scale in [`MatrixData::Nvfp4`].
pub const NVFP4_GROUP: usize = 16;

/// A weight matrix `[rows, cols]` = `[out, in]`, row-major, in its stored format.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The elements.
    pub data: MatrixData,
}

/// The elements of a [`Matrix`]. Views are zero-copy and little-endian; they may be unaligned.
#[derive(Debug, Clone)]
pub enum MatrixData {
    /// `4 * rows * cols` bytes.
    F32(Bytes),
    /// `2 * rows * cols` bytes.
    Bf16(Bytes),
    /// E4M3 codes, `rows * cols` bytes, with one scale per 128 x 128 block: `w = decode(code) * scales[r / 128, c / 128]`.
    ///
    /// Scales are finite and not negative. Codes are not checked for NaN (0x7F, 0xFF).
    Fp8Block {
        /// One byte an element.
        codes: Bytes,
        /// `[scale_rows, scale_cols]`, row-major, widened from BF16 or F32.
        scales: Vec<f32>,
        /// `ceil(rows / 128)`.
        scale_rows: usize,
        /// `ceil(cols / 128)`.
        scale_cols: usize,
    },
    /// E4M3 codes, `rows * cols` bytes, with one scale per output row, applied to the finished dot product.
    ///
    /// Scales are finite and above zero. Codes are not checked for NaN (0x7F, 0xFF).
    Fp8Row {
        /// One byte an element.
        codes: Bytes,
        /// `[rows]`.
        scales: Vec<f32>,
    },
    /// E2M1 codes in groups of 16 columns: `w = e2m1(code) * e4m3(scale) * weight_scale_2`.
    ///
    /// Scale codes are checked: neither NaN nor negative. `weight_scale_2` is finite and not negative, `input_scale` finite
    /// and above zero. Both always multiply: compressed-tensors stores the reciprocals, which are inverted on load.
    Nvfp4 {
        /// `rows * cols / 2` bytes; column 2i in the low nibble, 2i + 1 in the high one.
        codes: Bytes,
        /// E4M3 block scales `[rows, cols / 16]`, row-major, one byte each.
        scales: Bytes,
        /// Global scale of the matrix.
        weight_scale_2: f32,
        /// Static scale of the activations for W4A4; absent in weight-only checkpoints.
        input_scale: Option<f32>,
    },
}

impl Matrix {
    /// Short name of the format: `f32`, `bf16`, `fp8-block`, `fp8-row` or `nvfp4`.
    pub fn format(&self) -> &'static str {
        match self.data {
            MatrixData::F32(_) => "f32",
            MatrixData::Bf16(_) => "bf16",
            MatrixData::Fp8Block { .. } => "fp8-block",
            MatrixData::Fp8Row { .. } => "fp8-row",
            MatrixData::Nvfp4 { .. } => "nvfp4",
        }
    }
}

/// All weights but the n-gram tables.
#[derive(Debug, Clone)]
pub struct Weights {
    /// Token embedding `[vocab, D]`.
    pub embed: Matrix,
    /// Output head `[vocab, D]`; a view of `embed` when the configuration ties them.
    pub lm_head: Matrix,
    /// One per layer.
    pub layers: Vec<Layer>,
    /// The final read (`hyper_connection_mixer`), without `inject`.
    pub final_hc: Hyper,
    /// The draft head, when the checkpoint has one.
    pub mtp: Option<Mtp>,
}

/// One decoder layer.
#[derive(Debug, Clone)]
pub struct Layer {
    /// The n-gram layer, added to the residual before anything else of the layer.
    pub ple: Option<Ple>,
    /// Residual read and write around the mixer.
    pub attn_hc: Hyper,
    /// The token mixer.
    pub mixer: Mixer,
    /// Residual read and write around the experts.
    pub mlp_hc: Hyper,
    /// The experts.
    pub moe: Moe,
}

/// The token mixer of a layer.
#[derive(Debug, Clone)]
pub enum Mixer {
    /// Gated DeltaNet.
    Gdn(Box<Gdn>),
    /// Sparse attention.
    Attention(Box<Attention>),
}

/// A hyper-connection.
#[derive(Debug, Clone)]
pub struct Hyper {
    /// `[W]`, zero-centred, S groups of D.
    pub norm: Vec<f32>,
    /// `[lowrank, W]`.
    pub down: Matrix,
    /// `[W, lowrank]`.
    pub up: Matrix,
    /// `[S, W]`; none in a final read.
    pub inject: Option<Matrix>,
}

/// Gated DeltaNet. KH, VH key and value heads of dk, dv; `C = 2 * KH * dk + VH * dv` conv channels.
#[derive(Debug, Clone)]
pub struct Gdn {
    /// `[C, D]`: q rows, then k rows, then v rows, head-major inside each.
    pub in_qkv: Matrix,
    /// `[VH * dv, D]`, the output gate.
    pub in_z: Matrix,
    /// `[VH, D]`, beta logits.
    pub in_b: Matrix,
    /// `[VH, D]`, decay logits.
    pub in_a: Matrix,
    /// `[C, K]` row-major, tap K - 1 the newest (stored `[C, 1, K]` or `[C, K, 1]`).
    pub conv: Vec<f32>,
    /// `[VH]`.
    pub a_log: Vec<f32>,
    /// `[VH]`.
    pub dt_bias: Vec<f32>,
    /// `[dv]`, a plain (not zero-centred) norm weight.
    pub norm: Vec<f32>,
    /// `[D, VH * dv]`.
    pub out: Matrix,
}

/// Sparse attention with its indexer.
#[derive(Debug, Clone)]
pub struct Attention {
    /// `[heads * 2 * head_dim, D]`: per head the query rows, then the gate rows.
    pub q: Matrix,
    /// `[kv_heads * head_dim, D]`.
    pub k: Matrix,
    /// `[kv_heads * head_dim, D]`.
    pub v: Matrix,
    /// `[D, heads * head_dim]`.
    pub o: Matrix,
    /// `[head_dim]`, zero-centred.
    pub q_norm: Vec<f32>,
    /// `[head_dim]`, zero-centred.
    pub k_norm: Vec<f32>,
    /// `[(index_heads + 1) * index_head_dim, D]`: the index queries, then the index key.
    pub index_qk: Matrix,
    /// `[index_head_dim]`, zero-centred RMS norm weight of the index queries.
    pub index_q_norm: Vec<f32>,
    /// `[index_head_dim]`, zero-centred RMS norm weight of the pooled index keys.
    pub index_k_norm: Vec<f32>,
}

/// Router, shared expert and routed experts.
#[derive(Debug, Clone)]
pub struct Moe {
    /// `[experts, D]`.
    pub router: Matrix,
    /// `[1, D]`, the gate of the shared expert.
    pub shared_gate: Matrix,
    /// The shared expert.
    pub shared: Expert,
    /// Routed experts in id order. Formats may differ between experts and projections.
    pub experts: Vec<Expert>,
}

/// One gated feed-forward network with intermediate size I.
#[derive(Debug, Clone)]
pub struct Expert {
    /// `[I, D]`.
    pub gate: Matrix,
    /// `[I, D]`.
    pub up: Matrix,
    /// `[D, I]`.
    pub down: Matrix,
}

/// The dense part of an n-gram layer; rows come from [`crate::NgramTable`].
#[derive(Debug, Clone)]
pub struct Ple {
    /// `[W, embed_dim]`.
    pub key: Matrix,
    /// `[D, embed_dim]`.
    pub value: Matrix,
    /// `[W]`, zero-centred, S groups.
    pub norm_key: Vec<f32>,
    /// `[W]`, zero-centred, S groups.
    pub norm_query: Vec<f32>,
    /// `[W]`, zero-centred, S groups.
    pub norm_conv: Vec<f32>,
    /// `[W, K]` row-major, tap K - 1 the newest; taps are `ngram_size` tokens apart.
    pub conv: Vec<f32>,
    /// Row hash of this layer, checked against the stored buffers.
    pub hash: Hash,
}

/// The draft head.
#[derive(Debug, Clone)]
pub struct Mtp {
    /// `[D]`, zero-centred.
    pub norm_embedding: Vec<f32>,
    /// `[W]`, zero-centred, one group over all of W.
    pub norm_hidden: Vec<f32>,
    /// `[D, D]`.
    pub fc_embedding: Matrix,
    /// `[D, D]`.
    pub fc_hidden: Matrix,
    /// Its one layer: always attention, never an n-gram layer.
    pub layer: Box<Layer>,
    /// Its own final read, without `inject`.
    pub final_hc: Hyper,
}
