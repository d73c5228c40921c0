//! The tokenizer against ids that the Python `tokenizers` 0.22.2 gives, and against broken files.

#![allow(clippy::unwrap_used)]

use std::sync::LazyLock;

use castiron_text::{Error, Specials, Tokenizer};
use proptest::prelude::*;

const JSON: &[u8] = include_bytes!("../../../assets/tiny/tokenizer.json");
const CONFIG: &[u8] = include_bytes!("../../../assets/tiny/tokenizer_config.json");
static TOKENIZER: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_files(JSON, Some(CONFIG)).expect("the tiny tokenizer loads"));

#[rustfmt::skip]
const KNOWN: &[(&str, &[u32])] = &[
    ("", &[]),
    ("Hello, world!", &[39, 311, 324, 11, 895, 75, 67, 0]),
    ("  leading and   inner   spaces  \n\n\tx",
        &[220, 541, 298, 353, 310, 220, 220, 729, 77, 271, 220, 220, 302, 79, 64, 66, 354, 220, 220, 297, 197, 87]),
    ("I'll don't WE'VE", &[40, 6, 75, 75, 288, 281, 6, 83, 220, 54, 36, 6, 53, 36]),
    ("12345 6.7", &[16, 17, 18, 19, 20, 220, 21, 13, 22]),
    ("Cafe\u{301} \u{e9} na\u{ef}ve", &[34, 64, 69, 127, 102, 220, 127, 102, 591, 127, 107, 583]),
    ("नमस्ते दुनिया",
        &[156, 97, 101, 156, 97, 106, 156, 97, 116, 156, 98, 235, 156, 97, 97, 156, 98, 229, 220, 156, 97, 99, 156,
          98, 223, 156, 97, 101, 156, 97, 123, 156, 97, 107, 156, 97, 122]),
    ("def f(x):\n    return x + 1\n",
        &[261, 69, 301, 7, 87, 8, 25, 198, 220, 220, 220, 220, 280, 83, 309, 77, 220, 87, 339, 220, 16, 198]),
    ("\u{212b} \u{1e9b}\u{323} \u{fb01}", &[127, 227, 220, 157, 118, 249, 136, 96, 220, 171, 105, 223]),
    ("\0\u{1}\u{7f}\u{200b}\u{feff}", &[188, 189, 221, 158, 222, 233, 171, 119, 123]),
    ("a<tool_call>b</tool_call>", &[64, 2042, 65, 2043]),
];
const TURN: &str = "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>\n\n";

#[test]
fn known_encodings() {
    for specials in [Specials::Parse, Specials::Text] {
        for &(text, ids) in KNOWN {
            assert_eq!(TOKENIZER.encode(text, specials).unwrap(), ids, "{text:?} {specials:?}");
        }
    }
    let parsed = [2035, 341, 198, 71, 72, 2036, 198, 2046, 297, 2047, 297];
    assert_eq!(TOKENIZER.encode(TURN, Specials::Parse).unwrap(), parsed);
    let mut text =
        vec![27, 91, 72, 76, 62, 287, 272, 83, 91, 29, 341, 198, 71, 72, 27, 91, 72, 76, 62, 296, 67, 91];
    text.extend([471, 2046, 297, 2047, 297]);
    assert_eq!(TOKENIZER.encode(TURN, Specials::Text).unwrap(), text);
}

#[test]
fn added_tokens_are_one_id() {
    let table: serde_json::Value = serde_json::from_slice(JSON).unwrap();
    for token in table["added_tokens"].as_array().unwrap() {
        let (id, text) = (token["id"].as_u64().unwrap() as u32, token["content"].as_str().unwrap());
        assert_eq!(TOKENIZER.encode(text, Specials::Parse).unwrap(), [id]);
        assert_eq!(TOKENIZER.token_to_id(text), Some(id));
        assert_eq!(TOKENIZER.id_to_token(id).as_deref(), Some(text));
        assert_eq!(TOKENIZER.token_bytes(id), Some(text.as_bytes()));
        assert_eq!(TOKENIZER.is_special(id), token["special"].as_bool().unwrap());
        assert!(TOKENIZER.is_added(id));
        assert_eq!(
            TOKENIZER.special_in_text(&format!("é{text}")),
            TOKENIZER.is_special(id).then_some((2, id))
        );
    }
    assert_eq!(TOKENIZER.vocab_size(), 2048);
    assert_eq!(TOKENIZER.token_bytes(2048), None);
    assert_eq!(TOKENIZER.token_bytes(220), Some(&b" "[..]));
    assert_eq!(TOKENIZER.id_to_token(220).as_deref(), Some("Ġ"));
    assert!(!TOKENIZER.is_special(9999) && !TOKENIZER.is_special(220));
}

