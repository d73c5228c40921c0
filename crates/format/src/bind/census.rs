//! What a census finds and how it is told.

use crate::tensors::Shard;
use crate::{Error, ErrorKind};

/// The part of the model that a tensor belongs to. The order is that of the inventory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Embedding,
    Head,
    Hyper,
    Gdn,
    Attention,
    MoeDense,
    Experts,
    Ple,
    Table,
    Draft,
    Vision,
    Ignored,
    Other,
}

impl Part {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Head => "output head",
            Self::Hyper => "hyper-connections",
            Self::Gdn => "gated deltanet",
            Self::Attention => "attention and indexer",
            Self::MoeDense => "routers and shared experts",
            Self::Experts => "routed experts",
            Self::Ple => "n-gram layers",
            Self::Table => "n-gram table",
            Self::Draft => "draft head",
            Self::Vision => "vision (ignored)",
            Self::Ignored => "without effect (ignored)",
            Self::Other => "other",
        }
    }
}

/// Where a used tensor belongs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    pub(crate) part: Part,
    pub(crate) format: &'static str,
}

/// A sort of finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Problem {
    Missing,
    Unexpected,
    Shape,
    Dtype,
}

const PROBLEMS: [(Problem, &str); 4] = [
    (Problem::Missing, "missing"),
    (Problem::Unexpected, "unexpected"),
    (Problem::Shape, "of the wrong shape"),
    (Problem::Dtype, "of the wrong dtype"),
];

/// Findings of each sort printed in the message.
const PRINTED: usize = 8;
/// Findings of each sort kept for [`Error::details`]; all are counted.
const KEPT: usize = 100_000;

#[derive(Debug, Default)]
pub(super) struct Findings {
    counts: [usize; 4],
    lists: [Vec<String>; 4],
}

impl Findings {
    pub(super) fn add(&mut self, problem: Problem, text: impl FnOnce() -> String) {
        let slot = problem as usize;
        self.counts[slot] += 1;
        if self.lists[slot].len() < KEPT {
            self.lists[slot].push(text());
        }
    }

    /// One error for all findings; `None` when there are none.
    pub(super) fn into_error(self, shards: &[Shard]) -> Option<Error> {
        if self.counts == [0; 4] {
            return None;
        }
        let mut message = String::from("the tensors do not match config.json:");
        let mut details = Vec::new();
        for (problem, word) in PROBLEMS {
            let slot = problem as usize;
            let count = self.counts[slot];
            if count == 0 {
                continue;
            }
            let list = &self.lists[slot];
            let shown = &list[..list.len().min(PRINTED)];
            message.push_str(&format!("\n  {count} {word}: {}", shown.join(", ")));
            if count > shown.len() {
                message.push_str(&format!(", and {} more", count - shown.len()));
            }
            details.extend(list.iter().map(|text| format!("{word}: {text}")));
        }
        let files: Vec<&str> = shards.iter().map(|s| s.name.as_str()).take(PRINTED).collect();
        message.push_str(&format!(
            "\n{} safetensors file(s) were read ({}{}); check that all are complete and belong to this config.json",
            shards.len(),
            files.join(", "),
            if shards.len() > files.len() { ", ..." } else { "" }
        ));
        Some(Error::new(ErrorKind::Census, message).with_details(details))
    }
}
