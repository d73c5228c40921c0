//! From names to typed weights, in one traversal that serves twice.
//!
//! [`Binder`] looks tensors up by name, checks shape and dtype, and marks what it used. In a census (`read` off) no tensor
//! byte is touched: vectors come back empty, scales zero, and every finding is collected. With `read` on, small vectors
//! and scales are decoded and checked; large matrices stay views. So the census and the loader cannot disagree.

mod census;
pub(crate) mod model;

use census::Problem;
pub(crate) use census::{Mark, Part};

use std::collections::BTreeMap;

use crate::error::quote;
use crate::safetensors::Dtype;
use crate::tensors::{Tensor, Tensors};
use crate::{Bytes, Config, Error, ErrorKind, FP8_BLOCK, Matrix, MatrixData, NVFP4_GROUP, Result};
use census::Findings;

/// How the NVFP4 routed experts of the main layers are stored, for [`crate::Checkpoint::declared_w4a4`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ExpertTally {
    /// Projections with an activation scale.
    pub(crate) w4a4: usize,
    /// Projections without one.
    pub(crate) unscaled: usize,
}

/// The state of one traversal.
pub(crate) struct Binder<'a> {
    tensors: &'a Tensors,
    config: &'a Config,
    read: bool,
    part: Part,
    marks: Vec<Option<Mark>>,
    findings: Findings,
    failure: Option<Error>,
    notes: Vec<String>,
    tally: ExpertTally,
}

/// What a traversal learnt besides the weights.
#[derive(Debug)]
pub(crate) struct Census {
    /// One per tensor.
    pub(crate) marks: Vec<Option<Mark>>,
    pub(crate) notes: Vec<String>,
    pub(crate) tally: ExpertTally,
}

fn placeholder(rows: usize, cols: usize) -> Matrix {
    Matrix { rows, cols, data: MatrixData::F32(Bytes::default()) }
}

impl<'a> Binder<'a> {
    pub(crate) fn new(tensors: &'a Tensors, config: &'a Config, read: bool) -> Self {
        Self {
            tensors,
            config,
            read,
            part: Part::Other,
            marks: vec![None; tensors.list.len()],
            findings: Findings::default(),
            failure: None,
            notes: Vec::new(),
            tally: ExpertTally::default(),
        }
    }

    /// Ends the traversal: everything that was not used must be ignorable.
    pub(crate) fn finish(mut self) -> Result<Census> {
        self.judge_unused();
        if let Some(error) = self.findings.into_error(&self.tensors.shards) {
            return Err(error);
        }
        match self.failure {
            Some(error) => Err(error),
            None => Ok(Census { marks: self.marks, notes: self.notes, tally: self.tally }),
        }
    }

