//! `config.json`, checked: the typed part. Parsing is in `config/parse.rs`.

mod generation;
mod keys;
mod parse;

pub use generation::GenerationConfig;

/// The kind of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerKind {
    /// Gated DeltaNet (`linear_attention`).
    Linear,
    /// Sparse attention (`full_attention`, `indexed_attention`, `qwen_sparse_attention`).
    Attention,
}

/// Activation of the GDN output gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `x * sigmoid(x)`.
    Silu,
}

/// How router logits become weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// A sigmoid per expert.
    Sigmoid,
}

/// The text part of `config.json`, checked. Every count is above zero unless said otherwise.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Config {
    /// Tokens; rows of the embedding and the output head.
    pub vocab_size: usize,
    /// D.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// One per layer.
    pub layer_kinds: Vec<LayerKind>,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of an attention head.
    pub head_dim: usize,
    /// Channels that rotate: even, at most `head_dim` and the indexer's `head_dim`.
    pub rotary_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Epsilon of every norm.
    pub rms_eps: f32,
    /// S, the residual streams.
    pub hc_count: usize,
    /// Inner size of the residual mix.
    pub hc_lowrank: usize,
    /// Gated DeltaNet.
    pub gdn: GdnConfig,
    /// Experts.
    pub moe: MoeConfig,
    /// N-gram layers; none when `ple_layer_ids` is absent, null or empty.
    pub ple: Option<PleConfig>,
    /// Indexer of sparse attention.
    pub indexer: IndexerConfig,
    /// Longest context in tokens.
    pub max_position: u32,
    /// `eos_token_id` of the text configuration; never empty. The first one is the n-gram end of sequence.
    pub eos: Vec<u32>,
    /// Whether the output head is the embedding.
    pub tie_embeddings: bool,
    /// Layers of the draft head that the configuration declares: 0 or 1 (1 when it says nothing).
    pub mtp_layers: usize,
}

/// Gated DeltaNet sizes.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct GdnConfig {
    /// Taps of the causal convolution.
    pub conv_kernel: usize,
    /// Channels of a key head.
    pub key_head_dim: usize,
    /// Channels of a value head.
    pub value_head_dim: usize,
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Activation of the output gate.
    pub gate: Activation,
}

/// Mixture of experts sizes.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct MoeConfig {
    /// Routed experts.
    pub experts: usize,
    /// Experts a token uses; at most `experts`.
    pub top_k: usize,
    /// Inner size of a routed expert.
    pub intermediate: usize,
    /// Inner size of the shared expert.
    pub shared_intermediate: usize,
    /// Whether the picked weights are divided by their sum.
    pub norm_topk: bool,
    /// Router scores.
    pub scoring: Scoring,
}

/// N-gram layers.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PleConfig {
    /// Layers that have one, zero-based, rising, each once. The position in this list seeds the hash, whatever the order
    /// of `ple_layer_ids`.
    pub layers: Vec<usize>,
    /// Channels of the concatenated rows of a token; a multiple of the heads.
    pub embed_dim: usize,
    /// Taps of the convolution.
    pub conv_kernel: usize,
    /// N: orders 2..=N are hashed; also the dilation of the convolution.
    pub ngram_size: usize,
    /// Heads of each order.
    pub heads_per_ngram: usize,
    /// The head moduli are consecutive primes from here.
    pub vocab_base: u64,
    /// The row count of a table is padded up to a multiple of this.
    pub divisor: u64,
    /// Declared number of shards (informative: the shards are counted from the tensors).
    pub parts: usize,
    /// Seed of the hash multipliers.
    pub seed: u64,
}

impl PleConfig {
    /// Heads of all orders together: rows per token.
    pub fn heads(&self) -> usize {
        self.heads_per_ngram * (self.ngram_size - 1)
    }

    /// Channels of one table row.
    pub fn row_dim(&self) -> usize {
        self.embed_dim / self.heads()
    }
}

/// Indexer of sparse attention.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct IndexerConfig {
    /// Index query heads (there is one index key).
    pub heads: usize,
    /// Channels of an index head.
    pub head_dim: usize,
    /// Tokens that selected blocks may cover.
    pub budget: usize,
    /// Tokens a block.
    pub ratio: usize,
}

impl IndexerConfig {
    /// Blocks selected at most: `budget / ratio`, at least 1.
    pub fn top_blocks(&self) -> usize {
        self.budget / self.ratio
    }
}

impl Config {
    /// S * D, the width of the residual.
    pub fn wide(&self) -> usize {
        self.hc_count * self.hidden_size
    }

    /// Convolution channels of a GDN layer: `2 * key_heads * key_head_dim + value_heads * value_head_dim`.
    pub fn gdn_channels(&self) -> usize {
        2 * self.gdn.key_heads * self.gdn.key_head_dim + self.gdn.value_heads * self.gdn.value_head_dim
    }

    /// The token that ends an n-gram window.
    pub fn ngram_eos(&self) -> u32 {
        self.eos.first().copied().unwrap_or(0)
    }
}
