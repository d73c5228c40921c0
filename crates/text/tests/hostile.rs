//! Templates and values that never end. Each must be a clear error, soon, on a thread with an ordinary stack.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use castiron_text::{ChatTemplate, Error, Limits, Message, RenderOptions, TemplateLimit};
use serde_json::{Value, json};

/// Runs on a thread with the default stack; a stack overflow would end the process.
fn soon<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let start = Instant::now();
    let out = std::thread::spawn(work).join().expect("no panic");
    // The promise is well within a second in an optimised build on an idle machine; this one may be busy.
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    out
}

fn render(source: impl Into<String>) -> Result<String, Error> {
    let source = source.into();
    soon(move || {
        let options = RenderOptions { tools: vec![json!({"a": "x"})], ..RenderOptions::default() };
        ChatTemplate::new(&source, Limits::default())?.render(&[Message::new("user", "hello")], &options)
    })
}

fn limit(source: impl Into<String>) -> TemplateLimit {
    match render(source) {
        Err(Error::TemplateLimit { limit, .. }) => limit,
        other => panic!("{:?}", other.map(|text| text.len())),
    }
}

#[test]
fn syntax_errors_have_a_line() {
    for (source, at) in
        [("a\nb\n{% if %}", 3), ("{{ 'x' }\n}", 1), ("\n\n\n{% nonsense %}", 4), ("\n{% for x in y %}\n", 2)]
    {
        match render(source) {
            Err(Error::TemplateSyntax { line, template, .. }) => {
                assert_eq!((line, template.as_str()), (at, "default"), "{source:?}");
            }
            other => panic!("{source:?}: {other:?}"),
        }
    }
}

#[test]
fn render_errors_have_a_line() {
    for (source, at) in
        [("a\n{{ x.y.z }}", 2), ("\n\n{{ 1 + 'a' }}", 3), ("{{ nope() }}", 1), ("{{ 'a' | nope }}", 1)]
    {
        match render(source) {
            Err(Error::TemplateRender { line, .. } | Error::TemplateSyntax { line, .. }) => {
                assert_eq!(line, at)
            }
            other => panic!("{source:?}: {other:?}"),
        }
    }
}

#[test]
fn endless_work_runs_out() {
    use TemplateLimit::{Fuel, Range, Recursion};
    assert_eq!(limit("{% for i in range(10**9) %}x{% endfor %}"), Range);
    assert_eq!(limit("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"), Fuel);
    assert_eq!(
        limit("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"),
        Fuel
    );
    assert_eq!(
        limit(
            "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
        ),
        Fuel
    );
    assert_eq!(limit("{{ 'x' * 10000000000 }}"), Fuel);
    assert_eq!(limit("{{ ('%1000000000d' | format(1)) }}{{ 'x'.center(100) }}{{ 'x' * 999999999 }}"), Fuel);
    assert_eq!(limit("{{ ([[1]*999]*999) | tojson }}{{ ([[[1]*999]*999]*999) | tojson }}"), Fuel);
    assert_eq!(limit("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}"), Recursion);
    assert_eq!(
        limit("{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}"),
        Recursion
    );
    assert_eq!(
        limit(
            "{% macro m() %}{% call m() %}{% endcall %}{{ caller() }}{% endmacro %}{% call m() %}{% endcall %}"
        ),
        Recursion
    );
    assert_eq!(limit("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}"), Recursion);
    assert_eq!(limit("{% include 'default' %}"), Recursion);
    assert_eq!(limit("{% from 'default' import x %}"), Recursion);
    assert_eq!(limit("{% import 'default' as d %}"), Recursion);
    assert_eq!(limit("{% block a %}{{ self.a() }}{% endblock %}"), Recursion);
}

#[test]
fn cyclic_inheritance_and_missing_files_are_errors() {
    assert!(render("{% extends 'default' %}").is_err());
    assert!(matches!(render("{% include '/etc/passwd' %}"), Err(Error::TemplateRender { .. })));
}

#[test]
fn output_is_bounded() {
    let limits = Limits { output: 1_000, ..Limits::default() };
    let run = move |source: &'static str| {
        soon(move || ChatTemplate::new(source, limits)?.render(&[], &RenderOptions::default()))
    };
    let error = run("{% for i in range(9999) %}xxxx{% endfor %}").unwrap_err();
    assert!(matches!(error, Error::TemplateLimit { limit: TemplateLimit::Output, .. }), "{error}");
    assert!(run("{% for i in range(99) %}xxxx{% endfor %}").is_ok());
}

