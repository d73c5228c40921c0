//! Rope's table of inverse frequencies: binary64, made once on the host when a model is opened.

const LN2_HI: f64 = 6.931_471_803_691_238e-1;
const LN2_LO: f64 = 1.908_214_929_270_587_7e-10;

/// Terms of the two series; both remainders are below 2^-56.
const LN_TERMS: u32 = 12;
const EXP_TERMS: u32 = 15;

/// `theta^(-2i / rot)` for i in `0..rot / 2`, computed in binary64 and rounded once to f32.
///
/// `theta` is the rope base (finite, positive), `rot` the number of rotated dimensions. IEEE operations only:
/// `exp(-((2i / rot) * ln theta))` with the series below; error before the rounding below 2^-48, so an entry
/// equals the correctly rounded power but for a chance of about 2^-23.
pub fn inv_freq(theta: f64, rot: usize) -> Vec<f32> {
    let log = ln(theta);
    (0..rot / 2).map(|i| exp(-((2 * i) as f64 / rot as f64 * log)) as f32).collect()
}

/// ln x for positive normal x: `2 atanh((m - 1) / (m + 1)) + e ln 2`.
fn ln(x: f64) -> f64 {
    let offset = x.to_bits().wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits());
    let e = ((offset as i64) >> 52) as f64;
    let m = f64::from_bits((offset & ((1 << 52) - 1)) + std::f64::consts::FRAC_1_SQRT_2.to_bits());
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let sum = (0..LN_TERMS).rev().fold(0.0, |acc, i| acc * z + 1.0 / f64::from(2 * i + 1));
    e * LN2_HI + (2.0 * s * sum + e * LN2_LO)
}

/// e^x for |x| below 700: `2^k` times the Taylor series of the rest.
fn exp(x: f64) -> f64 {
    const ROUNDER: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    let k = (x * std::f64::consts::LOG2_E + ROUNDER) - ROUNDER;
    let r = (x - k * LN2_HI) - k * LN2_LO;
    let y = (1..=EXP_TERMS).rev().fold(1.0, |acc, i| 1.0 + r / f64::from(i) * acc);
    y * f64::from_bits(((1023 + k as i64) as u64) << 52)
}
