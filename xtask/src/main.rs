//! Maintenance jobs that are not part of the engine.

mod eval;
mod math_errors;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Maintenance jobs: measurements and gates")]
struct Arguments {
    #[command(subcommand)]
    job: Job,
}

#[derive(Subcommand)]
enum Job {
    /// Measures the elementary functions against binary64 over all (or every Nth) binary32 inputs.
    MathErrors(math_errors::Options),
    /// Scores a form of the tiny trained checkpoint on its tasks and its text.
    Eval(eval::Options),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().job {
        Job::MathErrors(options) => math_errors::run(&options),
        Job::Eval(options) => eval::run(&options),
    }
}
