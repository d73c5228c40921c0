//! Streams, sampling and stopping: what turns logits into a reply.
//!
//! The engine sees the model and nothing below it. [`session::Session`] is one conversation; [`sampling`]
//! chooses tokens exactly as the law says; [`stop`] ends a reply; [`verify`] runs a model in every form it has
//! and finds the first place where two of them differ.

pub mod bench;
pub mod logprobs;
pub mod sampling;
pub mod session;
pub mod stop;
pub mod verify;

/// The model crate, for callers that open one.
pub use castiron_model as model;
pub use castiron_model::{Fault, FaultKind, Model};
