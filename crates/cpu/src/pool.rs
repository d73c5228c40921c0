//! A fixed pool of threads with a static partition.
//!
//! A job is cut into as many parts as there are threads, by position alone, so what a thread does never
//! depends on timing, and no result depends on how many threads there are: parts write disjoint outputs, each
//! computed by one thread in the order of the law.

use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Looks at a flag this often before going to sleep.
const SPINS: usize = 4000;

/// Operations below which a job is not handed out: some 100 microseconds, well above what waking threads takes.
const WORTH: usize = 1_000_000;

/// A job as the workers see it: a function of the part's index.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(usize) + Sync + 'static));

// SAFETY: the pointee is `Sync`, and `Pool::run` keeps it alive until every worker is done with it.
unsafe impl Send for Job {}

struct Shared {
    /// Counts jobs; a worker runs when it changes.
    epoch: AtomicUsize,
    job: Mutex<(Option<Job>, bool)>,
    wake: Condvar,
    /// Workers still busy with the current job.
    busy: AtomicUsize,
    done: Condvar,
    panicked: AtomicBool,
}

/// Threads that run parts of jobs. Dropping it ends them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One job at a time.
    turn: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` threads, the caller included; 0 takes every processor.
    pub fn new(threads: usize) -> Self {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            job: Mutex::new((None, false)),
            wake: Condvar::new(),
            busy: AtomicUsize::new(0),
            done: Condvar::new(),
            panicked: AtomicBool::new(false),
        });
        let spawn = |i: usize| {
            let shared = shared.clone();
            std::thread::Builder::new().name(format!("castiron-{i}")).spawn(move || work(&shared, i)).ok()
        };
        // A thread that cannot be had leaves a smaller pool; parts follow the threads there are.
        let workers = (1..threads).map_while(spawn).collect();
        Self { shared, workers, turn: Mutex::new(()) }
    }

    /// A pool of the caller alone, for work inside a job of this pool. Always the same one.
    pub fn alone() -> &'static Arc<Self> {
        static ALONE: std::sync::LazyLock<Arc<Pool>> = std::sync::LazyLock::new(|| Arc::new(Pool::new(1)));
        &ALONE
    }

    /// This pool, or the caller alone when a job of so many operations is done before the others wake up.
    pub fn for_work(&self, operations: usize) -> &Self {
        if operations < WORTH { Self::alone() } else { self }
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job(part)` for every part in `0..threads()`, one on each thread, and waits for all.
    ///
    /// # Panics
    /// When a part panicked.
    pub fn run(&self, job: impl Fn(usize) + Sync) {
        if self.workers.is_empty() {
            return job(0);
        }
        let _turn = lock(&self.turn);
        let erased: *const (dyn Fn(usize) + Sync + '_) = &job;
        // SAFETY: only the lifetime is erased; `job` outlives this call, which returns after every worker has
        // finished with it (also when the caller's own part panics).
        let erased = Job(unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(erased)
        });
        self.shared.busy.store(self.workers.len(), Ordering::Relaxed);
        lock(&self.shared.job).0 = Some(erased);
        self.shared.epoch.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
        let mine = catch_unwind(AssertUnwindSafe(|| job(0)));
        self.wait();
        if let Err(panic) = mine {
            std::panic::resume_unwind(panic);
        }
        assert!(!self.shared.panicked.swap(false, Ordering::Relaxed), "a worker thread panicked");
    }

    /// Cuts `0..count` into one range a thread, borders at multiples of `grain`, and runs `job` on each range
    /// that is not empty.
    pub fn split(&self, count: usize, grain: usize, job: impl Fn(Range<usize>) + Sync) {
        let (threads, grains) = (self.threads(), count.div_ceil(grain));
        if threads == 1 || grains <= 1 {
            return job(0..count);
        }
        self.run(|part| {
            let border = |i: usize| (i * grains / threads * grain).min(count);
            let range = border(part)..border(part + 1);
            if !range.is_empty() {
                job(range);
            }
        });
    }

    fn wait(&self) {
        for _ in 0..SPINS {
            if self.shared.busy.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = lock(&self.shared.job);
        while self.shared.busy.load(Ordering::Acquire) != 0 {
            guard = self.shared.done.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.job).1 = true;
        self.shared.epoch.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can be left half-changed by a panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn work(shared: &Shared, part: usize) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.epoch.load(Ordering::Acquire) == seen && spins < SPINS {
            std::hint::spin_loop();
            spins += 1;
        }
        let mut guard = lock(&shared.job);
        while shared.epoch.load(Ordering::Acquire) == seen {
            guard = shared.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        let (job, quit) = *guard;
        seen = shared.epoch.load(Ordering::Acquire);
        drop(guard);
        if quit {
            return;
        }
        if let Some(Job(job)) = job {
            // SAFETY: `Pool::run` keeps the job alive until `busy` is back at 0.
            let job = unsafe { &*job };
            if catch_unwind(AssertUnwindSafe(|| job(part))).is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
            if shared.busy.fetch_sub(1, Ordering::AcqRel) == 1 {
                // Under the lock, so that the caller is either before its check or asleep.
                let _guard = lock(&shared.job);
                shared.done.notify_all();
            }
        }
    }
}

/// `[rows, width]` values that several threads write at once, each its own columns.
pub(crate) struct Columns<'a> {
    data: *mut f32,
    len: usize,
    width: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: `set` is the only access, and its callers write disjoint columns.
unsafe impl Sync for Columns<'_> {}

impl<'a> Columns<'a> {
    pub(crate) fn new(data: &'a mut [f32], width: usize) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), width, life: PhantomData }
    }

    /// One row.
    ///
    /// # Safety
    /// No other thread touches this row during the job.
    #[allow(clippy::mut_from_ref, reason = "the caller vouches for disjoint rows")]
    pub(crate) unsafe fn row_mut(&self, row: usize) -> &mut [f32] {
        assert!((row + 1) * self.width <= self.len, "inside the matrix");
        // SAFETY: the range was checked, and the caller vouches that nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.width), self.width) }
    }

    /// Writes one value.
    ///
    /// # Safety
    /// No other thread writes this column during the job.
    #[inline(always)]
    pub(crate) unsafe fn set(&self, row: usize, column: usize, value: f32) {
        let at = row * self.width + column;
        assert!(column < self.width && at < self.len, "inside the matrix");
        // SAFETY: the index was checked, and the caller vouches that nobody else writes it.
        unsafe { self.data.add(at).write(value) }
    }
}

/// Rows of a buffer that several threads write at once, each its own rows.
pub struct Rows<'a>(Columns<'a>);

