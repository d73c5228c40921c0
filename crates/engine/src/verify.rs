//! One prompt through every form of a model: levels, threads and chunks must not be seen in any byte.
//!
//! Each variant gives a hash of all logits, of a greedy and of a sampled reply, and of the state. Variants over the
//! same prompt must agree; when two do not, both are run again with a look inside, and the first layer and tensor
//! that differ, in the order of the forward pass, are named with the row and the column.

mod walk;

use std::ops::ControlFlow;

use castiron_model::{Level, Model, hash_floats};

pub use self::walk::{Place, Value};
use crate::sampling::{Params, Sampler};
use crate::session::{Error, Limits, Session};
use crate::stop::StopIds;

/// One form that a model can be run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Instruction set.
    pub level: Level,
    /// Threads; 0 is all.
    pub threads: usize,
    /// Prompt rows of a forward pass; 0 is the whole prompt.
    pub chunk: usize,
    /// Prompt tokens.
    pub tokens: usize,
}

impl std::fmt::Display for Variant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count = |n: usize, all: &str| if n == 0 { all.to_owned() } else { n.to_string() };
        let (chunk, threads) = (count(self.chunk, "whole"), count(self.threads, "all"));
        write!(f, "level {}, threads {threads}, chunk {chunk}, {} tokens", self.level.name(), self.tokens)
    }
}

/// What a variant gave: blake3 in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hashes {
    /// Logits of every prompt row.
    pub logits: String,
    /// Ids of the greedy reply.
    pub greedy: String,
    /// Ids of the sampled reply.
    pub sampled: String,
    /// State after the prompt.
    pub state: String,
    /// State after the greedy reply.
    pub end_state: String,
}

impl Hashes {
    /// Name and hash of each.
    pub fn list(&self) -> [(&'static str, &str); 5] {
        [
            ("logits", &self.logits),
            ("state", &self.state),
            ("greedy reply", &self.greedy),
            ("state after the greedy reply", &self.end_state),
            ("sampled reply", &self.sampled),
        ]
    }
}

/// A variant and what it gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The variant.
    pub variant: Variant,
    /// What it gave.
    pub hashes: Hashes,
}

/// Two variants that must agree and do not.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The one that the other is measured against.
    pub reference: Variant,
    /// The other.
    pub other: Variant,
    /// The first of [`Hashes::list`] that differs.
    pub what: &'static str,
    /// Where; nothing when the two agreed as they were run again, so that the difference is not repeatable.
    pub place: Option<Place>,
}

/// What [`verify`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Variants in the order they were run, up to the first that differs.
    pub outcomes: Vec<Outcome>,
    /// The first difference.
    pub difference: Option<Difference>,
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Job {
    /// The prompt.
    pub ids: Vec<u32>,
    /// Prompt tokens that the scalar law is run on; it is slow.
    pub law_tokens: usize,
    /// Instruction sets.
    pub levels: Vec<Level>,
    /// Numbers of threads; 0 is all.
    pub threads: Vec<usize>,
    /// Chunks; 0 is the whole prompt.
    pub chunks: Vec<usize>,
    /// Tokens of a reply.
    pub reply: usize,
    /// How the sampled reply is drawn.
    pub sampled: Params,
}

impl Job {
    /// Every variant, those over the same prompt beside each other. A chunk that is no smaller than the prompt is
    /// the whole prompt, and nothing is run twice.
    pub fn variants(&self) -> Vec<Variant> {
        let law_tokens = self.law_tokens.clamp(1, self.ids.len().max(1));
        let mut out: Vec<Variant> = Vec::new();
        let mut add = |level: Level, chunks: &[usize], tokens: usize| {
            for &threads in &self.threads {
                for &chunk in chunks {
                    let chunk = if chunk >= tokens { 0 } else { chunk };
                    let variant = Variant { level, threads, chunk, tokens };
                    if !out.contains(&variant) {
                        out.push(variant);
                    }
                }
            }
        };
        let short = law_tokens < self.ids.len();
        for &level in &self.levels {
            let law = level == Level::law();
            add(level, &self.chunks, if law { law_tokens } else { self.ids.len() });
            if !law && short && self.levels.contains(&Level::law()) {
                // What the law is compared with on its prefix.
                add(level, &[0], law_tokens);
            }
        }
        out
    }
}

