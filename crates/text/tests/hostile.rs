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
    use TemplateLimit::{Fuel, Range, Recursion, Value};
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
    assert_eq!(limit("{{ ([[1]*999]*999) | tojson }}{{ ([[[1]*999]*999]*999) | tojson }}"), Value);
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

/// Ways to walk a value: print, convert, join, compare, sort, hash, search.
const WALKS: [&str; 24] = [
    "{{ V }}",
    "{{ V | string }}",
    "{{ V | tojson }}",
    "{{ V | pprint }}",
    "{{ V | upper }}",
    "{{ V ~ '' }}",
    "{{ '%s' | format(V) }}",
    "{{ [V] | join(',') }}",
    "{{ raise_exception(V) }}",
    "{{ V == W }}",
    "{{ V < W }}",
    "{{ V in [W] }}",
    "{{ W is eq V }}",
    "{{ 'a' in V }}",
    "{{ {V: 1} }}",
    "{{ {'a': V}[W] }}",
    "{{ [V, W] | sort }}",
    "{{ [V, W] | unique | list }}",
    "{{ [V, W] | min }}",
    "{{ [V] | map('string') | list }}",
    "{{ {'a': V} | dictsort(by='value') }}",
    "{{ dict(a=V) }}{{ dict(a=V) | items | list }}",
    "{% for k, v in V | items %}{{ v }}{% endfor %}",
    "{% set s %}{{ V }}{{ W }}{% endset %}{% macro m(x) %}{{ x }}{% endmacro %}{{ m(V) }}",
];

/// `setup`, which makes `v` and `w`, then every walk of them: an end, not an abort.
fn walk_all(setup: &str) {
    for walk in WALKS {
        let walk = walk.replace('V', "v").replace('W', "w");
        drop(render(format!("{setup}{walk}")));
    }
}

#[test]
fn a_cyclic_value_cannot_be_built() {
    for cycle in [
        "{% set ns.a = ns %}",
        "{% set ns.a = [ns] %}",
        "{% set ns.a = (1, ns) %}",
        "{% set ns.a = 1, ns %}",
        "{% set ns.a, b = [[ns], 1] %}",
        "{% set (b, ns.a) = (1, {'x': ns}) %}",
        "{% set ns.a = {'x': {'y': ns}} %}",
        "{% set ns.a = {}|default(ns, true) %}",
        "{%- set  ns . a=ns-%}",
        "{% set x = [ns] %}{% set ns.a = x %}",
        "{% set ns.a = namespace(x=ns) %}",
        "{% set ns.a = dict(x=ns) %}",
        "{% set ns.a = [ns] + [1] %}",
        "{% set ns.a = [ns] * 2 %}",
        "{% set ns.a = [1, ns][1:] %}",
        "{% set ns.a = {'x': ns}.values() %}",
        "{% set ns.a = {'x': ns} | items %}",
        "{% set ns.a = [1] | map('default', ns) | list %}",
        "{% set ns.a = [[ns], [1]] | batch(1) %}",
        "{% set ns.a = [1] | zip([ns]) %}",
        "{% set ns.a = [1] | chain([ns]) %}",
        "{% set ns.a | default(ns, true) %}{% endset %}",
        "{% set m = namespace() %}{% set m.a = ns %}{% set ns.a = m %}",
        "{% set ns.b = namespace() %}{% set ns.b.a = ns %}",
        "{% for x in [1] %}{% set ns.a = loop %}{% endfor %}",
        "{% macro f(x) %}{% set x.a = x %}{% endmacro %}{{ f(ns) }}",
        "{% macro f(x) %}{% set ns.a = kwargs %}{% endmacro %}{{ f(x=ns) }}",
    ] {
        let setup = format!("{{% set ns = namespace() %}}{cycle}");
        for end in ["", "{{ ns }}", "{{ ns.a|string }}", "{{ '%s'|format(ns) }}", "{{ raise_exception(ns) }}"]
        {
            match render(format!("{setup}{end}")) {
                Err(Error::TemplateRender { detail, line: 1, .. }) => {
                    assert!(detail.contains("cannot be put inside") || detail.contains("kwargs"), "{detail}");
                }
                // Those that hold no namespace after all.
                Ok(text) => assert!(!text.contains("namespace") && text.len() < 100, "{cycle}: {text}"),
                Err(Error::TemplateRaised { message }) => assert!(message.len() < 100, "{cycle}: {message}"),
                other => panic!("{cycle}: {other:?}"),
            }
        }
        walk_all(&format!("{setup}{{% set v = ns %}}{{% set w = ns.a %}}"));
    }
}

