//! `castiron`: a checkpoint in, text out.

mod args;
mod choices;
mod failure;
mod inspect;
mod logits;
mod open;
mod output;
mod run;
mod tiny;

use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match &args.command {
        Command::Run(a) => run::run(a, args.json),
        Command::Logits(a) => logits::logits(a, args.json),
        Command::Inspect(a) => inspect::inspect(a, args.json),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(args.json),
    }
}