impl<'a> Rows<'a> {
    /// `data` as rows of `width` values.
    pub fn new(data: &'a mut [f32], width: usize) -> Self {
        Self(Columns::new(data, width))
    }

    /// One row.
    ///
    /// # Safety
    /// No other thread touches this row while the result is in use.
    #[allow(clippy::mut_from_ref, reason = "the caller vouches for disjoint rows")]
    pub unsafe fn row(&self, row: usize) -> &mut [f32] {
        // SAFETY: as the caller promises.
        unsafe { self.0.row_mut(row) }
    }

    /// Columns `range` of one row.
    ///
    /// # Safety
    /// No other thread touches these values while the result is in use.
    #[allow(clippy::mut_from_ref, reason = "the caller vouches for disjoint parts")]
    pub unsafe fn part(&self, row: usize, range: Range<usize>) -> &mut [f32] {
        let Columns { data, len, width, .. } = self.0;
        assert!(
            range.start <= range.end && range.end <= width && (row + 1) * width <= len,
            "inside the matrix"
        );
        // SAFETY: the range was checked, and the caller vouches that nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(data.add(row * width + range.start), range.len()) }
    }
}

impl Pool {
    /// Runs `job(row, values)` for every row of `width` values in `data`, rows cut into one range a thread.
    pub fn rows(&self, data: &mut [f32], width: usize, job: impl Fn(usize, &mut [f32]) + Sync) {
        let data_len = data.len();
        let count = data_len / width.max(1);
        let rows = Rows::new(data, width);
        self.for_work(data_len * 8).split(count, 1, |range| {
            for r in range {
                // SAFETY: ranges are disjoint, so row r is this thread's alone.
                job(r, unsafe { rows.row(r) });
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_runs_once_and_all_are_done_after() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for round in 0..200 {
                let hits: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
                pool.run(|part| {
                    hits[part].fetch_add(1, Ordering::Relaxed);
                    if round % 50 == 49 {
                        std::thread::sleep(std::time::Duration::from_millis(part as u64));
                    }
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_split_covers_the_range_once_with_borders_on_the_grain() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for (count, grain) in [(0, 4), (1, 4), (100, 7), (96, 24), (3, 1)] {
                let seen: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.split(count, grain, |range| {
                    assert!(range.start % grain == 0 && (range.end % grain == 0 || range.end == count));
                    range.for_each(|i| {
                        seen[i].fetch_add(1, Ordering::Relaxed);
                    });
                });
                assert!(seen.iter().all(|s| s.load(Ordering::Relaxed) == 1), "{threads} {count} {grain}");
            }
        }
    }

    #[test]
    fn a_panic_in_a_part_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3);
        for bad in 0..3 {
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(|part| assert_ne!(part, bad))));
            assert!(caught.is_err());
            pool.run(|_| ());
        }
    }
}
