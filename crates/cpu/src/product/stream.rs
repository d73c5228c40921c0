//! One row: the weights are read once, decoded in registers, and used once.

use castiron_num::dot::STRIPE;

use super::layout::Layout;
use crate::level::Set;
use crate::pool::{Columns, Pool};
use crate::{Level, Matrix, Storage};

/// Whether this level streams this storage.
pub(super) fn can(level: Level, w: &Matrix) -> bool {
    match level.0 {
        #[cfg(target_arch = "x86_64")]
        Set::Avx2 | Set::Avx512 => matches!(w.storage(), Storage::Bf16(_)),
        Set::Law | Set::Portable => false,
    }
}

/// Outputs handed to a thread at a time: whole cache lines of `y`.
const GRAIN: usize = 16;

/// `y = W x` for one row `x`.
pub(super) fn product(level: Level, pool: &Pool, w: &Matrix, x: &[f32], y: &Columns<'_>) {
    // AVX-512 machines stream with 8 lanes too: the loop waits for memory.
    let layout = Layout::new(w.cols(), 8);
    let mut packed = vec![0.0; layout.len];
    super::tile::pack(level, &layout, x, &mut packed, 8);
    let Storage::Bf16(codes) = w.storage() else { return };
    let codes = (**codes).as_ref();
    pool.split(w.rows(), GRAIN, |range| {
        for n in range {
            let row = &codes[n * w.cols() * 2..(n + 1) * w.cols() * 2];
            let value = match level.0 {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: these levels are only made where AVX2 and FMA were found.
                Set::Avx2 | Set::Avx512 => unsafe { x86::dot_bf16(row, &packed, &layout) },
                Set::Law | Set::Portable => return,
            };
            // SAFETY: ranges are disjoint, so column n is this thread's.
            unsafe { y.set(0, n, value) };
        }
    });
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::layout::x86::steps_of_bf16;
    use super::super::layout::{GROUP_ELEMENTS, Layout};
    use super::STRIPE;
    use crate::simd::fold_groups;

    /// Bytes of a group of bf16 values.
    const GROUP_BYTES: usize = GROUP_ELEMENTS * 2;

    /// `dot32` of a bf16 row (little-endian bytes) with a packed row.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn dot_bf16(row: &[u8], x: &[f32], layout: &Layout) -> f32 {
        assert!(row.len() == layout.k * 2 && x.len() == layout.len);
        let mut acc = [_mm256_setzero_ps(); 4];
        let stripes = layout.k / STRIPE;
        for s in 0..stripes {
            for (g, acc) in acc.iter_mut().enumerate() {
                // SAFETY: stripe s is whole, so all four groups are inside `row`, and each part has its steps.
                unsafe {
                    let from = row.as_ptr().add((s * 4 + g) * GROUP_BYTES);
                    *acc = group(from, x.as_ptr().add(layout.parts[g].0 + s * GROUP_ELEMENTS), *acc);
                }
            }
        }
        tail(row, x, layout, stripes, &mut acc);
        let mut lanes = [0.0f32; 32];
        for (lanes, acc) in lanes.chunks_exact_mut(8).zip(acc) {
            // SAFETY: 8 values are written to 8 values.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), acc) };
        }
        fold_groups(&lanes)
    }

    /// The last, shorter stripe: its groups from a zero-padded copy.
    #[target_feature(enable = "avx2,fma")]
    fn tail(row: &[u8], x: &[f32], layout: &Layout, stripes: usize, acc: &mut [__m256; 4]) {
        for (g, rest) in row[stripes * STRIPE * 2..].chunks(GROUP_BYTES).enumerate() {
            let mut padded = [0u8; GROUP_BYTES];
            padded[..rest.len()].copy_from_slice(rest);
            // SAFETY: the copy is a whole group, and part g has steps for it because it has elements there.
            unsafe {
                acc[g] = group(
                    padded.as_ptr(),
                    x.as_ptr().add(layout.parts[g].0 + stripes * GROUP_ELEMENTS),
                    acc[g],
                );
            }
        }
    }

    /// Eight steps of one group.
    ///
    /// # Safety
    /// `from` is valid for 128 bytes, `x` for 64 values.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn group(from: *const u8, x: *const f32, mut acc: __m256) -> __m256 {
        // SAFETY: as the caller promises.
        unsafe {
            for (j, w) in steps_of_bf16(from).into_iter().enumerate() {
                acc = _mm256_fmadd_ps(w, _mm256_loadu_ps(x.add(8 * j)), acc);
            }
        }
        acc
    }
}