/// Opens the model at a level with so many threads.
pub type Open<'a> = dyn FnMut(Level, usize) -> Result<Model, castiron_model::Error> + 'a;

/// Runs every variant and compares. `progress` hears of each before it is run: its number, how many there are.
///
/// # Errors
/// The model cannot be opened or refuses the prompt, or a row is not a number.
pub fn verify(
    job: &Job,
    open: &mut Open<'_>,
    mut progress: impl FnMut(usize, usize, &Variant),
) -> Result<Report, Error> {
    let variants = job.variants();
    let mut report = Report { outcomes: Vec::new(), difference: None };
    let mut model: Option<(Level, usize, Model)> = None;
    for (i, variant) in variants.iter().enumerate() {
        progress(i, variants.len(), variant);
        let opened = match model.take().filter(|m| (m.0, m.1) == (variant.level, variant.threads)) {
            Some((_, _, model)) => model,
            None => open(variant.level, variant.threads)?,
        };
        let (hashes, opened) = run(opened, job, variant)?;
        model = Some((variant.level, variant.threads, opened));
        let reference = report.outcomes.iter().find(|o| o.variant.tokens == variant.tokens).cloned();
        report.outcomes.push(Outcome { variant: *variant, hashes: hashes.clone() });
        let Some(reference) = reference else { continue };
        let differs = reference.hashes.list().into_iter().zip(hashes.list()).find(|(a, b)| a.1 != b.1);
        if let Some(((what, _), _)) = differs {
            drop(model);
            let place = walk::find(job, &reference.variant, variant, open)?;
            report.difference =
                Some(Difference { reference: reference.variant, other: *variant, what, place });
            break;
        }
    }
    Ok(report)
}

/// One variant, and the model back.
fn run(model: Model, job: &Job, variant: &Variant) -> Result<(Hashes, Model), Error> {
    let ids = &job.ids[..variant.tokens];
    let mut session = Session::new(model)?;
    let mut logits = blake3::Hasher::new();
    for chunk in walk::chunks(ids, variant.chunk) {
        hash_floats(&mut logits, &session.feed_for_logits(chunk)?);
    }
    let state = session.state_hash()?;
    session.mark()?;
    let vocab = job.sampled.vocab;
    let greedy = reply(&mut session, Params::greedy(vocab), job.reply)?;
    let end_state = session.state_hash()?;
    session.rewind(ids.len() as u32)?;
    let sampled = reply(&mut session, job.sampled.clone(), job.reply)?;
    let hashes = Hashes {
        logits: logits.finalize().to_hex().to_string(),
        greedy: token_hash(&greedy),
        sampled: token_hash(&sampled),
        state,
        end_state,
    };
    Ok((hashes, session.into_model()))
}

fn reply(session: &mut Session, params: Params, tokens: usize) -> Result<Vec<u32>, Error> {
    let mut sampler = Sampler::new(params)?;
    let limits = Limits { max_tokens: tokens, stop: StopIds::new(&[], &[]) };
    Ok(session.generate(&mut sampler, &limits, |_| ControlFlow::Continue(()))?.ids)
}

/// blake3, in hexadecimal, over little-endian u32 ids.
pub fn token_hash(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    blake3::hash(&bytes).to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_are_run_once_and_the_law_has_company_on_its_prefix() {
        let job = Job {
            ids: vec![1; 100],
            law_tokens: 10,
            levels: vec![Level::law(), Level::portable()],
            threads: vec![1, 0],
            chunks: vec![7, 512, 0],
            reply: 4,
            sampled: Params::neutral(10),
        };
        let count = |v: &[Variant], level: Level, tokens: usize| {
            v.iter().filter(|v| v.level == level && v.tokens == tokens).count()
        };
        let variants = job.variants();
        assert_eq!(count(&variants, Level::law(), 10), 4, "7 and whole, 1 and all threads");
        assert_eq!(count(&variants, Level::portable(), 100), 4);
        assert_eq!(count(&variants, Level::portable(), 10), 2);
        assert_eq!(variants.len(), 10);
        let whole = Job { law_tokens: 1000, ..job };
        assert_eq!(whole.variants().len(), 8);
    }
}
