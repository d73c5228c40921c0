//! The Jinja environment: what `transformers` sets up, and the limits.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::functions;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value};

use super::guard::Guard;
use super::rewrite::{self, GUARD, Refusal, STORE};
use super::{Limits, MAX_SOURCE, MAX_TAG, TOO_DEEP, VALUE_TOO_LARGE, clock, json};
use crate::{Error, TemplateLimit};

/// Address space, not memory: pages are taken when touched.
const STACK: usize = 512 << 20;

/// Runs `work` on a thread whose stack outlasts the deepest syntax tree and the deepest value that the limits allow.
///
/// The parser recurses over `elif` chains, the compiler over operator chains, and dropping a value recurses over its
/// nesting; none of that is bounded by the engine's own recursion limit.
pub(super) fn on_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    let thread = std::thread::Builder::new().name("chat-template".into()).stack_size(STACK);
    let failed = |detail: String| Error::TemplateRender { template: String::new(), line: 0, detail };
    std::thread::scope(|scope| {
        let handle = thread
            .spawn_scoped(scope, work)
            .map_err(|e| failed(format!("no thread to run it on ({e}); free memory or raise limits")))?;
        handle.join().map_err(|_| failed("the template engine panicked; report the template".into()))
    })
}

/// The message of a `raise_exception`, carried through the engine's error chain.
#[derive(Debug)]
struct Raised(String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// Refuses sources that would take the compiler long.
pub(super) fn check_source(name: &str, source: &str) -> Result<(), Error> {
    let refuse = |line: usize, detail: String| {
        Err(Error::TemplateLimit { template: name.to_string(), line, limit: TemplateLimit::Source, detail })
    };
    if source.len() > MAX_SOURCE {
        return refuse(0, format!("{} bytes, the limit is {MAX_SOURCE}", source.len()));
    }
    let bytes = source.as_bytes();
    let mut at = 0;
    while let Some(open) = source[at..].find('{').map(|n| at + n) {
        at = match bytes.get(open + 1) {
            Some(b'#') => source[open..].find("#}").map_or(bytes.len(), |n| open + n + 2),
            Some(b'{' | b'%') => {
                let (end, code) = tag(bytes, open + 2);
                if code > MAX_TAG {
                    let line = source[..open].matches('\n').count() + 1;
                    return refuse(line, format!("{code} bytes of code in one tag, the limit is {MAX_TAG}"));
                }
                end
            }
            _ => open + 1,
        };
    }
    Ok(())
}

/// Where the tag whose content starts at `at` ends, and how many bytes of it are outside string literals.
fn tag(bytes: &[u8], mut at: usize) -> (usize, usize) {
    let close = if bytes[at - 1] == b'%' { b'%' } else { b'}' };
    let (mut code, mut quote, mut braces) = (0, None, 0usize);
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(q), b) if b == q => quote = None,
            (Some(_), _) => {}
            (None, b @ (b'"' | b'\'')) => quote = Some(b),
            (None, b) if b == close && braces == 0 && bytes.get(at + 1) == Some(&b'}') => {
                return (at + 2, code);
            }
            (None, b'{') => (code, braces) = (code + 1, braces + 1),
            (None, b'}') => (code, braces) = (code + 1, braces.saturating_sub(1)),
            (None, _) => code += 1,
        }
        at += 1;
    }
    (bytes.len(), code)
}

/// An environment with these templates.
pub(super) fn compile(
    sources: Vec<(String, String)>,
    recursion: usize,
) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    let syntax = syntax.map_err(|e| translate("", &e))?;
    env.set_syntax(syntax.clone());
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_recursion_limit(recursion);
    env.set_debug(false);
    // `debug` prints the whole state, which nothing bounds; `transformers` has no such function.
    env.remove_global("debug");
    env.add_filter("tojson", json::tojson);
    env.add_function("raise_exception", |message: Value| -> Result<Value, minijinja::Error> {
        let message = message.to_string();
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    for (name, source) in sources {
        let source = without_generation(&source);
        let source = rewrite::guarded(&name, &source, &syntax).map_err(|e| refusal(&name, e))?;
        env.add_template_owned(name.clone(), source).map_err(|e| translate(&name, &e))?;
    }
    Ok(env)
}

/// A template that was not rewritten.
fn refusal(name: &str, refusal: Refusal) -> Error {
    let template = name.to_string();
    match refusal {
        Refusal::Syntax(error) => translate(name, &error),
        Refusal::Unguarded(line) => {
            let detail =
                "an expression nests too deeply or cannot be checked; write it in several steps".into();
            Error::TemplateLimit { template, line, limit: TemplateLimit::Recursion, detail }
        }
        Refusal::Reserved(word) => {
            Error::TemplateSyntax { template, line: 0, detail: format!("{word} is a reserved name") }
        }
    }
}

/// The filters, functions and methods through which every growing value passes.
fn add_guard(env: &mut Environment<'static>, guard: &Guard) {
    let g = guard.clone();
    env.add_filter(GUARD, move |value: &Value| g.admit(value));
    let g = guard.clone();
    env.add_filter(STORE, move |value: &Value, namespace: &Value, name: &str| {
        g.store(value, namespace, name)
    });
    let g = guard.clone();
    env.add_function("namespace", move |values: Option<ValueOrKwargs>| g.made(functions::namespace(values)?));
    let g = guard.clone();
    env.add_function("dict", move |values: Option<Value>, more: Kwargs| {
        g.made(functions::dict(values, more)?)
    });
    let g = guard.clone();
    env.set_unknown_method_callback(move |state, value, method, args| {
        g.admit(&minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)?)
    });
}

