//! AVX-512 with VNNI: two weight rows a vector, byte products summed to a group's dot by one instruction a quarter.

use std::arch::x86_64::*;

use super::avx2::{self, Avx2};
use super::layout::{Exponents, Inputs, LANES, QUARTERS, SPAN};
use super::tiles::{Decoded, Form, InputRows, Source};
use crate::Level;

/// Proof that AVX-512 F, BW and VNNI are here, and AVX2.
#[derive(Clone, Copy)]
pub(super) struct Avx512(Avx2);

impl Avx512 {
    /// The form, on a processor that has it.
    pub fn detect(level: Level) -> Option<Self> {
        let here = std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512vnni");
        here.then(|| Self(Avx2::of(level)))
    }
}

/// A span of two weight rows, one in each half of a vector.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Pair {
    codes: [[[u8; 32]; 2]; QUARTERS],
    scales: [[u32; LANES]; 2],
}

impl Form for Avx512 {
    type Weights = Pair;
    const ZERO: Pair = Pair { codes: [[[0; 32]; 2]; QUARTERS], scales: [[0; LANES]; 2] };
    const ROWS: usize = 2;

    fn decode(
        self,
        spans: usize,
        w: Source<'_>,
        first: usize,
        out: &mut [Pair],
        exponents: &mut [Exponents],
    ) {
        // SAFETY: a value of this type proves AVX2.
        unsafe { decode(spans, w, first, out, exponents) }
    }

    fn strip<const N: usize>(
        self,
        spans: usize,
        w: Decoded<'_, Pair>,
        x: InputRows<'_, N>,
        out: &mut [[f32; N]],
    ) {
        // SAFETY: a value of this type proves AVX-512 F, BW and VNNI.
        unsafe { strip(spans, w, x, out) }
    }

    fn stream<const N: usize>(self, w: Source<'_>, first: usize, x: InputRows<'_, N>, out: &mut [[f32; N]]) {
        // Waits for memory: 8 lanes do.
        self.0.stream(w, first, x, out);
    }
}

#[target_feature(enable = "avx2")]
fn decode(spans: usize, w: Source<'_>, first: usize, out: &mut [Pair], exponents: &mut [Exponents]) {
    for (i, exponents) in exponents.iter_mut().enumerate() {
        let (w, out) = (w.row(first + i), &mut out[i / 2 * spans..(i / 2 + 1) * spans]);
        *exponents = w.exponents();
        for (out, (codes, scales)) in out.iter_mut().zip(w.codes.iter().zip(w.scales)) {
            decode_span(codes, scales, *exponents, out, i % 2);
        }
        if let Some((codes, scales)) = w.rest() {
            decode_span(&codes, &scales, *exponents, &mut out[spans - 1], i % 2);
        }
    }
}

/// Decodes a span into half `h` of a pair.
#[target_feature(enable = "avx2")]
#[inline]
fn decode_span(codes: &[u8; SPAN / 2], scales: &[u8; LANES], exponents: Exponents, out: &mut Pair, h: usize) {
    for (out, codes) in out.codes.iter_mut().zip(avx2::raise(codes)) {
        avx2::store(&mut out[h], codes);
    }
    avx2::store(&mut out.scales[h], avx2::stored_scales(scales, exponents));
}

/// The outputs of every decoded row, two at a time, for `N` activation rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn strip<const N: usize>(spans: usize, w: Decoded<'_, Pair>, x: InputRows<'_, N>, out: &mut [[f32; N]]) {
    let mut inputs = x.spans;
    for x in &mut inputs {
        *x = &x[..spans];
    }
    let range = x.range();
    let rows = out.chunks_mut(2).zip(w.exponents.chunks(2));
    for (w, (out, exponents)) in w.spans.chunks_exact(spans).zip(rows) {
        // The last pair may have one row: its other half is made and dropped.
        let (first, second) = (exponents[0], exponents[exponents.len() - 1]);
        let sums = match (first.terms(range), second.terms(range)) {
            (Some(a), Some(b)) => narrow(w, inputs, a.min(b)),
            _ => wide(w, inputs, [first.narrow(), second.narrow()]),
        };
        for ((out, exponents), sums) in out.iter_mut().zip(exponents).zip(sums) {
            *out = x.finish(*exponents, sums);
        }
    }
}

