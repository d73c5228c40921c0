//! Will it fit: the memory of a model, from its headers alone.
//!
//! What the files hold is *mapped*: the system keeps it in memory while there is room and reads it again when
//! there is not. What the program allocates is *resident*. The two are kept apart, because a table in the file
//! must not count and a mapped weight that does not stay in memory is read from the disk for every token.
//!
//! States, caches and snapshots are exact: [`Model::state_bytes`] counts the same bytes in a running model.
//! Decoded vectors and working memory are estimates, on the high side.

use castiron_exec::Activations;
use castiron_format::{Config, Inventory, LayerKind, TableMode};

use crate::paged::PagedRows;
use crate::state::{Cache, LayerState};
use crate::{Error, Model, Slot};

/// The share of a machine's memory that a plan leaves to everything else: one part in this many.
const HEADROOM: u64 = 20;
/// Bytes of bookkeeping for one matrix: its shape, its views and their owners.
const MATRIX_BYTES: u64 = 256;
/// Bytes that the row cache's index needs for one row, beside the row.
const CACHE_INDEX_BYTES: u64 = 64;

/// What is planned for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanRequest {
    /// Tokens of every stream.
    pub context: u32,
    /// Streams at once.
    pub streams: usize,
    /// Where the n-gram table lives.
    pub table: TableMode,
    /// Snapshots of every stream that are held at once.
    pub snapshots: usize,
    /// Prompt rows of one forward pass.
    pub chunk: usize,
    /// Rounding of operands and caches.
    pub activations: Activations,
}

/// How a line of a plan uses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Use {
    /// A view on a file: wanted in memory, given up when there is no room.
    Mapped,
    /// Allocated by the program.
    Resident,
    /// In the files, and not read (or a few rows of it at a time).
    Untouched,
}

impl Use {
    /// `mapped`, `resident` or `untouched`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mapped => "mapped",
            Self::Resident => "resident",
            Self::Untouched => "untouched",
        }
    }
}

/// One line of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanLine {
    /// What it is.
    pub name: String,
    /// How it uses memory.
    pub usage: Use,
    /// Bytes.
    pub bytes: u64,
    /// How the number comes about.
    pub note: String,
}

/// Bytes of one stream's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateBytes {
    /// Keys and values of the attention layers.
    pub kv: u64,
    /// Raw and pooled index keys.
    pub index: u64,
    /// Recurrent states of the Gated DeltaNet layers.
    pub recurrent: u64,
    /// Convolution histories of the Gated DeltaNet and the n-gram layers.
    pub conv: u64,
    /// The n-gram history and the last wide residual.
    pub rest: u64,
}

impl StateBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.kv + self.index + self.recurrent + self.conv + self.rest
    }

    /// What a snapshot copies whole: everything that does not lie in shared pages.
    pub fn copied(&self) -> u64 {
        self.recurrent + self.conv + self.rest
    }
}

/// The memory of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What was planned for.
    pub request: PlanRequest,
    /// Everything, weights first.
    pub lines: Vec<PlanLine>,
    /// Bytes of keys and values for one more token of one stream.
    pub kv_per_token: u64,
    /// Bytes of index keys for one more token of one stream (rounded up).
    pub index_per_token: u64,
    /// The state of one stream at the full context.
    pub state: StateBytes,
    /// One snapshot at most.
    pub snapshot: u64,
}

/// What a machine with so much memory can do with a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Everything stays in memory.
    Fits,
    /// It runs, but weights are read from the disk again and again.
    Thrashes,
    /// What must be allocated is more than there is.
    Fails,
}

impl Plan {
    /// Bytes of all lines of a use.
    pub fn bytes(&self, usage: Use) -> u64 {
        self.lines.iter().filter(|l| l.usage == usage).map(|l| l.bytes).sum()
    }

    /// Bytes wanted in memory.
    pub fn needed(&self) -> u64 {
        self.bytes(Use::Mapped) + self.bytes(Use::Resident)
    }

    /// Whether it fits a machine of `memory` bytes, a twentieth of which is left to everything else.
    pub fn verdict(&self, memory: u64) -> Verdict {
        let memory = memory - memory / HEADROOM;
        if self.needed() <= memory {
            Verdict::Fits
        } else if self.bytes(Use::Resident) <= memory {
            Verdict::Thrashes
        } else {
            Verdict::Fails
        }
    }

    /// The smallest machine it fits.
    pub fn smallest_machine(&self) -> u64 {
        (self.needed() * HEADROOM).div_ceil(HEADROOM - 1)
    }
}

