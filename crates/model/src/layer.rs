//! One layer over the rows of a call: shared operations on all rows, stream state segment by segment.

use std::sync::Arc;

use castiron_exec::{Exec, Gdn, Hyper, Matrix, Moe, Ple, Qsa};

use crate::Trace;
use crate::forward::Segment;
use crate::load::{Layer, Mixer};
use crate::state::{Cache, LayerState, Stream};

/// The embedding of every token, repeated for each residual stream: `[tokens, S * D]`.
pub(crate) fn embed(embed: &Matrix, tokens: impl Iterator<Item = u32>, streams: usize) -> Vec<f32> {
    let mut row = vec![0.0; embed.cols()];
    let mut x = Vec::new();
    for token in tokens {
        embed.decode_row(token as usize, &mut row);
        row.iter_mut().for_each(|x| *x *= embed.output_scale());
        (0..streams).for_each(|_| x.extend_from_slice(&row));
    }
    x
}

/// The rows of a call on their way through one layer.
pub(crate) struct Rows<'a> {
    pub(crate) exec: &'a Exec,
    pub(crate) index: usize,
    pub(crate) positions: &'a [u32],
    pub(crate) segments: &'a mut [Segment],
    pub(crate) streams: &'a mut [Option<Stream>],
    pub(crate) trace: &'a mut dyn Trace,
}

impl Rows<'_> {
    /// Adds the n-gram layer `number` (in layer order) into the wide rows.
    pub(crate) fn ple(&mut self, w: &Ple, number: usize, emb: &[f32], x: &mut [f32]) {
        let wide = w.norm_conv.len();
        let (u, n) = self.exec.ple_gate(w, x, emb);
        let mut added = Vec::with_capacity(u.len());
        for s in self.segments.iter_mut() {
            let Some(stream) = &mut self.streams[s.slot.index as usize] else { continue };
            let at = s.rows.start * wide..s.rows.end * wide;
            let history = &mut stream.state.ples[number];
            let mut window = history.clone();
            window.extend_from_slice(&n[at.clone()]);
            added.extend(self.exec.ple_add(w, &window, u[at.clone()].to_vec(), &mut x[at]));
            if s.held {
                s.window.ples.push(window);
            } else {
                let tail = window.len() - history.len();
                history.copy_from_slice(&window[tail..]);
            }
        }
        self.trace.floats(Some(self.index), "ple.out", &added);
    }

    /// The token mixer between its residual read and write.
    pub(crate) fn mixer(&mut self, w: &Layer, x: &mut [f32]) {
        let (h, gates) = self.exec.hyper_read(&w.attn_hc, x);
        self.trace.floats(Some(self.index), "attn_hc.mixed", &h);
        self.trace.floats(Some(self.index), "attn_hc.inject", &gates);
        let y = match &w.mixer {
            Mixer::Gdn(g) => self.gdn(g, &h),
            Mixer::Qsa(q) => self.qsa(q, &h),
        };
        self.exec.hyper_write(x, &y, &gates, w.attn_hc.streams);
    }

    /// The expert block between its residual read and write; gives the rows that failed.
    pub(crate) fn experts(&mut self, hc: &Hyper, moe: &Moe, x: &mut [f32]) -> Vec<usize> {
        let (h, gates) = self.exec.hyper_read(hc, x);
        self.trace.floats(Some(self.index), "mlp_hc.mixed", &h);
        let out = self.exec.moe(moe, &h);
        self.exec.hyper_write(x, &out.y, &gates, hc.streams);
        if self.trace.wanted() {
            let layer = Some(self.index);
            self.trace.floats(layer, "moe.logits", &out.logits);
            self.trace.floats(layer, "moe.weights", &out.weights);
            self.trace.ids(layer, "moe.experts", &out.picks.iter().map(|&e| e as u64).collect::<Vec<_>>());
            self.trace.floats(layer, "moe.out", &out.y);
        }
        out.faults
    }

    fn gdn(&mut self, w: &Gdn, h: &[f32]) -> Vec<f32> {
        let (exec, shape) = (self.exec, &w.shape);
        let (channels, heads) = (shape.channels(), shape.value_heads);
        let m = exec.product_stored(&w.qkv, h);
        let z = exec.product(&w.z, h);
        let (decay, beta) = exec.gdn_gates(w, h);
        let mut o = Vec::with_capacity(z.len());
        for s in self.segments.iter_mut() {
            let Some(stream) = &mut self.streams[s.slot.index as usize] else { continue };
            let LayerState::Gdn(state) = &mut stream.state.layers[self.index] else { continue };
            let mut window = state.conv.clone();
            window.extend_from_slice(&m[s.rows.start * channels..s.rows.end * channels]);
            let gates = s.rows.start * heads..s.rows.end * heads;
            let rows = exec.gdn_prepare(w, &window, &decay[gates.clone()], &beta[gates]);
            let count = s.rows.len();
            if s.held {
                let mut scratch = state.h.as_ref().clone();
                o.extend(exec.gdn_run(shape, &mut scratch, &rows, count, true));
                s.window.gdn[self.index] = Some((window, rows));
            } else {
                o.extend(exec.gdn_run(shape, Arc::make_mut(&mut state.h).as_mut_slice(), &rows, count, true));
                state.shift(&window, count, channels);
            }
        }
        let y = exec.gdn_finish(w, o, &z);
        self.trace.floats(Some(self.index), "gdn.out", &y);
        y
    }

    fn qsa(&mut self, w: &Qsa, h: &[f32]) -> Vec<f32> {
        let rows = self.exec.qsa_project(w, h, self.positions);
        let mut attention = vec![0.0; rows.q.len()];
        for s in self.segments.iter() {
            let Some(stream) = &mut self.streams[s.slot.index as usize] else { continue };
            let LayerState::Qsa(cache) = &mut stream.state.layers[self.index] else { continue };
            cache.append(self.exec, w, &rows, s.rows.clone());
            let at = (self.index, s.rows.clone());
            attend(self.exec, w, cache, &rows, at, self.positions, &mut attention, self.trace);
        }
        let y = self.exec.qsa_finish(w, attention, &rows.gate);
        self.trace.floats(Some(self.index), "attn.out", &y);
        y
    }
}

