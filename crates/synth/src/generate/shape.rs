//! Shapes: presets and changes of them.

use castiron_format::{
    Activation, Config, GdnConfig, IndexerConfig, LayerKind, MoeConfig, PleConfig, Scoring,
};

/// A shape by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    /// Under a megabyte: 4 layers of width 64, 8 experts.
    Micro,
    /// About 25 MB: 8 layers of width 256, 32 experts, 2,048 ids.
    Mini,
    /// The real widths with 4 layers, 32 experts, 8,192 ids and a small table: about 3 GB in BF16.
    FullWidth,
    /// The published model: about 360 GB in BF16.
    FlashNext,
}

impl Preset {
    /// All presets with their names.
    pub const ALL: [(&'static str, Self); 4] = [
        ("micro", Self::Micro),
        ("mini", Self::Mini),
        ("full-width", Self::FullWidth),
        ("flash-next", Self::FlashNext),
    ];

    /// The shape.
    pub fn config(self) -> Config {
        match self {
            Self::Micro => small(Small {
                layers: 4,
                hidden: 64,
                vocab: 256,
                head_dim: 32,
                gdn_dim: 16,
                experts: 8,
                top_k: 2,
                intermediate: 32,
                base: 101,
                divisor: 8,
                index_heads: 4,
                index_dim: 16,
                budget: 16,
                context: 4096,
            }),
            Self::Mini => small(Small {
                layers: 8,
                hidden: 256,
                vocab: 2048,
                head_dim: 64,
                gdn_dim: 64,
                experts: 32,
                top_k: 10,
                intermediate: 32,
                base: 4000,
                divisor: 128,
                index_heads: 4,
                index_dim: 32,
                budget: 128,
                context: 262_144,
            }),
            Self::FullWidth => {
                let mut config = flash_next();
                let changes = Changes {
                    layers: Some(4),
                    experts: Some(32),
                    vocab: Some(8192),
                    table_base: Some(20_000),
                    table_parts: Some(4),
                    ..Changes::default()
                };
                changes.apply(&mut config);
                config
            }
            Self::FlashNext => flash_next(),
        }
    }
}

/// What is changed of a shape.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Changes {
    /// Decoder layers; kinds repeat as in the published model (every fourth is attention).
    pub layers: Option<usize>,
    /// Hidden size.
    pub hidden: Option<usize>,
    /// Rows of embedding and head. End ids that do not fit become the last one.
    pub vocab: Option<usize>,
    /// Query heads.
    pub heads: Option<usize>,
    /// Key and value heads.
    pub kv_heads: Option<usize>,
    /// Routed experts. A larger `top_k` is cut to it.
    pub experts: Option<usize>,
    /// Experts a token uses.
    pub top_k: Option<usize>,
    /// Inner size of routed experts.
    pub intermediate: Option<usize>,
    /// Inner size of the shared expert.
    pub shared_intermediate: Option<usize>,
    /// Inner size of the hyper-connection mix.
    pub lowrank: Option<usize>,
    /// `ngram_vocab_size_base`: rows of a table are about this times its heads.
    pub table_base: Option<u64>,
    /// Shards of a table.
    pub table_parts: Option<usize>,
    /// Longest context.
    pub context: Option<u32>,
    /// No draft head.
    pub no_mtp: bool,
}