/// Plans the memory of the checkpoint that `config` and `inventory` describe.
pub fn plan(config: &Config, inventory: &Inventory, request: &PlanRequest) -> Plan {
    let state = state_at(config, request, request.context as usize);
    let snapshot = state.copied() + partial_pages(config, request) + config.vocab_size as u64 * 4;
    let element = element_bytes(request.activations);
    let attention = attention_layers(config) as u64;
    let mut lines = weights(inventory, request);
    lines.push(decoded(config, inventory));
    lines.extend(row_cache(config, inventory, request));
    let streams = request.streams as u64;
    let each = |what: &str, one: u64| match streams {
        1 => what.to_owned(),
        n => format!("{what}; {n} streams of {one} bytes"),
    };
    let tokens = format!("{} tokens", request.context);
    for (name, one, note) in [
        ("keys and values", state.kv, tokens.as_str()),
        ("index keys", state.index, tokens.as_str()),
        ("recurrent states", state.recurrent, "Gated DeltaNet layers"),
        ("convolution histories", state.conv + state.rest, "Gated DeltaNet and n-gram layers"),
    ] {
        lines.push(resident(name, one * streams, each(note, one)));
    }
    let snapshots = request.snapshots as u64 * streams;
    lines.push(resident(
        "snapshots",
        snapshot * snapshots,
        format!("{snapshots} of at most {snapshot} bytes"),
    ));
    let chunk = request.chunk.min(request.context as usize);
    lines.push(resident(
        "working memory",
        working(config, request, chunk),
        format!("a prompt chunk of {chunk} rows, estimated"),
    ));
    Plan {
        request: request.clone(),
        lines,
        kv_per_token: attention * 2 * (config.kv_heads * config.head_dim) as u64 * element,
        index_per_token: attention
            * (config.indexer.head_dim as u64 * element * (config.indexer.ratio as u64 + 1))
                .div_ceil(config.indexer.ratio as u64),
        state,
        snapshot,
    }
}

/// What to change so that a plan fits a machine of `memory` bytes, best first; empty when it fits.
pub fn advice(config: &Config, inventory: &Inventory, request: &PlanRequest, memory: u64) -> Vec<String> {
    let fits = |r: &PlanRequest| plan(config, inventory, r).verdict(memory) == Verdict::Fits;
    let mut out = Vec::new();
    if fits(request) {
        return out;
    }
    let file = PlanRequest { table: TableMode::File { cache_bytes: 64 << 20 }, ..request.clone() };
    let saved =
        plan(config, inventory, request).needed().saturating_sub(plan(config, inventory, &file).needed());
    if request.table == TableMode::Memory && saved > 0 {
        let enough = if fits(&file) { "" } else { ", which is not enough alone" };
        out.push(format!("leave the n-gram table in the file (--table file): saves {saved} bytes{enough}"));
    }
    let small = PlanRequest { context: 1, streams: 1, snapshots: 0, chunk: 1, ..file.clone() };
    if !fits(&small) {
        let least = plan(config, inventory, &small).smallest_machine();
        out.push(format!(
            "no setting fits: one stream of one token wants a machine of {least} bytes; take more memory or a \
             checkpoint in smaller formats (castiron quantize)"
        ));
        return out;
    }
    // Each alone, then together with a smaller chunk.
    let context = largest(request.context, |context| fits(&PlanRequest { context, ..file.clone() }));
    out.extend(context.map(|n| format!("a smaller context (--context {n})")));
    let streams =
        largest(request.streams as u32, |n| fits(&PlanRequest { streams: n as usize, ..file.clone() }));
    out.extend(streams.map(|n| format!("fewer streams (--streams {n})")));
    let snapshots =
        (0..request.snapshots).rev().find(|&n| fits(&PlanRequest { snapshots: n, ..file.clone() }));
    out.extend(snapshots.map(|n| format!("fewer snapshots (--snapshots {n}); going back then costs more")));
    if context.is_none() {
        let least = PlanRequest { context: request.context, ..small };
        let context = largest(request.context, |context| fits(&PlanRequest { context, ..least.clone() }));
        let context = context.unwrap_or(request.context);
        out.push(format!("all together: --context {context} --streams 1 --snapshots 0 --chunk 1"));
    }
    out
}

/// The largest number in `1..=most` that fits, by halving.
fn largest(most: u32, fits: impl Fn(u32) -> bool) -> Option<u32> {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    (low > 0).then_some(low)
}

