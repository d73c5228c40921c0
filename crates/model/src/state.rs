//! The state of a stream, and how it is snapshot, restored and committed.

use std::sync::Arc;

use castiron_exec::{Activations, Exec, GdnRows, GdnShape, Qsa, QsaRows};

use crate::load::{Mixer, Model, Weights};
use crate::paged::PagedRows;
use crate::{Error, FaultKind};

/// A stream's place in a model. Stale handles are recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// Everything a stream was at one length. Cheap to hold: pages are shared until somebody writes.
#[derive(Clone)]
pub struct Snapshot {
    identity: Arc<str>,
    state: State,
}

impl Snapshot {
    /// Tokens of the stream when the snapshot was taken.
    pub fn length(&self) -> u32 {
        self.state.length
    }
}

/// The committed state of a stream.
#[derive(Clone)]
pub(crate) struct State {
    pub(crate) length: u32,
    /// The last ids an n-gram window can see, oldest first, eos before the start.
    pub(crate) history: Vec<u32>,
    pub(crate) layers: Vec<LayerState>,
    /// Convolution history of each n-gram layer, `[history, W]`.
    pub(crate) ples: Vec<Vec<f32>>,
    /// The draft head's own cache.
    pub(crate) mtp: Option<Cache>,
    /// Wide residual of the last committed row, empty before the first.
    pub(crate) wide: Vec<f32>,
}

#[derive(Clone)]
pub(crate) enum LayerState {
    Gdn(GdnState),
    Qsa(Cache),
}

#[derive(Clone)]
pub(crate) struct GdnState {
    /// The last `taps - 1` stored convolution inputs.
    pub(crate) conv: Vec<f32>,
    /// `[value_heads, dk, dv]`.
    pub(crate) h: Arc<Vec<f32>>,
}

/// K, V and index keys of one attention layer.
#[derive(Clone)]
pub(crate) struct Cache {
    pub(crate) k: PagedRows,
    pub(crate) v: PagedRows,
    pub(crate) raw: PagedRows,
    pub(crate) pooled: PagedRows,
}

/// What a window needs until it is kept.
pub(crate) struct Window {
    pub(crate) tokens: Vec<u32>,
    /// For each layer in order, the inputs of a GDN layer's replay.
    pub(crate) gdn: Vec<Option<(Vec<f32>, GdnRows)>>,
    /// For each n-gram layer, its convolution window.
    pub(crate) ples: Vec<Vec<f32>>,
    /// Wide residuals, `[rows, W]`.
    pub(crate) wide: Vec<f32>,
    /// The first row that was not a number.
    pub(crate) fault: Option<(usize, FaultKind)>,
}

/// A stream: its state, an open window, whether it failed.
pub(crate) struct Stream {
    pub(crate) generation: u32,
    pub(crate) state: State,
    pub(crate) window: Option<Window>,
    pub(crate) fault: Option<FaultKind>,
}

impl Cache {
    fn new(qsa: &Qsa, activations: Activations) -> Self {
        let s = &qsa.shape;
        let kv = s.kv_heads * s.head_dim;
        Self {
            k: PagedRows::new(kv, activations),
            v: PagedRows::new(kv, activations),
            raw: PagedRows::new(s.index_dim, activations),
            pooled: PagedRows::new(s.index_dim, activations),
        }
    }

