//! Shared by the tests: hashes of whole checkpoints, rows to feed.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part")]

use std::path::Path;

use castiron_format::{Bytes, Source};
use castiron_model::{Row, Slot};

/// The files of a source in memory.
pub fn owned(source: &Source) -> &[(String, Bytes)] {
    let Source::Owned(files) = source else { panic!("a source in memory") };
    files
}

/// The files of a directory as such a source.
pub fn disk(path: &Path) -> Source {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        files.push((entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap().into()));
    }
    Source::Owned(files)
}

/// blake3 over names, lengths and bytes in name order.
pub fn digest(source: &Source) -> String {
    let mut files: Vec<_> = owned(source).iter().collect();
    files.sort_by(|a, b| a.0.cmp(&b.0));
    let mut hash = blake3::Hasher::new();
    for (name, bytes) in files {
        hash.update(name.as_bytes());
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hash.finalize().to_hex().to_string()
}

/// The first `tokens` rows of a stream, all with logits.
pub fn rows(slot: Slot, tokens: u32, vocab: usize) -> Vec<Row> {
    (0..tokens)
        .map(|i| Row { slot, position: i, token: i.wrapping_mul(2_654_435_761) % vocab as u32, logits: true })
        .collect()
}
