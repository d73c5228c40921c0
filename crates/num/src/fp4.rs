//! FP4 E2M1: sign, 2 exponent bits (bias 1), 1 fraction bit; values 0, 0.5, 1, 1.5, 2, 3, 4, 6.
//!
//! No infinity and no NaN. Source: OCP Microscaling Formats (MX) v1.0.

/// The largest magnitude.
pub const MAX: f32 = 6.0;

const HALVES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Upper ends of the codes 0..=6; an end belongs to the even code of its two neighbours.
const ENDS: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];

/// The value of the low four bits of `code`, exact; `8` is negative zero.
#[inline]
pub fn decode(code: u8) -> f32 {
    let magnitude = f32::from(HALVES[usize::from(code & 7)]) * 0.5;
    if code & 8 != 0 { -magnitude } else { magnitude }
}

/// Twice the value of the low four bits of `code`: an integer in -12..=12 (negative zero is 0).
#[inline(always)]
pub fn halves(code: u8) -> i8 {
    HALVES[usize::from(code & 15)]
}

/// Rounds `x` to E2M1, to nearest, ties to the even code, saturating at 6; returns a code below 16.
///
/// Whatever rounds to zero gives `0`: no code `8` is made (its products would be the same). NaN gives `7` (+6), as the PTX conversion does; callers flag a row that
/// is not finite before they come here.
#[inline]
pub fn encode(x: f32) -> u8 {
    if x.is_nan() {
        return 7;
    }
    let magnitude = x.abs();
    let code = ENDS.iter().enumerate().map(|(i, &end)| above(magnitude, end, i)).sum::<u8>();
    if x < 0.0 && code != 0 { code | 8 } else { code }
}

/// 1 when `magnitude` lies beyond the upper end of code `i`; a tie moves up from an odd code only.
#[inline(always)]
fn above(magnitude: f32, end: f32, i: usize) -> u8 {
    u8::from(if i & 1 == 1 { magnitude >= end } else { magnitude > end })
}