#[test]
fn every_byte_has_a_token() {
    let mut seen = [false; 256];
    for id in 0..TOKENIZER.vocab_size() {
        if let Some(&[byte]) = TOKENIZER.token_bytes(id) {
            seen[usize::from(byte)] = true;
        }
    }
    assert!(seen.iter().all(|&s| s));
}

/// The crate's regex engine gives up silently in runs of about a million characters: shorter ones must split right,
/// longer ones must be refused rather than encoded in another way.
#[test]
fn long_runs_encode_or_are_refused() {
    for unit in [" ", "\n", "a", "!", "1", "é", " \n"] {
        let text = unit.repeat(200_000) + "x don't";
        let ids = TOKENIZER.encode(&text, Specials::Text).unwrap();
        assert_eq!(TOKENIZER.decode(&ids, false).unwrap(), text);
        let tail = TOKENIZER.encode(&(unit.repeat(300) + "x don't"), Specials::Text).unwrap();
        assert_eq!(ids[ids.len() - 5..], tail[tail.len() - 5..], "{unit:?}");
        let long = TOKENIZER.encode(&(unit.repeat(1_200_000) + "x don't"), Specials::Parse);
        match unit {
            "1" => assert_eq!(long.unwrap().len(), 1_200_000 + tail.len() - 300),
            _ => assert!(long.unwrap_err().to_string().contains("limit is 500000"), "{unit:?}"),
        }
    }
}

#[test]
fn special_tokens_cannot_be_spelled_in_text() {
    let tricks = [
        "<|im_end|>",
        "<|im_<|im_end|>end|>",
        "<|im_end|><|im_end|>",
        " <|endoftext|>\n",
        "<|im_end|",
        "｜im_end｜",
    ];
    for text in tricks {
        let ids = TOKENIZER.encode(text, Specials::Text).unwrap();
        assert!(ids.iter().all(|&id| !TOKENIZER.is_special(id)), "{text}");
        assert_eq!(TOKENIZER.decode(&ids, true).unwrap(), text);
    }
}

fn config(entries: &str) -> Vec<u8> {
    format!("{{\"added_tokens_decoder\": {{{entries}}}}}").into_bytes()
}

#[test]
fn config_tokens_are_merged_at_their_ids() {
    let entries = r#""2049": {"content": "<|b|>", "special": true}, "2048": {"content": "<a>", "special": false},
        "2046": {"content": "<think>", "special": true}"#;
    let t = Tokenizer::from_files(JSON, Some(&config(entries))).unwrap();
    assert_eq!(t.encode("<a><|b|>x", Specials::Parse).unwrap()[..2], [2048, 2049]);
    assert_eq!(t.vocab_size(), 2050);
    assert!(t.is_special(2049) && !t.is_special(2048));
    assert!(!t.is_special(2046), "tokenizer.json has the say on tokens it lists");
    assert_eq!(t.encode("<a><|b|>", Specials::Text).unwrap()[0], 2048);
    assert!(!t.encode("<a><|b|>", Specials::Text).unwrap().contains(&2049));
}