/// Replaces `{% generation %}` and `{% endgeneration %}`, which mark the assistant's tokens for training, by a
/// condition that always holds: same whitespace, same lines.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (head, tail) = rest.split_at(at);
        out.push_str(head);
        let end = tail.find("%}").map_or(tail.len(), |n| n + 2);
        let (tag, after) = tail.split_at(end);
        let name = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match name {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out + rest
}

/// Renders within the limits.
pub(super) fn render(
    env: &Environment<'static>,
    name: &str,
    context: &serde_json::Map<String, serde_json::Value>,
    now: Option<i64>,
    limits: Limits,
) -> Result<String, Error> {
    let input: usize = context.values().map(size).sum();
    let mut env = env.clone();
    // A byte of input is worth 16 bytes of copying; a small value a few instructions.
    env.set_fuel(Some(limits.fuel.saturating_add(input as u64 / 4)));
    add_guard(&mut env, &Guard::new(input));
    env.add_function("strftime_now", move |format: &str| {
        let now = now.unwrap_or_else(system_clock);
        clock::strftime(now, format).map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e))
    });
    let mut out = Bounded { bytes: Vec::new(), limit: limits.output.saturating_add(input.saturating_mul(8)) };
    let template = env.get_template(name).map_err(|e| translate(name, &e))?;
    template.render_captured_to(Value::from(Serde(context)), &mut out).map_err(|e| translate(name, &e))?;
    String::from_utf8(out.bytes).map_err(|e| Error::TemplateRender {
        template: name.to_string(),
        line: 0,
        detail: e.to_string(),
    })
}

fn system_clock() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64)
}

/// Bytes of text in a value, and a few for each item.
fn size(value: &serde_json::Value) -> usize {
    use serde_json::Value as J;
    32 + match value {
        J::String(s) => s.len(),
        J::Array(items) => items.iter().map(size).sum(),
        J::Object(map) => map.iter().map(|(k, v)| k.len() + size(v)).sum(),
        _ => 0,
    }
}

/// Output that refuses to grow past its limit.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
}

/// Marks our own write error.
const TOO_LARGE: &str = "output limit exceeded";

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.limit {
            return Err(io::Error::other(TOO_LARGE));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The engine's error as ours. The innermost cause decides: an include wraps what went wrong inside it.
fn translate(name: &str, error: &minijinja::Error) -> Error {
    let mut inner = error;
    let mut cause: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(error);
    while let Some(next) = cause {
        if let Some(Raised(message)) = next.downcast_ref::<Raised>() {
            return Error::TemplateRaised { message: message.clone() };
        }
        inner = next.downcast_ref::<minijinja::Error>().unwrap_or(inner);
        cause = next.source();
    }
    let template = inner.name().or(error.name()).unwrap_or(name).to_string();
    let line = inner.line().or(error.line()).unwrap_or(0);
    let detail = match inner.detail() {
        Some(detail) => format!("{}: {detail}", inner.kind()),
        None => inner.kind().to_string(),
    };
    if inner.kind() == ErrorKind::SyntaxError {
        return Error::TemplateSyntax { template, line, detail };
    }
    match limit_of(inner) {
        Some(limit) => Error::TemplateLimit { template, line, limit, detail },
        None => Error::TemplateRender { template, line, detail },
    }
}

fn limit_of(error: &minijinja::Error) -> Option<TemplateLimit> {
    match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => Some(TemplateLimit::Fuel),
        (ErrorKind::WriteFailure, _) => Some(TemplateLimit::Output),
        (_, Some(TOO_DEEP)) => Some(TemplateLimit::Recursion),
        (_, Some(VALUE_TOO_LARGE)) => Some(TemplateLimit::Value),
        (_, Some("range has too many elements")) => Some(TemplateLimit::Range),
        _ => None,
    }
}
