//! `castiron logits`: token ids in, logits out.

use anyhow::{Context, anyhow};
use castiron_engine::session::Session;
use castiron_format::safetensors::{Dtype, read_header};

use crate::args::Logits;
use crate::failure::Failure;
use crate::output::{self, WholeFile};
use crate::open;

/// Runs the command.
pub fn logits(args: &Logits, json: bool) -> Result<(), Failure> {
    let ids = read_ids(&args.ids).map_err(Failure::input)?;
    let checkpoint = open::checkpoint(Some(&args.model))?;
    let model = open::model(&checkpoint, &args.numerics)?;
    let (vocab, context) = (model.vocab(), model.context());
    let ids = check(&ids, vocab, context).map_err(Failure::input)?;
    let numerics = model.numerics();
    let mut session = Session::new(model)?;
    let mut file = WholeFile::create(&args.out)?;
    file.write(&header(ids.len(), vocab))?;
    let mut hash = blake3::Hasher::new();
    for chunk in ids.chunks(args.numerics.chunk as usize) {
        let rows = session.feed_for_logits(chunk)?;
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        hash.update(&bytes);
        file.write(&bytes)?;
    }
    file.finish()?;
    let hash = hash.finalize().to_hex();
    if json {
        let receipt = serde_json::json!({
            "checkpoint": checkpoint.digest(),
            "numerics": "portable",
            "activations": numerics.activations.name(),
            "experts": numerics.experts.name(),
            "tokens": ids.len(),
            "vocab": vocab,
            "logits_hash": hash.as_str(),
            "out": args.out.display().to_string(),
        });
        output::line(&receipt.to_string())
    } else {
        output::line(&format!("{} rows of {vocab} logits in {}; hash {hash}", ids.len(), args.out.display()))
    }
}

/// `input_ids` of a safetensors file, `[T]` or `[1, T]`, any integer dtype.
fn read_ids(path: &std::path::Path) -> anyhow::Result<Vec<i128>> {
    let name = path.display().to_string();
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {name}"))?;
    let header = read_header(&name, &bytes)?;
    let tensor = header
        .tensors
        .iter()
        .find(|t| t.name == "input_ids")
        .ok_or_else(|| anyhow!("{name} has no tensor `input_ids`; it needs one of shape [T] or [1, T]"))?;
    if tensor.shape.len() > 2 || tensor.shape.iter().rev().skip(1).any(|&n| n != 1) || tensor.shape.is_empty() {
        return Err(anyhow!("{name}: `input_ids` has shape {:?}, expected [T] or [1, T]", tensor.shape));
    }
    let data = bytes.get(tensor.range.clone()).unwrap_or_default();
    let ids = match tensor.dtype {
        Dtype::I64 => data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b).into()).collect(),
        Dtype::U64 => data.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b).into()).collect(),
        Dtype::I32 => data.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        Dtype::U32 => data.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b).into()).collect(),
        Dtype::I16 => data.as_chunks::<2>().0.iter().map(|b| i16::from_le_bytes(*b).into()).collect(),
        Dtype::U16 => data.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b).into()).collect(),
        Dtype::U8 => data.iter().map(|&b| b.into()).collect(),
        other => return Err(anyhow!("{name}: `input_ids` is {}, expected an integer dtype", other.name())),
    };
    Ok(ids)
}

/// All ids in range and inside the context, before anything is written.
fn check(ids: &[i128], vocab: usize, context: u32) -> anyhow::Result<Vec<u32>> {
    if ids.is_empty() {
        return Err(anyhow!("`input_ids` is empty; give at least one token"));
    }
    if ids.len() > context as usize {
        return Err(anyhow!("{} tokens do not fit the context of {context}", ids.len()));
    }
    let id = |(position, &id): (usize, &i128)| {
        u32::try_from(id).ok().filter(|&id| (id as usize) < vocab).ok_or_else(|| {
            anyhow!("token id {id} at position {position} is out of range; the vocabulary has {vocab} ids")
        })
    };
    ids.iter().enumerate().map(id).collect()
}

/// Length and JSON of a safetensors header for one F32 tensor `logits`, padded to 8 bytes.
fn header(tokens: usize, vocab: usize) -> Vec<u8> {
    let json = serde_json::json!({
        "logits": { "dtype": "F32", "shape": [tokens, vocab], "data_offsets": [0, tokens * vocab * 4] }
    });
    let mut json = json.to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    [(json.len() as u64).to_le_bytes().to_vec(), json].concat()
}
