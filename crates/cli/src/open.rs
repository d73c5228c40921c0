//! Opening a checkpoint and its model as the flags say.

use std::path::Path;

use castiron_format::{Checkpoint, Source, TableMode};
use castiron_model::{Activations, ExpertActivations, Level, Model, Options};

use crate::args::{self, Numerics};
use crate::failure::Failure;
use crate::tiny;

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
        eprintln!("note: {note}");
    }
    Ok(checkpoint)
}

/// Opens the model of a checkpoint.
pub fn model(checkpoint: &Checkpoint, numerics: &Numerics) -> Result<Model, Failure> {
    let cache_bytes = numerics.table_cache.saturating_mul(1 << 20);
    let options = Options {
        activations: match numerics.activations {
            args::Activations::Bf16 => Activations::Bf16,
            args::Activations::F32 => Activations::F32,
        },
        experts: numerics.experts.map(|e| match e {
            args::Experts::W4a4 => ExpertActivations::W4a4,
            args::Experts::W4a16 => ExpertActivations::W4a16,
        }),
        level: match numerics.cpu {
            args::Cpu::Auto => Level::detect(),
            args::Cpu::Portable => Level::portable(),
            args::Cpu::Law => Level::law(),
        },
        table: match numerics.table {
            args::Table::File => TableMode::File { cache_bytes },
            args::Table::Memory => TableMode::Memory,
        },
        context: numerics.context,
        ..Options::default()
    };
    Ok(Model::open(checkpoint, &options)?)
}
