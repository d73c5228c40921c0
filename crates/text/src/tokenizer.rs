//! Text to ids through the checkpoint's `tokenizer.json`, and ids to bytes.

use std::sync::Arc;

use serde::Deserialize;
use tokenizers::{
    AddedToken, AddedVocabulary, DecoderWrapper, Model, ModelWrapper, NormalizedString, OffsetType,
    PreTokenizer, Tokenizer as Pipeline,
};

use crate::error::utf8;
use crate::{Detokenizer, Error};

const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
/// Ids above this are refused rather than given table space: 64 times the largest vocabulary in use.
const MAX_ID: u32 = 1 << 24;

/// Longest piece, in bytes, that the split may leave.
///
/// The crate's regex engine gives up after a million backtracks and then passes the rest of the text on as one
/// piece, without an error: other ids than the model was trained on. Such a rest is always longer than this.
const MAX_PIECE: usize = 500_000;

/// What control tokens in a text mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// Every added token in the text becomes its id: for text that a chat template wrote.
    Parse,
    /// *Special* added tokens (`<|im_start|>`, `<|endoftext|>`, `<|image_pad|>` ...) stay text and are spelled with
    /// ordinary tokens: for text from outside. The result never holds the id of a special token.
    ///
    /// Added tokens that are not special (`<think>`, `<tool_call>` and their like) still become their ids, as they
    /// do in Hugging Face's `split_special_tokens`: they are markup inside a message and can not end a turn.
    Text,
}

/// The checkpoint's tokenizer. Cloning is cheap; clones share their tables.
///
/// `tokenizer.json` is authoritative for normalisation (NFC), splitting, merges and ids. Nothing is added to a text:
/// no beginning-of-sequence token, no post-processor, and any truncation or padding that the file asks for is
/// ignored.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    pipeline: Pipeline,
    /// The same added tokens as in `pipeline`, with special ones left as text.
    plain: AddedVocabulary,
    /// The bytes of all tokens, end to end.
    bytes: Vec<u8>,
    /// By id.
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Default)]
struct Entry {
    start: u32,
    end: u32,
    kind: Kind,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    Hole,
    Model,
    Added,
    Special,
}

/// The parts of tokenizer.json that the `tokenizers` crate does not check.
#[derive(Deserialize)]
struct RawTokenizer {
    #[serde(default)]
    added_tokens: Vec<RawAdded>,
}

#[derive(Deserialize)]
struct RawAdded {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct RawConfig {
    #[serde(default)]
    added_tokens_decoder: serde_json::Map<String, serde_json::Value>,
}

#[derive(Deserialize)]
struct RawConfigToken {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

impl Tokenizer {
    /// Reads `tokenizer.json` and, if given, the added tokens of `tokenizer_config.json` that it lacks.
    ///
    /// Some exports list only part of the added tokens in `tokenizer.json`; the rest stand in the config's
    /// `added_tokens_decoder`. Each is added at exactly the id listed there. A token that would get another id, or
    /// whose id already belongs to another token, is an error: guessing would shift every later id.
    pub fn from_files(tokenizer_json: &[u8], tokenizer_config_json: Option<&[u8]>) -> Result<Self, Error> {
        let text = utf8(TOKENIZER, tokenizer_json)?;
        let mut pipeline: Pipeline = text.parse().map_err(|e| file(TOKENIZER, e))?;
        check_kind(&pipeline)?;
        let raw: RawTokenizer = serde_json::from_str(text).map_err(|e| file(TOKENIZER, e))?;
        for token in raw.added_tokens {
            check_id(&pipeline, TOKENIZER, token.content, token.id)?;
        }
        if let Some(config) = tokenizer_config_json {
            merge_config(&mut pipeline, utf8(CONFIG, config)?)?;
        }
        let (bytes, entries) = table(&pipeline)?;
        let mut plain = pipeline.get_added_vocabulary().clone();
        plain.set_encode_special_tokens(true);
        Ok(Self { inner: Arc::new(Inner { pipeline, plain, bytes, entries }) })
    }

