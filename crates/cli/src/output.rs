//! Writing results: flushed text as it comes, whole files or none.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::failure::Failure;

/// Writes text and flushes it, so that a reader sees it at once.
pub fn say(out: &mut impl Write, text: &str) -> Result<(), Failure> {
    if text.is_empty() {
        return Ok(());
    }
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("writing the reply").map_err(Failure::job)
}

/// One line on standard output.
pub fn line(text: &str) -> Result<(), Failure> {
    say(&mut std::io::stdout().lock(), &format!("{text}\n"))
}

/// Bytes for people, in decimal units.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

/// A file that appears under its name only when it is whole.
pub struct WholeFile {
    path: PathBuf,
    partial: PathBuf,
    file: Option<BufWriter<File>>,
}

impl WholeFile {
    /// Starts writing beside `path`.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("out");
        let partial = path.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        let file = File::create(&partial)
            .with_context(|| format!("cannot write {}", path.display()))
            .map_err(Failure::input)?;
        Ok(Self { path: path.to_path_buf(), partial, file: Some(BufWriter::new(file)) })
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let written = file.write_all(bytes).with_context(|| format!("writing {}", self.path.display()));
        written.map_err(Failure::job)
    }

    /// Puts the file in its place.
    pub fn finish(mut self) -> Result<(), Failure> {
        let done = match self.file.take() {
            Some(mut file) => file.flush().and_then(|()| fs::rename(&self.partial, &self.path)),
            None => Ok(()),
        };
        done.with_context(|| format!("writing {}", self.path.display())).map_err(Failure::job)
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        // After `finish` the partial file is gone; before it, nothing may stay behind.
        let _ = fs::remove_file(&self.partial);
    }
}
