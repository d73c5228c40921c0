//! AVX2: `vpmaddubsw` on one group a lane.

use std::arch::x86_64::*;

use super::layout::{BIAS, Exponents, Inputs, LANES, QUARTERS, SPAN, Weights};
use super::tiles::{Decoded, Form, InputRows, Row, Source};
use crate::Level;
use crate::level::Set;

/// Proof that AVX2 is here.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// The form of a level that was made by detection and has AVX2.
    ///
    /// # Panics
    /// For other levels.
    pub fn of(level: Level) -> Self {
        assert!(matches!(level.0, Set::Avx2 | Set::Avx512), "a level with AVX2");
        Self(())
    }
}

impl Form for Avx2 {
    type Weights = Weights;
    const ZERO: Weights = Weights::ZERO;
    const ROWS: usize = 1;

    fn decode(
        self,
        spans: usize,
        w: Source<'_>,
        first: usize,
        out: &mut [Weights],
        exponents: &mut [Exponents],
    ) {
        // SAFETY: a value of this type proves AVX2.
        unsafe { decode(spans, w, first, out, exponents) }
    }

    fn strip<const N: usize>(
        self,
        spans: usize,
        w: Decoded<'_, Weights>,
        x: InputRows<'_, N>,
        out: &mut [[f32; N]],
    ) {
        // SAFETY: a value of this type proves AVX2.
        unsafe { strip(spans, w, x, out) }
    }

    fn stream<const N: usize>(self, w: Source<'_>, first: usize, x: InputRows<'_, N>, out: &mut [[f32; N]]) {
        // SAFETY: a value of this type proves AVX2.
        unsafe { stream(w, first, x, out) }
    }
}

/// `halves(code) + 12` of every code.
const RAISED: [u8; 16] = raised();

const fn raised() -> [u8; 16] {
    const MAGNITUDES: [u8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
    let mut table = [0; 16];
    let mut i = 0;
    while i < 8 {
        table[i] = BIAS as u8 + MAGNITUDES[i];
        table[i + 8] = BIAS as u8 - MAGNITUDES[i];
        i += 1;
    }
    table
}

/// A vector of one of the layout's arrays.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn load<T: Copy>(v: &T) -> __m256i {
    const { assert!(size_of::<T>() == 32) };
    // SAFETY: `v` is 32 bytes long; callers pass arrays of integers, and any bytes make a vector.
    unsafe { _mm256_loadu_si256(std::ptr::from_ref(v).cast()) }
}

#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn store<T: Copy>(v: &mut T, bytes: __m256i) {
    const { assert!(size_of::<T>() == 32) };
    // SAFETY: `v` is 32 bytes long; callers pass arrays of integers, for which any bytes do.
    unsafe { _mm256_storeu_si256(std::ptr::from_mut(v).cast(), bytes) }
}

