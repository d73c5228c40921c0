//! `castiron`: a checkpoint in, text out.

mod args;
mod bench;
mod chat;
mod choices;
mod failure;
mod ids;
mod inspect;
mod logits;
mod manual;
mod open;
mod output;
mod plan;
mod progress;
mod quantize;
mod reply;
mod run;
mod synth;
mod tiny;
mod verify;

use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match &args.command {
        Command::Run(a) => run::run(a, args.json),
        Command::Chat(a) => chat::chat(a, args.json),
        Command::Logits(a) => logits::logits(a, args.json),
        Command::Bench(a) => bench::bench(a, args.json),
        Command::Inspect(a) => inspect::inspect(a, args.json),
        Command::Quantize(a) => quantize::quantize(a, args.json),
        Command::Synth(a) => synth::synth(a, args.json),
        Command::Plan(a) => return code(plan::plan(a, args.json), args.json),
        Command::Verify(a) => return code(verify::verify(a, args.json), args.json),
        Command::Completions(a) => manual::completions(a),
        Command::Man(a) => manual::man(a),
    };
    code(done.map(|()| ExitCode::SUCCESS), args.json)
}

fn code(done: Result<ExitCode, failure::Failure>, json: bool) -> ExitCode {
    done.unwrap_or_else(|failure| failure.report(json))
}
