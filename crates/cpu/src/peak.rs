//! Ceilings of this processor, measured: what a rate in the benchmarks is divided by.
//!
//! Each is the best of several repetitions, so that a busy moment of a shared machine does not lower it. With
//! one thread the clock is the thread's own processor time where there is one: waiting for a processor is not
//! counted, neither in a ceiling nor in a rate.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::level::for_level;
use crate::{Level, Pool};

/// Bytes a second that the pool's threads read from `memory` together (larger than the caches, or the caches
/// are what is measured).
pub fn read_bandwidth(level: Level, pool: &Pool, memory: &[u8], repetitions: usize) -> f64 {
    let sum = AtomicU64::new(0);
    best(pool.threads(), repetitions, || {
        pool.split(memory.len(), 4096, |range| {
            sum.fetch_add(read(level, &memory[range]), Ordering::Relaxed);
        });
        memory.len() as f64
    })
}

/// Floating-point operations a second of fused multiply-adds in registers (two each), all threads together.
pub fn fma_peak(level: Level, pool: &Pool, repetitions: usize) -> f64 {
    const STEPS: usize = 200_000;
    best(pool.threads(), repetitions, || {
        pool.run(|part| {
            black_box(multiply_add(level, STEPS, black_box(1.0 + part as f32 * 1e-7)));
        });
        (pool.threads() * STEPS * CHAINS * 2) as f64
    })
}

/// The largest work per second over `repetitions` calls of `job`, which gives its work and runs on `threads`
/// threads.
pub fn best(threads: usize, repetitions: usize, mut job: impl FnMut() -> f64) -> f64 {
    let mut top = 0.0f64;
    for _ in 0..repetitions.max(1) {
        let started = clock(threads);
        let work = job();
        top = top.max(work / (clock(threads) - started).max(1e-9));
    }
    top
}

/// Seconds on the clock that times a job on `threads` threads: this thread's processor time for one, the wall's
/// for more.
pub fn clock(threads: usize) -> f64 {
    #[cfg(target_os = "linux")]
    if threads == 1 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        return t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9;
    }
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    let _ = threads;
    START.elapsed().as_secs_f64()
}

/// Values in flight: enough vectors to hide the latency of an addition at any width here.
const CHAINS: usize = 96;

for_level! {
    fn multiply_add(steps: usize, seed: f32) -> f32 = multiply_add_body;
}

#[inline(always)]
fn multiply_add_body(steps: usize, seed: f32) -> f32 {
    let mut acc = [seed; CHAINS];
    for _ in 0..steps {
        for a in &mut acc {
            *a = a.mul_add(seed, 1e-9);
        }
    }
    acc.iter().sum()
}

for_level! {
    fn read(memory: &[u8]) -> u64 = read_body;
}

#[inline(always)]
fn read_body(memory: &[u8]) -> u64 {
    let mut sums = [0u64; 16];
    for block in memory.as_chunks::<128>().0 {
        for (s, b) in sums.iter_mut().zip(block.as_chunks::<8>().0) {
            *s = s.wrapping_add(u64::from_le_bytes(*b));
        }
    }
    sums.iter().fold(0, |a, &b| a.wrapping_add(b))
}
