//! One conversation on one stream: read a prompt, generate, rewind, go on.

use std::ops::ControlFlow;

use castiron_model::{FaultKind, Model, Row, Slot, Snapshot};

use crate::sampling::{SampleError, Sampler};
use crate::stop::{FinishReason, StopIds};

/// Rows of a prompt read in one forward pass unless asked otherwise.
pub const CHUNK: usize = 512;
/// Snapshots are taken where the length is a multiple of this.
pub const SNAPSHOT_STRIDE: u32 = 512;
/// Snapshots held at once; older ones are thinned out so that their gaps grow with their age.
pub const SNAPSHOTS: usize = 12;

/// What can go wrong in a session. The stream stays where it last was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model refused a row.
    #[error(transparent)]
    Model(#[from] castiron_model::Error),
    /// A row of this stream was not a number.
    #[error("the row at position {position} is not a number: {kind}; rewind before it or start again")]
    Fault {
        /// Position of the row.
        position: u32,
        /// Where it was noticed.
        kind: FaultKind,
    },
    /// A token could not be sampled.
    #[error("no token can be sampled at position {position}: {source}")]
    Sample {
        /// The position the token would take.
        position: u32,
        /// Why.
        source: SampleError,
    },
    /// Sampling parameters that cannot be.
    #[error(transparent)]
    Params(#[from] crate::sampling::ParamError),
    /// Generation was asked for before any prompt.
    #[error("there is no prompt to continue; give at least one token")]
    EmptyPrompt,
    /// A rewind to a place past the end.
    #[error("cannot rewind to {asked} tokens: the stream has {length}")]
    Rewind {
        /// Tokens asked for.
        asked: u32,
        /// Tokens there are.
        length: u32,
    },
    /// A prompt that does not fit.
    #[error(
        "the prompt needs {need} positions but the context holds {context}; shorten it (by at least {over} tokens)"
    )]
    PromptTooLong {
        /// Positions of the prompt and what is before it.
        need: usize,
        /// Positions of the context.
        context: u32,
        /// The excess.
        over: usize,
    },
}

/// What ends a reply, beside the caller.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Tokens generated at most.
    pub max_tokens: usize,
    /// Ids that end the reply.
    pub stop: StopIds,
}

/// A generated token as the caller sees it.
#[derive(Clone, Copy, Debug)]
pub struct Token<'a> {
    /// The id.
    pub id: u32,
    /// Its position in the stream.
    pub position: u32,
    /// The raw logits it was drawn from, `[vocab]`.
    pub logits: &'a [f32],
}

/// A finished reply.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Every generated id, a stop id included.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
}

/// How [`Session::resume`] went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// Leading ids whose state was still held, so that they were not run again.
    pub cached: usize,
    /// `Break` when `progress` ended it before all ids were fed.
    pub flow: ControlFlow<()>,
}

/// A place that a rewind can start from.
struct Held {
    snapshot: Snapshot,
    /// Logits of the row before it, when they were known.
    logits: Option<Vec<f32>>,
}

/// A stream of a model, the ids it was fed and the snapshots a rewind starts from.
///
/// The last id of a reply is not fed to the model until something follows it, so [`Self::ids`] may be one id
/// behind the reply.
pub struct Session {
    model: Model,
    slot: Slot,
    ids: Vec<u32>,
    snapshots: Vec<Held>,
    /// Logits of the last row, when it was run for them.
    logits: Option<Vec<f32>>,
    /// Position of a row that was not a number; nothing at or after it can be gone on from.
    fault: Option<u32>,
    chunk: usize,
}

impl Session {
    /// A session on a fresh stream of `model`.
    ///
    /// # Errors
    /// The model has no free slot.
    pub fn new(mut model: Model) -> Result<Self, Error> {
        let slot = model.new_stream()?;
        Ok(Self {
            model,
            slot,
            ids: Vec::new(),
            snapshots: Vec::new(),
            logits: None,
            fault: None,
            chunk: CHUNK,
        })
    }

