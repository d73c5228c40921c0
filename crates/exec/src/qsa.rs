//! Sparse attention: projections, pooled index keys, block selection, attention over the selected tokens.

use castiron_cpu::{self as cpu, Pool};
use castiron_num::orders;

use crate::{Exec, Kind, Matrix};

/// Sizes of an attention layer.
#[derive(Clone, Debug)]
pub struct QsaShape {
    /// Query heads, a multiple of the K/V heads.
    pub heads: usize,
    /// K/V heads.
    pub kv_heads: usize,
    /// Head size.
    pub head_dim: usize,
    /// Index query heads.
    pub index_heads: usize,
    /// Index head size.
    pub index_dim: usize,
    /// Tokens of a block.
    pub ratio: usize,
    /// Blocks selected at most.
    pub top_blocks: usize,
    /// Rotary frequencies; twice as many leading elements of a head are rotated.
    pub inv_freq: Vec<f32>,
}

/// Weights of an attention layer.
pub struct Qsa {
    /// Sizes.
    pub shape: QsaShape,
    /// `[heads * 2 * head_dim, D]`: a head's query rows, then its gate rows.
    pub q: Matrix,
    /// `[kv_heads * head_dim, D]`.
    pub k: Matrix,
    /// `[kv_heads * head_dim, D]`.
    pub v: Matrix,
    /// `[D, heads * head_dim]`.
    pub o: Matrix,
    /// Zero-centred, `[head_dim]`.
    pub q_norm: Vec<f32>,
    /// Zero-centred, `[head_dim]`.
    pub k_norm: Vec<f32>,
    /// `[(index_heads + 1) * index_dim, D]`: the index queries, then the index key.
    pub index_qk: Matrix,
    /// Zero-centred, `[index_dim]`.
    pub index_q_norm: Vec<f32>,
    /// Zero-centred, `[index_dim]`.
    pub index_k_norm: Vec<f32>,
    /// Epsilon of every norm.
    pub eps: f32,
}

/// What a layer makes of its input rows before it looks at a cache.
pub struct QsaRows {
    /// `[rows, heads * head_dim]`, rotated, stored.
    pub q: Vec<f32>,
    /// `[rows, heads * head_dim]`.
    pub gate: Vec<f32>,
    /// `[rows, kv_heads * head_dim]`, rotated, stored.
    pub k: Vec<f32>,
    /// `[rows, kv_heads * head_dim]`, stored.
    pub v: Vec<f32>,
    /// `[rows, index_heads * index_dim]`, rotated, stored.
    pub index_q: Vec<f32>,
    /// `[rows, index_dim]`, stored.
    pub raw: Vec<f32>,
}

/// The tokens a row attends to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Ascending token indices.
    pub tokens: Vec<u32>,
    /// Whether every score that was compared was finite; the row is a fault otherwise.
    pub finite: bool,
}

impl Exec {
    /// Projects, normalises and rotates `h` (`[rows, D]`); row `r` stands at `positions[r]`.
    pub fn qsa_project(&self, w: &Qsa, h: &[f32], positions: &[u32]) -> QsaRows {
        let s = &w.shape;
        let qg = self.product(&w.q, h);
        let width = s.heads * s.head_dim;
        let mut q = Vec::with_capacity(positions.len() * width);
        let mut gate = Vec::with_capacity(positions.len() * width);
        for head in qg.chunks_exact(2 * s.head_dim) {
            q.extend_from_slice(&head[..s.head_dim]);
            gate.extend_from_slice(&head[s.head_dim..]);
        }
        let k = self.product(&w.k, h);
        let v = self.product_stored(&w.v, h);
        let index_width = s.index_heads * s.index_dim;
        let mut index_q = Vec::with_capacity(positions.len() * index_width);
        let mut raw = Vec::with_capacity(positions.len() * s.index_dim);
        for row in self.product(&w.index_qk, h).chunks_exact(index_width + s.index_dim) {
            index_q.extend_from_slice(&row[..index_width]);
            raw.extend_from_slice(&row[index_width..]);
        }
        self.store(&mut raw);
        QsaRows {
            q: self.norm_and_rotate(w, &q, &w.q_norm, positions),
            gate,
            k: self.norm_and_rotate(w, &k, &w.k_norm, positions),
            v,
            index_q: self.norm_and_rotate(w, &index_q, &w.index_q_norm, positions),
            raw,
        }
    }

