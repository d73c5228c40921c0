//! The streaming stages: however the stream is cut, the result is that of the whole.

#![allow(clippy::unwrap_used)]

use std::sync::LazyLock;

use castiron_text::{Error, ReasoningSplit, Specials, StopStrings, ThinkClose, Tokenizer, Utf8Stream};
use proptest::prelude::*;

const JSON: &[u8] = include_bytes!("../../../assets/tiny/tokenizer.json");
static TOKENIZER: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_files(JSON, None).expect("the tiny tokenizer loads"));

fn detokenise(ids: &[u32], skip: bool) -> (String, u64) {
    let mut stream = TOKENIZER.detokenizer(skip);
    let mut text = String::new();
    for &id in ids {
        let chunk = stream.push(id).unwrap().to_string();
        text.push_str(&chunk);
        assert!(stream.pending().len() < 4);
    }
    text.push_str(stream.finish());
    assert_eq!(stream.finish(), "");
    (text, stream.bytes_scanned())
}

fn bytes(ids: &[u32], skip: bool) -> Vec<u8> {
    let kept = ids.iter().filter(|&&id| !(skip && TOKENIZER.is_special(id)));
    kept.flat_map(|&id| TOKENIZER.token_bytes(id).unwrap().to_vec()).collect()
}

#[test]
fn characters_come_out_whole() {
    let ids = TOKENIZER.encode("a🙂é", Specials::Text).unwrap();
    let mut stream = TOKENIZER.detokenizer(false);
    let chunks: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap().to_string()).collect();
    assert_eq!(chunks, ["a", "", "", "", "🙂", "", "é"]);
    assert_eq!(stream.finish(), "");
}

#[test]
fn unknown_ids_are_errors_and_change_nothing() {
    let ids = TOKENIZER.encode("é", Specials::Text).unwrap();
    let mut stream = TOKENIZER.detokenizer(false);
    assert_eq!(stream.push(ids[0]).unwrap(), "");
    for id in [2048, 248_319, u32::MAX] {
        assert_eq!(stream.push(id), Err(Error::UnknownId { id, vocab_size: 2048 }));
    }
    assert_eq!(stream.push(ids[1]).unwrap(), "é");
}

#[test]
fn a_long_reply_is_linear_work() {
    let unit = TOKENIZER.encode("नमस्ते 🙂 plain words, 日本語; ", Specials::Text).unwrap();
    for ids in [
        unit.iter().copied().cycle().take(32_768).collect::<Vec<_>>(),
        vec![unit[0]; 32_768],
        vec![TOKENIZER.encode("🙂", Specials::Text).unwrap()[0]; 32_768],
    ] {
        let (text, work) = detokenise(&ids, false);
        let raw = bytes(&ids, false);
        assert_eq!(text, String::from_utf8_lossy(&raw));
        assert!(work <= raw.len() as u64 + 3 * ids.len() as u64, "{work} bytes scanned for {}", raw.len());
    }
}

/// The definition: of the matches that complete first, the longest.
fn naive<'a>(text: &'a str, stops: &[String]) -> (&'a str, Option<usize>, &'a str) {
    for end in 1..=text.len() {
        let ends = |(_, s): &(usize, &String)| text.as_bytes()[..end].ends_with(s.as_bytes());
        let found = stops.iter().enumerate().filter(ends);
        // The first of equals, so compare by place too.
        if let Some((i, s)) = found.max_by_key(|(i, s)| (s.len(), usize::MAX - i)) {
            return (&text[..end - s.len()], Some(i), &text[end..]);
        }
    }
    (text, None, "")
}

/// Cuts a text at character boundaries, pieces of 1 to `sizes` characters.
fn chunks(text: &str, sizes: &[usize]) -> Vec<String> {
    let (mut rest, mut out) = (text.chars().peekable(), Vec::new());
    for &size in sizes.iter().cycle() {
        if rest.peek().is_none() {
            break;
        }
        out.push(rest.by_ref().take(size).collect());
    }
    out
}

