//! Where a checkpoint goes: a directory that appears only when it is whole, or memory.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use castiron_format::safetensors::Dtype;
use castiron_format::write::{Layout, Target, TensorSpec, Writer};
use castiron_format::{Bytes, Checkpoint, Source};

use crate::encode;
use crate::origin::Origin;
use crate::plan::{Plan, Worker};
use crate::report::{Report, Tallies};
use crate::{Error, Result};

const INDEX: &str = "model.safetensors.index.json";

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Tensor bytes made.
    pub done: u64,
    /// Tensor bytes to make.
    pub total: u64,
}

/// How a job runs. Nothing here but `shard_bytes` can be seen in the result.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    /// Threads; 0 takes as many as there are processors.
    pub threads: usize,
    /// Tensor bytes of a file at most; a larger tensor has a file of its own.
    pub shard_bytes: u64,
    /// Called now and then, from any thread.
    pub progress: Option<&'a (dyn Fn(Progress) + Sync)>,
}

impl Default for Run<'_> {
    fn default() -> Self {
        Self { threads: 0, shard_bytes: 2_000_000_000, progress: None }
    }
}

/// Files beside the tensors, as (name, contents).
pub(crate) type Files = Vec<(String, Bytes)>;

/// The place for files.
pub(crate) enum Sink {
    Folder(Folder),
    Memory,
}

/// A directory being written beside its place.
pub(crate) struct Folder {
    path: PathBuf,
    partial: PathBuf,
}

impl Folder {
    /// Starts a directory that will be `path`, which must not exist.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let Some(name) = path.file_name() else {
            return Error::refused(format!("{} is no name for a new directory", path.display()));
        };
        if path.symlink_metadata().is_ok() {
            return Error::refused(format!(
                "{} exists already: name a new directory, or remove it first",
                path.display()
            ));
        }
        let partial =
            path.with_file_name(format!(".{}.{}.partial", name.to_string_lossy(), std::process::id()));
        fs::create_dir(&partial).map_err(|e| Error::Io(format!("cannot write {}", path.display()), e))?;
        Ok(Self { path: path.to_path_buf(), partial })
    }

    fn finish(self) -> Result<()> {
        if self.path.symlink_metadata().is_ok() {
            return Error::refused(format!("{} appeared while it was being written", self.path.display()));
        }
        fs::rename(&self.partial, &self.path)
            .map_err(|e| Error::Io(format!("cannot write {}", self.path.display()), e))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // After `finish` it is gone; before it, nothing may stay behind.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

enum Out {
    File(File),
    Memory(Vec<u8>),
}

impl Target for Out {
    fn set_size(&mut self, len: u64) -> io::Result<()> {
        match self {
            Self::File(file) => file.set_size(len),
            Self::Memory(bytes) => bytes.set_size(len),
        }
    }

    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::File(file) => file.put(at, bytes),
            Self::Memory(all) => all.put(at, bytes),
        }
    }
}

/// One safetensors file to make.
struct Shard {
    name: String,
    units: Range<usize>,
    tensors: Vec<TensorSpec>,
}

/// A finished file: its tallies, and its bytes when it is in memory.
type Made = (Tallies, Option<Bytes>);

struct Job<'a> {
    origin: &'a dyn Origin,
    plan: &'a Plan,
    shards: Vec<Shard>,
    folder: Option<&'a Path>,
    run: &'a Run<'a>,
    done: AtomicU64,
    total: u64,
    stop: AtomicBool,
}

/// Makes all files and puts them in place. Gives the source of a checkpoint in memory, and the report.
pub(crate) fn make(
    origin: &dyn Origin,
    plan: &Plan,
    side_files: Files,
    sink: Sink,
    run: &Run<'_>,
) -> Result<(Option<Source>, Report)> {
    let folder = match &sink {
        Sink::Folder(folder) => Some(folder.partial.as_path()),
        Sink::Memory => None,
    };
    let total = plan.units.iter().map(|u| u.bytes()).fold(0, u64::saturating_add);
    let shards = shards(plan, run.shard_bytes);
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let job = Job { origin, plan, shards, folder, run, done, total, stop };
    let scales = job.table_scales()?;
    let made = job.each(job.shards.len(), |i, worker| job.shard(i, &scales, worker))?;
    let mut tallies = Tallies::default();
    let mut files = Files::new();
    for (shard, (tally, bytes)) in job.shards.iter().zip(made) {
        tallies.add(&tally);
        files.extend(bytes.map(|b| (shard.name.clone(), b)));
    }
    let tensors = job.shards.iter().map(|s| s.tensors.len()).sum();
    for (name, bytes) in side_files.into_iter().chain([(INDEX.to_owned(), job.index().into())]) {
        match job.folder {
            Some(folder) => {
                fs::write(folder.join(&name), &bytes).map_err(|e| Error::Io(format!("writing {name}"), e))?
            }
            None => files.push((name, bytes)),
        }
    }
    let source = match job.folder {
        Some(folder) => Source::Dir(folder.to_path_buf()),
        None => Source::Owned(files),
    };
    // What is made here must pass the census like anything else.
    let checkpoint = Checkpoint::open(source.clone())?;
    let report = Report {
        files: job.shards.len(),
        tensors,
        bytes: checkpoint.inventory().files.iter().map(|f| f.bytes).sum(),
        digest: checkpoint.digest(),
        errors: tallies.errors(),
        notes: Vec::new(),
    };
    drop(checkpoint);
    match sink {
        Sink::Folder(folder) => folder.finish().map(|()| (None, report)),
        Sink::Memory => Ok((Some(source), report)),
    }
}

