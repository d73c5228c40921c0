//! From a BF16 or F32 checkpoint to a quantised one.

mod config;

use std::collections::BTreeMap;
use std::path::Path;

use castiron_format::safetensors::{Dtype, read_header};
use castiron_format::{Checkpoint, ErrorKind, Source};

use crate::names::{Role, is_draft, role};
use crate::origin::{Origin, Stored, Tensor};
use crate::plan::{Job, Piece, Plan, Unit};
use crate::sink::{Files, Folder, Run, Sink, make};
use crate::{Error, Report, Result};

pub(crate) use config::updated;

/// What becomes of routed experts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Experts {
    /// Copied, fused or not.
    #[default]
    Keep,
    /// E4M3 codes with a scale for each 128 x 128 block, one expert a tensor.
    Fp8,
    /// E2M1 codes in groups of 16, ModelOpt names, one expert a tensor.
    Nvfp4,
}

/// What becomes of the routed experts of the draft head.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Draft {
    /// Copied when the main experts are, else block FP8 (as in the published NVFP4 files of mixed precision).
    #[default]
    Auto,
    /// As said.
    As(Experts),
}

/// What becomes of n-gram tables.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Table {
    /// Copied.
    #[default]
    Keep,
    /// E4M3 codes with one BF16 scale for the whole table.
    Fp8,
}

/// What becomes of dense projections (attention, linear attention, shared experts, hyper-connection mixes, n-gram and
/// draft projections, the output head). Embeddings, norms, routers, gates, inject, index projections, convolutions and
/// decays are always copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Dense {
    /// Copied.
    #[default]
    Keep,
    /// E4M3 codes with one f32 scale for each output row.
    Fp8Row,
}

/// The stored type of block FP8 scales.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Scales {
    /// As in the official files.
    #[default]
    Bf16,
    /// Exactly `amax / 448`.
    F32,
}

/// Static activation scales of NVFP4 experts: with them a checkpoint is made for four-bit activations (W4A4).
#[derive(Debug, Clone, Default, PartialEq)]
pub enum InputScales {
    /// None: weights only.
    #[default]
    None,
    /// By tensor name, `{module}.input_scale`. Every NVFP4 expert of the main layers needs one.
    Named(BTreeMap<String, f32>),
}

impl InputScales {
    /// Reads the tensors `*.input_scale` (F32 scalars) of a safetensors file; others are ignored.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|e| Error::Io(format!("cannot read {name}"), e))?;
        let mut scales = BTreeMap::new();
        for tensor in read_header(&name, &bytes)?.tensors {
            if !tensor.name.ends_with(".input_scale") {
                continue;
            }
            let value =
                bytes.get(tensor.range.clone()).and_then(|b| b.try_into().ok()).map(f32::from_le_bytes);
            match value {
                Some(x) if tensor.dtype == Dtype::F32 && x.is_finite() && x > 0.0 => {
                    scales.insert(tensor.name, x);
                }
                _ => {
                    return Error::refused(format!(
                        "{name}: {:?} must be one F32 number, finite and above zero",
                        tensor.name
                    ));
                }
            }
        }
        if scales.is_empty() {
            return Error::refused(format!("{name} holds no tensor named *.input_scale"));
        }
        Ok(Self::Named(scales))
    }

    fn of(&self, module: &str, must: bool) -> Result<Option<f32>> {
        let Self::Named(scales) = self else { return Ok(None) };
        let name = format!("{module}.input_scale");
        match scales.get(&name) {
            None if must => Error::refused(format!(
                "there is no input scale {name:?}: give one for every routed expert of the main layers, or none at all"
            )),
            scale => Ok(scale.copied()),
        }
    }
}

/// What to quantise, and how. The default copies everything.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Quantize {
    /// Routed experts of the main layers.
    pub experts: Experts,
    /// Routed experts of the draft head.
    pub draft: Draft,
    /// N-gram tables.
    pub table: Table,
    /// Dense projections.
    pub dense: Dense,
    /// Scales of block FP8.
    pub scales: Scales,
    /// Activation scales of NVFP4.
    pub input_scales: InputScales,
}