    fn at(&self, id: usize) -> &'a Tensor {
        &self.tensors.list[id]
    }

    fn found(&mut self, problem: Problem, text: impl FnOnce() -> String) {
        self.findings.add(problem, text);
    }

    fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }

    fn mark(&mut self, id: usize, format: &'static str) {
        self.marks[id] = Some(Mark { part: self.part, format });
    }

    /// A tensor that must be there.
    fn need(&mut self, name: &str) -> Option<usize> {
        let id = self.tensors.find(name);
        if id.is_none() {
            self.found(Problem::Missing, || name.to_owned());
        }
        id
    }

    /// Checks a dtype and a shape; marks the tensor as used in either case.
    fn expect(&mut self, id: usize, format: &'static str, dtypes: &[Dtype], shapes: &[&[usize]]) -> bool {
        self.mark(id, format);
        let tensor = self.at(id);
        if !dtypes.contains(&tensor.dtype) {
            let names: Vec<&str> = dtypes.iter().map(|d| d.name()).collect();
            self.found(Problem::Dtype, || {
                format!("{} is {}, not {}", quote(&tensor.name), tensor.dtype.name(), names.join(" or "))
            });
            return false;
        }
        if !shapes.contains(&tensor.shape.as_slice()) {
            self.found(Problem::Shape, || {
                let wanted: Vec<String> = shapes.iter().map(|s| format!("{s:?}")).collect();
                format!("{} is {:?}, not {}", quote(&tensor.name), tensor.shape, wanted.join(" or "))
            });
            return false;
        }
        true
    }

    /// A small F32 or BF16 tensor, widened; empty in a census or when it is wrong. Every element must be finite.
    fn floats(&mut self, name: &str, shapes: &[&[usize]]) -> Vec<f32> {
        let Some(id) = self.need(name) else { return Vec::new() };
        let format = dense_format(self.at(id).dtype);
        if !self.expect(id, format, &[Dtype::Bf16, Dtype::F32], shapes) || !self.read {
            return Vec::new();
        }
        let tensor = self.at(id);
        let values = widen(tensor.dtype, &tensor.bytes);
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            self.fail(bad_value(&tensor.name, &format!("element {i} is {}: it must be finite", values[i])));
        }
        values
    }

    fn vector(&mut self, name: &str, len: usize) -> Vec<f32> {
        self.floats(name, &[&[len]])
    }

    /// A depthwise convolution `[C, K]`, stored `[C, 1, K]` or `[C, K, 1]`.
    fn conv(&mut self, name: &str, channels: usize, taps: usize) -> Vec<f32> {
        self.floats(name, &[&[channels, 1, taps], &[channels, taps, 1]])
    }

    /// A global scale of shape `[]` or `[1]`, finite and above zero; 1 in a census.
    fn scalar(&mut self, name: &str, format: &'static str, dtypes: &[Dtype]) -> f32 {
        self.global_scale(name, format, dtypes, false)
    }

    /// As [`Self::scalar`], and with `zero` it may be zero.
    fn global_scale(&mut self, name: &str, format: &'static str, dtypes: &[Dtype], zero: bool) -> f32 {
        let Some(id) = self.need(name) else { return 1.0 };
        if !self.expect(id, format, dtypes, &[&[], &[1]]) || !self.read {
            return 1.0;
        }
        let tensor = self.at(id);
        let value = widen(tensor.dtype, &tensor.bytes).first().copied().unwrap_or(f32::NAN);
        if !(value.is_finite() && (value > 0.0 || zero && value == 0.0)) {
            let accepted = if zero { "not negative" } else { "above zero" };
            self.fail(bad_value(name, &format!("it is {value}: a scale must be finite and {accepted}")));
        }
        value
    }

    /// As [`Self::scalar`] but stored as the reciprocal.
    fn reciprocal(&mut self, name: &str, format: &'static str) -> f32 {
        let value = 1.0 / self.scalar(name, format, &[Dtype::F32, Dtype::Bf16]);
        if self.failure.is_none() && !(value.is_finite() && value > 0.0) {
            self.fail(bad_value(name, "its reciprocal is not a finite number above zero"));
        }
        value
    }

    /// A dense matrix `{module}.weight`: BF16, F32, block FP8 or FP8 with a scale a row.
    fn dense(&mut self, module: &str, rows: usize, cols: usize) -> Matrix {
        let name = format!("{module}.weight");
        let Some(id) = self.need(&name) else { return placeholder(rows, cols) };
        match self.at(id).dtype {
            Dtype::F8E4M3 if self.tensors.find(&format!("{module}.weight_scale")).is_some() => {
                self.fp8_row(module, id, rows, cols)
            }
            Dtype::F8E4M3 => self.fp8_block(module, id, rows, cols),
            _ => self.plain(id, rows, cols),
        }
    }

    /// The projection of an expert: any of the formats.
    fn projection(&mut self, module: &str, rows: usize, cols: usize) -> Matrix {
        let plain = self.tensors.find(&format!("{module}.weight"));
        match plain {
            Some(id) if self.at(id).dtype == Dtype::U8 => self.nvfp4(module, id, rows, cols),
            None => match self.tensors.find(&format!("{module}.weight_packed")) {
                Some(id) => self.compressed_tensors(module, id, rows, cols),
                None => self.dense(module, rows, cols),
            },
            Some(_) => self.dense(module, rows, cols),
        }
    }

    fn plain(&mut self, id: usize, rows: usize, cols: usize) -> Matrix {
        let tensor = self.at(id);
        let format = dense_format(tensor.dtype);
        if !self.expect(id, format, &[Dtype::Bf16, Dtype::F32], &[&[rows, cols]]) {
            return placeholder(rows, cols);
        }
        Matrix { rows, cols, data: dense_data(tensor.dtype, tensor.bytes.clone()) }
    }

    fn fp8_block(&mut self, module: &str, id: usize, rows: usize, cols: usize) -> Matrix {
        let (scale_rows, scale_cols) = (rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK));
        let good = self.expect(id, "fp8-block", &[Dtype::F8E4M3], &[&[rows, cols]]);
        let scale_name = format!("{module}.weight_scale_inv");
        let scales = match self.need(&scale_name) {
            Some(scale) => {
                let ok =
                    self.expect(scale, "fp8-block", &[Dtype::Bf16, Dtype::F32], &[&[scale_rows, scale_cols]]);
                if ok && self.read { self.block_scales(scale) } else { Vec::new() }
            }
            None => Vec::new(),
        };
        if !good {
            return placeholder(rows, cols);
        }
        let codes = self.at(id).bytes.clone();
        Matrix { rows, cols, data: MatrixData::Fp8Block { codes, scales, scale_rows, scale_cols } }
    }

    /// Our own form: `weight`, and `weight_scale` F32 `[rows, 1]`.
    fn fp8_row(&mut self, module: &str, id: usize, rows: usize, cols: usize) -> Matrix {
        let good = self.expect(id, "fp8-row", &[Dtype::F8E4M3], &[&[rows, cols]]);
        let name = format!("{module}.weight_scale");
        let mut scales = Vec::new();
        if let Some(scale) = self.need(&name)
            && self.expect(scale, "fp8-row", &[Dtype::F32], &[&[rows, 1]])
            && self.read
        {
            scales = widen(Dtype::F32, &self.at(scale).bytes);
            if let Some(i) = scales.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
                let what = format!("element {i} is {}: a row scale must be finite and above zero", scales[i]);
                self.fail(bad_value(&name, &what));
            }
        }
        if !good {
            return placeholder(rows, cols);
        }
        Matrix { rows, cols, data: MatrixData::Fp8Row { codes: self.at(id).bytes.clone(), scales } }
    }

    fn block_scales(&mut self, id: usize) -> Vec<f32> {
        let tensor = self.at(id);
        let scales = widen(tensor.dtype, &tensor.bytes);
        if let Some(i) = scales.iter().position(|s| !(s.is_finite() && *s >= 0.0)) {
            let what = format!("element {i} is {}: a block scale must be finite and not negative", scales[i]);
            self.fail(bad_value(&tensor.name, &what));
        }
        scales
    }

    /// ModelOpt naming: `weight`, `weight_scale`, `weight_scale_2` and optionally `input_scale`.
    fn nvfp4(&mut self, module: &str, id: usize, rows: usize, cols: usize) -> Matrix {
        let input = format!("{module}.input_scale");
        let has_input = self.tensors.find(&input).is_some();
        let format = if has_input { "nvfp4-w4a4" } else { "nvfp4" };
        let f32_like = [Dtype::F32, Dtype::Bf16];
        // A matrix of zeros may have no other scale.
        let weight_scale_2 = self.global_scale(&format!("{module}.weight_scale_2"), format, &f32_like, true);
        let input_scale = has_input.then(|| self.scalar(&input, format, &f32_like));
        self.fp4_matrix(module, id, format, (rows, cols), weight_scale_2, input_scale)
    }

    /// compressed-tensors naming: `weight_packed`, `weight_scale`, and reciprocal `weight_global_scale` and optional
    /// `input_global_scale`.
    fn compressed_tensors(&mut self, module: &str, id: usize, rows: usize, cols: usize) -> Matrix {
        let input = format!("{module}.input_global_scale");
        let has_input = self.tensors.find(&input).is_some();
        let format = if has_input { "nvfp4-w4a4 (compressed-tensors)" } else { "nvfp4 (compressed-tensors)" };
        let weight_scale_2 = self.reciprocal(&format!("{module}.weight_global_scale"), format);
        let input_scale = has_input.then(|| self.reciprocal(&input, format));
        self.fp4_matrix(module, id, format, (rows, cols), weight_scale_2, input_scale)
    }

    fn fp4_matrix(
        &mut self,
        module: &str,
        id: usize,
        format: &'static str,
        (rows, cols): (usize, usize),
        weight_scale_2: f32,
        input_scale: Option<f32>,
    ) -> Matrix {
        if cols % NVFP4_GROUP != 0 {
            self.found(Problem::Shape, || {
                format!("{} is NVFP4 but its {cols} inputs are no multiple of {NVFP4_GROUP}", quote(module))
            });
        }
        let good = self.expect(id, format, &[Dtype::U8], &[&[rows, cols / 2]]);
        let scale_name = format!("{module}.weight_scale");
        let Some(scale) = self.need(&scale_name) else { return placeholder(rows, cols) };
        if !self.expect(scale, format, &[Dtype::F8E4M3], &[&[rows, cols / NVFP4_GROUP]]) || !good {
            return placeholder(rows, cols);
        }
        let scales = self.at(scale).bytes.clone();
        if self.read
            && let Some(i) = bad_scale(&scales)
        {
            let what = format!(
                "element {i} is the code {:#04x}: a block scale is neither NaN nor negative",
                scales[i]
            );
            self.fail(bad_value(&scale_name, &what));
        }
        let codes = self.at(id).bytes.clone();
        Matrix { rows, cols, data: MatrixData::Nvfp4 { codes, scales, weight_scale_2, input_scale } }
    }

    /// `count` matrices `[rows, cols]` from one fused tensor `[count, rows, cols]`, BF16 or F32.
    fn fused(&mut self, id: usize, count: usize, rows: usize, cols: usize) -> Vec<Matrix> {
        let tensor = self.at(id);
        let format = dense_format(tensor.dtype);
        if !self.expect(id, format, &[Dtype::Bf16, Dtype::F32], &[&[count, rows, cols]]) {
            return vec![placeholder(rows, cols); count];
        }
        let size = rows * cols * tensor.dtype.size() as usize;
        let cut = |i: usize| match tensor.bytes.slice(i * size..(i + 1) * size) {
            Some(bytes) => Matrix { rows, cols, data: dense_data(tensor.dtype, bytes) },
            None => placeholder(rows, cols),
        };
        (0..count).map(cut).collect()
    }

    /// A stored I64 buffer that the configuration also implies; absent is fine.
    fn hash_buffer(&mut self, name: &str, derived: &[u64]) -> bool {
        let Some(id) = self.tensors.find(name) else { return false };
        if self.expect(id, "i64", &[Dtype::I64], &[&[derived.len()]])
            && self.read
            && let Err(error) = crate::ngram::Hash::check(name, &self.at(id).bytes, derived)
        {
            self.fail(error);
        }
        true
    }

    /// Whether any tensor starts with `prefix`.
    fn any(&self, prefix: &str) -> bool {
        self.tensors.with_prefix(prefix).next().is_some()
    }

    /// Marks tensors that are left out on purpose; returns how many there were.
    fn ignore(&mut self, part: Part, test: impl Fn(&str) -> bool) -> usize {
        let mut count = 0;
        for (id, tensor) in self.tensors.list.iter().enumerate() {
            if self.marks[id].is_none() && test(&tensor.name) {
                self.marks[id] = Some(Mark { part, format: tensor.dtype.name() });
                count += 1;
            }
        }
        count
    }

    fn judge_unused(&mut self) {
        let vision = ["model.visual.", "visual.", "vision_tower.", "model.vision_tower."];
        let seen = self.ignore(Part::Vision, |name| vision.iter().any(|p| name.starts_with(p)));
        if seen > 0 {
            self.notes.push(format!("{seen} vision tensors ignored: this engine reads text only"));
        }
        let extra = self.ignore(Part::Ignored, |name| {
            let last = name.rsplit('.').next().unwrap_or(name);
            last.starts_with("hashstats_")
                || last == "token_lookup"
                || name.ends_with("hyper_connection_mixer.block_inject_weight.weight")
        });
        if extra > 0 {
            self.notes.push(format!(
                "{extra} tensors without effect ignored (hash statistics, token lookup, dead inject)"
            ));
        }
        let tensors = self.tensors;
        for (id, tensor) in tensors.list.iter().enumerate() {
            if self.marks[id].is_none() {
                self.found(Problem::Unexpected, || {
                    let file = &tensors.shards[tensor.shard].name;
                    let dtype = tensor.dtype.name();
                    format!("{} ({dtype} {:?} in {})", quote(&tensor.name), tensor.shape, quote(file))
                });
            }
        }
    }
}