#[test]
fn config_tokens_at_other_ids_are_refused() {
    let cases = [
        (r#""2050": {"content": "<a>"}"#, "<a>", 2050, 2048),
        (r#""2035": {"content": "<a>"}"#, "<a>", 2035, 2048),
        (r#""2048": {"content": "<think>"}"#, "<think>", 2048, 2046),
    ];
    for (entries, token, listed, actual) in cases {
        let error = Tokenizer::from_files(JSON, Some(&config(entries))).unwrap_err();
        let file = "tokenizer_config.json";
        assert_eq!(error, Error::TokenId { file, token: token.into(), listed, actual });
        let message = error.to_string();
        assert!(message.contains(token) && message.contains(&listed.to_string()), "{message}");
        assert!(message.contains(&actual.to_string()), "{message}");
    }
    let shifted = String::from_utf8(JSON.to_vec()).unwrap().replace("\"id\": 2047", "\"id\": 2050");
    let error = Tokenizer::from_files(shifted.as_bytes(), None).unwrap_err();
    assert!(matches!(error, Error::TokenId { listed: 2050, actual: 2047, .. }), "{error}");
}

#[test]
fn broken_files_are_errors() {
    let text = String::from_utf8(JSON.to_vec()).unwrap();
    let load = |text: String| Tokenizer::from_files(text.as_bytes(), None).unwrap_err();
    let mut bad = JSON.to_vec();
    bad[100] = 0xff;
    assert!(matches!(Tokenizer::from_files(&bad, None), Err(Error::InvalidUtf8 { offset: 100, .. })));
    assert!(matches!(
        Tokenizer::from_files(JSON, Some(b"{\xff}")),
        Err(Error::InvalidUtf8 { offset: 1, .. })
    ));
    assert!(matches!(Tokenizer::from_files(JSON, Some(b"[")), Err(Error::File { .. })));
    assert!(matches!(Tokenizer::from_files(JSON, Some(&config(r#""x": {}"#))), Err(Error::File { .. })));
    assert!(matches!(Tokenizer::from_files(JSON, Some(&config(r#""2048": 3"#))), Err(Error::File { .. })));
    assert!(matches!(
        Tokenizer::from_files(JSON, Some(&config(r#""2048": {"content": ""}"#))),
        Err(Error::File { .. })
    ));
    for cut in [0, 1, 500, text.len() / 2, text.len() - 1] {
        assert!(matches!(load(text[..cut].to_string()), Error::File { .. }));
    }
    let huge = load(text.replacen("\"!\": 0,", "\"!\": 4294967295,", 1));
    assert!(matches!(huge, Error::UnsupportedTokenizer { .. }), "{huge}");
    let twice = load(text.replacen("\"!\": 0,", "\"!\": 1,", 1));
    assert!(matches!(twice, Error::DuplicateId { id: 1, .. }), "{twice}");
    let random = load(text.replacen("\"dropout\": null", "\"dropout\": 0.5", 1));
    assert!(random.to_string().contains("dropout"), "{random}");
}

/// A file may ask for truncation and padding; a prompt must never be shortened.
#[test]
fn truncation_in_the_file_is_ignored() {
    let truncation =
        r#""truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}"#;
    let text = String::from_utf8(JSON.to_vec()).unwrap().replacen("\"truncation\": null", truncation, 1);
    let t = Tokenizer::from_files(text.as_bytes(), None).unwrap();
    assert_eq!(t.encode("12345", Specials::Parse).unwrap().len(), 5);
}

/// NFC as the file's normaliser does it, seen from outside: what comes back is stable under another round.
fn round_trip(text: &str) {
    let ids = TOKENIZER.encode(text, Specials::Parse).unwrap();
    let back = TOKENIZER.decode(&ids, false).unwrap();
    assert_eq!(TOKENIZER.encode(&back, Specials::Parse).unwrap(), ids);
    assert_eq!(TOKENIZER.decode(&TOKENIZER.encode(&back, Specials::Text).unwrap(), false).unwrap(), back);
    if text.is_ascii() {
        assert_eq!(back, text);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_text_round_trips(text in "\\PC{0,40}|[ \\n\\t\\r'a-zA-Z0-9]{0,60}") {
        round_trip(&text);
    }

    #[test]
    fn any_chars_round_trip(chars in prop::collection::vec(any::<char>(), 0..40)) {
        round_trip(&chars.into_iter().collect::<String>());
    }

    #[test]
    fn any_mixture_of_tags_round_trips(
        parts in prop::collection::vec(
            prop::sample::select(vec!["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<", "|", ">", "\n", " x", "e\u{301}"]),
            0..20,
        )
    ) {
        let text = parts.concat();
        round_trip(&text);
        let ids = TOKENIZER.encode(&text, Specials::Text).unwrap();
        prop_assert!(ids.iter().all(|&id| !TOKENIZER.is_special(id)));
    }
}
