//! The one table of commands and flags.

use std::path::PathBuf;

use clap::{Args as Group, Parser, Subcommand, ValueEnum};

/// Runs Qwen3.8-Flash-Next on one box, with the same bytes every time.
///
/// Exit codes: 0 done; 1 the job failed, does not fit, or found a difference; 2 bad input or usage.
#[derive(Parser)]
#[command(version, about, max_term_width = 100)]
pub struct Args {
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Subcommand)]
pub enum Command {
    /// Continue a prompt and print the reply as it is written.
    #[command(override_usage = "castiron run [OPTIONS] [MODEL] <PROMPT>")]
    Run(Run),
    /// Talk: each turn reads only what is new; commands begin with a slash.
    Chat(crate::chat::Chat),
    /// Write the logits of every position of a token sequence to a file.
    Logits(Logits),
    /// Show what a checkpoint holds; no weight is read.
    Inspect(Inspect),
    /// Say whether a model fits this machine; no weight is read.
    Plan(crate::plan::Plan),
    /// Run a prompt in every form of the program and say whether all bytes agree.
    Verify(crate::verify::Verify),
    /// Print a completion script for a shell.
    Completions(crate::manual::Completions),
    /// Print or write manual pages.
    Man(crate::manual::Man),
    /// Measure steps and prompts beside the ceilings of this machine.
    Bench(crate::bench::Args),
    /// Write a smaller, quantised copy of a BF16 or F32 checkpoint.
    Quantize(crate::quantize::Args),
    /// Write a synthetic checkpoint of any shape.
    Synth(crate::synth::Args),
}

/// Arguments of `run`.
#[derive(Group)]
pub struct Run {
    /// A checkpoint directory, then the prompt; with one argument, the prompt for the built-in tiny model. A
    /// prompt of `-` is read from standard input.
    #[arg(required = true, num_args = 1..=2, value_names = ["MODEL", "PROMPT"])]
    pub words: Vec<std::ffi::OsString>,
    /// Give the prompt to the model as it stands. Default when the checkpoint has no chat template.
    #[arg(long, conflicts_with_all = ["chat", "system", "thinking", "reasoning_effort"])]
    pub raw: bool,
    /// Put the prompt into the checkpoint's chat template. Default when it has one.
    #[arg(long)]
    pub chat: bool,
    /// The reply.
    #[command(flatten)]
    pub reply: Reply,
    /// With --json: log-probabilities of each token and of this many alternatives.
    #[arg(long, value_name = "N")]
    pub logprobs: Option<usize>,
    /// Numerics.
    #[command(flatten)]
    pub numerics: Numerics,
}

/// What a reply is made from and when it ends.
#[derive(Group)]
pub struct Reply {
    /// System message of the chat.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Whether the model thinks before it answers; when not given, the template decides, and the built-in tiny
    /// model (which thinks only about sums) answers at once. Thoughts go to standard error, the reply to
    /// standard output.
    #[arg(long, value_enum)]
    pub thinking: Option<Thinking>,
    /// How long it thinks: none, minimal, low, medium, high, xhigh.
    #[arg(long, value_name = "EFFORT")]
    pub reasoning_effort: Option<String>,
    /// Tokens of the reply at most.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub max_tokens: usize,
    /// Sampling.
    #[command(flatten)]
    pub sampling: Sampling,
    /// End the reply before this text (may be repeated).
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Do not stop at the checkpoint's end-of-reply tokens.
    #[arg(long)]
    pub ignore_eos: bool,
}

/// How tokens are drawn. What is not given comes from the checkpoint's generation_config.json.
#[derive(Group, Default)]
pub struct Sampling {
    /// Always take the likeliest token.
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p", "seed"])]
    pub greedy: bool,
    /// 0 is greedy.
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Keep the K likeliest tokens; 0 keeps all.
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Keep the fewest tokens whose probabilities reach P; 1 keeps all.
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Keep tokens with at least P times the best one's probability; 0 keeps all.
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Subtracted once from the logit of every token already in the reply.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtracted for every time a token is already in the reply.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Add X to the logit of token ID (may be repeated).
    #[arg(long, value_name = "ID=X", value_parser = bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// The same seed gives the same reply.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

/// What decides bytes and memory.
#[derive(Group, Clone)]
pub struct Numerics {
    /// Rounding of operands and caches: bf16 is the law, f32 is for parity with f32 checkpoints.
    #[arg(long, value_enum, default_value_t = Activations::Bf16)]
    pub activations: Activations,
    /// Products of NVFP4 experts; as the checkpoint declares when not given.
    #[arg(long, value_enum)]
    pub experts: Option<Experts>,
    /// Where the n-gram table lives.
    #[arg(long, value_enum, default_value_t = Table::File)]
    pub table: Table,
    /// Row cache of a table in the file, in MiB.
    #[arg(long, default_value_t = 64, value_name = "MIB")]
    pub table_cache: usize,
    /// Tokens of context; the checkpoint's own when not given.
    #[arg(long, value_name = "N")]
    pub context: Option<u32>,
    /// Prompt rows of one forward pass. Bytes do not depend on it.
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub chunk: u32,
    /// Threads of the kernels; 0 takes every processor. Bytes do not depend on it.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub threads: u16,
    /// The form of the CPU kernels. Bytes do not depend on it.
    #[arg(long, value_enum, default_value_t = Cpu::Auto)]
    pub cpu: Cpu,
}

/// Arguments of `logits`.
#[derive(Group)]
pub struct Logits {
    /// A checkpoint directory.
    pub model: PathBuf,
    /// A safetensors file with an integer tensor `input_ids` of shape [T] or [1, T].
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// The safetensors file to write: an F32 tensor `logits` of shape [T, vocab].
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Numerics.
    #[command(flatten)]
    pub numerics: Numerics,
}

/// Arguments of `inspect`.
#[derive(Group)]
pub struct Inspect {
    /// A checkpoint directory; the built-in tiny model when not given.
    pub model: Option<PathBuf>,
}

/// Whether the model thinks.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Thinking {
    /// It does.
    On,
    /// It answers at once.
    Off,
}

/// Rounding of operands and caches.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Activations {
    /// To bf16.
    Bf16,
    /// Not at all.
    F32,
}

/// Products of NVFP4 experts.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Experts {
    /// Activations quantised to NVFP4.
    W4a4,
    /// Activations as they are.
    W4a16,
}

/// Where the n-gram table lives.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Table {
    /// In the file, with a row cache.
    File,
    /// In memory.
    Memory,
}

/// The form of the CPU kernels.
#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
pub enum Cpu {
    /// The widest this processor has.
    Auto,
    /// Packed, baseline instructions.
    Portable,
    /// The scalar law.
    Law,
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let parsed =
        text.split_once('=').and_then(|(id, x)| Some((id.trim().parse().ok()?, x.trim().parse().ok()?)));
    parsed.ok_or_else(|| format!("{text:?} is not ID=X, such as 42=-1.5"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_flag_table_is_consistent() {
        super::Args::command().debug_assert();
    }

    #[test]
    fn a_bias_is_an_id_and_a_number() {
        assert_eq!(super::bias("42=-1.5"), Ok((42, -1.5)));
        assert!(super::bias("x=1").is_err() && super::bias("1").is_err() && super::bias("-1=2").is_err());
    }
}
