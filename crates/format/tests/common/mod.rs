//! Shared by the tests: golden paths, a tiny safetensors writer, temporary directories.
#![allow(clippy::unwrap_used, dead_code, missing_docs, unreachable_pub)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use castiron_format::{Checkpoint, Error, Source};
use safetensors::SafeTensors;

pub const GOLDENS: [&str; 5] = ["tiny_a", "tiny_b", "tiny_bf16", "tiny_fp8", "tiny_nvfp4"];

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub fn golden(name: &str) -> PathBuf {
    root().join("tests/golden").join(name)
}

pub fn tiny() -> PathBuf {
    root().join("assets/tiny")
}

pub fn open(dir: impl Into<PathBuf>) -> Result<Checkpoint, Error> {
    Checkpoint::open(Source::Dir(dir.into()))
}

/// A directory that is removed when dropped.
pub struct TempDir(pub PathBuf);

impl TempDir {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("castiron-format-{}-{n}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.0.join(name), bytes).unwrap();
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

impl Tensor {
    pub fn f32(shape: &[usize], values: &[f32]) -> Self {
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { dtype: "F32".into(), shape: shape.to_vec(), data }
    }

    pub fn scalar(&self) -> f32 {
        f32::from_le_bytes(self.data[..4].try_into().unwrap())
    }
}

pub type Tensors = BTreeMap<String, Tensor>;

/// All tensors of a directory but goldens.
pub fn read_dir(dir: &Path) -> Tensors {
    let mut out = Tensors::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".safetensors") && !name.starts_with("golden") {
            out.extend(read(&path));
        }
    }
    out
}

pub fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, view)| {
            let dtype = format!("{}", view.dtype());
            (name.to_owned(), Tensor { dtype, shape: view.shape().to_vec(), data: view.data().to_vec() })
        })
        .collect()
}

pub fn encode(tensors: &Tensors) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, t) in tensors {
        let begin = data.len();
        data.extend_from_slice(&t.data);
        header.insert(
            name.clone(),
            serde_json::json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, data.len()]}),
        );
    }
    raw_file(&serde_json::Value::Object(header).to_string(), &data)
}

pub fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out
}

/// A copy of a golden checkpoint with changed tensors, in one file.
pub fn variant(base: &Path, change: impl FnOnce(&mut Tensors)) -> TempDir {
    let mut tensors = read_dir(base);
    change(&mut tensors);
    let dir = TempDir::new();
    dir.write("model.safetensors", encode(&tensors));
    dir.write("config.json", fs::read(base.join("config.json")).unwrap());
    dir
}

/// As [`variant`] with a changed configuration instead.
pub fn with_config(base: &Path, change: impl FnOnce(&mut serde_json::Value)) -> TempDir {
    let dir = variant(base, |_| {});
    let mut config = config_value(base);
    change(&mut config);
    dir.write("config.json", config.to_string());
    dir
}

pub fn config_value(base: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(base.join("config.json")).unwrap()).unwrap()
}

/// I64 elements of a golden tensor.
pub fn i64s(t: &Tensor) -> Vec<i64> {
    t.data.chunks_exact(8).map(|c| i64::from_le_bytes(c.try_into().unwrap())).collect()
}
