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
    /// `f(-x) == mirror * f(x)`, when that holds to the bit: then half the inputs need no reference.
    pub mirror: Option<f32>,
    /// The nearest binary32 result where it is known without a computation; the error is below half an ulp.
    pub known: fn(f32) -> Option<f32>,
    /// The bound its documentation states, in ulp.
    pub bound: f64,
}

/// The smallest argument whose exponential is a normal number.
const EXP_MIN: f32 = -87.336_54;

fn sigmoid(x: f64) -> f64 {
    if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) }
}

/// No input gives a zero by definition.
const ANY: f32 = f32::NEG_INFINITY;

/// `value` when |x| is below 2^-exponent.
fn tiny(x: f32, exponent: u32, value: f32) -> Option<f32> {
    (x.abs() < f32::from_bits((127 - exponent) << 23)).then_some(value)
}

/// All functions of one argument.
pub const FUNCTIONS: [Function; 8] = [
    Function {
        name: "exp",
        ours: math::exp,
        reference: f64::exp,
        zero_below: EXP_MIN,
        mirror: None,
        known: |x| tiny(x, 26, 1.0),
        bound: 0.53,
    },
    Function {
        name: "ln",
        ours: math::ln,
        reference: f64::ln,
        zero_below: ANY,
        mirror: None,
        known: |_| None,
        bound: 0.63,
    },
    Function {
        name: "ln_1p",
        ours: math::ln_1p,
        reference: f64::ln_1p,
        zero_below: ANY,
        mirror: None,
        known: |x| tiny(x, 26, x),
        bound: 0.66,
    },
    Function {
        name: "sigmoid",
        ours: math::sigmoid,
        reference: sigmoid,
        zero_below: EXP_MIN,
        mirror: None,
        known: |x| if x > 18.0 { Some(1.0) } else { tiny(x, 26, 0.5) },
        bound: 0.53,
    },
    Function {
        name: "silu",
        ours: math::silu,
        reference: |x| x * sigmoid(x),
        zero_below: EXP_MIN,
        mirror: None,
        known: |x| if x.abs() < f32::MIN_POSITIVE * 4.0 { None } else { tiny(x, 28, 0.5 * x) },
        bound: 1.50,
    },
    Function {
        name: "softplus",
        ours: math::softplus,
        reference: |x| x.max(0.0) + (-x.abs()).exp().ln_1p(),
        zero_below: EXP_MIN,
        mirror: None,
        known: |x| if x > 20.0 { Some(x) } else { tiny(x, 30, std::f32::consts::LN_2) },
        bound: 0.63,
    },
    Function {
        name: "sin",
        ours: math::sin,
        reference: f64::sin,
        zero_below: ANY,
        mirror: Some(-1.0),
        known: |x| tiny(x, 13, x),
        bound: 0.58,
    },
    Function {
        name: "cos",
        ours: math::cos,
        reference: f64::cos,
        zero_below: ANY,
        mirror: Some(1.0),
        known: |x| tiny(x, 13, 1.0),
        bound: 0.58,
    },
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
    /// Inputs compared with the reference: a finite, non-zero expectation.
    pub finite: u64,
    /// Inputs found equal to a known value.
    pub known: u64,
}

impl Worst {
    /// Both sets of inputs together.
    pub fn join(self, other: Self) -> Self {
        let worst = if other.ulp > self.ulp { other } else { self };
        Self {
            misrounded: self.misrounded + other.misrounded,
            finite: self.finite + other.finite,
            known: self.known + other.known,
            ..worst
        }
    }
}

/// Adds one input.
///
/// # Errors
/// A special value (NaN, infinity, a zero by definition) that is not the expected one.
pub fn check(function: &Function, x: f32, worst: &mut Worst) -> Result<(), String> {
    let y = (function.ours)(x);
    if let (Some(mirror), true) = (function.mirror, x < 0.0) {
        let same = y.to_bits() == (mirror * (function.ours)(-x)).to_bits() || y.is_nan();
        return if same { Ok(()) } else { Err(format!("{}({x:e}) = {y:e}: not mirrored", function.name)) };
    }
    let wrong = |what: &str| Err(format!("{}({x:e} = {:#010x}) = {y:e}: {what}", function.name, x.to_bits()));
    if x < function.zero_below && x > f32::NEG_INFINITY {
        return if y == 0.0 { Ok(()) } else { wrong("not zero") };
    }
    if let Some(value) = (function.known)(x) {
        worst.known += 1;
        return if y.to_bits() == value.to_bits() { Ok(()) } else { wrong("not the known value") };
    }
    let exact = (function.reference)(f64::from(x));
    let rounded = exact as f32;
    if exact.is_nan() {
        return if y.to_bits() == 0x7FC0_0000 { Ok(()) } else { wrong("not the canonical NaN") };
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
