//! `castiron quantize`: a smaller copy of a BF16 or F32 checkpoint.

use std::path::PathBuf;

use castiron_synth::{self as make, InputScales};
use clap::{Args as Group, ValueEnum};

use crate::failure::Failure;
use crate::{open, synth};

/// Arguments of `quantize`.
#[derive(Group)]
pub struct Args {
    /// A checkpoint directory whose tensors to quantise are BF16 or F32.
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// The directory to make. It must not exist, and appears when it is whole.
    pub out: PathBuf,
    /// Routed experts of the main layers.
    #[arg(long, value_enum, default_value_t = Experts::Keep)]
    pub experts: Experts,
    /// Routed experts of the draft head; when not given, block FP8 if the main ones are quantised.
    #[arg(long, value_enum)]
    pub draft: Option<Experts>,
    /// N-gram tables: kept, or FP8 with one BF16 scale.
    #[arg(long, value_enum, default_value_t = Table::Keep)]
    pub table: Table,
    /// Dense projections: kept, or FP8 with a scale for each output row, which other engines do not read.
    #[arg(long, value_enum, default_value_t = Dense::Keep)]
    pub dense: Dense,
    /// Stored type of block FP8 scales.
    #[arg(long, value_enum, default_value_t = Scales::Bf16)]
    pub block_scales: Scales,
    /// Activation scales for NVFP4 (W4A4): a safetensors file with an F32 tensor MODULE.input_scale for every routed
    /// expert projection. Without it, NVFP4 is weight-only.
    #[arg(long, value_name = "FILE")]
    pub input_scales: Option<PathBuf>,
}

/// What becomes of experts.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Experts {
    /// Copied.
    Keep,
    /// E4M3 with a scale for each 128 x 128 block.
    Fp8,
    /// E2M1 in groups of 16 (ModelOpt names).
    Nvfp4,
}

/// What becomes of tables.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Table {
    /// Copied.
    Keep,
    /// E4M3 with one scale.
    Fp8,
}

/// What becomes of dense projections.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Dense {
    /// Copied.
    Keep,
    /// E4M3 with a scale a row.
    Fp8Row,
}

/// Stored type of block scales.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Scales {
    /// As in the official files.
    Bf16,
    /// Exact.
    F32,
}

/// Runs the command.
pub fn quantize(args: &Args, json: bool) -> Result<(), Failure> {
    let experts = |e: Experts| match e {
        Experts::Keep => make::Experts::Keep,
        Experts::Fp8 => make::Experts::Fp8,
        Experts::Nvfp4 => make::Experts::Nvfp4,
    };
    let options = make::Quantize {
        experts: experts(args.experts),
        draft: args.draft.map_or(make::Draft::Auto, |e| make::Draft::As(experts(e))),
        table: if args.table == Table::Fp8 { make::Table::Fp8 } else { make::Table::Keep },
        dense: if args.dense == Dense::Fp8Row { make::Dense::Fp8Row } else { make::Dense::Keep },
        scales: if args.block_scales == Scales::F32 { make::Scales::F32 } else { make::Scales::Bf16 },
        input_scales: match &args.input_scales {
            Some(path) => InputScales::read(path).map_err(Failure::input)?,
            None => InputScales::None,
        },
    };
    if options == make::Quantize::default() {
        let text = "nothing to do: give --experts, --draft, --table or --dense";
        return Err(Failure::input(anyhow::anyhow!(text)));
    }
    let checkpoint = open::checkpoint(Some(&args.input))?;
    let report = synth::watched(|run| Ok(make::quantize(&checkpoint, &options, &args.out, run)?))?;
    synth::tell(&report, &args.out, json)
}
