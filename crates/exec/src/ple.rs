//! The hashed n-gram layer: gate the looked-up values by the residual, convolve, add into the streams.

use castiron_cpu as cpu;
use castiron_num::{dot::dot32, math, orders};

use crate::{Exec, Matrix};

/// Weights of an n-gram layer. `S` streams of `D` values, `W = S * D`.
pub struct Ple {
    /// `[W, E]`, with `E` the width of the concatenated table rows.
    pub key: Matrix,
    /// `[D, E]`.
    pub value: Matrix,
    /// Zero-centred, `[W]`, `S` groups.
    pub norm_key: Vec<f32>,
    /// Zero-centred, `[W]`, `S` groups.
    pub norm_query: Vec<f32>,
    /// Zero-centred, `[W]`, `S` groups.
    pub norm_conv: Vec<f32>,
    /// Convolution taps, oldest first, `[taps, W]`.
    pub conv: Vec<f32>,
    /// Distance between taps, in tokens.
    pub dilation: usize,
    /// `S`.
    pub streams: usize,
    /// Epsilon of the norms.
    pub eps: f32,
}

impl Ple {
    /// Stored rows of history the convolution needs before a row.
    pub fn history(&self) -> usize {
        (self.conv.len() / self.norm_conv.len() - 1) * self.dilation
    }
}

impl Exec {
    /// The gated values `u` and the stored convolution inputs `n`, each `[rows, W]`, of the wide rows `x` and
    /// the gathered rows `emb` (`[rows, E]`, stored).
    pub fn ple_gate(&self, w: &Ple, x: &[f32], emb: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let wide = w.norm_key.len();
        let size = wide / w.streams;
        let k = self.norm(&self.product(&w.key, emb), &w.norm_key, w.streams, w.eps);
        let q = self.norm(x, &w.norm_query, w.streams, w.eps);
        let v = self.product(&w.value, emb);
        let root = (size as f32).sqrt();
        let mut u = vec![0.0; x.len()];
        for (i, u) in u.chunks_exact_mut(size).enumerate() {
            let at = i * size..(i + 1) * size;
            let g = orders::signed_root(dot32(&k[at.clone()], &q[at]) / root);
            let gate = math::sigmoid(g);
            let v = &v[i / w.streams * size..][..size];
            for (u, &v) in u.iter_mut().zip(v) {
                *u = gate * v;
            }
        }
        let mut n = self.norm(&u, &w.norm_conv, w.streams, w.eps);
        self.store(&mut n);
        (u, n)
    }

    /// `x += u + silu(conv)` for consecutive rows of one stream, and what was added (`[rows, W]`).
    ///
    /// `window` holds the history before the first row, then the rows' `n`.
    pub fn ple_add(&self, w: &Ple, window: &[f32], mut u: Vec<f32>, x: &mut [f32]) -> Vec<f32> {
        let wide = w.norm_key.len();
        let mut c = vec![0.0; wide];
        for (t, (x, u)) in x.chunks_exact_mut(wide).zip(u.chunks_exact_mut(wide)).enumerate() {
            cpu::conv_taps(self.level, &w.conv, &window[t * wide..], w.dilation, &mut c);
            cpu::silu_all(self.level, &mut c);
            for ((x, u), &c) in x.iter_mut().zip(u).zip(&c) {
                *u += c;
                *x += *u;
            }
        }
        u
    }
}