fn resident(name: &str, bytes: u64, note: String) -> PlanLine {
    PlanLine { name: name.to_owned(), usage: Use::Resident, bytes, note }
}

/// A line for each component of the checkpoint.
fn weights(inventory: &Inventory, request: &PlanRequest) -> Vec<PlanLine> {
    let line = |c: &castiron_format::Component| {
        let formats: Vec<&str> = c.formats.iter().map(|f| f.format.as_str()).collect();
        let (usage, why) = match c.name.as_str() {
            "n-gram table" if request.table == TableMode::Memory => (Use::Resident, "read into memory, "),
            "n-gram table" => (Use::Untouched, "stays in the file, rows are read as needed, "),
            "draft head" => (Use::Untouched, "until drafting is asked for, "),
            name if name.contains("(ignored)") || name == "other" => (Use::Untouched, ""),
            _ => (Use::Mapped, ""),
        };
        PlanLine { name: c.name.clone(), usage, bytes: c.bytes, note: format!("{why}{}", formats.join(", ")) }
    };
    inventory.components.iter().map(line).collect()
}

/// Small vectors widened to f32, block scales, and the bookkeeping of every matrix.
fn decoded(c: &Config, inventory: &Inventory) -> PlanLine {
    let wide = c.wide() as u64;
    let layers = c.num_layers as u64 + c.mtp_layers as u64;
    let attention = attention_layers(c) as u64 + c.mtp_layers as u64;
    let gdn = c.num_layers as u64 + c.mtp_layers as u64 - attention;
    let g = &c.gdn;
    let mut floats = (2 * layers + 2) * wide;
    floats += gdn * (c.gdn_channels() * g.conv_kernel + 2 * g.value_heads + g.value_head_dim) as u64;
    floats += attention * (2 * c.head_dim + 2 * c.indexer.head_dim + c.rotary_dim) as u64;
    if let Some(p) = &c.ple {
        floats += p.layers.len() as u64 * wide * (3 + p.conv_kernel as u64);
    }
    floats += c.mtp_layers as u64 * (wide + c.hidden_size as u64);
    let of = |format: &str| -> u64 {
        let formats = inventory.components.iter().flat_map(|c| &c.formats);
        formats.filter(|f| f.format == format).map(|f| f.bytes).sum()
    };
    // One f32 for each block or row of codes, however the file stores it; most rows are about D long.
    let block = (castiron_format::FP8_BLOCK * castiron_format::FP8_BLOCK) as u64;
    let scales = of("fp8-block").div_ceil(block) * 4 + of("fp8-row") * 8 / c.hidden_size as u64;
    let matrices = layers * (3 * (c.moe.experts as u64 + 1) + 16);
    let bytes = floats * 4 + scales + matrices * MATRIX_BYTES;
    resident(
        "decoded vectors and scales",
        bytes,
        "norms, convolutions, block scales as f32, estimated".into(),
    )
}

/// The row caches of a table in the file, one for each n-gram layer.
fn row_cache(config: &Config, inventory: &Inventory, request: &PlanRequest) -> Option<PlanLine> {
    let TableMode::File { cache_bytes } = request.table else { return None };
    let ple = config.ple.as_ref()?;
    let table = inventory.components.iter().find(|c| c.name == "n-gram table")?;
    let element = match table.formats.first().map(|f| f.format.as_str()) {
        Some(f) if f.starts_with("fp8") => 1,
        Some("bf16") => 2,
        _ => 4,
    };
    let row = ple.row_dim() as u64 * element;
    // A cache holds no more rows than its table has.
    let rows = (cache_bytes as u64 / row).min(table.bytes / ple.layers.len() as u64 / row);
    let bytes = ple.layers.len() as u64 * rows * (row + CACHE_INDEX_BYTES);
    Some(resident("row cache", bytes, format!("n-gram rows of {row} bytes with their index, at most")))
}

fn element_bytes(activations: Activations) -> u64 {
    match activations {
        Activations::Bf16 => 2,
        Activations::F32 => 4,
    }
}

fn attention_layers(c: &Config) -> usize {
    c.layer_kinds.iter().filter(|k| **k == LayerKind::Attention).count()
}

/// Bytes of the pages that hold `rows` rows.
fn pages(rows: usize, width: usize, element: u64) -> u64 {
    PagedRows::pages_bytes(rows, width, element)
}

