//! The elementwise and small-reduction bodies of the law, compiled for a level.

use castiron_num::{math, orders};

use crate::level::for_level;

for_level! {
    /// [`orders::norm_zero_centred`].
    pub fn norm_zero_centred(x: &[f32], w: &[f32], groups: usize, eps: f32, out: &mut [f32])
        = orders::norm_zero_centred;
}
for_level! {
    /// [`orders::inverse_rms`].
    pub fn inverse_rms(x: &[f32], eps: f32) -> f32 = orders::inverse_rms;
}
for_level! {
    /// [`orders::gdn_read`].
    pub fn gdn_read(h: &[f32], x: &[f32], scratch: &mut [f32], out: &mut [f32]) = orders::gdn_read;
}
for_level! {
    /// [`orders::gdn_update`].
    pub fn gdn_update(h: &mut [f32], k: &[f32], v: &[f32], decay: f32, beta: f32, scratch: &mut [f32])
        = orders::gdn_update;
}
for_level! {
    /// [`orders::attend`].
    pub fn attend(scores: &[f32], values: &[f32], acc: &mut [f32], out: &mut [f32]) = orders::attend;
}
for_level! {
    /// [`orders::rope`].
    pub fn rope(x: &mut [f32], position: u32, inv_freq: &[f32]) = orders::rope;
}
for_level! {
    /// [`orders::conv_taps`] over input rows that lie `dilation` rows apart: tap `j` multiplies row
    /// `j * dilation` of `rows` (`[.., channels]`).
    pub fn conv_taps(taps: &[f32], rows: &[f32], dilation: usize, out: &mut [f32]) = conv_rows;
}
for_level! {
    /// `x = silu(x)`.
    pub fn silu_all(x: &mut [f32]) = silu_body;
}
for_level! {
    /// `gate = silu(gate) * up`.
    pub fn swiglu(gate: &mut [f32], up: &[f32]) = swiglu_body;
}
for_level! {
    /// `x = x * sigmoid(gate)`.
    pub fn sigmoid_gate(x: &mut [f32], gate: &[f32]) = sigmoid_gate_body;
}
for_level! {
    /// The mix of an HC read: `out[d] = pair_mean over s of sigmoid(u[s, d]) * n[s, d]`, with `streams`
    /// streams; `u` is consumed.
    pub fn mix_streams(u: &mut [f32], n: &[f32], streams: usize, out: &mut [f32]) = mix_body;
}

#[inline(always)]
fn conv_rows(taps: &[f32], rows: &[f32], dilation: usize, out: &mut [f32]) {
    let channels = out.len();
    orders::conv_taps(taps, |j| &rows[j * dilation * channels..][..channels], out);
}

#[inline(always)]
fn silu_body(x: &mut [f32]) {
    for x in x {
        *x = math::silu(*x);
    }
}

#[inline(always)]
fn swiglu_body(gate: &mut [f32], up: &[f32]) {
    for (g, &u) in gate.iter_mut().zip(up) {
        *g = math::silu(*g) * u;
    }
}

#[inline(always)]
fn sigmoid_gate_body(x: &mut [f32], gate: &[f32]) {
    for (x, &g) in x.iter_mut().zip(gate) {
        *x *= math::sigmoid(g);
    }
}

#[inline(always)]
fn mix_body(u: &mut [f32], n: &[f32], streams: usize, out: &mut [f32]) {
    for (u, &n) in u.iter_mut().zip(n) {
        *u = math::sigmoid(*u) * n;
    }
    let size = out.len();
    // Rising pairs over whole streams: the order of `orders::pair_mean`, one element of each at a time.
    let mut live = streams;
    while live > 1 {
        for s in 0..live / 2 {
            for d in 0..size {
                u[s * size + d] = u[2 * s * size + d] + u[(2 * s + 1) * size + d];
            }
        }
        if live % 2 == 1 {
            u.copy_within((live - 1) * size..live * size, live / 2 * size);
        }
        live = live.div_ceil(2);
    }
    for (o, &u) in out.iter_mut().zip(&*u) {
        *o = u / streams as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    #[test]
    fn mixing_streams_is_the_pair_mean_of_each_element() {
        for streams in 1..7 {
            let size = 5;
            let u: Vec<f32> = (0..streams * size).map(|i| (i * 31 % 17) as f32 / 4.0 - 2.0).collect();
            let n: Vec<f32> = (0..streams * size).map(|i| (i * 13 % 19) as f32 / 3.0 - 3.0).collect();
            let want: Vec<u32> = (0..size)
                .map(|d| {
                    let mut p: Vec<f32> =
                        (0..streams).map(|s| math::sigmoid(u[s * size + d]) * n[s * size + d]).collect();
                    orders::pair_mean(&mut p).to_bits()
                })
                .collect();
            for level in [Level::law(), Level::portable(), Level::detect()] {
                let mut out = vec![0.0; size];
                mix_streams(level, &mut u.clone(), &n, streams, &mut out);
                assert_eq!(out.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), want, "{streams} {level:?}");
            }
        }
    }

    #[test]
    fn every_level_runs_one_text() {
        let f = |n: usize, k: u32| -> Vec<f32> {
            (0..n).map(|i| ((i as u32).wrapping_mul(2654435761 ^ k) >> 8) as f32 / 4e6 - 2.0).collect()
        };
        let (dk, dv) = (48, 40);
        let results: Vec<Vec<u32>> = [Level::law(), Level::portable(), Level::detect()]
            .into_iter()
            .map(|level| {
                let mut all = Vec::new();
                let mut h = f(dk * dv, 1);
                let mut out = vec![0.0; dv];
                let mut scratch = vec![0.0; 4 * dv];
                gdn_update(level, &mut h, &f(dk, 2), &f(dv, 3), 0.9, 0.7, &mut scratch);
                gdn_read(level, &h, &f(dk, 4), &mut scratch, &mut out);
                all.extend(h.iter().chain(&out).map(|x| x.to_bits()));
                let (n, dim) = (150, 24);
                let (mut acc, mut o) = (vec![0.0; dim], vec![0.0; dim]);
                attend(level, &f(n, 5), &f(n * dim, 7), &mut acc, &mut o);
                all.extend(o.iter().map(|x| x.to_bits()));
                let mut x = f(300, 8);
                silu_all(level, &mut x);
                swiglu(level, &mut x, &f(300, 9));
                sigmoid_gate(level, &mut x, &f(300, 10));
                let mut y = vec![0.0; 300];
                norm_zero_centred(level, &x, &f(300, 11), 4, 1e-6, &mut y);
                rope(level, &mut y, 77, &f(32, 12));
                all.extend(y.iter().map(|x| x.to_bits()));
                let mut c = vec![0.0; 30];
                conv_taps(level, &f(90, 13), &f(30 * 7, 14), 3, &mut c);
                all.extend(c.iter().map(|x| x.to_bits()));
                all
            })
            .collect();
        assert_eq!(results[0], results[1]);
        assert_eq!(results[0], results[2]);
    }
}