    /// Head norm, rope, store; `x` holds the same number of heads for each position.
    fn norm_and_rotate(&self, w: &Qsa, x: &[f32], norm: &[f32], positions: &[u32]) -> Vec<f32> {
        let mut x = self.norm(x, norm, 1, w.eps);
        let width = x.len() / positions.len().max(1);
        self.pool.rows(&mut x, width, |r, row| {
            for head in row.chunks_exact_mut(norm.len()) {
                cpu::rope(self.level, head, positions[r], &w.shape.inv_freq);
            }
        });
        self.store(&mut x);
        x
    }

    /// The pooled key of block `block` from its `ratio` stored raw keys (`[ratio, index_dim]`).
    pub fn qsa_pool(&self, w: &Qsa, raw: &[f32], block: u32) -> Vec<f32> {
        let s = &w.shape;
        let mut mean: Vec<f32> = (0..s.index_dim)
            .map(|d| orders::chain_sum((0..s.ratio).map(|t| raw[t * s.index_dim + d])) / s.ratio as f32)
            .collect();
        self.store(&mut mean);
        self.norm_and_rotate(w, &mean, &w.index_k_norm, &[block * s.ratio as u32])
    }

    /// Selects the tokens of a row that sees `visible` tokens (itself included).
    ///
    /// `pooled` holds the pooled keys of (at least) the complete blocks, `[blocks, index_dim]`; it is read only
    /// when there are more than `top_blocks`.
    pub fn qsa_select(&self, s: &QsaShape, index_q: &[f32], pooled: &Matrix, visible: u32) -> Selection {
        let ratio = s.ratio as u32;
        let full = visible / ratio;
        if full as usize <= s.top_blocks {
            return Selection { tokens: (0..visible).collect(), finite: true };
        }
        let dots = self.multiply(pooled, index_q);
        let scores: Vec<f32> = (0..full as usize)
            .map(|b| orders::index_score((0..s.index_heads).map(|h| dots[h * pooled.rows() + b])))
            .collect();
        let mut blocks = Vec::new();
        orders::top_k(&scores, s.top_blocks, &mut blocks);
        blocks.sort_unstable();
        let mut tokens: Vec<u32> = blocks.iter().flat_map(|&b| b * ratio..(b + 1) * ratio).collect();
        tokens.extend(full * ratio..visible);
        Selection { tokens, finite: scores.iter().all(|s| s.is_finite()) }
    }

    /// Attention of one row's query heads that share K/V head `kv_head`, over its selected tokens.
    ///
    /// `keys` are `[selected, head_dim]`, `values` the same; `q` and `out` are that row's `[heads * head_dim]`.
    pub fn qsa_attend(
        &self,
        s: &QsaShape,
        q: &[f32],
        kv_head: usize,
        keys: &Matrix,
        values: &[f32],
        out: &mut [f32],
    ) {
        let heads = s.heads / s.kv_heads * s.head_dim;
        let at = kv_head * heads..(kv_head + 1) * heads;
        let scale = 1.0 / (s.head_dim as f32).sqrt();
        let mut scores = self.multiply(keys, &q[at.clone()]);
        scores.iter_mut().for_each(|s| *s *= scale);
        let mut acc = vec![0.0; s.head_dim];
        for (scores, out) in scores.chunks_exact(keys.rows()).zip(out[at].chunks_exact_mut(s.head_dim)) {
            cpu::attend(self.level, scores, values, &mut acc, out);
        }
    }

    /// This device with one thread, for work that is already cut by rows.
    pub fn alone(&self) -> Self {
        Self { pool: Pool::alone().clone(), profile: None, ..*self }
    }

    /// Runs `job(row, values)` for rows of `width` values of `data` on all threads. A row's job gets a device
    /// for its own operations: one thread when rows alone keep all busy, all threads otherwise.
    pub fn each_row(&self, data: &mut [f32], width: usize, job: impl Fn(&Self, usize, &mut [f32]) + Sync) {
        self.timed(Kind::Attention, 0, 0, || self.each_row_of(data, width, job));
    }

    fn each_row_of(&self, data: &mut [f32], width: usize, job: impl Fn(&Self, usize, &mut [f32]) + Sync) {
        if data.len() / width.max(1) < self.threads() {
            data.chunks_exact_mut(width).enumerate().for_each(|(r, row)| job(self, r, row));
        } else {
            let alone = self.alone();
            self.pool.rows(data, width, |r, row| job(&alone, r, row));
        }
    }

    /// Output gate and projection: `[rows, heads * head_dim]` to `[rows, D]`.
    pub fn qsa_finish(&self, w: &Qsa, mut attention: Vec<f32>, gate: &[f32]) -> Vec<f32> {
        cpu::sigmoid_gate(self.level, &mut attention, gate);
        self.store(&mut attention);
        self.product(&w.o, &attention)
    }
}