/// Quantises a checkpoint into a new directory `out`, which appears when it is whole.
///
/// Errors: `out` exists, a tensor to quantise is not BF16 or F32 or not finite, NVFP4 inputs that are no multiple of 16, an
/// input scale that is missing, a file that cannot be written.
pub fn quantize(checkpoint: &Checkpoint, options: &Quantize, out: &Path, run: &Run<'_>) -> Result<Report> {
    let (origin, plan) = prepare(checkpoint, options)?;
    let (side, notes) = side_files(checkpoint, &plan)?;
    let (_, mut report) = make(&origin, &plan, side, Sink::Folder(Folder::create(out)?), run)?;
    report.notes = notes;
    Ok(report)
}

/// Quantises a checkpoint into memory: the files are those that [`quantize`] writes, byte for byte. Open the source with
/// [`Checkpoint::open`].
pub fn quantize_in_memory(
    checkpoint: &Checkpoint,
    options: &Quantize,
    run: &Run<'_>,
) -> Result<(Source, Report)> {
    let (origin, plan) = prepare(checkpoint, options)?;
    let (side, notes) = side_files(checkpoint, &plan)?;
    let (source, mut report) = make(&origin, &plan, side, Sink::Memory, run)?;
    report.notes = notes;
    Ok((source.unwrap_or(Source::Memory(&[])), report))
}

fn prepare(checkpoint: &Checkpoint, options: &Quantize) -> Result<(Stored, Plan)> {
    let origin = Stored::new(checkpoint);
    let plan = plan(origin.tensors(), options)?;
    Ok((origin, plan))
}

/// All files beside the tensors, the configuration with what was quantised; and remarks on what was left behind.
fn side_files(checkpoint: &Checkpoint, plan: &Plan) -> Result<(Files, Vec<String>)> {
    const CONFIG: &str = "config.json";
    let (mut files, mut notes) = (Files::new(), Vec::new());
    for name in checkpoint.file_names() {
        let weights = name.ends_with(".safetensors") || name == "model.safetensors.index.json";
        if weights || name.starts_with('.') {
            continue;
        }
        match checkpoint.file(name) {
            Ok(Some(text)) if name == CONFIG => files.push((name.to_owned(), updated(&text, plan)?)),
            Ok(Some(bytes)) => files.push((name.to_owned(), bytes)),
            Ok(None) => notes.push(format!("{name} is no plain file name and was not copied")),
            // A directory, say, or too large. What is a file but cannot be read would be missed later.
            Err(e) if matches!(e.kind(), ErrorKind::NotAFile | ErrorKind::BadJson) => {
                notes.push(format!("not copied: {e}"));
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok((files, notes))
}

/// Decides on every tensor, in natural name order.
pub(crate) fn plan(tensors: &[Tensor], options: &Quantize) -> Result<Plan> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_cached_key(|&i| natural(&tensors[i].name));
    let mut planner = Planner { options, plan: Plan::default(), tables: BTreeMap::new() };
    for id in order {
        planner.add(id, &tensors[id])?;
    }
    Ok(planner.plan)
}

/// A name as text and numbers in turn, so that layer 10 comes after layer 9.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut out = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let text = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (head, tail) = rest.split_at(text);
        let digits = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
        out.push((head.to_owned(), tail[..digits].parse().unwrap_or(u64::MAX)));
        rest = &tail[digits..];
    }
    out
}

struct Planner<'a> {
    options: &'a Quantize,
    plan: Plan,
    tables: BTreeMap<String, usize>,
}

