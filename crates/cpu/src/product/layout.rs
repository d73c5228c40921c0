//! How a row of K values lies for vectors of lanes.
//!
//! The 32 lanes are cut into `32 / width` parts. Part by part, step by step (a step is one element of every
//! lane of the part, in rising k), `width` values lie side by side. A part whose lanes have no element in the
//! last, shorter stripe has no step for it: padding cannot be seen.

use castiron_num::dot::{LANES, STRIPE};

use crate::simd::{GROUP, POSITION};

/// Elements of a lane in a stripe.
const PER_LANE: usize = STRIPE / LANES;
/// Elements of a group in a stripe.
pub(super) const GROUP_ELEMENTS: usize = GROUP * PER_LANE;

/// The layout of rows of `k` values for vectors of `width` lanes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) k: usize,
    pub(super) width: usize,
    /// First value and steps of each part.
    pub(super) parts: [(usize, usize); LANES / GROUP],
    /// Values of a laid-out row.
    pub(super) len: usize,
}

impl Layout {
    pub(super) fn new(k: usize, width: usize) -> Self {
        let (full, tail) = (k / STRIPE, k % STRIPE);
        let mut parts = [(0, 0); LANES / GROUP];
        let mut len = 0;
        for (p, part) in parts.iter_mut().enumerate().take(LANES / width) {
            let steps = PER_LANE * (full + usize::from(tail > p * width * PER_LANE));
            *part = (len, steps);
            len += steps * width;
        }
        Self { k, width, parts, len }
    }

    /// Parts in use.
    pub(super) fn count(&self) -> usize {
        LANES / self.width
    }

    /// Where the vector of element 0 of group `g` in stripe `s` stands: vector index, and first lane inside it.
    /// Element j is j vectors further. `None` when the part has no such step.
    #[inline(always)]
    fn group_at(&self, s: usize, g: usize) -> Option<(usize, usize)> {
        let (base, steps) = self.parts[g * GROUP / self.width];
        (s * PER_LANE < steps).then_some((base / self.width + s * PER_LANE, g * GROUP % self.width))
    }

    /// Lays out one row of `k` elements of `SIZE` bytes, whose vectors stand `stride` values apart in `out`.
    ///
    /// `transpose(from, to)` decodes the 64 elements of a group and writes element `8 * lane + j` to
    /// `to[j * stride + POSITION[lane]]`; it is given zero bytes where the row has ended.
    #[inline(always)]
    pub(super) fn pack<const SIZE: usize>(
        &self,
        row: &[[u8; SIZE]],
        out: &mut [f32],
        stride: usize,
        transpose: impl Fn(&[[u8; SIZE]; GROUP_ELEMENTS], &mut [f32]),
    ) {
        debug_assert!(row.len() == self.k);
        let (groups, tail) = row.as_chunks::<GROUP_ELEMENTS>();
        let mut last = [[0; SIZE]; GROUP_ELEMENTS];
        last[..tail.len()].copy_from_slice(tail);
        let zero = [[0; SIZE]; GROUP_ELEMENTS];
        const GROUPS: usize = LANES / GROUP;
        for i in 0..self.k.div_ceil(STRIPE) * GROUPS {
            if let Some((vector, lane)) = self.group_at(i / GROUPS, i % GROUPS) {
                let from = match i.cmp(&groups.len()) {
                    std::cmp::Ordering::Less => &groups[i],
                    std::cmp::Ordering::Equal => &last,
                    std::cmp::Ordering::Greater => &zero,
                };
                transpose(from, &mut out[vector * stride + lane..]);
            }
        }
    }
}

