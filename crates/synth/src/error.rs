//! The error type of the crate.

use std::io;

/// Result of everything fallible in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a checkpoint could not be made. The message says where and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A checkpoint file was refused, on reading or on writing.
    #[error(transparent)]
    Format(#[from] castiron_format::Error),
    /// The request does not fit the checkpoint, or contradicts itself.
    #[error("{0}")]
    Refused(String),
    /// A weight to quantise is not a number.
    #[error("tensor {0:?}: element {1} is not finite; it cannot be quantised")]
    NotFinite(String, u64),
    /// The system refused a file operation.
    #[error("{0}: {1}")]
    Io(String, #[source] io::Error),
}

impl Error {
    pub(crate) fn refused<T>(text: impl Into<String>) -> Result<T> {
        Err(Self::Refused(text.into()))
    }
}
