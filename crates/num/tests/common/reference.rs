//! Elementary functions in binary64 and the error of ours against them; shared by the tests and `xtask`.

use castiron_num::math;

/// One elementary function with its reference.
pub struct Function {
    /// Its name in `castiron_num::math`.
    pub name: &'static str,
    /// The implementation.
    pub ours: fn(f32) -> f32,
    /// The same in binary64, good to a few units of its last place.
    pub reference: fn(f64) -> f64,
    /// Inputs below this give a zero by definition.
    pub zero_below: f32,
    /// The bound its documentation states, in ulp.
    pub bound: f64,
}

/// The smallest argument whose exponential is a normal number.
const EXP_MIN: f32 = -87.336_54;

fn sigmoid(x: f64) -> f64 {
    if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) }
}

/// All functions of one argument.
pub const FUNCTIONS: [Function; 8] = [
    Function { name: "exp", ours: math::exp, reference: f64::exp, zero_below: EXP_MIN, bound: 1.0 },
    Function { name: "ln", ours: math::ln, reference: f64::ln, zero_below: f32::NEG_INFINITY, bound: 1.0 },
    Function {
        name: "ln_1p",
        ours: math::ln_1p,
        reference: f64::ln_1p,
        zero_below: f32::NEG_INFINITY,
        bound: 1.0,
    },
    Function { name: "sigmoid", ours: math::sigmoid, reference: sigmoid, zero_below: EXP_MIN, bound: 1.0 },
    Function {
        name: "silu",
        ours: math::silu,
        reference: |x| x * sigmoid(x),
        zero_below: EXP_MIN,
        bound: 1.5,
    },
    Function {
        name: "softplus",
        ours: math::softplus,
        reference: |x| x.max(0.0) + (-x.abs()).exp().ln_1p(),
        zero_below: EXP_MIN,
        bound: 1.0,
    },
    Function { name: "sin", ours: math::sin, reference: f64::sin, zero_below: f32::NEG_INFINITY, bound: 1.0 },
    Function { name: "cos", ours: math::cos, reference: f64::cos, zero_below: f32::NEG_INFINITY, bound: 1.0 },
];

/// The worst of many inputs.
#[derive(Clone, Copy, Default)]
pub struct Worst {
    /// Largest error in ulp of the reference's binade.
    pub ulp: f64,
    /// Where it was.
    pub input: f32,
    /// Results that are not the correctly rounded ones.
    pub misrounded: u64,
    /// Inputs with a finite, non-zero expectation.
    pub finite: u64,
}

impl Worst {
    /// Both sets of inputs together.
    pub fn join(self, other: Self) -> Self {
        let worst = if other.ulp > self.ulp { other } else { self };
        Self { misrounded: self.misrounded + other.misrounded, finite: self.finite + other.finite, ..worst }
    }
}

/// Adds one input.
///
/// # Errors
/// A special value (NaN, infinity, a zero by definition) that is not the expected one.
pub fn check(function: &Function, x: f32, worst: &mut Worst) -> Result<(), String> {
    let y = (function.ours)(x);
    let exact = (function.reference)(f64::from(x));
    let rounded = exact as f32;
    let wrong = |what: &str| Err(format!("{}({x:e} = {:#010x}) = {y:e}: {what}", function.name, x.to_bits()));
    if exact.is_nan() {
        return if y.to_bits() == 0x7FC0_0000 { Ok(()) } else { wrong("not the canonical NaN") };
    }
    if x < function.zero_below {
        return if y == 0.0 { Ok(()) } else { wrong("not zero") };
    }
    if rounded.is_infinite() || exact == 0.0 {
        return if y == rounded { Ok(()) } else { wrong("not the expected infinity or zero") };
    }
    let exponent = ((exact.to_bits() >> 52) & 0x7FF) as i32 - 1023;
    let ulp_bits = ((exponent.max(-126) - 23 + 1023) as u64) << 52;
    let error = (f64::from(y) - exact).abs() / f64::from_bits(ulp_bits);
    if error.is_nan() {
        return wrong("NaN");
    }
    worst.finite += 1;
    worst.misrounded += u64::from(y.to_bits() != rounded.to_bits());
    if error > worst.ulp {
        (worst.ulp, worst.input) = (error, x);
    }
    Ok(())
}