/// The engine alone, as [`ChatTemplate`] sets it up.
fn unguarded(source: &str) -> Option<String> {
    let mut env = minijinja::Environment::new();
    let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.unwrap());
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    let messages = json!([{"role": "user", "content": "hello"}]);
    env.render_str(source, minijinja::context! { messages => minijinja::value::Serde(messages) }).ok()
}

/// Expressions that are rewritten before they are compiled, in every place where they can stand.
#[test]
fn guards_change_no_expression() {
    for source in [
        "{{ [1, x] + [2] }}",
        "{{ (messages + messages)[1:][0].role }}",
        "{{ messages[0:][::-1][0].role ~ messages[:1][0]['content'][1:3] }}",
        "{{ -'abc'[1:]|length }}",
        "{{ not messages[1:] }}",
        "{{ messages[1:] is eq messages[2:] and [x] is eq [x] and x not in [1, x[0:]] }}",
        "{{ [y] is in [[y]] }}{{ y is in (y, 1) }}{{ 2 in (1, 2) }}{{ {'a': y}.a }}",
        "{{ (messages|map(attribute='role')|list)[0] ~ messages|map(attribute='role')|join }}",
        "{% set a, b = 1, messages %}{{ a ~ b[0].role }}{% set (c, d) = [x, 2] %}{{ d }}",
        "{%set a=messages[0]%}{%-set q = messages-%}{%+ set z=(1,)+%}{{a.role~q[0].role~z[0]}}",
        "{% for a, b in {'k': y} | items if [a] %}{{ a }}{{ loop.index + 1 }}{% endfor %}",
        "{% for a in [3, 4][::-1] + [5] recursive %}{{ a }}{% endfor %}",
        "{% with a = [y], b = 2 * [1] %}{{ b + a | list }}{% endwith %}",
        "{% macro m(a, b=[y], c={}) %}{{ a[0] }}{{ b|length }}{% endmacro %}{{ m([7], b=[1, y][1:]) }}",
        "{% macro m(a) %}{{ caller([a]) }}{% endmacro %}{% call(v) m([7]) %}{{ v[0][0] }}{% endcall %}",
        "{% filter upper | replace('A', 'b') %}a{{ [y]|length }}{% endfilter %}",
        "{% set s | trim %} a {% endset %}{{ s }}{% set ns = namespace() %}{% set ns.s | trim %} b {% endset %}{{ ns.s }}",
        "{{ 'é' }}{{ ['ü', y][:1][0] }}{# [#}{% raw %}{{ [{% endraw %}{{ \"[{\" }}",
        "{{ ([1, y] if y else [2, y])[0] + 1 }}{{ 2 * 3 + y|int }}{{ 'ab' * 2 }}{{ [y] * 2 | int }}",
        "{{ 1 + 2 * 3 - 4 // 3 + 2 ** 3 ~ [y][0:]|length }}{{ messages[0].content.split('l')[1:] }}",
        "{{ dict(a=1, **{'b': y}).a }}{{ [*[1]] if false else range(3)[1:] | list }}",
    ] {
        assert_eq!(render(source).ok(), unguarded(source), "{source}");
    }
}

/// The ordinary uses of a namespace stay.
#[test]
fn a_namespace_still_holds_and_returns_plain_values() {
    let source = "{% set ns = namespace(n=0, list=[], seen=false) %}{% set other = namespace(k={'a': [1]}) %}\
        {% for x in 'abc' %}{% set ns.n = ns.n + 1 %}{% set ns.list = ns.list + [{'x': x}] %}\
        {% set ns.seen, y = true, x %}{% endfor %}{% set other.k = ns.list[::-1] %}\
        {{ ns.n }} {{ ns.list }} {{ ns.list|length }} {{ ns.seen }} {{ other.k[0] }} {{ ns }}";
    let list = "[{\"x\": \"a\"}, {\"x\": \"b\"}, {\"x\": \"c\"}]";
    let want = format!("3 {list} 3 True {{\"x\": \"c\"}} {{\"list\": {list}, \"n\": 3, \"seen\": True}}");
    let plain = |text: String| text.replace('\'', "\"").to_lowercase();
    assert_eq!(render(source).map(plain), Ok(want.to_lowercase()));
}

