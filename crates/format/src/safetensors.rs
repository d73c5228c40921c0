//! A strict reader of safetensors headers.
//!
//! A file is a little-endian u64 header length, a JSON object `name -> {dtype, shape, data_offsets}` with an optional
//! `__metadata__` map of strings, then the data. Everything a hostile or damaged file can do is refused with its own
//! [`ErrorKind`], naming the file and the tensor: repeated names (which JSON maps silently drop), ranges that overlap,
//! leave gaps, leave trailing bytes or end outside the file, sizes that overflow or disagree with the shape. Work and
//! memory are linear in the header length, which is capped at [`MAX_HEADER`], and tensors at [`MAX_TENSORS`].

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::error::{clip, quote};
use crate::{Error, ErrorKind, Result};

/// Largest header accepted, in bytes (the limit of the reference implementation).
pub const MAX_HEADER: u64 = 100_000_000;
/// Most tensors of a file. The largest published checkpoint has 296,500 in all its files together.
pub const MAX_TENSORS: usize = 500_000;
/// Most dimensions of a tensor.
pub const MAX_RANK: usize = 8;

/// Element type of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    I16,
    U16,
    F16,
    Bf16,
    I32,
    U32,
    F32,
    I64,
    U64,
    F64,
    C64,
}

const DTYPES: [(&str, Dtype, u64); 17] = [
    ("BOOL", Dtype::Bool, 1),
    ("U8", Dtype::U8, 1),
    ("I8", Dtype::I8, 1),
    ("F8_E4M3", Dtype::F8E4M3, 1),
    ("F8_E5M2", Dtype::F8E5M2, 1),
    ("F8_E8M0", Dtype::F8E8M0, 1),
    ("I16", Dtype::I16, 2),
    ("U16", Dtype::U16, 2),
    ("F16", Dtype::F16, 2),
    ("BF16", Dtype::Bf16, 2),
    ("I32", Dtype::I32, 4),
    ("U32", Dtype::U32, 4),
    ("F32", Dtype::F32, 4),
    ("I64", Dtype::I64, 8),
    ("U64", Dtype::U64, 8),
    ("F64", Dtype::F64, 8),
    ("C64", Dtype::C64, 8),
];

impl Dtype {
    fn entry(self) -> (&'static str, u64) {
        DTYPES.iter().find(|e| e.1 == self).map_or(("?", 1), |e| (e.0, e.2))
    }

    /// The name in a header.
    pub fn name(self) -> &'static str {
        self.entry().0
    }

    /// Bytes of an element.
    pub fn size(self) -> u64 {
        self.entry().1
    }

    fn parse(name: &str) -> Option<Self> {
        DTYPES.iter().find(|e| e.0 == name).map(|e| e.1)
    }
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Byte range in the file.
    pub range: Range<usize>,
}

/// A parsed header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Tensors in file order; their ranges tile the data exactly.
    pub tensors: Vec<TensorInfo>,
    /// `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// Offset of the data: 8 plus the header length.
    pub data_start: usize,
}

/// Reads and checks the header of a whole file given as `bytes`; `file` names it in errors. The data are not touched.
pub fn read_header(file: &str, bytes: &[u8]) -> Result<Header> {
    let json = header_json(file, bytes)?;
    let mut raw = Raw { file, entries: Vec::new(), metadata: None, failure: None };
    let mut parser = serde_json::Deserializer::from_slice(json);
    if let Err(error) = (&mut raw).deserialize(&mut parser).and_then(|()| parser.end()) {
        return Err(raw.failure.unwrap_or_else(|| {
            Error::new(
                ErrorKind::BadHeader,
                format!(
                    "{file}: the header is not a JSON object of the safetensors form: {}; fetch it again",
                    clip(error)
                ),
            )
        }));
    }
    raw.entries.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    check_once(file, &raw.entries)?;
    let data_start = 8 + json.len();
    let data_len = (bytes.len() - data_start) as u64;
    let mut tensors = Vec::with_capacity(raw.entries.len());
    for (name, entry) in raw.entries {
        tensors.push(check_entry(file, name.into_owned(), entry, data_start, data_len)?);
    }
    tensors.sort_by(|a, b| (a.range.start, a.range.end, &a.name).cmp(&(b.range.start, b.range.end, &b.name)));
    check_tiling(file, &tensors, data_start, bytes.len())?;
    Ok(Header { tensors, metadata: raw.metadata.unwrap_or_default(), data_start })
}

fn header_json<'a>(file: &str, bytes: &'a [u8]) -> Result<&'a [u8]> {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(Error::new(
            ErrorKind::Truncated,
            format!("{file}: {} bytes are too few for a safetensors file; fetch it again", bytes.len()),
        ));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(Error::new(
            ErrorKind::HeaderTooLarge,
            format!(
                "{file}: header length {length} is above the limit of {MAX_HEADER} bytes; this is not a safetensors file"
            ),
        ));
    }
    let Some(json) = rest.get(..length as usize) else {
        return Err(Error::new(
            ErrorKind::Truncated,
            format!(
                "{file}: the header has {length} bytes but only {} follow; the download is incomplete: fetch it again",
                rest.len()
            ),
        ));
    };
    if json.first() != Some(&b'{') {
        return Err(Error::new(
            ErrorKind::BadHeader,
            format!("{file}: the header does not start with '{{'; this is not a safetensors file"),
        ));
    }
    Ok(json)
}

