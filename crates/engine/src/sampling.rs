//! Choosing the next token, exactly as the law says (`docs/numerics.md`, sections 4 and 4a).
//!
//! One row of logits goes through, in this order and in f32:
//!
//! 1. `+ logit_bias`, then `- presence_penalty` once and `- frequency_penalty * count` for an id that this
//!    reply already holds (the prompt does not count);
//! 2. `/ temperature`, and the total order (value descending, id ascending);
//! 3. `top_k` keeps the first k; softmax over what is left, summed in rank order; `top_p` keeps the shortest
//!    prefix whose sum reaches it; `min_p` keeps `p >= min_p * p_first`. Both look at the same softmax;
//! 4. every kept id gets Gumbel noise that depends on (seed, position, id) only, and the largest sum wins.
//!
//! The noise of an id does not depend on which other ids are kept, nor on how often the generator was asked
//! before. A reply is thus a function of the logits, the parameters and the seed: it survives batching,
//! cancelling, rewinding and drafting.
//!
//! Temperature 0 takes step 1 and then the first id of the order; nothing is drawn.
//!
//! Ids at or above [`Params::vocab`] and ids with a bias of minus infinity are *masked*: they are left out
//! before step 1 and no other id can tell. A row with a NaN or an infinity in any column is an error, never
//! a token.

use castiron_num::{math, philox};

/// Largest magnitude of a finite [`Params::logit_bias`].
pub const BIAS_MAX: f32 = 100.0;
/// Largest magnitude of either penalty.
pub const PENALTY_MAX: f32 = 2.0;
/// Smallest temperature that is not greedy.
pub const TEMPERATURE_MIN: f32 = 0.01;
/// Largest temperature.
pub const TEMPERATURE_MAX: f32 = 100.0;

/// No Gumbel noise reaches this: its largest value is `-ln(2^-33)`, about 22.874.
const NOISE_BOUND: f32 = 23.0;

/// How a reply is sampled. Every field has an "off" value, and [`Params::neutral`] has them all off.
#[derive(Debug, Clone, PartialEq)]
pub struct Params {
    /// 0 for greedy, else `TEMPERATURE_MIN..=TEMPERATURE_MAX`. 1 leaves the logits as they are.
    pub temperature: f32,
    /// How many ids to keep at most. 0 is off.
    pub top_k: u32,
    /// Probability that the kept prefix must reach, `0 < top_p <= 1`. 1 is off.
    pub top_p: f32,
    /// Smallest probability kept, as a share of the first id's, `0..=1`. 0 is off.
    pub min_p: f32,
    /// Subtracted once from ids already in the reply, `-2..=2`. 0 is off.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence in the reply, `-2..=2`. 0 is off.
    pub frequency_penalty: f32,
    /// Added to single ids: `-100..=100`, or minus infinity to mask the id. Each id at most once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Names the noise. Equal seeds give equal replies.
    pub seed: u64,
    /// Number of ids the tokenizer knows. Logit columns from here on are padding and are masked.
    pub vocab: usize,
}

impl Params {
    /// Temperature 1 and everything else off: the model's own distribution.
    #[must_use]
    pub fn neutral(vocab: usize) -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            vocab,
        }
    }

    /// Temperature 0: always the first id of the order.
    #[must_use]
    pub fn greedy(vocab: usize) -> Self {
        Self { temperature: 0.0, ..Self::neutral(vocab) }
    }

    /// Refuses the first field that is out of range, in the order of declaration.
    ///
    /// # Errors
    /// [`ParamError`] with the field, its value and what is accepted. NaN is never accepted.
    pub fn check(&self) -> Result<(), ParamError> {
        // Written so that NaN, which compares false with everything, lands in the error.
        let t = self.temperature;
        if !(t == 0.0 || (TEMPERATURE_MIN..=TEMPERATURE_MAX).contains(&t)) {
            return Err(ParamError::new("temperature", t, "0 (greedy) or 0.01 to 100"));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(ParamError::new("top_p", self.top_p, "above 0, up to 1 (off)"));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return Err(ParamError::new("min_p", self.min_p, "0 (off) to 1"));
        }
        for (field, value) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            if !(-PENALTY_MAX..=PENALTY_MAX).contains(&value) {
                return Err(ParamError::new(field, value, "-2 to 2 (0 is off)"));
            }
        }
        if self.vocab == 0 || u32::try_from(self.vocab).is_err() {
            return Err(ParamError::new("vocab", self.vocab, "1 to 4294967295"));
        }
        self.check_bias()
    }

    fn check_bias(&self) -> Result<(), ParamError> {
        let mut ids: Vec<u32> = Vec::with_capacity(self.logit_bias.len());
        for &(id, bias) in &self.logit_bias {
            if id as usize >= self.vocab {
                let accepted = format!("ids 0 to {}", self.vocab - 1);
                return Err(ParamError::new("logit_bias", format_args!("{id}: {bias}"), accepted));
            }
            if !((-BIAS_MAX..=BIAS_MAX).contains(&bias) || bias == f32::NEG_INFINITY) {
                let accepted = "a bias of -100 to 100, or -inf (never this id)";
                return Err(ParamError::new("logit_bias", format_args!("{id}: {bias}"), accepted));
            }
            ids.push(id);
        }
        ids.sort_unstable();
        match ids.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(ParamError::new("logit_bias", pair[0], "each id at most once")),
            None => Ok(()),
        }
    }
}

