//! The rows of an n-gram layer, in the file or in memory.
//!
//! A table is tens of gigabytes and a token needs a few kilobytes of it at random places, so by default rows stay in the
//! file: they are read one by one at their offset, through a bounded row cache, and [`NgramTable::prefetch`] lets a few
//! threads read ahead, because row ids depend on token ids alone. Values never depend on what the cache holds.

mod cache;
mod reader;

use std::collections::BTreeMap;

use castiron_num::{bf16, fp8};

use crate::ngram::Hash;
use crate::safetensors::Dtype;
use crate::{Error, ErrorKind, Result};

pub(crate) use reader::{RowReader, ShardBytes, ShardRows};

/// How the rows of an n-gram table are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableMode {
    /// Rows stay in the file and are read as needed, through a row cache.
    File {
        /// Most row bytes that the cache keeps; 0 keeps none.
        cache_bytes: usize,
    },
    /// The whole table is read into memory at once (an embedded one is used where it is).
    Memory,
}

/// Counters of a table since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct TableStats {
    /// Rows found in the cache.
    pub hits: u64,
    /// Rows that `gather` had to read itself.
    pub misses: u64,
    /// Rows read ahead by `prefetch`.
    pub prefetched: u64,
    /// Bytes read from the file.
    pub bytes_read: u64,
    /// Rows dropped from the cache for others.
    pub evictions: u64,
}

/// The rows of one n-gram layer: `rows` rows of `dim` channels, stored as BF16, F32, or E4M3 with one scale.
///
/// Safe to share between threads.
#[derive(Debug)]
pub struct NgramTable {
    hash: Hash,
    dtype: Dtype,
    scale: f32,
    dim: usize,
    store: Store,
}

#[derive(Debug)]
enum Store {
    Memory(RowReader),
    File(cache::CachedReader),
}

impl NgramTable {
    /// `scale` is finite and above zero, and 1 unless `dtype` is FP8.
    pub(crate) fn new(
        hash: Hash,
        dtype: Dtype,
        scale: f32,
        dim: usize,
        reader: RowReader,
        mode: TableMode,
    ) -> Self {
        let store = match mode {
            TableMode::Memory => Store::Memory(reader),
            TableMode::File { cache_bytes } => Store::File(cache::CachedReader::new(reader, cache_bytes)),
        };
        Self { hash, dtype, scale, dim, store }
    }

    /// Rows, padding included.
    pub fn rows(&self) -> u64 {
        self.hash.total_rows()
    }

    /// Channels of a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Stored bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.dim * self.dtype.size() as usize
    }

    /// The hash that makes row ids of token ids.
    pub fn hash(&self) -> &Hash {
        &self.hash
    }

    /// Starts reading rows that will be gathered soon. A hint: ids outside the table and rows beyond half the cache are
    /// skipped, errors are left to `gather`. Returns at once; does nothing for a table in memory.
    pub fn prefetch(&self, rows: &[u64]) {
        if let Store::File(cached) = &self.store {
            cached.prefetch(rows.iter().copied().filter(|&r| r < self.rows()));
        }
    }

    /// Decodes rows to f32 in the order of `rows`: `value = decode(code) * scale` in f32, not rounded further (BF16 and F32
    /// rows as they are).
    ///
    /// `out.len()` must be `rows.len() * dim`. Errors: a row id outside the table, a file that cannot be read, a value that
    /// is not a number (naming the row). After an error the contents of `out` are unspecified.
    pub fn gather(&self, rows: &[u64], out: &mut [f32]) -> Result<()> {
        if out.len() != rows.len() * self.dim {
            let (have, want) = (out.len(), rows.len() * self.dim);
            return Err(Error::new(
                ErrorKind::Row,
                format!("n-gram gather: room for {have} values, {want} are needed"),
            ));
        }
        if let Some(row) = rows.iter().find(|&&r| r >= self.rows()) {
            let total = self.rows();
            return Err(Error::new(
                ErrorKind::Row,
                format!("n-gram row {row} is outside the table of {total} rows"),
            ));
        }
        if rows.is_empty() {
            return Ok(());
        }
        let size = self.row_bytes();
        let mut raw = vec![0; rows.len() * size];
        match &self.store {
            Store::Memory(reader) => {
                for (&row, bytes) in rows.iter().zip(raw.chunks_exact_mut(size)) {
                    reader.read(row, bytes)?;
                }
            }
            Store::File(cached) => cached.gather(rows, &mut raw)?,
        }
        for ((&row, bytes), values) in
            rows.iter().zip(raw.chunks_exact(size)).zip(out.chunks_exact_mut(self.dim))
        {
            self.decode(row, bytes, values)?;
        }
        Ok(())
    }

    /// Counters so far; all zero for a table in memory.
    pub fn stats(&self) -> TableStats {
        match &self.store {
            Store::Memory(_) => TableStats::default(),
            Store::File(cached) => cached.stats(),
        }
    }

    fn decode(&self, row: u64, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        match self.dtype {
            Dtype::F8E4M3 => {
                for (value, &code) in out.iter_mut().zip(bytes) {
                    *value = fp8::decode(code) * self.scale;
                }
            }
            Dtype::Bf16 => {
                for (value, &pair) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = bf16::from_bits(u16::from_le_bytes(pair));
                }
            }
            _ => {
                for (value, &word) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(word);
                }
            }
        }
        match out.iter().position(|v| !v.is_finite()) {
            None => Ok(()),
            Some(i) => Err(Error::new(
                ErrorKind::BadValue,
                format!(
                    "n-gram table row {row}, channel {i} is not a finite number; the checkpoint is damaged"
                ),
            )),
        }
    }
}

/// Positions of each distinct row in a request.
fn positions(rows: impl Iterator<Item = (usize, u64)>) -> BTreeMap<u64, Vec<usize>> {
    let mut out: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (at, row) in rows {
        out.entry(row).or_default().push(at);
    }
    out
}
