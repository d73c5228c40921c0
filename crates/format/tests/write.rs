//! What the writer writes, the reader reads; what would be no file is refused.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;

use castiron_format::ErrorKind;
use castiron_format::safetensors::{Dtype, read_header};
use castiron_format::write::{Layout, TensorSpec, Writer};
use proptest::prelude::*;
use safetensors::SafeTensors;

const DTYPES: [Dtype; 9] = [
    Dtype::Bool,
    Dtype::U8,
    Dtype::F8E4M3,
    Dtype::Bf16,
    Dtype::F16,
    Dtype::F32,
    Dtype::I32,
    Dtype::I64,
    Dtype::F64,
];

fn write(specs: &[TensorSpec], data: &[Vec<u8>], metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let layout = Layout::new("x", specs, metadata).unwrap();
    let mut writer = Writer::new("x", Vec::new(), layout).unwrap();
    // Interleaved, a piece at a time.
    for round in 0..3 {
        for (i, bytes) in data.iter().enumerate().rev() {
            let third = bytes.len().div_ceil(3);
            let piece = bytes.chunks(third.max(1)).nth(round).unwrap_or_default();
            writer.append(i, piece).unwrap();
        }
    }
    writer.finish().unwrap()
}

fn tensor() -> impl Strategy<Value = (usize, Vec<usize>, u8)> {
    (0..DTYPES.len(), prop::collection::vec(0usize..5, 0..4), any::<u8>())
}

proptest! {
    #[test]
    fn a_file_reads_back(
        tensors in prop::collection::btree_map("[a-z\"\\\\é.]{1,6}", tensor(), 0..8),
        metadata in prop::collection::btree_map("[a-z\"]{1,4}", ".{0,8}", 0..3),
    ) {
        let specs: Vec<TensorSpec> =
            tensors.iter().map(|(name, (d, shape, _))| TensorSpec::new(name, DTYPES[*d], shape.clone())).collect();
        let data: Vec<Vec<u8>> = specs
            .iter()
            .zip(tensors.values())
            .map(|(spec, (_, _, seed))| (0..spec.bytes().unwrap()).map(|i| (i as u8).wrapping_mul(7) ^ seed).collect())
            .collect();
        let bytes = write(&specs, &data, &metadata);
        let header = read_header("x", &bytes).unwrap();
        prop_assert_eq!(&header.metadata, &metadata);
        prop_assert_eq!(header.tensors.len(), specs.len());
        let other = SafeTensors::deserialize(&bytes).unwrap();
        for (spec, data) in specs.iter().zip(&data) {
            let t = header.tensors.iter().find(|t| t.name == spec.name).unwrap();
            prop_assert_eq!((t.dtype, &t.shape), (spec.dtype, &spec.shape));
            prop_assert_eq!(&bytes[t.range.clone()], &data[..]);
            prop_assert_eq!(t.range.start as u64 % spec.dtype.size(), 0, "aligned");
            let view = other.tensor(&spec.name).unwrap();
            prop_assert_eq!((view.shape(), view.data()), (&spec.shape[..], &data[..]));
        }
    }
}

fn refused(specs: &[TensorSpec]) -> ErrorKind {
    Layout::new("x", specs, &BTreeMap::new()).unwrap_err().kind()
}

#[test]
fn layouts_that_are_no_files_are_refused() {
    let spec = |name: &str, shape: &[usize]| TensorSpec::new(name, Dtype::F32, shape);
    assert_eq!(refused(&[spec("a", &[1]), spec("a", &[2])]), ErrorKind::Duplicate);
    assert_eq!(refused(&[spec("__metadata__", &[1])]), ErrorKind::Duplicate);
    assert_eq!(refused(&[spec("a", &[1; 9])]), ErrorKind::ShapeOverflow);
    assert_eq!(refused(&[spec("a", &[usize::MAX, 2])]), ErrorKind::ShapeOverflow);
    assert_eq!(refused(&[spec("a", &[1 << 60]), spec("b", &[1 << 60])]), ErrorKind::ShapeOverflow);
    let long = "n".repeat(1000);
    let many: Vec<TensorSpec> = (0..100_000).map(|i| spec(&format!("{long}{i}"), &[1])).collect();
    assert_eq!(refused(&many), ErrorKind::HeaderTooLarge);
}

#[test]
fn tensors_are_filled_exactly() {
    let specs = [TensorSpec::new("a", Dtype::U8, [4]), TensorSpec::new("b", Dtype::F32, [1])];
    let writer =
        || Writer::new("x", Vec::new(), Layout::new("x", &specs, &BTreeMap::new()).unwrap()).unwrap();
    let mut w = writer();
    w.append(0, &[1, 2, 3]).unwrap();
    let error = w.append(0, &[4, 5]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadRange);
    assert!(error.to_string().contains("\"a\" has 4 bytes"), "{error}");
    w.append(0, &[4]).unwrap();
    assert_eq!(w.skip(1, u64::MAX).unwrap_err().kind(), ErrorKind::BadRange);
    w.skip(1, 3).unwrap();
    assert_eq!(w.finish().unwrap_err().kind(), ErrorKind::Truncated);
    let mut w = writer();
    w.skip(0, 2).unwrap();
    w.append(0, &[9, 9]).unwrap();
    w.skip(1, 4).unwrap();
    let bytes = w.finish().unwrap();
    let header = read_header("x", &bytes).unwrap();
    let a = header.tensors.iter().find(|t| t.name == "a").unwrap();
    assert_eq!(bytes[a.range.clone()], [0, 0, 9, 9]);
}
