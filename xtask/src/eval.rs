//! `eval`: the tasks and the bits per token of the tiny trained checkpoint, in any of its forms.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use castiron_engine::logprobs::Logprobs;
use castiron_engine::session::Session;
use castiron_format::{Checkpoint, Source};
use castiron_model::{Activations, ExpertActivations, Model, Options as ModelOptions};
use castiron_text::{Specials, Tokenizer};

/// Options of `eval`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Checkpoint directory.
    #[arg(default_value = "assets/tiny")]
    checkpoint: PathBuf,
    /// Folder with `eval.jsonl` and `eval.txt`.
    #[arg(long, default_value = "tests")]
    data: PathBuf,
    /// w4a4 or w4a16; as the checkpoint declares when not given.
    #[arg(long, value_parser = ["w4a4", "w4a16"])]
    experts: Option<String>,
    /// Do not round operands and caches.
    #[arg(long)]
    f32: bool,
    /// Items of each task (all by default).
    #[arg(long, default_value_t = usize::MAX, hide_default_value = true)]
    items: usize,
}

/// Tokens of a scoring window, each from a fresh state.
const WINDOW: usize = 512;

/// Scores the tasks, then the text.
pub(crate) fn run(options: &Options) -> Result<()> {
    let (tokenizer, mut session) = open(options)?;
    let numerics = session.model().numerics();
    println!("activations {}, experts {}", numerics.activations.name(), numerics.experts.name());
    for (task, (right, all)) in tasks(options, &tokenizer, &mut session)? {
        println!("{task:<10} {right} of {all}");
    }
    let (bits, tokens) = bits_per_token(&options.data.join("eval.txt"), &tokenizer, &mut session)?;
    println!("eval.txt   {bits:.4} bits a token over {tokens} tokens");
    Ok(())
}

/// The tokenizer and a fresh session of the checkpoint.
fn open(options: &Options) -> Result<(Tokenizer, Session)> {
    let checkpoint = Checkpoint::open(Source::Dir(options.checkpoint.clone()))?;
    let json =
        checkpoint.file("tokenizer.json")?.ok_or_else(|| anyhow!("no tokenizer.json in the checkpoint"))?;
    let tokenizer = Tokenizer::from_files(&json, checkpoint.file("tokenizer_config.json")?.as_deref())?;
    let model_options = ModelOptions {
        activations: if options.f32 { Activations::F32 } else { Activations::Bf16 },
        experts: options.experts.as_deref().map(|e| match e {
            "w4a4" => ExpertActivations::W4a4,
            _ => ExpertActivations::W4a16,
        }),
        ..ModelOptions::default()
    };
    Ok((tokenizer, Session::new(Model::open(&checkpoint, &model_options)?)?))
}

/// Right answers and items of each task. An answer is right when greedy continuation writes exactly it.
fn tasks(
    options: &Options,
    tokenizer: &Tokenizer,
    session: &mut Session,
) -> Result<BTreeMap<String, (usize, usize)>> {
    let path = options.data.join("eval.jsonl");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let mut scores: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for line in text.lines() {
        let item: serde_json::Value = serde_json::from_str(line)?;
        let field = |name: &str| item[name].as_str().ok_or_else(|| anyhow!("an item without {name}"));
        let score = scores.entry(field("task")?.to_owned()).or_default();
        if score.1 == options.items {
            continue;
        }
        let prompt = tokenizer.encode(field("prompt")?, Specials::Parse)?;
        let answer = tokenizer.encode(field("answer")?, Specials::Parse)?;
        score.1 += 1;
        score.0 += usize::from(answers(session, &prompt, &answer)?);
    }
    Ok(scores)
}

/// Whether the likeliest token is the answer's at every place.
fn answers(session: &mut Session, prompt: &[u32], answer: &[u32]) -> Result<bool> {
    let (Some((last, before)), Some((_, fed))) = (prompt.split_last(), answer.split_last()) else {
        return Err(anyhow!("an empty prompt or answer"));
    };
    session.rewind(0)?;
    let _ = session.feed(before, |_| ControlFlow::Continue(()))?;
    let logits = session.feed_for_logits(&[&[*last], fed].concat())?;
    let rows = logits.chunks_exact(session.model().vocab());
    let best = |row: &[f32]| Ok::<u32, anyhow::Error>(Logprobs::new(row)?.top(1)[0].id);
    let got = rows.map(best).collect::<Result<Vec<_>>>()?;
    Ok(got == answer)
}

/// Mean bits over the text in windows; the first token of each is not scored.
fn bits_per_token(path: &Path, tokenizer: &Tokenizer, session: &mut Session) -> Result<(f64, usize)> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let ids = tokenizer.encode(&text, Specials::Parse)?;
    let (mut nats, mut count) = (0.0, 0);
    for window in ids.chunks(WINDOW).filter(|w| w.len() > 1) {
        session.rewind(0)?;
        let logits = session.feed_for_logits(&window[..window.len() - 1])?;
        for (row, &next) in logits.chunks_exact(session.model().vocab()).zip(&window[1..]) {
            let logprob = Logprobs::new(row)?.of(next).ok_or_else(|| anyhow!("id {next} out of range"))?;
            nats -= f64::from(logprob);
            count += 1;
        }
    }
    Ok((nats / std::f64::consts::LN_2 / count as f64, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A few items of every task; the whole evaluation is `cargo run --release -p xtask -- eval`.
    #[test]
    fn the_trained_checkpoint_answers_every_task_in_both_expert_modes() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for experts in ["w4a4", "w4a16"] {
            let options = Options {
                checkpoint: root.join("assets/tiny"),
                data: root.join("tests"),
                experts: Some(experts.into()),
                f32: false,
                items: 2,
            };
            let (tokenizer, mut session) = open(&options).expect("the checkpoint opens");
            let scores = tasks(&options, &tokenizer, &mut session).expect("every item runs");
            assert_eq!(scores.len(), 8);
            assert!(scores.values().all(|&(right, all)| right == 2 && all == 2), "{experts}: {scores:?}");
        }
    }
}
