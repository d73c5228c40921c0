//! The draft head: one more layer over its own cache, fed with a token and a wide residual.

use crate::forward::{Fault, FaultKind};
use crate::layer::{self, Rows};
use crate::load::Model;
use crate::{Error, NoTrace, Slot};

/// Where a draft row's wide residual comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wide {
    /// Row of the last [`Model::forward`].
    Row(usize),
    /// The last committed row of the stream.
    Kept,
    /// Row of the last [`Model::draft`].
    Draft(usize),
}

/// One row of the draft head: it stands at the position of its residual and reads the token after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRow {
    /// The stream.
    pub slot: Slot,
    /// Position of the row in the stream. Rows of the draft cache from here on are replaced.
    pub position: u32,
    /// The token that follows that position.
    pub token: u32,
    /// The residual at that position.
    pub wide: Wide,
    /// Whether its logits are wanted.
    pub logits: bool,
}

/// What the draft head gives back.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// Logits of the rows that wanted them, `[wanted, vocab]`: of the token after the row's token.
    pub logits: Vec<f32>,
    /// Rows that were not numbers. A draft never fails its stream.
    pub faults: Vec<Fault>,
}

impl Model {
    /// Runs the draft head over rows of one or several streams. Rows of a slot stand side by side at rising
    /// positions, the first at or before the end of the slot's draft cache.
    ///
    /// # Errors
    /// There is no draft head; a row does not fit; a residual is not there. Nothing has changed then.
    pub fn draft(&mut self, rows: &[DraftRow]) -> Result<Draft, Error> {
        let x = self.draft_inputs(rows)?;
        let Self { weights, exec, streams, config, .. } = self;
        let Some(w) = &weights.mtp else { return Err(Error::Draft("this checkpoint has no draft head")) };
        let mut x = x;
        let positions: Vec<u32> = rows.iter().map(|r| r.position).collect();
        let (h, gates) = exec.hyper_read(&w.attn_hc, &x);
        let projected = exec.qsa_project(&w.qsa, &h, &positions);
        let mut attention = vec![0.0; projected.q.len()];
        let (layers, mut faults, mut start) = (weights.layers.len(), vec![None; rows.len()], 0);
        for rows in rows.chunk_by(|a, b| a.slot == b.slot) {
            let range = start..start + rows.len();
            start = range.end;
            let stream = streams[rows[0].slot.index as usize].as_mut();
            let Some(cache) = stream.and_then(|s| s.state.mtp.as_mut()) else { continue };
            cache.truncate(rows[0].position as usize, w.qsa.shape.ratio);
            cache.append(exec, &w.qsa, &projected, range.clone());
            let at = (layers, range);
            let attention = &mut attention;
            for row in layer::attend(exec, &w.qsa, cache, &projected, at, &positions, attention, &mut NoTrace)
            {
                faults[row] = Some(FaultKind::Selection(layers));
            }
        }
        let y = exec.qsa_finish(&w.qsa, attention, &projected.gate);
        exec.hyper_write(&mut x, &y, &gates, config.hc_count);
        let (index, segments, trace) = (layers, &mut [], &mut NoTrace);
        let (positions, faults_of) = (&positions, &mut faults);
        let mut call =
            Rows { exec, index, positions, segments, streams, trace, faults: faults_of, unfused: false };
        call.experts(&w.mlp_hc, &w.moe, &mut x);

        let wide = config.wide();
        let wanted: Vec<usize> = (0..rows.len()).filter(|&r| rows[r].logits).collect();
        let chosen: Vec<f32> = wanted.iter().flat_map(|r| &x[r * wide..(r + 1) * wide]).copied().collect();
        let (h, _) = exec.hyper_read(&w.mixer, &chosen);
        let logits = exec.product(&weights.lm_head, &h);
        for (&row, logits) in wanted.iter().zip(logits.chunks_exact(config.vocab_size)) {
            if logits.iter().any(|l| !l.is_finite()) {
                faults[row].get_or_insert(FaultKind::Logits);
            }
        }
        self.last_draft = x;
        self.last_drafted = rows.iter().map(|r| (r.slot, r.position)).collect();
        let faults = faults.iter().enumerate().filter_map(|(row, f)| f.map(|kind| Fault { row, kind }));
        Ok(Draft { logits, faults: faults.collect() })
    }

    /// Tokens of the stream that the draft cache covers.
    ///
    /// # Errors
    /// The slot is not in use or there is no draft head.
    pub fn draft_length(&self, slot: Slot) -> Result<u32, Error> {
        let mtp = self.stream(slot)?.state.mtp.as_ref();
        mtp.map(|c| c.len() as u32).ok_or(Error::Draft("this checkpoint has no draft head"))
    }

