//! The messages of a conversation.

use anyhow::anyhow;
use castiron_text::Message;

use crate::reply::Written;

/// A system message, if there is one, and turns of user and assistant.
#[derive(Clone, Debug)]
pub struct Talk {
    system: Option<Message>,
    turns: Vec<Turn>,
}

#[derive(Clone, Debug)]
struct Turn {
    user: Message,
    reply: Option<Message>,
    /// Replies drawn before this one.
    attempt: u64,
}

impl Talk {
    /// An empty conversation.
    pub fn new(system: Option<Message>) -> Self {
        Self { system, turns: Vec::new() }
    }

    /// What the template gets.
    pub fn messages(&self) -> Vec<Message> {
        let turns = self.turns.iter().flat_map(|t| [Some(&t.user), t.reply.as_ref()]);
        self.system.iter().chain(turns.flatten()).cloned().collect()
    }

    /// Adds a turn that has no reply yet.
    pub fn say(&mut self, user: Message) {
        self.turns.push(Turn { user, reply: None, attempt: 0 });
    }

    /// Gives the last turn its reply.
    pub fn answer(&mut self, written: &Written) {
        if let Some(turn) = self.turns.last_mut() {
            let message = Message::new("assistant", written.content.as_str());
            turn.reply = Some(match written.reasoning.is_empty() {
                true => message,
                false => message.with_reasoning(written.reasoning.as_str()),
            });
        }
    }

    /// Which reply to the last message is drawn: 0 for the first.
    pub fn attempt(&self) -> u64 {
        self.turns.last().map_or(0, |t| t.attempt)
    }

    /// Takes the last reply back, so that it can be drawn again.
    pub fn regenerate(&mut self) -> anyhow::Result<()> {
        let turn = self.turns.last_mut().ok_or_else(|| anyhow!("there is no reply to draw again"))?;
        turn.reply = None;
        turn.attempt += 1;
        Ok(())
    }

    /// Takes the last turn back.
    pub fn undo(&mut self) -> anyhow::Result<()> {
        self.turns.pop().map(|_| ()).ok_or_else(|| anyhow!("there is no turn to take back"))
    }

    /// Takes all turns back.
    pub fn reset(&mut self) {
        self.turns.clear();
    }

    /// Sets the system message.
    pub fn set_system(&mut self, message: Option<Message>) {
        self.system = message;
    }
}
