//! An opened checkpoint.

use crate::bind::model::{find_table, table_name, text_prefix};
use crate::bind::{self, Census, Part, bad_value, model};
use crate::ngram::Hash;
use crate::safetensors::Dtype;
use crate::source::{Store, is_plain};
use crate::table::{RowReader, ShardBytes, ShardRows};
use crate::tensors::Tensors;
use crate::{
    Bytes, Config, Error, ErrorKind, GenerationConfig, Inventory, NgramTable, Result, Source, TableMode,
    Weights, json,
};

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
/// Largest side file handed out by [`Checkpoint::file`], in bytes.
const MAX_SIDE_FILE: u64 = 1 << 28;
/// Bytes that [`Checkpoint::full_digest`] hashes between two calls of its progress.
const DIGEST_PART: usize = 1 << 24;

/// A tensor of an opened checkpoint as it is stored.
#[derive(Debug, Clone, Copy)]
pub struct StoredTensor<'a> {
    /// Name in its file.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Its bytes, little-endian.
    pub bytes: &'a Bytes,
    /// Whether the text model uses it; the rest (vision, training leftovers) is ignored.
    pub used: bool,
}

/// An opened checkpoint: configuration and headers, checked against each other. Weight bytes are untouched until asked for.
#[derive(Debug)]
pub struct Checkpoint {
    store: Store,
    config_text: Bytes,
    config: Config,
    generation: GenerationConfig,
    tensors: Tensors,
    census: Census,
}

impl Checkpoint {
    /// Reads `config.json`, `generation_config.json` and all safetensors headers, and takes the census.
    ///
    /// Every `*.safetensors` file of the source is read but `golden*` ones; with a `model.safetensors.index.json`, the files
    /// and places it lists must be right too. The files are mapped: do not truncate or rewrite them while the checkpoint,
    /// its weights or its tables are in use (replace them by renaming instead).
    ///
    /// Errors: any [`ErrorKind`] but [`ErrorKind::BadValue`] and [`ErrorKind::Row`]; a census error lists all findings in
    /// [`Error::details`].
    pub fn open(source: Source) -> Result<Self> {
        let store = Store::list(source)?;
        let config_text = store.read(CONFIG, json::MAX_CONFIG)?;
        let config = Config::parse(&store.label(CONFIG), &config_text)?;
        let generation = if store.has(GENERATION) {
            let text = store.read(GENERATION, json::MAX_CONFIG)?;
            GenerationConfig::parse(&store.label(GENERATION), &text, &config)?
        } else {
            GenerationConfig::default()
        };
        let tensors = Tensors::read(&store)?;
        let census = model::census(&tensors, &config)?;
        Ok(Self { store, config_text, config, generation, tensors, census })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Suggested sampling values (all absent when there is no `generation_config.json`).
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// Typed weights: matrices as views on the files, small vectors and scales decoded.
    ///
    /// Reads all block scales once to check them. Errors: [`ErrorKind::BadValue`], naming the tensor.
    pub fn weights(&self) -> Result<Weights> {
        model::load(&self.tensors, &self.config)
    }

    /// The n-gram table of a (zero-based) layer.
    ///
    /// Errors: the layer has none, a file that cannot be opened, a scale that is not finite and above zero, stored hash
    /// constants that differ from those that the configuration implies.
    pub fn ngram_table(&self, layer: usize, mode: TableMode) -> Result<NgramTable> {
        let none = || {
            Error::new(
                ErrorKind::Config,
                format!("layer {layer} (zero-based) has no n-gram table in ple_layer_ids"),
            )
        };
        let ple = self.config.ple.as_ref().ok_or_else(none)?;
        let number = ple.layers.iter().position(|&l| l == layer).ok_or_else(none)?;
        let hash = Hash::derive(&self.config, number)?;
        let name = table_name(text_prefix(&self.tensors), layer);
        self.check_hash(&name, &hash)?;
        let table = find_table(&self.tensors, &name).ok_or_else(none)?;
        let scale = match table.scale {
            Some(id) if table.dtype == Dtype::F8E4M3 => self.table_scale(id)?,
            _ => 1.0,
        };
        let dim = ple.row_dim();
        let row_bytes = dim * table.dtype.size() as usize;
        let mut first = 0;
        let mut shards = Vec::with_capacity(table.shards.len());
        for id in table.shards {
            shards.push(ShardRows { first, bytes: self.shard_bytes(id, mode)? });
            first += (self.tensors.list[id].bytes.len() / row_bytes) as u64;
        }
        Ok(NgramTable::new(hash, table.dtype, scale, dim, RowReader::new(shards, row_bytes), mode))
    }

    fn check_hash(&self, table: &str, hash: &Hash) -> Result<()> {
        let stem = table.strip_suffix("ngram_embedding").unwrap_or(table);
        let buffers = [
            ("layer_multipliers", hash.multipliers()),
            ("ngram_heads_vocab_sizes", hash.moduli()),
            ("ngram_heads_offsets", hash.offsets()),
        ];
        for (buffer, derived) in buffers {
            if let Some(id) = self.tensors.find(&format!("{stem}{buffer}")) {
                let tensor = &self.tensors.list[id];
                Hash::check(&tensor.name, &tensor.bytes, derived)?;
            }
        }
        Ok(())
    }

    fn table_scale(&self, id: usize) -> Result<f32> {
        let tensor = &self.tensors.list[id];
        match bind::widen(tensor.dtype, &tensor.bytes).first() {
            Some(&scale) if scale.is_finite() && scale > 0.0 => Ok(scale),
            other => Err(bad_value(
                &tensor.name,
                &format!("it is {other:?}: a scale must be finite and above zero"),
            )),
        }
    }

    fn shard_bytes(&self, id: usize, mode: TableMode) -> Result<ShardBytes> {
        let tensor = &self.tensors.list[id];
        if mode == TableMode::Memory {
            let copy = tensor.bytes.is_mapped().then(|| Bytes::from(&*tensor.bytes));
            return Ok(ShardBytes::View(copy.unwrap_or_else(|| tensor.bytes.clone())));
        }
        let shard = &self.tensors.shards[tensor.shard];
        let label = self.store.label(&shard.name);
        let Some(file) = self.store.open(&shard.name)? else {
            return Ok(ShardBytes::View(tensor.bytes.clone()));
        };
        let len = file.metadata().map_err(|e| Error::io(&label, e))?.len();
        if len != shard.len {
            let text = format!("{label}: the file changed while in use; open the checkpoint again");
            return Err(Error::new(ErrorKind::Io, text));
        }
        Ok(ShardBytes::File { file, offset: tensor.offset, label })
    }

    /// The contents of a side file such as `tokenizer.json`; `None` when it is not there or `name` is not a plain file
    /// name.
    ///
    /// Errors: it is there but cannot be read, is no regular file, or is larger than 256 MiB.
    pub fn file(&self, name: &str) -> Result<Option<Bytes>> {
        if !is_plain(name) || !self.store.has(name) {
            return Ok(None);
        }
        self.store.read(name, MAX_SIDE_FILE).map(Some)
    }

    /// All tensors in name order, ignored ones included.
    pub fn tensors(&self) -> impl Iterator<Item = StoredTensor<'_>> {
        self.tensors.list.iter().zip(&self.census.marks).map(|(t, mark)| StoredTensor {
            name: &t.name,
            dtype: t.dtype,
            shape: &t.shape,
            bytes: &t.bytes,
            used: mark.is_some_and(|m| !matches!(m.part, Part::Vision | Part::Ignored | Part::Other)),
        })
    }

