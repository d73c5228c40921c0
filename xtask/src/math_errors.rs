//! `math-errors`: the worst error of every function of `castiron_num::math`, as a Markdown table.

#[allow(unreachable_pub)]
#[path = "../../crates/num/tests/common/reference.rs"]
mod reference;

use anyhow::{Result, anyhow};
use castiron_num::philox;
use reference::{FUNCTIONS, Worst, check};

/// Options of `math-errors`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Measure every Nth bit pattern; 1 is all of them.
    #[arg(long, default_value_t = 1)]
    stride: u32,
    /// Only these functions (all by default).
    #[arg(long)]
    only: Vec<String>,
    /// Threads (each takes an equal range of bit patterns).
    #[arg(long, default_value_t = 2)]
    threads: u32,
}

/// Measures and prints; fails on a wrong special value or an error beyond the stated bound.
pub(crate) fn run(options: &Options) -> Result<()> {
    println!(
        "| function | worst error (ulp) | at | not correctly rounded | inputs | known |\n|---|---|---|---|---|---|"
    );
    let wanted = |name: &str| options.only.is_empty() || options.only.iter().any(|n| n == name);
    let mut beyond = Vec::new();
    for function in FUNCTIONS.iter().filter(|f| wanted(f.name)) {
        let worst = parallel(options, |bits, worst| check(function, f32::from_bits(bits), worst))?;
        print_row(function.name, &worst);
        if worst.ulp > function.bound {
            beyond.push(function.name);
        }
    }
    for (name, noise) in [("uniform_neg_log", NEG_LOG), ("gumbel", GUMBEL)] {
        if wanted(name) {
            print_row(name, &parallel(options, |u, worst| check_noise(&noise, u, worst))?);
        }
    }
    if beyond.is_empty() { Ok(()) } else { Err(anyhow!("beyond the stated bound: {}", beyond.join(", "))) }
}

fn print_row(name: &str, worst: &Worst) {
    let Worst { ulp, input, misrounded, finite, known } = *worst;
    println!(
        "| `{name}` | {ulp:.4} | {input:e} (`{:#010x}`) | {misrounded} | {finite} | {known} |",
        input.to_bits()
    );
}

/// Runs `one` over the strided range of all 2^32 patterns.
fn parallel(options: &Options, one: impl Fn(u32, &mut Worst) -> Result<(), String> + Sync) -> Result<Worst> {
    let threads = u64::from(options.threads.max(1));
    let range = |t: u64| ((t << 32) / threads, ((t + 1) << 32) / threads);
    let work = |t: u64| -> Result<Worst, String> {
        let (from, to) = range(t);
        let mut worst = Worst::default();
        for bits in (from..to).step_by(options.stride.max(1) as usize) {
            one(bits as u32, &mut worst)?;
        }
        Ok(worst)
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|t| scope.spawn(move || work(t))).collect();
        handles.into_iter().try_fold(Worst::default(), |all, handle| {
            let worst = handle.join().map_err(|_| anyhow!("a measuring thread panicked"))?;
            Ok(all.join(worst.map_err(|e| anyhow!(e))?))
        })
    })
}

/// A sampling noise of one random word; `input` of its worst case holds the word as bits.
struct Noise {
    ours: fn(u32) -> f32,
    reference: fn(u32) -> f64,
}

const NEG_LOG: Noise = Noise { ours: philox::uniform_neg_log, reference: exponential };
const GUMBEL: Noise = Noise { ours: philox::gumbel, reference: |u| -exponential(u).ln() };

/// -ln((u + 0.5) * 2^-32), from whichever end keeps the precision.
fn exponential(u: u32) -> f64 {
    const STEP: f64 = 1.0 / 4_294_967_296.0;
    let (low, high) = (f64::from(u) + 0.5, 4_294_967_296.0 - f64::from(u) - 0.5);
    if u < 1 << 31 { -(low * STEP).ln() } else { -(-(high * STEP)).ln_1p() }
}

fn check_noise(noise: &Noise, u: u32, worst: &mut Worst) -> Result<(), String> {
    let (y, exact) = ((noise.ours)(u), (noise.reference)(u));
    if !y.is_finite() {
        return Err(format!("noise({u}) = {y}"));
    }
    // Near its zero (E = 1) the relative error of a Gumbel variate means nothing: ulp of at least 2^-24.
    let exponent = ((exact.abs().max(0.5).to_bits() >> 52) & 0x7FF) as i64 - 1023;
    let error = (f64::from(y) - exact).abs() / f64::from_bits(((exponent - 23 + 1023) as u64) << 52);
    worst.finite += 1;
    worst.misrounded += u64::from(y != exact as f32);
    if error > worst.ulp {
        (worst.ulp, worst.input) = (error, f32::from_bits(u));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coarse_run_passes() {
        run(&Options { stride: 1_000_003, only: Vec::new(), threads: 2 })
            .expect("errors within their bounds");
    }
}