/// The state of a stream of `tokens` tokens, without the draft head's cache.
fn state_at(c: &Config, request: &PlanRequest, tokens: usize) -> StateBytes {
    let element = element_bytes(request.activations);
    let attention = attention_layers(c) as u64;
    let gdn = c.num_layers as u64 - attention;
    let kv = c.kv_heads * c.head_dim;
    let (g, index) = (&c.gdn, c.indexer.head_dim);
    let ple = c.ple.as_ref().map_or((0, 0), |p| {
        let history = (p.conv_kernel - 1) * p.ngram_size;
        (p.layers.len() * history * c.wide(), p.ngram_size - 1)
    });
    StateBytes {
        kv: attention * 2 * pages(tokens, kv, element),
        index: attention * (pages(tokens, index, element) + pages(tokens / c.indexer.ratio, index, element)),
        recurrent: gdn * (g.value_heads * g.key_head_dim * g.value_head_dim * 4) as u64,
        conv: gdn * ((g.conv_kernel - 1) * c.gdn_channels() * 4) as u64 + ple.0 as u64 * 4,
        rest: ple.1 as u64 * 4 + if tokens > 0 { c.wide() as u64 * 4 } else { 0 },
    }
}

/// Pages that a stream copies when it goes on from a snapshot in the middle of them: one of each cache.
fn partial_pages(c: &Config, request: &PlanRequest) -> u64 {
    let one = state_at(c, request, c.indexer.ratio);
    one.kv + one.index
}

/// An estimate of what a forward pass over `rows` rows of one stream at its end allocates at once.
fn working(c: &Config, request: &PlanRequest, rows: usize) -> u64 {
    let (wide, d) = (c.wide(), c.hidden_size);
    let ple_layers = c.ple.as_ref().map_or(0, |p| p.layers.len());
    let embedding = c.ple.as_ref().map_or(0, |p| p.embed_dim) * ple_layers;
    // The residual, the one of the pass before, table rows, one block's input and output.
    let always = 2 * wide + embedding + 3 * d;
    let read = 4 * wide;
    let ple = if ple_layers > 0 { 7 * wide } else { 0 };
    let g = &c.gdn;
    let gdn = 4 * c.gdn_channels() + 3 * g.value_heads * g.value_head_dim;
    let heads = c.heads * c.head_dim;
    let qsa = 6 * heads + 4 * c.kv_heads * c.head_dim + 4 * (c.indexer.heads + 1) * c.indexer.head_dim;
    let m = &c.moe;
    let moe = (m.top_k + 5) * d + m.experts + 3 * m.shared_intermediate.max(m.top_k * m.intermediate);
    let per_row = always + read.max(ple).max(gdn).max(qsa).max(moe);
    let visible = request.context as usize;
    let selected = (c.indexer.budget + c.indexer.ratio).min(visible);
    // Selected keys and values, pooled keys, logits of the last row and their copy.
    let once = 2 * selected * c.head_dim + visible / c.indexer.ratio * c.indexer.head_dim + 2 * c.vocab_size;
    (rows * per_row + once) as u64 * 4
}

impl Model {
    /// Bytes that the committed state of a stream holds in memory, pages shared with snapshots included. The
    /// draft head's cache counts among keys, values and index keys.
    ///
    /// # Errors
    /// The slot is not in use.
    pub fn state_bytes(&self, slot: Slot) -> Result<StateBytes, Error> {
        let state = &self.stream(slot)?.state;
        let mut out = StateBytes::default();
        let cache = |out: &mut StateBytes, c: &Cache| {
            out.kv += c.k.bytes() + c.v.bytes();
            out.index += c.raw.bytes() + c.pooled.bytes();
        };
        let floats = |x: &[f32]| std::mem::size_of_val(x) as u64;
        for layer in &state.layers {
            match layer {
                LayerState::Gdn(g) => {
                    out.recurrent += floats(&g.h);
                    out.conv += floats(&g.conv);
                }
                LayerState::Qsa(c) => cache(&mut out, c),
            }
        }
        if let Some(c) = &state.mtp {
            cache(&mut out, c);
        }
        out.conv += state.ples.iter().map(|p| floats(p)).sum::<u64>();
        out.rest = floats(&state.wide) + std::mem::size_of_val(state.history.as_slice()) as u64;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::largest;

    #[test]
    fn the_largest_that_fits_is_found() {
        for most in [1, 2, 7, 100] {
            for limit in 0..=most {
                assert_eq!(largest(most, |n| n <= limit), (limit > 0).then_some(limit), "{most} {limit}");
            }
        }
    }
}
