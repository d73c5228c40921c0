//! Gated DeltaNet: projections, short convolution, the recurrence, the gated output norm.

use castiron_cpu::{self as cpu, Rows};
use castiron_num::{math, orders};

use crate::{Exec, Kind, Matrix};

/// Epsilon of the l2 norm of q and k, on the sum of squares.
const L2_EPS: f32 = 1e-6;

/// Takes what step t of a strip reads.
type Emit<'a> = &'a mut dyn FnMut(usize, &[f32]);

/// Columns of a state strip: 16 KiB at the released key head size.
const STRIP: usize = 32;

/// Sizes of a GDN layer.
#[derive(Clone, Copy, Debug)]
pub struct GdnShape {
    /// Key heads.
    pub key_heads: usize,
    /// Value heads, a multiple of the key heads.
    pub value_heads: usize,
    /// Key head size.
    pub dk: usize,
    /// Value head size.
    pub dv: usize,
    /// Convolution taps.
    pub taps: usize,
    /// Whether the output gate is a sigmoid; silu otherwise.
    pub sigmoid_gate: bool,
}

impl GdnShape {
    /// Channels of the convolution: q, k and v side by side.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.dk + self.value_heads * self.dv
    }

    /// Values of the recurrent state: `[value_heads, dk, dv]`.
    pub fn state(&self) -> usize {
        self.value_heads * self.dk * self.dv
    }
}

/// Weights of a GDN layer.
pub struct Gdn {
    /// Sizes.
    pub shape: GdnShape,
    /// `[channels, D]`.
    pub qkv: Matrix,
    /// Output gate `[value_heads * dv, D]`.
    pub z: Matrix,
    /// Beta logits `[value_heads, D]`.
    pub b: Matrix,
    /// Decay logits `[value_heads, D]`.
    pub a: Matrix,
    /// Convolution taps, oldest first, `[taps, channels]`.
    pub conv: Vec<f32>,
    /// `A_log`, `[value_heads]`.
    pub a_log: Vec<f32>,
    /// `[value_heads]`.
    pub dt_bias: Vec<f32>,
    /// Plain norm weight `[dv]`.
    pub norm: Vec<f32>,
    /// `[D, value_heads * dv]`.
    pub out: Matrix,
    /// Epsilon of the output norm.
    pub eps: f32,
}

/// The inputs of the recurrence for consecutive rows of one stream.
#[derive(Clone, Debug, Default)]
pub struct GdnRows {
    /// `[rows, key_heads * dk]`, normalised and scaled.
    pub q: Vec<f32>,
    /// `[rows, key_heads * dk]`, normalised.
    pub k: Vec<f32>,
    /// `[rows, value_heads * dv]`.
    pub v: Vec<f32>,
    /// `exp(g)`, `[rows, value_heads]`.
    pub decay: Vec<f32>,
    /// `[rows, value_heads]`.
    pub beta: Vec<f32>,
}

impl Exec {
    /// The decay and beta of every row of `h`: `(exp(g), beta)`, each `[rows, value_heads]`.
    pub fn gdn_gates(&self, w: &Gdn, h: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let mut decay = self.product(&w.a, h);
        for row in decay.chunks_exact_mut(w.shape.value_heads) {
            for ((d, &a_log), &bias) in row.iter_mut().zip(&w.a_log).zip(&w.dt_bias) {
                *d = math::exp(-(math::exp(a_log) * math::softplus(*d + bias)));
            }
        }
        let mut beta = self.product(&w.b, h);
        beta.iter_mut().for_each(|b| *b = math::sigmoid(*b));
        (decay, beta)
    }

    /// Convolution, silu, split and l2 norms for the rows of one stream.
    ///
    /// `window` holds the `taps - 1` stored inputs before the first row, then one row each: `[taps - 1 +
    /// rows, channels]`. `decay` and `beta` are these rows' [`Self::gdn_gates`].
    pub fn gdn_prepare(&self, w: &Gdn, window: &[f32], decay: &[f32], beta: &[f32]) -> GdnRows {
        let s = &w.shape;
        let (channels, keys) = (s.channels(), s.key_heads * s.dk);
        let rows = window.len() / channels + 1 - s.taps;
        let q_scale = 1.0 / (s.dk as f32).sqrt();
        let mut out = GdnRows { decay: decay.to_vec(), beta: beta.to_vec(), ..GdnRows::default() };
        let mut c = vec![0.0; channels];
        for t in 0..rows {
            cpu::conv_taps(self.level, &w.conv, &window[t * channels..], 1, &mut c);
            cpu::silu_all(self.level, &mut c);
            for (head, q) in c[..2 * keys].chunks_exact_mut(s.dk).enumerate() {
                let r = orders::inverse_l2(q, L2_EPS);
                let scale_q = head < s.key_heads;
                q.iter_mut().for_each(|x| *x = if scale_q { (*x * r) * q_scale } else { *x * r });
            }
            out.q.extend_from_slice(&c[..keys]);
            out.k.extend_from_slice(&c[keys..2 * keys]);
            out.v.extend_from_slice(&c[2 * keys..]);
        }
        out
    }

    /// Runs the recurrence over the first `count` of `rows` of one stream, in place on `state`
    /// (`[value_heads, dk, dv]`).
    ///
    /// Returns the heads' outputs `[count, value_heads * dv]`, or nothing when `read` is false: the keep pass
    /// replays accepted steps with this same text. Columns of a head's state never meet, so strips of them run
    /// through all steps at once, small enough for a first-level cache.
    pub fn gdn_run(
        &self,
        shape: &GdnShape,
        state: &mut [f32],
        rows: &GdnRows,
        count: usize,
        read: bool,
    ) -> Vec<f32> {
        let operations = count * state.len() * if read { 7 } else { 5 };
        self.timed(Kind::Recurrence, operations, 0, || self.gdn_strips(shape, state, rows, count, read))
    }

