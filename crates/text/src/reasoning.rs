//! Separating the think block of a reply from its content.

use crate::{Error, StopStrings, Tokenizer};

/// The text that ends a think block.
const CLOSE: &str = "</think>";

/// How the end of the think block is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThinkClose {
    /// By this token id. The same characters spelled with other tokens do not end the block, so a model that
    /// *talks about* the tag does not end its thinking by accident.
    Token(u32),
    /// By the text `</think>`, however it was tokenised or cut.
    Text,
}

impl ThinkClose {
    /// By id when the tokenizer has `</think>` as one added token, by text otherwise.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        match tokenizer.token_to_id(CLOSE) {
            Some(id) if tokenizer.is_added(id) => ThinkClose::Token(id),
            _ => ThinkClose::Text,
        }
    }
}

/// What one push added to the two parts of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pieces<'a> {
    /// More reasoning.
    pub reasoning: &'a str,
    /// More content.
    pub content: &'a str,
}

/// Splits a streamed reply into reasoning and content.
///
/// The template's generation prompt ends with `<think>\n`, so generation starts *inside* the block; with thinking
/// off it ends with `</think>\n\n` and generation starts outside. The caller says which. Inside, everything before
/// the first `</think>` is reasoning, verbatim; everything after it is content, less up to two newlines that
/// directly follow the tag (the template's own `\n\n`). A block that is never closed is all reasoning. Outside,
/// everything is content, verbatim.
///
/// How the text was cut into pushes never changes the two results.
#[derive(Debug, Clone)]
pub struct ReasoningSplit {
    close: ThinkClose,
    /// Finds the tag in text; only used inside and with [`ThinkClose::Text`].
    tag: StopStrings,
    inside: bool,
    /// Newlines still to be dropped from the front of the content.
    newlines: u8,
}

impl ReasoningSplit {
    /// A splitter for a reply whose prompt left the think block open (`inside`) or not.
    pub fn new(close: ThinkClose, inside: bool) -> Result<Self, Error> {
        Ok(Self { close, tag: StopStrings::new(&[CLOSE])?, inside, newlines: 0 })
    }

    /// Whether a rendered prompt leaves the think block open: it ends with `<think>` and whitespace.
    pub fn prompt_is_inside(prompt: &str) -> bool {
        prompt.trim_end().ends_with("<think>")
    }

    /// Whether the reply is still in its think block.
    pub fn is_inside(&self) -> bool {
        self.inside
    }

    /// Adds one token: its id and the text that the detokeniser released for it (possibly empty, possibly with
    /// the end of an earlier character in front).
    pub fn push<'a>(&'a mut self, id: u32, text: &'a str) -> Pieces<'a> {
        match self.close {
            ThinkClose::Token(close) if self.inside => {
                if id != close {
                    return Pieces { reasoning: text, content: "" };
                }
                self.leave();
                // A detokeniser that skips the tag releases at most the tail of an earlier character here.
                Pieces { reasoning: text.strip_suffix(CLOSE).unwrap_or(text), content: "" }
            }
            _ => self.push_text(text),
        }
    }

    /// Adds text that no single id stands for, such as what the detokeniser released at the end.
    ///
    /// With [`ThinkClose::Token`] it never ends the block.
    pub fn push_text<'a>(&'a mut self, text: &'a str) -> Pieces<'a> {
        if !self.inside {
            return Pieces { reasoning: "", content: self.trim(text) };
        }
        if self.close != ThinkClose::Text {
            return Pieces { reasoning: text, content: "" };
        }
        // `push` only knows what came before the tag; the rest of this very text is content.
        let before = self.tag.push(text).len();
        if self.tag.matched().is_none() {
            return Pieces { reasoning: self.tag.last(before), content: "" };
        }
        self.leave();
        let after = text.len() - self.tag.after_match().len();
        let content = self.trim(&text[after..]);
        Pieces { reasoning: self.tag.last(before), content }
    }

    /// Ends the reply: text held back as a possible beginning of the tag is reasoning.
    pub fn finish(&mut self) -> Pieces<'_> {
        if self.inside && self.close == ThinkClose::Text {
            return Pieces { reasoning: self.tag.finish(), content: "" };
        }
        Pieces::default()
    }

    fn leave(&mut self) {
        self.inside = false;
        self.newlines = 2;
    }

    fn trim<'a>(&mut self, mut text: &'a str) -> &'a str {
        while self.newlines > 0 && !text.is_empty() {
            match text.strip_prefix('\n') {
                Some(rest) => {
                    self.newlines -= 1;
                    text = rest;
                }
                None => self.newlines = 0,
            }
        }
        text
    }
}
