//! bfloat16: sign, 8 exponent bits, 7 fraction bits; the upper half of a binary32.
//!
//! The one definition of "store" (section 6 of the law): integer round-to-nearest-even, NaN canonical.

/// The only NaN that [`to_bits`] returns.
pub const NAN_BITS: u16 = 0x7FC0;

/// Rounds `x` to bfloat16, to nearest, ties to even.
///
/// Values above the largest finite bfloat16 round to infinity as IEEE asks; subnormals are kept; every NaN
/// becomes [`NAN_BITS`].
#[inline(always)]
pub fn to_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if bits & 0x7FFF_FFFF > 0x7F80_0000 {
        return NAN_BITS;
    }
    let half = 0x7FFF + ((bits >> 16) & 1);
    ((bits + half) >> 16) as u16
}

/// The value of a bfloat16, exact; NaN payloads are kept.
#[inline(always)]
pub fn from_bits(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// `x` rounded to bfloat16 and widened again: `store` of section 5 of the law.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    from_bits(to_bits(x))
}
