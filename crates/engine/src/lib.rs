//! Streams, sampling and stopping: what turns logits into a reply.
//!
//! The engine sees the model and nothing below it. [`session::Session`] is one conversation; [`sampling`]
//! chooses tokens exactly as the law says; [`stop`] ends a reply.

pub mod logprobs;
pub mod sampling;
pub mod session;
pub mod stop;

pub use castiron_model::{Fault, FaultKind, Model};
