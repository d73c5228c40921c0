//! `castiron logits`: token ids in, logits out.

use std::collections::BTreeMap;

use castiron_engine::session::Session;
use castiron_format::safetensors::Dtype;
use castiron_format::write::{Layout, TensorSpec};
use castiron_model::hash_floats;

use crate::args::Logits;
use crate::failure::Failure;
use crate::output::{self, WholeFile};
use crate::{ids, open};

/// Runs the command.
pub fn logits(args: &Logits, json: bool) -> Result<(), Failure> {
    keep_inputs(args)?;
    let ids = ids::read(&args.ids).map_err(Failure::input)?;
    let checkpoint = open::checkpoint(Some(&args.model))?;
    let model = open::model(&checkpoint, &args.numerics)?;
    let (vocab, context) = (model.vocab(), model.context());
    let ids = ids::check(&ids, vocab, context).map_err(Failure::input)?;
    let numerics = model.numerics();
    let mut session = Session::new(model)?;
    let spec = TensorSpec::new("logits", Dtype::F32, [ids.len(), vocab]);
    let layout =
        Layout::new(&args.out.display().to_string(), &[spec], &BTreeMap::new()).map_err(Failure::input)?;
    let mut file = WholeFile::create(&args.out)?;
    file.write(layout.header())?;
    let mut hash = blake3::Hasher::new();
    for chunk in ids.chunks(args.numerics.chunk as usize) {
        let rows = session.feed_for_logits(chunk)?;
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        hash_floats(&mut hash, &rows);
        file.write(&bytes)?;
    }
    file.finish()?;
    let hash = hash.finalize().to_hex();
    if json {
        let receipt = serde_json::json!({
            "checkpoint": checkpoint.digest(),
            "numerics": "portable",
            "activations": numerics.activations.name(),
            "experts": numerics.experts.name(),
            "tokens": ids.len(),
            "vocab": vocab,
            "logits_hash": hash.as_str(),
            "out": args.out.display().to_string(),
        });
        output::line(&receipt.to_string())
    } else {
        output::line(&format!("{} rows of {vocab} logits in {}; hash {hash}", ids.len(), args.out.display()))
    }
}

/// Refuses an output that would replace the ids or a file of the checkpoint.
fn keep_inputs(args: &Logits) -> Result<(), Failure> {
    let Ok(out) = std::fs::canonicalize(&args.out) else { return Ok(()) };
    let is =
        |input: &std::path::Path, of: &std::path::Path| std::fs::canonicalize(input).is_ok_and(|i| i == of);
    if is(&args.ids, &out) || out.parent().is_some_and(|folder| is(&args.model, folder)) {
        return Err(Failure::input(anyhow::anyhow!(
            "--out {} would replace an input; name another file",
            args.out.display()
        )));
    }
    Ok(())
}
