//! What becomes of each tensor, and in which file it lies.

use std::collections::BTreeMap;
use std::ops::Range;

use castiron_format::safetensors::Dtype;
use castiron_format::write::{Target, TensorSpec, Writer};
use castiron_format::{FP8_BLOCK, NVFP4_GROUP};

use crate::encode;
use crate::origin::{Origin, Tensor};
use crate::report::Tallies;
use crate::{Error, Result};

/// A matrix inside a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) tensor: usize,
    /// Its first element.
    pub(crate) first: u64,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// How the outputs of a unit are made.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Job {
    /// Bit for bit.
    Copy(usize),
    /// `weight`, `weight_scale_inv` of the given type.
    Fp8Block(Piece, Dtype),
    /// `weight`, `weight_scale`, `weight_scale_2` and, with a value, `input_scale`.
    Nvfp4(Piece, Option<f32>),
    /// `weight`, `weight_scale` with one f32 a row.
    Fp8Row(Piece),
    /// The scale of table number `.0`.
    TableScale(usize),
    /// A shard of table number `.1`.
    TableCodes(usize, usize),
}

/// Tensors that are made together and lie in one file.
#[derive(Debug, Clone)]
pub(crate) struct Unit {
    pub(crate) job: Job,
    pub(crate) kind: &'static str,
    pub(crate) outputs: Vec<TensorSpec>,
}

/// All units in file order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Plan {
    pub(crate) units: Vec<Unit>,
    /// Shards of each table that is encoded.
    pub(crate) tables: Vec<Vec<usize>>,
    /// Quantised modules and what they became, for `quantization_config`.
    pub(crate) modules: BTreeMap<String, &'static str>,
    /// Matrices that stayed, by module.
    pub(crate) kept: Vec<String>,
}

impl Unit {
    pub(crate) fn copy(id: usize, tensor: &Tensor) -> Self {
        let outputs = vec![TensorSpec::new(&*tensor.name, tensor.dtype, tensor.shape.clone())];
        Self { job: Job::Copy(id), kind: "", outputs }
    }

    pub(crate) fn fp8_block(module: &str, piece: Piece, stored: Dtype, kind: &'static str) -> Self {
        let (rows, cols) = (piece.rows, piece.cols);
        let scales = [rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)];
        let outputs = vec![
            TensorSpec::new(format!("{module}.weight"), Dtype::F8E4M3, [rows, cols]),
            TensorSpec::new(format!("{module}.weight_scale_inv"), stored, scales),
        ];
        Self { job: Job::Fp8Block(piece, stored), kind, outputs }
    }

    pub(crate) fn nvfp4(
        module: &str,
        piece: Piece,
        input_scale: Option<f32>,
        kind: &'static str,
    ) -> Result<Self> {
        let (rows, cols) = (piece.rows, piece.cols);
        if !cols.is_multiple_of(NVFP4_GROUP) {
            return Error::refused(format!(
                "{module} has {cols} inputs, no multiple of {NVFP4_GROUP}: it cannot be NVFP4; use fp8"
            ));
        }
        let mut outputs = vec![
            TensorSpec::new(format!("{module}.weight"), Dtype::U8, [rows, cols / 2]),
            TensorSpec::new(format!("{module}.weight_scale"), Dtype::F8E4M3, [rows, cols / NVFP4_GROUP]),
            TensorSpec::new(format!("{module}.weight_scale_2"), Dtype::F32, []),
        ];
        if input_scale.is_some() {
            outputs.push(TensorSpec::new(format!("{module}.input_scale"), Dtype::F32, []));
        }
        Ok(Self { job: Job::Nvfp4(piece, input_scale), kind, outputs })
    }

    pub(crate) fn fp8_row(module: &str, piece: Piece, kind: &'static str) -> Self {
        let outputs = vec![
            TensorSpec::new(format!("{module}.weight"), Dtype::F8E4M3, [piece.rows, piece.cols]),
            TensorSpec::new(format!("{module}.weight_scale"), Dtype::F32, [piece.rows, 1]),
        ];
        Self { job: Job::Fp8Row(piece), kind, outputs }
    }

    /// Bytes of its outputs. Sizes come from checked tensors, so they do not overflow.
    pub(crate) fn bytes(&self) -> u64 {
        self.outputs.iter().map(|t| t.bytes().unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
    }
}

impl Plan {
    /// Cuts the units into files of at most `limit` data bytes; a larger unit has a file of its own.
    pub(crate) fn files(&self, limit: u64) -> Vec<Range<usize>> {
        let mut out = Vec::new();
        let (mut first, mut size) = (0, 0u64);
        for (i, unit) in self.units.iter().enumerate() {
            let bytes = unit.bytes();
            if i > first && size.saturating_add(bytes) > limit {
                out.push(first..i);
                (first, size) = (i, 0);
            }
            size = size.saturating_add(bytes);
        }
        if first < self.units.len() {
            out.push(first..self.units.len());
        }
        out
    }
}

/// Rows in memory at once.
const BAND: usize = FP8_BLOCK;
/// Elements of a copy in memory at once.
const CHUNK: u64 = 1 << 20;

