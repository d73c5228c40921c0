//! `castiron run`: a prompt in, a reply out as it is written.

use std::io::{Read, Write, stderr, stdout};
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context, anyhow};
use castiron_engine::logprobs::{Logprob, Logprobs};
use castiron_engine::sampling::Sampler;
use castiron_engine::session::{Limits, Reply, Session, Token};
use castiron_engine::stop::FinishReason;
use castiron_format::Checkpoint;
use castiron_text::{
    ChatTemplate, Detokenizer, Message, ReasoningSplit, RenderOptions, Specials, StopStrings, ThinkClose, Tokenizer,
};
use serde_json::{Value, json};

use crate::args::{Run, Thinking};
use crate::failure::Failure;
use crate::{choices, open, output};

/// Runs the command.
pub fn run(args: &Run, json: bool) -> Result<(), Failure> {
    let (model_path, prompt) = match args.words.as_slice() {
        [model, prompt] => (Some(Path::new(model)), prompt.as_str()),
        [prompt] => (None, prompt.as_str()),
        _ => return Err(Failure::input(anyhow!("run takes a prompt, or a model and a prompt"))),
    };
    if args.logprobs.is_some() && !json {
        return Err(Failure::input(anyhow!("--logprobs is shown in JSON only: add --json")));
    }
    let prompt = read_prompt(prompt)?;
    let checkpoint = open::checkpoint(model_path)?;
    let tokenizer = tokenizer(&checkpoint)?;
    let (ids, thinking) = encode(args, &checkpoint, &tokenizer, &prompt)?;
    let model = open::model(&checkpoint, &args.numerics)?;
    let vocab = (tokenizer.vocab_size() as usize).min(model.vocab());
    let mut sampler =
        Sampler::new(choices::params(&checkpoint, &args.sampling, vocab)?).map_err(Failure::input)?;
    let limits = Limits { max_tokens: args.max_tokens, stop: choices::stop_ids(&checkpoint, args.ignore_eos) };
    let mut writer = Writer::new(args, &tokenizer, thinking, json)?;

    let mut session = Session::new(model)?;
    session.set_chunk(args.numerics.chunk as usize);
    let _ = session.feed(&ids, |_| ControlFlow::Continue(()))?;
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
    writer.finish(reply?, ids.len(), &checkpoint)
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

fn tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer, Failure> {
    let json = checkpoint.file("tokenizer.json").ok_or_else(|| {
        Failure::input(anyhow!("the checkpoint has no readable tokenizer.json; copy it from the model's repository"))
    })?;
    let config = checkpoint.file("tokenizer_config.json");
    Tokenizer::from_files(&json, config.as_deref()).map_err(Failure::input)
}

/// The prompt's ids, and whether the reply starts inside a think block.
fn encode(
    args: &Run,
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    prompt: &str,
) -> Result<(Vec<u32>, bool), Failure> {
    let (jinja, config) = (checkpoint.file("chat_template.jinja"), checkpoint.file("tokenizer_config.json"));
    let template = ChatTemplate::from_files(jinja.as_deref(), config.as_deref());
    let chat = match (&template, args.chat, args.raw) {
        (_, true, _) => true,
        (_, _, true) => false,
        // A template that does not compile is an error below, not a reason to go on without it.
        (Ok(template), ..) => !template.names().is_empty(),
        (Err(_), ..) => true,
    };
    if !chat {
        let ids = tokenizer.encode(prompt, Specials::Text).map_err(Failure::input)?;
        return Ok((ids, false));
    }
    let mut messages = Vec::new();
    for (role, text) in [("system", args.system.as_deref()), ("user", Some(prompt))] {
        let Some(text) = text else { continue };
        if let Some((at, id)) = tokenizer.special_in_text(text) {
            let name = tokenizer.id_to_token(id).unwrap_or_default();
            return Err(Failure::input(anyhow!(
                "the {role} message holds the control token {name} at byte {at}, which would end or open a turn; \
                 remove it, or use --raw"
            )));
        }
        messages.push(Message::new(role, text));
    }
    let mut options = RenderOptions::chat();
    let built_in = args.words.len() == 1;
    options.enable_thinking = args.thinking.or(built_in.then_some(Thinking::Off)).map(|t| t == Thinking::On);
    if let Some(effort) = &args.reasoning_effort {
        options.set_openai_effort(effort).map_err(Failure::input)?;
    }
    let text = template.and_then(|t| t.render(&messages, &options)).map_err(Failure::input)?;
    let ids = tokenizer.encode(&text, Specials::Parse).map_err(Failure::input)?;
    Ok((ids, ReasoningSplit::prompt_is_inside(&text)))
}

/// Turns ids into text on its way out.
struct Writer {
    detokenizer: Detokenizer,
    split: ReasoningSplit,
    stops: StopStrings,
    stop_texts: Vec<String>,
    json: bool,
    logprobs: Option<usize>,
    reasoning: String,
    content: String,
    tokens: Vec<Value>,
}

impl Writer {
    fn new(args: &Run, tokenizer: &Tokenizer, thinking: bool, json: bool) -> Result<Self, Failure> {
        Ok(Self {
            detokenizer: tokenizer.detokenizer(true),
            split: ReasoningSplit::new(ThinkClose::of(tokenizer), thinking).map_err(Failure::input)?,
            stops: StopStrings::new(&args.stop).map_err(Failure::input)?,
            stop_texts: args.stop.clone(),
            json,
            logprobs: args.logprobs,
            reasoning: String::new(),
            content: String::new(),
            tokens: Vec::new(),
        })
    }

    /// Takes one generated token; breaks when a stop string is complete.
    fn token(&mut self, token: Token<'_>, limits: &Limits) -> Result<ControlFlow<FinishReason>, Failure> {
        if let Some(n) = self.logprobs {
            self.tokens.push(logprobs(&token, n)?);
        }
        if limits.stop.contains(token.id) {
            return Ok(ControlFlow::Continue(()));
        }
        let text = self.detokenizer.push(token.id).map_err(Failure::job)?.to_owned();
        let pieces = self.split.push(token.id, &text);
        let (reasoning, content) = (pieces.reasoning.to_owned(), pieces.content.to_owned());
        self.say(&reasoning, &content)?;
        Ok(match self.stops.matched() {
            Some(i) => ControlFlow::Break(FinishReason::StopString { text: self.stop_texts[i].clone() }),
            None => ControlFlow::Continue(()),
        })
    }

    /// Reasoning goes to standard error, content past the stop strings to standard output; with JSON both are
    /// kept.
    fn say(&mut self, reasoning: &str, content: &str) -> Result<(), Failure> {
        let content = self.stops.push(content);
        self.reasoning.push_str(reasoning);
        self.content.push_str(content);
        if self.json {
            return Ok(());
        }
        // Thoughts are a side channel: a closed standard error must not end the reply.
        let _ = stderr().write_all(reasoning.as_bytes());
        output::say(&mut stdout().lock(), content)
    }

    fn finish(mut self, reply: Reply, prompt_tokens: usize, checkpoint: &Checkpoint) -> Result<(), Failure> {
        if !matches!(reply.finish, FinishReason::StopString { .. }) {
            let text = self.detokenizer.finish().to_owned();
            let pieces = self.split.push_text(&text);
            let (reasoning, content) = (pieces.reasoning.to_owned(), pieces.content.to_owned());
            self.say(&reasoning, &content)?;
            let pieces = self.split.finish();
            let (reasoning, content) = (pieces.reasoning.to_owned(), pieces.content.to_owned());
            self.say(&reasoning, &content)?;
            let held = self.stops.finish().to_owned();
            self.content.push_str(&held);
            if !self.json {
                output::say(&mut stdout().lock(), &held)?;
            }
        }
        if !self.json {
            return output::line("");
        }
        let ids: Vec<u8> = reply.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let mut all = json!({
            "content": self.content,
            "reasoning": self.reasoning,
            "finish_reason": reply.finish.as_str(),
            "ids": reply.ids,
            "token_hash": blake3::hash(&ids).to_hex().as_str(),
            "usage": { "prompt_tokens": prompt_tokens, "completion_tokens": reply.ids.len() },
            "checkpoint": checkpoint.digest(),
        });
        if self.logprobs.is_some() {
            all["logprobs"] = Value::Array(self.tokens);
        }
        output::line(&all.to_string())
    }
}

fn logprobs(token: &Token<'_>, n: usize) -> Result<Value, Failure> {
    let all = Logprobs::new(token.logits).map_err(Failure::job)?;
    let entry = |p: &Logprob| json!({ "id": p.id, "logprob": p.logprob });
    Ok(json!({
        "id": token.id,
        "logprob": all.of(token.id),
        "top": all.top(n).iter().map(entry).collect::<Vec<_>>(),
    }))
}
