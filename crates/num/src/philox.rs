//! Philox4x32-10 and the sampling noise of the law (section 4a, "Sampling").
//!
//! Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11); the tests hold the
//! known answers published with Random123.

use crate::math;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// 2^-33, exact.
const TWO_M33: f32 = 1.0 / 8_589_934_592.0;

/// Ten rounds of Philox4x32: four random words for a counter and a key.
#[inline]
pub fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// An exponential variate: `E = -ln((u + 0.5) * 2^-32)`, always positive and finite.
///
/// With the 33-bit odd `v = 2u + 1`: below one half `-ln(RNE(v) * 2^-33)`, else
/// `-ln1p(-(RNE(2^33 - v) * 2^-33))`; the scalings are exact, so both tails keep their relative precision. Measured error, rounding of `v` included: at most 1.19 ulp
/// (every 97th word).
#[inline]
pub fn uniform_neg_log(u: u32) -> f32 {
    let v = 2 * u64::from(u) + 1;
    if u < 1 << 31 {
        -math::ln(v as f32 * TWO_M33)
    } else {
        -math::ln_1p(-(((1u64 << 33) - v) as f32 * TWO_M33))
    }
}

/// A Gumbel variate: `-ln(E)`, between -3.14 and 22.88.
///
/// Measured error: at most 2.3 ulp, an ulp being at least 2^-24 (every 97th word).
#[inline]
pub fn gumbel(u: u32) -> f32 {
    -math::ln(uniform_neg_log(u))
}