#[test]
fn stop_strings_by_hand() {
    let mut s = StopStrings::new(&["\nUser:", "</s>"]).unwrap();
    assert_eq!(s.push("Hello\nUs"), "Hello");
    assert_eq!(s.held(), 3);
    assert_eq!(s.push("age\nUser"), "\nUsage");
    assert_eq!(s.push(": more"), "");
    assert_eq!((s.matched(), s.after_match()), (Some(0), " more"));
    assert_eq!(s.push("x"), "");
    assert_eq!(s.finish(), "");
    let mut s = StopStrings::new(&["abc"]).unwrap();
    assert_eq!((s.push("xab").to_string(), s.finish()), ("x".to_string(), "ab"));
    // Completes first wins, and of those the longest.
    let mut s = StopStrings::new(&["abcd", "bc"]).unwrap();
    assert_eq!((s.push("xabcd").to_string(), s.matched()), ("xa".to_string(), Some(1)));
    let mut s = StopStrings::new(&["c", "bc"]).unwrap();
    assert_eq!((s.push("xabcd").to_string(), s.matched()), ("xa".to_string(), Some(1)));
    assert_eq!(StopStrings::new(&["a", ""]).unwrap_err(), Error::EmptyStop { index: 1 });
    let mut s = StopStrings::new::<&str>(&[]).unwrap();
    assert_eq!(s.push("anything"), "anything");
}

#[test]
fn stop_strings_are_linear_work() {
    let stop = "a".repeat(5_000) + "b";
    for text in ["a".repeat(100_000), "a".repeat(4_999).replace('a', "ac"), "b".repeat(100_000)] {
        let mut s = StopStrings::new(&[stop.clone(), "aab".repeat(50)]).unwrap();
        let mut out = String::new();
        for c in text.chars() {
            out.push_str(s.push(c.encode_utf8(&mut [0; 4])));
        }
        out.push_str(s.finish());
        assert_eq!(out, text);
        assert!(s.work() <= 4 * text.len() as u64, "{} steps for {}", s.work(), text.len());
    }
}

fn split(close: ThinkClose, inside: bool, pieces: &[(u32, &str)]) -> (String, String) {
    let mut s = ReasoningSplit::new(close, inside).unwrap();
    let (mut reasoning, mut content) = (String::new(), String::new());
    for &(id, text) in pieces {
        let p = s.push(id, text);
        reasoning.push_str(p.reasoning);
        content.push_str(p.content);
    }
    let p = s.finish();
    reasoning.push_str(p.reasoning);
    content.push_str(p.content);
    (reasoning, content)
}

#[test]
fn think_block_by_id() {
    let close = ThinkClose::of(&TOKENIZER);
    assert_eq!(close, ThinkClose::Token(2047));
    let run = |text: &str, skip: bool, inside: bool| {
        let mut stream = TOKENIZER.detokenizer(skip);
        let ids = TOKENIZER.encode(text, Specials::Parse).unwrap();
        let texts: Vec<(u32, String)> =
            ids.iter().map(|&id| (id, stream.push(id).unwrap().to_string())).collect();
        let pieces: Vec<(u32, &str)> = texts.iter().map(|(id, t)| (*id, t.as_str())).collect();
        split(close, inside, &pieces)
    };
    let own = |a: &str, b: &str| (a.to_string(), b.to_string());
    assert_eq!(run("why\n</think>\n\nbecause\n", true, true), own("why\n", "because\n"));
    assert_eq!(run("</think>answer", true, true), own("", "answer"));
    assert_eq!(run("never closed", true, true), own("never closed", ""));
    assert_eq!(run("\n\nplain</think>", true, false), own("", "\n\nplain</think>"));
    assert_eq!(run("a</think>\n\n\nb</think>c", true, true), own("a", "\nb</think>c"));
    // Spelled with other tokens the tag is only talk.
    assert_eq!(
        split(close, true, &[(27, "</"), (1, "think>"), (2, " x"), (2047, "</think>"), (3, "y")]),
        own("</think> x", "y")
    );
    // A tokenizer whose tag is special and skipped, and a broken character in front of the tag.
    assert_eq!(split(close, true, &[(1, "x"), (2047, "")]), own("x", ""));
    assert_eq!(
        split(close, true, &[(1, "x"), (2047, "\u{fffd}</think>"), (3, "\n"), (3, "\n"), (3, "\n")]),
        own("x\u{fffd}", "\n")
    );
}

