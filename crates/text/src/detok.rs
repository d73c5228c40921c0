//! Ids to text, one id at a time.

use crate::{Error, Tokenizer};

/// Turns a stream of bytes into a stream of text.
///
/// The concatenation of everything [`push`](Self::push) and [`finish`](Self::finish) return equals
/// [`String::from_utf8_lossy`] of the concatenated input, however the input was cut. At most three bytes (an
/// incomplete character) are held back between calls.
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    /// The incomplete character, 0 to 3 bytes.
    pending: Vec<u8>,
    /// What the last call returned.
    chunk: String,
    scanned: u64,
}

impl Utf8Stream {
    /// An empty stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes and returns the text that is now certain.
    pub fn push(&mut self, bytes: &[u8]) -> &str {
        self.chunk.clear();
        self.scanned += (self.pending.len() + bytes.len()) as u64;
        if self.pending.is_empty() {
            let kept = decode(bytes, &mut self.chunk);
            self.pending.extend_from_slice(&bytes[kept..]);
        } else {
            self.pending.extend_from_slice(bytes);
            let kept = decode(&self.pending, &mut self.chunk);
            self.pending.drain(..kept);
        }
        &self.chunk
    }

    /// Ends the stream: an incomplete character at the end becomes one U+FFFD.
    pub fn finish(&mut self) -> &str {
        self.chunk.clear();
        if !self.pending.is_empty() {
            self.pending.clear();
            self.chunk.push(char::REPLACEMENT_CHARACTER);
        }
        &self.chunk
    }

    /// Bytes held back because they may be the beginning of a character.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }

    /// Total bytes looked at so far. Stays below four times the bytes pushed plus three a push.
    pub fn bytes_scanned(&self) -> u64 {
        self.scanned
    }
}

/// Appends the decided text of `bytes` to `out`; returns where the undecided tail starts.
fn decode(bytes: &[u8], out: &mut String) -> usize {
    let mut at = 0;
    for chunk in bytes.utf8_chunks() {
        out.push_str(chunk.valid());
        at += chunk.valid().len();
        let bad = chunk.invalid();
        if bad.is_empty() {
            continue;
        }
        let incomplete = std::str::from_utf8(bad).is_err_and(|e| e.error_len().is_none());
        if incomplete && at + bad.len() == bytes.len() {
            return at;
        }
        out.push(char::REPLACEMENT_CHARACTER);
        at += bad.len();
    }
    at
}

/// Turns generated ids into text, one id at a time. Made by [`Tokenizer::detokenizer`].
///
/// The concatenated output equals [`String::from_utf8_lossy`] of the concatenated [`Tokenizer::token_bytes`]
/// (without the special tokens when they are skipped): characters that span tokens come out whole, bytes that can
/// never become a character come out as U+FFFD. No clean-up of spaces is done.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    utf8: Utf8Stream,
}

impl Detokenizer {
    pub(crate) fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, utf8: Utf8Stream::new() }
    }

    /// Adds one id and returns the text that is now certain (often empty inside a multi-byte character).
    ///
    /// A skipped special token adds nothing, not even a boundary. An id that names no token is an error and leaves
    /// the stream as it was.
    pub fn push(&mut self, id: u32) -> Result<&str, Error> {
        let Some(bytes) = self.tokenizer.token_bytes(id) else {
            return Err(self.tokenizer.unknown(id));
        };
        let bytes = if self.skip_special && self.tokenizer.is_special(id) { &[] } else { bytes };
        Ok(self.utf8.push(bytes))
    }

    /// Ends the reply: an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> &str {
        self.utf8.finish()
    }

    /// Bytes held back because they may be the beginning of a character.
    pub fn pending(&self) -> &[u8] {
        self.utf8.pending()
    }

    /// Total bytes looked at so far: the measure of work, linear in the reply.
    pub fn bytes_scanned(&self) -> u64 {
        self.utf8.bytes_scanned()
    }
}
