//! The row cache and the threads that read ahead.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::{RowReader, TableStats, positions};
use crate::Result;

/// Threads that read ahead, and that share a large gather.
const READERS: usize = 4;
/// Rows of one read-ahead job.
const JOB_ROWS: usize = 64;
/// Missing rows above which a gather reads with several threads.
const PARALLEL_ROWS: usize = 128;

/// A reader with a cache in front.
#[derive(Debug)]
pub(super) struct CachedReader {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    reader: RowReader,
    state: Mutex<State>,
    /// Work was queued, or the table closed.
    work: Condvar,
    /// Rows that were pending are pending no longer.
    done: Condvar,
}

#[derive(Debug)]
struct State {
    cache: Cache,
    stats: TableStats,
    queue: VecDeque<Vec<u64>>,
    /// Rows queued or being read ahead.
    pending: BTreeSet<u64>,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock; a poisoned state is still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs jobs until the table is closed.
    fn run(&self) {
        let mut state = self.lock();
        loop {
            if state.closed {
                return;
            }
            let Some(job) = state.queue.pop_front() else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let size = self.reader.row_bytes();
            let mut raw = vec![0; job.len() * size];
            let reads: Vec<bool> = job
                .iter()
                .zip(raw.chunks_exact_mut(size))
                .map(|(&row, out)| self.reader.read(row, out).is_ok())
                .collect();
            state = self.lock();
            for ((&row, bytes), good) in job.iter().zip(raw.chunks_exact(size)).zip(reads) {
                state.pending.remove(&row);
                if good {
                    state.stats.prefetched += 1;
                    state.insert(row, bytes);
                }
            }
            self.done.notify_all();
        }
    }
}

impl State {
    /// Keeps a row that was read.
    fn insert(&mut self, row: u64, bytes: &[u8]) {
        self.stats.bytes_read += bytes.len() as u64;
        self.stats.evictions += u64::from(self.cache.insert(row, bytes));
    }
}

impl CachedReader {
    pub(super) fn new(reader: RowReader, cache_bytes: usize) -> Self {
        let cache = Cache::new(reader.row_bytes(), cache_bytes);
        let wants_readers = cache.capacity > 0;
        let state = State {
            cache,
            stats: TableStats::default(),
            queue: VecDeque::new(),
            pending: BTreeSet::new(),
            closed: false,
        };
        let shared =
            Arc::new(Shared { reader, state: Mutex::new(state), work: Condvar::new(), done: Condvar::new() });
        let mut readers = Vec::new();
        for i in 0..if wants_readers { READERS } else { 0 } {
            let shared = Arc::clone(&shared);
            // Reading ahead is optional: with fewer threads, or none, gather reads for itself.
            match thread::Builder::new().name(format!("ngram-read-{i}")).spawn(move || shared.run()) {
                Ok(handle) => readers.push(handle),
                Err(_) => break,
            }
        }
        Self { shared, readers }
    }

    pub(super) fn stats(&self) -> TableStats {
        self.shared.lock().stats
    }

    pub(super) fn prefetch(&self, rows: impl Iterator<Item = u64>) {
        if self.readers.is_empty() {
            return;
        }
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        let mut job = Vec::new();
        for row in rows {
            if state.pending.len() >= state.cache.capacity.div_ceil(2) {
                break;
            }
            if !state.cache.has(row) && state.pending.insert(row) {
                job.push(row);
            }
        }
        for chunk in job.chunks(JOB_ROWS) {
            state.queue.push_back(chunk.to_vec());
        }
        drop(guard);
        if !job.is_empty() {
            self.shared.work.notify_all();
        }
    }

    /// Raw bytes of `rows` in order.
    pub(super) fn gather(&self, rows: &[u64], out: &mut [u8]) -> Result<()> {
        let missing = self.take_cached(rows, out);
        if missing.is_empty() {
            return Ok(());
        }
        let size = self.shared.reader.row_bytes();
        let ids: Vec<u64> = missing.keys().copied().collect();
        let raw = self.read_all(&ids)?;
        let mut state = self.shared.lock();
        for (places, bytes) in missing.values().zip(raw.chunks_exact(size)) {
            for &at in places {
                out[at * size..][..size].copy_from_slice(bytes);
            }
        }
        for (&row, bytes) in ids.iter().zip(raw.chunks_exact(size)) {
            state.insert(row, bytes);
        }
        Ok(())
    }