#[test]
fn prompts_say_where_generation_starts() {
    assert!(ReasoningSplit::prompt_is_inside("<|im_start|>assistant\n<think>\n"));
    assert!(!ReasoningSplit::prompt_is_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    assert!(!ReasoningSplit::prompt_is_inside(""));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn utf8_stream_is_from_utf8_lossy(
        pieces in prop::collection::vec(
            prop_oneof![
                prop::collection::vec(any::<u8>(), 0..4),
                prop::collection::vec(prop::sample::select(vec![0xe0, 0xed, 0xf0, 0xf4, 0xc2, 0x80, 0x9f, 0xa0, 0xbf, b'a']), 0..4),
                any::<char>().prop_map(|c| c.to_string().into_bytes()),
            ],
            0..30,
        )
    ) {
        let mut stream = Utf8Stream::new();
        let mut text = String::new();
        for piece in &pieces {
            text.push_str(stream.push(piece));
        }
        text.push_str(stream.finish());
        let whole = pieces.concat();
        prop_assert_eq!(text, String::from_utf8_lossy(&whole));
    }

    #[test]
    fn detokenizer_is_from_utf8_lossy(ids in prop::collection::vec(prop_oneof![0u32..256, 0u32..2048, 2030u32..2048], 0..60), skip: bool) {
        let (text, _) = detokenise(&ids, skip);
        let whole = bytes(&ids, skip);
        prop_assert_eq!(&text, &String::from_utf8_lossy(&whole));
        prop_assert_eq!(text, TOKENIZER.decode(&ids, skip).unwrap());
    }

    #[test]
    fn stop_strings_match_the_definition(
        text in "[abé]{0,40}",
        stops in prop::collection::vec("[abé]{1,5}", 0..4),
        sizes in prop::collection::vec(1usize..5, 1..6),
    ) {
        let mut s = StopStrings::new(&stops).unwrap();
        let mut out = String::new();
        for chunk in chunks(&text, &sizes) {
            out.push_str(s.push(&chunk));
            prop_assert!(s.held() < stops.iter().map(String::len).max().unwrap_or(1));
        }
        out.push_str(s.finish());
        let (before, which, _) = naive(&text, &stops);
        prop_assert_eq!(out.as_str(), before);
        prop_assert_eq!(s.matched(), which);
    }

    #[test]
    fn any_chunking_splits_alike(
        parts in prop::collection::vec(prop::sample::select(vec!["</think>", "</", "think>", "<", "/", "\n", "x", "é", "<think>"]), 0..14),
        sizes in prop::collection::vec(1usize..9, 1..6),
        inside: bool,
    ) {
        let text = parts.concat();
        let pieces = chunks(&text, &sizes);
        let pieces: Vec<(u32, &str)> = pieces.iter().map(|p| (0, p.as_str())).collect();
        let (reasoning, content) = match text.split_once("</think>") {
            _ if !inside => ("", text.as_str()),
            None => (text.as_str(), ""),
            Some((r, c)) => (r, c.strip_prefix("\n\n").or(c.strip_prefix('\n')).unwrap_or(c)),
        };
        let found = split(ThinkClose::Text, inside, &pieces);
        prop_assert_eq!(found, (reasoning.to_string(), content.to_string()));
    }
}
