//! Number formats, canonical orders and elementary functions of the Castiron law (`docs/numerics.md`).
//!
//! Everything here is deterministic to the bit: binary32 `+ - * /`, explicit `mul_add` where the law says
//! `fma`, and integers. Nothing calls the platform's math library for a transcendental, nothing is `unsafe`,
//! and nothing depends on the order in which rows, tiles or threads arrive. The functions are short scalar
//! texts on purpose: they are the oracle every kernel on every device is compared with.
//!
//! `f32::mul_add` is always correctly rounded. Without the `fma` target feature it is a library call and slow,
//! so hot callers carry `#[target_feature(enable = "fma")]`; the functions here are `#[inline]` for that.
#![forbid(unsafe_code)]

pub mod bf16;
pub mod dot;
pub mod fp4;
pub mod fp8;
pub mod hopper;
pub mod math;
pub mod nvfp4;
/// Scalar forms of the canonical orders (section 4a of the law).
pub mod orders;
pub mod philox;
