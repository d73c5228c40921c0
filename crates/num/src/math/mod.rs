//! Elementary functions made of binary32 `+ - * /`, `fma` and integers: the same bytes on every target.
//!
//! No library function is called and no binary64 is used (except by [`inv_freq`], on the host, when a model is
//! opened). Each function works with a short tail beside its leading part and rounds once at the end. The
//! largest errors over **all** 2^32 inputs, in ulp of the correctly rounded binary32 result, are stated at each
//! function and in `docs/math-errors.md`; `xtask math-errors` measures them.
//!
//! NaN in, canonical NaN (`0x7FC0_0000`) out.

mod exp;
mod freq;
mod ln;
mod trig;

pub use exp::{exp, sigmoid, silu, softplus};
pub use freq::inv_freq;
pub use ln::{ln, ln_1p};
pub use trig::{cos, sin, sin_cos};

/// 2^e for a normal result (`-126 <= e <= 127`).
#[inline(always)]
fn pow2(e: i32) -> f32 {
    f32::from_bits(((127 + e) << 23) as u32)
}

/// `a + b` rounded, and the exact error; needs `|a| >= |b|` or `a == 0`.
#[inline(always)]
fn fast_two_sum(a: f32, b: f32) -> (f32, f32) {
    let s = a + b;
    (s, (a - s) + b)
}

/// `a + b` rounded, and the exact error, for any order of magnitudes.
#[inline(always)]
fn two_sum(a: f32, b: f32) -> (f32, f32) {
    let s = a + b;
    let t = s - a;
    (s, (a - (s - t)) + (b - t))
}

/// ln 2 to 15 bits, so that its product with an exponent is exact.
const LN2_HI: f32 = f32::from_bits(0x3F31_7200);

/// ln 2 - [`LN2_HI`].
const LN2_LO: f32 = 1.428_606_8e-6;