#[target_feature(enable = "avx2")]
fn decode(spans: usize, w: Source<'_>, first: usize, out: &mut [Weights], exponents: &mut [Exponents]) {
    for (i, (out, exponents)) in out.chunks_exact_mut(spans).zip(exponents).enumerate() {
        let w = w.row(first + i);
        *exponents = w.exponents();
        for (out, (codes, scales)) in out.iter_mut().zip(w.codes.iter().zip(w.scales)) {
            decode_span(codes, scales, *exponents, out);
        }
        if let Some((codes, scales)) = w.rest() {
            decode_span(&codes, &scales, *exponents, &mut out[spans - 1]);
        }
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn decode_span(codes: &[u8; SPAN / 2], scales: &[u8; LANES], exponents: Exponents, out: &mut Weights) {
    for (out, codes) in out.codes.iter_mut().zip(raise(codes)) {
        store(out, codes);
    }
    store(&mut out.scales, stored_scales(scales, exponents));
}

/// Scales as [`Weights`] keeps them.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn stored_scales(scales: &[u8; LANES], exponents: Exponents) -> __m256i {
    let units = _mm256_srl_epi32(units(scales), _mm_cvtsi32_si128(i32::from(exponents.shift)));
    // Into the other half of the lane, or out of it.
    let copy = _mm256_sll_epi32(units, _mm_cvtsi32_si128(if exponents.narrow() { 16 } else { 32 }));
    _mm256_or_si256(units, copy)
}

/// The four quarters of 8 groups, raised.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn raise(codes: &[u8; SPAN / 2]) -> [__m256i; QUARTERS] {
    let table = _mm256_broadcastsi128_si256(u128_vector(u128::from_le_bytes(RAISED)));
    let nibble = _mm256_set1_epi8(15);
    let halves: &[[u8; 32]; 2] = codes.as_chunks().0.try_into().expect("64 bytes");
    let (a, b) = (_mm256_castsi256_ps(load(&halves[0])), _mm256_castsi256_ps(load(&halves[1])));
    // The first and the second dword of every group, in the order `layout::LANE`.
    let first = _mm256_castps_si256(_mm256_shuffle_ps::<0x88>(a, b));
    let second = _mm256_castps_si256(_mm256_shuffle_ps::<0xDD>(a, b));
    let mut out = [first, _mm256_srli_epi16::<4>(first), second, _mm256_srli_epi16::<4>(second)];
    for codes in &mut out {
        *codes = _mm256_shuffle_epi8(table, _mm256_and_si256(*codes, nibble));
    }
    out
}

#[target_feature(enable = "avx2")]
#[inline]
fn u128_vector(v: u128) -> __m128i {
    _mm_set_epi64x((v >> 64) as i64, v as i64)
}

/// Scale codes in units of 2^-9, in the order `layout::LANE`; 0 for codes that are no scale.
#[target_feature(enable = "avx2")]
#[inline]
fn units(scales: &[u8; LANES]) -> __m256i {
    let codes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(*scales)));
    let codes = _mm256_permute4x64_epi64::<0b11_01_10_00>(codes);
    let (one, seven) = (_mm256_set1_epi32(1), _mm256_set1_epi32(7));
    let field = _mm256_srli_epi32::<3>(codes);
    // min(field, 1) << 3 is the hidden bit of a normal number.
    let hidden = _mm256_slli_epi32::<3>(_mm256_min_epu32(field, one));
    let significand = _mm256_or_si256(_mm256_and_si256(codes, seven), hidden);
    let units = _mm256_sllv_epi32(significand, _mm256_sub_epi32(_mm256_max_epu32(field, one), one));
    _mm256_and_si256(units, _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F), codes))
}

/// The outputs of every decoded row, one at a time, for `N` activation rows.
#[target_feature(enable = "avx2")]
fn strip<const N: usize>(spans: usize, w: Decoded<'_, Weights>, x: InputRows<'_, N>, out: &mut [[f32; N]]) {
    let x = InputRows { spans: rows(x.spans, spans), ..x };
    let narrow_below = x.narrow_below(LANES * spans);
    for ((w, &exponents), out) in w.spans.chunks_exact(spans).zip(w.exponents).zip(out) {
        if exponents.range < narrow_below {
            finish_narrow(narrow(w, x.spans), exponents, &x, out);
        } else {
            in_i64(w, exponents, &x, out);
        }
    }
}

/// A weight row in i32.
#[target_feature(enable = "avx2")]
#[inline]
fn narrow<const N: usize>(w: &[Weights], x: [&[Inputs]; N]) -> [__m256i; N] {
    let x = rows(x, w.len());
    let mut acc = [_mm256_setzero_si256(); N];
    for (k, w) in w.iter().enumerate() {
        narrow_step(w, at(x, k), &mut acc);
    }
    acc
}

/// Adds a span in i32.
#[target_feature(enable = "avx2")]
#[inline]
fn narrow_step<const N: usize>(w: &Weights, x: [&Inputs; N], acc: &mut [__m256i; N]) {
    let (codes, scales) = (quarters(w), load(&w.scales));
    for (x, acc) in x.into_iter().zip(acc) {
        let scales = _mm256_mullo_epi16(scales, load(&x.multiplier));
        *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(pairs(codes, x), scales));
    }
}

