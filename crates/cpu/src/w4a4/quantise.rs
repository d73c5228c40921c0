//! The law's W4A4 quantiser over whole rows.

use castiron_num::{fp4, fp8};

use super::layout::{Exponents, Inputs, SPAN};
use crate::Level;
use crate::level::Set;
use crate::matrix::GROUP;

/// Quantises `x` (`[rows, cols]`) into zeroed packed spans, scale codes and rows' exponents; gives the rows that
/// are not finite, which stay zero.
pub(super) fn rows(
    level: Level,
    x: &[f32],
    cols: usize,
    a: f32,
    (packed, scales, exponents): (&mut [Inputs], &mut [u8], &mut [Exponents]),
) -> Vec<usize> {
    let (spans, groups) = (cols.div_ceil(SPAN), cols / GROUP);
    let mut bad = Vec::new();
    let outputs = packed.chunks_exact_mut(spans).zip(scales.chunks_exact_mut(groups)).zip(exponents);
    for (r, (x, ((packed, scales), exponents))) in x.chunks_exact(cols).zip(outputs).enumerate() {
        let x = x.as_chunks().0;
        let finite = a > 0.0
            && a.is_finite()
            && match level.0 {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: these levels are only made where AVX2 was found.
                Set::Avx2 | Set::Avx512 => unsafe { x86::row(x, a, packed, scales, exponents) },
                Set::Law | Set::Portable => row(x, a, packed, scales, exponents),
            };
        if !finite {
            scales.fill(0);
            bad.push(r);
        }
    }
    bad
}

/// The scale code of a group; `None` when it is not finite.
#[inline(always)]
fn scale(largest_bits: u32, a: f32) -> Option<u8> {
    // Magnitudes order as their bits do, infinities and NaN last.
    let finite = largest_bits < f32::INFINITY.to_bits();
    finite.then(|| fp8::encode(((f32::from_bits(largest_bits) / fp4::MAX) / a).min(fp8::MAX)))
}

