//! The one error type of the crate.

use std::fmt;
use std::io;

/// Result of everything fallible in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What was wrong with a checkpoint. The message says where (file, tensor or key) and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
    details: Vec<String>,
    #[source]
    source: Option<io::Error>,
}

/// The category of an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A file could not be opened, listed, mapped or read.
    Io,
    /// A file that must be there is not.
    MissingFile,
    /// A directory, pipe, device or socket where a file is expected.
    NotAFile,
    /// A JSON side file is larger than any real one, or not JSON of the expected form.
    BadJson,
    /// A safetensors file is shorter than its own header says, or than 8 bytes.
    Truncated,
    /// The header is longer than [`crate::safetensors::MAX_HEADER`] or has more than [`crate::safetensors::MAX_TENSORS`]
    /// tensors.
    HeaderTooLarge,
    /// The header is not a JSON object of the safetensors form.
    BadHeader,
    /// A key, field, tensor or file appears twice.
    Duplicate,
    /// A dtype string that is not part of the safetensors format.
    UnknownDtype,
    /// A shape has too many dimensions or its size overflows 64 bits.
    ShapeOverflow,
    /// Shape times dtype size differs from the byte range, or the range is reversed.
    BadRange,
    /// A byte range ends after the end of the file.
    OutOfBounds,
    /// Two tensors of a file share bytes.
    Overlap,
    /// Bytes of a file belong to no tensor (between two tensors or after the last).
    Gap,
    /// `__metadata__` is not a map of strings.
    BadMetadata,
    /// The index maps a tensor to a shard that lacks it, or names a file outside the directory.
    BadIndex,
    /// `config.json` or `generation_config.json` lacks a key or has a value out of range.
    Config,
    /// Understood, but not supported by this engine.
    Unsupported,
    /// The census found missing, unexpected, misshapen or wrongly typed tensors.
    Census,
    /// A stored value is impossible: a scale that is not finite, a hash constant that differs from the derived one.
    BadValue,
    /// A row id outside the n-gram table, or a buffer of the wrong length.
    Row,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), details: Vec::new(), source: None }
    }

    pub(crate) fn io(what: impl fmt::Display, source: io::Error) -> Self {
        let kind =
            if source.kind() == io::ErrorKind::NotFound { ErrorKind::MissingFile } else { ErrorKind::Io };
        Self { kind, message: format!("{what}: {source}"), details: Vec::new(), source: Some(source) }
    }

    pub(crate) fn with_details(mut self, details: Vec<String>) -> Self {
        self.details = details;
        self
    }

    /// The category.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Every finding of a census, one a line (the message prints the first few of each sort); empty for other errors.
    pub fn details(&self) -> &[String] {
        &self.details
    }
}

/// A name from a file, quoted, with control characters escaped and the middle of a very long one left out.
pub(crate) fn quote(name: &str) -> String {
    const KEEP: usize = 80;
    if name.chars().count() <= 2 * KEEP {
        return format!("{name:?}");
    }
    let head: String = name.chars().take(KEEP).collect();
    let mut tail: Vec<char> = name.chars().rev().take(KEEP).collect();
    tail.reverse();
    format!("{head:?}...{:?}", tail.into_iter().collect::<String>())
}

/// At most 200 characters of a message made by a parser, which may quote the file.
pub(crate) fn clip(message: impl fmt::Display) -> String {
    let text = message.to_string();
    if text.chars().count() <= 200 { text } else { text.chars().take(200).chain("...".chars()).collect() }
}
