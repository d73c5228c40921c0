//! Synthetic checkpoints: the layout and the scales of a real one, weights from a counter-based generator.

mod config;
mod noise;
mod shape;
mod tensors;

use std::collections::BTreeMap;
use std::path::Path;

use castiron_format::{Bytes, Checkpoint, Config, Source};

use crate::names::{Role, is_draft, role};
use crate::origin::{Origin, Tensor};
use crate::plan::Plan;
use crate::quantize::{Experts, InputScales, Quantize, Table, plan, updated};
use crate::sink::{Files, Folder, Run, Sink, make};
use crate::{Report, Result};

pub use shape::{Changes, Preset};
use tensors::Generator;

/// A synthetic checkpoint. The same values give the same bytes on every machine.
///
/// A weight is a function of the seed, the logical name of its matrix and its place in it, and of nothing else: fused or one
/// by one, sharded in any way, in BF16 or quantised from it, an expert or a table row has the same numbers.
#[derive(Debug, Clone)]
pub struct Synth {
    /// Shape of the model. A draft head is made when `mtp_layers` is 1.
    pub config: Config,
    /// Format of the routed experts: [`Experts::Keep`] is BF16, fused as published.
    pub experts: Experts,
    /// Whether NVFP4 experts get activation scales, as the published ones have.
    pub input_scales: bool,
    /// Format of the n-gram tables: [`Table::Keep`] is BF16.
    pub table: Table,
    /// Only the first row of each table shard is written; the rest is a hole that reads as zeros.
    pub sparse_table: bool,
    /// Seed of all weights.
    pub seed: u64,
}

impl Synth {
    /// A BF16 checkpoint of a shape.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            experts: Experts::Keep,
            input_scales: true,
            table: Table::Keep,
            sparse_table: false,
            seed: 0,
        }
    }

    /// Writes the checkpoint into a new directory `out`, which appears when it is whole.
    ///
    /// Errors: a shape that `config.json` cannot say or this engine would refuse, `out` exists, NVFP4 experts of inner sizes
    /// that are no multiple of 16, a file that cannot be written.
    pub fn write(&self, out: &Path, run: &Run<'_>) -> Result<Report> {
        let (origin, plan, side) = self.prepare()?;
        Ok(make(&origin, &plan, side, Sink::Folder(Folder::create(out)?), run)?.1)
    }

    /// The files of [`Self::write`] in memory, byte for byte the same.
    pub fn source(&self, run: &Run<'_>) -> Result<Source> {
        let (origin, plan, side) = self.prepare()?;
        Ok(make(&origin, &plan, side, Sink::Memory, run)?.0.unwrap_or(Source::Memory(&[])))
    }

    /// [`Self::source`], opened: the ordinary census, without a disk.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        Ok(Checkpoint::open(self.source(&Run::default())?)?)
    }

    fn prepare(&self) -> Result<(Generator, Plan, Files)> {
        let text: Bytes = config::model(&self.config)?.into();
        let origin = Generator::new(&self.config, self.seed, self.sparse_table)?;
        let options = Quantize {
            experts: self.experts,
            table: self.table,
            input_scales: self.scales(origin.tensors()),
            ..Quantize::default()
        };
        let plan = plan(origin.tensors(), &options)?;
        let side = vec![
            ("config.json".to_owned(), updated(&text, &plan)?),
            ("generation_config.json".to_owned(), config::generation(&self.config).into()),
        ];
        Ok((origin, plan, side))
    }

    /// An activation scale for each projection of a routed main expert: 8 to 11 times 2^-13, so that gate and up differ.
    fn scales(&self, tensors: &[Tensor]) -> InputScales {
        if !self.input_scales || self.experts != Experts::Nvfp4 {
            return InputScales::None;
        }
        let mut scales = BTreeMap::new();
        let mut add = |module: String| {
            let stream = noise::Stream::new(self.seed, &format!("{module}.input_scale"));
            let scale = (8 + stream.word(0) % 4) as f32 / 8192.0;
            scales.insert(format!("{module}.input_scale"), scale);
        };
        for tensor in tensors.iter().filter(|t| !is_draft(&t.name)) {
            let experts = tensor.shape.first().copied().unwrap_or(0);
            match role(&tensor.name) {
                Role::FusedGateUp(module) => (0..experts).for_each(|e| {
                    add(format!("{module}.{e}.gate_proj"));
                    add(format!("{module}.{e}.up_proj"));
                }),
                Role::FusedDown(module) => (0..experts).for_each(|e| add(format!("{module}.{e}.down_proj"))),
                _ => {}
            }
        }
        InputScales::Named(scales)
    }
}
