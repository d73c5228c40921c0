//! FP8 E4M3FN: sign, 4 exponent bits (bias 7), 3 fraction bits; no infinity, NaN is `0x7F` and `0xFF`.
//!
//! Largest finite value 448 (`0x7E`), smallest normal 2^-6, subnormal step 2^-9. Source: "FP8 Formats for Deep
//! Learning" (Micikevicius et al., 2022), as used by OCP FP8.

/// The largest finite magnitude.
pub const MAX: f32 = 448.0;

/// 2^-9, the subnormal step and the unit of [`scale_units`].
const STEP: f32 = 1.0 / 512.0;

/// The value of every code; both NaN codes decode to the canonical f32 NaN `0x7FC0_0000`.
pub const DECODE: [f32; 256] = decode_table();

/// The magnitude of a code without its sign, in units of 2^-9 (at most 480 * 512 for the NaN pattern).
const fn magnitude_units(code: u8) -> u32 {
    let exponent = ((code >> 3) & 15) as u32;
    let fraction = (code & 7) as u32;
    if exponent == 0 { fraction } else { (8 + fraction) << (exponent - 1) }
}

const fn decode_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let magnitude = magnitude_units(code as u8) as f32 * STEP;
        table[code] = if code & 0x7F == 0x7F {
            f32::from_bits(0x7FC0_0000)
        } else if code & 0x80 != 0 {
            -magnitude
        } else {
            magnitude
        };
        code += 1;
    }
    table
}

/// The value of a code, exact; NaN for `0x7F` and `0xFF`.
#[inline(always)]
pub fn decode(code: u8) -> f32 {
    DECODE[usize::from(code)]
}

/// Rounds `x` to E4M3FN, to nearest, ties to even, saturating at 448.
///
/// The sign is always kept: `-0` and negative values that round to zero give `0x80`, infinities give
/// `0x7E | sign`, NaN gives `0x7F | sign`.
#[inline]
pub fn encode(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    let magnitude = bits & 0x7FFF_FFFF;
    if magnitude > 0x7F80_0000 {
        return 0x7F | sign;
    }
    if magnitude >= MAX.to_bits() {
        return 0x7E | sign;
    }
    // 2^-6 is the smallest normal: exponent field 121 becomes field 1.
    let code = if magnitude >= 121 << 23 {
        let half = 0x7_FFFF + ((magnitude >> 20) & 1);
        (((magnitude + half) >> 20) - (120 << 3)) as u8
    } else {
        // The sum is a multiple of 2^-9, rounded by the hardware: 16384 has an ulp of 2^-9.
        let shifted = f32::from_bits(magnitude) + 16384.0;
        (shifted.to_bits() - 16384f32.to_bits()) as u8
    };
    code | sign
}

/// A block scale as an integer count of 2^-9; at most 229,376 (that is 448).
///
/// `None` for NaN and for a negative value, which no block scale may be; negative zero is zero.
#[inline]
pub fn scale_units(code: u8) -> Option<u32> {
    match code {
        0x80 => Some(0),
        0..=0x7E => Some(magnitude_units(code)),
        _ => None,
    }
}
