//! The bit model of bf16 matrix products on Hopper (`mma.sync m16n8k16` and `wgmma m64n8k16`, f32 accumulator).
//!
//! Measured on an H200 (section 1 of the law): one fused step takes 16 products and the accumulator, aligns all
//! to the largest exponent, keeps 25 fraction bits of each magnitude (truncating), adds exactly and rounds
//! toward zero to f32. A product's exponent is the *sum of its factors'* exponents; the product itself, in
//! [1, 4), is not normalised first.
//!
//! What the measurement did not cover, and this model only *assumes* (class unverified until probed):
//! * a zero product or accumulator takes no part in finding the largest exponent; an exact zero sum is +0,
//!   whatever the signs of the zeros that went in;
//! * a subnormal operand has the exponent of the smallest normal number and no hidden bit (nothing is flushed);
//!   subnormal results are kept, truncated toward zero, with their sign even when nothing is left;
//! * a result of 2^128 or more becomes infinity;
//! * a NaN operand, `inf * 0`, or infinities of both signs give the canonical NaN; else an infinity wins.

/// Elements of one fused step.
pub const STEP: usize = 16;

/// Fraction bits kept of each term after alignment.
const KEPT: u32 = 25;

/// Rows and columns of an FP8 weight block with one scale.
pub const BLOCK: usize = 128;

/// The exponent of a zero term: below any other, so it never leads the alignment.
const ZERO_EXPONENT: i32 = -10_000;

/// Mantissa (with the hidden bit) and unbiased exponent of an f32's bits; a zero has mantissa 0.
#[inline(always)]
fn split(bits: u32) -> (u32, i32) {
    let field = (bits >> 23) & 0xFF;
    let hidden = if field == 0 { 0 } else { 0x80_0000 };
    (bits & 0x7F_FFFF | hidden, field.max(1) as i32 - 127)
}

/// A signed mantissa with `KEPT` fraction bits (magnitude below 2^27) and the exponent it aligns by.
#[inline(always)]
fn term(negative: bool, mantissa: u32, exponent: i32) -> (i32, i32) {
    let signed = if negative { -(mantissa as i32) } else { mantissa as i32 };
    (signed, if mantissa == 0 { ZERO_EXPONENT } else { exponent })
}

#[inline(always)]
fn product_term(a: u16, b: u16) -> (i32, i32) {
    let (ma, ea) = split(u32::from(a) << 16);
    let (mb, eb) = split(u32::from(b) << 16);
    // Both mantissas are multiples of 2^16: 7 + 7 fraction bits become KEPT.
    term((a ^ b) & 0x8000 != 0, ((ma >> 16) * (mb >> 16)) << (KEPT - 14), ea + eb)
}

/// A term shifted down to the largest exponent, its magnitude truncated.
#[inline(always)]
fn align(mantissa: i32, exponent: i32, largest: i32) -> i32 {
    let kept = (mantissa.unsigned_abs() >> (largest - exponent).min(31)) as i32;
    if mantissa < 0 { -kept } else { kept }
}

/// One fused step: `c + sum a[i] * b[i]` as a Hopper tensor core computes it (`a`, `b`: bfloat16 bits).
#[inline(always)]
pub fn mma_k16(a: &[u16; STEP], b: &[u16; STEP], c: f32) -> f32 {
    let special = |v: u16| v & 0x7F80 == 0x7F80;
    if a.iter().zip(b).fold(!c.is_finite(), |any, (&x, &y)| any | special(x) | special(y)) {
        return special_sum(a, b, c);
    }
    let (mut mantissas, mut exponents) = ([0; STEP], [0; STEP]);
    for i in 0..STEP {
        (mantissas[i], exponents[i]) = product_term(a[i], b[i]);
    }
    let (c_mantissa, c_exponent) = split(c.to_bits());
    let (c_mantissa, c_exponent) = term(c.is_sign_negative(), c_mantissa << (KEPT - 23), c_exponent);
    let largest = exponents.iter().fold(c_exponent, |m, &e| m.max(e));
    // 16 products of at most 255^2 * 2^11 stay below 2^31.
    let products: i32 = mantissas.iter().zip(&exponents).map(|(&m, &e)| align(m, e, largest)).sum();
    let sum = i64::from(products) + i64::from(align(c_mantissa, c_exponent, largest));
    round_toward_zero(sum, largest - KEPT as i32)
}

/// The sum when an operand is infinite or NaN: IEEE's answer, NaN canonical (assumed, not probed).
#[cold]
fn special_sum(a: &[u16; STEP], b: &[u16; STEP], c: f32) -> f32 {
    let value = crate::bf16::from_bits;
    let (mut plus, mut minus, mut nan) = (c == f32::INFINITY, c == f32::NEG_INFINITY, c.is_nan());
    for (&x, &y) in a.iter().zip(b) {
        let (x, y) = (value(x), value(y));
        if x.is_finite() && y.is_finite() {
            continue;
        }
        let product = x * y;
        nan |= product.is_nan();
        plus |= product == f32::INFINITY;
        minus |= product == f32::NEG_INFINITY;
    }
    match (nan || plus && minus, plus) {
        (true, _) => f32::NAN,
        (false, true) => f32::INFINITY,
        (false, false) => f32::NEG_INFINITY,
    }
}