/// `entries` are sorted by name.
fn check_once(file: &str, entries: &[(Cow<'_, str>, Entry)]) -> Result<()> {
    match entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        None => Ok(()),
        Some(pair) => Err(Error::new(
            ErrorKind::Duplicate,
            format!(
                "{file}: tensor {} appears twice in the header; the file is damaged or hostile",
                quote(&pair[0].0)
            ),
        )),
    }
}

fn check_entry(
    file: &str,
    name: String,
    entry: Entry,
    data_start: usize,
    data_len: u64,
) -> Result<TensorInfo> {
    let fail = |kind, what: String| Err(Error::new(kind, format!("{file}: tensor {}: {what}", quote(&name))));
    let Entry { dtype, begin, end, .. } = entry;
    let shape = entry.shape();
    let size = shape.iter().try_fold(dtype.size(), |n, &dim| n.checked_mul(dim));
    let Some(size) = size else {
        return fail(
            ErrorKind::ShapeOverflow,
            format!("shape {shape:?} overflows 64 bits; the file is damaged"),
        );
    };
    if begin > end {
        return fail(
            ErrorKind::BadRange,
            format!("data_offsets [{begin}, {end}] are reversed; the file is damaged"),
        );
    }
    if end - begin != size {
        let have = end - begin;
        let dtype = dtype.name();
        return fail(
            ErrorKind::BadRange,
            format!("{dtype} {shape:?} needs {size} bytes but data_offsets span {have}; the file is damaged"),
        );
    }
    if end > data_len {
        return fail(
            ErrorKind::OutOfBounds,
            format!(
                "data end at {end} but the file holds {data_len} bytes of data; the download is incomplete"
            ),
        );
    }
    // The range lies inside the file, so it fits usize. A dimension may not, when another one is zero.
    let Ok(shape) = shape.iter().map(|&dim| usize::try_from(dim)).collect() else {
        return fail(ErrorKind::ShapeOverflow, format!("shape {shape:?} overflows the address space"));
    };
    let range = data_start + begin as usize..data_start + end as usize;
    Ok(TensorInfo { name, dtype, shape, range })
}

/// `tensors` are sorted by place. An overlap is looked for everywhere before a gap is: where one range is wrong, its
/// neighbours may show both.
fn check_tiling(file: &str, tensors: &[TensorInfo], data_start: usize, file_len: usize) -> Result<()> {
    let gap = |text: String| Err(Error::new(ErrorKind::Gap, format!("{file}: {text}; write the file again")));
    for pair in tensors.windows(2) {
        let [before, tensor] = pair else { continue };
        if tensor.range.start < before.range.end {
            let text = format!(
                "{file}: tensor {} starts inside {}; the file is damaged or hostile",
                quote(&tensor.name),
                quote(&before.name)
            );
            return Err(Error::new(ErrorKind::Overlap, text));
        }
    }
    let mut cursor = data_start;
    for tensor in tensors {
        let start = tensor.range.start;
        if start > cursor {
            let name = quote(&tensor.name);
            return gap(format!("{} bytes before tensor {name} belong to no tensor", start - cursor));
        }
        cursor = tensor.range.end;
    }
    if cursor != file_len {
        return gap(format!("{} bytes after the last tensor belong to none", file_len - cursor));
    }
    Ok(())
}

/// The fields of a tensor as written.
struct Entry {
    dtype: Dtype,
    /// The first `rank` are in use: a list of its own for each tensor would cost more than the tensor.
    dims: [u64; MAX_RANK],
    rank: usize,
    begin: u64,
    end: u64,
}

impl Entry {
    fn shape(&self) -> &[u64] {
        &self.dims[..self.rank]
    }
}

/// A string of the header, borrowed unless it holds escapes.
struct Text<'de>(Cow<'de, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> std::result::Result<Text<'de>, E> {
        Ok(Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> std::result::Result<Text<'de>, E> {
        Ok(Text(Cow::Owned(text.to_owned())))
    }
}

