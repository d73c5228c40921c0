//! What a value of a template may be: a tree of bounded depth and size.
//!
//! The engine formats, compares, hashes and drops values by recursion, without counting. Only a namespace can change
//! after it was made, so only a namespace can close a cycle, and values that share parts can be exponentially larger
//! than the memory they take. Hence:
//!
//! - a namespace (or the `loop` variable) may be assigned, passed and read, but not be part of another value: no cycle
//!   can be built, and nothing grows after it was measured;
//! - every list, dict and attribute is measured when it is made, each part as often as it appears;
//! - joins, repeats and slices, which the engine leaves lazy, are carried out at once, so that none is longer than it
//!   looks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{DynObject, Enumerator, Object, ObjectExt, ObjectRepr, Tuple};
use minijinja::{Error, ErrorKind, Value};

use super::{TOO_DEEP, VALUE_TOO_LARGE};

/// Deepest value: what a client may send, and as much again for what a template puts around it.
const MAX_DEPTH: usize = 256;
/// Largest value in bytes as [`Meter`] counts them, before the allowance for input.
const MAX_WEIGHT: usize = 8 << 20;
/// Bytes counted for each item beside its text.
const ITEM: usize = 32;
/// Items that all measurements of a render may visit together, before the allowance for input.
const MAX_VISITS: u64 = 8_000_000;

/// The measuring of one render. Clones share their budget.
#[derive(Debug, Clone)]
pub(super) struct Guard {
    visits: Arc<Mutex<u64>>,
    max_weight: usize,
}

impl Guard {
    /// `input`: the size of what the client sent.
    pub(super) fn new(input: usize) -> Self {
        Self {
            visits: Arc::new(Mutex::new(MAX_VISITS.saturating_add(input as u64))),
            max_weight: MAX_WEIGHT.saturating_add(input.saturating_mul(8)),
        }
    }

    fn meter(&self) -> Meter {
        let visits = *self.visits.lock().unwrap_or_else(PoisonError::into_inner);
        Meter { visits, weight: 0, max_weight: self.max_weight }
    }

    fn settle(&self, meter: &Meter) {
        *self.visits.lock().unwrap_or_else(PoisonError::into_inner) = meter.visits;
    }

    /// `value` measured, and carried out when it is lazy.
    pub(super) fn admit(&self, value: &Value) -> Result<Value, Error> {
        let Some(object) = value.as_object() else { return Ok(value.clone()) };
        let mut meter = self.meter();
        let out = meter.flat(value, object);
        self.settle(&meter);
        out
    }

    /// `value`, about to become the attribute `name` of `namespace`.
    pub(super) fn store(&self, value: &Value, namespace: &Value, name: &str) -> Result<Value, Error> {
        let mut meter = self.meter();
        let out = meter.attribute(value, namespace, name);
        self.settle(&meter);
        out.map(|()| value.clone())
    }

    /// `value`, a new namespace or dict, with what it was made with measured.
    pub(super) fn made(&self, value: Value) -> Result<Value, Error> {
        let mut meter = self.meter();
        let out = value.as_object().map_or(Ok(0), |object| meter.parts(object, 0));
        self.settle(&meter);
        out.map(|_| value)
    }
}

/// An object that changes after it was made.
fn is_live(object: &DynObject) -> bool {
    let name = object.type_name();
    ["::Namespace", "::Loop", "::Module"].iter().any(|end| name.ends_with(end))
}

