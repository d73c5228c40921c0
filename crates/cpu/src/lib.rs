//! Native CPU forms of the kernels, in the canonical order of the law.
//!
//! Two levels run one text. [`Level::law`] compiles the bodies of `castiron_num` as they stand: slow, and
//! the definition. [`Level::detect`] compiles the same bodies, or a packed rearrangement of them that keeps
//! every chain, for the widest instruction set found at run time. Both give the same bytes; tests compare
//! them.

const _: () = assert!(cfg!(target_endian = "little"), "weights are read as they lie in little-endian files");

mod forms;
mod level;
mod matrix;
pub mod peak;
mod pool;
mod product;
mod simd;
mod w4a4;

pub use forms::{
    attend, conv_taps, gdn_read, gdn_update, inverse_rms, mix_streams, norm_zero_centred, rope, sigmoid_gate,
    silu_all, swiglu,
};
pub use level::Level;
pub use matrix::{Codes, Matrix, Storage};
pub use pool::{Pool, Rows};
pub use product::product;
pub use w4a4::{W4a4Input, product_w4a4, product_w4a4_pooled};
