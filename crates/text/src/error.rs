//! The one error type of the crate. Messages say what is wrong, where, and what to do about it.

use std::fmt;

/// What can go wrong between text and token ids.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that must be text is not UTF-8.
    #[error("{what} is not valid UTF-8 (first bad byte at offset {offset}); download the file again")]
    InvalidUtf8 {
        /// Which file.
        what: &'static str,
        /// Byte offset of the first invalid sequence.
        offset: usize,
    },
    /// A file could not be parsed.
    #[error("{what} cannot be read: {detail}")]
    File {
        /// Which file.
        what: &'static str,
        /// The parser's message, with its position.
        detail: String,
    },
    /// The tokenizer is of a kind this crate would decode wrongly.
    #[error("unsupported tokenizer: {detail}; this engine reads byte-level BPE as the Qwen family ships it")]
    UnsupportedTokenizer {
        /// What was found.
        detail: String,
    },
    /// A token's stated id is not the id it would get.
    #[error(
        "token {token:?} is listed in {file} with id {listed} but the tokenizer gives it id {actual}; \
         the tokenizer files do not belong together, take both from one checkpoint"
    )]
    TokenId {
        /// Which file lists it.
        file: &'static str,
        /// The token.
        token: String,
        /// The id in the file.
        listed: u32,
        /// The id the tokenizer would use.
        actual: u32,
    },
    /// Two different tokens claim one id.
    #[error("tokens {first:?} and {second:?} both have id {id}; tokenizer.json is damaged")]
    DuplicateId {
        /// The id.
        id: u32,
        /// One claimant.
        first: String,
        /// The other.
        second: String,
    },
    /// The tokenizer failed on a text.
    #[error("the text cannot be tokenised: {detail}")]
    Encode {
        /// The tokenizer's message.
        detail: String,
    },
    /// A token id that names no token.
    #[error(
        "token id {id} names no token (ids run to {vocab_size}, holes excluded); \
         mask padded vocabulary rows before sampling"
    )]
    UnknownId {
        /// The id.
        id: u32,
        /// One past the largest id.
        vocab_size: u32,
    },
    /// A stop string that would match everywhere.
    #[error("stop string number {index} is empty; leave it out")]
    EmptyStop {
        /// Its place in the list.
        index: usize,
    },
    /// The template cannot be compiled.
    #[error("chat template {template:?} has a syntax error at line {line}: {detail}")]
    TemplateSyntax {
        /// Name of the template.
        template: String,
        /// 1-based line, 0 when unknown.
        line: usize,
        /// The compiler's message.
        detail: String,
    },
    /// The template refused the conversation through `raise_exception`.
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRaised {
        /// The template's own message, verbatim.
        message: String,
    },
    /// The template failed while rendering.
    #[error("chat template {template:?} failed at line {line}: {detail}")]
    TemplateRender {
        /// Name of the template.
        template: String,
        /// 1-based line, 0 when unknown.
        line: usize,
        /// The engine's message.
        detail: String,
    },
    /// The template used more than a render is allowed to.
    #[error(
        "chat template {template:?} stopped at line {line}: {limit} ({detail}); the template loops or grows without end"
    )]
    TemplateLimit {
        /// Name of the template.
        template: String,
        /// 1-based line, 0 when unknown.
        line: usize,
        /// Which limit.
        limit: TemplateLimit,
        /// The engine's message.
        detail: String,
    },
    /// There is no template to render.
    #[error("no chat template: {detail}")]
    NoTemplate {
        /// Where it was looked for.
        detail: String,
    },
    /// A message does not have the shape of a chat message.
    #[error("messages[{index}]: {detail}")]
    Message {
        /// Its place in the list.
        index: usize,
        /// What is wrong with it.
        detail: String,
    },
    /// A render option cannot be honoured.
    #[error("{option}: {detail}")]
    Option {
        /// Which one.
        option: String,
        /// What is wrong with it.
        detail: String,
    },
}

/// The limits that bound a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TemplateLimit {
    /// Instructions executed and bytes created.
    Fuel,
    /// Nesting of macros, includes, loops and values.
    Recursion,
    /// Bytes of rendered output.
    Output,
    /// Items of one `range`.
    Range,
    /// Size of one list, dict or namespace.
    Value,
    /// Bytes of template source.
    Source,
}

impl fmt::Display for TemplateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TemplateLimit::Fuel => "it used up its work budget",
            TemplateLimit::Recursion => "it nests too deeply",
            TemplateLimit::Output => "its output is too large",
            TemplateLimit::Value => "a value is too large",
            TemplateLimit::Range => "a range is too long",
            TemplateLimit::Source => "its source is too large",
        })
    }
}

/// `bytes` as text, or an error that says where it stops being text.
pub(crate) fn utf8<'a>(what: &'static str, bytes: &'a [u8]) -> Result<&'a str, Error> {
    std::str::from_utf8(bytes).map_err(|e| Error::InvalidUtf8 { what, offset: e.valid_up_to() })
}
