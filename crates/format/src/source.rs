//! Where the files of a checkpoint come from.

use std::collections::BTreeSet;
use std::fs::{self, File, FileType};
use std::io::Read;
use std::path::PathBuf;

use crate::error::quote;
use crate::{Bytes, Error, ErrorKind, Result};

/// Where the files of a checkpoint are.
#[derive(Debug, Clone)]
pub enum Source {
    /// A directory of files.
    Dir(PathBuf),
    /// Files embedded in the binary, as (name, contents).
    Memory(&'static [(&'static str, &'static [u8])]),
    /// Files made at run time, as (name, contents); never on a disk.
    Owned(Vec<(String, Bytes)>),
}

/// A listed source.
#[derive(Debug)]
pub(crate) struct Store {
    source: Source,
    names: BTreeSet<String>,
}

/// Whether a name is a file name inside a directory and nothing else.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', ':', '\0'])
}

/// Collects names, none of which may appear twice.
fn once<'a>(names: &mut BTreeSet<String>, files: impl Iterator<Item = &'a str>) -> Result<()> {
    for name in files {
        if !names.insert(name.to_owned()) {
            let text = format!("embedded checkpoint: file {} appears twice", quote(name));
            return Err(Error::new(ErrorKind::Duplicate, text));
        }
    }
    Ok(())
}

/// What is not a regular file, in words.
fn what_else(kind: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a named pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
    }
    if kind.is_dir() { "a directory" } else { "not a regular file" }
}

impl Store {
    pub(crate) fn list(source: Source) -> Result<Self> {
        let mut names = BTreeSet::new();
        match &source {
            Source::Dir(path) => {
                let context = || format!("checkpoint directory {}", path.display());
                for entry in fs::read_dir(path).map_err(|e| Error::io(context(), e))? {
                    let name = entry.map_err(|e| Error::io(context(), e))?.file_name();
                    // A name that is not UTF-8 cannot be one of ours.
                    if let Some(name) = name.to_str() {
                        names.insert(name.to_owned());
                    }
                }
            }
            Source::Memory(files) => once(&mut names, files.iter().map(|f| f.0))?,
            Source::Owned(files) => once(&mut names, files.iter().map(|f| f.0.as_str()))?,
        }
        Ok(Self { source, names })
    }

    /// File names in rising order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// The path of a file, for messages.
    pub(crate) fn label(&self, name: &str) -> String {
        match &self.source {
            Source::Dir(path) => path.join(name).display().to_string(),
            Source::Memory(_) => format!("embedded {name}"),
            Source::Owned(_) => format!("in memory: {name}"),
        }
    }

    fn missing(&self, name: &str) -> Error {
        Error::new(
            ErrorKind::MissingFile,
            format!("{}: no such file; fetch it into the checkpoint", self.label(name)),
        )
    }

    fn embedded(&self, name: &str) -> Option<Bytes> {
        match &self.source {
            Source::Memory(files) => files.iter().find(|f| f.0 == name).map(|f| Bytes::from_static(f.1)),
            Source::Owned(files) => files.iter().find(|f| f.0 == name).map(|f| f.1.clone()),
            Source::Dir(_) => None,
        }
    }

    /// Opens a file of a directory; `None` for those in memory.
    ///
    /// Only a regular file, or a link to one, is opened: opening a pipe would wait for a writer, and reading a device
    /// need not end.
    pub(crate) fn open(&self, name: &str) -> Result<Option<File>> {
        let Source::Dir(path) = &self.source else { return Ok(None) };
        let path = path.join(name);
        let told = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::NotFound => self.missing(name),
            _ => Error::io(self.label(name), e),
        };
        let kind = fs::metadata(&path).map_err(told)?.file_type();
        if !kind.is_file() {
            let text = format!(
                "{}: it is {}; a checkpoint is made of regular files (or links to them)",
                self.label(name),
                what_else(kind)
            );
            return Err(Error::new(ErrorKind::NotAFile, text));
        }
        File::open(&path).map(Some).map_err(told)
    }

    /// A view on a large file.
    pub(crate) fn map(&self, name: &str) -> Result<Bytes> {
        match self.open(name)? {
            Some(file) => Bytes::map(&file).map_err(|e| Error::io(self.label(name), e)),
            None => self.embedded(name).ok_or_else(|| self.missing(name)),
        }
    }

    /// The contents of a small file, refused above `limit` bytes.
    pub(crate) fn read(&self, name: &str, limit: u64) -> Result<Bytes> {
        let too_large = || {
            Error::new(
                ErrorKind::BadJson,
                format!("{}: larger than the limit of {limit} bytes", self.label(name)),
            )
        };
        let Some(file) = self.open(name)? else {
            let bytes = self.embedded(name).ok_or_else(|| self.missing(name))?;
            return if bytes.len() as u64 > limit { Err(too_large()) } else { Ok(bytes) };
        };
        let mut out = Vec::new();
        file.take(limit + 1).read_to_end(&mut out).map_err(|e| Error::io(self.label(name), e))?;
        if out.len() as u64 > limit { Err(too_large()) } else { Ok(out.into()) }
    }
}
