//! The benchmark harness of a model: rates beside the ceilings measured in the same run.

use castiron_model::{Error, Kind, Model, Row, Slot, Total};
use castiron_num::philox::philox4x32_10;

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Tokens in the stream before the first measured step.
    pub context: usize,
    /// Single-row steps.
    pub steps: usize,
    /// Rows of the measured prompt chunk.
    pub rows: usize,
    /// Times the prompt chunk is run.
    pub repetitions: usize,
}

/// One measured forward pass: the fastest of its repetitions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass {
    /// Rows of the pass.
    pub rows: usize,
    /// All of it, on the clock of `castiron_cpu::peak`.
    pub seconds: f64,
    /// By kind, in the order of [`Kind::ALL`]; what is missing to `seconds` is everything else.
    pub kinds: [Total; 4],
}

impl Pass {
    /// Stored weight bytes read.
    pub fn bytes(&self) -> f64 {
        self.kinds.iter().map(|k| k.bytes).sum()
    }

    /// One kind's total.
    pub fn kind(&self, kind: Kind) -> Total {
        self.kinds[kind as usize]
    }
}

/// What was measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Bytes a second of plain reads.
    pub read_peak: f64,
    /// Operations a second of fused multiply-adds.
    pub fma_peak: f64,
    /// A single-row step.
    pub step: Pass,
    /// A prompt chunk from an empty stream.
    pub prompt: Pass,
}

/// Repetitions of a ceiling.
const PEAK_REPETITIONS: usize = 5;

/// Measures ceilings, steps and a prompt chunk.
///
/// # Errors
/// The model refuses, for instance because the context is too short.
pub fn run(model: &mut Model, options: &Options) -> Result<Report, Error> {
    let (read_peak, fma_peak) = model.peaks(PEAK_REPETITIONS);
    let profile = model.measure();
    let slot = model.new_stream()?;
    let mut report = Report { read_peak, fma_peak, ..Report::default() };
    let timed = |model: &mut Model, rows: &[Row]| -> Result<Pass, Error> {
        profile.take();
        let threads = model.threads();
        let start = castiron_model::clock(threads);
        model.forward(rows, &[])?;
        let seconds = castiron_model::clock(threads) - start;
        Ok(Pass { rows: rows.len(), seconds, kinds: profile.take() })
    };
    for _ in 0..options.repetitions.max(1) {
        model.reset(slot)?;
        let pass = timed(model, &rows(model, slot, 0, options.rows))?;
        report.prompt = faster(report.prompt, pass);
    }
    model.reset(slot)?;
    let mut at = 0;
    while at < options.context {
        let count = options.rows.min(options.context - at);
        model.forward(&rows(model, slot, at, count), &[])?;
        at += count;
    }
    for step in 0..options.steps.max(1) {
        let pass = timed(model, &rows(model, slot, at + step, 1))?;
        report.step = faster(report.step, pass);
    }
    model.free(slot);
    Ok(report)
}

fn faster(best: Pass, pass: Pass) -> Pass {
    if best.rows == 0 || pass.seconds < best.seconds { pass } else { best }
}

/// Rows of a repeatable text; the last one wants its logits.
fn rows(model: &Model, slot: Slot, start: usize, count: usize) -> Vec<Row> {
    let row = |i: usize| {
        let position = (start + i) as u32;
        let word = philox4x32_10([position, 0, 0, 0], [0x6361_7374, 0x6972_6F6E])[0];
        Row { slot, position, token: word % model.vocab() as u32, logits: i + 1 == count }
    };
    (0..count).map(row).collect()
}
