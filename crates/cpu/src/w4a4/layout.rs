//! How operands lie for the packed forms, and why no step overflows.
//!
//! A *span* is 8 groups (128 elements) in 8 lanes of 32 bits, one lane a group: byte `j` of lane `l` in vector `q`
//! holds one element of the lane's group, so that byte products and pairwise sums stay inside the lane. The
//! vectors of a span follow each other closely: two loads of 32 bytes in one cycle need different halves of a
//! cache line, which neighbours have.
//!
//! With weight halves `w` and activation halves `x` (both -12..=12) and scales in 2^-9 units, a group's term is
//! `(sum w * x) * s_x * s_w`. A scale is `M << e` with `M <= 15`, `e <= 14`.
//! - Weights are stored as `w + 12` (0..=24), for the instruction that multiplies unsigned by signed bytes.
//!   What the 12 adds is known from `x` alone: `correction`.
//! - Of a row's exponents the smallest is taken out and shifted back into the finished sum; `e` below is what
//!   is left. In an activation row `min(e, 3)` of it goes into the bytes (`|x| <= 96`), the rest into
//!   `multiplier` (at most `15 << 11`): both fit for every scale, so that no shift is left in the loop.
//! - Pair of byte products: `2 * 24 * 96 = 4608`; four of them in an i16: 18,432. After the correction a half
//!   lane is at most 18,432, and the two together `2304 << 3`: times the multiplier below `2304 * 229,376 < 2^29`.
//! - *Wide* rows multiply that by `s_w` into i64. *Narrow* pairs of rows, whose exponents spread little together
//!   (`Exponents::terms`), multiply both scales in i16 and add terms in i32 for as long as they fit.

use castiron_num::fp8;

use crate::matrix::GROUP;

/// Elements of a span.
pub(super) const SPAN: usize = 128;
/// Groups of a span.
pub(super) const LANES: usize = SPAN / GROUP;
/// Vectors of a span: quarters of every group.
pub(super) const QUARTERS: usize = 4;
/// What weights are raised by.
pub(super) const BIAS: i16 = 12;

/// The lane of each group of a span, and the group of each lane. The order in which `vshufps` leaves the
/// groups of 64 code bytes.
pub(super) const LANE: [usize; LANES] = [0, 1, 4, 5, 2, 3, 6, 7];

/// The exponents of a row's scales that are not zero.
#[derive(Clone, Copy, Default)]
pub(super) struct Exponents {
    /// The smallest.
    pub shift: u8,
    /// The largest, less the smallest.
    pub range: u8,
}

impl Exponents {
    /// Of scale codes.
    #[inline(always)]
    pub fn of(codes: &[u8]) -> Self {
        Self::between(Self::bounds(codes))
    }

    /// The smallest code but zero, less one, and the largest. Codes that are no scale count as zero, as the law
    /// has it.
    #[inline(always)]
    pub fn bounds(codes: &[u8]) -> (u8, u8) {
        codes.iter().fold((0xFF, 0), |(low, high), &c| {
            let scale = if c < 0x7F { c } else { 0 };
            // Zero wraps to the largest: it is no minimum.
            (low.min(scale.wrapping_sub(1)), high.max(scale))
        })
    }

    /// Of a row with these [`Self::bounds`].
    #[inline(always)]
    pub fn between((low, high): (u8, u8)) -> Self {
        if high == 0 {
            return Self::default();
        }
        let shift = exponent(low + 1);
        Self { shift, range: exponent(high) - shift }
    }

    /// How many terms of a weight row with activation rows of range `x` may be added in an i32; `None` when the
    /// product of two scales may not fit an i16.
    ///
    /// A term is at most `2304 * 15 * 15 << ranges`; the product of scales is at most `15 * 15 << 7`, as 3 of the
    /// activations' exponent may lie in the bytes.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "the portable form adds in i64"))]
    #[inline(always)]
    pub fn terms(self, x: u8) -> Option<usize> {
        const TERM: usize = 2304 * 15 * 15;
        (x.max(3) + self.range <= 10).then(|| (i32::MAX as usize / TERM) >> (x + self.range))
    }

    /// The largest range of a weight row in a narrow pair.
    pub const NARROW: u8 = 7;

    /// Whether a weight row's scales are stored narrow.
    #[inline(always)]
    pub fn narrow(self) -> bool {
        self.range <= Self::NARROW
    }
}

/// `e` of a scale code below `0x7F`.
#[inline(always)]
fn exponent(code: u8) -> u8 {
    (code >> 3).max(1) - 1
}

/// A span of one activation row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Inputs {
    /// `x << min(e, 3)`.
    pub codes: [[i8; 32]; QUARTERS],
    /// `M << (e - min(e, 3))`, once for each half of the lane.
    pub multiplier: [[i16; 2]; LANES],
    /// `-12 * sum (x << min(e, 3))` in the first half of the lane.
    pub correction: [[i16; 2]; LANES],
}

impl Inputs {
    /// Zeros, also past the end of a row: they add nothing, whatever the weights are.
    pub const ZERO: Self =
        Self { codes: [[0; 32]; QUARTERS], multiplier: [[0; 2]; LANES], correction: [[0; 2]; LANES] };

    /// Stores the halves of group `group` (0..8) with its scale code, in a row of `exponents`.
    #[inline(always)]
    pub fn set(&mut self, group: usize, halves: &[i8; GROUP], scale: u8, exponents: Exponents) {
        let (lane, shift) = (LANE[group], byte_shift(scale, exponents));
        let mut sum = 0;
        for i in 0..GROUP {
            let x = halves[i] << shift;
            self.codes[quarter(i)][4 * lane + byte(i)] = x;
            sum += i16::from(x);
        }
        self.multiplier[lane] = [multiplier(scale, exponents); 2];
        self.correction[lane] = [-BIAS * sum, 0];
    }
}

/// A span of one weight row.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Weights {
    /// `w + 12`.
    pub codes: [[u8; 32]; QUARTERS],
    /// `M << e` as an i16 in both halves of the lane in a narrow row, else `s_w`.
    pub scales: [u32; LANES],
}

impl Weights {
    /// Scratch before its first use.
    pub const ZERO: Self = Self { codes: [[0; 32]; QUARTERS], scales: [0; LANES] };
}

/// The vector that holds element `i` of a group: even and odd columns apart, as the two nibbles of a byte are.
#[inline(always)]
pub(super) fn quarter(i: usize) -> usize {
    i / 8 * 2 + i % 2
}

/// The place of element `i` of a group in its lane.
#[inline(always)]
pub(super) fn byte(i: usize) -> usize {
    i % 8 / 2
}

/// How much of the exponent of scale `code` lies in the bytes.
#[inline(always)]
pub(super) fn byte_shift(code: u8, exponents: Exponents) -> u8 {
    // A scale of zero has zeros, and may lie below the smallest exponent.
    exponent(code).saturating_sub(exponents.shift).min(3)
}

/// The rest of scale `code`.
#[inline(always)]
pub(super) fn multiplier(code: u8, exponents: Exponents) -> i16 {
    let units = fp8::scale_units(code).unwrap_or(0);
    (units >> (exponents.shift + byte_shift(code, exponents))) as i16
}

/// Element `i` of a packed row, with its group's scale code.
pub(super) fn half(row: &[Inputs], i: usize, scale: u8, exponents: Exponents) -> i8 {
    let (span, group) = (&row[i / SPAN], i % SPAN / GROUP);
    span.codes[quarter(i % GROUP)][4 * LANE[group] + byte(i % GROUP)] >> byte_shift(scale, exponents)
}
