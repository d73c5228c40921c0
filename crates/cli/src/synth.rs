//! `castiron synth`: a synthetic checkpoint of any shape.

use std::path::PathBuf;

use anyhow::Context;
use castiron_format::Config;
use castiron_synth::{Changes, Experts, Preset, Progress, Report, Run, Synth, Table};
use clap::{Args as Group, ValueEnum};

use crate::failure::Failure;
use crate::output;

/// Arguments of `synth`.
#[derive(Group)]
pub struct Args {
    /// The directory to make. It must not exist, and appears when it is whole.
    pub out: PathBuf,
    /// The shape to start from.
    #[arg(long, value_enum, default_value_t = Shape::Micro)]
    pub preset: Shape,
    /// Start from the shape of this config.json instead.
    #[arg(long, value_name = "FILE", conflicts_with = "preset")]
    pub shape: Option<PathBuf>,
    /// Changes of the shape.
    #[command(flatten)]
    pub changes: Flags,
    /// Routed experts: BF16, block FP8, or NVFP4 with activation scales. Drafts are block FP8 where these are not BF16.
    #[arg(long, value_enum, default_value_t = Format::Bf16)]
    pub format: Format,
    /// N-gram tables: BF16, or FP8 with one scale.
    #[arg(long, value_enum, default_value_t = TableFormat::Bf16)]
    pub table: TableFormat,
    /// Write only the first row of each table shard; the rest is a hole that reads as zeros and costs no disk.
    #[arg(long)]
    pub table_sparse: bool,
    /// NVFP4 without activation scales: weights only.
    #[arg(long)]
    pub weight_only: bool,
    /// The same seed and flags give the same bytes on every machine.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

/// Changes of a shape.
#[derive(Group)]
#[command(next_help_heading = "Shape")]
pub struct Flags {
    /// Decoder layers; every fourth is attention.
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Hidden size.
    #[arg(long, value_name = "N")]
    pub hidden: Option<usize>,
    /// Token ids.
    #[arg(long, value_name = "N")]
    pub vocab: Option<usize>,
    /// Query heads.
    #[arg(long, value_name = "N")]
    pub heads: Option<usize>,
    /// Key and value heads.
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<usize>,
    /// Routed experts of a layer.
    #[arg(long, value_name = "N")]
    pub experts: Option<usize>,
    /// Routed experts a token uses.
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// Inner size of a routed expert.
    #[arg(long, value_name = "N")]
    pub intermediate: Option<usize>,
    /// Inner size of the shared expert.
    #[arg(long, value_name = "N")]
    pub shared_intermediate: Option<usize>,
    /// Inner size of the hyper-connection mix.
    #[arg(long, value_name = "N")]
    pub hc_lowrank: Option<usize>,
    /// Rows of a table are about N times its heads (ngram_vocab_size_base).
    #[arg(long, value_name = "N")]
    pub table_base: Option<u64>,
    /// Shards of a table.
    #[arg(long, value_name = "N")]
    pub table_parts: Option<usize>,
    /// Longest context in tokens.
    #[arg(long, value_name = "N")]
    pub positions: Option<u32>,
    /// No draft head.
    #[arg(long)]
    pub no_mtp: bool,
}

/// A shape by name.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Shape {
    /// 4 layers of width 64, 8 experts: about a megabyte.
    Micro,
    /// 8 layers of width 256, 32 experts: 30 MB.
    Mini,
    /// The real widths, 4 layers, 32 experts: 3 GB.
    FullWidth,
    /// The published model: 360 GB.
    FlashNext,
}

/// Storage of routed experts.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Format {
    /// As they are.
    Bf16,
    /// 128 x 128 blocks.
    Fp8,
    /// Groups of 16.
    Nvfp4,
}

/// Storage of n-gram tables.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum TableFormat {
    /// As they are.
    Bf16,
    /// With one scale.
    Fp8,
}