    /// Appends rows `range` of a projection, pooling each block that becomes complete.
    pub(crate) fn append(&mut self, exec: &Exec, w: &Qsa, rows: &QsaRows, range: std::ops::Range<usize>) {
        let s = &w.shape;
        let kv = s.kv_heads * s.head_dim;
        for r in range {
            self.k.push(&rows.k[r * kv..(r + 1) * kv]);
            self.v.push(&rows.v[r * kv..(r + 1) * kv]);
            self.raw.push(&rows.raw[r * s.index_dim..(r + 1) * s.index_dim]);
            let len = self.raw.len();
            if len.is_multiple_of(s.ratio) {
                let block = self.raw.rows(len - s.ratio, len);
                self.pooled.push(&exec.qsa_pool(w, &block, (len / s.ratio - 1) as u32));
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.k.len()
    }

    /// Drops the tokens from `len` on; K, V, raw and pooled keys together.
    pub(crate) fn truncate(&mut self, len: usize, ratio: usize) {
        self.k.truncate(len);
        self.v.truncate(len);
        self.raw.truncate(len);
        self.pooled.truncate(len / ratio);
    }

    fn hash(&self, hasher: &mut blake3::Hasher) {
        for rows in [&self.k, &self.v, &self.raw, &self.pooled] {
            rows.hash(hasher);
        }
    }
}

impl GdnState {
    /// Shifts the convolution history by `count` rows of `window` (history, then rows).
    pub(crate) fn shift(&mut self, window: &[f32], count: usize, channels: usize) {
        let len = self.conv.len();
        self.conv.copy_from_slice(&window[count * channels..][..len]);
    }

    /// Replays the first `count` steps on the state.
    pub(crate) fn replay(&mut self, exec: &Exec, shape: &GdnShape, rows: &GdnRows, count: usize) {
        exec.gdn_run(shape, Arc::make_mut(&mut self.h).as_mut_slice(), rows, count, false);
    }
}

impl State {
    /// The state before the first token.
    pub(crate) fn new(weights: &Weights, ngram: usize, eos: u32, activations: Activations) -> Self {
        let layers = weights.layers.iter().map(|l| match &l.mixer {
            Mixer::Gdn(g) => LayerState::Gdn(GdnState {
                conv: vec![0.0; (g.shape.taps - 1) * g.shape.channels()],
                h: Arc::new(vec![0.0; g.shape.state()]),
            }),
            Mixer::Qsa(q) => LayerState::Qsa(Cache::new(q, activations)),
        });
        let ples = weights.layers.iter().filter_map(|l| l.ple.as_ref());
        Self {
            length: 0,
            history: vec![eos; ngram],
            layers: layers.collect(),
            ples: ples.map(|p| vec![0.0; p.dense.history() * p.dense.norm_conv.len()]).collect(),
            mtp: weights.mtp.as_ref().map(|m| Cache::new(&m.qsa, activations)),
            wide: Vec::new(),
        }
    }

    /// Appends ids to the n-gram history.
    pub(crate) fn shift_history(&mut self, tokens: &[u32]) {
        let keep = self.history.len();
        self.history.extend_from_slice(tokens);
        self.history.drain(..self.history.len() - keep);
        self.length += tokens.len() as u32;
    }

    fn hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.length.to_le_bytes());
        self.history.iter().for_each(|id| {
            hasher.update(&id.to_le_bytes());
        });
        for layer in &self.layers {
            match layer {
                LayerState::Gdn(g) => {
                    hash_floats(&mut hasher, &g.conv);
                    hash_floats(&mut hasher, &g.h);
                }
                LayerState::Qsa(cache) => cache.hash(&mut hasher),
            }
        }
        self.ples.iter().for_each(|p| hash_floats(&mut hasher, p));
        if let Some(mtp) = &self.mtp {
            mtp.hash(&mut hasher);
        }
        hash_floats(&mut hasher, &self.wide);
        hasher.finalize()
    }
}

/// Feeds little-endian f32 to a hasher, NaN canonical: how every receipt hashes numbers.
pub fn hash_floats(hasher: &mut blake3::Hasher, x: &[f32]) {
    let mut bytes = [0u8; 4096];
    for x in x.chunks(1024) {
        for (b, &x) in bytes.chunks_exact_mut(4).zip(x) {
            let x = if x.is_nan() { f32::from_bits(0x7FC0_0000) } else { x };
            b.copy_from_slice(&x.to_le_bytes());
        }
        hasher.update(&bytes[..x.len() * 4]);
    }
}

