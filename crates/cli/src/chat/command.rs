//! What a line asks for.

use std::path::PathBuf;

use anyhow::anyhow;

/// Shown by `/help`.
pub const HELP: &str = "\
/regenerate    draw the last reply again, with the next seed
/undo          take back the last message and its reply
/reset         start again; the system message stays
/system TEXT   set the system message; without TEXT there is none
/save FILE     write the conversation as JSON
/help          this list
/quit          leave (Ctrl-D too)
A message that begins with a slash is written with two. Ctrl-C interrupts a reply and keeps what was said.
";

/// A line, understood.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// An empty line.
    Nothing,
    /// A message of the user.
    Say(String),
    /// Another reply to the last message.
    Regenerate,
    /// One turn back.
    Undo,
    /// An empty conversation.
    Reset,
    /// Another system message, or none.
    System(String),
    /// To a file.
    Save(PathBuf),
    /// The list.
    Help,
    /// The end.
    Quit,
}

impl Command {
    /// Reads a line.
    pub fn parse(line: &str) -> anyhow::Result<Self> {
        let text = line.trim();
        if text.is_empty() {
            return Ok(Self::Nothing);
        }
        let Some(command) = text.strip_prefix('/') else { return Ok(Self::Say(text.to_owned())) };
        if command.starts_with('/') {
            return Ok(Self::Say(command.to_owned()));
        }
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        let alone = |this: Self| match rest {
            "" => Ok(this),
            _ => Err(anyhow!("/{name} takes nothing, but found {rest:?}")),
        };
        match name {
            "regenerate" => alone(Self::Regenerate),
            "undo" => alone(Self::Undo),
            "reset" => alone(Self::Reset),
            "system" => Ok(Self::System(rest.to_owned())),
            "save" if rest.is_empty() => Err(anyhow!("/save needs the name of a file")),
            "save" => Ok(Self::Save(rest.into())),
            "help" => alone(Self::Help),
            "quit" => alone(Self::Quit),
            _ => Err(anyhow!(
                "there is no command /{name}; /help lists them, and // begins a message with a slash"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_or_commands() {
        let parse = |line: &str| Command::parse(line).map_err(|e| e.to_string());
        assert_eq!(parse("  "), Ok(Command::Nothing));
        assert_eq!(parse(" hello there "), Ok(Command::Say("hello there".into())));
        assert_eq!(parse("//etc is a path"), Ok(Command::Say("/etc is a path".into())));
        assert_eq!(parse("/undo"), Ok(Command::Undo));
        assert_eq!(parse("/system  Be brief. "), Ok(Command::System("Be brief.".into())));
        assert_eq!(parse("/system"), Ok(Command::System(String::new())));
        assert_eq!(parse("/save a b.json"), Ok(Command::Save("a b.json".into())));
        assert!(parse("/save").unwrap_err().contains("name of a file"));
        assert!(parse("/undo 2").unwrap_err().contains("takes nothing"));
        assert!(parse("/etc/passwd").unwrap_err().contains("/help"));
    }
}
