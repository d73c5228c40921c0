//! The strict header reader: every refusal, arbitrary bytes, and agreement with the reference implementation.

#![allow(
    clippy::unwrap_used,
    reason = "clippy's own exemption covers only #[test] functions, not their helpers"
)]

mod common;

use std::time::{Duration, Instant};

use castiron_format::ErrorKind;
use castiron_format::safetensors::{MAX_HEADER, read_header};
use common::{GOLDENS, golden, raw_file, root, tiny};
use proptest::prelude::*;
use safetensors::SafeTensors;

#[track_caller]
fn refused(header: &str, data: usize, kind: ErrorKind, says: &[&str]) {
    bytes_refused(&raw_file(header, &vec![0; data]), kind, says);
}

#[track_caller]
fn bytes_refused(bytes: &[u8], kind: ErrorKind, says: &[&str]) {
    let error = read_header("dir/x.safetensors", bytes).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    let text = error.to_string();
    assert!(text.len() < 1200, "{} characters", text.len());
    for part in ["dir/x.safetensors"].iter().chain(says) {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

fn one(dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#"{{"t.w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#)
}

#[test]
fn accepts_plain_files() {
    let bytes = raw_file(&one("F32", "[2,1]", 0, 8), &[1; 8]);
    let header = read_header("x", &bytes).unwrap();
    assert_eq!(header.tensors[0].range, bytes.len() - 8..bytes.len());
    assert_eq!(header.tensors[0].shape, [2, 1]);
    // Padding spaces after the object, metadata, scalars, empty tensors, no tensors at all.
    for (json, data) in [
        (one("F32", "[]", 0, 4) + "   ", 4),
        (one("BF16", "[0,7]", 0, 0), 0),
        (r#"{"__metadata__":{"format":"pt"}}"#.to_owned(), 0),
        ("{}".to_owned(), 0),
    ] {
        read_header("x", &raw_file(&json, &vec![0; data])).unwrap();
    }
}

#[test]
fn refuses_damaged_lengths() {
    bytes_refused(&[], ErrorKind::Truncated, &["fetch it again"]);
    bytes_refused(&[0; 7], ErrorKind::Truncated, &[]);
    bytes_refused(&9u64.to_le_bytes(), ErrorKind::Truncated, &["incomplete"]);
    bytes_refused(&(MAX_HEADER + 1).to_le_bytes(), ErrorKind::HeaderTooLarge, &["100000000"]);
    bytes_refused(&u64::MAX.to_le_bytes(), ErrorKind::HeaderTooLarge, &[]);
    bytes_refused(&[0; 8], ErrorKind::BadHeader, &[]);
}

#[test]
fn refuses_what_is_not_an_object_of_tensors() {
    for json in [
        "[]",
        "null",
        " {}",
        "x",
        "{",
        r#"{"a"}"#,
        "{} {}",
        "{}x",
        r#"{"a":1}"#,
        r#"{"a":[]}"#,
        r#"{"a":null}"#,
    ] {
        refused(json, 0, ErrorKind::BadHeader, &[]);
    }
    bytes_refused(&[&2u64.to_le_bytes()[..], b"{\xff"].concat(), ErrorKind::BadHeader, &[]);
    for entry in [
        r#"{"dtype":"F32","shape":[1]}"#,
        r#"{"dtype":"F32","data_offsets":[0,4]}"#,
        r#"{"shape":[1],"data_offsets":[0,4]}"#,
        r#"{"dtype":3,"shape":[1],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":1,"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,-4]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551616]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4],"extra":0}"#,
    ] {
        refused(&format!(r#"{{"t.w":{entry}}}"#), 4, ErrorKind::BadHeader, &["t.w"]);
    }
}

#[test]
fn refuses_repeats() {
    let entry = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    refused(&format!(r#"{{"t.w":{entry},"t.w":{entry}}}"#), 4, ErrorKind::Duplicate, &["t.w", "twice"]);
    // The same name in another spelling of JSON.
    refused(&format!(r#"{{"t.w":{entry},"t\u002ew":{entry}}}"#), 4, ErrorKind::Duplicate, &["t.w"]);
    refused(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, ErrorKind::Duplicate, &["__metadata__"]);
    refused(r#"{"__metadata__":{"a":"1","a":"2"}}"#, 0, ErrorKind::Duplicate, &["__metadata__"]);
    let twice = r#"{"t.w":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    refused(twice, 4, ErrorKind::Duplicate, &["t.w"]);
}

#[test]
fn refuses_impossible_tensors() {
    refused(&one("F33", "[1]", 0, 4), 4, ErrorKind::UnknownDtype, &["t.w", "F33", "BF16"]);
    refused(&one("f32", "[1]", 0, 4), 4, ErrorKind::UnknownDtype, &["t.w"]);
    refused(&one("F32", "[4294967296,4294967296]", 0, 4), 4, ErrorKind::ShapeOverflow, &["t.w"]);
    refused(&one("F32", "[18446744073709551615]", 0, 4), 4, ErrorKind::ShapeOverflow, &["t.w"]);
    refused(&one("U8", "[1,1,1,1,1,1,1,1,1]", 0, 1), 1, ErrorKind::ShapeOverflow, &["t.w", "8"]);
    refused(&one("F32", "[1]", 0, 8), 8, ErrorKind::BadRange, &["t.w", "4 bytes"]);
    refused(&one("F32", "[2]", 0, 4), 4, ErrorKind::BadRange, &["t.w"]);
    refused(&one("F32", "[1]", 4, 0), 4, ErrorKind::BadRange, &["t.w", "reversed"]);
    refused(&one("F32", "[1]", 0, 4), 3, ErrorKind::OutOfBounds, &["t.w", "incomplete"]);
    refused(
        &one("U8", "[2]", 18446744073709551613, 18446744073709551615),
        4,
        ErrorKind::OutOfBounds,
        &["t.w"],
    );
    refused(&one("F32", "[1]", 4, 8), 8, ErrorKind::Gap, &["t.w", "4 bytes"]);
    refused(&one("F32", "[1]", 0, 4), 5, ErrorKind::Gap, &["after the last"]);
    refused("{}", 1, ErrorKind::Gap, &[]);
}

#[test]
fn refuses_overlaps() {
    let pair = |a: &str, b: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{a}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{b}}}}}"#
        )
    };
    refused(&pair("[0,4]", "[2,6]"), 6, ErrorKind::Overlap, &["\"a\"", "\"b\""]);
    refused(&pair("[0,4]", "[0,4]"), 4, ErrorKind::Overlap, &["\"a\"", "\"b\""]);
    refused(&pair("[0,4]", "[5,9]"), 9, ErrorKind::Gap, &["\"b\""]);
    read_header("x", &raw_file(&pair("[4,8]", "[0,4]"), &[0; 8])).unwrap();
}

#[test]
fn an_overlap_is_told_before_the_gap_it_makes() {
    // c starts too early: bytes 4 to 8 are free before b, and c lies inside b.
    let header = concat!(
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]},"#,
        r#""c":{"dtype":"U8","shape":[4],"data_offsets":[10,14]}}"#
    );
    refused(header, 14, ErrorKind::Overlap, &["\"b\"", "\"c\""]);
}

/// Header of `count` tensors without elements.
fn empty_tensors(count: usize) -> String {
    let entry = |i: usize| format!(r#""{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#);
    let entries: Vec<String> = (0..count).map(entry).collect();
    format!("{{{}}}", entries.join(","))
}

#[test]
fn the_number_of_tensors_is_capped_while_parsing() {
    let bytes = raw_file(&empty_tensors(1_000_000), &[]);
    let start = Instant::now();
    bytes_refused(&bytes, ErrorKind::HeaderTooLarge, &["500000 tensors"]);
    // Well below a second in an optimised build on an idle machine.
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    let header = read_header("x", &raw_file(&empty_tensors(1_000), &[])).unwrap();
    assert_eq!(header.tensors.len(), 1_000);
}

#[test]
fn refuses_bad_metadata() {
    for value in ["1", "null", "[]", r#"{"a":1}"#, r#"{"a":null}"#, r#"{"a":{"b":"c"}}"#] {
        refused(&format!(r#"{{"__metadata__":{value}}}"#), 0, ErrorKind::BadMetadata, &["__metadata__"]);
    }
}

#[test]
fn bombs_stay_small() {
    let deep = "[".repeat(1_000_000);
    refused(&format!(r#"{{"t.w":{deep}"#), 0, ErrorKind::BadHeader, &["t.w"]);
    refused(&format!(r#"{{"__metadata__":{deep}"#), 0, ErrorKind::BadMetadata, &[]);
    refused(&"{\"a\":".repeat(100_000), 0, ErrorKind::BadHeader, &[]);
    let shape = format!(r#"{{"t.w":{{"dtype":"U8","shape":[{}1]"#, "1,".repeat(1_000_000));
    refused(&shape, 0, ErrorKind::ShapeOverflow, &["t.w"]);
    let name = "n".repeat(1_000_000);
    refused(
        &format!(r#"{{"{name}":{{"dtype":"{name}","shape":[],"data_offsets":[0,0]}}}}"#),
        0,
        ErrorKind::UnknownDtype,
        &[],
    );
    refused(&format!(r#"{{"{name}":"{name}"}}"#), 0, ErrorKind::BadHeader, &[]);
}

/// Names, dtypes, shapes and data of a file, as the reference implementation and as ours see it.
fn compare(bytes: &[u8]) {
    let ours = read_header("x", bytes).unwrap();
    let reference = SafeTensors::deserialize(bytes).unwrap();
    assert_eq!(ours.tensors.len(), reference.len());
    for tensor in &ours.tensors {
        let view = reference.tensor(&tensor.name).unwrap();
        assert_eq!(tensor.dtype.name(), format!("{}", view.dtype()));
        assert_eq!(tensor.shape, view.shape());
        assert!(&bytes[tensor.range.clone()] == view.data(), "{}", tensor.name);
    }
}

#[test]
fn agrees_with_the_reference_on_real_files() {
    let mut files = 0;
    let dirs = GOLDENS.iter().map(|n| golden(n)).chain([tiny(), root().join("tests/golden/units")]);
    for entry in dirs.flat_map(|dir| std::fs::read_dir(dir).unwrap()) {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            compare(&std::fs::read(path).unwrap());
            files += 1;
        }
    }
    assert!(files >= 15, "{files} files");
}

fn valid() -> Vec<u8> {
    let json = concat!(
        r#"{"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"#,
        r#""b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},"c":{"dtype":"U8","shape":[],"data_offsets":[22,23]}}"#
    );
    raw_file(json, &[7; 23])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = read_header("x", &bytes);
    }

    #[test]
    fn arbitrary_headers_never_panic(text in "[\\{\\}\\[\\]\",:0-9a-zA-Z_ .-]{0,200}") {
        let _ = read_header("x", &raw_file(&format!("{{{text}"), &[0; 16]));
    }

    /// What we accept, the reference accepts: ours is the stricter reader.
    #[test]
    fn mutations_never_panic(edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3u8), 1..4)) {
        let mut bytes = valid();
        for (at, byte, what) in edits {
            let at = at.index(bytes.len());
            match what {
                0 => bytes[at] = byte,
                1 => { bytes.remove(at); }
                _ => bytes.insert(at, byte),
            }
        }
        if read_header("x", &bytes).is_ok() {
            prop_assert!(SafeTensors::deserialize(&bytes).is_ok());
        }
    }

    #[test]
    fn digit_edits_never_panic(edits in proptest::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 1..6)) {
        let mut bytes = valid();
        let digits: Vec<usize> = (8..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
        for (at, digit) in edits {
            bytes[digits[at.index(digits.len())]] = digit;
        }
        if read_header("x", &bytes).is_ok() {
            prop_assert!(SafeTensors::deserialize(&bytes).is_ok());
        }
    }
}
