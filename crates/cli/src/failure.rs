//! How a command fails: one clear chain on standard error, and an exit code.

use std::process::ExitCode;

use crate::output;

/// A failed command.
#[derive(Debug)]
pub struct Failure {
    /// Whether the input or the usage was at fault (exit code 2) rather than the job (exit code 1).
    input: bool,
    error: anyhow::Error,
}

impl Failure {
    /// Bad input or usage: exit code 2.
    pub fn input(error: impl Into<anyhow::Error>) -> Self {
        Self { input: true, error: error.into() }
    }

    /// The job failed: exit code 1.
    pub fn job(error: impl Into<anyhow::Error>) -> Self {
        Self { input: false, error: error.into() }
    }

    /// Prints the chain and gives the exit code. A reader that closed our output early is no failure.
    pub fn report(&self, json: bool) -> ExitCode {
        if self.is_closed_pipe() {
            return ExitCode::SUCCESS;
        }
        let code = if self.input { 2 } else { 1 };
        if json {
            output::remark(&serde_json::json!({ "error": self.chain(), "exit_code": code }).to_string());
        } else {
            output::remark(&format!("castiron: {}", self.chain()));
        }
        ExitCode::from(code)
    }

    /// Whether a reader closed our output.
    pub fn is_closed_pipe(&self) -> bool {
        let closed = |e: &std::io::Error| e.kind() == std::io::ErrorKind::BrokenPipe;
        self.error.chain().filter_map(|e| e.downcast_ref()).any(closed)
    }

    /// The messages of the chain. A message that already ends with its cause's is not said twice.
    fn chain(&self) -> String {
        let mut text = String::new();
        for part in self.error.chain().map(ToString::to_string) {
            if !text.contains(&part) {
                if !text.is_empty() {
                    text.push_str(": ");
                }
                text.push_str(&part);
            }
        }
        text
    }
}

/// Sorts engine errors into bad input and failed jobs.
impl From<castiron_engine::session::Error> for Failure {
    fn from(e: castiron_engine::session::Error) -> Self {
        use castiron_engine::session::Error as E;
        match e {
            E::PromptTooLong { .. } | E::EmptyPrompt | E::Rewind { .. } => Self::input(e),
            E::Model(e) => e.into(),
            e => Self::job(e),
        }
    }
}

impl From<castiron_model::Error> for Failure {
    fn from(e: castiron_model::Error) -> Self {
        use castiron_model::Error as E;
        match e {
            E::Format(_) | E::Options(_) | E::Weight(_) | E::Token { .. } | E::Context { .. } => {
                Self::input(e)
            }
            e => Self::job(e),
        }
    }
}
