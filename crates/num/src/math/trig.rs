//! Sine and cosine over the whole domain, with one integer argument reduction.

use super::{fast_two_sum, pow2};
use std::f32::consts::FRAC_PI_4;

/// pi / 2 rounded, and what is missing.
const PI_2: f32 = std::f32::consts::FRAC_PI_2;
const PI_2_LO: f32 = -4.371_139e-8;

/// 32 zero bits, then the first 224 bits of 2 / pi.
const TWO_OVER_PI: [u32; 8] =
    [0, 0xA2F9_836E, 0x4E44_1529, 0xFC27_57D1, 0xF534_DDC0, 0xDB62_9599, 0x3C43_9041, 0xFE51_63AB];

/// (sin r - r) / r^3 in z = r^2 on |r| <= pi/4: minimax, error below 2^-28.1 of sin r.
const SIN: [f32; 4] = [-0.166_666_67, 0.008_333_329, -0.000_198_393_35, 2.718_308e-6];

/// -1/6 - `SIN[0]`.
const SIN_0_LO: f32 = 4.967_054e-9;

/// (cos r - 1 + r^2/2) / r^4 in z = r^2 on |r| <= pi/4: minimax, error below 2^-30.9.
const COS: [f32; 4] = [0.041_666_668, -0.001_388_888_3, 2.479_952_1e-5, -2.721_031e-7];

/// A magnitude beyond pi/4 as `quadrant * pi/2 + (r + r_lo)`, |r| <= pi/4 (quadrant modulo 4).
///
/// Payne and Hanek with integers: x is `m * 2^e`; the 96 bits of 2/pi from the weight of two quadrants down are
/// multiplied by the 24-bit m, and the top 64 bits of the product hold 2 quadrant bits and 62 fraction bits.
/// No f32 comes nearer to a multiple of pi/2 than about 2^-30 of a quadrant, so 32 good bits always remain.
#[inline(always)]
fn reduce(magnitude: f32) -> (u32, f32, f32) {
    let bits = magnitude.to_bits();
    let m = (bits & 0x7F_FFFF) | 0x80_0000;
    // x > 1/2 has an exponent field of 126 or more, so the first bit wanted is number 6 or more.
    let first = (bits >> 23) - 120;
    let (word, shift) = ((first >> 5) as usize, first & 31);
    let window = |i: usize| {
        let pair = u64::from(TWO_OVER_PI[word + i]) << 32 | u64::from(TWO_OVER_PI[word + i + 1]);
        ((pair << shift) >> 32) as u32
    };
    let high = u64::from(m.wrapping_mul(window(0))) << 32;
    let middle = u64::from(m) * u64::from(window(1));
    let low = (u64::from(m) * u64::from(window(2))) >> 32;
    let product = high.wrapping_add(middle).wrapping_add(low);
    let quadrant = (product.wrapping_add(1 << 61) >> 62) as u32;
    let fraction = product.wrapping_sub(u64::from(quadrant) << 62) as i64;
    let (r, r_lo) = quadrants_to_radians(fraction.unsigned_abs());
    if fraction < 0 { (quadrant, -r, -r_lo) } else { (quadrant, r, r_lo) }
}

/// `n * 2^-62` quadrants in radians: 48 significant bits of n, times pi/2, as a leading part and a tail.
#[inline(always)]
fn quadrants_to_radians(n: u64) -> (f32, f32) {
    let n = n.max(1);
    let zeros = n.leading_zeros();
    let normalised = n << zeros;
    let exponent = -22 - zeros as i32;
    let hi = (normalised >> 40) as f32 * pow2(exponent);
    let lo = ((normalised >> 16) & 0xFF_FFFF) as f32 * pow2(exponent - 24);
    let r = hi * PI_2;
    let r_lo = hi.mul_add(PI_2, -r) + hi.mul_add(PI_2_LO, lo * PI_2);
    fast_two_sum(r, r_lo)
}

/// sin(r + r_lo) for |r| <= pi/4.
#[inline(always)]
fn sin_kernel(r: f32, r_lo: f32) -> f32 {
    let z = r * r;
    let z_lo = r.mul_add(r, -z);
    let cube = z * r;
    let cube_lo = r.mul_add(z_lo, z.mul_add(r, -cube));
    // Everything after r - r^3 / 6, then that.
    let p = SIN[3].mul_add(z, SIN[2]).mul_add(z, SIN[1]) * z;
    let correction = (-0.5 * z).mul_add(r_lo, r_lo);
    let rest = cube.mul_add(p + SIN_0_LO, SIN[0].mul_add(cube_lo, correction));
    r + cube.mul_add(SIN[0], rest)
}

/// cos(r + r_lo) for |r| <= pi/4.
#[inline(always)]
fn cos_kernel(r: f32, r_lo: f32) -> f32 {
    let z = r * r;
    let z_lo = r.mul_add(r, -z);
    let p = COS[3].mul_add(z, COS[2]).mul_add(z, COS[1]).mul_add(z, COS[0]);
    let (c, c_lo) = fast_two_sum(1.0, -0.5 * z);
    // -r_lo sin r, to the second term.
    let correction = (r * r_lo) * SIN[0].mul_add(-z, -1.0);
    c + (c_lo + (z * z).mul_add(p, (-0.5f32).mul_add(z_lo, correction)))
}

/// `(sin x, cos x)` over the whole domain; infinities and NaN give NaN, `sin(-0)` is -0.
#[inline]
pub fn sin_cos(x: f32) -> (f32, f32) {
    if !x.is_finite() {
        return (f32::NAN, f32::NAN);
    }
    let magnitude = x.abs();
    let (quadrant, r, r_lo) = if magnitude > FRAC_PI_4 { reduce(magnitude) } else { (0, magnitude, 0.0) };
    let (s, c) = (sin_kernel(r, r_lo), cos_kernel(r, r_lo));
    let (s, c) = if quadrant & 1 == 1 { (c, s) } else { (s, c) };
    let s = if (quadrant & 2 != 0) != x.is_sign_negative() { -s } else { s };
    let c = if (quadrant + 1) & 2 != 0 { -c } else { c };
    (s, c)
}

/// sin x; see [`sin_cos`].
///
/// Measured error: at most 0.58 ulp over all inputs.
#[inline]
pub fn sin(x: f32) -> f32 {
    sin_cos(x).0
}

/// cos x; see [`sin_cos`].
///
/// Measured error: at most 0.58 ulp over all inputs.
#[inline]
pub fn cos(x: f32) -> f32 {
    sin_cos(x).1
}