/// What a checkpoint says about sampling; `None` where it is silent.
///
/// [`Defaults::params`] is the one place where silence becomes a value.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Defaults {
    /// `do_sample`; false is greedy, whatever the temperature.
    pub do_sample: Option<bool>,
    /// `temperature`.
    pub temperature: Option<f32>,
    /// `top_k`.
    pub top_k: Option<u32>,
    /// `top_p`.
    pub top_p: Option<f32>,
    /// `min_p`.
    pub min_p: Option<f32>,
    /// `presence_penalty`.
    pub presence_penalty: Option<f32>,
    /// `frequency_penalty`.
    pub frequency_penalty: Option<f32>,
    /// `repetition_penalty`. The law has no such step, so only 1 (off) passes.
    pub repetition_penalty: Option<f32>,
}

impl Defaults {
    /// The parameters of a request that names none: what the checkpoint says, else temperature 1, `top_k` 20,
    /// `top_p` 0.95 (the values the model is published with) and everything else off.
    ///
    /// # Errors
    /// [`Params::check`]'s, and a `repetition_penalty` other than 1.
    pub fn params(&self, vocab: usize) -> Result<Params, ParamError> {
        if let Some(penalty) = self.repetition_penalty.filter(|&p| p != 1.0) {
            return Err(ParamError::new("repetition_penalty", penalty, "1 (off): it is not supported"));
        }
        let greedy = self.do_sample == Some(false);
        let params = Params {
            temperature: if greedy { 0.0 } else { self.temperature.unwrap_or(1.0) },
            top_k: self.top_k.unwrap_or(20),
            top_p: self.top_p.unwrap_or(0.95),
            min_p: self.min_p.unwrap_or(0.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            ..Params::neutral(vocab)
        };
        params.check()?;
        Ok(params)
    }
}

/// A sampling parameter outside its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {value} is not accepted: give {accepted}")]
pub struct ParamError {
    field: &'static str,
    value: String,
    accepted: String,
}

impl ParamError {
    fn new(field: &'static str, value: impl std::fmt::Display, accepted: impl Into<String>) -> Self {
        Self { field, value: value.to_string(), accepted: accepted.into() }
    }

    /// The field of [`Params`] that is wrong.
    #[must_use]
    pub fn field(&self) -> &'static str {
        self.field
    }
}

/// Why a row gave no token. The stream it belongs to ends with this error; no other stream is touched.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A NaN or an infinity in the logits. The lowest such column is named.
    #[error("logit {id} is {value}, not a number to sample from")]
    NonFinite {
        /// Column of the value.
        id: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// A finite logit that left f32 when it was divided by the temperature.
    #[error("logit {id} overflows when divided by the temperature: use a higher one")]
    Overflow {
        /// Id of the logit.
        id: u32,
    },
    /// No id is left to choose from.
    #[error("every token id is masked: allow at least one in logit_bias")]
    AllMasked,
    /// The row has fewer columns than the tokenizer has ids.
    #[error("the logit row has {got} columns, but the tokenizer has {need} ids")]
    ShortRow {
        /// Columns given.
        got: usize,
        /// [`Params::vocab`].
        need: usize,
    },
}

/// An id that survived `top_k`, `top_p` and `min_p`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Token id.
    pub id: u32,
    /// Its logit after bias, penalties and temperature.
    pub value: f32,
}

