//! Chat templates: what `transformers` does, rule by rule, with expected texts written by hand.

#![allow(clippy::unwrap_used)]

use castiron_text::{ChatTemplate, Error, Limits, Message, ReasoningEffort, RenderOptions, prefix_break};
use serde_json::{Value, json};

const RULES: &str = include_str!("data/rules.jinja");
const TINY: &[u8] = include_bytes!("../../../assets/tiny/chat_template.jinja");
const TINY_CONFIG: &[u8] = include_bytes!("../../../assets/tiny/tokenizer_config.json");
const XHIGH: &str = "Reasoning effort is set to xhigh. Please think carefully through the task, validate key \
    assumptions, consider plausible alternatives, and prioritize correctness, consistency, and clarity in the final \
    answer.";
const LOW: &str = "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the \
    conclusion without unnecessary elaboration.";

fn rules() -> ChatTemplate {
    ChatTemplate::new(RULES, Limits::default()).expect("the template compiles")
}

fn tiny() -> ChatTemplate {
    ChatTemplate::from_files(Some(TINY), Some(TINY_CONFIG)).expect("the template compiles")
}

fn list(messages: Value) -> Vec<Message> {
    Message::list(messages).expect("messages")
}

/// Renders with the effort that adds nothing.
fn medium() -> RenderOptions {
    RenderOptions { reasoning_effort: Some(ReasoningEffort::Medium), ..RenderOptions::default() }
}

/// Renders one expression or template with variables.
fn eval(source: &str, variables: Value) -> Result<String, Error> {
    let extra = variables.as_object().cloned().unwrap_or_default();
    let options = RenderOptions { extra, now: Some(1_772_323_200), ..RenderOptions::default() };
    ChatTemplate::new(source, Limits::default())?.render(&[], &options)
}

#[test]
fn reasoning_effort_and_system_block() {
    let user = Message::new("user", " hi \n");
    let system = Message::new("system", "  Be brief.\n");
    let both = [system, user.clone()];
    let turn = "<|im_start|>user\nhi<|im_end|>\n";
    let block = |text: &str| format!("<|im_start|>system\n{text}<|im_end|>\n{turn}");
    let with = |effort, thinking| RenderOptions {
        reasoning_effort: effort,
        enable_thinking: thinking,
        ..RenderOptions::default()
    };
    let one = std::slice::from_ref(&user);
    let t = rules();
    let cases = [
        (with(None, None), block(XHIGH), block(&format!("{XHIGH}\n\nBe brief."))),
        (
            with(Some(ReasoningEffort::XHigh), Some(true)),
            block(XHIGH),
            block(&format!("{XHIGH}\n\nBe brief.")),
        ),
        (with(Some(ReasoningEffort::Low), None), block(LOW), block(&format!("{LOW}\n\nBe brief."))),
        (with(Some(ReasoningEffort::Medium), None), turn.to_string(), block("Be brief.")),
        (with(None, Some(false)), turn.to_string(), block("Be brief.")),
    ];
    for (options, alone, both_texts) in cases {
        assert_eq!(t.render(one, &options).unwrap(), alone);
        assert_eq!(t.render(&both, &options).unwrap(), both_texts);
    }
    // An empty system message is no system message.
    let empty = [Message::new("system", " \n"), user.clone()];
    assert_eq!(t.render(&empty, &medium()).unwrap(), turn);
    let extra = json!({"reasoning_effort": "high"}).as_object().cloned().unwrap();
    let error = t.render(one, &RenderOptions { extra, ..RenderOptions::default() }).unwrap_err();
    assert_eq!(error, Error::TemplateRaised { message: "Unknown reasoning effort: high".into() });
}