fn refuse(detail: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

const LIVE: &str =
    "a namespace or loop variable cannot be put inside a list, dict or namespace; copy the values it holds";

struct Meter {
    visits: u64,
    weight: usize,
    max_weight: usize,
}

impl Meter {
    /// Counts `items` items with `text` bytes of text.
    fn add(&mut self, items: usize, text: usize) -> Result<(), Error> {
        self.weight = self.weight.saturating_add(items.saturating_mul(ITEM)).saturating_add(text);
        if self.weight > self.max_weight {
            return Err(refuse(VALUE_TOO_LARGE));
        }
        Ok(())
    }

    fn visit(&mut self) -> Result<(), Error> {
        self.visits = self.visits.checked_sub(1).ok_or_else(|| Error::from(ErrorKind::OutOfFuel))?;
        Ok(())
    }

    /// Measures a part of a value and gives its height.
    fn part(&mut self, value: &Value, depth: usize) -> Result<usize, Error> {
        self.visit()?;
        let text = value.as_str().map(str::len).or_else(|| value.as_bytes().map(<[u8]>::len));
        self.add(1, text.unwrap_or(0))?;
        match value.as_object() {
            Some(object) if is_live(object) => Err(refuse(LIVE)),
            Some(object) => self.parts(object, depth),
            None => Ok(0),
        }
    }

    /// Measures the parts of an object.
    fn parts(&mut self, object: &DynObject, depth: usize) -> Result<usize, Error> {
        if depth >= MAX_DEPTH {
            return Err(refuse(TOO_DEEP));
        }
        if let Some(flat) = object.downcast_ref::<Flat>() {
            self.add(0, flat.weight)?;
            return if depth + flat.height > MAX_DEPTH { Err(refuse(TOO_DEEP)) } else { Ok(flat.height) };
        }
        self.expect(object)?;
        let mut height = 0;
        match object.repr() {
            ObjectRepr::Map => {
                for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                    height = height.max(self.part(&key, depth + 1)?).max(self.part(&item, depth + 1)?);
                }
            }
            ObjectRepr::Seq | ObjectRepr::Iterable => {
                for item in object.try_iter().into_iter().flatten() {
                    height = height.max(self.part(&item, depth + 1)?);
                }
            }
            _ => return Ok(0),
        }
        Ok(height + 1)
    }

    /// Refuses at once what says that it is too long.
    fn expect(&mut self, object: &DynObject) -> Result<(), Error> {
        let before = self.weight;
        self.add(object.enumerator_len().unwrap_or(0), 0)?;
        self.weight = before;
        Ok(())
    }

    /// A value measured; a lazy one as a plain one of the same kind.
    fn flat(&mut self, value: &Value, object: &DynObject) -> Result<Value, Error> {
        let lazy_map = object.type_name().ends_with("::MergeDict");
        let lazy_seq = object.type_name().ends_with("::MergeSeq");
        match object.repr() {
            _ if object.is::<Vec<Value>>() || object.is::<Tuple>() || object.is::<Flat>() => {
                self.parts(object, 0).map(|_| value.clone())
            }
            ObjectRepr::Map if lazy_map => {
                self.expect(object)?;
                let mut pairs = BTreeMap::new();
                for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                    self.part(&key, 1)?;
                    self.part(&item, 1)?;
                    pairs.insert(key, item);
                }
                Ok(pairs.into_iter().collect())
            }
            ObjectRepr::Iterable | ObjectRepr::Seq if lazy_seq || object.repr() == ObjectRepr::Iterable => {
                self.expect(object)?;
                let (before, mut height, mut items) = (self.weight, 0, Vec::new());
                for item in object.try_iter().into_iter().flatten() {
                    height = height.max(self.part(&item, 1)?);
                    items.push(item);
                }
                if object.repr() == ObjectRepr::Seq {
                    return Ok(Value::from(items));
                }
                Ok(Value::from_object(Flat { items, weight: self.weight - before, height: height + 1 }))
            }
            _ if is_live(object) => Ok(value.clone()),
            _ => self.parts(object, 0).map(|_| value.clone()),
        }
    }

    fn attribute(&mut self, value: &Value, namespace: &Value, name: &str) -> Result<(), Error> {
        self.part(value, 0)?;
        if let Some(namespace) = namespace.as_object() {
            for (key, old) in namespace.try_iter_pairs().into_iter().flatten() {
                if key.as_str() != Some(name) {
                    self.part(&old, 0)?;
                }
            }
        }
        Ok(())
    }
}

/// The items of what was a lazy list, and its measures.
#[derive(Debug)]
struct Flat {
    items: Vec<Value>,
    weight: usize,
    height: usize,
}

impl Object for Flat {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_rev_enumerator(|this| Box::new(this.items.iter().cloned()))
    }
}
