//! `castiron verify`: a receipt that every form of the program gives the same bytes.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::anyhow;
use castiron_engine::verify::{Difference, Job, Outcome, Report, Variant, verify as run};
use castiron_format::Checkpoint;
use castiron_model::{Level, Model, Options, PlantedFault};
use serde_json::{Value, json};

use crate::args::{Activations, Experts, Sampling};
use crate::failure::Failure;
use crate::output::size;
use crate::progress::Working;
use crate::{choices, ids, open, output};

/// Prompt tokens that are made up when no file is given.
const TOKENS: usize = 160;
/// Weight bytes above which the scalar law is run on a few tokens only.
const BIG: u64 = 1 << 30;
/// Those tokens.
const LAW_TOKENS: usize = 4;

/// Arguments of `verify`.
#[derive(clap::Args)]
pub struct Verify {
    /// A checkpoint directory; the built-in tiny model when not given.
    pub model: Option<PathBuf>,
    /// A safetensors file with an integer tensor `input_ids` of shape [T] or [1, T]; ids are made up when not
    /// given.
    #[arg(long, value_name = "FILE")]
    pub ids: Option<PathBuf>,
    /// Prompt tokens: the first of the file, all of them when not given; or 160 that are made up.
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    /// Tokens of the greedy and of the sampled reply.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub reply: u32,
    /// Prompt rows of a forward pass; the whole prompt is always run too.
    #[arg(long, value_delimiter = ',', default_value = "1,7,64,512", value_name = "N,...")]
    pub chunks: Vec<usize>,
    /// Numbers of threads, or `all`.
    #[arg(long, value_delimiter = ',', default_value = "1,all", value_name = "N,...", value_parser = threads)]
    pub threads: Vec<usize>,
    /// Prompt tokens that the scalar law is run on; all when not given, 4 when the weights are above 1 GiB.
    #[arg(long, value_name = "N")]
    pub law_tokens: Option<usize>,
    /// Hash every byte of the checkpoint, not just its headers.
    #[arg(long)]
    pub full: bool,
    /// Sampling of the sampled reply.
    #[command(flatten)]
    pub sampling: Sampling,
    /// Rounding of operands and caches.
    #[arg(long, value_enum, default_value_t = Activations::Bf16)]
    pub activations: Activations,
    /// Products of NVFP4 experts; as the checkpoint declares when not given.
    #[arg(long, value_enum)]
    pub experts: Option<Experts>,
    /// Self-test of this command: compute layer N in a wrong order where several rows run on the widest level,
    /// so that a difference must be found there.
    #[arg(long, value_name = "N", hide = true)]
    pub plant_fault: Option<usize>,
}

/// Runs the command: exit code 0 when all agree, 1 when not.
pub fn verify(args: &Verify, json: bool) -> Result<ExitCode, Failure> {
    let checkpoint = open::checkpoint(args.model.as_deref())?;
    let options = Options {
        activations: open::activations(args.activations),
        experts: open::experts(args.experts),
        ..Options::default()
    };
    let mut open = |level: Level, threads: usize| {
        let fault = args.plant_fault.filter(|_| level == Level::detect());
        let fault = fault.map(|layer| PlantedFault { layer, rows: 2 });
        Model::open(&checkpoint, &Options { level, threads, fault, ..options.clone() })
    };
    let working = Working::new("opening the model");
    let numerics = open(Level::detect(), 1)?.numerics();
    let job = job(args, &checkpoint)?;
    let report =
        run(&job, &mut open, |i, all, variant| working.say(format!("{} of {all}: {variant}", i + 1)))?;
    working.say("hashing the checkpoint");
    let bytes = checkpoint.inventory().bytes;
    let full = args.full.then(|| {
        checkpoint.full_digest(|done| {
            working.say(format!("hashing the checkpoint: {} of {}", size(done), size(bytes)));
        })
    });
    drop(working);
    let mut receipt = json!({
        "castiron": env!("CARGO_PKG_VERSION"),
        "checkpoint": checkpoint.digest(),
        "numerics": "portable",
        "activations": numerics.activations.name(),
        "experts": numerics.experts.name(),
        "device": format!("cpu {}", std::env::consts::ARCH),
        "tokens": job.ids.len(),
        "seed": job.sampled.seed,
        "agree": report.difference.is_none(),
        "variants": report.outcomes.iter().map(outcome).collect::<Vec<_>>(),
    });
    if let Some(full) = full {
        receipt["checkpoint_full"] = full.into();
    }
    if let Some(d) = &report.difference {
        receipt["difference"] = difference(d);
    }
    output::line(&if json { receipt.to_string() } else { text(&receipt, &report) })?;
    Ok(if report.difference.is_none() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn job(args: &Verify, checkpoint: &Checkpoint) -> Result<Job, Failure> {
    let config = checkpoint.config();
    let (vocab, context) = (config.vocab_size, config.max_position);
    let ids = match &args.ids {
        Some(path) => {
            let mut ids = ids::read(path).map_err(Failure::input)?;
            ids.truncate(args.tokens.unwrap_or(usize::MAX));
            ids
        }
        None => made_up(args.tokens.unwrap_or(TOKENS), vocab, config.ngram_eos()),
    };
    let ids = ids::check(&ids, vocab, context).map_err(Failure::input)?;
    if args.chunks.contains(&0) {
        return Err(Failure::input(anyhow!("a chunk of 0 rows cannot be run; give at least 1")));
    }
    let big = checkpoint.inventory().bytes > BIG;
    let law_tokens = args.law_tokens.unwrap_or(if big { LAW_TOKENS } else { ids.len() });
    if args.plant_fault.is_some_and(|layer| layer >= config.num_layers) {
        return Err(Failure::input(anyhow!("there is no such layer: the model has {}", config.num_layers)));
    }
    Ok(Job {
        ids,
        law_tokens,
        levels: Level::present(),
        threads: args.threads.clone(),
        chunks: [&args.chunks[..], &[0]].concat(),
        reply: args.reply as usize,
        sampled: choices::params(checkpoint, &args.sampling, vocab)?,
    })
}

/// Repeatable ids with an end of sequence now and then.
fn made_up(count: usize, vocab: usize, eos: u32) -> Vec<i128> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % vocab as u64
    };
    (0..count).map(|i| if i % 17 == 11 { eos.into() } else { next().into() }).collect()
}