/// Buffers of one thread.
#[derive(Default)]
pub(crate) struct Worker {
    values: Vec<f32>,
    bytes: Vec<u8>,
    codes: Vec<u8>,
    scale_codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Worker {
    /// Makes the outputs of a unit, which are the tensors from `first` on of the file.
    pub(crate) fn run<T: Target>(
        &mut self,
        origin: &dyn Origin,
        unit: &Unit,
        table_scales: &[f32],
        (writer, first): (&mut Writer<T>, usize),
        tallies: &mut Tallies,
    ) -> Result<()> {
        match unit.job {
            Job::Copy(tensor) => self.copy(origin, tensor, writer, first),
            Job::TableScale(table) => {
                let bits = castiron_num::bf16::to_bits(table_scales[table]);
                Ok(writer.append(first, &bits.to_le_bytes())?)
            }
            Job::TableCodes(tensor, table) => {
                self.table(origin, (tensor, table_scales[table]), (writer, first), unit.kind, tallies)
            }
            Job::Fp8Block(piece, stored) => {
                self.bands(origin, piece, |w| {
                    let tally = tallies.of(unit.kind);
                    encode::fp8_band(&w.values, piece.cols, stored, &mut w.codes, &mut w.scales, tally);
                    writer.append(first, &w.codes)?;
                    writer.append(first + 1, &floats(&w.scales, stored))?;
                    Ok(())
                })?;
                tallies.of(unit.kind).tensors += 1;
                Ok(())
            }
            Job::Fp8Row(piece) => {
                self.bands(origin, piece, |w| {
                    let tally = tallies.of(unit.kind);
                    encode::fp8_rows(&w.values, piece.cols, &mut w.codes, &mut w.scales, tally);
                    writer.append(first, &w.codes)?;
                    writer.append(first + 1, &floats(&w.scales, Dtype::F32))?;
                    Ok(())
                })?;
                tallies.of(unit.kind).tensors += 1;
                Ok(())
            }
            Job::Nvfp4(piece, input_scale) => {
                let mut amax = 0.0f32;
                self.bands(origin, piece, |w| {
                    amax = amax.max(encode::amax(&w.values));
                    Ok(())
                })?;
                let scale_2 = encode::nvfp4_scale(amax);
                self.bands(origin, piece, |w| {
                    let tally = tallies.of(unit.kind);
                    encode::nvfp4_rows(&w.values, scale_2, &mut w.codes, &mut w.scale_codes, tally);
                    writer.append(first, &w.codes)?;
                    writer.append(first + 1, &w.scale_codes)?;
                    Ok(())
                })?;
                tallies.of(unit.kind).tensors += 1;
                writer.append(first + 2, &scale_2.to_le_bytes())?;
                if let Some(scale) = input_scale {
                    writer.append(first + 3, &scale.to_le_bytes())?;
                }
                Ok(())
            }
        }
    }

    fn copy<T: Target>(
        &mut self,
        origin: &dyn Origin,
        tensor: usize,
        writer: &mut Writer<T>,
        index: usize,
    ) -> Result<()> {
        let t = &origin.tensors()[tensor];
        let mut at = 0;
        while at < t.filled {
            let count = CHUNK.min(t.filled - at);
            origin.bytes(tensor, at, count, &mut self.bytes);
            writer.append(index, &self.bytes)?;
            at += count;
        }
        Ok(writer.skip(index, (t.count() - t.filled) * t.dtype.size())?)
    }

    fn table<T: Target>(
        &mut self,
        origin: &dyn Origin,
        (tensor, scale): (usize, f32),
        (writer, index): (&mut Writer<T>, usize),
        kind: &'static str,
        tallies: &mut Tallies,
    ) -> Result<()> {
        let t = &origin.tensors()[tensor];
        let tally = tallies.of(kind);
        let cols = t.shape.last().copied().unwrap_or(1).max(1);
        let mut at = 0;
        while at < t.filled {
            let count = (CHUNK / cols as u64).max(1).saturating_mul(cols as u64).min(t.filled - at);
            // The pass for the scale has seen that every element is finite.
            origin.floats(tensor, at, count, &mut self.values);
            self.codes.clear();
            for row in self.values.chunks(cols) {
                let zero = encode::fp8_run(row, scale, &mut self.codes, tally);
                tally.block(zero);
            }
            writer.append(index, &self.codes)?;
            at += count;
        }
        tally.tensors += 1;
        Ok(writer.skip(index, t.count() - t.filled)?)
    }

    /// Reads a matrix in bands of rows, checks that it is finite, and hands each to `each` with empty output buffers.
    fn bands(
        &mut self,
        origin: &dyn Origin,
        piece: Piece,
        mut each: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<()> {
        for row in (0..piece.rows).step_by(BAND) {
            let rows = BAND.min(piece.rows - row);
            let from = piece.first + row as u64 * piece.cols as u64;
            origin.floats(piece.tensor, from, (rows * piece.cols) as u64, &mut self.values);
            check_finite(origin, piece.tensor, from, &self.values)?;
            self.codes.clear();
            self.scales.clear();
            self.scale_codes.clear();
            each(self)?;
        }
        Ok(())
    }

    /// The largest magnitude of the filled part of a tensor.
    pub(crate) fn amax(&mut self, origin: &dyn Origin, tensor: usize) -> Result<f32> {
        let filled = origin.tensors()[tensor].filled;
        let (mut amax, mut at) = (0.0f32, 0);
        while at < filled {
            let count = CHUNK.min(filled - at);
            origin.floats(tensor, at, count, &mut self.values);
            check_finite(origin, tensor, at, &self.values)?;
            amax = amax.max(encode::amax(&self.values));
            at += count;
        }
        Ok(amax)
    }
}

fn check_finite(origin: &dyn Origin, tensor: usize, from: u64, values: &[f32]) -> Result<()> {
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => Err(Error::NotFinite(origin.tensors()[tensor].name.clone(), from + i as u64)),
    }
}

/// Little-endian BF16 or F32. Scales were rounded to the stored type when they were made.
fn floats(values: &[f32], stored: Dtype) -> Vec<u8> {
    match stored {
        Dtype::Bf16 => values.iter().flat_map(|&v| castiron_num::bf16::to_bits(v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}
