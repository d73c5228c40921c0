//! The checkpoint's own chat template, rendered as Hugging Face `transformers` renders it.
//!
//! # What is the same
//!
//! `trim_blocks` and `lstrip_blocks` on, one trailing newline of the source dropped, no escaping, loop controls,
//! Python's string and dict methods, `raise_exception`, `strftime_now`, `{% generation %}` blocks (transparent),
//! and `tojson` as `json.dumps(x, ensure_ascii=False)` prints it. The variables are `messages`, `tools` and
//! `documents` (none when not given), `add_generation_prompt`, those of the options that were set, the special
//! tokens of `tokenizer_config.json` (`bos_token`, `eos_token`, ...), and the caller's own.
//!
//! The specification's "compact JSON of each tool" is this `tojson`: one line, but with Python's `", "` and `": "`.
//!
//! # What is not
//!
//! Templates come with downloads, so a render is bounded: a budget of work (instructions and bytes created), of
//! nesting, of source, of output and of every value it makes, each a [`crate::TemplateLimit`] error. Templates cannot
//! include files. Compiling and rendering run on a thread of their own whose stack outlasts what the budget can nest; a
//! panic there would be an error here. A namespace cannot be put inside a list, a dict or another namespace, which
//! makes cyclic values impossible, and there is no `debug` function. `strftime_now` has no time zone database: see
//! [`RenderOptions::now`].

mod clock;
mod env;
mod guard;
mod json;
mod message;
mod rewrite;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

pub use self::message::Message;
use crate::Error;
use crate::error::utf8;

const CONFIG: &str = "tokenizer_config.json";
/// The name of an unnamed template, as in `transformers`.
const DEFAULT: &str = "default";
/// The named template that `transformers` prefers when there are tools.
const TOOL_USE: &str = "tool_use";
/// The detail of our own nesting errors.
const TOO_DEEP: &str = "recursion limit exceeded";
/// The detail of our own size errors.
const VALUE_TOO_LARGE: &str = "a list, dict or namespace is too large";
/// Largest source: the shipped template has 9 KB.
const MAX_SOURCE: usize = 64 << 10;
/// Most code in one tag, string literals not counted: the compiler is quadratic in an operator chain.
const MAX_TAG: usize = 2 << 10;

/// How much one render may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Instructions, plus one for each 64 bytes created or read, before any allowance for input.
    pub fuel: u64,
    /// Output bytes, before the allowance of eight bytes for each byte of input.
    pub output: usize,
    /// Nesting of blocks (1 each), macros and includes (10 and more each).
    pub recursion: usize,
}

impl Default for Limits {
    /// Several hundred times what a long conversation needs, and a fraction of a second when used up.
    fn default() -> Self {
        Self { fuel: 1_000_000, output: 16 << 20, recursion: 200 }
    }
}

/// The reasoning efforts that the template knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningEffort {
    /// `low`
    Low,
    /// `medium`
    Medium,
    /// `xhigh`, the template's default
    XHigh,
}

impl ReasoningEffort {
    /// The template's name for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::XHigh => "xhigh",
        }
    }
}

/// The variables of one render, beside the messages.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// End with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// `enable_thinking`; undefined when `None`, and the template's default holds.
    pub enable_thinking: Option<bool>,
    /// `reasoning_effort`; undefined when `None`.
    pub reasoning_effort: Option<ReasoningEffort>,
    /// `preserve_thinking`; undefined when `None`.
    pub preserve_thinking: Option<bool>,
    /// Tool definitions, as the client sent them. An empty list is the same as none.
    pub tools: Vec<Value>,
    /// Further variables (`chat_template_kwargs`). They win over the fields above but cannot replace `messages`,
    /// `tools` or `add_generation_prompt`.
    pub extra: Map<String, Value>,
    /// What `strftime_now` shows, in seconds since 1970; add the offset of the wanted time zone. `None` is the
    /// system clock in UTC.
    pub now: Option<i64>,
}