/// Two weight rows in i32, moved to i64 every `terms` spans.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn narrow<const N: usize>(w: &[Pair], x: [&[Inputs]; N], terms: usize) -> [[i64; N]; 2] {
    let mut acc = [[_mm512_setzero_si512(); 2]; N];
    for first in (0..w.len()).step_by(terms) {
        let mut part = [_mm512_setzero_si512(); N];
        for k in first..w.len().min(first + terms) {
            // The low half of a lane alone, where `dots` means something.
            let scales = _mm512_srli_epi32::<16>(load(&w[k].scales));
            let dots = dots(&w[k], x, k);
            for a in 0..N {
                let scales = _mm512_mullo_epi16(scales, twice(&x[a][k].multiplier));
                part[a] = _mm512_add_epi32(part[a], _mm512_madd_epi16(dots[a], scales));
            }
        }
        for (part, acc) in part.into_iter().zip(&mut acc) {
            let low = _mm512_cvtepi32_epi64(_mm512_castsi512_si256(part));
            let high = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64::<1>(part));
            *acc = [_mm512_add_epi64(acc[0], low), _mm512_add_epi64(acc[1], high)];
        }
    }
    let mut sums = [[0; N]; 2];
    for (a, acc) in acc.into_iter().enumerate() {
        for (sums, acc) in sums.iter_mut().zip(acc) {
            sums[a] = _mm512_reduce_add_epi64(acc);
        }
    }
    sums
}

/// Two weight rows in i64, from scales that are stored narrow or not.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn wide<const N: usize>(w: &[Pair], x: [&[Inputs]; N], stored_narrow: [bool; 2]) -> [[i64; N]; 2] {
    let [a, b] = stored_narrow.map(|narrow| if narrow { 16 } else { 0 });
    let shifts = _mm512_set_epi32(b, b, b, b, b, b, b, b, a, a, a, a, a, a, a, a);
    let mut acc = [_mm512_setzero_si512(); N];
    for (k, w) in w.iter().enumerate() {
        let even = _mm512_srlv_epi32(load(&w.scales), shifts);
        let odd = _mm512_srli_epi64::<32>(even);
        let dots = dots(w, x, k);
        for a in 0..N {
            let multiplier = _mm512_srli_epi32::<16>(twice(&x[a][k].multiplier));
            let t = _mm512_madd_epi16(dots[a], multiplier);
            acc[a] = _mm512_add_epi64(acc[a], _mm512_mul_epi32(t, even));
            acc[a] = _mm512_add_epi64(acc[a], _mm512_mul_epi32(_mm512_srli_epi64::<32>(t), odd));
        }
    }
    let mut sums = [[0; N]; 2];
    for (a, acc) in acc.into_iter().enumerate() {
        sums[0][a] = _mm512_mask_reduce_add_epi64(0x0F, acc);
        sums[1][a] = _mm512_mask_reduce_add_epi64(0xF0, acc);
    }
    sums
}

/// Every group's sum of products in the low half of its lane; the high half means nothing, and callers multiply
/// it by zero.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn dots<const N: usize>(w: &Pair, x: [&[Inputs]; N], k: usize) -> [__m512i; N] {
    let mut dots = [_mm512_setzero_si512(); N];
    for q in 0..QUARTERS {
        let codes = load(&w.codes[q]);
        for a in 0..N {
            dots[a] = _mm512_dpbusd_epi32(dots[a], codes, twice(&x[a][k].codes[q]));
        }
    }
    for a in 0..N {
        dots[a] = _mm512_add_epi16(dots[a], twice(&x[a][k].correction));
    }
    dots
}

/// One of the layout's arrays in both halves of a vector.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn twice<T: Copy>(v: &T) -> __m512i {
    _mm512_broadcast_i64x4(avx2::load(v))
}

/// A vector of one of a pair's arrays.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn load<T: Copy>(v: &T) -> __m512i {
    const { assert!(size_of::<T>() == 64) };
    // SAFETY: `v` is 64 bytes long; a pair's arrays are plain integers, and any bytes make a vector.
    unsafe { _mm512_loadu_si512(std::ptr::from_ref(v).cast()) }
}
