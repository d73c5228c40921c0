//! NVFP4: groups of 16 E2M1 codes with one E4M3 scale each, and the exact integer dot of W4A4.
//!
//! Codes are handled as *halves* (twice the E2M1 value, -12..=12) and scales as counts of 2^-9, so that a
//! product of two codes and two scales is an integer count of 2^-20 and a whole row sums exactly in `i64`:
//! the result is the same for any order, tile or batch (class `Integer` of the law).

use crate::{fp4, fp8};

/// Elements that share one block scale.
pub const GROUP: usize = 16;

/// 2^-20, the unit of [`dot_exact`]: halves x halves x two scales in 2^-9 steps.
const UNIT: f32 = 1.0 / 1_048_576.0;

/// A quantiser met an infinity or a NaN; only the row it belongs to is in error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonFinite;

impl std::fmt::Display for NonFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a value to quantise to NVFP4 is not finite")
    }
}

impl std::error::Error for NonFinite {}

/// One row of activations in NVFP4, ready for [`dot_exact`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuantisedRow {
    /// Twice the E2M1 value of every element, `[K]`.
    pub codes: Vec<i8>,
    /// The E4M3 scale of every group as a count of 2^-9, `[K / 16]`.
    pub scales: Vec<u32>,
}

/// Quantises one group by the law's W4A4 rule and returns the E4M3 scale and the E2M1 codes (0..16).
///
/// `s = E4M3(min(448, (amax / 6) / A))`, `c = E2M1(clamp(x / (s * A), -6, 6))` with IEEE divisions; a scale (or
/// `s * A`) of zero gives zeros. `a` is the positive activation scale of the expert.
///
/// # Errors
/// [`NonFinite`] when an element is not finite, or `a` is not finite and positive.
#[inline]
pub fn quantise_group(x: &[f32; GROUP], a: f32) -> Result<(u8, [u8; GROUP]), NonFinite> {
    if !(a > 0.0 && a.is_finite() && x.iter().all(|v| v.is_finite())) {
        return Err(NonFinite);
    }
    let amax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let scale = fp8::encode(((amax / fp4::MAX) / a).min(fp8::MAX));
    let step = fp8::decode(scale) * a;
    if step == 0.0 {
        return Ok((scale, [0; GROUP]));
    }
    Ok((scale, x.map(|v| fp4::encode((v / step).clamp(-fp4::MAX, fp4::MAX)))))
}

/// Quantises a row of activations (`x`: `[K]`, K a multiple of 16) into `out`, replacing what it held.
///
/// # Errors
/// [`NonFinite`] as for [`quantise_group`]; `out` is then empty.
///
/// # Panics
/// When K is not a multiple of 16.
pub fn quantise_row(x: &[f32], a: f32, out: &mut QuantisedRow) -> Result<(), NonFinite> {
    let (groups, rest) = x.as_chunks::<GROUP>();
    assert!(rest.is_empty(), "a row in NVFP4 has whole groups of 16");
    out.codes.clear();
    out.scales.clear();
    for group in groups {
        let quantised = quantise_group(group, a);
        let Some((units, codes)) = quantised.ok().and_then(|(s, c)| Some((fp8::scale_units(s)?, c))) else {
            out.codes.clear();
            out.scales.clear();
            return Err(NonFinite);
        };
        out.scales.push(units);
        out.codes.extend(codes.map(fp4::halves));
    }
    Ok(())
}

/// Unpacks stored codes (`[K / 2]`, column 2i in the low nibble) into halves (`[K]`), appending to `out`.
pub fn unpack_halves(packed: &[u8], out: &mut Vec<i8>) {
    out.extend(packed.iter().flat_map(|&pair| [fp4::halves(pair), fp4::halves(pair >> 4)]));
}

/// A weight without its tensor scale: `e2m1(code) * e4m3(scale)`.
///
/// Exact: at most 6 significant bits, so the value is a bfloat16 too (W4A16 of the law).
#[inline]
pub fn dequantise(code: u8, scale: u8) -> f32 {
    fp4::decode(code) * fp8::decode(scale)
}

/// The exact dot of two NVFP4 rows in units of 2^-20, without their tensor scales.
///
/// `*_codes`: halves `[K]`; `*_scales`: counts of 2^-9 `[K / 16]`. Inside a group an `i32` sum (at most 2304),
/// times the scale of `x` still in `i32`, then one 32x32->64 multiply-add by the scale of `w`: 160 groups fit
/// 55 bits, and 65,536 groups still fit.
///
/// # Panics
/// When the lengths do not agree.
pub fn dot_exact(w_codes: &[i8], w_scales: &[u32], x_codes: &[i8], x_scales: &[u32]) -> i64 {
    assert_eq!(w_codes.len(), x_codes.len(), "operands of a dot product have one length");
    let groups = w_codes.len() / GROUP;
    assert_eq!(
        (w_codes.len() % GROUP, w_scales.len(), x_scales.len()),
        (0, groups, groups),
        "a scale per group"
    );
    let pairs = w_codes.chunks_exact(GROUP).zip(x_codes.chunks_exact(GROUP));
    pairs.zip(w_scales.iter().zip(x_scales)).map(|((w, x), (&sw, &sx))| group_dot(w, x, sw, sx)).sum()
}

/// One group's term of [`dot_exact`].
#[inline(always)]
fn group_dot(w: &[i8], x: &[i8], w_scale: u32, x_scale: u32) -> i64 {
    let dot: i32 = w.iter().zip(x).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum();
    i64::from(dot * x_scale as i32) * i64::from(w_scale)
}

/// Turns an exact sum into the product: `((RNE_f32(sum) * 2^-20) * a) * weight_scale_2`.
#[inline(always)]
pub fn finish(sum: i64, a: f32, weight_scale_2: f32) -> f32 {
    ((sum as f32 * UNIT) * a) * weight_scale_2
}