impl Changes {
    /// Changes a shape. Whether it is a possible one is judged when a checkpoint is made.
    pub fn apply(&self, c: &mut Config) {
        fn set<T>(place: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *place = value;
            }
        }
        if let Some(layers) = self.layers {
            c.num_layers = layers;
            c.layer_kinds = kinds(layers);
            if let Some(ple) = &mut c.ple {
                ple.layers.retain(|&l| l < layers);
            }
            c.ple = c.ple.take().filter(|p| !p.layers.is_empty());
        }
        set(&mut c.hidden_size, self.hidden);
        set(&mut c.vocab_size, self.vocab);
        set(&mut c.heads, self.heads);
        set(&mut c.kv_heads, self.kv_heads);
        set(&mut c.moe.experts, self.experts);
        c.moe.top_k = self.top_k.unwrap_or(c.moe.top_k.min(c.moe.experts));
        set(&mut c.moe.intermediate, self.intermediate);
        set(&mut c.moe.shared_intermediate, self.shared_intermediate);
        set(&mut c.hc_lowrank, self.lowrank);
        set(&mut c.max_position, self.context);
        if let Some(ple) = &mut c.ple {
            set(&mut ple.vocab_base, self.table_base);
            set(&mut ple.parts, self.table_parts);
        }
        let last = c.vocab_size.saturating_sub(1) as u32;
        c.eos.iter_mut().for_each(|id| *id = (*id).min(last));
        c.eos.dedup();
        if self.no_mtp {
            c.mtp_layers = 0;
        }
    }
}

/// Every fourth layer is attention.
fn kinds(layers: usize) -> Vec<LayerKind> {
    (1..=layers).map(|l| if l % 4 == 0 { LayerKind::Attention } else { LayerKind::Linear }).collect()
}

fn flash_next() -> Config {
    Config {
        vocab_size: 248_320,
        hidden_size: 2560,
        num_layers: 48,
        layer_kinds: kinds(48),
        heads: 24,
        kv_heads: 2,
        head_dim: 256,
        rotary_dim: 64,
        rope_theta: 1e7,
        rms_eps: 1e-6,
        hc_count: 4,
        hc_lowrank: 320,
        gdn: GdnConfig {
            conv_kernel: 4,
            key_head_dim: 128,
            value_head_dim: 128,
            key_heads: 16,
            value_heads: 48,
            gate: Activation::Sigmoid,
        },
        moe: MoeConfig {
            experts: 512,
            top_k: 10,
            intermediate: 640,
            shared_intermediate: 640,
            norm_topk: true,
            scoring: Scoring::Softmax,
        },
        ple: Some(PleConfig {
            layers: vec![1],
            embed_dim: 2560,
            conv_kernel: 4,
            ngram_size: 3,
            heads_per_ngram: 8,
            vocab_base: 20_000_000,
            divisor: 128,
            parts: 128,
            seed: 1234,
        }),
        indexer: IndexerConfig { heads: 4, head_dim: 128, budget: 2048, ratio: 4 },
        max_position: 262_144,
        eos: vec![248_044],
        tie_embeddings: false,
        mtp_layers: 1,
    }
}

/// What small presets do not take from the published model.
struct Small {
    layers: usize,
    hidden: usize,
    vocab: usize,
    head_dim: usize,
    gdn_dim: usize,
    experts: usize,
    top_k: usize,
    intermediate: usize,
    base: u64,
    divisor: u64,
    index_heads: usize,
    index_dim: usize,
    budget: usize,
    context: u32,
}

fn small(s: Small) -> Config {
    let real = flash_next();
    let ple = real.ple.map(|ple| PleConfig {
        embed_dim: s.hidden,
        vocab_base: s.base,
        divisor: s.divisor,
        parts: 4,
        ..ple
    });
    Config {
        vocab_size: s.vocab,
        hidden_size: s.hidden,
        num_layers: s.layers,
        layer_kinds: kinds(s.layers),
        heads: 4,
        head_dim: s.head_dim,
        rotary_dim: s.head_dim / 4,
        hc_lowrank: s.hidden / 8,
        gdn: GdnConfig {
            key_head_dim: s.gdn_dim,
            value_head_dim: s.gdn_dim,
            key_heads: 2,
            value_heads: 6,
            ..real.gdn
        },
        moe: MoeConfig {
            experts: s.experts,
            top_k: s.top_k,
            intermediate: s.intermediate,
            shared_intermediate: 2 * s.intermediate,
            ..real.moe
        },
        ple,
        indexer: IndexerConfig { heads: s.index_heads, head_dim: s.index_dim, budget: s.budget, ratio: 4 },
        max_position: s.context,
        eos: vec![s.vocab as u32 - 2],
        ..real
    }
}
