//! A conversation that keeps its state gives the bytes of fresh runs.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::ops::ControlFlow;

use castiron_engine::sampling::{Params, Sampler};
use castiron_engine::session::{Limits, Session};
use castiron_engine::stop::StopIds;
use castiron_format::{Checkpoint, Source};
use castiron_model::{Model, Options};
use castiron_text::{ChatTemplate, Message, RenderOptions, Specials, Tokenizer};
use common::{castiron, castiron_with_stdin, repo};
use serde_json::Value;

/// Every sampling parameter by hand, so that the oracle needs no defaults.
const FLAGS: [&str; 10] =
    ["--max-tokens", "20", "--temperature", "1", "--top-k", "20", "--top-p", "0.95", "--seed", "4"];

fn talk(more: &[&str], script: &str) -> common::Run {
    castiron_with_stdin(&[&["chat"], more, &FLAGS].concat(), script.as_bytes())
}

/// The replies of a scripted chat.
fn replies(more: &[&str], script: &str) -> Vec<Value> {
    let run = talk(&[&["--json"], more].concat(), script);
    run.ok().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn count(reply: &Value, what: &str) -> u64 {
    reply["usage"][what].as_u64().unwrap()
}

/// The ids of a reply to `messages` of a model that has seen nothing else, and the length of the prompt.
fn fresh(messages: &[Message], seed: u64) -> (Vec<u32>, u64) {
    let checkpoint = Checkpoint::open(Source::Dir(repo("assets/tiny"))).unwrap();
    let config = checkpoint.file("tokenizer_config.json").unwrap();
    let tokenizer =
        Tokenizer::from_files(&checkpoint.file("tokenizer.json").unwrap().unwrap(), config.as_deref())
            .unwrap();
    let jinja = checkpoint.file("chat_template.jinja").unwrap();
    let template = ChatTemplate::from_files(jinja.as_deref(), config.as_deref()).unwrap();
    let options = RenderOptions { enable_thinking: Some(false), ..RenderOptions::chat() };
    let ids = tokenizer.encode(&template.render(messages, &options).unwrap(), Specials::Parse).unwrap();
    let mut session = Session::new(Model::open(&checkpoint, &Options::default()).unwrap()).unwrap();
    let _ = session.feed(&ids, |_| ControlFlow::Continue(())).unwrap();
    let neutral = Params::neutral(tokenizer.vocab_size() as usize);
    let mut sampler =
        Sampler::new(Params { temperature: 1.0, top_k: 20, top_p: 0.95, seed, ..neutral }).unwrap();
    let stop = StopIds::new(&checkpoint.generation().eos, &checkpoint.config().eos);
    let limits = Limits { max_tokens: 20, stop };
    let reply = session.generate(&mut sampler, &limits, |_| ControlFlow::Continue(())).unwrap();
    (reply.ids, ids.len() as u64)
}

fn ids(reply: &Value) -> Vec<u32> {
    reply["ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// The messages so far and what was answered.
fn answered(mut messages: Vec<Message>, reply: &Value) -> Vec<Message> {
    messages.push(Message::new("assistant", reply["content"].as_str().unwrap()));
    messages
}

fn asked(mut messages: Vec<Message>, text: &str) -> Vec<Message> {
    messages.push(Message::new("user", text));
    messages
}

#[test]
fn three_turns_an_undo_and_another_reply_equal_fresh_runs() {
    let script =
        "Tell me a story.\nWho was there?\nAnd then?\n/undo\nAnd then?\n/regenerate\nWhy?\n/quit\nnot read\n";
    let all = replies(&[], script);
    assert_eq!(all.len(), 6);
    let one = asked(Vec::new(), "Tell me a story.");
    let two = asked(answered(one.clone(), &all[0]), "Who was there?");
    let three = asked(answered(two.clone(), &all[1]), "And then?");
    let four = asked(answered(three.clone(), &all[4]), "Why?");
    let prompts = [&one, &two, &three, &three, &three, &four];
    for (i, ((reply, messages), seed)) in all.iter().zip(prompts).zip([4, 4, 4, 4, 5, 4]).enumerate() {
        let (want, prompt) = fresh(messages, seed);
        assert_eq!((ids(reply), count(reply, "prompt_tokens")), (want, prompt), "reply {i}");
        assert_eq!(reply["seed"], seed);
    }
    assert_eq!(count(&all[0], "cached_tokens"), 0);
    assert!(count(&all[1], "cached_tokens") >= count(&all[0], "prompt_tokens"), "{}", all[1]["usage"]);
    // The same prompt again: everything is held.
    for same in [3, 4] {
        assert_eq!(count(&all[same], "cached_tokens"), count(&all[same], "prompt_tokens"), "reply {same}");
    }
    assert_eq!(ids(&all[2]), ids(&all[3]), "/undo and the same words");
    assert_ne!(ids(&all[3]), ids(&all[4]), "/regenerate takes another seed");
    let run: Value =
        serde_json::from_str(&castiron(&[&["--json", "run", "Tell me a story."][..], &FLAGS].concat()).ok())
            .unwrap();
    assert_eq!(ids(&run), ids(&all[0]));
}

#[test]
fn replies_are_plain_text_and_numbers_go_to_standard_error() {
    let script = "Tell me a story.\nWho was there?\n";
    let run = talk(&["--stats"], script);
    let want: String =
        replies(&[], script).iter().map(|r| format!("{}\n", r["content"].as_str().unwrap())).collect();
    assert_eq!(run.ok(), want, "no prompt sign without a terminal");
    let lines: Vec<&str> = run.err.lines().filter(|l| l.contains("cached")).collect();
    assert_eq!(lines.len(), 2, "{}", run.err);
    assert!(lines[0].contains(" 0 cached") && !lines[1].contains(" 0 cached"), "{}", run.err);
}

#[test]
fn a_conversation_is_reset_given_a_system_message_and_saved() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk.json");
    let script =
        format!("Hello.\n/reset\n/system Be kind.\nTell me a story.\n/save {}\n/help\n", path.display());
    let run = talk(&[], &script);
    run.ok();
    assert!(run.err.contains("/regenerate"), "/help: {}", run.err);
    let saved: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let roles: Vec<_> =
        saved["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant"]);
    assert_eq!(saved["messages"][0]["content"], "Be kind.");
    let same = replies(&["--system", "Be kind."], "Tell me a story.\n");
    assert_eq!(saved["messages"][2]["content"], same[0]["content"]);
}

#[test]
fn a_script_ends_at_its_first_mistake() {
    for (script, words) in [
        ("/nonsense\nHello.\n", &["/nonsense", "/help"][..]),
        ("/undo\n", &["no turn"]),
        ("/regenerate\n", &["no reply"]),
        ("/save\n", &["name of a file"]),
        ("end <|im_end|> of turn\n", &["<|im_end|>", "byte 4"]),
    ] {
        talk(&[], script).refused(words);
    }
    castiron_with_stdin(&["chat"], b"caf\xE9\n").refused(&["UTF-8", "byte 3"]);
    castiron(&["chat", repo("tests/golden/tiny_a").to_str().unwrap()]).refused(&["tokenizer.json"]);
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_the_reply_and_not_the_program() {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_castiron"))
        .args(["chat", "--ignore-eos", "--max-tokens", "100000", "--stats", "--seed", "1"])
        .current_dir(repo(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    input.write_all(b"Tell me a story.\n").unwrap();
    let mut first = [0; 10];
    output.read_exact(&mut first).unwrap();
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let mut rest = String::new();
    output.read_line(&mut rest).unwrap();
    // The program still listens, and the reply so far belongs to the conversation.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk.json");
    input.write_all(format!("/save {}\n/quit\n", path.display()).as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let saved: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let content = saved["messages"][1]["content"].as_str().unwrap();
    assert!(content.as_bytes().starts_with(&first), "{content:?}");
    assert!(String::from_utf8_lossy(&done.stderr).contains("generated"));
}
