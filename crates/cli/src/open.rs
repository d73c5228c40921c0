//! Opening a checkpoint and its model as the flags say.

use std::path::Path;

use castiron_format::{Checkpoint, Source, TableMode};
use castiron_model::{Activations, ExpertActivations, Level, Model, Options};

use crate::args::{self, Numerics};
use crate::failure::Failure;
use crate::progress::Working;
use crate::{output, tiny};

/// Opens the checkpoint at `path`, or the one inside the program. Remarks go to standard error.
pub fn checkpoint(path: Option<&Path>) -> Result<Checkpoint, Failure> {
    let source = match path {
        Some(path) if path.is_dir() => Source::Dir(path.to_path_buf()),
        Some(path) => {
            return Err(Failure::input(anyhow::anyhow!(
                "{} is not a directory: name the folder that holds config.json and the safetensors files",
                path.display()
            )));
        }
        None => tiny::source()?,
    };
    let checkpoint = Checkpoint::open(source).map_err(Failure::input)?;
    for note in checkpoint.notes() {
        output::remark(&format!("note: {note}"));
    }
    Ok(checkpoint)
}

/// The model's name for a flag.
pub fn activations(flag: args::Activations) -> Activations {
    match flag {
        args::Activations::Bf16 => Activations::Bf16,
        args::Activations::F32 => Activations::F32,
    }
}

/// The model's name for a flag.
pub fn experts(flag: Option<args::Experts>) -> Option<ExpertActivations> {
    flag.map(|e| match e {
        args::Experts::W4a4 => ExpertActivations::W4a4,
        args::Experts::W4a16 => ExpertActivations::W4a16,
    })
}

/// The model's name for a flag, with a row cache of `cache` MiB.
pub fn table(flag: args::Table, cache: usize) -> TableMode {
    match flag {
        args::Table::File => TableMode::File { cache_bytes: cache.saturating_mul(1 << 20) },
        args::Table::Memory => TableMode::Memory,
    }
}

/// Opens the model of a checkpoint.
pub fn model(checkpoint: &Checkpoint, numerics: &Numerics) -> Result<Model, Failure> {
    let options = Options {
        activations: activations(numerics.activations),
        experts: experts(numerics.experts),
        level: match numerics.cpu {
            args::Cpu::Auto => Level::detect(),
            args::Cpu::Portable => Level::portable(),
            args::Cpu::Law => Level::law(),
        },
        table: table(numerics.table, numerics.table_cache),
        threads: usize::from(numerics.threads),
        context: numerics.context,
        ..Options::default()
    };
    let _working = Working::new("opening the model");
    Ok(Model::open(checkpoint, &options)?)
}
