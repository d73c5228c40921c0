//! Single rows from the shards of a table.

use std::fs::File;

use crate::{Bytes, Error, ErrorKind, Result};

/// The bytes of a shard.
#[derive(Debug)]
pub(crate) enum ShardBytes {
    /// In memory or mapped.
    View(Bytes),
    /// Read at an offset of an open file. Positional reads touch only the pages of a row, without read-ahead of a mapping.
    File { file: File, offset: u64, label: String },
}

/// Consecutive rows in one place.
#[derive(Debug)]
pub(crate) struct ShardRows {
    /// Number of the first row.
    pub(crate) first: u64,
    pub(crate) bytes: ShardBytes,
}

/// All rows, by shard.
#[derive(Debug)]
pub(crate) struct RowReader {
    /// In row order; the first one starts at row 0.
    shards: Vec<ShardRows>,
    row_bytes: usize,
}

impl RowReader {
    pub(crate) fn new(shards: Vec<ShardRows>, row_bytes: usize) -> Self {
        Self { shards, row_bytes }
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Reads one row; `out` has `row_bytes` bytes.
    pub(crate) fn read(&self, row: u64, out: &mut [u8]) -> Result<()> {
        let outside = || Error::new(ErrorKind::Row, format!("n-gram row {row} is in no shard"));
        let after = self.shards.partition_point(|s| s.first <= row);
        let shard = after.checked_sub(1).map(|i| &self.shards[i]).ok_or_else(outside)?;
        let at = (row - shard.first).checked_mul(self.row_bytes as u64).ok_or_else(outside)?;
        match &shard.bytes {
            ShardBytes::View(bytes) => {
                let at = usize::try_from(at).map_err(|_| outside())?;
                let end = at.checked_add(self.row_bytes).ok_or_else(outside)?;
                out.copy_from_slice(bytes.get(at..end).ok_or_else(outside)?);
                Ok(())
            }
            ShardBytes::File { file, offset, label } => read_at(file, offset + at, out).map_err(|e| {
                Error::io(
                    format!("{label}: reading n-gram row {row} (was the file changed while in use?)"),
                    e,
                )
            }),
        }
    }
}

#[cfg(unix)]
fn read_at(file: &File, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn read_at(file: &File, mut offset: u64, mut out: &mut [u8]) -> std::io::Result<()> {
    while !out.is_empty() {
        let n = std::os::windows::fs::FileExt::seek_read(file, out, offset)?;
        if n == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        offset += n as u64;
        out = &mut out[n..];
    }
    Ok(())
}
