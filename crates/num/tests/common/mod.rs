//! Readers of the golden unit file.
#![allow(dead_code, unreachable_pub)]

use safetensors::{Dtype, SafeTensors};

/// The bytes of `units.safetensors`.
pub fn golden() -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/units/units.safetensors");
    std::fs::read(path).expect("the golden unit file")
}

/// The parsed file.
fn parse(file: &[u8]) -> SafeTensors<'_> {
    SafeTensors::deserialize(file).expect("a safetensors file")
}

/// A tensor of one-byte elements.
pub fn bytes(file: &[u8], name: &str) -> Vec<u8> {
    parse(file).tensor(name).expect("a tensor of this name").data().to_vec()
}

/// An F32 or BF16 tensor, widened.
pub fn floats(file: &[u8], name: &str) -> Vec<f32> {
    let tensors = parse(file);
    let tensor = tensors.tensor(name).expect("a tensor of this name");
    match tensor.dtype() {
        Dtype::F32 => tensor.data().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        Dtype::BF16 => {
            tensor.data().as_chunks::<2>().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect()
        }
        other => panic!("{name} is {other:?}"),
    }
}