/// The plain form of a group's transpose.
#[inline(always)]
pub(super) fn transpose_plain<const SIZE: usize>(
    from: &[[u8; SIZE]; GROUP_ELEMENTS],
    to: &mut [f32],
    stride: usize,
    decode: impl Fn([u8; SIZE]) -> f32,
) {
    for lane in 0..GROUP {
        for j in 0..PER_LANE {
            to[j * stride + POSITION[lane]] = decode(from[lane * PER_LANE + j]);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    //! The transposes in AVX2.

    use std::arch::x86_64::*;

    use super::{GROUP_ELEMENTS, PER_LANE};
    use crate::simd::GROUP;

    /// 8 lanes of 8 values to 8 steps of 8 lanes, lanes in the order of `POSITION`.
    ///
    /// # Safety
    /// AVX is present.
    #[inline(always)]
    pub(in crate::product) unsafe fn transpose(
        from: &[[u8; 4]; GROUP_ELEMENTS],
        to: &mut [f32],
        stride: usize,
    ) {
        assert!(to.len() >= (PER_LANE - 1) * stride + GROUP);
        // SAFETY: `from` holds 8 vectors and the assertion covers the last store. The caller has AVX.
        unsafe {
            // Lanes 0, 2, 4, 6, 1, 3, 5, 7: the order they shall stand in.
            let r: [__m256; 8] = std::array::from_fn(|i| {
                _mm256_loadu_ps(from.as_ptr().add((i % 4 * 2 + i / 4) * PER_LANE).cast())
            });
            let t: [__m256; 8] = std::array::from_fn(|i| {
                let (a, b) = (r[i / 2 * 2], r[i / 2 * 2 + 1]);
                if i % 2 == 0 { _mm256_unpacklo_ps(a, b) } else { _mm256_unpackhi_ps(a, b) }
            });
            // u[h][j]: lanes 4h..4h+3 of element j (low half) and j + 4 (high half).
            let u: [[__m256; 4]; 2] = std::array::from_fn(|h| {
                let (t0, t1, t2, t3) = (t[4 * h], t[4 * h + 1], t[4 * h + 2], t[4 * h + 3]);
                [
                    _mm256_shuffle_ps(t0, t2, 0x44),
                    _mm256_shuffle_ps(t0, t2, 0xEE),
                    _mm256_shuffle_ps(t1, t3, 0x44),
                    _mm256_shuffle_ps(t1, t3, 0xEE),
                ]
            });
            let to = to.as_mut_ptr();
            for (j, (&low, &high)) in u[0].iter().zip(&u[1]).enumerate() {
                _mm256_storeu_ps(to.add(j * stride), _mm256_permute2f128_ps(low, high, 0x20));
                _mm256_storeu_ps(to.add((j + 4) * stride), _mm256_permute2f128_ps(low, high, 0x31));
            }
        }
    }

    /// [`transpose`] of 64 bf16 values, decoded.
    ///
    /// # Safety
    /// AVX2 is present.
    #[inline(always)]
    pub(in crate::product) unsafe fn transpose_bf16(
        from: &[[u8; 2]; GROUP_ELEMENTS],
        to: &mut [f32],
        stride: usize,
    ) {
        assert!(to.len() >= (PER_LANE - 1) * stride + GROUP);
        // SAFETY: `from` holds 128 bytes and the assertion covers the last store. The caller has AVX2.
        unsafe {
            for (j, v) in steps_of_bf16(from.as_ptr().cast()).into_iter().enumerate() {
                _mm256_storeu_ps(to.as_mut_ptr().add(j * stride), v);
            }
        }
    }

    /// The 64 bf16 values of a group as 8 vectors, one element of every lane each, in rising element order.
    ///
    /// # Safety
    /// AVX2 is present; `from` is valid for reading 128 bytes.
    #[inline(always)]
    pub(in crate::product) unsafe fn steps_of_bf16(from: *const u8) -> [__m256; PER_LANE] {
        // SAFETY: four loads of 32 bytes; the caller has AVX2.
        unsafe {
            let v: [__m256i; 4] = std::array::from_fn(|i| _mm256_loadu_si256(from.add(32 * i).cast()));
            let (a, b) = (_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
            let (c, d) = (_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
            // Pairs of elements (0,1), (2,3), (4,5), (6,7) of every lane.
            let pairs = [
                _mm256_unpacklo_epi64(a, c),
                _mm256_unpackhi_epi64(a, c),
                _mm256_unpacklo_epi64(b, d),
                _mm256_unpackhi_epi64(b, d),
            ];
            let high = _mm256_set1_epi32(0xFFFF_0000u32 as i32);
            std::array::from_fn(|j| {
                let pair = pairs[j / 2];
                _mm256_castsi256_ps(if j % 2 == 0 {
                    _mm256_slli_epi32::<16>(pair)
                } else {
                    _mm256_and_si256(pair, high)
                })
            })
        }
    }
}
