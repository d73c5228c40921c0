//! `generation_config.json`.

use super::keys::Keys;
use crate::{Config, Result, json};

/// Sampling defaults that the checkpoint suggests. Every key is optional.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct GenerationConfig {
    /// Tokens that end a reply; empty when the file says nothing.
    pub eos: Vec<u32>,
    /// Whether to sample at all.
    pub do_sample: Option<bool>,
    /// At least 0.
    pub temperature: Option<f32>,
    /// In (0, 1].
    pub top_p: Option<f32>,
    /// Keep the k best; 0 keeps all.
    pub top_k: Option<u32>,
    /// In [0, 1].
    pub min_p: Option<f32>,
    /// Above 0; 1 does nothing.
    pub repetition_penalty: Option<f32>,
    /// In [-2, 2]; subtracted once from tokens already generated.
    pub presence_penalty: Option<f32>,
    /// In [-2, 2]; subtracted per occurrence.
    pub frequency_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Parses the text of `generation_config.json`; `file` names it in errors. Token ids must be below the vocabulary size.
    pub fn parse(file: &str, text: &[u8], config: &Config) -> Result<Self> {
        let object = json::object(file, text)?;
        let keys = Keys { file, path: "", object: &object };
        let number = |key, accepted, test| Ok(keys.number_opt(key, accepted, test)?.map(|x| x as f32));
        let penalty = |key| number(key, "a number from -2 to 2", |x| (-2.0..=2.0).contains(&x));
        Ok(Self {
            eos: super::parse::tokens(&keys, "eos_token_id", config.vocab_size)?,
            do_sample: keys.boolean_opt("do_sample")?,
            temperature: number("temperature", "a number from 0 to 100", |x| (0.0..=100.0).contains(&x))?,
            top_p: number("top_p", "a number above 0 and at most 1", |x| x > 0.0 && x <= 1.0)?,
            top_k: keys.integer_opt("top_k", 0, u64::from(u32::MAX))?.map(|k| k as u32),
            min_p: number("min_p", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?,
            repetition_penalty: number("repetition_penalty", "a number above 0", |x| x > 0.0)?,
            presence_penalty: penalty("presence_penalty")?,
            frequency_penalty: penalty("frequency_penalty")?,
        })
    }
}