#[test]
fn raise_inside_a_macro_or_include_is_still_the_templates_message() {
    let raised = Err(Error::TemplateRaised { message: "no".into() });
    assert_eq!(render("{{ raise_exception('no') }}"), raised);
    assert_eq!(render("{% macro m() %}{{ raise_exception('no') }}{% endmacro %}{{ m() }}"), raised);
    let included = "{% if x %}{{ raise_exception('no') }}{% endif %}{% set x = 1 %}{% include 'default' %}";
    assert_eq!(render(included), raised);
}

/// Shapes whose depth nothing in the engine counts.
#[test]
fn deep_trees_do_not_overflow_the_stack() {
    let n = 2_000;
    let ok_or_error = |source: String| drop(render(source));
    ok_or_error(format!("{{{{ a{} }}}}", "~a".repeat(n)));
    ok_or_error(format!("{{{{ 1{} }}}}", "+1".repeat(n)));
    ok_or_error(format!("{{{{ a{} }}}}", "|e".repeat(n)));
    ok_or_error(format!("{{{{ a{} }}}}", ".b".repeat(n)));
    ok_or_error(format!("{{{{ a{} }}}}", "()".repeat(n)));
    ok_or_error(format!("{{{{ a{} }}}}", "[0]".repeat(n / 2)));
    ok_or_error(format!("{{{{ {}1 }}}}", "not ".repeat(n / 2)));
    ok_or_error(format!("{{{{ {}1 }}}}", "-".repeat(n)));
    ok_or_error(format!("{{{{ {}1{} }}}}", "(".repeat(n), ")".repeat(n)));
    ok_or_error(format!("{{{{ {}1{} }}}}", "[".repeat(n), "]".repeat(n)));
    ok_or_error(format!("{{{{ 1{} }}}}", " if 1 else 1".repeat(n / 6)));
    ok_or_error(format!("{{{{ 1{} }}}}", "**1".repeat(n / 2)));
    ok_or_error(format!("{{% if 0 %}}{}{{% endif %}}", "{%elif 0%}".repeat(6_000)));
    ok_or_error("{%if 1%}".repeat(6_000));
    ok_or_error("{%if 1%}".repeat(3_000) + &"{%endif%}".repeat(3_000));
}

#[test]
fn deep_values_do_not_overflow_the_stack() {
    let nest = "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = WRAP %}{% endfor %}";
    for wrap in [
        "[ns.x]",
        "{'a': ns.x}",
        "(ns.x,)",
        "namespace(x=ns.x)",
        "[ns.x] | map('upper')",
        "[ns.x] | batch(1)",
    ] {
        let nest = nest.replace("WRAP", wrap);
        for end in [
            "",
            "{{ ns.x }}",
            "{{ ns.x | tojson }}",
            "{{ ns.x == ns.x }}",
            "{{ ns.x ~ '' }}",
            "{{ {ns.x: 1} }}",
        ] {
            drop(render(format!("{nest}{end}")));
        }
    }
}

#[test]
fn deep_and_large_input() {
    let mut deep = json!(1);
    for _ in 0..1_000 {
        deep = Value::Array(vec![deep]);
    }
    let message = Message { content: Some(deep), ..Message::new("user", "") };
    let error = soon(move || {
        let t = ChatTemplate::new("{{ messages }}", Limits::default()).expect("compiles");
        t.render(&[message], &RenderOptions::default()).unwrap_err()
    });
    assert!(matches!(error, Error::Message { index: 0, .. }), "{error}");
    // A million tokens of chat pass.
    let text = "word ".repeat(200);
    let chat: Vec<Message> = (0..8_000)
        .map(|i| Message::new(if i % 2 == 0 { "user" } else { "assistant" }, text.clone()))
        .collect();
    let rules = ChatTemplate::new(include_str!("data/rules.jinja"), Limits::default()).expect("compiles");
    let start = Instant::now();
    let out = rules.render(&chat, &RenderOptions::default()).expect("renders");
    assert!(out.len() > 8_000_000 - 8_000 && start.elapsed() < Duration::from_secs(5));
}

#[test]
fn oversized_source_is_refused() {
    assert_eq!(limit("x".repeat(1 << 20)), TemplateLimit::Source);
    assert_eq!(limit(format!("\n{{{{ 1{} }}}}", "~1".repeat(2_000))), TemplateLimit::Source);
    assert_eq!(limit(format!("{{{{ {{'a': {{}}}}{} }}}}", "~1".repeat(2_000))), TemplateLimit::Source);
    // Literals and comments do not count: templates hold whole system prompts.
    assert_eq!(render(format!("{{{{ '{}'[0] }}}}", "~}}\\'".repeat(2_000))).as_deref(), Ok("~"));
    assert_eq!(render(format!("{{# {} #}}y", "~}}'".repeat(2_000))).as_deref(), Ok("y"));
    // The worst that the limits let through: many tags, each a chain as long as allowed.
    drop(render(format!("{{{{ a{} }}}}", "~a".repeat(1_000)).repeat(32)));
}
