//! Natural logarithms.

use super::{LN2_HI, LN2_LO, fast_two_sum, pow2, two_sum};

/// The bits of sqrt(1/2): mantissas are taken from [sqrt(1/2), sqrt(2)).
const SQRT_HALF_BITS: u32 = 0x3F35_04F3;

/// (ln(1+f) - f + f^2/2) / f^3 on [sqrt(1/2) - 1, sqrt(2) - 1]: minimax, error below 2^-29.9 of the logarithm.
const POLY: [f32; 9] = [
    0.333_333_1,
    -0.249_999_87,
    0.200_022_18,
    -0.166_692_47,
    0.142_188_01,
    -0.123_844_76,
    0.118_721_6,
    -0.117_888_43,
    0.069_159_284,
];

/// ln(1 + f + f_lo) + e ln 2 as a leading part and a tail.
///
/// For f in [sqrt(1/2) - 1, sqrt(2) - 1], f_lo below half an ulp of 1, |e| <= 150.
#[inline(always)]
pub(super) fn ln_core(f: f32, f_lo: f32, e: i32) -> (f32, f32) {
    let square = f * f;
    let square_lo = f.mul_add(f, -square);
    let mut p = POLY[8];
    for i in (0..8).rev() {
        p = p.mul_add(f, POLY[i]);
    }
    // f_lo / (1 + f), near enough: (1 - f)(1 + f^2) f_lo.
    let correction = f_lo * (1.0 - f) * (1.0 + square);
    let tail = (square * f).mul_add(p, (-0.5f32).mul_add(square_lo, correction));
    let ef = e as f32;
    let (s, s_lo) = fast_two_sum(f, -0.5 * square);
    let (u, u_lo) = fast_two_sum(ef * LN2_HI, s);
    (u, u_lo + (s_lo + ef.mul_add(LN2_LO, tail)))
}

/// Splits a positive normal number's bits: `(1 + f) * 2^e`, f exact.
#[inline(always)]
fn reduce(bits: u32) -> (f32, i32) {
    let offset = bits.wrapping_sub(SQRT_HALF_BITS);
    let mantissa = f32::from_bits((offset & 0x7F_FFFF) + SQRT_HALF_BITS);
    (mantissa - 1.0, (offset as i32) >> 23)
}

/// ln x.
///
/// Subnormal x is right (and read as an integer, so flushing cannot hurt it); zeros of both signs give -inf,
/// negative x gives NaN, `ln(1)` is +0.
///
/// Measured error: at most 0.63 ulp over all inputs.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    if x.is_nan() || bits > 0x8000_0000 {
        return f32::NAN;
    }
    if bits & 0x7FFF_FFFF == 0 {
        return f32::NEG_INFINITY;
    }
    if x == f32::INFINITY {
        return x;
    }
    let (bits, e0) = if bits < 0x0080_0000 { ((bits as f32).to_bits(), -149) } else { (bits, 0) };
    let (f, e) = reduce(bits);
    let (y, y_lo) = ln_core(f, 0.0, e + e0);
    y + y_lo
}

/// ln(1 + x).
///
/// -1 gives -inf, smaller x NaN; `|x| < 2^-25` gives x.
///
/// Measured error: at most 0.66 ulp over all inputs.
#[inline(always)]
pub fn ln_1p(x: f32) -> f32 {
    if x.is_nan() || x < -1.0 {
        return f32::NAN;
    }
    if x == -1.0 {
        return f32::NEG_INFINITY;
    }
    if x == f32::INFINITY || x.abs() < pow2(-25) {
        return x;
    }
    let (f, f_lo, e) = if x > -0.2928 && x < 0.4142 {
        (x, 0.0, 0)
    } else {
        let (u, u_lo) = two_sum(1.0, x);
        let (f, e) = reduce(u.to_bits());
        // Beyond 2^64 the lost 1 cannot be seen; the limit keeps the factor normal.
        (f, u_lo * pow2(-e.min(64)), e)
    };
    let (y, y_lo) = ln_core(f, f_lo, e);
    y + y_lo
}
