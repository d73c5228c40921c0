//! `tojson` as Python prints it.
//!
//! The chat templates were written for `json.dumps(x, ensure_ascii=False)`: `", "` and `": "` between items on one
//! line (that is what "compact" means there), keys in their own order, nothing escaped but quotes, backslashes and
//! control characters, floats in Python's spelling. With `indent` the item separator is a bare `","`, as in Python.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Nesting that Python's encoder would refuse somewhere above; ours is set by what JSON input can hold.
const MAX_DEPTH: usize = 128;

/// How to lay out the text.
struct Style {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
}

/// The `tojson` filter, with the keyword arguments that `transformers` gives it.
pub(super) fn tojson(
    state: &State,
    value: &Value,
    positional: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let mut style = Style {
        indent: None,
        item: ", ".to_string(),
        key: ": ".to_string(),
        // The first positional argument is ensure_ascii, as in the Python function.
        ascii: match positional {
            Some(value) => value.is_true(),
            None => kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        },
        sort: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    if let Some(indent) = kwargs.get::<Option<Value>>("indent")?.filter(|v| !v.is_none()) {
        style.indent = Some(indent_text(&indent)?);
        style.item = ",".to_string();
    }
    if let Some(pair) = kwargs.get::<Option<Value>>("separators")?.filter(|v| !v.is_none()) {
        let parts: Vec<Value> = pair.try_iter()?.collect();
        let [item, key] = &parts[..] else {
            return Err(invalid("tojson: separators must be a pair of strings"));
        };
        (style.item, style.key) = (item.to_string(), key.to_string());
    }
    kwargs.assert_all_used()?;
    let mut out = String::new();
    write(state, value, &style, 0, &mut out)?;
    Ok(Value::from(out))
}

fn invalid(detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail.into())
}

fn indent_text(indent: &Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str() {
        return Ok(text.to_string());
    }
    match indent.as_i64() {
        Some(n) if n <= 64 => Ok(" ".repeat(n.max(0) as usize)),
        _ => Err(invalid("tojson: indent must be a string or a number up to 64")),
    }
}

fn write(state: &State, value: &Value, style: &Style, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(invalid(super::TOO_DEEP));
    }
    let before = out.len();
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
        ValueKind::Number => out.push_str(&float(f64::try_from(value.clone())?)),
        ValueKind::String => string(value.as_str().unwrap_or_default(), style.ascii, out),
        ValueKind::Seq | ValueKind::Iterable => sequence(state, value, style, depth, out)?,
        ValueKind::Map => map(state, value, style, depth, out)?,
        ValueKind::Undefined => {
            return Err(Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
        }
        kind => return Err(invalid(format!("tojson: a {kind} is not JSON serialisable"))),
    }
    // Eight bytes a unit: writing JSON is slower than copying.
    state.consume_fuel(((out.len() - before) / 8) as u64 + 1)
}

fn sequence(
    state: &State,
    value: &Value,
    style: &Style,
    depth: usize,
    out: &mut String,
) -> Result<(), Error> {
    let mut empty = true;
    out.push('[');
    for item in value.try_iter()? {
        separate(style, depth + 1, empty, out);
        empty = false;
        write(state, &item, style, depth + 1, out)?;
    }
    close(style, depth, empty, ']', out);
    Ok(())
}

fn map(state: &State, value: &Value, style: &Style, depth: usize, out: &mut String) -> Result<(), Error> {
    let mut keys: Vec<Value> = value.try_iter()?.collect();
    if style.sort {
        keys.sort();
    }
    out.push('{');
    for (i, key) in keys.iter().enumerate() {
        separate(style, depth + 1, i == 0, out);
        string(&key_text(key)?, style.ascii, out);
        out.push_str(&style.key);
        write(state, &value.get_item(key)?, style, depth + 1, out)?;
    }
    close(style, depth, keys.is_empty(), '}', out);
    Ok(())
}

/// Python turns scalar keys into strings and refuses others.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.to_string()),
        ValueKind::None => Ok("null".to_string()),
        ValueKind::Bool => Ok(key.is_true().to_string()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(float(f64::try_from(key.clone())?)),
        kind => Err(invalid(format!("tojson: a {kind} cannot be a key"))),
    }
}

fn separate(style: &Style, depth: usize, first: bool, out: &mut String) {
    if !first {
        out.push_str(&style.item);
    }
    line(style, depth, out);
}

fn close(style: &Style, depth: usize, empty: bool, bracket: char, out: &mut String) {
    if !empty {
        line(style, depth, out);
    }
    out.push(bracket);
}

fn line(style: &Style, depth: usize, out: &mut String) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        (0..depth).for_each(|_| out.push_str(indent));
    }
}

fn string(text: &str, ascii: bool, out: &mut String) {
    use std::fmt::Write;
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// A float as Python's `repr` spells it: shortest digits, an exponent of at least two digits below 1e-4 and from
/// 1e16 on, always a point or an exponent.
pub(super) fn float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_string();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_string();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{x}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

#[cfg(test)]
mod tests {
    use super::float;

    #[test]
    fn floats_are_spelled_as_python_spells_them() {
        let cases: [(f64, &str); 14] = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
            (123456789.125, "123456789.125"),
            (5e-324, "5e-324"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ];
        for (x, text) in cases {
            assert_eq!(float(x), text);
        }
    }
}