impl Planner<'_> {
    fn add(&mut self, id: usize, tensor: &Tensor) -> Result<()> {
        let name = tensor.name.as_str();
        let experts = match (is_draft(name), self.options.draft, self.options.experts) {
            (false, _, experts) | (true, Draft::As(experts), _) => experts,
            (true, Draft::Auto, Experts::Keep) => Experts::Keep,
            (true, Draft::Auto, _) => Experts::Fp8,
        };
        let role = if tensor.used { role(name) } else { Role::Other };
        match role {
            Role::FusedGateUp(module) if experts != Experts::Keep => {
                plain(tensor, "experts")?;
                let [count, twice, cols] = shape(tensor)?;
                let rows = twice / 2;
                for part in 0..2 * count {
                    let projection = if part % 2 == 0 { "gate_proj" } else { "up_proj" };
                    let first = part as u64 * (rows * cols) as u64;
                    let piece = Piece { tensor: id, first, rows, cols };
                    self.expert(&format!("{module}.{}.{projection}", part / 2), piece, experts)?;
                }
            }
            Role::FusedDown(module) if experts != Experts::Keep => {
                plain(tensor, "experts")?;
                let [count, rows, cols] = shape(tensor)?;
                for e in 0..count {
                    let piece = Piece { tensor: id, first: e as u64 * (rows * cols) as u64, rows, cols };
                    self.expert(&format!("{module}.{e}.down_proj"), piece, experts)?;
                }
            }
            Role::Expert(module) if experts != Experts::Keep => {
                plain(tensor, "experts")?;
                let [rows, cols] = shape(tensor)?;
                self.expert(module, Piece { tensor: id, first: 0, rows, cols }, experts)?;
            }
            Role::Table(table) if self.options.table == Table::Fp8 => {
                plain(tensor, "table")?;
                self.table(table, id, tensor);
            }
            Role::Dense(module) if self.options.dense == Dense::Fp8Row => {
                plain(tensor, "dense")?;
                let [rows, cols] = shape(tensor)?;
                let kind = "dense projections: fp8, a scale a row";
                let piece = Piece { tensor: id, first: 0, rows, cols };
                self.plan.units.push(Unit::fp8_row(module, piece, kind));
                self.plan.modules.insert(module.to_owned(), "FP8_ROW");
            }
            _ => {
                if tensor.shape.len() == 2 && !matches!(role, Role::Table(_)) {
                    self.plan.kept.extend(name.strip_suffix(".weight").map(str::to_owned));
                }
                self.plan.units.push(Unit::copy(id, tensor));
            }
        }
        Ok(())
    }

    fn expert(&mut self, module: &str, piece: Piece, experts: Experts) -> Result<()> {
        let draft = is_draft(module);
        let (unit, algorithm) = if experts == Experts::Fp8 {
            let stored = if self.options.scales == Scales::F32 { Dtype::F32 } else { Dtype::Bf16 };
            let kind = if draft { "draft experts: block fp8" } else { "routed experts: block fp8" };
            (Unit::fp8_block(module, piece, stored, kind), "FP8_BLOCK_SCALES")
        } else {
            let kind = if draft { "draft experts: nvfp4" } else { "routed experts: nvfp4" };
            let input_scale = self.options.input_scales.of(module, !draft)?;
            (Unit::nvfp4(module, piece, input_scale, kind)?, "NVFP4")
        };
        self.plan.units.push(unit);
        if let Some(at) = module.rfind(".experts.") {
            self.plan.modules.insert(module[..at + ".experts".len()].to_owned(), algorithm);
        }
        Ok(())
    }

    fn table(&mut self, name: &str, id: usize, tensor: &Tensor) {
        use castiron_format::write::TensorSpec;
        let plan = &mut self.plan;
        let kind = "n-gram table: fp8, one scale";
        let number = *self.tables.entry(name.to_owned()).or_insert_with(|| {
            plan.tables.push(Vec::new());
            let number = plan.tables.len() - 1;
            let scale = TensorSpec::new(format!("{name}.weight_scale"), Dtype::Bf16, [1]);
            plan.units.push(Unit { job: Job::TableScale(number), kind, outputs: vec![scale] });
            plan.modules.insert(name.to_owned(), "FP8");
            number
        });
        plan.tables[number].push(id);
        let outputs = vec![TensorSpec::new(&*tensor.name, Dtype::F8E4M3, tensor.shape.clone())];
        plan.units.push(Unit { job: Job::TableCodes(id, number), kind, outputs });
    }
}

fn plain(tensor: &Tensor, flag: &str) -> Result<()> {
    if tensor.is_plain() {
        return Ok(());
    }
    Error::refused(format!(
        "tensor {:?} is {} already; quantise from a BF16 or F32 checkpoint, or keep the {flag} as they are",
        tensor.name,
        tensor.dtype.name()
    ))
}

fn shape<const N: usize>(tensor: &Tensor) -> Result<[usize; N]> {
    match <[usize; N]>::try_from(tensor.shape.as_slice()) {
        Ok(shape) => Ok(shape),
        Err(_) => Error::refused(format!(
            "tensor {:?} of shape {:?} has not {N} dimensions",
            tensor.name, tensor.shape
        )),
    }
}