impl Model {
    /// Takes a free slot for a new, empty stream.
    ///
    /// # Errors
    /// Every slot is in use.
    pub fn new_stream(&mut self) -> Result<Slot, Error> {
        let Some(index) = self.streams.iter().position(Option::is_none) else {
            return Err(Error::NoSlot(self.streams.len()));
        };
        self.generation += 1;
        self.streams[index] = Some(Stream {
            generation: self.generation,
            state: self.fresh_state(),
            window: None,
            fault: None,
        });
        Ok(Slot { index: index as u32, generation: self.generation })
    }

    fn fresh_state(&self) -> State {
        let ngram = self.config.ple.as_ref().map_or(0, |p| p.ngram_size - 1);
        State::new(&self.weights, ngram, self.config.ngram_eos(), self.exec.numerics().activations)
    }

    /// Gives a slot and all it holds back. A stale slot is ignored.
    pub fn free(&mut self, slot: Slot) {
        if self.stream(slot).is_ok() {
            self.streams[slot.index as usize] = None;
        }
    }

    /// Empties a stream.
    ///
    /// # Errors
    /// The slot is not in use.
    pub fn reset(&mut self, slot: Slot) -> Result<(), Error> {
        let state = self.fresh_state();
        let stream = self.stream_mut(slot)?;
        (stream.state, stream.window, stream.fault) = (state, None, None);
        Ok(())
    }

    /// Committed tokens of a stream.
    ///
    /// # Errors
    /// The slot is not in use.
    pub fn length(&self, slot: Slot) -> Result<u32, Error> {
        Ok(self.stream(slot)?.state.length)
    }

    /// Whether a row of the stream was not a number, so that it takes no more rows.
    ///
    /// # Errors
    /// The slot is not in use.
    pub fn is_faulty(&self, slot: Slot) -> Result<bool, Error> {
        Ok(self.stream(slot)?.fault.is_some())
    }

    /// Everything the stream is now.
    ///
    /// # Errors
    /// The slot is not in use, holds a window, or failed.
    pub fn snapshot(&self, slot: Slot) -> Result<Snapshot, Error> {
        let stream = self.stream(slot)?;
        if stream.window.is_some() {
            return Err(Error::Held(slot.index));
        }
        if stream.fault.is_some() {
            return Err(Error::Faulty(slot.index));
        }
        Ok(Snapshot { identity: self.identity.clone(), state: stream.state.clone() })
    }

    /// Puts a stream back to a snapshot, of this stream or of another one.
    ///
    /// # Errors
    /// The slot is not in use, or the snapshot is another model's.
    pub fn restore(&mut self, slot: Slot, snapshot: &Snapshot) -> Result<(), Error> {
        // The same opened model: weights of equal shapes can differ without showing in a name.
        if !Arc::ptr_eq(&snapshot.identity, &self.identity) {
            return Err(Error::Snapshot);
        }
        let stream = self.stream_mut(slot)?;
        (stream.state, stream.window, stream.fault) = (snapshot.state.clone(), None, None);
        Ok(())
    }

    /// Commits the first `count` rows of the stream's window and drops the rest; 0 drops all.
    ///
    /// # Errors
    /// There is no window, or it has fewer rows.
    pub fn keep(&mut self, slot: Slot, count: usize) -> Result<(), Error> {
        let Self { weights, exec, streams, .. } = self;
        let stream = find_mut(streams, slot)?;
        let held = stream.window.as_ref().map_or(0, |w| w.tokens.len());
        let Some(window) = stream.window.take_if(|w| count <= w.tokens.len()) else {
            return Err(Error::Keep { slot: slot.index, held, asked: count });
        };
        commit(weights, exec, &mut stream.state, &window, count);
        if let Some((row, kind)) = window.fault
            && row < count
        {
            stream.fault = Some(kind);
        }
        Ok(())
    }

