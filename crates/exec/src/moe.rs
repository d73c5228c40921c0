//! Mixture of experts: route, group rows by expert, multiply, combine in slot order.

use castiron_cpu::{self as cpu, W4a4Input};
use castiron_num::{math, orders};

use crate::{Exec, ExpertActivations, Kind, Matrix, Scoring};

/// One routed expert, or the shared one.
pub struct Expert {
    /// `[I, D]`.
    pub gate: Matrix,
    /// `[I, D]`.
    pub up: Matrix,
    /// `[D, I]`.
    pub down: Matrix,
    /// Static activation scales of an NVFP4 expert: (gate and up, down).
    pub input_scales: Option<(f32, f32)>,
}

/// Weights of an expert block.
pub struct Moe {
    /// Router `[experts, D]`.
    pub router: Matrix,
    /// `[1, D]`.
    pub shared_gate: Matrix,
    /// The shared expert.
    pub shared: Expert,
    /// The routed experts.
    pub experts: Vec<Expert>,
    /// Experts of a row.
    pub top_k: usize,
    /// How logits become weights.
    pub scoring: Scoring,
    /// Whether a row's weights are scaled to sum to 1.
    pub normalise: bool,
}

/// What an expert block gives back.
#[derive(Default)]
pub struct MoeOutput {
    /// `[rows, D]`.
    pub y: Vec<f32>,
    /// Router logits `[rows, experts]`.
    pub logits: Vec<f32>,
    /// Expert ids in slot order, `[rows, top_k]`.
    pub picks: Vec<u32>,
    /// Their weights, `[rows, top_k]`.
    pub weights: Vec<f32>,
    /// Rows whose router logits or expert inputs were not finite, ascending.
    pub faults: Vec<usize>,
}

impl Exec {
    /// The expert block on `h` (`[rows, D]`, stored).
    pub fn moe(&self, w: &Moe, h: &[f32]) -> MoeOutput {
        let size = w.router.cols();
        let rows = h.len() / size;
        let mut out = self.route(w, h);
        let slots = self.experts(w, h, &mut out);
        let mut shared_gate = self.product(&w.shared_gate, h);
        shared_gate.iter_mut().for_each(|g| *g = math::sigmoid(*g));
        let (shared, bad) = self.expert(&w.shared, h);
        out.faults.extend(bad);
        out.faults.sort_unstable();
        out.faults.dedup();
        out.y = vec![0.0; rows * size];
        for (r, y) in out.y.chunks_exact_mut(size).enumerate() {
            for slot in r * w.top_k..(r + 1) * w.top_k {
                let weight = out.weights[slot];
                for (y, &e) in y.iter_mut().zip(&slots[slot * size..]) {
                    *y = weight.mul_add(e, *y);
                }
            }
            for (y, &s) in y.iter_mut().zip(&shared[r * size..]) {
                *y = shared_gate[r].mul_add(s, *y);
            }
        }
        out
    }

    /// Router logits, picks and weights; a row with a logit that is not finite is a fault.
    fn route(&self, w: &Moe, h: &[f32]) -> MoeOutput {
        let mut out = MoeOutput { logits: self.product(&w.router, h), ..MoeOutput::default() };
        let (mut picks, mut weights) = (Vec::new(), Vec::new());
        for (r, logits) in out.logits.chunks_exact(w.router.rows()).enumerate() {
            if logits.iter().any(|l| !l.is_finite()) {
                out.faults.push(r);
            }
            orders::top_k(logits, w.top_k, &mut picks);
            orders::pick_weights(logits, &picks, w.scoring, w.normalise, &mut weights);
            out.picks.extend_from_slice(&picks);
            out.weights.extend_from_slice(&weights);
        }
        out
    }

    /// Every slot's expert output, `[rows * top_k, D]`: rows are gathered by expert, so that each expert's
    /// weights are read once.
    fn experts(&self, w: &Moe, h: &[f32], out: &mut MoeOutput) -> Vec<f32> {
        let size = w.router.cols();
        let mut by_expert: Vec<Vec<usize>> = vec![Vec::new(); w.experts.len()];
        for (slot, &e) in out.picks.iter().enumerate() {
            by_expert[e as usize].push(slot);
        }
        let mut slots = vec![0.0; out.picks.len() * size];
        for (expert, members) in w.experts.iter().zip(&by_expert) {
            if members.is_empty() {
                continue;
            }
            let x: Vec<f32> =
                members.iter().flat_map(|slot| &h[slot / w.top_k * size..][..size]).copied().collect();
            let (y, bad) = self.expert(expert, &x);
            out.faults.extend(bad.iter().map(|&i| members[i] / w.top_k));
            for (&slot, y) in members.iter().zip(y.chunks_exact(size)) {
                slots[slot * size..(slot + 1) * size].copy_from_slice(y);
            }
        }
        slots
    }

    /// `down(store(silu(gate x) * up x))` for the rows of `x`, and the rows whose quantiser met a value that
    /// is not finite (their output is NaN).
    fn expert(&self, e: &Expert, x: &[f32]) -> (Vec<f32>, Vec<usize>) {
        let bytes = e.gate.bytes() + e.up.bytes() + e.down.bytes();
        let operations = 6 * x.len() * e.gate.rows();
        self.timed(Kind::Experts, operations, bytes, || self.expert_of(e, x))
    }

    fn expert_of(&self, e: &Expert, x: &[f32]) -> (Vec<f32>, Vec<usize>) {
        if let (Some(scales), ExpertActivations::W4a4) = (e.input_scales, self.numerics.experts)
            && let Some(done) = self.expert_w4a4(e, x, scales)
        {
            return done;
        }
        let mut m = self.multiply(&e.gate, x);
        cpu::swiglu(self.level, &mut m, &self.multiply(&e.up, x));
        self.store(&mut m);
        (self.multiply(&e.down, &m), Vec::new())
    }

    /// `None` when a matrix is not NVFP4.
    fn expert_w4a4(
        &self,
        e: &Expert,
        x: &[f32],
        (a_in, a_down): (f32, f32),
    ) -> Option<(Vec<f32>, Vec<usize>)> {
        let (cols, inner, size) = (e.gate.cols(), e.gate.rows(), e.down.rows());
        let rows = x.len() / cols;
        let pool = self.pool.for_work(x.len() * inner);
        let (x, mut bad) = W4a4Input::quantise(x, cols, a_in);
        let (mut m, mut up, mut y) =
            (vec![0.0; rows * inner], vec![0.0; rows * inner], vec![0.0; rows * size]);
        let exact = cpu::product_w4a4_pooled(self.level, pool, &e.gate, &x, &mut m)
            && cpu::product_w4a4_pooled(self.level, pool, &e.up, &x, &mut up);
        cpu::swiglu(self.level, &mut m, &up);
        self.store(&mut m);
        let (m, more) = W4a4Input::quantise(&m, inner, a_down);
        if !(exact && cpu::product_w4a4_pooled(self.level, pool, &e.down, &m, &mut y)) {
            return None;
        }
        bad.extend(more);
        for &r in &bad {
            y[r * size..(r + 1) * size].fill(f32::NAN);
        }
        Some((y, bad))
    }
}