    /// Names of all entries of the source in rising order, whether or not they belong to the checkpoint.
    pub fn file_names(&self) -> impl Iterator<Item = &str> {
        self.store.names()
    }

    /// Tensors by file and component.
    pub fn inventory(&self) -> Inventory {
        Inventory::new(&self.tensors, &self.census.marks)
    }

    /// blake3, in hexadecimal, of `config.json` and of the name, size and header of every safetensors file in name order.
    ///
    /// It tells checkpoints apart without reading them; it does not vouch for the weight bytes.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut field = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        field(&self.config_text);
        for shard in &self.tensors.shards {
            field(shard.name.as_bytes());
            field(&shard.len.to_le_bytes());
            field(&shard.header);
        }
        hasher.finalize().to_hex().to_string()
    }

    /// blake3, in hexadecimal, of [`Self::digest`] and of the bytes of every tensor in name order, ignored ones included.
    ///
    /// Reads the whole checkpoint; `progress` hears how many tensor bytes are done.
    pub fn full_digest(&self, mut progress: impl FnMut(u64)) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.digest().as_bytes());
        let mut done = 0;
        for tensor in &self.tensors.list {
            for part in tensor.bytes.chunks(DIGEST_PART) {
                hasher.update(part);
                done += part.len() as u64;
                progress(done);
            }
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Remarks for a person: ignored tensors, an absent draft head.
    pub fn notes(&self) -> &[String] {
        &self.census.notes
    }

    /// Whether the main layers have routed experts in NVFP4 and every one of those has its activation scales: the
    /// checkpoint was made for four-bit activations. Experts in other formats do not count.
    pub fn declared_w4a4(&self) -> bool {
        let tally = self.census.tally;
        tally.w4a4 > 0 && tally.unscaled == 0
    }
}