    /// Drops the draft cache's rows from `length` on.
    ///
    /// # Errors
    /// As [`Self::draft_length`].
    pub fn draft_truncate(&mut self, slot: Slot, length: u32) -> Result<(), Error> {
        self.draft_length(slot)?;
        let ratio = self.config.indexer.ratio;
        if let Some(cache) = self.streams[slot.index as usize].as_mut().and_then(|s| s.state.mtp.as_mut()) {
            cache.truncate(length as usize, ratio);
        }
        Ok(())
    }

    /// Checks the rows and fuses each token's embedding with its residual: `[rows, W]`.
    fn draft_inputs(&self, rows: &[DraftRow]) -> Result<Vec<f32>, Error> {
        let Some(w) = &self.weights.mtp else {
            return Err(Error::Draft("this checkpoint has no draft head"));
        };
        if rows.is_empty() {
            return Err(Error::Batch("a draft needs at least one row"));
        }
        self.check_draft(rows)?;
        let wide = self.config.wide();
        let mut residuals = Vec::with_capacity(rows.len() * wide);
        for row in rows {
            residuals.extend_from_slice(self.residual(row)?);
        }
        let exec = &self.exec;
        let embedded = layer::embed(&self.weights.embed, rows.iter().map(|r| r.token), 1);
        let mut e = exec.norm(&embedded, &w.norm_embedding, 1, self.config.rms_eps);
        exec.store(&mut e);
        let e = exec.product(&w.fc_embedding, &e);
        let mut n = exec.norm(&residuals, &w.norm_hidden, 1, self.config.rms_eps);
        exec.store(&mut n);
        // A wide row is S rows of D side by side: one product covers all streams.
        let mut x = exec.product(&w.fc_hidden, &n);
        let size = self.config.hidden_size;
        for (x, e) in x.chunks_exact_mut(wide).zip(e.chunks_exact(size)) {
            for x in x.chunks_exact_mut(size) {
                x.iter_mut().zip(e).for_each(|(x, &e)| *x += e);
            }
        }
        Ok(x)
    }

    /// The wide residual a row names; it must belong to the row's stream and stand at the row's position (a
    /// drafted one: just before it).
    fn residual(&self, row: &DraftRow) -> Result<&[f32], Error> {
        let wide = self.config.wide();
        let made = |rows: &[(Slot, u32)], r: usize, at: Option<u32>| {
            rows.get(r).is_some_and(|&(slot, position)| slot == row.slot && Some(position) == at)
        };
        let found = match row.wide {
            Wide::Row(r) if made(&self.last_rows, r, Some(row.position)) => {
                self.last_wide.get(r * wide..(r + 1) * wide)
            }
            Wide::Draft(r) if made(&self.last_drafted, r, row.position.checked_sub(1)) => {
                self.last_draft.get(r * wide..(r + 1) * wide)
            }
            Wide::Kept => {
                let stream = self.stream(row.slot)?;
                let last =
                    stream.state.length.checked_sub(1) == Some(row.position) && stream.window.is_none();
                last.then_some(stream.state.wide.as_slice())
            }
            Wide::Row(_) | Wide::Draft(_) => None,
        };
        found.ok_or(Error::Draft(
            "a draft row names a residual that is not its own stream's at its own position",
        ))
    }

    fn check_draft(&self, rows: &[DraftRow]) -> Result<(), Error> {
        let mut seen: Vec<Slot> = Vec::new();
        let mut start = 0;
        for rows in rows.chunk_by(|a, b| a.slot == b.slot) {
            let slot = rows[0].slot;
            if seen.contains(&slot) {
                return Err(Error::Batch("rows of one slot must stand side by side"));
            }
            seen.push(slot);
            let end = self.draft_length(slot)?;
            for (i, row) in rows.iter().enumerate() {
                if row.token as usize >= self.vocab() {
                    return Err(Error::Token {
                        token: row.token,
                        position: row.position,
                        vocab: self.vocab(),
                    });
                }
                if row.position >= self.context {
                    return Err(Error::Context { position: row.position, context: self.context });
                }
                let expected = if i == 0 { row.position.min(end) } else { rows[0].position + i as u32 };
                if row.position != expected {
                    return Err(Error::Position { row: start + i, found: row.position, expected });
                }
            }
            start += rows.len();
        }
        Ok(())
    }
}
