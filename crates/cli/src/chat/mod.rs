//! `castiron chat`: a conversation that keeps its state from turn to turn.

mod command;
mod lines;
mod talk;

use std::io::{IsTerminal, stderr, stdin};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, anyhow};
use castiron_engine::sampling::{Params, Sampler};
use castiron_engine::session::{Limits, Session};
use castiron_engine::stop::FinishReason;
use castiron_format::Checkpoint;
use castiron_text::RenderOptions;

use self::command::{Command, HELP};
use self::lines::{Line, Lines};
use self::talk::Talk;
use crate::args::{Numerics, Reply};
use crate::failure::Failure;
use crate::output::WholeFile;
use crate::progress::Reading;
use crate::reply::{self, Text, Writer, Written};
use crate::{choices, open, output};

/// Arguments of `chat`.
#[derive(clap::Args)]
pub struct Chat {
    /// A checkpoint directory; the built-in tiny model when not given.
    pub model: Option<PathBuf>,
    /// After each reply, print how many tokens the prompt had, how many of them were still held, and how many
    /// were generated.
    #[arg(long)]
    pub stats: bool,
    /// The reply.
    #[command(flatten)]
    pub reply: Reply,
    /// Numerics.
    #[command(flatten)]
    pub numerics: Numerics,
}

/// Runs the command.
pub fn chat(args: &Chat, json: bool) -> Result<(), Failure> {
    let checkpoint = open::checkpoint(args.model.as_deref())?;
    let mut room = Room::open(args, &checkpoint, json)?;
    let mut lines = Lines::new(Arc::clone(&room.interrupted))?;
    if lines.terminal() && !json {
        crate::output::remark("/help lists the commands; Ctrl-C interrupts a reply, Ctrl-D leaves.");
    }
    loop {
        let text = match lines.read()? {
            Line::Text(text) => text,
            Line::Again => continue,
            Line::End => return Ok(()),
        };
        let done = Command::parse(&text).map_err(Failure::input).and_then(|command| room.obey(command));
        match done {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => return Ok(()),
            // A person can try again; a script has gone wrong.
            Err(failure) if lines.terminal() && !failure.is_closed_pipe() => {
                failure.report(json);
            }
            Err(failure) => return Err(failure),
        }
    }
}

/// A conversation and the stream that holds its state.
struct Room<'a> {
    checkpoint: &'a Checkpoint,
    text: Text,
    options: RenderOptions,
    params: Params,
    limits: Limits,
    stops: &'a [String],
    session: Session,
    talk: Talk,
    /// Set by Ctrl-C.
    interrupted: Arc<AtomicBool>,
    json: bool,
    stats: bool,
}

impl<'a> Room<'a> {
    fn open(args: &'a Chat, checkpoint: &'a Checkpoint, json: bool) -> Result<Self, Failure> {
        let flags = &args.reply;
        let text = Text::open(checkpoint)?;
        if !text.has_template() {
            return Err(Failure::input(anyhow!(
                "the checkpoint has no chat template, so there are no turns; use run --raw"
            )));
        }
        let system = flags.system.as_deref().map(|s| text.message("system", s)).transpose()?;
        let options = reply::render_options(flags, args.model.is_none())?;
        let model = open::model(checkpoint, &args.numerics)?;
        let vocab = (text.tokenizer.vocab_size() as usize).min(model.vocab());
        let params = choices::params(checkpoint, &flags.sampling, vocab)?;
        Writer::new(&flags.stop, None, &text.tokenizer, false, json)?;
        let limits =
            Limits { max_tokens: flags.max_tokens, stop: choices::stop_ids(checkpoint, flags.ignore_eos) };
        let mut session = Session::new(model)?;
        session.set_chunk(args.numerics.chunk as usize);
        Ok(Self {
            checkpoint,
            text,
            options,
            params,
            limits,
            stops: &flags.stop,
            session,
            talk: Talk::new(system),
            interrupted: Arc::new(AtomicBool::new(false)),
            json,
            stats: args.stats,
        })
    }

