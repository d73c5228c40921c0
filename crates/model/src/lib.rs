//! The forward pass of Qwen3.8-Flash-Next as typed operations, and the state of a stream.
//!
//! **Rows are the one shape of work.** [`Model::forward`] takes rows: (stream slot, position, token, whether
//! its logits are wanted). A prompt chunk is many rows of one stream, a decode step one row of each of
//! several, a verify window a few rows of one; they mix freely, and the bytes of a row depend only on its own
//! stream's history.
//!
//! **Windows.** Rows of a slot named in `held` read the stream's state and leave it; [`Model::keep`] then
//! commits the first n of them by replaying the accepted steps with the same text. Rows of other slots are
//! kept at once.
//!
//! **Snapshots** share pages with the stream they were taken from and copy on write, so they are cheap to
//! hold, and restoring one gives the bytes of a fresh run.

mod error;
mod forward;
mod layer;
mod load;
mod mtp;
mod options;
mod paged;
mod plan;
mod state;
mod trace;

pub use castiron_exec::{Activations, ExpertActivations, Kind, Level, Profile, Total, clock};
pub use error::Error;
pub use forward::{Fault, FaultKind, Forward, Row};
pub use load::Model;
pub use mtp::{Draft, DraftRow, Wide};
pub use options::Options;
#[doc(hidden)]
pub use options::PlantedFault;
pub use plan::{Plan, PlanLine, PlanRequest, StateBytes, Use, Verdict, advice, plan};
pub use state::{Slot, Snapshot, hash_floats};
pub use trace::{NoTrace, Trace};
