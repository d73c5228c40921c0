//! Where two variants part: both are run with a trace, and the traces are walked in order.

use std::collections::HashMap;

use castiron_model::{Model, Row, Slot, Trace, hash_floats};

use super::{Job, Open, Variant};
use crate::sampling::{Params, Sampler};
use crate::session::Error;

/// A traced array: its layer and its name.
type Key = (Option<usize>, &'static str);

/// A traced value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A number.
    Float(f32),
    /// An id.
    Id(u64),
    /// Nothing: the row is shorter here.
    None,
}

impl Value {
    /// Whether two values have the same bytes, NaN counting as one value.
    fn same(self, other: Self) -> bool {
        match (self, other) {
            (Self::Float(a), Self::Float(b)) => a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
            (a, b) => a == b,
        }
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Float(x) => write!(f, "{x:e} (0x{:08x})", x.to_bits()),
            Self::Id(id) => write!(f, "{id}"),
            Self::None => f.write_str("nothing"),
        }
    }
}

/// The first value that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    /// Zero-based layer; none outside the layers.
    pub layer: Option<usize>,
    /// Name of the traced tensor; state tensors come after all others.
    pub tensor: &'static str,
    /// Row: the position in the stream (0 for a state, whose columns count all of it).
    pub row: usize,
    /// Column.
    pub column: usize,
    /// What the reference had there.
    pub reference: Value,
    /// What the other had there.
    pub other: Value,
}

/// The ids of a prompt in forward passes of `chunk` rows; 0 is the whole prompt.
pub(super) fn chunks(ids: &[u32], chunk: usize) -> std::slice::Chunks<'_, u32> {
    ids.chunks(if chunk == 0 { ids.len().max(1) } else { chunk })
}

/// Runs both variants again, the prompt and then the reference's greedy reply, and finds the first difference.
pub(super) fn find(job: &Job, a: &Variant, b: &Variant, open: &mut Open<'_>) -> Result<Option<Place>, Error> {
    let mut reference = Digests::default();
    let greedy = traced(open(a.level, a.threads)?, job, a, None, &mut reference)?;
    let mut other = Digests::default();
    traced(open(b.level, b.threads)?, job, b, Some(&greedy), &mut other)?;
    let Some((key, row)) = reference.first_difference(&other) else { return Ok(None) };
    let mut values = [a, b].map(|v| (v, One::new(key, row)));
    for (variant, one) in &mut values {
        traced(open(variant.level, variant.threads)?, job, variant, Some(&greedy), one)?;
    }
    let [(_, reference), (_, other)] = &values;
    Ok(compare(key, row, &reference.values, &other.values))
}

fn compare((layer, tensor): Key, row: usize, a: &[Value], b: &[Value]) -> Option<Place> {
    let at = |x: &[Value], i: usize| x.get(i).copied().unwrap_or(Value::None);
    let column = (0..a.len().max(b.len())).find(|&i| !at(a, i).same(at(b, i)))?;
    Some(Place { layer, tensor, row, column, reference: at(a, column), other: at(b, column) })
}

/// A trace that wants to know which rows a call has.
trait Recorder: Trace {
    /// The next arrays hold `rows` rows each.
    fn call(&mut self, rows: usize);
}

/// Runs the prompt as `variant` says, then a greedy reply (or `reply`) row by row, then shows the state.
fn traced(
    mut model: Model,
    job: &Job,
    variant: &Variant,
    reply: Option<&[u32]>,
    trace: &mut dyn Recorder,
) -> Result<Vec<u32>, Error> {
    let slot = model.new_stream()?;
    let mut last = Vec::new();
    for chunk in chunks(&job.ids[..variant.tokens], variant.chunk) {
        last = forward(&mut model, slot, chunk, trace)?;
    }
    let mut fed = Vec::new();
    while fed.len() < job.reply.saturating_sub(1) && model.length(slot)? < model.context() {
        let id = match reply {
            Some(ids) => ids.get(fed.len()).copied(),
            None => greedy(job, &last, model.length(slot)?),
        };
        let Some(id) = id else { break };
        last = forward(&mut model, slot, &[id], trace)?;
        fed.push(id);
    }
    trace.call(1);
    model.trace_state(slot, &mut Plain(trace))?;
    Ok(fed)
}

/// The greedy token of the last row; none when it cannot be sampled.
fn greedy(job: &Job, logits: &[f32], position: u32) -> Option<u32> {
    let mut sampler = Sampler::new(Params::greedy(job.sampled.vocab)).ok()?;
    sampler.sample(logits, position).ok()
}