#[test]
fn openai_efforts_are_mapped() {
    let set = |name: &str| {
        let mut options = RenderOptions::chat();
        options.set_openai_effort(name).map(|()| (options.reasoning_effort, options.enable_thinking))
    };
    for name in ["high", "xhigh", "max"] {
        assert_eq!(set(name), Ok((Some(ReasoningEffort::XHigh), None)));
    }
    assert_eq!(set("medium"), Ok((Some(ReasoningEffort::Medium), None)));
    assert_eq!(set("low"), Ok((Some(ReasoningEffort::Low), None)));
    assert_eq!(set("minimal"), Ok((Some(ReasoningEffort::Low), None)));
    assert_eq!(set("none"), Ok((None, Some(false))));
    assert!(set("High").unwrap_err().to_string().contains("xhigh"));
}

#[test]
fn tools_are_listed_as_python_prints_json() {
    let tool = json!({"type": "function", "function": {"name": "f", "description": "a <b> & 'c' é \"q\"",
        "parameters": {"zeta": 1, "alpha": [1.0, 1e16, true, null], "empty": {}, "none": []}}});
    let text = r#"{"type": "function", "function": {"name": "f", "description": "a <b> & 'c' é \"q\"", "parameters": {"zeta": 1, "alpha": [1.0, 1e+16, true, null], "empty": {}, "none": []}}}"#;
    let head = format!(
        "# Tools\n\nYou have access to the following functions:\n\n<tools>\n{text}\n{text}\n</tools>"
    );
    let call = "\n\nCall a function by writing its name and parameters in the tags shown.";
    let messages = list(json!([{"role": "system", "content": "S"}, {"role": "user", "content": "u"}]));
    let turn = "<|im_end|>\n<|im_start|>user\nu<|im_end|>\n";
    let tools = vec![tool.clone(), tool];
    let low = RenderOptions {
        tools: tools.clone(),
        reasoning_effort: Some(ReasoningEffort::Low),
        ..RenderOptions::default()
    };
    let expected = format!("<|im_start|>system\n{LOW}\n\n{head}{call}\n\nS{turn}");
    assert_eq!(rules().render(&messages, &low).unwrap(), expected);
    let plain = RenderOptions { tools, ..medium() };
    assert_eq!(
        rules().render(&messages[1..], &plain).unwrap(),
        format!("<|im_start|>system\n{head}{call}{turn}")
    );
    assert_eq!(tiny().render(&messages, &plain).unwrap(), format!("<|im_start|>system\n{head}\n\nS{turn}"));
}

#[test]
fn think_blocks_are_kept_or_dropped() {
    let messages = list(json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " one ", "reasoning_content": "\nr1\n"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "<tool_response>\n3\n</tool_response>"},
        {"role": "assistant", "content": "three", "reasoning_content": ""},
    ]));
    let kept = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nr1\n</think>\n\none<|im_end|>\n\
        <|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\ntwo<|im_end|>\n\
        <|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n\
        <|im_start|>assistant\n<think>\n\n</think>\n\nthree<|im_end|>\n";
    assert_eq!(rules().render(&messages, &medium()).unwrap(), kept);
    let keep = RenderOptions { preserve_thinking: Some(true), ..medium() };
    assert_eq!(rules().render(&messages, &keep).unwrap(), kept);
    let dropped = kept.replacen("<think>\nr1\n</think>\n\n", "", 1);
    let drop = RenderOptions { preserve_thinking: Some(false), ..medium() };
    assert_eq!(rules().render(&messages, &drop).unwrap(), dropped);
}

#[test]
fn generation_prompt() {
    let one = [Message::new("user", "a")];
    let turn = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n";
    for t in [rules(), tiny()] {
        let on = RenderOptions { add_generation_prompt: true, ..medium() };
        assert_eq!(t.render(&one, &on).unwrap(), turn);
        let off = RenderOptions { enable_thinking: Some(false), ..on };
        assert_eq!(t.render(&one, &off).unwrap(), format!("{turn}\n</think>\n\n"));
    }
}

