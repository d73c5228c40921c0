//! What is in a checkpoint, for people.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::bind::{Mark, Part, Totals};
use crate::tensors::Tensors;

/// Tensors by file and by component.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Inventory {
    /// Safetensors files in reading order.
    pub files: Vec<FileEntry>,
    /// Parts of the model, in a fixed order; only those that have tensors.
    pub components: Vec<Component>,
    /// Tensors of all files.
    pub tensors: usize,
    /// Tensor bytes of all files.
    pub bytes: u64,
}

/// One safetensors file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FileEntry {
    /// File name.
    pub name: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Tensors in it.
    pub tensors: usize,
}

/// One part of the model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Component {
    /// Such as `routed experts` or `n-gram table`.
    pub name: String,
    /// Stored tensors, scales included.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Split by format, in name order.
    pub formats: Vec<FormatCount>,
}

/// Share of a format in a component.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FormatCount {
    /// Such as `bf16`, `fp8-block`, `nvfp4`, `nvfp4-w4a4`.
    pub format: String,
    /// Stored tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Inventory {
    pub(crate) fn new(tensors: &Tensors, marks: &[Option<Mark>]) -> Self {
        let mut totals = Totals::new();
        for (tensor, mark) in tensors.list.iter().zip(marks) {
            let (part, format) = mark.map_or((Part::Other, tensor.dtype.name()), |m| (m.part, m.format));
            let total = totals.entry((part, format)).or_default();
            total.0 += 1;
            total.1 += tensor.bytes.len() as u64;
        }
        let mut parts: BTreeMap<Part, Component> = BTreeMap::new();
        for ((part, format), (count, bytes)) in totals {
            let component = parts.entry(part).or_insert_with(|| Component {
                name: part.name().to_owned(),
                tensors: 0,
                bytes: 0,
                formats: Vec::new(),
            });
            component.tensors += count;
            component.bytes += bytes;
            component.formats.push(FormatCount { format: format.to_owned(), tensors: count, bytes });
        }
        let file =
            |s: &crate::tensors::Shard| FileEntry { name: s.name.clone(), bytes: s.len, tensors: s.tensors };
        Self {
            files: tensors.shards.iter().map(file).collect(),
            components: parts.into_values().collect(),
            tensors: tensors.list.len(),
            bytes: tensors.list.iter().map(|t| t.bytes.len() as u64).sum(),
        }
    }
}
