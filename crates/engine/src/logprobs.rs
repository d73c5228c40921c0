//! Log-probabilities of a row of raw logits.
//!
//! They describe the model, not the sampler: no bias, penalty, temperature or cut has touched them, and every
//! column of the row takes part. In f32: `m` is the largest logit, `z` the chain sum from +0 of
//! `exp(x - m)` in rising id, and an id's log-probability is `(x - m) - ln(z)`.

use castiron_num::math;

use crate::sampling::{First, SampleError};

/// An id and its log-probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Logprob {
    /// Token id.
    pub id: u32,
    /// Natural logarithm of its probability, at most 0 but for rounding.
    pub logprob: f32,
}

/// A row of logits with its normaliser.
#[derive(Debug, Clone, Copy)]
pub struct Logprobs<'a> {
    logits: &'a [f32],
    max: f32,
    ln_sum: f32,
}

impl<'a> Logprobs<'a> {
    /// Reads a row once. `logits` is `[columns]`, raw.
    ///
    /// # Errors
    /// [`SampleError::NonFinite`] for a NaN or an infinity, [`SampleError::ShortRow`] for an empty row.
    pub fn new(logits: &'a [f32]) -> Result<Self, SampleError> {
        if let Some(id) = logits.iter().position(|x| !x.is_finite()) {
            return Err(SampleError::NonFinite { id, value: logits[id] });
        }
        if logits.is_empty() {
            return Err(SampleError::ShortRow { got: 0, need: 1 });
        }
        let max = logits.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m });
        let sum = logits.iter().fold(0.0_f32, |sum, &x| sum + math::exp(x - max));
        Ok(Self { logits, max, ln_sum: math::ln(sum) })
    }

    /// The log-probability of one id; `None` if the row has no such column.
    #[must_use]
    pub fn of(&self, id: u32) -> Option<f32> {
        self.logits.get(id as usize).map(|&x| self.at(x))
    }

    /// The `n` likeliest ids in the order (logit descending, id ascending); all of them if there are fewer.
    #[must_use]
    pub fn top(&self, n: usize) -> Vec<Logprob> {
        let mut first = First::new(n);
        (0_u32..).zip(self.logits).for_each(|(id, &x)| first.offer(id, x));
        first.into_ranked().iter().map(|c| Logprob { id: c.id, logprob: self.at(c.value) }).collect()
    }

    fn at(&self, logit: f32) -> f32 {
        (logit - self.max) - self.ln_sum
    }
}
