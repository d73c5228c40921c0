//! `castiron bench`: rates of a checkpoint beside the ceilings measured in the same run.

use std::path::PathBuf;

use castiron_engine::bench::{self, Options, Pass, Report};
use castiron_engine::model::{Kind, Model};
use serde_json::{Value, json};

use crate::args::Numerics;
use crate::failure::Failure;
use crate::{open, output};

/// Arguments of `bench`.
#[derive(clap::Args)]
pub struct Args {
    /// A checkpoint directory; the built-in tiny model when not given.
    pub model: Option<PathBuf>,
    /// Tokens in the stream before the measured steps.
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub at: usize,
    /// Single-row steps; the fastest counts.
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub steps: usize,
    /// Rows of the prompt chunk.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub rows: usize,
    /// Times the prompt chunk is run; the fastest counts.
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub repetitions: usize,
    /// Numerics.
    #[command(flatten)]
    pub numerics: Numerics,
}

/// Runs the command.
pub fn bench(args: &Args, json: bool) -> Result<(), Failure> {
    let checkpoint = open::checkpoint(args.model.as_deref())?;
    let mut model = open::model(&checkpoint, &args.numerics)?;
    let (rows, repetitions) = (args.rows.max(1), args.repetitions);
    let options = Options { context: args.at, steps: args.steps, rows, repetitions };
    let report = bench::run(&mut model, &options)?;
    if json {
        return output::line(&receipt(&report, &model, &checkpoint.digest(), args).to_string());
    }
    output::line(&text(&report, &model))
}

fn text(r: &Report, model: &Model) -> String {
    let mut text = format!(
        "{} threads, {}; read {:.1} GB/s, FMA {:.1} GFLOP/s\n",
        model.threads(),
        model.level().name(),
        r.read_peak / 1e9,
        r.fma_peak / 1e9
    );
    let rate = r.step.bytes() / r.step.seconds;
    text.push_str(&format!(
        "\none row: {:.2} ms, {:.1} tokens/s, {:.2} GB of weights at {:.1} GB/s = {:.0} % of read\n",
        r.step.seconds * 1e3,
        1.0 / r.step.seconds,
        r.step.bytes() / 1e9,
        rate / 1e9,
        100.0 * rate / r.read_peak
    ));
    text.push_str(&split(&r.step, r));
    let dense = r.prompt.kind(Kind::Dense);
    text.push_str(&format!(
        "\n{} rows: {:.1} tokens/s; dense products {:.1} GFLOP/s = {:.0} % of FMA\n",
        r.prompt.rows,
        r.prompt.rows as f64 / r.prompt.seconds,
        dense.operations / dense.seconds / 1e9,
        100.0 * dense.operations / dense.seconds / r.fma_peak
    ));
    text.push_str(&split(&r.prompt, r));
    text.trim_end().to_owned()
}

/// Time and rates by kind.
fn split(pass: &Pass, r: &Report) -> String {
    let mut text = String::new();
    let mut rest = pass.seconds;
    for kind in Kind::ALL {
        let t = pass.kind(kind);
        rest -= t.seconds;
        text.push_str(&format!(
            "  {:<15} {:5.1} % of the time",
            kind.name(),
            100.0 * t.seconds / pass.seconds
        ));
        if t.bytes > 0.0 && t.seconds > 0.0 {
            text.push_str(&format!(
                "  {:6.1} GB/s ({:.0} %)  {:7.1} GFLOP/s ({:.0} %)",
                t.bytes / t.seconds / 1e9,
                100.0 * t.bytes / t.seconds / r.read_peak,
                t.operations / t.seconds / 1e9,
                100.0 * t.operations / t.seconds / r.fma_peak
            ));
        }
        text.push('\n');
    }
    text.push_str(&format!(
        "  {:<15} {:5.1} % of the time\n",
        "everything else",
        100.0 * rest / pass.seconds
    ));
    text
}

fn receipt(r: &Report, model: &Model, digest: &str, args: &Args) -> Value {
    let pass = |p: &Pass| {
        let kind = |k: Kind| {
            let t = p.kind(k);
            json!({ "kind": k.name(), "seconds": t.seconds, "operations": t.operations, "weight_bytes": t.bytes })
        };
        json!({
            "rows": p.rows,
            "seconds": p.seconds,
            "weight_bytes": p.bytes(),
            "kinds": Kind::ALL.map(kind).to_vec(),
        })
    };
    json!({
        "checkpoint": digest,
        "numerics": "portable",
        "activations": model.numerics().activations.name(),
        "experts": model.numerics().experts.name(),
        "level": model.level().name(),
        "threads": model.threads(),
        "context": args.at,
        "read_bytes_per_second": r.read_peak,
        "fma_operations_per_second": r.fma_peak,
        "step": pass(&r.step),
        "prompt": pass(&r.prompt),
    })
}
