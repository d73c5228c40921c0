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
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("writing the reply")
        .map_err(Failure::job)
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

/// A line for a person on standard error. A closed or full one is nobody's failure.
pub fn remark(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// A file that appears under its name only when it is whole. A device or a pipe is written to directly.
pub struct WholeFile {
    path: PathBuf,
    /// Where a named partial file stands; none for a device, or while the file has no name.
    partial: Option<PathBuf>,
    direct: bool,
    file: BufWriter<File>,
}

impl WholeFile {
    /// Starts writing what will stand at `path`; a link is followed, a folder refused.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let refused = |e: std::io::Error| {
            Failure::input(anyhow::Error::new(e).context(format!("cannot write {}", path.display())))
        };
        let path = match fs::canonicalize(path) {
            Ok(real) => real,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => path.to_path_buf(),
            Err(e) => return Err(refused(e)),
        };
        let (file, partial, direct) = match fs::metadata(&path) {
            Ok(m) if m.is_dir() => return Err(refused(std::io::ErrorKind::IsADirectory.into())),
            Ok(m) if !m.is_file() => (File::options().write(true).open(&path).map_err(refused)?, None, true),
            _ => {
                let (file, partial) = beside(&path).map_err(refused)?;
                (file, partial, false)
            }
        };
        Ok(Self { path, partial, direct, file: BufWriter::new(file) })
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let written = self.file.write_all(bytes).with_context(|| format!("writing {}", self.path.display()));
        written.map_err(Failure::job)
    }

    /// Puts the file in its place.
    pub fn finish(mut self) -> Result<(), Failure> {
        let done = self.file.flush().and_then(|()| if self.direct { Ok(()) } else { self.place() });
        done.with_context(|| format!("writing {}", self.path.display())).map_err(Failure::job)
    }

    fn place(&mut self) -> std::io::Result<()> {
        let partial = match &self.partial {
            Some(partial) => partial.clone(),
            None => {
                let partial = partial_name(&self.path);
                name(self.file.get_ref(), &partial)?;
                self.partial = Some(partial.clone());
                partial
            }
        };
        fs::rename(&partial, &self.path)
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        // After `finish` the partial file is gone; before it, nothing may stay behind.
        if let Some(partial) = &self.partial {
            let _ = fs::remove_file(partial);
        }
    }
}

fn partial_name(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("out");
    path.with_file_name(format!(".{name}.{}.partial", std::process::id()))
}

/// A new file in the folder of `path`. Where the system can, it has no name yet, so that nothing stays behind
/// even when the program is killed.
fn beside(path: &Path) -> std::io::Result<(File, Option<PathBuf>)> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{Mode, OFlags};
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if let Ok(file) = rustix::fs::open(folder, OFlags::TMPFILE | OFlags::WRONLY, Mode::from(0o644)) {
            return Ok((file.into(), None));
        }
    }
    let partial = partial_name(path);
    Ok((File::create(&partial)?, Some(partial)))
}

/// Gives a file without a name one.
#[cfg(target_os = "linux")]
fn name(file: &File, to: &Path) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    let here = rustix::fs::CWD;
    Ok(rustix::fs::linkat(here, from, here, to, rustix::fs::AtFlags::SYMLINK_FOLLOW)?)
}

/// Elsewhere every file has its name from the start.
#[cfg(not(target_os = "linux"))]
fn name(_: &File, _: &Path) -> std::io::Result<()> {
    Ok(())
}