fn shards(plan: &Plan, limit: u64) -> Vec<Shard> {
    let ranges = plan.files(limit);
    let count = ranges.len();
    let shard = |(i, units): (usize, Range<usize>)| Shard {
        name: format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        tensors: plan.units[units.clone()].iter().flat_map(|u| u.outputs.iter().cloned()).collect(),
        units,
    };
    ranges.into_iter().enumerate().map(shard).collect()
}

impl Job<'_> {
    /// Runs `work` for 0..count on all threads; results in order, or the error of the lowest number that failed.
    fn each<T: Send>(
        &self,
        count: usize,
        work: impl Fn(usize, &mut Worker) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let threads = match self.run.threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
            n => n,
        };
        let next = AtomicUsize::new(0);
        let results = Mutex::new((0..count).map(|_| None).collect::<Vec<Option<Result<T>>>>());
        let body = || {
            let mut worker = Worker::default();
            while !self.stop.load(Ordering::Relaxed) {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= count {
                    break;
                }
                let result = work(i, &mut worker);
                self.stop.fetch_or(result.is_err(), Ordering::Relaxed);
                results.lock().unwrap_or_else(PoisonError::into_inner)[i] = Some(result);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(count) {
                scope.spawn(body);
            }
            body();
        });
        // Numbers are handed out in order, so a missing result is always behind an error.
        results.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().flatten().collect()
    }

    /// One scale for each table, from the largest magnitude of all its shards.
    fn table_scales(&self) -> Result<Vec<f32>> {
        let mut out = Vec::new();
        for table in &self.plan.tables {
            let peaks = self.each(table.len(), |i, worker| worker.amax(self.origin, table[i]))?;
            out.push(encode::fp8_scale(encode::amax(&peaks), Dtype::Bf16));
        }
        Ok(out)
    }

    fn shard(&self, index: usize, scales: &[f32], worker: &mut Worker) -> Result<Made> {
        let shard = &self.shards[index];
        let out = match self.folder {
            Some(folder) => {
                let file = File::create(folder.join(&shard.name));
                Out::File(file.map_err(|e| Error::Io(format!("writing {}", shard.name), e))?)
            }
            None => Out::Memory(Vec::new()),
        };
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let layout = Layout::new(&shard.name, &shard.tensors, &metadata)?;
        let mut writer = Writer::new(&shard.name, out, layout)?;
        let mut tallies = Tallies::default();
        let mut first = 0;
        for unit in &self.plan.units[shard.units.clone()] {
            if self.stop.load(Ordering::Relaxed) {
                // Another file failed: its error is the result, and this one is not looked at.
                return Ok((tallies, None));
            }
            worker.run(self.origin, unit, scales, (&mut writer, first), &mut tallies)?;
            first += unit.outputs.len();
            let bytes = unit.bytes();
            let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
            if let Some(progress) = self.run.progress {
                progress(Progress { done, total: self.total });
            }
        }
        match writer.finish()? {
            Out::File(_) => Ok((tallies, None)),
            Out::Memory(bytes) => Ok((tallies, Some(bytes.into()))),
        }
    }

    fn index(&self) -> Vec<u8> {
        let mut map = BTreeMap::new();
        for shard in &self.shards {
            map.extend(shard.tensors.iter().map(|t| (t.name.as_str(), shard.name.as_str())));
        }
        let index = serde_json::json!({ "metadata": { "total_size": self.total }, "weight_map": map });
        format!("{index:#}\n").into_bytes()
    }
}