#[test]
fn tool_calls_and_responses() {
    let call = |arguments: Value| json!({"id": "c", "type": "function", "function": {"name": "get", "arguments": arguments}});
    let messages = list(json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [
            call(json!("{\"z\": \"a b\", \"n\": 1.50, \"l\": [1, \"x\"], \"o\": {\"k\": null}, \"t\": true}")), call(json!({}))]},
        {"role": "tool", "tool_call_id": "c", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "said", "tool_calls": [{"name": "flat", "arguments": "{\"a\": \"<b>\\n\"}"}]},
        {"role": "tool", "content": "three"},
    ]));
    let expected = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nr\n</think>\n\n\
        <tool_call>\n<function=get>\n<parameter=z>\na b\n</parameter>\n<parameter=n>\n1.5\n</parameter>\n\
        <parameter=l>\n[1, \"x\"]\n</parameter>\n<parameter=o>\n{\"k\": null}\n</parameter>\n\
        <parameter=t>\ntrue\n</parameter>\n</function>\n</tool_call>\n\
        <tool_call>\n<function=get>\n</function>\n</tool_call><|im_end|>\n\
        <|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n\
        <|im_start|>assistant\n<think>\n\n</think>\n\nsaid\n\n<tool_call>\n<function=flat>\n<parameter=a>\n<b>\n\n\
        </parameter>\n</function>\n</tool_call><|im_end|>\n\
        <|im_start|>user\n<tool_response>\nthree\n</tool_response><|im_end|>\n";
    assert_eq!(rules().render(&messages, &medium()).unwrap(), expected);
    assert_eq!(tiny().render(&messages, &medium()).unwrap(), expected);
}

#[test]
fn bad_tool_calls_are_refused_by_place() {
    let render = |calls: Value| {
        let m = list(json!([{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}]));
        rules().render(&m, &medium())
    };
    let call = |arguments: Value| json!([{"function": {"name": "f", "arguments": arguments}}]);
    for arguments in [json!("[1]"), json!("3"), json!("{\"a\": "), json!(3), json!([1]), json!("nonsense")] {
        let error = render(call(arguments)).unwrap_err();
        assert!(matches!(error, Error::Message { index: 1, .. }), "{error}");
        assert!(error.to_string().starts_with("messages[1]: tool_calls[0].function.arguments"), "{error}");
    }
    for calls in
        [json!("x"), json!([1]), json!([{"function": 1}]), json!([{"function": {"arguments": "{}"}}])]
    {
        assert!(matches!(render(calls), Err(Error::Message { index: 1, .. })));
    }
    let none = render(call(Value::Null)).unwrap();
    assert_eq!(render(call(json!(""))).unwrap(), none);
    assert_eq!(render(json!([{"function": {"name": "f"}}])).unwrap(), none);
    assert!(Message::list(json!({})).is_err());
    assert!(matches!(
        Message::list(json!([{"role": "user"}, {"content": "x"}])),
        Err(Error::Message { index: 1, .. })
    ));
}

#[test]
fn refusals_carry_the_templates_message() {
    let t = rules();
    let refused = |messages: Value| match t.render(&list(messages), &medium()).unwrap_err() {
        Error::TemplateRaised { message } => message,
        other => panic!("{other}"),
    };
    let user = json!({"role": "user", "content": "u"});
    let none = "No user query found in messages.";
    assert_eq!(refused(json!([])), none);
    assert_eq!(refused(json!([{"role": "system", "content": "s"}])), none);
    assert_eq!(refused(json!([{"role": "user", "content": " <tool_response>\nx\n</tool_response> "}])), none);
    assert_eq!(
        refused(json!([user, {"role": "system", "content": "s"}])),
        "A system message must come first."
    );
    assert_eq!(refused(json!([user, {"role": "developer", "content": "s"}])), "Unexpected role: developer");
    assert_eq!(refused(json!([{"role": "user", "content": 3}])), "Unexpected content type.");
}

#[test]
fn content_parts() {
    let m = list(
        json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}]}]),
    );
    let expected = "<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|>b<|im_end|>\n";
    assert_eq!(rules().render(&m, &medium()).unwrap(), expected);
}