    /// blake3 over all caches and states of a stream in a fixed order.
    ///
    /// # Errors
    /// The slot is not in use or holds a window.
    pub fn state_hash(&self, slot: Slot) -> Result<String, Error> {
        let stream = self.stream(slot)?;
        if stream.window.is_some() {
            return Err(Error::Held(slot.index));
        }
        Ok(stream.state.hash().to_hex().to_string())
    }

    /// Shows the committed state of a stream: for each layer `gdn.conv` (`[taps - 1, channels]`),
    /// `gdn.recurrent` (`[value_heads, dk, dv]`), or `qsa.k`, `qsa.v`, `qsa.raw_keys`, `qsa.pooled`; `ple.conv`
    /// (`[history, W]`) for the n-gram layers; and the ids `history`.
    ///
    /// # Errors
    /// The slot is not in use.
    pub fn trace_state(&self, slot: Slot, trace: &mut dyn crate::Trace) -> Result<(), Error> {
        let state = &self.stream(slot)?.state;
        let mut ples = state.ples.iter();
        for (i, (layer, weights)) in state.layers.iter().zip(&self.weights.layers).enumerate() {
            if let Some(ple) = weights.ple.as_ref().and_then(|_| ples.next()) {
                trace.floats(Some(i), "ple.conv", ple);
            }
            match layer {
                LayerState::Gdn(g) => {
                    trace.floats(Some(i), "gdn.conv", &g.conv);
                    trace.floats(Some(i), "gdn.recurrent", &g.h);
                }
                LayerState::Qsa(cache) => {
                    for (name, rows) in [
                        ("qsa.k", &cache.k),
                        ("qsa.v", &cache.v),
                        ("qsa.raw_keys", &cache.raw),
                        ("qsa.pooled", &cache.pooled),
                    ] {
                        trace.floats(Some(i), name, &rows.rows(0, rows.len()));
                    }
                }
            }
        }
        trace.ids(None, "history", &state.history.iter().map(|&id| u64::from(id)).collect::<Vec<_>>());
        Ok(())
    }

    pub(crate) fn stream(&self, slot: Slot) -> Result<&Stream, Error> {
        let stream = self.streams.get(slot.index as usize).and_then(Option::as_ref);
        stream.filter(|s| s.generation == slot.generation).ok_or(Error::Slot(slot.index))
    }

    fn stream_mut(&mut self, slot: Slot) -> Result<&mut Stream, Error> {
        find_mut(&mut self.streams, slot)
    }
}

fn find_mut(streams: &mut [Option<Stream>], slot: Slot) -> Result<&mut Stream, Error> {
    let stream = streams.get_mut(slot.index as usize).and_then(Option::as_mut);
    stream.filter(|s| s.generation == slot.generation).ok_or(Error::Slot(slot.index))
}

/// Replays the first `count` rows of a window onto the state it was read from.
fn commit(weights: &Weights, exec: &Exec, state: &mut State, window: &Window, count: usize) {
    let length = state.length as usize + count;
    for ((layer, state), rows) in weights.layers.iter().zip(&mut state.layers).zip(&window.gdn) {
        match (&layer.mixer, state, rows) {
            (Mixer::Gdn(g), LayerState::Gdn(state), Some((conv, rows))) => {
                state.replay(exec, &g.shape, rows, count);
                state.shift(conv, count, g.shape.channels());
            }
            (Mixer::Qsa(q), LayerState::Qsa(cache), _) => cache.truncate(length, q.shape.ratio),
            _ => {}
        }
    }
    for (history, rows) in state.ples.iter_mut().zip(&window.ples) {
        let wide = window.wide.len() / window.tokens.len();
        let len = history.len();
        history.copy_from_slice(&rows[count * wide..][..len]);
    }
    if count > 0 {
        let wide = window.wide.len() / window.tokens.len();
        state.wide = window.wide[(count - 1) * wide..count * wide].to_vec();
    }
    state.shift_history(&window.tokens[..count]);
}
