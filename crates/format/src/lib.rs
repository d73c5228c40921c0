//! Checkpoint files of Qwen3.8-Flash-Next (`qwen4_exp`).
//!
//! A checkpoint is a directory (or the files embedded in the binary): `config.json`, safetensors files with or without an
//! index, and optional tokenizer and generation files. [`Checkpoint::open`] reads headers and configuration only and takes a
//! census: every tensor that the configuration implies must be there once, with the right shape and a dtype that is
//! understood, and every tensor that is there must be implied or known to be ignorable. [`Checkpoint::weights`] then hands
//! out typed views on the mapped files, whatever the storage: dense, fused or per expert, block FP8, NVFP4 in the ModelOpt
//! or the compressed-tensors naming. Formats are found per module from tensor names and dtypes, never from the
//! `quantization_config` text. The n-gram table is never loaded with the rest: see [`NgramTable`].
//!
//! Files come from strangers. No input makes this crate panic or allocate more than a small multiple of the header sizes;
//! every refusal is an [`Error`] that names the file, the tensor or key, and what would be accepted.

mod bind;
mod bytes;
mod checkpoint;
mod config;
mod error;
mod inventory;
mod json;
pub mod ngram;
pub mod safetensors;
mod source;
mod table;
mod tensors;
mod weights;
pub mod write;

pub use bytes::Bytes;
pub use checkpoint::{Checkpoint, StoredTensor};
pub use config::{
    Activation, Config, GdnConfig, GenerationConfig, IndexerConfig, LayerKind, MoeConfig, PleConfig, Scoring,
};
pub use error::{Error, ErrorKind, Result};
pub use inventory::{Component, FileEntry, FormatCount, Inventory};
pub use source::Source;
pub use table::{NgramTable, TableMode, TableStats};
pub use weights::{
    Attention, Expert, FP8_BLOCK, Gdn, Hyper, Layer, Matrix, MatrixData, Mixer, Moe, Mtp, NVFP4_GROUP, Ple,
    Weights,
};
