//! When a reply ends, and why it did.

/// The token ids that end a reply.
///
/// A checkpoint names them in two files, and each can be incomplete: in chat the turn ends with an id that only
/// `generation_config.json` lists. So the set is the union of both, and of what the request adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopIds {
    checkpoint: Vec<u32>,
    extra: Vec<u32>,
    ignore_eos: bool,
}

impl StopIds {
    /// The union of the end ids of `generation_config.json` and of `config.json`, in either order. An absent
    /// list is an empty one; a single id is a list of one.
    #[must_use]
    pub fn new(generation_config: &[u32], config: &[u32]) -> Self {
        Self { checkpoint: union(generation_config, config), extra: Vec::new(), ignore_eos: false }
    }

    /// Adds the ids of one request.
    #[must_use]
    pub fn with_extra(mut self, ids: &[u32]) -> Self {
        self.extra = union(&self.extra, ids);
        self
    }

    /// With `true`, the checkpoint's ids no longer end the reply. The request's own ids still do.
    #[must_use]
    pub fn ignore_eos(mut self, ignore: bool) -> Self {
        self.ignore_eos = ignore;
        self
    }

    /// Whether this id ends the reply.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        (!self.ignore_eos && self.checkpoint.binary_search(&id).is_ok())
            || self.extra.binary_search(&id).is_ok()
    }

    /// Every id that ends the reply, rising, each once.
    #[must_use]
    pub fn ids(&self) -> Vec<u32> {
        union(if self.ignore_eos { &[] } else { &self.checkpoint }, &self.extra)
    }
}

fn union(a: &[u32], b: &[u32]) -> Vec<u32> {
    let mut all = [a, b].concat();
    all.sort_unstable();
    all.dedup();
    all
}

/// Why a reply ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// This stop id was generated. It is the last token of the reply.
    Stop {
        /// One of [`StopIds::ids`].
        id: u32,
    },
    /// This stop string appeared in the text.
    StopString {
        /// The string, as the request gave it.
        text: String,
    },
    /// The token limit of the request or the last position of the model was reached.
    Length,
    /// The caller gave up.
    Cancelled,
    /// The stream failed; no other stream is affected.
    Error {
        /// What to tell the caller.
        message: String,
    },
}

impl FinishReason {
    /// One word for a protocol or a log: `stop`, `length`, `cancelled` or `error`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Stop { .. } | Self::StopString { .. } => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Error { .. } => "error",
        }
    }
}

impl std::fmt::Display for FinishReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stop { id } => write!(f, "stop id {id}"),
            Self::StopString { text } => write!(f, "stop string {text:?}"),
            Self::Length => f.write_str("length"),
            Self::Cancelled => f.write_str("cancelled"),
            Self::Error { message } => write!(f, "error: {message}"),
        }
    }
}