/// An id with a bias or with occurrences in the reply.
#[derive(Debug, Clone, Copy)]
struct Touched {
    id: u32,
    bias: f32,
    count: u32,
}

/// Samples one reply: the parameters and how often each id was generated so far.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: Params,
    /// Sorted by id, so that a row is adjusted in one pass without a copy of it.
    touched: Vec<Touched>,
}

impl Sampler {
    /// A sampler at the start of a reply.
    ///
    /// # Errors
    /// [`Params::check`]'s.
    pub fn new(params: Params) -> Result<Self, ParamError> {
        params.check()?;
        let mut sampler = Self { params, touched: Vec::new() };
        sampler.reset();
        Ok(sampler)
    }

    /// The parameters, as checked.
    #[must_use]
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Forgets the reply; the parameters stay.
    pub fn reset(&mut self) {
        self.touched =
            self.params.logit_bias.iter().map(|&(id, bias)| Touched { id, bias, count: 0 }).collect();
        self.touched.sort_unstable_by_key(|t| t.id);
    }

    /// Counts an id as generated. [`Sampler::sample`] does so itself; this is for ids that enter the reply
    /// without it.
    pub fn accept(&mut self, id: u32) {
        match self.touched.binary_search_by_key(&id, |t| t.id) {
            Ok(at) => self.touched[at].count = self.touched[at].count.saturating_add(1),
            Err(at) => self.touched.insert(at, Touched { id, bias: 0.0, count: 1 }),
        }
    }

    /// How often `id` was generated in this reply.
    #[must_use]
    pub fn count(&self, id: u32) -> u32 {
        self.touched.binary_search_by_key(&id, |t| t.id).map_or(0, |at| self.touched[at].count)
    }

    /// Chooses the token for `position` (the place it will take in the stream) and counts it as generated.
    ///
    /// `logits` is one row, `[at least vocab]`, raw.
    ///
    /// # Errors
    /// [`SampleError`]; the counts are then unchanged.
    pub fn sample(&mut self, logits: &[f32], position: u32) -> Result<u32, SampleError> {
        let id = self.pick(logits, position)?;
        self.accept(id);
        Ok(id)
    }

    /// Like [`Sampler::sample`], but the reply stays as it is.
    ///
    /// # Errors
    /// [`SampleError`].
    pub fn pick(&self, logits: &[f32], position: u32) -> Result<u32, SampleError> {
        let p = &self.params;
        if p.temperature == 0.0 {
            let mut best = Winner::default();
            self.walk(logits, |id, value| best.offer(id, value))?;
            return best.id();
        }
        let mut draw = Draw { seed: p.seed, position, best: Winner::default() };
        if p.top_k == 0 && p.top_p == 1.0 && p.min_p == 0.0 {
            // Everything is kept: no rank is asked for, so nothing is sorted.
            self.walk(logits, |id, value| draw.offer(id, value))?;
        } else {
            self.kept(logits)?.iter().for_each(|c| draw.offer(c.id, c.value));
        }
        draw.best.id()
    }

    /// The ids that [`Sampler::pick`] draws from, in rank order.
    ///
    /// At temperature 0 nothing is cut: every unmasked id is here, and the pick is the first.
    ///
    /// # Errors
    /// [`SampleError`]; an empty set is one.
    pub fn kept(&self, logits: &[f32]) -> Result<Vec<Candidate>, SampleError> {
        let greedy = self.params.temperature == 0.0;
        let k = if greedy || self.params.top_k == 0 { usize::MAX } else { self.params.top_k as usize };
        let mut first = First::new(k);
        self.walk(logits, |id, value| first.offer(id, value))?;
        let mut ranked = first.into_ranked();
        if ranked.is_empty() {
            return Err(SampleError::AllMasked);
        }
        if !greedy && (self.params.top_p < 1.0 || self.params.min_p > 0.0) {
            self.cut(&mut ranked);
        }
        Ok(ranked)
    }

    /// Hands every unmasked id, rising, with its adjusted and scaled logit to `visit`.
    fn walk(&self, logits: &[f32], mut visit: impl FnMut(u32, f32)) -> Result<(), SampleError> {
        let p = &self.params;
        if let Some(id) = logits.iter().position(|x| !x.is_finite()) {
            return Err(SampleError::NonFinite { id, value: logits[id] });
        }
        let row = logits.get(..p.vocab).ok_or(SampleError::ShortRow { got: logits.len(), need: p.vocab })?;
        let divisor = if p.temperature == 0.0 { 1.0 } else { p.temperature };
        let mut touched = self.touched.iter().peekable();
        for (id, &logit) in (0_u32..).zip(row) {
            let adjusted = match touched.next_if(|t| t.id == id) {
                Some(t) if t.bias == f32::NEG_INFINITY => continue,
                Some(t) => self.adjust(logit, t),
                None => logit,
            };
            let value = adjusted / divisor;
            if !value.is_finite() {
                return Err(SampleError::Overflow { id });
            }
            visit(id, value);
        }
        Ok(())
    }

