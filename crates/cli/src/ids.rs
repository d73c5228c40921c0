//! Token ids from a safetensors file.

use std::path::Path;

use anyhow::{Context, anyhow};
use castiron_format::safetensors::{Dtype, read_header};

/// Largest file read, in bytes.
const MAX_FILE: u64 = 4_000_000_000;

/// `input_ids` of a safetensors file, `[T]` or `[1, T]`, any integer dtype.
pub fn read(path: &Path) -> anyhow::Result<Vec<i128>> {
    let name = path.display().to_string();
    let about = std::fs::metadata(path).with_context(|| format!("cannot read {name}"))?;
    if !about.is_file() || about.len() > MAX_FILE {
        return Err(anyhow!("{name} is not a regular file of at most 4 GB; name a safetensors file"));
    }
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {name}"))?;
    let header = read_header(&name, &bytes)?;
    let tensor =
        header.tensors.iter().find(|t| t.name == "input_ids").ok_or_else(|| {
            anyhow!("{name} has no tensor `input_ids`; it needs one of shape [T] or [1, T]")
        })?;
    if tensor.shape.len() > 2 || tensor.shape.iter().rev().skip(1).any(|&n| n != 1) || tensor.shape.is_empty()
    {
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
        Dtype::I8 => data.iter().map(|&b| i128::from(b as i8)).collect(),
        Dtype::U8 => data.iter().map(|&b| b.into()).collect(),
        other => return Err(anyhow!("{name}: `input_ids` is {}, expected an integer dtype", other.name())),
    };
    Ok(ids)
}

/// All ids in range and inside the context, before anything is written.
pub fn check(ids: &[i128], vocab: usize, context: u32) -> anyhow::Result<Vec<u32>> {
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