    /// Prompt rows of one forward pass (at least 1). Bytes do not depend on it.
    pub fn set_chunk(&mut self, rows: usize) {
        self.chunk = rows.max(1);
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Gives the model back, with the stream freed.
    pub fn into_model(mut self) -> Model {
        self.model.free(self.slot);
        self.model
    }

    /// The ids the stream was fed.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Logits after the last fed id, when they are known.
    pub fn logits(&self) -> Option<&[f32]> {
        self.logits.as_deref()
    }

    /// blake3 over every cache and state of the stream.
    ///
    /// # Errors
    /// The model refuses.
    pub fn state_hash(&self) -> Result<String, Error> {
        Ok(self.model.state_hash(self.slot)?)
    }

    /// Feeds `ids`, chunk by chunk, and keeps the logits of the last one. `progress` hears how many are done
    /// and may end it between chunks; the stream then stands at the last finished chunk.
    ///
    /// # Errors
    /// The prompt does not fit (nothing is fed), the model refuses, or a row is not a number.
    pub fn feed(
        &mut self,
        ids: &[u32],
        mut progress: impl FnMut(usize) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, Error> {
        self.check(self.ids.len(), ids)?;
        let mut done = 0;
        while done < ids.len() {
            let to_border = SNAPSHOT_STRIDE as usize - self.ids.len() % SNAPSHOT_STRIDE as usize;
            let count = self.chunk.min(to_border).min(ids.len() - done);
            self.forward(&ids[done..done + count], done + count == ids.len())?;
            done += count;
            if progress(done).is_break() && done < ids.len() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Makes the stream hold exactly `ids`: goes back to what they share with the ids it holds and feeds the
    /// rest. The bytes equal a fresh run of `ids`. When all are fed the place is marked, so that going back to
    /// it costs nothing. `progress` is [`Self::feed`]'s and counts the ids that are fed.
    ///
    /// Going back starts at the nearest snapshot, so fewer ids may be cached than are shared.
    ///
    /// # Errors
    /// As [`Self::feed`]; a prompt that does not fit, or has an unknown id, changes nothing.
    pub fn resume(
        &mut self,
        ids: &[u32],
        progress: impl FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Resumed, Error> {
        self.check(0, ids)?;
        let shared = ids.iter().zip(&self.ids).take_while(|(a, b)| a == b).count();
        let cached = self.go_back(self.fault.map_or(shared as u32, |fault| fault.min(shared as u32)))?;
        let flow = self.feed(&ids[cached..], progress)?;
        if flow.is_continue() {
            self.mark()?;
        }
        Ok(Resumed { cached, flow })
    }

    /// Takes a snapshot here, with the logits, so that a rewind to this length costs nothing for a while.
    ///
    /// # Errors
    /// The model refuses.
    pub fn mark(&mut self) -> Result<(), Error> {
        let here = self.ids.len() as u32;
        if here == 0 {
            return Ok(());
        }
        match self.snapshots.last_mut().filter(|s| s.snapshot.length() == here) {
            Some(held) => held.logits = self.logits.clone().or(held.logits.take()),
            None => {
                let snapshot = self.model.snapshot(self.slot)?;
                self.snapshots.push(Held { snapshot, logits: self.logits.clone() });
                thin(&mut self.snapshots);
            }
        }
        Ok(())
    }

    /// Refuses ids that do not fit after `before` others.
    fn check(&self, before: usize, ids: &[u32]) -> Result<(), Error> {
        let (need, context) = (before + ids.len(), self.model.context());
        if need > context as usize {
            return Err(Error::PromptTooLong { need, context, over: need - context as usize });
        }
        if let Some((i, &token)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= self.model.vocab())
        {
            let position = (before + i) as u32;
            return Err(castiron_model::Error::Token { token, position, vocab: self.model.vocab() }.into());
        }
        Ok(())
    }

    /// Feeds `ids` and returns the logits of every one of them, `[ids, vocab]`.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn feed_for_logits(&mut self, ids: &[u32]) -> Result<Vec<f32>, Error> {
        let rows = self.rows(ids, |_| true);
        let logits = self.run(ids, &rows)?;
        self.logits = logits.rchunks(self.model.vocab()).next().map(<[f32]>::to_vec);
        Ok(logits)
    }

    /// Generates from where the stream stands. `token` sees every id as it is drawn and may end the reply.
    ///
    /// # Errors
    /// There is no prompt, the model refuses, or a row is not a number. Ids drawn before were seen by `token`.
    pub fn generate(
        &mut self,
        sampler: &mut Sampler,
        limits: &Limits,
        mut token: impl FnMut(Token<'_>) -> ControlFlow<FinishReason>,
    ) -> Result<Reply, Error> {
        let mut ids = Vec::new();
        loop {
            let position = self.ids.len() as u32;
            if ids.len() >= limits.max_tokens || position > self.model.context() {
                return Ok(Reply { ids, finish: FinishReason::Length });
            }
            self.ensure_logits()?;
            let logits = self.logits.as_deref().ok_or(Error::EmptyPrompt)?;
            let id = sampler.sample(logits, position).map_err(|source| Error::Sample { position, source })?;
            ids.push(id);
            if let ControlFlow::Break(finish) = token(Token { id, position, logits }) {
                return Ok(Reply { ids, finish });
            }
            if limits.stop.contains(id) {
                return Ok(Reply { ids, finish: FinishReason::Stop { id } });
            }
            if ids.len() >= limits.max_tokens || position >= self.model.context() {
                return Ok(Reply { ids, finish: FinishReason::Length });
            }
            self.forward(&[id], true)?;
        }
    }

    /// Goes back to the first `length` ids: the nearest snapshot at or below it is restored and the rest is
    /// fed again. The bytes equal a fresh run.
    ///
    /// # Errors
    /// The stream is shorter, or the model refuses (the stream is then empty).
    pub fn rewind(&mut self, length: u32) -> Result<(), Error> {
        let now = self.ids.len() as u32;
        if length > now {
            return Err(Error::Rewind { asked: length, length: now });
        }
        let tail = self.ids[..length as usize].to_vec();
        let from = self.go_back(length)?;
        self.feed(&tail[from..], |_| ControlFlow::Continue(())).map(|_| ())
    }

    /// Restores the nearest snapshot at or below `length`, which is at most the stream's, and gives its length.
    fn go_back(&mut self, length: u32) -> Result<usize, Error> {
        let now = self.ids.len() as u32;
        if length == now && self.fault.is_none() && self.model.length(self.slot)? == now {
            return Ok(self.ids.len());
        }
        self.snapshots.retain(|s| s.snapshot.length() <= length);
        (self.logits, self.fault) = (None, None);
        match self.snapshots.last() {
            Some(held) => {
                self.model.restore(self.slot, &held.snapshot)?;
                self.ids.truncate(held.snapshot.length() as usize);
                self.logits.clone_from(&held.logits);
            }
            None => {
                self.model.reset(self.slot)?;
                self.ids.clear();
            }
        }
        Ok(self.ids.len())
    }

    /// The logits of the last row, run again when a snapshot was restored exactly at it.
    fn ensure_logits(&mut self) -> Result<(), Error> {
        if self.logits.is_some() || self.ids.is_empty() {
            return Ok(());
        }
        let ids = self.ids.clone();
        self.rewind(ids.len() as u32 - 1)?;
        self.forward(&ids[ids.len() - 1..], true)
    }

    /// Feeds one chunk; `last` asks for the logits of its last row.
    fn forward(&mut self, ids: &[u32], last: bool) -> Result<(), Error> {
        let rows = self.rows(ids, |i| last && i + 1 == ids.len());
        let logits = self.run(ids, &rows)?;
        self.logits = last.then_some(logits);
        Ok(())
    }

    fn rows(&self, ids: &[u32], logits: impl Fn(usize) -> bool) -> Vec<Row> {
        let start = self.ids.len() as u32;
        let row = |(i, &token): (usize, &u32)| Row {
            slot: self.slot,
            position: start + i as u32,
            token,
            logits: logits(i),
        };
        ids.iter().enumerate().map(row).collect()
    }

    fn run(&mut self, ids: &[u32], rows: &[Row]) -> Result<Vec<f32>, Error> {
        let out = self.model.forward(rows, &[])?;
        self.ids.extend_from_slice(ids);
        self.logits = None;
        if let Some(fault) = out.faults.first() {
            let position = rows[fault.row].position;
            self.fault = Some(position);
            return Err(Error::Fault { position, kind: fault.kind });
        }
        if (self.ids.len() as u32).is_multiple_of(SNAPSHOT_STRIDE) {
            let snapshot = self.model.snapshot(self.slot)?;
            self.snapshots.push(Held { snapshot, logits: None });
            thin(&mut self.snapshots);
        }
        Ok(out.logits)
    }
}

/// Drops one snapshot when there are too many: the one whose neighbours are closest together for their
/// distance from the end, so that the gaps grow with age.
fn thin(snapshots: &mut Vec<Held>) {
    if snapshots.len() <= SNAPSHOTS {
        return;
    }
    let lengths: Vec<u32> = snapshots.iter().map(|s| s.snapshot.length()).collect();
    if let Some(drop) = least_useful(&lengths) {
        snapshots.remove(drop);
    }
}

/// The inner index with the smallest (gap around it) / (distance from the end), compared exactly.
fn least_useful(lengths: &[u32]) -> Option<usize> {
    let end = *lengths.last()? as u64 + SNAPSHOT_STRIDE as u64;
    (1..lengths.len().saturating_sub(1)).min_by(|&a, &b| {
        let gap = |i: usize| (lengths[i + 1] - lengths[i - 1]) as u64;
        let age = |i: usize| end - lengths[i] as u64;
        (gap(a) * age(b)).cmp(&(gap(b) * age(a)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_snapshots_thin_out_and_the_newest_stay() {
        let mut lengths: Vec<u32> = Vec::new();
        for i in 1..=200 {
            lengths.push(i * SNAPSHOT_STRIDE);
            if lengths.len() > SNAPSHOTS {
                let drop = least_useful(&lengths).expect("more than two");
                lengths.remove(drop);
            }
        }
        assert_eq!(lengths.len(), SNAPSHOTS);
        assert_eq!(lengths[SNAPSHOTS - 3..], [198 * 512, 199 * 512, 200 * 512]);
        assert_eq!(lengths[0], 512);
        let gaps: Vec<u32> = lengths.windows(2).map(|w| w[1] - w[0]).collect();
        assert!(gaps[1] > gaps[SNAPSHOTS - 2], "{gaps:?}");
    }
}
