//! What can be wrong with a request to the model.

/// An error of the model. A call that returns one has changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The checkpoint could not be read.
    #[error(transparent)]
    Format(#[from] castiron_format::Error),
    /// The checkpoint or the options ask for something that does not fit together.
    #[error("{0}")]
    Options(String),
    /// A weight has a length that does not fit its shape.
    #[error("weight {0} does not fit its shape; the checkpoint is damaged")]
    Weight(String),
    /// A token id outside the vocabulary.
    #[error("token id {token} at position {position} is out of range; the vocabulary has {vocab} ids")]
    Token {
        /// The id.
        token: u32,
        /// Its position.
        position: u32,
        /// Ids of the vocabulary.
        vocab: usize,
    },
    /// A position past the context.
    #[error(
        "position {position} is past the context of {context} tokens; shorten the prompt or ask for fewer new tokens"
    )]
    Context {
        /// The position asked for.
        position: u32,
        /// Tokens of the context.
        context: u32,
    },
    /// A row that does not continue its stream.
    #[error("row {row} stands at position {found}, but its stream goes on at {expected}")]
    Position {
        /// Index of the row.
        row: usize,
        /// Its position.
        found: u32,
        /// The position expected.
        expected: u32,
    },
    /// Rows of one slot that are not side by side, or an empty batch.
    #[error("{0}")]
    Batch(&'static str),
    /// A slot that is not in use (any more).
    #[error("slot {0} is not in use")]
    Slot(u32),
    /// Every slot is taken.
    #[error("all {0} stream slots are in use; free one or open the model with more")]
    NoSlot(usize),
    /// A window is open on the stream.
    #[error("slot {0} holds a window; keep or drop its rows first")]
    Held(u32),
    /// No window is open, or it has fewer rows than asked for.
    #[error("slot {slot} holds {held} rows; {asked} cannot be kept")]
    Keep {
        /// The slot.
        slot: u32,
        /// Rows held.
        held: usize,
        /// Rows asked for.
        asked: usize,
    },
    /// An earlier row of the stream was not a number.
    #[error("slot {0} failed earlier (a value that is not finite); restore a snapshot or free it")]
    Faulty(u32),
    /// A snapshot of another model or of other numerics.
    #[error("the snapshot belongs to another checkpoint or other numerics")]
    Snapshot,
    /// The checkpoint has no draft head, or a draft row names a residual that is not there.
    #[error("{0}")]
    Draft(&'static str),
}