/// A weight row whose sums may not fit an i32: parts of them may, or none.
#[target_feature(enable = "avx2")]
#[inline(never)]
fn in_i64<const N: usize>(w: &[Weights], exponents: Exponents, x: &InputRows<'_, N>, out: &mut [f32; N]) {
    let mut acc = [_mm256_setzero_si256(); N];
    if let Some(terms) = exponents.terms(x.range()) {
        for first in (0..w.len()).step_by(terms) {
            let end = w.len().min(first + terms);
            let mut part = x.spans;
            for x in &mut part {
                *x = &x[first..end];
            }
            widen(narrow(&w[first..end], part), &mut acc);
        }
    } else {
        let shift = _mm_cvtsi32_si128(if exponents.narrow() { 16 } else { 0 });
        let spans = rows(x.spans, w.len());
        for (k, w) in w.iter().enumerate() {
            let scales = _mm256_srl_epi32(load(&w.scales), shift);
            wide_step(quarters(w), scales, at(spans, k), &mut acc);
        }
    }
    *out = x.finish(exponents, fold(acc));
}

/// Adds i32 lanes to i64 lanes.
#[target_feature(enable = "avx2")]
#[inline]
fn widen<const N: usize>(part: [__m256i; N], acc: &mut [__m256i; N]) {
    for (part, acc) in part.into_iter().zip(acc) {
        let low = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(part));
        let high = _mm256_cvtepi32_epi64(_mm256_extracti128_si256::<1>(part));
        *acc = _mm256_add_epi64(*acc, _mm256_add_epi64(low, high));
    }
}

/// The outputs of the rows from `first` on, decoded in registers, for `N` activation rows.
#[target_feature(enable = "avx2")]
fn stream<const N: usize>(w: Source<'_>, first: usize, x: InputRows<'_, N>, out: &mut [[f32; N]]) {
    for (n, out) in out.iter_mut().enumerate() {
        let w = w.row(first + n);
        let whole = rows(x.spans, w.codes.len());
        let mut acc = [_mm256_setzero_si256(); N];
        for (k, (codes, scales)) in w.codes.iter().zip(w.scales).enumerate() {
            wide_step(raise(codes), units(scales), at(whole, k), &mut acc);
        }
        if !w.is_whole() {
            let rest = stream_rest(w, &x);
            for (acc, rest) in acc.iter_mut().zip(rest) {
                *acc = _mm256_add_epi64(*acc, rest);
            }
        }
        *out = x.finish(Exponents::default(), fold(acc));
    }
}

/// What a row has after its whole spans; apart, for the registers of the loop.
#[target_feature(enable = "avx2")]
#[inline(never)]
fn stream_rest<const N: usize>(w: Row<'_>, x: &InputRows<'_, N>) -> [__m256i; N] {
    let mut acc = [_mm256_setzero_si256(); N];
    if let Some((codes, scales)) = w.rest() {
        wide_step(raise(&codes), units(&scales), at(x.spans, w.codes.len()), &mut acc);
    }
    acc
}

/// Adds a span in i64.
#[target_feature(enable = "avx2")]
#[inline]
fn wide_step<const N: usize>(
    codes: [__m256i; QUARTERS],
    scales: __m256i,
    x: [&Inputs; N],
    acc: &mut [__m256i; N],
) {
    let odd = _mm256_srli_epi64::<32>(scales);
    for (x, acc) in x.into_iter().zip(acc) {
        let t = _mm256_madd_epi16(pairs(codes, x), load(&x.multiplier));
        // Signed 32 x 32 -> 64 of the even lanes, then of the odd ones.
        *acc = _mm256_add_epi64(*acc, _mm256_mul_epi32(t, scales));
        *acc = _mm256_add_epi64(*acc, _mm256_mul_epi32(_mm256_srli_epi64::<32>(t), odd));
    }
}