/// Five turns with tools: each prompt must begin with the one before, or the prefix cache is lost every turn.
#[test]
fn each_turn_continues_the_last() {
    let call = json!([{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]);
    let mut turns = Vec::new();
    let mut chat = vec![Message::new("system", "S")];
    for i in 0..5 {
        chat.push(Message::new("user", format!("question {i}")));
        turns.push(chat.clone());
        chat.push(Message::new("assistant", "calling").with_reasoning("hm").with_tool_calls(call.clone()));
        chat.push(Message::new("tool", format!("result {i}")));
        turns.push(chat.clone());
        chat.push(Message::new("assistant", format!("answer {i}")).with_reasoning("so"));
    }
    for template in [rules(), tiny()] {
        for (thinking, tools) in
            [(None, true), (Some(false), true), (Some(true), false), (Some(false), false)]
        {
            let tools = if tools { vec![json!({"name": "f"})] } else { Vec::new() };
            let options = RenderOptions { enable_thinking: thinking, tools, ..RenderOptions::default() };
            let texts: Vec<String> = turns.iter().map(|m| template.render(m, &options).unwrap()).collect();
            for pair in texts.windows(2) {
                assert_eq!(prefix_break(&pair[0], &pair[1]), None);
            }
        }
    }
    // With the generation prompt the think block decides: thinking on continues into the kept reasoning ...
    let open = RenderOptions { add_generation_prompt: true, ..medium() };
    let texts: Vec<String> = turns.iter().map(|m| rules().render(m, &open).unwrap()).collect();
    for pair in texts.windows(2) {
        assert_eq!(prefix_break(&pair[0], &pair[1]), None);
    }
    // ... with thinking off a reply is continued when its reasoning is empty, and otherwise breaks right there.
    let off = RenderOptions { enable_thinking: Some(false), ..open.clone() };
    let at =
        prefix_break(&rules().render(&turns[0], &off).unwrap(), &rules().render(&turns[1], &off).unwrap());
    let at = at.expect("a break");
    assert!(at.before.starts_with("\n</think>") && at.after.starts_with("hm\n</think>"), "{at:?}");
    // Not preserving thinking rewrites history: the place is reported.
    let forget = RenderOptions { preserve_thinking: Some(false), ..medium() };
    let at = prefix_break(
        &rules().render(&turns[1], &forget).unwrap(),
        &rules().render(&turns[2], &forget).unwrap(),
    );
    let at = at.expect("a break");
    assert!(at.before.starts_with("<think>\nhm") && at.after.starts_with("calling"), "{at:?}");
    assert_eq!(at.line, 6);
}

#[test]
fn tojson_has_pythons_arguments() {
    let v = json!({"v": {"b": [1, {"é": "<\u{1}\u{7f}\n\""}], "a": {}, "f": 1e-7}});
    let run = |source: &str| eval(source, v.clone()).unwrap();
    assert_eq!(
        run("{{ v | tojson }}"),
        r#"{"b": [1, {"é": "<\u0001"#.to_string() + "\u{7f}" + r#"\n\""}], "a": {}, "f": 1e-07}"#
    );
    assert_eq!(
        run("{{ v.b | tojson(indent=2) }}"),
        "[\n  1,\n  {\n    \"é\": \"<\\u0001\u{7f}\\n\\\"\"\n  }\n]"
    );
    assert_eq!(
        run("{{ {'b': 1, 'a': [], 3: {}} | tojson(indent=4) }}"),
        "{\n    \"b\": 1,\n    \"a\": [],\n    \"3\": {}\n}"
    );
    assert_eq!(
        run("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}"),
        r#"{"a":2,"b":1}"#
    );
    assert_eq!(run("{{ 'é🙂' | tojson(ensure_ascii=true) }}"), r#""\u00e9\ud83d\ude42""#);
    assert_eq!(run("{{ [true, none, 1.0, -3, 'x'] | tojson }}"), r#"[true, null, 1.0, -3, "x"]"#);
    assert_eq!(run("{{ range(3) | tojson }}"), "[0, 1, 2]");
    assert!(matches!(eval("{{ nope | tojson }}", json!({})), Err(Error::TemplateRender { .. })));
}

#[test]
fn jinja_as_transformers_sets_it_up() {
    let v = json!({"s": " aXb ", "d": {"z": 1, "a": "x"}, "l": [1, 2, 3], "t": true, "n": null});
    let cases = [
        ("{{ s.strip().split('X')[-1] }}", "b"),
        ("{{ s.startswith(' a') }} {{ t }} {{ n }} {{ 1.0 }}", "True True None 1.0"),
        ("{{ t ~ n }}{{ t | string }}", "TrueNoneTrue"),
        ("{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "z=1;a=x;"),
        ("{% for k, v in d | items %}{{ k }}{% endfor %}{{ d.get('q', 7) }}", "za7"),
        ("{{ d }} {{ l }}", "{'z': 1, 'a': 'x'} [1, 2, 3]"),
        ("{% for x in l %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% for x in l %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("  {% if t %}\n  yes\n  {% endif %}\nend\n", "  yes\nend"),
        ("{{ l[::-1] | join(',') }} {{ l[1:] }}", "3,2,1 [2, 3]"),
        ("{{ '<&>' }}{{ '<' | safe }}", "<&><"),
        (
            "{{ x is defined }} {{ s is string }} {{ d is mapping }} {{ l is sequence }} {{ 1 is number }}",
            "False True True True True",
        ),
        ("{{ 'a' if undefined_thing else 'b' }}{{ undefined_thing or 'c' }}", "bc"),
        ("{% set ns = namespace(x=1) %}{% for i in l %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}", "7"),
        ("{% generation %}\nx{%- endgeneration -%}\n y", "xy"),
        ("{{ strftime_now('%d %b %Y') }}", "01 Mar 2026"),
        ("{{ tools is none }} {{ documents is none }} {{ messages }}", "True True []"),
        ("{{ 'a' in s }} {{ 'z' in d }} {{ s.rstrip() ~ '|' }}", "True True  aXb|"),
        ("{{ 'x' * 3 }} {{ 7 // 2 }} {{ 7 / 2 }} {{ l | length }} {{ l | last }}", "xxx 3 3.5 3 3"),
        ("{% macro m(a, b='d') %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}", "1d"),
    ];
    for (source, expected) in cases {
        assert_eq!(eval(source, v.clone()).as_deref(), Ok(expected), "{source}");
    }
}

#[test]
fn templates_in_the_config() {
    let messages = [Message::new("user", "u")];
    let render = |config: Value, options: &RenderOptions| {
        ChatTemplate::from_files(None, Some(config.to_string().as_bytes()))?.render(&messages, options)
    };
    let none = RenderOptions::default();
    let tools = RenderOptions { tools: vec![json!({})], ..RenderOptions::default() };
    let one = json!({"chat_template": "{{ eos_token }}{{ bos_token }}{{ messages[0].content }}", "eos_token": "E",
        "bos_token": {"content": "B"}, "pad_token": null});
    assert_eq!(render(one, &none).unwrap(), "EBu");
    let two = json!({"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]});
    assert_eq!(render(two.clone(), &none).unwrap(), "D");
    assert_eq!(render(two, &tools).unwrap(), "T");
    let other = json!({"chat_template": [{"name": "rag", "template": "R"}]});
    assert!(matches!(render(other, &none), Err(Error::NoTemplate { .. })));
    assert!(matches!(render(json!({}), &none), Err(Error::NoTemplate { .. })));
    assert!(matches!(render(json!({"chat_template": 3}), &none), Err(Error::File { .. })));
    assert!(matches!(
        ChatTemplate::from_files(Some(b"a\xff"), None),
        Err(Error::InvalidUtf8 { offset: 1, .. })
    ));
}

#[test]
fn reserved_variables_are_refused() {
    let extra = json!({"messages": []}).as_object().cloned().unwrap();
    let error = rules().render(&[], &RenderOptions { extra, ..RenderOptions::default() }).unwrap_err();
    assert!(error.to_string().contains("\"messages\""), "{error}");
}
