//! A strict writer of safetensors files, the counterpart of [`crate::safetensors`].
//!
//! A [`Layout`] fixes names, shapes and places before a byte is written, so files of any size are streamed: a [`Writer`]
//! fills each tensor front to back, tensors in any order, and refuses to finish while one is not full. Whatever it writes,
//! the reader accepts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};

use crate::error::quote;
use crate::safetensors::{Dtype, MAX_HEADER, MAX_RANK};
use crate::{Error, ErrorKind, Result};

/// A tensor to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A tensor of a name, type and shape.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into() }
    }

    /// Its size in bytes; `None` when that overflows 64 bits.
    pub fn bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.dtype.size(), |n, &dim| n.checked_mul(dim as u64))
    }
}

#[derive(Debug, Clone)]
struct Slot {
    name: String,
    start: u64,
    len: u64,
}

/// Where everything lies in a file.
#[derive(Debug, Clone)]
pub struct Layout {
    header: Vec<u8>,
    slots: Vec<Slot>,
    len: u64,
}

impl Layout {
    /// Lays out `tensors`; `file` names the file in errors.
    ///
    /// Tensors lie by falling element size and, among equals, in the order given; the header is padded with spaces to a
    /// multiple of 8. So every tensor is aligned to its element type in the file.
    ///
    /// Errors: a name twice or the reserved `__metadata__`, more than [`MAX_RANK`] dimensions, sizes that overflow, a header
    /// above [`MAX_HEADER`].
    pub fn new(file: &str, tensors: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Result<Self> {
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(tensors[i].dtype.size()));
        let mut names = BTreeSet::new();
        let mut slots = vec![Slot { name: String::new(), start: 0, len: 0 }; tensors.len()];
        let mut fields = Vec::with_capacity(tensors.len() + 1);
        if !metadata.is_empty() {
            fields.push(format!("\"__metadata__\":{}", serde_json::json!(metadata)));
        }
        let mut end = 0u64;
        for i in order {
            let tensor = &tensors[i];
            let (name, shape) = (&tensor.name, &tensor.shape);
            if name == "__metadata__" || !names.insert(name) {
                let text = format!("{file}: tensor {} appears twice or has a reserved name", quote(name));
                return Err(Error::new(ErrorKind::Duplicate, text));
            }
            let size = tensor.bytes().filter(|_| shape.len() <= MAX_RANK);
            let Some((size, next)) = size.and_then(|n| Some((n, end.checked_add(n)?))) else {
                let text = format!(
                    "{file}: tensor {} of shape {shape:?} has more than {MAX_RANK} dimensions or is too large",
                    quote(name)
                );
                return Err(Error::new(ErrorKind::ShapeOverflow, text));
            };
            slots[i] = Slot { name: name.clone(), start: end, len: size };
            let entry = serde_json::json!({
                "dtype": tensor.dtype.name(), "shape": shape, "data_offsets": [end, next]
            });
            fields.push(format!("{}:{entry}", serde_json::json!(name)));
            end = next;
        }
        Self::place(file, &fields, slots, end)
    }

    fn place(file: &str, fields: &[String], mut slots: Vec<Slot>, data: u64) -> Result<Self> {
        let mut json = format!("{{{}}}", fields.join(",")).into_bytes();
        json.resize(json.len().next_multiple_of(8), b' ');
        let size = json.len() as u64;
        if size > MAX_HEADER {
            let text = format!(
                "{file}: a header of {size} bytes is above the limit of {MAX_HEADER}; write more files"
            );
            return Err(Error::new(ErrorKind::HeaderTooLarge, text));
        }
        let start = 8 + size;
        let Some(len) = start.checked_add(data).filter(|&n| n <= i64::MAX as u64) else {
            return Err(Error::new(
                ErrorKind::ShapeOverflow,
                format!("{file}: the tensors together are too large"),
            ));
        };
        slots.iter_mut().for_each(|s| s.start += start);
        Ok(Self { header: [&size.to_le_bytes()[..], &json].concat(), slots, len })
    }

    /// The bytes before the data: header length and header.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// The length of the whole file.
    pub fn file_len(&self) -> u64 {
        self.len
    }

    /// Where the bytes of tensor `index` (of the list given to [`Self::new`]) start in the file, and how many they are.
    pub fn place_of(&self, index: usize) -> (u64, u64) {
        (self.slots[index].start, self.slots[index].len)
    }
}

/// Something with positions to write to.
pub trait Target {
    /// Sets the length; new bytes read as zeros and cost nothing until they are written.
    fn set_size(&mut self, len: u64) -> io::Result<()>;
    /// Writes `bytes` at an offset inside the length.
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()>;
}

impl Target for File {
    fn set_size(&mut self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }

    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.seek(SeekFrom::Start(at))?;
        self.write_all(bytes)
    }
}

impl Target for Vec<u8> {
    fn set_size(&mut self, len: u64) -> io::Result<()> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // A fresh zeroed allocation has no touched pages; growing an old one would.
        let mut fresh = vec![0; len];
        let kept = self.len().min(len);
        fresh[..kept].copy_from_slice(&self[..kept]);
        *self = fresh;
        Ok(())
    }

    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let at = usize::try_from(at).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let place = at.checked_add(bytes.len()).and_then(|end| self.get_mut(at..end));
        place.ok_or(io::ErrorKind::UnexpectedEof)?.copy_from_slice(bytes);
        Ok(())
    }
}

/// A file being written.
#[derive(Debug)]
pub struct Writer<T> {
    file: String,
    target: T,
    layout: Layout,
    done: Vec<u64>,
}

impl<T: Target> Writer<T> {
    /// Sets the length of `target` and writes the header; `file` names the file in errors.
    pub fn new(file: &str, mut target: T, layout: Layout) -> Result<Self> {
        let start = target.set_size(layout.len).and_then(|()| target.put(0, &layout.header));
        start.map_err(|e| Error::io(format!("writing {file}"), e))?;
        Ok(Self { file: file.to_owned(), target, done: vec![0; layout.slots.len()], layout })
    }

    /// Appends bytes to tensor `index`.
    pub fn append(&mut self, index: usize, bytes: &[u8]) -> Result<()> {
        let at = self.advance(index, bytes.len() as u64)?;
        self.target.put(at, bytes).map_err(|e| Error::io(format!("writing {}", self.file), e))
    }

    /// Leaves `count` bytes of tensor `index` unwritten: they read as zeros, and are a hole where the target has holes.
    pub fn skip(&mut self, index: usize, count: u64) -> Result<()> {
        self.advance(index, count).map(|_| ())
    }

    fn advance(&mut self, index: usize, count: u64) -> Result<u64> {
        let slot = &self.layout.slots[index];
        let done = self.done[index];
        match done.checked_add(count) {
            Some(next) if next <= slot.len => self.done[index] = next,
            _ => {
                let text = format!(
                    "{}: tensor {} has {} bytes, not room for {count} more after {done}",
                    self.file,
                    quote(&slot.name),
                    slot.len
                );
                return Err(Error::new(ErrorKind::BadRange, text));
            }
        }
        Ok(slot.start + done)
    }

    /// Ends the file. An error when a tensor is not full.
    pub fn finish(self) -> Result<T> {
        let short = self.layout.slots.iter().zip(&self.done).find(|(slot, done)| slot.len != **done);
        match short {
            None => Ok(self.target),
            Some((slot, done)) => Err(Error::new(
                ErrorKind::Truncated,
                format!("{}: tensor {} got {done} of {} bytes", self.file, quote(&slot.name), slot.len),
            )),
        }
    }
}
