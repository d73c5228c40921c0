//! From flags and the checkpoint's defaults to sampling parameters and stop rules.

use castiron_engine::sampling::{Defaults, Params};
use castiron_engine::stop::StopIds;
use castiron_format::Checkpoint;

use crate::args::Sampling;
use crate::failure::Failure;

/// Parameters for a reply; ids at or above `vocab` are never drawn.
pub fn params(checkpoint: &Checkpoint, flags: &Sampling, vocab: usize) -> Result<Params, Failure> {
    let g = checkpoint.generation();
    let defaults = Defaults {
        do_sample: g.do_sample,
        temperature: g.temperature,
        top_k: g.top_k,
        top_p: g.top_p,
        min_p: g.min_p,
        presence_penalty: g.presence_penalty,
        frequency_penalty: g.frequency_penalty,
        repetition_penalty: g.repetition_penalty,
    };
    let mut p =
        if flags.greedy { Params::greedy(vocab) } else { defaults.params(vocab).map_err(Failure::input)? };
    let set = |to: &mut f32, flag: Option<f32>| *to = flag.unwrap_or(*to);
    set(&mut p.temperature, flags.temperature);
    set(&mut p.top_p, flags.top_p);
    set(&mut p.min_p, flags.min_p);
    set(&mut p.presence_penalty, flags.presence_penalty);
    set(&mut p.frequency_penalty, flags.frequency_penalty);
    p.top_k = flags.top_k.unwrap_or(p.top_k);
    p.logit_bias = flags.logit_bias.clone();
    p.seed = flags.seed;
    p.check().map_err(Failure::input)?;
    Ok(p)
}

/// Ids that end a reply: generation_config and config together.
pub fn stop_ids(checkpoint: &Checkpoint, ignore_eos: bool) -> StopIds {
    StopIds::new(&checkpoint.generation().eos, &checkpoint.config().eos).ignore_eos(ignore_eos)
}