/// The quarters of a span.
#[target_feature(enable = "avx2")]
#[inline]
fn quarters(w: &Weights) -> [__m256i; QUARTERS] {
    [load(&w.codes[0]), load(&w.codes[1]), load(&w.codes[2]), load(&w.codes[3])]
}

/// Each group's sum of products in two i16.
#[target_feature(enable = "avx2")]
#[inline]
fn pairs(codes: [__m256i; QUARTERS], x: &Inputs) -> __m256i {
    let mut pairs = load(&x.correction);
    for q in 0..QUARTERS {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes[q], load(&x.codes[q])));
    }
    pairs
}

/// The same rows, known to be `spans` long.
#[inline(always)]
fn rows<const N: usize>(mut x: [&[Inputs]; N], spans: usize) -> [&[Inputs]; N] {
    for x in &mut x {
        *x = &x[..spans];
    }
    x
}

/// Span `k` of every row.
#[inline(always)]
fn at<const N: usize>(x: [&[Inputs]; N], k: usize) -> [&Inputs; N] {
    let mut out = [&Inputs::ZERO; N];
    for (out, x) in out.iter_mut().zip(x) {
        *out = &x[k];
    }
    out
}

/// The sum of the four lanes of each vector.
#[target_feature(enable = "avx2")]
#[inline]
fn fold<const N: usize>(v: [__m256i; N]) -> [i64; N] {
    let mut out = [0; N];
    if let (&[a, b, c, d], [sums]) = (&v[..], out.as_chunks_mut::<4>().0) {
        let ab = _mm256_add_epi64(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
        let cd = _mm256_add_epi64(_mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d));
        let low = _mm256_permute2x128_si256::<0x20>(ab, cd);
        store(sums, _mm256_add_epi64(low, _mm256_permute2x128_si256::<0x31>(ab, cd)));
        return out;
    }
    for i in 0..N {
        let v = _mm_add_epi64(_mm256_castsi256_si128(v[i]), _mm256_extracti128_si256::<1>(v[i]));
        out[i] = _mm_cvtsi128_si64(_mm_add_epi64(v, _mm_unpackhi_epi64(v, v)));
    }
    out
}

/// [`InputRows::finish`] of sums of eight lanes that fit an i32, four at a time.
#[target_feature(enable = "avx2")]
#[inline]
fn finish_narrow<const N: usize>(v: [__m256i; N], w: Exponents, x: &InputRows<'_, N>, out: &mut [f32; N]) {
    let &[a, b, c, d] = &v[..] else {
        let mut sums = [0; N];
        for i in 0..N {
            let v = _mm_add_epi32(_mm256_castsi256_si128(v[i]), _mm256_extracti128_si256::<1>(v[i]));
            let v = _mm_add_epi32(v, _mm_unpackhi_epi64(v, v));
            sums[i] = i64::from(_mm_cvtsi128_si32(v) + _mm_extract_epi32::<1>(v));
        }
        *out = x.finish(w, sums);
        return;
    };
    let ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    let v = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    // A power of two goes through the rounding: the same as shifting the sum, and then the law's unit 2^-20.
    let shift = |r: usize| i32::from(x.exponents[r].shift);
    let shifts = _mm_add_epi32(
        _mm_set_epi32(shift(3), shift(2), shift(1), shift(0)),
        _mm_set1_epi32(i32::from(w.shift)),
    );
    let unit = _mm_castsi128_ps(_mm_slli_epi32::<23>(_mm_add_epi32(shifts, _mm_set1_epi32(127 - 20))));
    let v = _mm_mul_ps(_mm_mul_ps(_mm_cvtepi32_ps(v), unit), _mm_set1_ps(x.scales.0));
    let v: [f32; 4] = f32x4(_mm_mul_ps(v, _mm_set1_ps(x.scales.1)));
    out.copy_from_slice(&v);
}

#[target_feature(enable = "avx2")]
#[inline]
fn f32x4(v: __m128) -> [f32; 4] {
    let mut out = [0.0; 4];
    // SAFETY: `out` has the four values' 16 bytes.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), v) };
    out
}