/// Selects and attends in layer `layer` for rows `range`, whose own keys are already in `cache`.
#[allow(clippy::too_many_arguments, reason = "the operands of one kernel")]
pub(crate) fn attend(
    exec: &Exec,
    w: &Qsa,
    cache: &Cache,
    rows: &castiron_exec::QsaRows,
    (layer, range): (usize, std::ops::Range<usize>),
    positions: &[u32],
    attention: &mut [f32],
    trace: &mut dyn Trace,
) {
    let s = &w.shape;
    let (width, index_width) = (s.heads * s.head_dim, s.index_heads * s.index_dim);
    // Scores are needed only past the budget; then every row of the segment reads the same pooled keys.
    let pooled = if cache.pooled.len() > s.top_blocks {
        cache.pooled.rows(0, cache.pooled.len())
    } else {
        Vec::new()
    };
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for r in range {
        let index_q = &rows.index_q[r * index_width..(r + 1) * index_width];
        let selection = exec.qsa_select(s, index_q, &pooled, positions[r] + 1);
        if trace.wanted() {
            trace.ids(Some(layer), "qsa.tokens", &selection.tokens.iter().map(|&t| t as u64).collect::<Vec<_>>());
        }
        for kv_head in 0..s.kv_heads {
            keys.clear();
            values.clear();
            for &t in &selection.tokens {
                cache.k.read(t as usize, kv_head * s.head_dim, s.head_dim, &mut keys);
                cache.v.read(t as usize, kv_head * s.head_dim, s.head_dim, &mut values);
            }
            let at = r * width..(r + 1) * width;
            exec.qsa_attend(s, &rows.q[at.clone()], kv_head, &keys, &values, &mut attention[at]);
        }
    }
}