impl RenderOptions {
    /// Options for a chat request: an assistant turn is opened, the rest is the template's default.
    pub fn chat() -> Self {
        Self { add_generation_prompt: true, ..Self::default() }
    }

    /// Sets effort and thinking from an OpenAI `reasoning_effort`.
    ///
    /// The template takes `low`, `medium` and `xhigh` and raises on others, so `high` and `max` become `xhigh`,
    /// `minimal` becomes `low`, and `none` turns thinking off. Anything else is an error that lists these.
    pub fn set_openai_effort(&mut self, effort: &str) -> Result<(), Error> {
        let effort = match effort {
            "none" => {
                self.enable_thinking = Some(false);
                return Ok(());
            }
            "minimal" | "low" => ReasoningEffort::Low,
            "medium" => ReasoningEffort::Medium,
            "high" | "xhigh" | "max" => ReasoningEffort::XHigh,
            other => {
                let detail = format!("{other:?} is not one of none, minimal, low, medium, high, xhigh, max");
                return Err(Error::Option { option: "reasoning_effort".into(), detail });
            }
        };
        self.reasoning_effort = Some(effort);
        Ok(())
    }
}

/// A compiled chat template, or several by name. Shareable between threads.
pub struct ChatTemplate {
    env: minijinja::Environment<'static>,
    names: Vec<String>,
    /// Special tokens as variables.
    globals: BTreeMap<String, String>,
    limits: Limits,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("names", &self.names).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles one template.
    pub fn new(source: &str, limits: Limits) -> Result<Self, Error> {
        Self::compile(vec![(DEFAULT.to_string(), source.to_string())], BTreeMap::new(), limits)
    }

    /// Compiles the template of a checkpoint: `chat_template.jinja` if there is one, else the `chat_template` of
    /// `tokenizer_config.json`, which is a string or a list of `{"name", "template"}`. The config's special tokens
    /// become variables either way.
    pub fn from_files(jinja: Option<&[u8]>, tokenizer_config_json: Option<&[u8]>) -> Result<Self, Error> {
        let config = match tokenizer_config_json {
            Some(bytes) => serde_json::from_str(utf8(CONFIG, bytes)?)
                .map_err(|e| Error::File { what: CONFIG, detail: e.to_string() })?,
            None => Map::new(),
        };
        let sources = match jinja {
            Some(bytes) => vec![(DEFAULT.to_string(), utf8("chat_template.jinja", bytes)?.to_string())],
            None => config_sources(config.get("chat_template"))?,
        };
        let globals = config.iter().filter_map(|(key, value)| Some((key.clone(), token_text(key, value)?)));
        Self::compile(sources, globals.collect(), Limits::default())
    }

    fn compile(
        sources: Vec<(String, String)>,
        globals: BTreeMap<String, String>,
        limits: Limits,
    ) -> Result<Self, Error> {
        for (name, source) in &sources {
            env::check_source(name, source)?;
        }
        let names = sources.iter().map(|(name, _)| name.clone()).collect();
        let env = env::on_deep_stack(|| env::compile(sources, limits.recursion))??;
        Ok(Self { env, names, globals, limits })
    }

