//! `castiron run`: a prompt in, a reply out as it is written.

use std::io::Read;
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context, anyhow};
use castiron_engine::sampling::Sampler;
use castiron_engine::session::{Limits, Session};
use castiron_engine::stop::FinishReason;

use crate::args::Run;
use crate::failure::Failure;
use crate::progress::Reading;
use crate::reply::{self, Prompt, Text, Writer};
use crate::{choices, open, output};

/// Runs the command.
pub fn run(args: &Run, json: bool) -> Result<(), Failure> {
    let (model_path, prompt) = match args.words.as_slice() {
        [model, prompt] => (Some(Path::new(model)), prompt),
        [word] if Path::new(word).join("config.json").is_file() => {
            return Err(Failure::input(anyhow!(
                "{} is a checkpoint: give a prompt after it",
                word.display()
            )));
        }
        [prompt] => (None, prompt),
        _ => return Err(Failure::input(anyhow!("run takes a prompt, or a model and a prompt"))),
    };
    let prompt = prompt.to_str().ok_or_else(|| Failure::input(anyhow!("the prompt is not UTF-8")))?;
    if args.logprobs.is_some() && !json {
        return Err(Failure::input(anyhow!("--logprobs is shown in JSON only: add --json")));
    }
    let prompt = read_prompt(prompt)?;
    let checkpoint = open::checkpoint(model_path)?;
    let text = Text::open(&checkpoint)?;
    let prompt = encode(args, &text, &prompt)?;
    let model = open::model(&checkpoint, &args.numerics)?;
    let flags = &args.reply;
    let vocab = (text.tokenizer.vocab_size() as usize).min(model.vocab());
    let mut sampler =
        Sampler::new(choices::params(&checkpoint, &flags.sampling, vocab)?).map_err(Failure::input)?;
    let limits =
        Limits { max_tokens: flags.max_tokens, stop: choices::stop_ids(&checkpoint, flags.ignore_eos) };
    let mut writer = Writer::new(&flags.stop, args.logprobs, &text.tokenizer, prompt.thinking, json)?;

    let mut session = Session::new(model)?;
    session.set_chunk(args.numerics.chunk as usize);
    let reading = Reading::new(prompt.ids.len());
    let _ = session.feed(&prompt.ids, |done| {
        reading.at(done);
        ControlFlow::Continue(())
    })?;
    drop(reading);
    let mut failed = None;
    let reply = session.generate(&mut sampler, &limits, |token| {
        writer.token(token, &limits).unwrap_or_else(|e| {
            failed = Some(e);
            ControlFlow::Break(FinishReason::Cancelled)
        })
    });
    if let Some(failure) = failed {
        return Err(failure);
    }
    let reply = reply?;
    let written = writer.finish(&reply.finish)?;
    if !json {
        return Ok(());
    }
    output::line(&written.json(&reply, prompt.ids.len(), &checkpoint).to_string())
}

fn read_prompt(prompt: &str) -> Result<String, Failure> {
    if prompt != "-" {
        return Ok(prompt.to_owned());
    }
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes).context("reading the prompt").map_err(Failure::input)?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Failure::input(anyhow!("the prompt is not UTF-8: byte {at} of standard input is invalid"))
    })
}

/// The prompt as it stands, or as the user's turn of a chat.
fn encode(args: &Run, text: &Text, prompt: &str) -> Result<Prompt, Failure> {
    if args.raw || !(args.chat || text.has_template()) {
        return text.raw(prompt);
    }
    let mut messages = Vec::new();
    for (role, content) in [("system", args.reply.system.as_deref()), ("user", Some(prompt))] {
        messages.extend(content.map(|c| text.message(role, c)).transpose()?);
    }
    text.chat(&messages, &reply::render_options(&args.reply, args.words.len() == 1)?)
}
