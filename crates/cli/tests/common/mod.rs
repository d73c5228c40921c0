//! Running the program, and writing checkpoints with one thing changed.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A path below the repository.
pub fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// A finished run.
pub struct Run {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Run {
    /// Standard output of a run that must succeed.
    pub fn ok(&self) -> String {
        assert_eq!(self.code, 0, "{}", self.err);
        self.out.clone()
    }

    /// A run that must end with exit code 2, one message that holds `words`, and no output.
    pub fn refused(&self, words: &[&str]) {
        assert_eq!(self.code, 2, "exit code of: {} {}", self.out, self.err);
        assert_eq!(self.out, "", "a refusal prints nothing");
        assert!(!self.err.contains("panicked"), "{}", self.err);
        for word in words {
            assert!(self.err.contains(word), "{word:?} is missing in: {}", self.err);
        }
    }
}

pub fn castiron(args: &[&str]) -> Run {
    castiron_with_stdin(args, b"")
}

pub fn castiron_with_stdin(args: &[&str], input: &[u8]) -> Run {
    // Without the embedded checkpoint the program looks for `assets/` where it is started.
    let mut child = Command::new(env!("CARGO_BIN_EXE_castiron"))
        .args(args)
        .current_dir(repo(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that refuses early may not read it.
    let _ = child.stdin.take().unwrap().write_all(input);
    let done = child.wait_with_output().unwrap();
    Run {
        code: done.status.code().unwrap_or(-1),
        out: String::from_utf8(done.stdout).unwrap(),
        err: String::from_utf8_lossy(&done.stderr).into_owned(),
    }
}

/// Name, dtype, shape, bytes.
pub type Tensor = (String, String, Vec<usize>, Vec<u8>);

/// The bytes of a safetensors file.
pub fn tensor_file(tensors: &[(&str, &str, &[usize], &[u8])]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let range = [data.len(), data.len() + bytes.len()];
        header.insert(
            (*name).into(),
            serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": range }),
        );
        data.extend_from_slice(bytes);
    }
    let header = serde_json::Value::Object(header).to_string().into_bytes();
    [(header.len() as u64).to_le_bytes().to_vec(), header, data].concat()
}

/// A copy of a checkpoint folder, goldens left out.
pub fn copy_checkpoint(from: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if !entry.file_name().to_string_lossy().starts_with("golden") {
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
    }
    dir
}

/// Rewrites `model.safetensors` of a folder after `change`.
pub fn edit_tensors(dir: &Path, change: impl FnOnce(&mut Vec<Tensor>)) {
    let path = dir.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut tensors: Vec<Tensor> = header
        .iter()
        .filter(|(name, _)| *name != "__metadata__")
        .map(|(name, t)| {
            let at = |i: usize| t["data_offsets"][i].as_u64().unwrap() as usize + 8 + length;
            let shape = t["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
            (name.clone(), t["dtype"].as_str().unwrap().to_owned(), shape, bytes[at(0)..at(1)].to_vec())
        })
        .collect();
    change(&mut tensors);
    let views: Vec<(&str, &str, &[usize], &[u8])> =
        tensors.iter().map(|t| (t.0.as_str(), t.1.as_str(), t.2.as_slice(), t.3.as_slice())).collect();
    std::fs::write(path, tensor_file(&views)).unwrap();
}
