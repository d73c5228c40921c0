//! What the model tests share: checkpoints, golden files, recorded traces, hashes.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use castiron_format::{Checkpoint, Source};
use castiron_model::{Activations, ExpertActivations, Level, Model, Options, Row, Slot, Trace};

/// A path below the repository.
pub fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// `f32` activations, weight-only experts: how parity with f32 references is measured.
pub fn f32_options() -> Options {
    Options { activations: Activations::F32, experts: Some(ExpertActivations::W4a16), ..Options::default() }
}

pub fn open(path: &str, options: &Options) -> Model {
    let checkpoint = Checkpoint::open(Source::Dir(repo(path))).unwrap_or_else(|e| panic!("{path}: {e}"));
    Model::open(&checkpoint, options).unwrap_or_else(|e| panic!("{path}: {e}"))
}

pub fn golden(name: &str, options: &Options) -> Model {
    open(&format!("tests/golden/{name}"), options)
}

/// Every form of numerics the goldens exercise, as (name, options).
pub fn numerics() -> Vec<(&'static str, Options)> {
    vec![("f32", f32_options()), ("bf16", Options::default())]
}

/// A golden file: float and integer tensors by name.
pub struct Golden {
    floats: BTreeMap<String, Vec<f32>>,
    ids: BTreeMap<String, Vec<i64>>,
}

impl Golden {
    pub fn load(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("a valid golden file");
        let (mut floats, mut ids) = (BTreeMap::new(), BTreeMap::new());
        for (name, t) in file.tensors() {
            let data = t.data();
            match t.dtype() {
                safetensors::Dtype::F32 => {
                    let x = data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                    floats.insert(name, x);
                }
                safetensors::Dtype::BF16 => {
                    let widen = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                    floats.insert(name, data.as_chunks::<2>().0.iter().map(widen).collect());
                }
                safetensors::Dtype::I64 => {
                    let x = data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
                    ids.insert(name, x);
                }
                safetensors::Dtype::U8 => {
                    ids.insert(name, data.iter().map(|&b| i64::from(b)).collect());
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        Self { floats, ids }
    }

    pub fn named(name: &str) -> Self {
        Self::load(&repo(&format!("tests/golden/{name}/golden.safetensors")))
    }

    pub fn floats(&self, name: &str) -> &[f32] {
        self.floats.get(name).unwrap_or_else(|| panic!("no golden {name}"))
    }

    pub fn ids(&self, name: &str) -> &[i64] {
        self.ids.get(name).unwrap_or_else(|| panic!("no golden {name}"))
    }

    pub fn has(&self, name: &str) -> bool {
        self.floats.contains_key(name) || self.ids.contains_key(name)
    }

    pub fn input_ids(&self) -> Vec<u32> {
        self.ids("input_ids").iter().map(|&id| id as u32).collect()
    }
}

/// Keeps every traced array; repeated ones (token selections, chunks) are appended in order.
#[derive(Default)]
pub struct Record {
    pub floats: BTreeMap<(Option<usize>, &'static str), Vec<f32>>,
    pub ids: BTreeMap<(Option<usize>, &'static str), Vec<Vec<u64>>>,
}

impl Trace for Record {
    fn floats(&mut self, layer: Option<usize>, name: &'static str, data: &[f32]) {
        self.floats.entry((layer, name)).or_default().extend_from_slice(data);
    }
    fn ids(&mut self, layer: Option<usize>, name: &'static str, data: &[u64]) {
        self.ids.entry((layer, name)).or_default().push(data.to_vec());
    }
}

/// Rows of `ids` from `start` on, all wanting logits.
pub fn rows(slot: Slot, start: usize, ids: &[u32]) -> Vec<Row> {
    let row = |(i, &token): (usize, &u32)| Row { slot, position: (start + i) as u32, token, logits: true };
    ids.iter().enumerate().map(row).collect()
}

/// Feeds `ids` in chunks of `chunk` rows to `slot`, from its length on; the logits of every row.
pub fn feed(model: &mut Model, slot: Slot, ids: &[u32], chunk: usize) -> Vec<f32> {
    let mut logits = Vec::new();
    for ids in ids.chunks(chunk.max(1)) {
        let start = model.length(slot).expect("a slot") as usize;
        let out = model.forward(&rows(slot, start, ids), &[]).expect("a forward pass");
        assert!(out.faults.is_empty(), "{:?}", out.faults);
        logits.extend(out.logits);
    }
    logits
}

/// blake3 of little-endian f32.
pub fn hash(x: &[f32]) -> String {
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    blake3::hash(&bytes).to_hex().to_string()
}

/// The largest absolute difference; lengths must agree.
pub fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "lengths differ");
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

/// The column of the largest value, the lower one of a tie.
pub fn argmax(x: &[f32]) -> u32 {
    (0..x.len()).fold(0, |best, i| if x[i] > x[best] { i } else { best }) as u32
}

/// Options that run the scalar law.
pub fn law(options: &Options) -> Options {
    Options { level: Level::law(), ..options.clone() }
}

/// A repeatable id in `0..vocab`.
pub fn id(seed: u64, vocab: usize) -> u32 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) % vocab as u64) as u32
}
