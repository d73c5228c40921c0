//! How a model is opened.

use castiron_exec::{Activations, ExpertActivations, Level};
use castiron_format::TableMode;

/// Row cache of a file-backed n-gram table unless asked otherwise, in bytes.
const TABLE_CACHE_BYTES: usize = 64 << 20;

/// Choices made once, when a model is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rounding of operands and caches.
    pub activations: Activations,
    /// Products of NVFP4 experts; `None` does as the checkpoint declares.
    pub experts: Option<ExpertActivations>,
    /// The instruction set; bytes do not depend on it.
    pub level: Level,
    /// Threads of the kernels; 0 takes every processor. Bytes do not depend on it.
    pub threads: usize,
    /// Where the n-gram table lives.
    pub table: TableMode,
    /// Streams at once.
    pub streams: usize,
    /// Tokens of context; `None` takes the checkpoint's own.
    pub context: Option<u32>,
    /// A fault to compute with, so that what finds faults can be tested.
    #[doc(hidden)]
    pub fault: Option<PlantedFault>,
}

/// One order changed on purpose: the residual write after the experts of `layer` rounds its product before it
/// adds, in calls of at least `rows` rows.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlantedFault {
    /// The layer.
    pub layer: usize,
    /// The least rows of a call that is changed.
    pub rows: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            activations: Activations::Bf16,
            experts: None,
            level: Level::detect(),
            threads: 0,
            table: TableMode::File { cache_bytes: TABLE_CACHE_BYTES },
            streams: 1,
            context: None,
            fault: None,
        }
    }
}