    /// The ids of a text.
    ///
    /// A single run (of letters, of spaces, of punctuation) of more than 500 000 bytes is an error; see the note on
    /// the regex engine in this file.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, Error> {
        let pipeline = &self.inner.pipeline;
        let added = match specials {
            Specials::Parse => pipeline.get_added_vocabulary(),
            Specials::Text => &self.inner.plain,
        };
        // The steps of the crate's `encode`, less post-processing, truncation and padding.
        let mut pieces = added.extract_and_normalize(pipeline.get_normalizer(), text);
        if let Some(split) = pipeline.get_pre_tokenizer() {
            split.pre_tokenize(&mut pieces).map_err(encode_error)?;
        }
        // `get` is already in the byte-level alphabet, two bytes for some; the limit is on the text itself.
        let encode = |piece: &NormalizedString| match piece.get_original().len() {
            n if n > MAX_PIECE => {
                Err(format!("it has a run of {n} bytes without a word break; the limit is {MAX_PIECE}")
                    .into())
            }
            _ => pipeline.get_model().tokenize(piece.get()),
        };
        pieces.tokenize(encode).map_err(encode_error)?;
        let ids = pieces.into_encoding(None, 0, OffsetType::None).map_err(encode_error)?.get_ids().to_vec();
        if specials == Specials::Text
            && let Some(&id) = ids.iter().find(|&&id| self.is_special(id))
        {
            // Only possible if the merges themselves spell a control token; no shipped vocabulary does.
            let detail = format!("its ordinary tokens merge into the control token with id {id}");
            return Err(Error::Encode { detail });
        }
        Ok(ids)
    }

    /// One past the largest id. The model's own vocabulary may be padded further; those ids name no token.
    pub fn vocab_size(&self) -> u32 {
        self.inner.entries.len() as u32
    }

    /// The id of a token, given as `tokenizer.json` spells it (byte-level alphabet for ordinary tokens).
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.pipeline.token_to_id(token)
    }

