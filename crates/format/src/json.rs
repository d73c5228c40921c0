//! JSON side files, read strictly: a repeated key is an error instead of the last one winning.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{clip, quote};
use crate::{Error, ErrorKind, Result};

/// Largest `config.json` or `generation_config.json`, in bytes.
pub(crate) const MAX_CONFIG: u64 = 16 << 20;
/// Largest `model.safetensors.index.json`, in bytes (the largest known, of 300,000 tensors, has about 40 MB).
pub(crate) const MAX_INDEX: u64 = 256 << 20;

/// Parses one JSON object. Nesting is limited to 128 levels by the parser.
pub(crate) fn object(file: &str, text: &[u8]) -> Result<Map<String, Value>> {
    match serde_json::from_slice::<Strict>(text) {
        Ok(Strict(Value::Object(map))) => Ok(map),
        Ok(_) => Err(Error::new(ErrorKind::BadJson, format!("{file}: must be a JSON object"))),
        Err(error) => Err(Error::new(
            if error.to_string().contains("duplicate key") {
                ErrorKind::Duplicate
            } else {
                ErrorKind::BadJson
            },
            format!("{file}: not usable as JSON: {}; fetch the file again or correct it", clip(error)),
        )),
    }
}

/// A JSON value without repeated keys.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> std::result::Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number that is not finite"))
    }

    fn visit_str<E>(self, value: &str) -> std::result::Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Strict(value)) = seq.next_element()? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(de::Error::custom(format!("duplicate key {}", quote(&key))));
            }
            let Strict(value) = map.next_value()?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}