/// Collects a header; the first refusal is kept in `failure`, since a serde error carries only text.
struct Raw<'a, 'h> {
    file: &'a str,
    /// In the order of the header; repeats are found later.
    entries: Vec<(Cow<'h, str>, Entry)>,
    metadata: Option<BTreeMap<String, String>>,
    failure: Option<Error>,
}

impl Raw<'_, '_> {
    fn fail<E: de::Error>(&mut self, kind: ErrorKind, what: impl fmt::Display) -> E {
        if self.failure.is_none() {
            self.failure = Some(Error::new(kind, format!("{}: {what}", self.file)));
        }
        E::custom("refused")
    }
}

impl<'de> DeserializeSeed<'de> for &mut Raw<'_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Raw<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        while let Some(Text(name)) = map.next_key()? {
            if name == "__metadata__" {
                if self.metadata.is_some() {
                    return Err(
                        self.fail(ErrorKind::Duplicate, "__metadata__ appears twice; the file is damaged")
                    );
                }
                let metadata = map.next_value_seed(MetadataSeed(self))?;
                self.metadata = Some(metadata);
                continue;
            }
            if self.entries.len() == MAX_TENSORS {
                let what = format!("more than {MAX_TENSORS} tensors, the limit for one file; split it");
                return Err(self.fail(ErrorKind::HeaderTooLarge, what));
            }
            let entry = match map.next_value_seed(EntrySeed { raw: self, name: &name }) {
                Ok(entry) => entry,
                Err(error) => {
                    let what = format!("tensor {}: {}; the file is damaged", quote(&name), clip(&error));
                    let _: A::Error = self.fail(ErrorKind::BadHeader, what);
                    return Err(error);
                }
            };
            self.entries.push((name, entry));
        }
        Ok(())
    }
}

struct MetadataSeed<'a, 'b, 'h>(&'a mut Raw<'b, 'h>);

impl<'de> DeserializeSeed<'de> for MetadataSeed<'_, '_, '_> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        let raw = &mut *self.0;
        deserializer.deserialize_map(MetadataVisitor).inspect_err(|error| {
            let text = clip(error);
            let kind =
                if text.contains("appears twice") { ErrorKind::Duplicate } else { ErrorKind::BadMetadata };
            let _: D::Error = raw.fail(kind, format!("__metadata__ must map strings to strings: {text}"));
        })
    }
}

struct MetadataVisitor;

impl<'de> Visitor<'de> for MetadataVisitor {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut out = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value::<String>()?;
            if let Some(_old) = out.insert(key, value) {
                return Err(de::Error::custom("a key appears twice"));
            }
        }
        Ok(out)
    }
}

struct EntrySeed<'a, 'b, 'h> {
    raw: &'a mut Raw<'b, 'h>,
    name: &'a str,
}

impl<'de> DeserializeSeed<'de> for EntrySeed<'_, '_, '_> {
    type Value = Entry;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Entry, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_, '_, '_> {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Entry, A::Error> {
        let (raw, name) = (self.raw, self.name);
        let mut dtype = None;
        let mut shape = None;
        let mut offsets = None;
        while let Some(Text(key)) = map.next_key()? {
            let again = match &*key {
                "dtype" => dtype.replace(map.next_value::<Text<'_>>()?.0).is_some(),
                "shape" => shape.replace(map.next_value_seed(ShapeSeed { raw, name })?).is_some(),
                "data_offsets" => offsets.replace(map.next_value::<(u64, u64)>()?).is_some(),
                other => return Err(de::Error::custom(format!("unknown field {}", quote(other)))),
            };
            if again {
                let what = format!("tensor {}: a field appears twice; the file is damaged", quote(name));
                return Err(raw.fail(ErrorKind::Duplicate, what));
            }
        }
        let missing = |field| de::Error::custom(format!("{field} is missing"));
        let text = dtype.ok_or_else(|| missing("dtype"))?;
        let (dims, rank) = shape.ok_or_else(|| missing("shape"))?;
        let (begin, end) = offsets.ok_or_else(|| missing("data_offsets"))?;
        let Some(dtype) = Dtype::parse(&text) else {
            let known: Vec<&str> = DTYPES.iter().map(|e| e.0).collect();
            let what = format!(
                "tensor {}: unknown dtype {}; known: {}",
                quote(name),
                quote(&text),
                known.join(", ")
            );
            return Err(raw.fail(ErrorKind::UnknownDtype, what));
        };
        Ok(Entry { dtype, dims, rank, begin, end })
    }
}

/// Reads dimensions and their count.
struct ShapeSeed<'a, 'b, 'h> {
    raw: &'a mut Raw<'b, 'h>,
    name: &'a str,
}

impl<'de> DeserializeSeed<'de> for ShapeSeed<'_, '_, '_> {
    type Value = ([u64; MAX_RANK], usize);

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ShapeSeed<'_, '_, '_> {
    type Value = ([u64; MAX_RANK], usize);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of sizes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Self::Value, A::Error> {
        let (mut dims, mut rank) = ([0; MAX_RANK], 0);
        while let Some(dim) = seq.next_element::<u64>()? {
            let Some(slot) = dims.get_mut(rank) else {
                let what = format!("tensor {}: more than {MAX_RANK} dimensions", quote(self.name));
                return Err(self.raw.fail(ErrorKind::ShapeOverflow, what));
            };
            (*slot, rank) = (dim, rank + 1);
        }
        Ok((dims, rank))
    }
}