/// One row; false, and no span written, when it is not finite.
fn row(
    x: &[[f32; GROUP]],
    a: f32,
    packed: &mut [Inputs],
    scales: &mut [u8],
    exponents: &mut Exponents,
) -> bool {
    for (x, code) in x.iter().zip(&mut *scales) {
        let bits = x.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7FFF_FFFF));
        let Some(scale) = scale(bits, a) else { return false };
        *code = scale;
    }
    *exponents = Exponents::of(scales);
    for (g, (x, &scale)) in x.iter().zip(&*scales).enumerate() {
        let step = fp8::decode(scale) * a;
        // A step of zero leaves the group's zeros.
        if step != 0.0 {
            let halves = x.map(|v| fp4::halves(fp4::encode((v / step).clamp(-fp4::MAX, fp4::MAX))));
            packed[g * GROUP / SPAN].set(g % (SPAN / GROUP), &halves, scale, *exponents);
        }
    }
    true
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use castiron_num::fp8;

    use super::super::layout::{self, BIAS, Exponents, Inputs, QUARTERS, SPAN};
    use super::GROUP;

    /// [`super::row`] in vectors.
    #[target_feature(enable = "avx2")]
    pub(super) fn row(
        x: &[[f32; GROUP]],
        a: f32,
        packed: &mut [Inputs],
        scales: &mut [u8],
        exponents: &mut Exponents,
    ) -> bool {
        for (x, code) in x.iter().zip(&mut *scales) {
            let (low, high) = load(x);
            let Some(scale) = super::scale(largest(low, high), a) else { return false };
            *code = scale;
        }
        *exponents = Exponents::of(scales);
        for (g, (x, &scale)) in x.iter().zip(&*scales).enumerate() {
            let step = fp8::decode(scale) * a;
            if step != 0.0 {
                let ((low, high), step) = (load(x), _mm256_set1_ps(step));
                let codes = pack(encode(_mm256_div_ps(low, step)), encode(_mm256_div_ps(high, step)));
                set(&mut packed[g * GROUP / SPAN], g % (SPAN / GROUP), codes, scale, *exponents);
            }
        }
        true
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn load(x: &[f32; GROUP]) -> (__m256, __m256) {
        // SAFETY: both loads are inside the group's 16 values.
        unsafe { (_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))) }
    }

    /// The largest magnitude's bits.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn largest(low: __m256, high: __m256) -> u32 {
        let magnitude = _mm256_set1_epi32(0x7FFF_FFFF);
        let low = _mm256_and_si256(_mm256_castps_si256(low), magnitude);
        let m = _mm256_max_epu32(low, _mm256_and_si256(_mm256_castps_si256(high), magnitude));
        let m = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
        let m = _mm_max_epu32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
        _mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m))) as u32
    }

    /// E2M1 codes: how many ends of intervals the magnitude has passed, and the sign. Ties go to the even code:
    /// an end after an odd code is passed when it is met.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn encode(q: __m256) -> __m256i {
        let m = _mm256_andnot_ps(_mm256_set1_ps(-0.0), q);
        let mut code =
            _mm256_and_si256(_mm256_srli_epi32::<28>(_mm256_castps_si256(q)), _mm256_set1_epi32(8));
        for end in [0.25, 1.25, 2.5, 5.0] {
            let passed = _mm256_cmp_ps::<_CMP_GT_OQ>(m, _mm256_set1_ps(end));
            code = _mm256_sub_epi32(code, _mm256_castps_si256(passed));
        }
        for end in [0.75, 1.75, 3.5] {
            let passed = _mm256_cmp_ps::<_CMP_GE_OQ>(m, _mm256_set1_ps(end));
            code = _mm256_sub_epi32(code, _mm256_castps_si256(passed));
        }
        code
    }

    /// 16 codes as bytes, a quarter of the layout each four.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn pack(low: __m256i, high: __m256i) -> __m128i {
        let both = _mm256_packs_epi32(low, high);
        let (a, b) = (_mm256_castsi256_si128(both), _mm256_extracti128_si256::<1>(both));
        // In elements: 0 1 2 3 8 9 10 11 4 5 6 7 12 13 14 15. Then even and odd columns apart.
        let bytes = _mm_packus_epi16(a, b);
        _mm_shuffle_epi8(bytes, _mm_set_epi8(15, 13, 7, 5, 14, 12, 6, 4, 11, 9, 3, 1, 10, 8, 2, 0))
    }

    /// `halves(code) << shift` for the four shifts.
    const SHIFTED: [[i8; 16]; 4] = shifted();

    const fn shifted() -> [[i8; 16]; 4] {
        const MAGNITUDES: [i8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
        let mut tables = [[0; 16]; 4];
        let mut i = 0;
        while i < 32 {
            tables[i / 8][i % 8] = MAGNITUDES[i % 8] << (i / 8);
            tables[i / 8][i % 8 + 8] = -(MAGNITUDES[i % 8] << (i / 8));
            i += 1;
        }
        tables
    }

    /// [`Inputs::set`] for packed codes.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn set(span: &mut Inputs, group: usize, codes: __m128i, scale: u8, exponents: Exponents) {
        let (lane, shift) = (layout::LANE[group], layout::byte_shift(scale, exponents));
        // SAFETY: a table has 16 bytes.
        let table = unsafe { _mm_loadu_si128(SHIFTED[usize::from(shift)].as_ptr().cast()) };
        let bytes = _mm_shuffle_epi8(table, codes);
        let quarters = [
            _mm_extract_epi32::<0>(bytes),
            _mm_extract_epi32::<1>(bytes),
            _mm_extract_epi32::<2>(bytes),
            _mm_extract_epi32::<3>(bytes),
        ];
        for q in 0..QUARTERS {
            span.codes[q][4 * lane..4 * lane + 4]
                .copy_from_slice(&quarters[q].to_le_bytes().map(|b| b as i8));
        }
        // Pairs, then two sums of eight.
        let pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), bytes);
        let sums = _mm_madd_epi16(pairs, _mm_set1_epi16(1));
        let sums = _mm_add_epi32(sums, _mm_shuffle_epi32::<0b01_00_11_10>(sums));
        let sum = _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32::<0b10_11_00_01>(sums)));
        span.multiplier[lane] = [layout::multiplier(scale, exponents); 2];
        span.correction[lane] = [-BIAS * sum as i16, 0];
    }
}
