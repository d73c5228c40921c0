//! One layer over the rows of a call: shared operations on all rows, stream state segment by segment.

use std::sync::Arc;

use castiron_exec::{Exec, Gdn, Hyper, Matrix, Moe, Ple, Qsa, Selection};

use crate::Trace;
use crate::forward::{FaultKind, Segment};
use crate::load::{Layer, Mixer};
use crate::state::{Cache, LayerState, Stream};

/// The embedding of every token, repeated for each residual stream: `[tokens, S * D]`.
pub(crate) fn embed(embed: &Matrix, tokens: impl Iterator<Item = u32>, streams: usize) -> Vec<f32> {
    let mut row = vec![0.0; embed.cols()];
    let mut x = Vec::new();
    for token in tokens {
        embed.decode_row(token as usize, &mut row);
        row.iter_mut().for_each(|x| *x *= embed.scale_of(token as usize));
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
    /// For each row of the call, where it first was not a number.
    pub(crate) faults: &'a mut [Option<FaultKind>],
    /// Whether the write after the experts is wrong on purpose ([`crate::options::PlantedFault`]).
    pub(crate) unfused: bool,
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

    /// The expert block between its residual read and write.
    pub(crate) fn experts(&mut self, hc: &Hyper, moe: &Moe, x: &mut [f32]) {
        let (h, gates) = self.exec.hyper_read(hc, x);
        self.trace.floats(Some(self.index), "mlp_hc.mixed", &h);
        let out = self.exec.moe(moe, &h);
        match self.unfused {
            true => write_unfused(x, &out.y, &gates, hc.streams),
            false => self.exec.hyper_write(x, &out.y, &gates, hc.streams),
        }
        if self.trace.wanted() {
            let layer = Some(self.index);
            self.trace.floats(layer, "moe.logits", &out.logits);
            self.trace.floats(layer, "moe.weights", &out.weights);
            self.trace.ids(layer, "moe.experts", &out.picks.iter().map(|&e| e as u64).collect::<Vec<_>>());
            self.trace.floats(layer, "moe.out", &out.y);
        }
        for row in out.faults {
            self.faults[row].get_or_insert(FaultKind::Experts(self.index));
        }
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
            for row in attend(self.exec, w, cache, &rows, at, self.positions, &mut attention, self.trace) {
                self.faults[row].get_or_insert(FaultKind::Selection(self.index));
            }
        }
        let y = self.exec.qsa_finish(w, attention, &rows.gate);
        self.trace.floats(Some(self.index), "attn.out", &y);
        y
    }
}

/// The residual write in an order that the law does not allow.
fn write_unfused(x: &mut [f32], y: &[f32], gates: &[f32], streams: usize) {
    let size = y.len() * streams / gates.len();
    for ((x, y), gates) in
        x.chunks_exact_mut(streams * size).zip(y.chunks_exact(size)).zip(gates.chunks_exact(streams))
    {
        for (x, &g) in x.chunks_exact_mut(size).zip(gates) {
            x.iter_mut().zip(y).for_each(|(x, &y)| *x += g * y);
        }
    }
}

/// Selects and attends in layer `layer` for rows `range`, whose own keys are already in `cache`. Gives the rows
/// whose selection met a score that is not finite.
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
) -> Vec<usize> {
    let s = &w.shape;
    let (width, index_width) = (s.heads * s.head_dim, s.index_heads * s.index_dim);
    // Scores are needed only past the budget; then every row of the segment reads the same pooled keys.
    let blocks = if cache.pooled.len() > s.top_blocks { cache.pooled.len() } else { 0 };
    let pooled = Matrix::from_floats(s.index_dim, cache.pooled.rows(0, blocks));
    let selections: Vec<Selection> = range
        .clone()
        .map(|r| {
            exec.qsa_select(
                s,
                &rows.index_q[r * index_width..(r + 1) * index_width],
                &pooled,
                positions[r] + 1,
            )
        })
        .collect();
    if trace.wanted() {
        for selection in &selections {
            trace.ids(
                Some(layer),
                "qsa.tokens",
                &selection.tokens.iter().map(|&t| t as u64).collect::<Vec<_>>(),
            );
        }
    }
    let start = range.start;
    exec.each_row(&mut attention[start * width..range.end * width], width, |exec, r, out| {
        let q = &rows.q[(start + r) * width..][..width];
        let tokens = &selections[r].tokens;
        for kv_head in 0..s.kv_heads {
            let size = tokens.len() * s.head_dim;
            let (mut keys, mut values) = (Vec::with_capacity(size), Vec::with_capacity(size));
            for &t in tokens {
                cache.k.read(t as usize, kv_head * s.head_dim, s.head_dim, &mut keys);
                cache.v.read(t as usize, kv_head * s.head_dim, s.head_dim, &mut values);
            }
            exec.qsa_attend(s, q, kv_head, &Matrix::from_floats(s.head_dim, keys), &values, out);
        }
    });
    selections.iter().zip(range).filter(|(s, _)| !s.finite).map(|(_, r)| r).collect()
}
