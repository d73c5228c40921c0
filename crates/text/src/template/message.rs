//! Chat messages as templates want them.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::Error;

/// Nesting allowed in messages, tools and variables: what `serde_json` itself accepts from a client.
pub(super) const MAX_DEPTH: usize = 128;

/// One message, in the shape of the OpenAI API. Unknown fields are kept and given to the template.
///
/// A field that the client left out stays undefined in the template; one that it sent as `null` is none there.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`; the template decides what else it takes.
    pub role: String,
    /// A string, or a list of parts (`{"type": "text", "text": ...}`), or null.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub content: Option<Value>,
    /// The think block of an assistant message.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<Value>,
    /// Tool calls of an assistant message: `{"function": {"name", "arguments"}}` or the flat `{"name", "arguments"}`.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
    /// Everything else, such as `name` and `tool_call_id`.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// Tells `null` from absent.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

impl Message {
    /// A message of this role and text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(Value::String(content.into())), ..Self::default() }
    }

    /// With a think block.
    pub fn with_reasoning(mut self, reasoning: impl Into<String>) -> Self {
        self.reasoning_content = Some(Value::String(reasoning.into()));
        self
    }

    /// With tool calls, given as a JSON list.
    pub fn with_tool_calls(mut self, calls: Value) -> Self {
        self.tool_calls = Some(calls);
        self
    }

    /// Messages from the JSON list of a request.
    pub fn list(messages: Value) -> Result<Vec<Self>, Error> {
        let Value::Array(list) = messages else {
            return Err(Error::Option { option: "messages".into(), detail: "must be a list".into() });
        };
        let parse = |(index, value): (usize, Value)| {
            if !value.is_object() {
                return Err(Error::Message { index, detail: "must be an object".into() });
            }
            serde_json::from_value(value).map_err(|e| Error::Message { index, detail: e.to_string() })
        };
        list.into_iter().enumerate().map(parse).collect()
    }

    /// The message as the template sees it: arguments of tool calls parsed, depth checked.
    pub(super) fn for_template(&self, index: usize) -> Result<Value, Error> {
        let bad = |detail: String| Error::Message { index, detail };
        let parts =
            self.extra.values().chain(&self.content).chain(&self.reasoning_content).chain(&self.tool_calls);
        for part in parts {
            check_depth(part, MAX_DEPTH).map_err(bad)?;
        }
        let mut value = serde_json::to_value(self).map_err(|e| bad(e.to_string()))?;
        match value.get_mut("tool_calls") {
            None | Some(Value::Null) => {}
            Some(Value::Array(calls)) => {
                for (i, call) in calls.iter_mut().enumerate() {
                    parse_call(call).map_err(|detail| bad(format!("tool_calls[{i}]{detail}")))?;
                }
            }
            Some(_) => return Err(bad("tool_calls must be a list".into())),
        }
        Ok(value)
    }
}

/// Refuses values that would need deep recursion to walk.
pub(super) fn check_depth(value: &Value, left: usize) -> Result<(), String> {
    if left == 0 {
        return Err(format!("nests deeper than {MAX_DEPTH} levels"));
    }
    match value {
        Value::Array(items) => items.iter().try_for_each(|v| check_depth(v, left - 1)),
        Value::Object(map) => map.values().try_for_each(|v| check_depth(v, left - 1)),
        _ => Ok(()),
    }
}

/// Makes `arguments` an object: clients send it as a JSON string.
fn parse_call(call: &mut Value) -> Result<(), String> {
    let (place, call) = match call {
        Value::Object(map) => match map.contains_key("function") {
            true => (".function", map.get_mut("function").and_then(Value::as_object_mut)),
            false => ("", Some(map)),
        },
        _ => ("", None),
    };
    let Some(call) = call else {
        return Err(format!("{place} must be an object"));
    };
    if !call.get("name").is_some_and(Value::is_string) {
        return Err(format!("{place}.name must be a string"));
    }
    let object = match call.get("arguments") {
        Some(Value::Object(_)) => return Ok(()),
        // As other servers: a call without arguments is a call with none.
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|e| format!("{place}.arguments is a string but not JSON ({e}); send a JSON object"))?,
        Some(_) => return Err(format!("{place}.arguments must be a JSON object")),
    };
    if !object.is_object() {
        return Err(format!("{place}.arguments must hold a JSON object, not {object}"));
    }
    call.insert("arguments".to_string(), object);
    Ok(())
}
