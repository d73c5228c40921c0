//! Typed operations of the forward pass over a device.
//!
//! The model composes these; it never sees a kernel. Today there is one device, the CPU, in two forms that
//! give the same bytes: the law read aloud ([`Level::law`]) and the packed form ([`Level::detect`]). An
//! operation works on whole rows: `x` is `[rows, width]`, row-major f32, and the bytes of a row depend only
//! on that row and on the state handed in with it.

mod gdn;
mod hyper;
mod moe;
mod ple;
mod profile;
mod qsa;

pub use castiron_cpu::peak::clock;
pub use castiron_cpu::{Codes, Level, Matrix, Storage};
pub use castiron_num::orders::Scoring;
pub use gdn::{Gdn, GdnRows, GdnShape};
pub use hyper::Hyper;
pub use moe::{Expert, Moe, MoeOutput};
pub use ple::Ple;
pub use profile::{Kind, Profile, Total};
pub use qsa::{Qsa, QsaRows, QsaShape, Selection};

use std::sync::Arc;

use castiron_cpu::{Pool, peak};
use castiron_num::bf16;

/// Bytes read to measure bandwidth.
const PEAK_BYTES: usize = 1 << 29;

/// Where operands and caches are rounded (`docs/numerics.md`, section 5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// To bf16: the law.
    #[default]
    Bf16,
    /// Not at all: for parity with f32 checkpoints, on the CPU only.
    F32,
}

impl Activations {
    /// The name used on the command line: `bf16` or `f32`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

/// What NVFP4 experts multiply with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertActivations {
    /// Activations quantised to NVFP4 with the checkpoint's static scales: exact integer products.
    W4a4,
    /// Stored activations.
    W4a16,
}

impl ExpertActivations {
    /// The name used on the command line: `w4a4` or `w4a16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::W4a4 => "w4a4",
            Self::W4a16 => "w4a16",
        }
    }
}

/// The choices that decide bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numerics {
    /// Rounding of operands and caches.
    pub activations: Activations,
    /// Products of NVFP4 experts.
    pub experts: ExpertActivations,
}

/// The CPU as a device: the numerics asked for and the level that runs them.
#[derive(Clone)]
pub struct Exec {
    numerics: Numerics,
    level: Level,
    pool: Arc<Pool>,
    profile: Option<Arc<Profile>>,
}

impl Exec {
    /// A device for `numerics` at `level` on `threads` threads; 0 takes every processor.
    pub fn new(numerics: Numerics, level: Level, threads: usize) -> Self {
        Self { numerics, level, pool: Arc::new(Pool::new(threads)), profile: None }
    }

    /// Starts to measure operations; the profile is read by whoever holds it.
    pub fn measure(&mut self) -> Arc<Profile> {
        let profile = Arc::new(Profile::default());
        self.profile = Some(profile.clone());
        profile
    }

    /// Runs `job`, measured as `kind` when a profile is on.
    fn timed<T>(&self, kind: Kind, operations: usize, bytes: usize, job: impl FnOnce() -> T) -> T {
        match &self.profile {
            Some(p) => p.time(kind, self.threads(), operations as f64, bytes as f64, job),
            None => job(),
        }
    }

    /// Ceilings of the threads in use, measured now: bytes a second of plain reads over a buffer larger than
    /// the caches, and operations a second of fused multiply-adds.
    pub fn peaks(&self, repetitions: usize) -> (f64, f64) {
        let memory: Vec<u8> = (0..PEAK_BYTES).map(|i| (i * 31 % 251) as u8).collect();
        let read = peak::read_bandwidth(self.level, &self.pool, &memory, repetitions);
        (read, peak::fma_peak(self.level, &self.pool, repetitions))
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The numerics in force.
    pub fn numerics(&self) -> Numerics {
        self.numerics
    }

    /// The level in force.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Rounds values where a matrix operand or a cache is stored.
    pub fn store(&self, x: &mut [f32]) {
        if self.numerics.activations == Activations::Bf16 {
            x.iter_mut().for_each(|x| *x = bf16::round(*x));
        }
    }

    /// `W x` for every row of `x`: `[rows, w.rows()]`.
    pub fn product(&self, w: &Matrix, x: &[f32]) -> Vec<f32> {
        let operations = 2 * x.len() * w.rows();
        self.timed(Kind::Dense, operations, w.bytes(), || self.multiply(w, x))
    }

    /// [`Self::product`], not measured: a part of an operation that is.
    fn multiply(&self, w: &Matrix, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len() / w.cols() * w.rows()];
        castiron_cpu::product(self.level, &self.pool, w, x, &mut y);
        y
    }

    /// [`Self::product`], stored.
    pub fn product_stored(&self, w: &Matrix, x: &[f32]) -> Vec<f32> {
        let mut y = self.product(w, x);
        self.store(&mut y);
        y
    }

    /// The zero-centred RMS norm of every row of `x` in `groups` groups; `w` has one row's width.
    pub fn norm(&self, x: &[f32], w: &[f32], groups: usize, eps: f32) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        self.pool.rows(&mut out, w.len(), |r, out| {
            let x = &x[r * w.len()..(r + 1) * w.len()];
            castiron_cpu::norm_zero_centred(self.level, x, w, groups, eps, out);
        });
        out
    }
}
