//! Typed access to the keys of a JSON object, with errors that name key, value and what is accepted.

use serde_json::{Map, Value};

use crate::error::clip;
use crate::{Error, ErrorKind, Result};

/// An object of a JSON file. A key that is `null` reads as absent.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    pub(super) file: &'a str,
    /// Path of the object with a final dot, or empty.
    pub(super) path: &'a str,
    pub(super) object: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// The error for a key: its value (or that it is missing) and what is accepted.
    pub(super) fn refuse(&self, key: &str, accepted: &str) -> Error {
        self.refuse_as(ErrorKind::Config, key, accepted)
    }

    pub(super) fn refuse_as(&self, kind: ErrorKind, key: &str, accepted: &str) -> Error {
        let Self { file, path, object } = self;
        let text = match object.get(key) {
            None => format!("{file}: {path}{key} is missing: it must be {accepted}"),
            Some(value) => format!("{file}: {path}{key} = {}: it must be {accepted}", clip(value)),
        };
        Error::new(kind, text)
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|v| !v.is_null())
    }

    /// Whether the key is there, even as `null`.
    pub(super) fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// An integer in `min..=max`; `None` when absent.
    pub(super) fn integer_opt(&self, key: &str, min: u64, max: u64) -> Result<Option<u64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().filter(|n| (min..=max).contains(n)) {
            Some(n) => Ok(Some(n)),
            None => Err(self.refuse(key, &format!("an integer from {min} to {max}"))),
        }
    }

    pub(super) fn integer(&self, key: &str, min: u64, max: u64) -> Result<u64> {
        self.integer_opt(key, min, max)?
            .ok_or_else(|| self.refuse(key, &format!("an integer from {min} to {max}")))
    }

    /// A required count in `1..=max`.
    pub(super) fn count(&self, key: &str, max: u32) -> Result<usize> {
        Ok(self.integer(key, 1, u64::from(max))? as usize)
    }

    /// A finite number that satisfies `test`; `None` when absent.
    pub(super) fn number_opt(&self, key: &str, accepted: &str, test: fn(f64) -> bool) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|&x| x.is_finite() && test(x)) {
            Some(x) => Ok(Some(x)),
            None => Err(self.refuse(key, accepted)),
        }
    }

    pub(super) fn number(&self, key: &str, accepted: &str, test: fn(f64) -> bool) -> Result<f64> {
        self.number_opt(key, accepted, test)?.ok_or_else(|| self.refuse(key, accepted))
    }

    pub(super) fn boolean_opt(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(_) => Err(self.refuse(key, "true or false")),
        }
    }

    pub(super) fn string_opt(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(_) => Err(self.refuse(key, "a string")),
        }
    }

    /// Integers in `min..=max`: one or a list; empty when absent.
    pub(super) fn integers(&self, key: &str, min: u64, max: u64) -> Result<Vec<u64>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        list.iter()
            .map(|v| v.as_u64().filter(|n| (min..=max).contains(n)))
            .collect::<Option<_>>()
            .ok_or_else(|| self.refuse(key, &format!("an integer from {min} to {max} or a list of them")))
    }
}

/// A nested object; `None` when absent.
pub(super) fn nested<'a>(keys: &Keys<'a>, key: &str, path: &'a str) -> Result<Option<Keys<'a>>> {
    match keys.get(key) {
        None => Ok(None),
        Some(Value::Object(object)) => Ok(Some(Keys { file: keys.file, path, object })),
        Some(_) => Err(keys.refuse(key, "an object")),
    }
}