    /// The token as `tokenizer.json` spells it. For its text use [`token_bytes`](Self::token_bytes).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.pipeline.id_to_token(id)
    }

    /// Whether the id is a special token: a control token that is not part of a reply's text.
    pub fn is_special(&self, id: u32) -> bool {
        self.entry(id).kind == Kind::Special
    }

    /// Whether the id is an added token, special or not.
    pub fn is_added(&self, id: u32) -> bool {
        matches!(self.entry(id).kind, Kind::Added | Kind::Special)
    }

    /// The bytes that a token stands for; `None` for ids that name no token. One token may hold part of a
    /// character. Added tokens stand for their literal text.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let entry = self.entry(id);
        (entry.kind != Kind::Hole).then(|| &self.inner.bytes[entry.start as usize..entry.end as usize])
    }

    /// The first special token spelled out in a text: its byte offset and id.
    ///
    /// A chat template pastes message contents into the prompt, and [`Specials::Parse`] cannot tell them from the
    /// template's own control tokens. Ask this of every content before rendering, and refuse or rewrite it.
    pub fn special_in_text(&self, text: &str) -> Option<(usize, u32)> {
        let added = self.inner.pipeline.get_added_vocabulary();
        let specials = added.get_added_tokens_decoder().iter().filter(|(_, token)| token.special);
        specials.filter_map(|(&id, token)| text.find(&token.content).map(|at| (at, id))).min()
    }

    /// The text of a whole reply: [`String::from_utf8_lossy`] of all the bytes.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        let mut stream = self.detokenizer(skip_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(stream.push(id)?);
        }
        text.push_str(stream.finish());
        Ok(text)
    }

    /// A decoder for one streamed reply.
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer {
        Detokenizer::new(self.clone(), skip_special)
    }

    pub(crate) fn unknown(&self, id: u32) -> Error {
        Error::UnknownId { id, vocab_size: self.vocab_size() }
    }

    fn entry(&self, id: u32) -> Entry {
        self.inner.entries.get(id as usize).copied().unwrap_or_default()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

fn file(what: &'static str, error: impl std::fmt::Display) -> Error {
    Error::File { what, detail: error.to_string() }
}

fn encode_error(error: impl std::fmt::Display) -> Error {
    Error::Encode { detail: error.to_string() }
}

/// Refuses what [`table`] would decode wrongly or what would make encoding random.
fn check_kind(pipeline: &Pipeline) -> Result<(), Error> {
    let refuse = |detail: &str| Err(Error::UnsupportedTokenizer { detail: detail.to_string() });
    let ModelWrapper::BPE(bpe) = pipeline.get_model() else {
        return refuse("the model is not BPE");
    };
    if bpe.byte_fallback {
        return refuse("byte_fallback is on");
    }
    if bpe.dropout.is_some_and(|p| p > 0.0) {
        return refuse("dropout is on, so encoding would be random");
    }
    match pipeline.get_decoder() {
        None | Some(DecoderWrapper::ByteLevel(_)) => Ok(()),
        Some(_) => refuse("the decoder is not ByteLevel"),
    }
}

/// The crate only warns when a listed id is not the id it assigned.
fn check_id(pipeline: &Pipeline, file: &'static str, token: String, listed: u32) -> Result<(), Error> {
    match pipeline.token_to_id(&token) {
        Some(actual) if actual == listed => Ok(()),
        Some(actual) => Err(Error::TokenId { file, token, listed, actual }),
        None => {
            Err(Error::File { what: file, detail: format!("added token {token:?} (id {listed}) is empty") })
        }
    }
}

/// Adds the config's tokens in order of id, so that each gets the next free one.
fn merge_config(pipeline: &mut Pipeline, text: &str) -> Result<(), Error> {
    let config: RawConfig = serde_json::from_str(text).map_err(|e| file(CONFIG, e))?;
    let mut tokens = Vec::new();
    for (key, value) in config.added_tokens_decoder {
        let bad = |detail: String| Error::File { what: CONFIG, detail };
        let id: u32 = key
            .parse()
            .map_err(|_| bad(format!("added_tokens_decoder has the key {key:?}, which is not a token id")))?;
        let token: RawConfigToken =
            serde_json::from_value(value).map_err(|e| bad(format!("added_tokens_decoder[{key}]: {e}")))?;
        tokens.push((id, token));
    }
    tokens.sort_by_key(|&(id, _)| id);
    for (id, token) in tokens {
        if pipeline.token_to_id(&token.content).is_none() {
            pipeline.add_tokens(&[AddedToken {
                normalized: token.normalized.unwrap_or(!token.special),
                content: token.content.clone(),
                single_word: token.single_word,
                lstrip: token.lstrip,
                rstrip: token.rstrip,
                special: token.special,
            }]);
        }
        check_id(pipeline, CONFIG, token.content, id)?;
    }
    Ok(())
}

/// Decodes every token once.
fn table(pipeline: &Pipeline) -> Result<(Vec<u8>, Vec<Entry>), Error> {
    let mut tokens: Vec<(u32, String)> =
        pipeline.get_vocab(true).into_iter().map(|(t, id)| (id, t)).collect();
    tokens.sort_unstable();
    if let Some(pair) = tokens.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let (id, first, second) = (pair[0].0, pair[0].1.clone(), pair[1].1.clone());
        return Err(Error::DuplicateId { id, first, second });
    }
    let Some(&(max, _)) = tokens.last() else {
        return Err(Error::UnsupportedTokenizer { detail: "the vocabulary is empty".to_string() });
    };
    if max > MAX_ID {
        let detail = format!("token id {max} is above {MAX_ID}");
        return Err(Error::UnsupportedTokenizer { detail });
    }
    let alphabet = alphabet();
    let added = pipeline.get_added_vocabulary().get_added_tokens_decoder();
    let mut bytes = Vec::new();
    let mut entries = vec![Entry::default(); max as usize + 1];
    for (id, token) in tokens {
        let start = bytes.len() as u32;
        let kind = match added.get(&id) {
            Some(token) if token.special => Kind::Special,
            Some(_) => Kind::Added,
            None => Kind::Model,
        };
        match from_alphabet(&alphabet, &token) {
            Some(raw) if kind == Kind::Model => bytes.extend(raw),
            // As Hugging Face's decoder: a token that is not spelled in the alphabet is literal.
            _ => bytes.extend_from_slice(token.as_bytes()),
        }
        entries[id as usize] = Entry { start, end: bytes.len() as u32, kind };
    }
    Ok((bytes, entries))
}

/// The byte of each character of the byte-level alphabet (GPT-2's mapping), indexed by code point.
///
/// Printable Latin-1 stands for itself; the other 68 bytes take the code points from 256 on, in order.
fn alphabet() -> Vec<Option<u8>> {
    let mut map = vec![None; 256 + 68];
    let mut next = 256;
    for byte in 0..=255u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let at = if printable { usize::from(byte) } else { next };
        next += usize::from(!printable);
        map[at] = Some(byte);
    }
    map
}

fn from_alphabet(alphabet: &[Option<u8>], token: &str) -> Option<Vec<u8>> {
    token.chars().map(|c| alphabet.get(c as usize).copied().flatten()).collect()
}