/// One call; the logits of its last row.
fn forward(model: &mut Model, slot: Slot, ids: &[u32], trace: &mut dyn Recorder) -> Result<Vec<f32>, Error> {
    let first = model.length(slot)?;
    let row = |(i, &token): (usize, &u32)| Row { slot, position: first + i as u32, token, logits: true };
    let rows: Vec<Row> = ids.iter().enumerate().map(row).collect();
    trace.call(rows.len());
    let out = model.forward_traced(&rows, &[], &mut Plain(trace))?;
    trace.floats(None, "logits", &out.logits);
    Ok(out.logits.rchunks(model.vocab()).next().unwrap_or_default().to_vec())
}

/// A recorder as the model sees it.
struct Plain<'a>(&'a mut dyn Recorder);

impl Trace for Plain<'_> {
    fn floats(&mut self, layer: Option<usize>, name: &'static str, data: &[f32]) {
        self.0.floats(layer, name, data);
    }
    fn ids(&mut self, layer: Option<usize>, name: &'static str, data: &[u64]) {
        self.0.ids(layer, name, data);
    }
}

/// Arrays that the model shows once a row, rather than once a call.
fn once_a_row(name: &str) -> bool {
    name == "qsa.tokens"
}

/// A hash of every row of every array.
#[derive(Default)]
struct Digests {
    rows: usize,
    /// Arrays in the order the first call showed them.
    order: Vec<Key>,
    hashes: HashMap<Key, Vec<blake3::Hash>>,
}

impl Digests {
    fn push(&mut self, key: Key, hash: blake3::Hash) {
        let hashes = self.hashes.entry(key).or_insert_with(|| {
            self.order.push(key);
            Vec::new()
        });
        hashes.push(hash);
    }

    /// The first array, in order, with a row that differs, and that row.
    fn first_difference(&self, other: &Self) -> Option<(Key, usize)> {
        self.order.iter().find_map(|key| {
            let a = self.hashes.get(key).map_or(&[][..], Vec::as_slice);
            let b = other.hashes.get(key).map_or(&[][..], Vec::as_slice);
            let row = (0..a.len().max(b.len())).find(|&i| a.get(i) != b.get(i))?;
            Some((*key, row))
        })
    }
}

impl Recorder for Digests {
    fn call(&mut self, rows: usize) {
        self.rows = rows;
    }
}

impl Trace for Digests {
    fn floats(&mut self, layer: Option<usize>, name: &'static str, data: &[f32]) {
        for row in data.chunks((data.len() / self.rows).max(1)) {
            let mut hasher = blake3::Hasher::new();
            hash_floats(&mut hasher, row);
            self.push((layer, name), hasher.finalize());
        }
    }

    fn ids(&mut self, layer: Option<usize>, name: &'static str, data: &[u64]) {
        let width = if once_a_row(name) { data.len() } else { data.len() / self.rows };
        for row in data.chunks(width.max(1)) {
            let mut hasher = blake3::Hasher::new();
            row.iter().for_each(|id| {
                hasher.update(&id.to_le_bytes());
            });
            self.push((layer, name), hasher.finalize());
        }
    }
}

/// The values of one row of one array.
struct One {
    key: Key,
    row: usize,
    rows: usize,
    /// Rows of the array seen so far.
    seen: usize,
    values: Vec<Value>,
}

impl One {
    fn new(key: Key, row: usize) -> Self {
        Self { key, row, rows: 0, seen: 0, values: Vec::new() }
    }

    fn take<T: Copy>(&mut self, key: Key, data: &[T], rows: usize, value: impl Fn(T) -> Value) {
        if key != self.key {
            return;
        }
        for row in data.chunks((data.len() / rows).max(1)) {
            if self.seen == self.row {
                self.values = row.iter().map(|&x| value(x)).collect();
            }
            self.seen += 1;
        }
    }
}

impl Recorder for One {
    fn call(&mut self, rows: usize) {
        self.rows = rows;
    }
}

impl Trace for One {
    fn floats(&mut self, layer: Option<usize>, name: &'static str, data: &[f32]) {
        self.take((layer, name), data, self.rows, Value::Float);
    }

    fn ids(&mut self, layer: Option<usize>, name: &'static str, data: &[u64]) {
        let rows = if once_a_row(name) { 1 } else { self.rows };
        self.take((layer, name), data, rows, Value::Id);
    }
}
