//! Lines of a person at a terminal, or of a script.

use std::io::{BufRead, stdin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, anyhow};

use crate::failure::Failure;

/// What was read.
pub enum Line {
    /// A line.
    Text(String),
    /// Nothing yet.
    Again,
    /// There will be no more.
    End,
}

/// Where lines come from.
pub struct Lines {
    /// Set by Ctrl-C while a reply is written. A second Ctrl-C while it is set ends the program.
    interrupted: Arc<AtomicBool>,
    #[cfg(unix)]
    editor: Option<rustyline::DefaultEditor>,
}

impl Lines {
    /// Line editing with a history when a person sits at a terminal, plain lines otherwise.
    pub fn new(interrupted: Arc<AtomicBool>) -> Result<Self, Failure> {
        use signal_hook::{consts::SIGINT, flag};
        let flag = Arc::clone(&interrupted);
        // In this order: the first Ctrl-C only sets the flag, one that finds it set ends the program.
        flag::register_conditional_shutdown(SIGINT, 130, flag)
            .and_then(|_| flag::register(SIGINT, Arc::clone(&interrupted)))
            .context("cannot listen for Ctrl-C")
            .map_err(Failure::job)?;
        #[cfg(unix)]
        let editor = match super::is_terminal() {
            true => {
                // The terminal itself, so that the prompt stays out of a redirected reply.
                let config = rustyline::Config::builder().behavior(rustyline::Behavior::PreferTerm).build();
                let editor = rustyline::DefaultEditor::with_config(config);
                Some(editor.context("cannot edit lines here").map_err(Failure::job)?)
            }
            false => None,
        };
        Ok(Self {
            interrupted,
            #[cfg(unix)]
            editor,
        })
    }

    /// Whether a person types them.
    pub fn terminal(&self) -> bool {
        super::is_terminal()
    }

    /// The next line.
    pub fn read(&mut self) -> Result<Line, Failure> {
        #[cfg(unix)]
        if let Some(editor) = &mut self.editor {
            return edited(editor, &self.interrupted);
        }
        if self.terminal() {
            eprint!("> ");
        }
        // Nothing can be interrupted here but the program.
        self.interrupted.store(true, Ordering::SeqCst);
        let mut bytes = Vec::new();
        let read =
            stdin().lock().read_until(b'\n', &mut bytes).context("reading a line").map_err(Failure::job)?;
        self.interrupted.store(false, Ordering::SeqCst);
        if read == 0 {
            return Ok(Line::End);
        }
        String::from_utf8(bytes).map(Line::Text).map_err(|e| {
            let at = e.utf8_error().valid_up_to();
            Failure::input(anyhow!("a line is not UTF-8: its byte {at} is invalid"))
        })
    }
}

/// A line from the editor. One Ctrl-C clears the line; a second one, or one after an interrupted reply, leaves.
#[cfg(unix)]
fn edited(editor: &mut rustyline::DefaultEditor, interrupted: &AtomicBool) -> Result<Line, Failure> {
    use rustyline::error::ReadlineError;
    match editor.readline("> ") {
        Ok(text) => {
            interrupted.store(false, Ordering::SeqCst);
            editor.add_history_entry(&text).context("keeping the history").map_err(Failure::job)?;
            Ok(Line::Text(text))
        }
        Err(ReadlineError::Interrupted) if interrupted.swap(true, Ordering::SeqCst) => Ok(Line::End),
        Err(ReadlineError::Interrupted) => {
            crate::output::remark("(Ctrl-C again or Ctrl-D leaves)");
            Ok(Line::Again)
        }
        Err(ReadlineError::Eof) => Ok(Line::End),
        Err(e) => Err(Failure::job(anyhow::Error::new(e).context("reading a line"))),
    }
}
