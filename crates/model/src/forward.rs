//! One call of the forward pass over mixed rows.

use std::ops::Range;

use castiron_exec::GdnRows;

use crate::layer::{self, Rows};
use crate::load::Model;
use crate::state::Window;
use crate::{Error, NoTrace, Slot, Trace};

/// One token of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The stream.
    pub slot: Slot,
    /// The token's index in it; rows of a slot stand side by side and continue the stream.
    pub position: u32,
    /// The token id.
    pub token: u32,
    /// Whether its logits are wanted.
    pub logits: bool,
}

/// What a forward pass gives back.
#[derive(Clone, Debug, Default)]
pub struct Forward {
    /// Logits of the rows that wanted them, in row order, `[wanted, vocab]`.
    pub logits: Vec<f32>,
    /// Rows that were not numbers, ascending. Their streams fail once such a row is kept; other rows are
    /// not touched.
    pub faults: Vec<Fault>,
}

/// A row that is not a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Index of the row in the call.
    pub row: usize,
    /// Where it was noticed.
    pub kind: FaultKind,
}

/// Where a value that is not finite was noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// Router logits or the input of an expert, in this layer (counting the draft head's as one past the
    /// last).
    Experts(usize),
    /// A score of the block selection in this layer.
    Selection(usize),
    /// The logits.
    Logits,
}

impl std::fmt::Display for FaultKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Experts(layer) => {
                write!(f, "a value that is not finite reached the experts of layer {layer}")
            }
            Self::Selection(layer) => {
                write!(f, "a value that is not finite reached the block selection of layer {layer}")
            }
            Self::Logits => write!(f, "a logit is not finite"),
        }
    }
}

/// Rows of one slot in a call.
pub(crate) struct Segment {
    pub(crate) slot: Slot,
    pub(crate) rows: Range<usize>,
    pub(crate) held: bool,
    pub(crate) window: Window,
}

impl Model {
    /// Runs `rows`. Slots in `held` keep their state until [`Model::keep`]; all others are kept at once.
    ///
    /// # Errors
    /// A row that does not fit its stream, the vocabulary or the context; a table row that cannot be read.
    /// Nothing has changed then.
    pub fn forward(&mut self, rows: &[Row], held: &[Slot]) -> Result<Forward, Error> {
        self.forward_traced(rows, held, &mut NoTrace)
    }