/// `sum * 2^scale` rounded toward zero to f32.
#[inline(always)]
fn round_toward_zero(sum: i64, scale: i32) -> f32 {
    if sum == 0 {
        return 0.0;
    }
    let magnitude = sum.unsigned_abs();
    let exponent = scale + 63 - magnitude.leading_zeros() as i32;
    let sign = if sum < 0 { 0x8000_0000 } else { 0 };
    if exponent > 127 {
        return f32::from_bits(sign | f32::INFINITY.to_bits());
    }
    // The weight of the last bit of the result, and how many bits of the sum lie below it.
    let quantum = exponent.max(-126) - 23;
    let drop = quantum - scale;
    let mantissa = if drop >= 64 {
        0
    } else if drop >= 0 {
        magnitude >> drop
    } else {
        magnitude << -drop
    };
    // A normal mantissa carries its hidden bit into the exponent field.
    let field = (exponent.max(-126) + 126) as u32;
    f32::from_bits(sign | ((field << 23) + mantissa as u32))
}

/// The law's S: into how many parts K is cut for a logical (N, K).
///
/// 1 for N >= 8192, 4 for 1024..=8191, 16 below. K does not matter today; it is part of the key so that an
/// extension of the table need not touch the callers.
pub fn split_parts(n: usize, _k: usize) -> usize {
    match n {
        8192.. => 1,
        1024.. => 4,
        _ => 16,
    }
}

/// The first of `parts` cuts of `0..total`: part `p` is `cut(p)..cut(p + 1)`.
fn cut(p: usize, total: usize, parts: usize) -> usize {
    p * total / parts
}

/// Up to 16 elements as a step, zero-padded.
fn step(values: &[u16]) -> [u16; STEP] {
    let mut padded = [0; STEP];
    padded[..values.len()].copy_from_slice(values);
    padded
}

/// A chain of fused steps in rising k from +0.
#[inline(always)]
fn chain(w: &[u16], x: &[u16]) -> f32 {
    let ((ws, w_rest), (xs, x_rest)) = (w.as_chunks(), x.as_chunks());
    let acc = ws.iter().zip(xs).fold(0.0, |acc, (a, b)| mma_k16(a, b, acc));
    if w_rest.is_empty() { acc } else { mma_k16(&step(w_rest), &step(x_rest), acc) }
}

/// The native dot product `mma16` of the law (`w`, `x`: bfloat16 bits, `[K]`).
///
/// K (the logical one: do not pad) is cut into `split_parts(n_logical, K)` parts of whole steps, part `p` being
/// steps `[p * n / S, (p + 1) * n / S)`; each part is a chain from +0, and the parts are added in rising `p`
/// from +0 with IEEE additions. An empty part adds +0.
///
/// # Panics
/// When the lengths differ.
#[inline(always)]
pub fn mma16(w: &[u16], x: &[u16], n_logical: usize) -> f32 {
    assert_eq!(w.len(), x.len(), "operands of a dot product have one length");
    let (steps, parts) = (w.len().div_ceil(STEP), split_parts(n_logical, w.len()));
    let bound = |p| (cut(p, steps, parts) * STEP).min(w.len());
    (0..parts).fold(0.0, |acc, p| acc + chain(&w[bound(p)..bound(p + 1)], &x[bound(p)..bound(p + 1)]))
}

/// `mma16` over FP8 block weights: `codes` E4M3 `[K]` of one row, `scales` one per 128 of K, `x` bfloat16 `[K]`.
///
/// A chain from +0 for every 128-block, then `acc = fma(block, scale, acc)`; parts (as in [`mma16`], counted in
/// blocks) start from +0 and are added in rising order.
///
/// # Panics
/// When the lengths do not agree.
#[inline(always)]
pub fn mma16_fp8_block(codes: &[u8], scales: &[f32], x: &[u16], n_logical: usize) -> f32 {
    let blocks = codes.len().div_ceil(BLOCK);
    assert_eq!((codes.len(), scales.len()), (x.len(), blocks), "one scale per block of 128");
    let parts = split_parts(n_logical, codes.len());
    let block = |acc: f32, b: usize| {
        let range = b * BLOCK..((b + 1) * BLOCK).min(x.len());
        // A code has at most four significant bits, so its bfloat16 is exact.
        let w: Vec<u16> =
            codes[range.clone()].iter().map(|&c| crate::bf16::to_bits(crate::fp8::decode(c))).collect();
        chain(&w, &x[range]).mul_add(scales[b], acc)
    };
    (0..parts).fold(0.0, |acc, p| acc + (cut(p, blocks, parts)..cut(p + 1, blocks, parts)).fold(0.0, block))
}
