//! Making checkpoints: synthetic ones of any shape, and quantised ones.
//!
//! Both are one pipeline. An *origin* (a generator, or an opened checkpoint) offers tensors by name; a plan says for each
//! whether it is copied bit for bit or encoded, into which stored tensors and which file; a sink writes the files, into a
//! directory that appears only when it is whole, or into memory. So `synth` in FP8 is, byte for byte, `synth` in BF16 put
//! through `quantize`, and a checkpoint quantised in memory is the one that would be on the disk.
//!
//! Bytes depend on nothing but the input and the options: generation is counter-based (Philox), arithmetic is integers
//! and IEEE binary32, all roundings are `castiron_num`'s, and threads share work by file, so that their number cannot be
//! seen. Memory is bounded by a band of 128 rows of one matrix for each thread.
#![forbid(unsafe_code)]

mod encode;
mod error;
mod generate;
mod names;
mod origin;
mod plan;
mod quantize;
mod report;
mod sink;

pub use error::{Error, Result};
pub use generate::{Changes, Preset, Synth};
pub use quantize::{
    Dense, Draft, Experts, InputScales, Quantize, Scales, Table, quantize, quantize_in_memory,
};
pub use report::{Errors, Report};
pub use sink::{Progress, Run};