/// The first code that is no block scale. Gigabytes of scales are checked at load, so whole pages are tested at once.
fn bad_scale(scales: &[u8]) -> Option<usize> {
    let is_bad = |code: u8| castiron_num::fp8::scale_units(code).is_none();
    let page = scales
        .chunks(4096)
        .position(|page| page.iter().fold(false, |bad, &c| bad | (c == 0x7F) | (c > 0x80)))?;
    let first = page * 4096;
    scales[first..].iter().position(|&code| is_bad(code)).map(|i| first + i)
}

fn dense_format(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => "bf16",
        Dtype::F32 => "f32",
        other => other.name(),
    }
}

/// `dtype` is BF16 or F32.
fn dense_data(dtype: Dtype, bytes: Bytes) -> MatrixData {
    if dtype == Dtype::Bf16 { MatrixData::Bf16(bytes) } else { MatrixData::F32(bytes) }
}

/// BF16 or F32 little-endian elements as f32.
pub(crate) fn widen(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    if dtype == Dtype::Bf16 {
        let (pairs, _) = bytes.as_chunks::<2>();
        pairs.iter().map(|&b| castiron_num::bf16::from_bits(u16::from_le_bytes(b))).collect()
    } else {
        let (words, _) = bytes.as_chunks::<4>();
        words.iter().map(|&b| f32::from_le_bytes(b)).collect()
    }
}

pub(crate) fn bad_value(tensor: &str, what: &str) -> Error {
    Error::new(ErrorKind::BadValue, format!("tensor {}: {what}; the checkpoint is damaged", quote(tensor)))
}

/// Tensors and bytes by part and format, for the inventory.
pub(crate) type Totals = BTreeMap<(Part, &'static str), (usize, u64)>;
