//! Vectors of 8 or 16 of the law's 32 lanes.
//!
//! Lanes lie in groups of 8. Inside a group they stand in the order 0, 2, 4, 6, 1, 3, 5, 7 ([`POSITION`]):
//! that is how pairs of 16-byte blocks come out of a 4x4 transpose, and it makes the first fold of the law
//! (neighbouring lanes) an addition of two halves.

/// Lanes of a group.
pub(crate) const GROUP: usize = 8;
/// Where lane `l` of a group stands.
pub(crate) const POSITION: [usize; GROUP] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A vector of lanes with the operations a product needs.
pub(crate) trait Lanes: Copy {
    /// Lanes of a vector: a multiple of [`GROUP`].
    const WIDTH: usize;
    /// The vector.
    type Vector: Copy;
    /// +0 in every lane.
    ///
    /// # Safety
    /// As for every function here: the instruction set is present.
    unsafe fn zero() -> Self::Vector;
    /// `WIDTH` values.
    ///
    /// # Safety
    /// `from` is valid for reading them.
    unsafe fn load(from: *const f32) -> Self::Vector;
    /// Writes `WIDTH` values.
    ///
    /// # Safety
    /// `to` is valid for writing them.
    unsafe fn store(to: *mut f32, v: Self::Vector);
    /// `fma(a, b, c)` in every lane.
    ///
    /// # Safety
    /// The instruction set is present.
    unsafe fn fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// [`fold_groups`] of each of four results.
    ///
    /// # Safety
    /// The instruction set is present.
    #[inline(always)]
    unsafe fn fold(v: &[[f32; 32]; 4]) -> [f32; 4] {
        std::array::from_fn(|i| fold_groups(&v[i]))
    }
}

/// Baseline instructions.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Lanes for Portable {
    const WIDTH: usize = 8;
    type Vector = [f32; 8];
    #[inline(always)]
    unsafe fn zero() -> [f32; 8] {
        [0.0; 8]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 8] {
        // SAFETY: the caller gives 8 readable values.
        unsafe { from.cast::<[f32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: [f32; 8]) {
        // SAFETY: the caller gives 8 writable values.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    //! AVX2 with FMA, and AVX-512.

    use std::arch::x86_64::*;

    use super::Lanes;

    /// 8 lanes.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2;

    impl Lanes for Avx2 {
        const WIDTH: usize = 8;
        type Vector = __m256;
        #[inline(always)]
        unsafe fn zero() -> __m256 {
            // SAFETY: the caller has AVX.
            unsafe { _mm256_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m256 {
            // SAFETY: the caller has AVX and gives 8 readable values.
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(to: *mut f32, v: __m256) {
            // SAFETY: the caller has AVX and gives 8 writable values.
            unsafe { _mm256_storeu_ps(to, v) }
        }
        #[inline(always)]
        unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
            // SAFETY: the caller has FMA.
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn fold(v: &[[f32; 32]; 4]) -> [f32; 4] {
            // SAFETY: the caller has AVX2.
            unsafe { fold(v) }
        }
    }

    /// 16 lanes.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512;

    impl Lanes for Avx512 {
        const WIDTH: usize = 16;
        type Vector = __m512;
        #[inline(always)]
        unsafe fn zero() -> __m512 {
            // SAFETY: the caller has AVX-512F.
            unsafe { _mm512_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m512 {
            // SAFETY: the caller has AVX-512F and gives 16 readable values.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(to: *mut f32, v: __m512) {
            // SAFETY: the caller has AVX-512F and gives 16 writable values.
            unsafe { _mm512_storeu_ps(to, v) }
        }
        #[inline(always)]
        unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: the caller has AVX-512F.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn fold(v: &[[f32; 32]; 4]) -> [f32; 4] {
            // SAFETY: the caller has AVX2.
            unsafe { fold(v) }
        }
    }

    /// Four folds side by side. Halves of a group hold neighbouring lanes; the horizontal additions that follow
    /// add neighbouring sums, level by level.
    ///
    /// # Safety
    /// AVX2 is present.
    #[inline(always)]
    unsafe fn fold(v: &[[f32; 32]; 4]) -> [f32; 4] {
        // SAFETY: every load is inside its array of 32; the caller has AVX2.
        unsafe {
            let groups: [__m128; 4] = std::array::from_fn(|i| {
                let v = v[i].as_ptr();
                let s: [__m128; 4] = std::array::from_fn(|g| {
                    _mm_add_ps(_mm_loadu_ps(v.add(8 * g)), _mm_loadu_ps(v.add(8 * g + 4)))
                });
                _mm_hadd_ps(_mm_hadd_ps(s[0], s[1]), _mm_hadd_ps(s[2], s[3]))
            });
            let sums = _mm_hadd_ps(_mm_hadd_ps(groups[0], groups[1]), _mm_hadd_ps(groups[2], groups[3]));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), _mm_add_ps(sums, _mm_setzero_ps()));
            out
        }
    }
}

/// Folds 32 lanes that lie in groups: neighbouring lanes first, as the law says, then `+ (+0)`.
#[inline(always)]
pub(crate) fn fold_groups(v: &[f32; 32]) -> f32 {
    // In a group, positions i and i + 4 hold neighbouring lanes.
    let mut s = [0.0f32; 16];
    for g in 0..4 {
        for i in 0..4 {
            s[g * 4 + i] = v[g * 8 + i] + v[g * 8 + 4 + i];
        }
    }
    let mut n = 16;
    while n > 1 {
        for i in 0..n / 2 {
            s[i] = s[2 * i] + s[2 * i + 1];
        }
        n /= 2;
    }
    s[0] + 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grouped_fold_is_the_fold_of_the_law() {
        let lanes: [f32; 32] = std::array::from_fn(|i| ((i * 7919 % 613) as f32 - 300.0) * 1.37e-3);
        let grouped: [f32; 32] = std::array::from_fn(|i| {
            let lane = (0..8).find(|&l| POSITION[l] == i % 8).expect("a permutation");
            lanes[i / 8 * 8 + lane]
        });
        let want = castiron_num::dot::fold32(lanes).to_bits();
        assert_eq!(fold_groups(&grouped).to_bits(), want);
        #[cfg(target_arch = "x86_64")]
        if crate::Level::present().len() > 2 {
            let four = [[-0.0; 32], grouped, [1.0; 32], grouped];
            // SAFETY: a level above the portable one was found, so AVX2 is there.
            let got = unsafe { x86::Avx2::fold(&four) }.map(f32::to_bits);
            assert_eq!(got, [0, want, 32.0f32.to_bits(), want]);
        }
    }
}