    /// Copies what the cache has, waiting for rows that are being read ahead; returns the places of the others.
    fn take_cached(&self, rows: &[u64], out: &mut [u8]) -> BTreeMap<u64, Vec<usize>> {
        let size = self.shared.reader.row_bytes();
        let mut missing = positions(rows.iter().copied().enumerate());
        let mut state = self.shared.lock();
        loop {
            let cache = &mut state.cache;
            let mut hits = 0;
            missing.retain(|&row, places| match cache.get(row) {
                None => true,
                Some(bytes) => {
                    hits += places.len() as u64;
                    places.iter().for_each(|&at| out[at * size..][..size].copy_from_slice(bytes));
                    false
                }
            });
            state.stats.hits += hits;
            if !missing.keys().any(|row| state.pending.contains(row)) {
                state.stats.misses += missing.values().map(|places| places.len() as u64).sum::<u64>();
                return missing;
            }
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reads rows from the shards, with several threads when there are many.
    fn read_all(&self, rows: &[u64]) -> Result<Vec<u8>> {
        let reader = &self.shared.reader;
        let size = reader.row_bytes();
        let mut raw = vec![0; rows.len() * size];
        let read = |rows: &[u64], raw: &mut [u8]| -> Result<()> {
            rows.iter().zip(raw.chunks_exact_mut(size)).try_for_each(|(&row, out)| reader.read(row, out))
        };
        if rows.len() < PARALLEL_ROWS {
            read(rows, &mut raw)?;
            return Ok(raw);
        }
        let share = rows.len().div_ceil(READERS);
        thread::scope(|scope| {
            let threads: Vec<_> = rows
                .chunks(share)
                .zip(raw.chunks_mut(share * size))
                .map(|(rows, raw)| scope.spawn(move || read(rows, raw)))
                .collect();
            threads
                .into_iter()
                .try_for_each(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        Ok(raw)
    }
}

impl Drop for CachedReader {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        for reader in self.readers.drain(..) {
            // A reader that panicked has nothing left to clean up.
            let _ = reader.join();
        }
    }
}

/// Rows under the second-chance rule: a row used since the hand last passed is spared once.
#[derive(Debug)]
struct Cache {
    row_bytes: usize,
    /// Rows at most.
    capacity: usize,
    index: HashMap<u64, usize>,
    /// Row and whether it was used, by slot.
    slots: Vec<(u64, bool)>,
    /// `row_bytes` a slot; grows to the capacity as slots are filled.
    data: Vec<u8>,
    hand: usize,
}

impl Cache {
    fn new(row_bytes: usize, cache_bytes: usize) -> Self {
        let capacity = cache_bytes / row_bytes.max(1);
        Self { row_bytes, capacity, index: HashMap::new(), slots: Vec::new(), data: Vec::new(), hand: 0 }
    }

    fn has(&self, row: u64) -> bool {
        self.index.contains_key(&row)
    }

    fn get(&mut self, row: u64) -> Option<&[u8]> {
        let slot = *self.index.get(&row)?;
        self.slots[slot].1 = true;
        Some(&self.data[slot * self.row_bytes..][..self.row_bytes])
    }

    /// Keeps a row; returns whether another one had to go.
    fn insert(&mut self, row: u64, bytes: &[u8]) -> bool {
        if self.capacity == 0 || self.has(row) {
            return false;
        }
        if self.slots.len() < self.capacity {
            self.index.insert(row, self.slots.len());
            self.slots.push((row, false));
            self.data.extend_from_slice(bytes);
            return false;
        }
        while self.slots[self.hand].1 {
            self.slots[self.hand].1 = false;
            self.hand = (self.hand + 1) % self.capacity;
        }
        let slot = self.hand;
        self.hand = (self.hand + 1) % self.capacity;
        self.index.remove(&self.slots[slot].0);
        self.index.insert(row, slot);
        self.slots[slot] = (row, false);
        self.data[slot * self.row_bytes..][..self.row_bytes].copy_from_slice(bytes);
        true
    }
}
