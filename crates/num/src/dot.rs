//! `dot32`, the canonical portable dot product (sections 4 and 4a of the law).

/// Logical lanes of a dot product.
pub const LANES: usize = 32;

/// Elements of one stripe: every lane owns eight neighbours of it.
pub const STRIPE: usize = 256;

/// Neighbouring elements of a stripe that belong to one lane.
const RUN: usize = STRIPE / LANES;

/// `sum w[k] * x[k]` in the canonical order.
///
/// Lane `l` owns elements `8l..8l+8` of every 256-element stripe and adds them with `fma(w, x, acc)` in rising
/// `k` from +0; [`fold32`] joins the lanes. Any length is allowed, and zero padding of either operand never
/// changes a bit of the result, which is never -0.
///
/// # Panics
/// When the lengths differ.
#[inline(always)]
pub fn dot32(w: &[f32], x: &[f32]) -> f32 {
    assert_eq!(w.len(), x.len(), "operands of a dot product have one length");
    let mut lanes = [0.0f32; LANES];
    for (ws, xs) in w.chunks(STRIPE).zip(x.chunks(STRIPE)) {
        for (lane, (wr, xr)) in lanes.iter_mut().zip(ws.chunks(RUN).zip(xs.chunks(RUN))) {
            for (&a, &b) in wr.iter().zip(xr) {
                *lane = a.mul_add(b, *lane);
            }
        }
    }
    fold32(lanes)
}

/// Joins 32 lane sums: adjacent lanes first (xor 1, 2, 4, 8, 16), then `+ (+0)`.
///
/// The last addition turns -0 into +0: a lane whose products all underflow below zero holds -0, and one more
/// `fma(+0, +0, acc)` of padding would have changed that.
#[inline(always)]
pub fn fold32(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
        }
    }
    lanes[0] + 0.0
}
