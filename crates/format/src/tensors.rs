//! All tensors of a checkpoint by name, over its files.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::error::quote;
use crate::safetensors::{Dtype, read_header};
use crate::source::{Store, is_plain};
use crate::{Bytes, Error, ErrorKind, Result, json};

pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// One safetensors file.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) name: String,
    pub(crate) len: u64,
    pub(crate) tensors: usize,
    /// Length field and header.
    pub(crate) header: Bytes,
}

/// One tensor.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Bytes,
    /// Index of its file.
    pub(crate) shard: usize,
    /// Where its bytes start in the file.
    pub(crate) offset: u64,
}

/// The tensors, sorted by name.
#[derive(Debug)]
pub(crate) struct Tensors {
    pub(crate) shards: Vec<Shard>,
    pub(crate) list: Vec<Tensor>,
}

impl Tensors {
    /// Reads the headers of every safetensors file of a checkpoint but `golden*` ones.
    pub(crate) fn read(store: &Store) -> Result<Self> {
        let index = read_index(store)?;
        let mut files: BTreeSet<&str> = store.names().filter(|n| is_weights_file(n)).collect();
        files.extend(index.values().map(String::as_str));
        if files.is_empty() {
            return Err(Error::new(
                ErrorKind::MissingFile,
                format!(
                    "{}: no *.safetensors file beside it; a checkpoint needs one",
                    store.label("config.json")
                ),
            ));
        }
        let mut out = Self { shards: Vec::new(), list: Vec::new() };
        for file in files {
            out.add(store, file)?;
        }
        out.list.sort_by(|a, b| a.name.cmp(&b.name));
        out.check_unique(store)?;
        out.check_index(store, &index)?;
        Ok(out)
    }

    fn add(&mut self, store: &Store, file: &str) -> Result<()> {
        let label = store.label(file);
        if !store.has(file) {
            return Err(Error::new(
                ErrorKind::MissingFile,
                format!("{label}: this shard is listed in {INDEX} but is not there; fetch it"),
            ));
        }
        let bytes = store.map(file)?;
        let header = read_header(&label, &bytes)?;
        let cut = |range| {
            bytes
                .slice(range)
                .ok_or_else(|| Error::new(ErrorKind::OutOfBounds, format!("{label}: range outside the file")))
        };
        self.shards.push(Shard {
            name: file.to_owned(),
            len: bytes.len() as u64,
            tensors: header.tensors.len(),
            header: cut(0..header.data_start)?,
        });
        for tensor in header.tensors {
            self.list.push(Tensor {
                offset: tensor.range.start as u64,
                bytes: cut(tensor.range)?,
                name: tensor.name,
                dtype: tensor.dtype,
                shape: tensor.shape,
                shard: self.shards.len() - 1,
            });
        }
        Ok(())
    }

    fn check_unique(&self, store: &Store) -> Result<()> {
        for pair in self.list.windows(2) {
            if let [a, b] = pair
                && a.name == b.name
            {
                return Err(Error::new(
                    ErrorKind::Duplicate,
                    format!(
                        "tensor {} is both in {} and in {}; remove one of the files",
                        quote(&a.name),
                        store.label(&self.shards[a.shard].name),
                        store.label(&self.shards[b.shard].name)
                    ),
                ));
            }
        }
        Ok(())
    }

    fn check_index(&self, store: &Store, index: &BTreeMap<String, String>) -> Result<()> {
        for (name, file) in index {
            let found = self.find(name).map(|id| &self.shards[self.list[id].shard].name);
            if found != Some(file) {
                let place = found.map_or_else(String::new, |f| format!(" (it is in {})", quote(f)));
                return Err(Error::new(
                    ErrorKind::BadIndex,
                    format!(
                        "{}: maps tensor {} to {} but that file lacks it{place}; index and shards are of different versions",
                        store.label(INDEX),
                        quote(name),
                        quote(file)
                    ),
                ));
            }
        }
        Ok(())
    }

    /// The position of a tensor in `list`.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.list.binary_search_by(|t| t.name.as_str().cmp(name)).ok()
    }

    /// Positions of the tensors whose names start with `prefix`.
    pub(crate) fn with_prefix<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = usize> + 'a {
        let start = self.list.partition_point(|t| t.name.as_str() < prefix);
        (start..self.list.len()).take_while(move |&i| self.list[i].name.starts_with(prefix))
    }
}

fn is_weights_file(name: &str) -> bool {
    name.ends_with(".safetensors") && is_plain(name) && !name.starts_with("golden")
}

/// Tensor name to file name; empty without an index.
fn read_index(store: &Store) -> Result<BTreeMap<String, String>> {
    if !store.has(INDEX) {
        return Ok(BTreeMap::new());
    }
    let label = store.label(INDEX);
    let bad = |what: String| Error::new(ErrorKind::BadIndex, format!("{label}: {what}"));
    let mut object = json::object(&label, &store.read(INDEX, json::MAX_INDEX)?)?;
    let Some(Value::Object(map)) = object.remove("weight_map") else {
        return Err(bad("must have an object weight_map of tensor names to file names".into()));
    };
    let mut out = BTreeMap::new();
    for (name, file) in map {
        let Value::String(file) = file else {
            return Err(bad(format!("weight_map[{}] must be a file name", quote(&name))));
        };
        if !is_plain(&file) || !file.ends_with(".safetensors") {
            let (name, file) = (quote(&name), quote(&file));
            return Err(bad(format!(
                "weight_map[{name}] = {file} must be the plain name of a *.safetensors file in the same directory"
            )));
        }
        out.insert(name, file);
    }
    Ok(out)
}
