//! Where tensors come from.

use castiron_format::safetensors::Dtype;
use castiron_format::{Bytes, Checkpoint};
use castiron_num::bf16;

/// A tensor on offer.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Elements from the front that carry values; the rest are zeros and need not be stored.
    pub(crate) filled: u64,
    /// Whether the text model uses it.
    pub(crate) used: bool,
}

impl Tensor {
    /// Elements.
    pub(crate) fn count(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }

    /// Whether its elements are plain numbers: BF16 or F32.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.dtype, Dtype::Bf16 | Dtype::F32)
    }
}

/// A source of tensors. Ranges lie inside the tensor.
pub(crate) trait Origin: Sync {
    fn tensors(&self) -> &[Tensor];
    /// Little-endian bytes of `count` elements from element `from` on, replacing `out`.
    fn bytes(&self, tensor: usize, from: u64, count: u64, out: &mut Vec<u8>);
    /// The same as numbers, for BF16 and F32 tensors.
    fn floats(&self, tensor: usize, from: u64, count: u64, out: &mut Vec<f32>);
}

/// The tensors of an opened checkpoint.
pub(crate) struct Stored {
    tensors: Vec<Tensor>,
    bytes: Vec<Bytes>,
}

impl Stored {
    pub(crate) fn new(checkpoint: &Checkpoint) -> Self {
        let (mut tensors, mut bytes) = (Vec::new(), Vec::new());
        for t in checkpoint.tensors() {
            let filled = t.bytes.len() as u64 / t.dtype.size();
            let (name, shape) = (t.name.to_owned(), t.shape.to_vec());
            tensors.push(Tensor { name, dtype: t.dtype, shape, filled, used: t.used });
            bytes.push(t.bytes.clone());
        }
        Self { tensors, bytes }
    }

    fn view(&self, tensor: usize, from: u64, count: u64) -> &[u8] {
        let size = self.tensors[tensor].dtype.size() as usize;
        let (from, count) = (from as usize * size, count as usize * size);
        &self.bytes[tensor][from..from + count]
    }
}

impl Origin for Stored {
    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn bytes(&self, tensor: usize, from: u64, count: u64, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(self.view(tensor, from, count));
    }

    fn floats(&self, tensor: usize, from: u64, count: u64, out: &mut Vec<f32>) {
        out.clear();
        let bytes = self.view(tensor, from, count);
        if self.tensors[tensor].dtype == Dtype::Bf16 {
            out.extend(bytes.as_chunks::<2>().0.iter().map(|&b| bf16::from_bits(u16::from_le_bytes(b))));
        } else {
            out.extend(bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)));
        }
    }
}
