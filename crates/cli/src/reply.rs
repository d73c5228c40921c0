//! From messages to ids and from ids to text: what `run` and `chat` share.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::ops::ControlFlow;

use anyhow::anyhow;
use castiron_engine::logprobs::{Logprob, Logprobs};
use castiron_engine::session::{Limits, Reply, Token};
use castiron_engine::stop::FinishReason;
use castiron_engine::verify::token_hash;
use castiron_format::Checkpoint;
use castiron_text::{
    ChatTemplate, Detokenizer, Message, ReasoningSplit, RenderOptions, Specials, StopStrings, ThinkClose,
    Tokenizer,
};
use serde_json::{Value, json};

use crate::args::{self, Thinking};
use crate::failure::Failure;
use crate::output;

/// The text side of a checkpoint.
pub struct Text {
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    template: Result<ChatTemplate, castiron_text::Error>,
}

/// A prompt as the model reads it.
pub struct Prompt {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Whether the reply starts inside a think block.
    pub thinking: bool,
}

impl Text {
    /// Reads the tokenizer and the chat template of a checkpoint.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self, Failure> {
        let file = |name: &str| checkpoint.file(name).map_err(Failure::input);
        let json = file("tokenizer.json")?.ok_or_else(|| {
            Failure::input(anyhow!(
                "the checkpoint has no tokenizer.json; copy it from the model's repository"
            ))
        })?;
        let config = file("tokenizer_config.json")?;
        let jinja = file("chat_template.jinja")?;
        Ok(Self {
            tokenizer: Tokenizer::from_files(&json, config.as_deref()).map_err(Failure::input)?,
            template: ChatTemplate::from_files(jinja.as_deref(), config.as_deref()),
        })
    }

    /// Whether there is a chat template. One that does not compile counts: it is an error when it is used, not
    /// a reason to go on without it.
    pub fn has_template(&self) -> bool {
        !matches!(self.template, Err(castiron_text::Error::NoTemplate { .. }))
    }

    /// A prompt of plain text.
    pub fn raw(&self, text: &str) -> Result<Prompt, Failure> {
        let ids = self.tokenizer.encode(text, Specials::Text).map_err(Failure::input)?;
        Ok(Prompt { ids, thinking: false })
    }

    /// Renders messages with the chat template and opens a reply.
    pub fn chat(&self, messages: &[Message], options: &RenderOptions) -> Result<Prompt, Failure> {
        let template = self.template.as_ref().map_err(|e| Failure::input(e.clone()))?;
        let text = template.render(messages, options).map_err(Failure::input)?;
        let ids = self.tokenizer.encode(&text, Specials::Parse).map_err(Failure::input)?;
        Ok(Prompt { ids, thinking: ReasoningSplit::prompt_is_inside(&text) })
    }

    /// A message of `text`, refused when it holds a control token.
    pub fn message(&self, role: &str, text: &str) -> Result<Message, Failure> {
        match self.tokenizer.special_in_text(text) {
            None => Ok(Message::new(role, text)),
            Some((at, id)) => {
                let name = self.tokenizer.id_to_token(id).unwrap_or_default();
                Err(Failure::input(anyhow!(
                    "the {role} message holds the control token {name} at byte {at}, which would end or open a \
                     turn; remove it, or use run --raw"
                )))
            }
        }
    }
}

/// What the flags say about rendering. The built-in model thinks only when asked to.
pub fn render_options(flags: &args::Reply, built_in: bool) -> Result<RenderOptions, Failure> {
    let mut options = RenderOptions::chat();
    options.enable_thinking = flags.thinking.or(built_in.then_some(Thinking::Off)).map(|t| t == Thinking::On);
    if let Some(effort) = &flags.reasoning_effort {
        options.set_openai_effort(effort).map_err(Failure::input)?;
    }
    Ok(options)
}

/// Turns the ids of one reply into text on its way out.
pub struct Writer {
    detokenizer: Detokenizer,
    split: ReasoningSplit,
    stops: StopStrings,
    stop_texts: Vec<String>,
    json: bool,
    dim: Dim,
    logprobs: Option<usize>,
    reasoning: String,
    content: String,
    tokens: Vec<Value>,
}

/// A written reply.
pub struct Written {
    /// The think block.
    pub reasoning: String,
    /// The answer.
    pub content: String,
    /// Log-probabilities, when they were asked for.
    tokens: Option<Vec<Value>>,
}

impl Writer {
    /// A writer for one reply; `json` keeps the text back.
    pub fn new(
        stops: &[String],
        logprobs: Option<usize>,
        tokenizer: &Tokenizer,
        thinking: bool,
        json: bool,
    ) -> Result<Self, Failure> {
        Ok(Self {
            detokenizer: tokenizer.detokenizer(true),
            split: ReasoningSplit::new(ThinkClose::of(tokenizer), thinking).map_err(Failure::input)?,
            stops: StopStrings::new(stops).map_err(Failure::input)?,
            stop_texts: stops.to_vec(),
            json,
            dim: Dim::new(),
            logprobs,
            reasoning: String::new(),
            content: String::new(),
            tokens: Vec::new(),
        })
    }

    /// Takes one generated token; breaks when a stop string is complete.
    pub fn token(&mut self, token: Token<'_>, limits: &Limits) -> Result<ControlFlow<FinishReason>, Failure> {
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
        self.dim.thoughts(reasoning);
        if !content.is_empty() {
            self.dim.end();
        }
        output::say(&mut stdout().lock(), content)
    }

    /// Releases what was held back and ends the line.
    pub fn finish(mut self, finish: &FinishReason) -> Result<Written, Failure> {
        if !matches!(finish, FinishReason::StopString { .. }) {
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
            self.dim.end();
            output::line("")?;
        }
        let tokens = self.logprobs.map(|_| self.tokens);
        Ok(Written { reasoning: self.reasoning, content: self.content, tokens })
    }
}

impl Written {
    /// The reply as JSON.
    pub fn json(&self, reply: &Reply, prompt_tokens: usize, checkpoint: &Checkpoint) -> Value {
        let mut all = json!({
            "content": self.content,
            "reasoning": self.reasoning,
            "finish_reason": reply.finish.as_str(),
            "ids": reply.ids,
            "token_hash": token_hash(&reply.ids),
            "usage": { "prompt_tokens": prompt_tokens, "completion_tokens": reply.ids.len() },
            "checkpoint": checkpoint.digest(),
        });
        if let Some(tokens) = &self.tokens {
            all["logprobs"] = Value::Array(tokens.clone());
        }
        all
    }
}

/// Thoughts on standard error, dimmed when that is a terminal. They are a side channel: a closed standard
/// error must not end the reply.
struct Dim {
    terminal: bool,
    open: bool,
    /// Whether the last thought ended a line.
    line_ended: bool,
}

impl Dim {
    fn new() -> Self {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        Self { terminal: stderr().is_terminal() && !plain, open: false, line_ended: false }
    }

    fn thoughts(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let start = if self.terminal && !self.open { "\x1b[2m" } else { "" };
        (self.open, self.line_ended) = (true, text.ends_with('\n'));
        let _ = stderr().write_all(format!("{start}{text}").as_bytes());
    }

    /// Back to plain text, on a new line.
    fn end(&mut self) {
        if self.terminal && self.open {
            let end: &[u8] = if self.line_ended { b"\x1b[0m" } else { b"\x1b[0m\n" };
            let _ = stderr().write_all(end);
        }
        self.open = false;
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