    fn gdn_strips(
        &self,
        shape: &GdnShape,
        state: &mut [f32],
        rows: &GdnRows,
        count: usize,
        read: bool,
    ) -> Vec<f32> {
        let GdnShape { value_heads, dk, dv, .. } = *shape;
        let mut out = vec![0.0; if read { count * value_heads * dv } else { 0 }];
        let strips = dv.div_ceil(STRIP);
        let (heads, outputs) = (Rows::new(state, dv), Rows::new(&mut out, 1));
        self.pool.for_work(count * value_heads * dk * dv).split(value_heads * strips, 1, |range| {
            for task in range {
                let (head, first) = (task / strips, task % strips * STRIP);
                let columns = first..(first + STRIP).min(dv);
                // SAFETY: the strips of all tasks are disjoint, so nobody else reads or writes these columns.
                let row = |k: usize| unsafe { heads.part(head * dk + k, columns.clone()) };
                let mut strip: Vec<f32> = (0..dk).flat_map(|k| row(k).iter().copied()).collect();
                let mut write = |t: usize, o: &[f32]| {
                    let at = (t * value_heads + head) * dv + columns.start;
                    for (i, &o) in o.iter().enumerate() {
                        // SAFETY: as above, for the outputs of these columns.
                        unsafe { outputs.row(at + i)[0] = o };
                    }
                };
                let emit: Option<Emit<'_>> = if read { Some(&mut write) } else { None };
                self.gdn_strip(shape, head, columns.clone(), &mut strip, rows, count, emit);
                (0..dk).for_each(|k| row(k).copy_from_slice(&strip[k * columns.len()..][..columns.len()]));
            }
        });
        out
    }

    /// The steps of one strip (`[dk, columns]`) of one head; `emit(t, o)`, if wanted, gets what step t reads.
    #[allow(clippy::too_many_arguments, reason = "the operands of one kernel")]
    fn gdn_strip(
        &self,
        shape: &GdnShape,
        head: usize,
        columns: std::ops::Range<usize>,
        strip: &mut [f32],
        rows: &GdnRows,
        count: usize,
        mut emit: Option<Emit<'_>>,
    ) {
        let GdnShape { key_heads, value_heads, dk, dv, .. } = *shape;
        let key = head / (value_heads / key_heads);
        let (mut scratch, mut o) = (vec![0.0; 4 * columns.len()], vec![0.0; columns.len()]);
        for t in 0..count {
            let at = (t * key_heads + key) * dk..(t * key_heads + key + 1) * dk;
            let gate = t * value_heads + head;
            let v = &rows.v[gate * dv..(gate + 1) * dv][columns.clone()];
            let k = &rows.k[at.clone()];
            cpu::gdn_update(self.level, strip, k, v, rows.decay[gate], rows.beta[gate], &mut scratch);
            if let Some(emit) = &mut emit {
                cpu::gdn_read(self.level, strip, &rows.q[at], &mut scratch, &mut o);
                emit(t, &o);
            }
        }
    }

    /// Output norm, gate and projection: `o` (`[rows, value_heads * dv]`) and `z` to `[rows, D]`.
    pub fn gdn_finish(&self, w: &Gdn, mut o: Vec<f32>, z: &[f32]) -> Vec<f32> {
        for (o, z) in o.chunks_exact_mut(w.shape.dv).zip(z.chunks_exact(w.shape.dv)) {
            let r = orders::inverse_rms(o, w.eps);
            for ((o, &n), &z) in o.iter_mut().zip(&w.norm).zip(z) {
                let gate = if w.shape.sigmoid_gate { math::sigmoid(z) } else { math::silu(z) };
                *o = ((*o * r) * n) * gate;
            }
        }
        self.store(&mut o);
        self.product(&w.out, &o)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activations, ExpertActivations, Level, Numerics};

    fn values(count: usize, seed: u32, size: f32) -> Vec<f32> {
        let value = |i: usize| (i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8;
        (0..count).map(|i| (value(i) as f32 / 8_388_608.0 - 1.0) * size).collect()
    }

    /// Strips and threads cut columns that never meet; a replay leaves the state of a run that reads.
    #[test]
    fn threads_levels_and_replays_leave_one_state() {
        let shape = GdnShape { key_heads: 2, value_heads: 6, dk: 64, dv: 72, taps: 4, sigmoid_gate: true };
        let count = 48;
        let rows = GdnRows {
            q: values(count * 128, 1, 0.1),
            k: values(count * 128, 2, 0.2),
            v: values(count * 432, 3, 1.0),
            decay: values(count * 6, 4, 0.01).iter().map(|d| 0.95 + d).collect(),
            beta: values(count * 6, 5, 0.1).iter().map(|b| 0.5 + b).collect(),
        };
        let numerics = Numerics { activations: Activations::Bf16, experts: ExpertActivations::W4a16 };
        let run = |level, threads, read| {
            let mut state = values(shape.state(), 6, 0.5);
            let out = Exec::new(numerics, level, threads).gdn_run(&shape, &mut state, &rows, count, read);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            (bits(&state), bits(&out))
        };
        let (state, out) = run(Level::law(), 1, true);
        for level in Level::present() {
            for threads in [1, 3] {
                assert_eq!(run(level, threads, true), (state.clone(), out.clone()), "{}", level.name());
                assert_eq!(run(level, threads, false), (state.clone(), Vec::new()), "{}", level.name());
            }
        }
    }
}
