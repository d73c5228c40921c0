//! The gated residual: reading one block input from the streams, writing its output back.

use castiron_cpu as cpu;
use castiron_num::math;

use crate::{Exec, Matrix};

/// Weights of one residual read. `S` streams of `D` values make a wide row of `W = S * D`.
pub struct Hyper {
    /// Zero-centred norm weight `[W]`, `S` groups.
    pub norm: Vec<f32>,
    /// `[lowrank, W]`.
    pub down: Matrix,
    /// `[W, lowrank]`.
    pub up: Matrix,
    /// `[S, W]`; absent in a final mixer, which writes nothing back.
    pub inject: Option<Matrix>,
    /// `S`.
    pub streams: usize,
    /// Epsilon of the norm.
    pub eps: f32,
}

impl Exec {
    /// Reads `h` (`[rows, D]`, stored) and the write gates (`[rows, S]`, empty without inject weights) from
    /// the wide rows `x`.
    pub fn hyper_read(&self, w: &Hyper, x: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (wide, streams) = (w.norm.len(), w.streams);
        let s = streams as f32;
        let mut n = self.norm(x, &w.norm, streams, w.eps);
        self.store(&mut n);
        let mut a = self.product(&w.down, &n);
        a.iter_mut().for_each(|a| *a /= s);
        cpu::silu_all(self.level, &mut a);
        self.store(&mut a);
        let u = self.product(&w.up, &a);
        let mut h = vec![0.0; x.len() / streams];
        self.pool.rows(&mut h, wide / streams, |r, h| {
            let row = r * wide..(r + 1) * wide;
            cpu::mix_streams(self.level, &mut u[row.clone()].to_vec(), &n[row], streams, h);
        });
        self.store(&mut h);
        let gates = w.inject.as_ref().map_or_else(Vec::new, |inject| {
            let mut g = self.product(inject, &n);
            g.iter_mut().for_each(|g| *g = 2.0 * math::sigmoid(*g / s));
            g
        });
        (h, gates)
    }

    /// `x[s] = fma(gate[s], y, x[s])` for every row.
    pub fn hyper_write(&self, x: &mut [f32], y: &[f32], gates: &[f32], streams: usize) {
        let size = y.len() * streams / gates.len();
        for ((x, y), gates) in
            x.chunks_exact_mut(streams * size).zip(y.chunks_exact(size)).zip(gates.chunks_exact(streams))
        {
            for (x, &g) in x.chunks_exact_mut(size).zip(gates) {
                for (x, &y) in x.iter_mut().zip(y) {
                    *x = g.mul_add(y, *x);
                }
            }
        }
    }
}