    fn obey(&mut self, command: Command) -> Result<ControlFlow<()>, Failure> {
        match command {
            Command::Nothing => {}
            Command::Say(text) => {
                let before = self.talk.clone();
                self.talk.say(self.text.message("user", &text)?);
                self.turn(before)?;
            }
            Command::Regenerate => {
                let before = self.talk.clone();
                self.talk.regenerate().map_err(Failure::input)?;
                self.turn(before)?;
            }
            Command::Undo => self.talk.undo().map_err(Failure::input)?,
            Command::Reset => self.talk.reset(),
            Command::System(text) => {
                let message = (!text.is_empty()).then(|| self.text.message("system", &text)).transpose()?;
                self.talk.set_system(message);
            }
            Command::Save(path) => self.save(&path)?,
            Command::Help => eprint!("{HELP}"),
            Command::Quit => return Ok(ControlFlow::Break(())),
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Answers the conversation as it stands; `before` is put back when nothing comes of it.
    fn turn(&mut self, before: Talk) -> Result<(), Failure> {
        self.interrupted.store(false, Ordering::SeqCst);
        match self.answer() {
            Ok(Some(written)) => self.talk.answer(&written),
            Ok(None) => {
                self.talk = before;
                crate::output::remark("(interrupted before the first token; the message was taken back)");
            }
            Err(failure) => {
                self.talk = before;
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Reads what is new in the prompt and writes a reply; nothing when it was interrupted before that.
    fn answer(&mut self) -> Result<Option<Written>, Failure> {
        let started = Instant::now();
        let prompt = self.text.chat(&self.talk.messages(), &self.options)?;
        let Some(cached) = self.read(&prompt.ids)? else { return Ok(None) };
        let seed = self.params.seed.wrapping_add(self.talk.attempt());
        let mut sampler = Sampler::new(Params { seed, ..self.params.clone() }).map_err(Failure::input)?;
        let mut writer = Writer::new(self.stops, None, &self.text.tokenizer, prompt.thinking, self.json)?;
        let mut failed = None;
        let (limits, interrupted) = (&self.limits, &self.interrupted);
        let reply = self.session.generate(&mut sampler, limits, |token| {
            let next = writer.token(token, limits).unwrap_or_else(|e| {
                failed = Some(e);
                ControlFlow::Break(FinishReason::Cancelled)
            });
            let stop = interrupted.load(Ordering::SeqCst) && next.is_continue();
            if stop { ControlFlow::Break(FinishReason::Cancelled) } else { next }
        });
        if let Some(failure) = failed {
            return Err(failure);
        }
        let reply = reply?;
        let written = writer.finish(&reply.finish)?;
        let usage = (prompt.ids.len(), cached, reply.ids.len());
        if self.json {
            let mut all = written.json(&reply, usage.0, self.checkpoint);
            all["usage"]["cached_tokens"] = usage.1.into();
            all["seed"] = seed.into();
            output::line(&all.to_string())?;
        } else if self.stats {
            let ((prompt, cached, new), seconds) = (usage, started.elapsed().as_secs_f64());
            eprintln!("[prompt {prompt} tokens, {cached} cached; generated {new}; {seconds:.1} s]");
        }
        Ok(Some(written))
    }

    /// Reads what is new in a prompt; how many tokens were held, or nothing when it was interrupted.
    fn read(&mut self, prompt: &[u32]) -> Result<Option<usize>, Failure> {
        let reading = Reading::new(prompt.len());
        let resumed = self.session.resume(prompt, |done| {
            reading.at(done);
            if self.interrupted.load(Ordering::SeqCst) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        Ok(resumed.flow.is_continue().then_some(resumed.cached))
    }

    fn save(&self, path: &Path) -> Result<(), Failure> {
        let all = serde_json::json!({ "messages": self.talk.messages() });
        let text =
            serde_json::to_string_pretty(&all).context("writing the conversation").map_err(Failure::job)?;
        let mut file = WholeFile::create(path)?;
        file.write(text.as_bytes())?;
        file.write(b"\n")?;
        file.finish()
    }
}

/// Whether a person sits in front of both ends.
fn is_terminal() -> bool {
    stdin().is_terminal() && stderr().is_terminal()
}
