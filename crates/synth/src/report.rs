//! How far quantised weights are from what they were made of.

use std::collections::BTreeMap;

use serde::Serialize;

/// Sums over the weights of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Tally {
    pub(crate) tensors: u64,
    pub(crate) elements: u64,
    pub(crate) clipped: u64,
    pub(crate) blocks: u64,
    pub(crate) zero_blocks: u64,
    pub(crate) max_abs: f32,
    pub(crate) error: f64,
    pub(crate) signal: f64,
}

impl Tally {
    /// One weight and what became of it.
    #[inline]
    pub(crate) fn weight(&mut self, weight: f32, stored: f32) {
        let error = stored - weight;
        self.elements += 1;
        self.max_abs = self.max_abs.max(error.abs());
        self.error += f64::from(error) * f64::from(error);
        self.signal += f64::from(weight) * f64::from(weight);
    }

    /// One block that shares a scale.
    pub(crate) fn block(&mut self, zero: bool) {
        self.blocks += 1;
        self.zero_blocks += u64::from(zero);
    }

    fn add(&mut self, other: &Self) {
        self.tensors += other.tensors;
        self.elements += other.elements;
        self.clipped += other.clipped;
        self.blocks += other.blocks;
        self.zero_blocks += other.zero_blocks;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.error += other.error;
        self.signal += other.signal;
    }
}

/// Tallies by kind of tensor. Added up in file order, so that threads cannot be seen in the last digit.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tallies(BTreeMap<&'static str, Tally>);

impl Tallies {
    pub(crate) fn of(&mut self, kind: &'static str) -> &mut Tally {
        self.0.entry(kind).or_default()
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (kind, tally) in &other.0 {
            self.of(kind).add(tally);
        }
    }

    pub(crate) fn errors(&self) -> Vec<Errors> {
        let share = |part: u64, all: u64| if all == 0 { 0.0 } else { part as f64 / all as f64 };
        self.0
            .iter()
            .map(|(kind, t)| Errors {
                kind: (*kind).to_owned(),
                tensors: t.tensors,
                elements: t.elements,
                max_abs: t.max_abs,
                relative_rms: if t.signal == 0.0 { 0.0 } else { (t.error / t.signal).sqrt() },
                clipped: share(t.clipped, t.elements),
                zero_blocks: share(t.zero_blocks, t.blocks),
            })
            .collect()
    }
}

/// The error of one kind of quantised tensor.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Errors {
    /// Such as `routed experts, gate and up: nvfp4`.
    pub kind: String,
    /// Matrices (of a table: shards).
    pub tensors: u64,
    /// Weights.
    pub elements: u64,
    /// The largest difference of a weight.
    pub max_abs: f32,
    /// Root of the sum of squared differences over the sum of squared weights; 0 when all weights are 0.
    pub relative_rms: f64,
    /// Share of the weights that lay beyond the largest code times their scale.
    pub clipped: f64,
    /// Share of the scale blocks in which every code is zero (rows of a table that carry nothing are not counted).
    pub zero_blocks: f64,
}

/// What was made.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Safetensors files.
    pub files: usize,
    /// Stored tensors, scales included.
    pub tensors: usize,
    /// Bytes of the safetensors files by their length (holes count).
    pub bytes: u64,
    /// [`castiron_format::Checkpoint::digest`] of the result.
    pub digest: String,
    /// By kind of quantised tensor, in name order; empty when nothing was quantised.
    pub errors: Vec<Errors>,
    /// Remarks for a person: files that were left behind.
    pub notes: Vec<String>,
}
