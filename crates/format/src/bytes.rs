//! Cheaply cloned, immutable byte ranges.

use std::fmt;
use std::fs::File;
use std::ops::{Deref, Range};
use std::sync::Arc;

use memmap2::Mmap;

/// An immutable range of bytes: a view on a mapped file, on bytes embedded in the binary, or on owned bytes.
///
/// Cloning copies a pointer. No alignment is promised: a tensor may start at any offset of its file.
#[derive(Clone)]
pub struct Bytes {
    owner: Owner,
    range: Range<usize>,
}

#[derive(Clone)]
enum Owner {
    Static(&'static [u8]),
    Shared(Arc<Vec<u8>>),
    Mapped(Arc<Mmap>),
}

impl Bytes {
    /// Bytes that live as long as the program.
    pub fn from_static(bytes: &'static [u8]) -> Self {
        Self { owner: Owner::Static(bytes), range: 0..bytes.len() }
    }

    /// Maps a whole file read-only. An empty file gives empty bytes.
    pub(crate) fn map(file: &File) -> std::io::Result<Self> {
        if file.metadata()?.len() == 0 {
            return Ok(Self::from_static(&[]));
        }
        // SAFETY: the mapping is read-only and private to this value, which keeps it alive. As for every mapped file, the
        // file must not be truncated or rewritten while it is in use; checkpoint files are replaced, not edited, by the
        // tools that write them, and this is stated in the documentation of `Checkpoint::open`.
        let map = unsafe { Mmap::map(file)? };
        let range = 0..map.len();
        Ok(Self { owner: Owner::Mapped(Arc::new(map)), range })
    }

    /// The sub-range `range`, sharing the owner; `None` when it does not lie inside.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(Self { owner: self.owner.clone(), range: start..start + (range.end - range.start) })
    }

    /// Whether the bytes are a view on a mapped file, so that reading them may touch the disk.
    pub fn is_mapped(&self) -> bool {
        matches!(self.owner, Owner::Mapped(_))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let all: &[u8] = match &self.owner {
            Owner::Static(bytes) => bytes,
            Owner::Shared(bytes) => bytes,
            Owner::Mapped(map) => map,
        };
        &all[self.range.clone()]
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Vec<u8>> for Bytes {
    /// Takes the buffer as it is: zero pages that were never touched stay untouched.
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { owner: Owner::Shared(Arc::new(bytes)), range }
    }
}

impl From<&[u8]> for Bytes {
    /// Copies once.
    fn from(bytes: &[u8]) -> Self {
        bytes.to_vec().into()
    }
}

impl Default for Bytes {
    fn default() -> Self {
        Self::from_static(&[])
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = match self.owner {
            Owner::Static(_) => "static",
            Owner::Shared(_) => "shared",
            Owner::Mapped(_) => "mapped",
        };
        write!(f, "Bytes({owner}, {} bytes)", self.range.len())
    }
}