#[test]
fn deep_values_are_refused_before_they_are_walked() {
    let wraps = [
        "[".repeat(20) + "x" + &"]".repeat(20),
        "{'a': [x]}".into(),
        "((x,),)".into(),
        "[x] | list".into(),
        "[x] + [1]".into(),
        "[x] * 2".into(),
        "dict(a=x)".into(),
        "{'a': x}.values()".into(),
        "{'a': x} | items".into(),
        "[x] | batch(1) | list".into(),
    ];
    for wrap in wraps {
        let body = format!("{{% set ns.x = {} %}}", wrap.replace('x', "ns.x"));
        let setup = format!(
            "{{% set ns = namespace(x=1) %}}{{% for i in range(99999) %}}{body}{{% endfor %}}\
             {{% set v = ns.x %}}{{% set w = ns.x %}}"
        );
        let limit = limit(format!("{setup}{{{{ v }}}}"));
        assert!(matches!(limit, TemplateLimit::Recursion | TemplateLimit::Value), "{wrap}: {limit}");
        walk_all(&setup);
    }
}

/// A few lines can describe a value of 2^60 items that takes no memory until it is walked.
#[test]
fn doubling_runs_out_before_memory_does() {
    for double in [
        "x + x",
        "x * 2",
        "[x, x]",
        "(x, x)",
        "{'a': x, 'b': x}",
        "dict(a=x, b=x)",
        "x | list + x | list",
        "x | chain(x) | list",
        "[x, x] | map('list') | list",
        "(x + x)[::-1]",
        "(x + x)[0:]",
        "[x] * 2",
        "x | zip(x) | list",
        "[x] | batch(1) | list + [x]",
        "[x] + [x]",
        "x[:] + x[:]",
        "x + (x if x else x)",
    ] {
        let step = format!("{{% set x = {double} %}}");
        let line = format!("{{% set x = [1, 2] %}}{}", step.repeat(60));
        let inner = double.replace('x', "ns.x");
        let looped = format!(
            "{{% set ns = namespace(x=[1, 2]) %}}{{% for i in range(60) %}}{{% set ns.x = {inner} %}}{{% endfor %}}\
             {{% set x = ns.x %}}"
        );
        let with =
            format!("{}{{{{ x }}}}{}", step.replace("set", "with").repeat(60), "{% endwith %}".repeat(60));
        let passed = format!("{{% macro m(x) %}}{{{{ m({double}) }}}}{{% endmacro %}}{{{{ m([1, 2]) }}}}");
        drop(render(with));
        drop(render(passed));
        for setup in [line, looped] {
            let end = render(format!("{setup}{{{{ x | string | length }}}}"));
            assert!(end.is_err(), "{double}: {end:?}");
        }
    }
    // As large as a value may be.
    for double in ["[x, x]", "x + x", "{'a': x, 'b': x}"] {
        let step =
            |name: &str| format!("{{% set x = {double} %}}").repeat(13) + &format!("{{% set {name} = x %}}");
        let start = "{% set x = [1, 2] %}";
        walk_all(&format!("{start}{}{start}{}", step("v"), step("w")));
    }
}

#[test]
fn one_expression_cannot_make_a_giant() {
    for giant in [
        "[1] * 99999999",
        "99999999 * [1]",
        "[[[1] * 9999] * 9999] * 9999",
        "[1] * 9999 * 9999 * 9999",
        "([1] * 99999999) ~ ''",
        "[1] * 99999999 == [1] * 99999998",
        "1 in [2] * 99999999",
        "(range(99999) | list + range(99999) | list) * 999",
        "'%s%s' | format([1] * 99999999, 1)",
        "'x' * 99999999",
        "'x' * 9999 * 9999",
        "('x' * 50000) | replace('x', 'y' * 50000)",
        "('x' * 50000).replace('x', 'y' * 50000)",
        "(range(99999) | list) | join('y' * 50000)",
        "('y' * 50000).join(range(99999) | map('string') | list)",
        "'x' | indent(99999999999, true)",
        "('\\n' * 50000) | indent(99999, true, true)",
        "'x'.center(99999999999)",
        "'x'.zfill(99999999999)",
        "'x'.ljust(99999999999)",
        "('\\t' * 50000).expandtabs(99999)",
        "'%099999999999d' | format(1)",
        "['x' * 1000000] * 9999",
        "9 ** 99999999",
        "[1] * -1 + [2] * 99999999",
    ] {
        for form in ["{{ X }}", "{% set y = X %}{{ y | string | length }}", "{% if X %}{% endif %}"] {
            let end = render(form.replace('X', giant));
            assert!(end.as_ref().map_or(0, String::len) < 64 << 20, "{giant}");
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