    fn adjust(&self, logit: f32, t: &Touched) -> f32 {
        let biased = logit + t.bias;
        if t.count == 0 {
            return biased;
        }
        let once = biased - self.params.presence_penalty;
        once - self.params.frequency_penalty * t.count as f32
    }

    /// `top_p` and `min_p` over candidates in rank order.
    fn cut(&self, ranked: &mut Vec<Candidate>) {
        let top = ranked[0].value;
        let mut p: Vec<f32> = ranked.iter().map(|c| math::exp(c.value - top)).collect();
        let z = p.iter().fold(0.0_f32, |sum, e| sum + e);
        p.iter_mut().for_each(|e| *e /= z);

        if self.params.top_p < 1.0 {
            let mut sum = 0.0_f32;
            let reached = p.iter().position(|share| {
                sum += share;
                sum >= self.params.top_p
            });
            // Rounding may keep the whole sum below top_p; then everything is the prefix.
            ranked.truncate(reached.map_or(ranked.len(), |last| last + 1));
        }
        if self.params.min_p > 0.0 {
            let least = self.params.min_p * p[0];
            let mut shares = p.iter();
            ranked.retain(|_| shares.next().is_some_and(|share| *share >= least));
        }
    }
}

/// The largest value so far, ties to the lower id.
#[derive(Debug, Default)]
struct Winner(Option<(f32, u32)>);

impl Winner {
    fn offer(&mut self, id: u32, value: f32) {
        let better = match self.0 {
            Some((most, holder)) => value > most || (value == most && id < holder),
            None => true,
        };
        if better {
            self.0 = Some((value, id));
        }
    }

    fn id(&self) -> Result<u32, SampleError> {
        self.0.map(|(_, id)| id).ok_or(SampleError::AllMasked)
    }
}

/// Gumbel-max over the offered ids, in any order.
struct Draw {
    seed: u64,
    position: u32,
    best: Winner,
}

impl Draw {
    fn offer(&mut self, id: u32, value: f32) {
        // Rounding is monotone, so an id that even the largest noise leaves behind needs none.
        if self.best.0.is_some_and(|(most, _)| value + NOISE_BOUND < most) {
            return;
        }
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let word = philox::philox4x32_10([self.position, id, 0, 0], key)[0];
        self.best.offer(id, value + philox::gumbel(word));
    }
}

/// The first k ids of the order (value descending, id ascending), without sorting the rest.
///
/// An id and its value share one integer that rises along the order, so a selection can neither lose a tie
/// nor depend on the order of arrival. Values are finite; -0 counts as +0.
pub(crate) struct First {
    k: usize,
    keys: Vec<u64>,
    /// Keys from here on are known to be outside.
    bound: u64,
}

impl First {
    pub(crate) fn new(k: usize) -> Self {
        Self { k, keys: Vec::new(), bound: if k == 0 { 0 } else { u64::MAX } }
    }

    pub(crate) fn offer(&mut self, id: u32, value: f32) {
        let bits = (value + 0.0).to_bits();
        let rising = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        let key = u64::from(!rising) << 32 | u64::from(id);
        if key >= self.bound {
            return;
        }
        self.keys.push(key);
        if self.keys.len() >= self.k.saturating_mul(2) {
            self.keys.select_nth_unstable(self.k - 1);
            self.keys.truncate(self.k);
            self.bound = self.keys[self.k - 1];
        }
    }

    pub(crate) fn into_ranked(mut self) -> Vec<Candidate> {
        self.keys.sort_unstable();
        self.keys.truncate(self.k);
        self.keys.iter().map(|&key| Self::candidate(key)).collect()
    }

    fn candidate(key: u64) -> Candidate {
        let rising = !((key >> 32) as u32);
        let bits = if rising >> 31 == 1 { rising & !(1 << 31) } else { !rising };
        Candidate { id: key as u32, value: f32::from_bits(bits) }
    }
}