    /// [`Self::forward`] with a look inside.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_traced(
        &mut self,
        rows: &[Row],
        held: &[Slot],
        trace: &mut dyn Trace,
    ) -> Result<Forward, Error> {
        let mut segments = self.segments(rows, held)?;
        let tables = self.gather(rows, &segments, trace)?;
        let mut x = layer::embed(&self.weights.embed, rows.iter().map(|r| r.token), self.config.hc_count);
        if trace.wanted() {
            let narrow: Vec<f32> = x
                .chunks_exact(self.config.wide())
                .flat_map(|x| x[..self.config.hidden_size].iter().copied())
                .collect();
            trace.floats(None, "embed", &narrow);
        }
        let positions: Vec<u32> = rows.iter().map(|r| r.position).collect();
        let mut faults = vec![None; rows.len()];
        let mut ples = tables.iter().enumerate();
        let Self { weights, exec, streams, fault, .. } = self;
        for (index, weights) in weights.layers.iter().enumerate() {
            let unfused = fault.is_some_and(|f| f.layer == index && rows.len() >= f.rows);
            let (positions, segments, faults) = (&positions, &mut segments, &mut faults);
            let mut call = Rows { exec, index, positions, segments, streams, trace, faults, unfused };
            if let Some(ple) = &weights.ple
                && let Some((number, emb)) = ples.next()
            {
                call.ple(&ple.dense, number, emb, &mut x);
            }
            call.mixer(weights, &mut x);
            call.experts(&weights.mlp_hc, &weights.moe, &mut x);
            trace.floats(Some(index), "out", &x);
        }
        let logits = self.head(rows, &x, &mut faults, trace);
        self.commit_segments(rows, segments, &x, &faults);
        self.last_wide = x;
        self.last_rows = rows.iter().map(|r| (r.slot, r.position)).collect();
        let faults = faults.iter().enumerate().filter_map(|(row, f)| f.map(|kind| Fault { row, kind }));
        Ok(Forward { logits, faults: faults.collect() })
    }

    /// Checks rows against their streams and cuts them into segments.
    fn segments(&self, rows: &[Row], held: &[Slot]) -> Result<Vec<Segment>, Error> {
        let mut segments: Vec<Segment> = Vec::new();
        if rows.is_empty() {
            return Err(Error::Batch("a forward pass needs at least one row"));
        }
        for (i, row) in rows.iter().enumerate() {
            if row.token as usize >= self.vocab() {
                return Err(Error::Token { token: row.token, position: row.position, vocab: self.vocab() });
            }
            if row.position >= self.context {
                return Err(Error::Context { position: row.position, context: self.context });
            }
            if let Some(last) = segments.last_mut().filter(|s| s.slot == row.slot) {
                last.rows.end = i + 1;
                last.window.tokens.push(row.token);
            } else {
                if segments.iter().any(|s| s.slot == row.slot) {
                    return Err(Error::Batch("rows of one slot must stand side by side"));
                }
                self.startable(row.slot)?;
                segments.push(self.segment(row, i, held.contains(&row.slot)));
            }
            let start = segments.last().map_or(0, |s| s.rows.start);
            let expected = self.stream(row.slot)?.state.length + (i - start) as u32;
            if row.position != expected {
                return Err(Error::Position { row: i, found: row.position, expected });
            }
        }
        match held.iter().find(|h| !segments.iter().any(|s| s.slot == **h)) {
            Some(_) => Err(Error::Batch("a held slot has no row in the call")),
            None => Ok(segments),
        }
    }

    fn startable(&self, slot: Slot) -> Result<(), Error> {
        let stream = self.stream(slot)?;
        if stream.window.is_some() {
            return Err(Error::Held(slot.index));
        }
        if stream.fault.is_some() {
            return Err(Error::Faulty(slot.index));
        }
        Ok(())
    }

    fn segment(&self, row: &Row, index: usize, held: bool) -> Segment {
        let layers = self.weights.layers.len();
        Segment {
            slot: row.slot,
            rows: index..index + 1,
            held,
            window: Window {
                tokens: vec![row.token],
                gdn: (0..layers).map(|_| None::<(Vec<f32>, GdnRows)>).collect(),
                ples: Vec::new(),
                wide: Vec::new(),
                fault: None,
            },
        }
    }

    /// The stored table rows of every n-gram layer, `[rows, E]` each.
    fn gather(
        &self,
        rows: &[Row],
        segments: &[Segment],
        trace: &mut dyn Trace,
    ) -> Result<Vec<Vec<f32>>, Error> {
        let mut tables = Vec::new();
        for (index, ple) in
            self.weights.layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.ple.as_ref()?)))
        {
            let heads = ple.hash.heads();
            let mut ids = vec![0u64; rows.len() * heads];
            for s in segments {
                let mut history = self.stream(s.slot)?.state.history.clone();
                for (row, &token) in s.rows.clone().zip(&s.window.tokens) {
                    ple.hash.rows(&history, token, &mut ids[row * heads..(row + 1) * heads]);
                    history.push(token);
                    history.remove(0);
                }
            }
            ple.table.prefetch(&ids);
            let mut emb = vec![0.0; ids.len() * ple.table.dim()];
            ple.table.gather(&ids, &mut emb)?;
            self.exec.store(&mut emb);
            trace.ids(Some(index), "ple.rows", &ids);
            trace.floats(Some(index), "ple.emb", &emb);
            tables.push(emb);
        }
        Ok(tables)
    }

    /// The final read and the logits of the rows that want them.
    fn head(
        &self,
        rows: &[Row],
        x: &[f32],
        faults: &mut [Option<FaultKind>],
        trace: &mut dyn Trace,
    ) -> Vec<f32> {
        let wide = self.config.wide();
        let wanted: Vec<usize> = (0..rows.len()).filter(|&r| rows[r].logits).collect();
        let x: Vec<f32> = wanted.iter().flat_map(|r| &x[r * wide..(r + 1) * wide]).copied().collect();
        let (h, _) = self.exec.hyper_read(&self.weights.mixer, &x);
        trace.floats(None, "final", &h);
        let logits = self.exec.product(&self.weights.lm_head, &h);
        for (&row, logits) in wanted.iter().zip(logits.chunks_exact(self.vocab())) {
            if logits.iter().any(|l| !l.is_finite()) {
                faults[row] = faults[row].or(Some(FaultKind::Logits));
            }
        }
        logits
    }

    /// Moves histories forward, or leaves the windows of held slots open.
    fn commit_segments(
        &mut self,
        rows: &[Row],
        segments: Vec<Segment>,
        x: &[f32],
        faults: &[Option<FaultKind>],
    ) {
        let wide = x.len() / rows.len();
        for mut segment in segments {
            let Some(stream) = self.streams[segment.slot.index as usize].as_mut() else { continue };
            let range = segment.rows.clone();
            let fault = range.clone().find_map(|r| Some((r - range.start, faults[r]?)));
            if segment.held {
                segment.window.wide = x[range.start * wide..range.end * wide].to_vec();
                segment.window.fault = fault;
                stream.window = Some(segment.window);
            } else {
                stream.state.shift_history(&segment.window.tokens);
                stream.state.wide = x[(range.end - 1) * wide..range.end * wide].to_vec();
                stream.fault = fault.map(|(_, kind)| kind);
            }
        }
    }
}