fn outcome(o: &Outcome) -> Value {
    let h = &o.hashes;
    let mut all = variant(&o.variant);
    all["logits_hash"] = h.logits.clone().into();
    all["state_hash"] = h.state.clone().into();
    all["greedy_token_hash"] = h.greedy.clone().into();
    all["greedy_state_hash"] = h.end_state.clone().into();
    all["sampled_token_hash"] = h.sampled.clone().into();
    all
}

fn variant(v: &Variant) -> Value {
    let number = |n: usize, zero: &str| if n == 0 { Value::from(zero) } else { n.into() };
    json!({
        "level": v.level.name(),
        "threads": number(v.threads, "all"),
        "chunk": number(v.chunk, "whole"),
        "tokens": v.tokens,
    })
}

fn difference(d: &Difference) -> Value {
    let place = d.place.as_ref().map(|p| {
        json!({
            "layer": p.layer,
            "tensor": p.tensor,
            "row": p.row,
            "column": p.column,
            "reference": p.reference.to_string(),
            "other": p.other.to_string(),
        })
    });
    json!({ "what": d.what, "reference": variant(&d.reference), "other": variant(&d.other), "first": place })
}

/// The receipt for people: the hashes of each prompt length once, since all variants share them.
fn text(receipt: &Value, report: &Report) -> String {
    let mut text = String::new();
    for key in ["checkpoint", "checkpoint_full", "numerics", "activations", "experts", "device", "seed"] {
        if let Some(value) = receipt.get(key) {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            text.push_str(&format!("{key:<29} {value}\n"));
        }
    }
    let mut lengths: Vec<usize> = report.outcomes.iter().map(|o| o.variant.tokens).collect();
    lengths.sort_unstable();
    lengths.dedup();
    for length in lengths {
        let mut of = report.outcomes.iter().filter(|o| o.variant.tokens == length);
        let count = of.clone().count();
        let Some(first) = of.next() else { continue };
        text.push_str(&format!("\n{length} tokens, {count} variants\n"));
        for (name, hash) in first.hashes.list() {
            text.push_str(&format!("{name:<29} {hash}\n"));
        }
    }
    match &report.difference {
        None => text.push_str("\nall agree"),
        Some(d) => text.push_str(&describe(d)),
    }
    text
}

fn describe(d: &Difference) -> String {
    let head = format!("\nDIFFERENT: {}\n  reference  {}\n  other      {}\n  ", d.what, d.reference, d.other);
    let Some(p) = &d.place else {
        return format!("{head}the two agreed when they were run again: the difference is not repeatable");
    };
    let layer = p.layer.map_or_else(|| "outside the layers".to_owned(), |l| format!("layer {l}"));
    format!(
        "{head}first at {layer}, tensor {}, row {}, column {}: {} against {}",
        p.tensor, p.row, p.column, p.reference, p.other
    )
}

fn threads(text: &str) -> Result<usize, String> {
    match text {
        "all" => Ok(0),
        n => n
            .parse()
            .ok()
            .filter(|&n| n > 0)
            .ok_or_else(|| format!("{n:?} is not a number of threads or `all`")),
    }
}