/// Runs the command.
pub fn synth(args: &Args, json: bool) -> Result<(), Failure> {
    let mut config = shape(args)?;
    let f = &args.changes;
    let changes = Changes {
        layers: f.layers,
        hidden: f.hidden,
        vocab: f.vocab,
        heads: f.heads,
        kv_heads: f.kv_heads,
        experts: f.experts,
        top_k: f.top_k,
        intermediate: f.intermediate,
        shared_intermediate: f.shared_intermediate,
        lowrank: f.hc_lowrank,
        table_base: f.table_base,
        table_parts: f.table_parts,
        context: f.positions,
        no_mtp: f.no_mtp,
    };
    changes.apply(&mut config);
    let synth = Synth {
        config,
        experts: match args.format {
            Format::Bf16 => Experts::Keep,
            Format::Fp8 => Experts::Fp8,
            Format::Nvfp4 => Experts::Nvfp4,
        },
        input_scales: !args.weight_only,
        table: match args.table {
            TableFormat::Bf16 => Table::Keep,
            TableFormat::Fp8 => Table::Fp8,
        },
        sparse_table: args.table_sparse,
        seed: args.seed,
    };
    let report = watched(|run| Ok(synth.write(&args.out, run)?))?;
    tell(&report, &args.out, json)
}

fn shape(args: &Args) -> Result<Config, Failure> {
    let Some(path) = &args.shape else {
        let preset = match args.preset {
            Shape::Micro => Preset::Micro,
            Shape::Mini => Preset::Mini,
            Shape::FullWidth => Preset::FullWidth,
            Shape::FlashNext => Preset::FlashNext,
        };
        return Ok(preset.config());
    };
    let name = path.display().to_string();
    let text = std::fs::read(path).with_context(|| format!("cannot read {name}")).map_err(Failure::input)?;
    Config::parse(&name, &text).map_err(Failure::input)
}

/// Runs a job with its progress on standard error, when that is a terminal.
pub fn watched(job: impl FnOnce(&Run<'_>) -> Result<Report, Failure>) -> Result<Report, Failure> {
    use std::io::IsTerminal;
    use std::sync::atomic::{AtomicU64, Ordering};
    let shown = AtomicU64::new(0);
    let show = |p: Progress| {
        let percent = (u128::from(p.done) * 100 / u128::from(p.total.max(1))) as u64;
        if shown.fetch_max(percent, Ordering::Relaxed) < percent {
            eprint!("\r{percent:3} % of {:.2} GB", p.total as f64 / 1e9);
        }
    };
    let terminal = std::io::stderr().is_terminal();
    let run = Run { progress: terminal.then_some(&show as &(dyn Fn(Progress) + Sync)), ..Run::default() };
    let result = job(&run);
    if terminal && shown.load(Ordering::Relaxed) > 0 {
        crate::output::remark("");
    }
    result
}

/// Prints what was made.
pub fn tell(report: &Report, out: &std::path::Path, json: bool) -> Result<(), Failure> {
    for note in &report.notes {
        crate::output::remark(&format!("note: {note}"));
    }
    let place = out.display().to_string();
    if json {
        let mut all = serde_json::json!(report);
        all["out"] = place.into();
        return output::line(&all.to_string());
    }
    let mut text = format!(
        "{place}: {} tensors in {} file(s), {} bytes\ndigest {}",
        report.tensors, report.files, report.bytes, report.digest
    );
    if !report.errors.is_empty() {
        let head = ["quantised", "tensors", "max abs error", "relative rms", "clipped", "zero blocks"];
        text.push_str(&format!(
            "\n\n{:<40} {:>8} {:>14} {:>13} {:>10} {:>12}",
            head[0], head[1], head[2], head[3], head[4], head[5]
        ));
    }
    for e in &report.errors {
        text.push_str(&format!(
            "\n{:<40} {:>8} {:>14.3e} {:>13.5} {:>8.4} % {:>10.4} %",
            e.kind,
            e.tensors,
            e.max_abs,
            e.relative_rms,
            e.clipped * 100.0,
            e.zero_blocks * 100.0
        ));
    }
    output::line(&text)
}

/// A request that does not fit is bad input; a file that cannot be written is a failed job.
impl From<castiron_synth::Error> for Failure {
    fn from(e: castiron_synth::Error) -> Self {
        use castiron_synth::Error as E;
        match e {
            E::Io(..) => Self::job(e),
            E::Format(inner) if inner.kind() == castiron_format::ErrorKind::Io => Self::job(inner),
            e => Self::input(e),
        }
    }
}
