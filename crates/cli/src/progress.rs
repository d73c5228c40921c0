//! Progress on standard error, only when that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How often a spinner turns.
const TICK: Duration = Duration::from_millis(120);
/// Prompts shorter than this are read without a word.
const LONG_PROMPT: usize = 64;

/// A spinner with a message while something of unknown length is done; gone when dropped.
pub struct Working(ProgressBar);

impl Working {
    /// Starts turning.
    pub fn new(what: impl Into<String>) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(what.into());
        if !bar.is_hidden() {
            bar.enable_steady_tick(TICK);
        }
        Self(bar)
    }

    /// Says what is done now.
    pub fn say(&self, what: impl Into<String>) {
        self.0.set_message(what.into());
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A bar while a prompt is read; gone when dropped.
pub struct Reading(ProgressBar);

impl Reading {
    /// A bar for `tokens` tokens.
    pub fn new(tokens: usize) -> Self {
        let target =
            if tokens < LONG_PROMPT { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(Some(tokens as u64), target);
        let template = "reading the prompt {bar:30} {pos}/{len} tokens, {per_sec}, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("#>-"));
        }
        Self(bar)
    }

    /// `done` tokens have been read.
    pub fn at(&self, done: usize) {
        self.0.set_position(done as u64);
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