    /// The names of the templates, in the order of the file.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Renders a conversation to the text of a prompt.
    ///
    /// Of several templates, `tool_use` renders when there are tools, `default` otherwise.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, Error> {
        let context = self.context(messages, options)?;
        let name = self.pick(!options.tools.is_empty())?;
        env::on_deep_stack(|| env::render(&self.env, name, &context, options.now, self.limits))?
    }

    fn pick(&self, tools: bool) -> Result<&str, Error> {
        let has = |name: &str| self.names.iter().find(|n| *n == name);
        let found = if tools { has(TOOL_USE).or_else(|| has(DEFAULT)) } else { has(DEFAULT) };
        let detail = || format!("the file names {:?} but none is called {DEFAULT:?}", self.names);
        found.map(String::as_str).ok_or_else(|| Error::NoTemplate { detail: detail() })
    }

    fn context(&self, messages: &[Message], options: &RenderOptions) -> Result<Map<String, Value>, Error> {
        let mut context = Map::new();
        for (name, token) in &self.globals {
            context.insert(name.clone(), token.clone().into());
        }
        context.insert("documents".into(), Value::Null);
        if let Some(on) = options.enable_thinking {
            context.insert("enable_thinking".into(), on.into());
        }
        if let Some(effort) = options.reasoning_effort {
            context.insert("reasoning_effort".into(), effort.as_str().into());
        }
        if let Some(on) = options.preserve_thinking {
            context.insert("preserve_thinking".into(), on.into());
        }
        for (name, value) in &options.extra {
            let refuse =
                |detail: String| Error::Option { option: format!("template variable {name:?}"), detail };
            if matches!(name.as_str(), "messages" | "tools" | "add_generation_prompt") {
                return Err(refuse("is set by the request itself; leave it out".into()));
            }
            message::check_depth(value, message::MAX_DEPTH).map_err(refuse)?;
            context.insert(name.clone(), value.clone());
        }
        for (i, tool) in options.tools.iter().enumerate() {
            message::check_depth(tool, message::MAX_DEPTH)
                .map_err(|detail| Error::Option { option: format!("tools[{i}]"), detail })?;
        }
        let tools = if options.tools.is_empty() { Value::Null } else { options.tools.clone().into() };
        context.insert("tools".into(), tools);
        let list: Result<Vec<Value>, Error> =
            messages.iter().enumerate().map(|(i, message)| message.for_template(i)).collect();
        context.insert("messages".into(), list?.into());
        context.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
        Ok(context)
    }
}

/// The templates in a config's `chat_template`.
fn config_sources(field: Option<&Value>) -> Result<Vec<(String, String)>, Error> {
    let bad = |detail: &str| Error::File { what: CONFIG, detail: format!("chat_template: {detail}") };
    match field {
        None | Some(Value::Null) => Err(Error::NoTemplate {
            detail:
                "the checkpoint has neither chat_template.jinja nor a chat_template in tokenizer_config.json"
                    .into(),
        }),
        Some(Value::String(source)) => Ok(vec![(DEFAULT.to_string(), source.clone())]),
        Some(Value::Array(list)) => list
            .iter()
            .map(|entry| match (entry["name"].as_str(), entry["template"].as_str()) {
                (Some(name), Some(source)) => Ok((name.to_string(), source.to_string())),
                _ => Err(bad("every entry of the list needs a name and a template")),
            })
            .collect(),
        Some(_) => Err(bad("must be a string or a list")),
    }
}

/// The text of `eos_token` and its like: a string, or an object with `content`.
fn token_text(key: &str, value: &Value) -> Option<String> {
    let text = value.as_str().or_else(|| value["content"].as_str())?;
    key.ends_with("_token").then(|| text.to_string())
}

/// Where one prompt stops being a prefix of the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixBreak {
    /// Byte offset of the first differing character.
    pub byte: usize,
    /// 1-based line of it.
    pub line: usize,
    /// Up to 40 characters of the earlier prompt from there.
    pub before: String,
    /// Up to 40 characters of the later prompt from there.
    pub after: String,
}

/// The first place where `later` does not continue `earlier`; `None` if it does.
///
/// A prompt cache reuses exactly the common prefix, so this names what a template does to it.
pub fn prefix_break(earlier: &str, later: &str) -> Option<PrefixBreak> {
    let same = earlier.char_indices().zip(later.chars()).take_while(|&((_, a), b)| a == b);
    let byte = same.last().map_or(0, |((at, c), _)| at + c.len_utf8());
    if byte == earlier.len() {
        return None;
    }
    let cut = |text: &str| text[byte..].chars().take(40).collect();
    Some(PrefixBreak {
        byte,
        line: earlier[..byte].matches('\n').count() + 1,
        before: cut(earlier),
        after: cut(later),
    })
}
