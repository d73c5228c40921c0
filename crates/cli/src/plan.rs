//! `castiron plan`: will it fit, from headers alone.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use castiron_engine::session::{SNAPSHOT_STRIDE, SNAPSHOTS};
use castiron_format::TableMode;
use castiron_model::{Plan as Planned, PlanRequest, Use, Verdict, advice, plan as make};

use crate::args::{self, Table};
use crate::failure::Failure;
use crate::output::size;
use crate::{open, output};

/// Arguments of `plan`.
#[derive(clap::Args)]
pub struct Plan {
    /// A checkpoint directory; the built-in tiny model when not given.
    pub model: Option<PathBuf>,
    /// Tokens of every stream; the checkpoint's own longest when not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,
    /// Streams at once.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub streams: u32,
    /// Where the n-gram table lives.
    #[arg(long, value_enum, default_value_t = Table::File)]
    pub table: Table,
    /// Row cache of a table in the file, in MiB.
    #[arg(long, default_value_t = 64, value_name = "MIB")]
    pub table_cache: usize,
    /// Snapshots of every stream; as many as a session takes over such a context when not given.
    #[arg(long, value_name = "N")]
    pub snapshots: Option<u16>,
    /// Prompt rows of one forward pass.
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub chunk: u32,
    /// Rounding of operands and caches.
    #[arg(long, value_enum, default_value_t = args::Activations::Bf16)]
    pub activations: args::Activations,
    /// Memory of the machine, such as 137438953472, 128GiB or 96GB; this machine's when not given.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub host_memory: Option<u64>,
}

/// Runs the command: exit code 0 when it fits, 1 when not.
pub fn plan(args: &Plan, json: bool) -> Result<ExitCode, Failure> {
    let checkpoint = open::checkpoint(args.model.as_deref())?;
    let (config, inventory) = (checkpoint.config(), checkpoint.inventory());
    let most = config.max_position;
    let context = args.context.unwrap_or(most);
    if context > most {
        return Err(Failure::input(anyhow!(
            "a context of {context} tokens is longer than the checkpoint's {most}; ask for at most that"
        )));
    }
    let memory = match args.host_memory {
        Some(memory) => memory,
        None => host_memory().map_err(Failure::input)?,
    };
    // One where the length is a multiple of the stride, and one at the end of a prompt.
    let taken = (context / SNAPSHOT_STRIDE) as usize + 1;
    let request = PlanRequest {
        context,
        streams: args.streams as usize,
        table: open::table(args.table, args.table_cache),
        snapshots: args.snapshots.map_or(taken.min(SNAPSHOTS), usize::from),
        chunk: args.chunk as usize,
        activations: open::activations(args.activations),
    };
    let planned = make(config, &inventory, &request);
    let advice = advice(config, &inventory, &request, memory);
    let text = match json {
        true => as_json(&planned, &advice, memory, &checkpoint.digest()).to_string(),
        false => as_text(&planned, &advice, memory),
    };
    output::line(&text)?;
    Ok(if planned.verdict(memory) == Verdict::Fits { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Fits => "fits",
        Verdict::Thrashes => "does not fit: it would run, but read weights from the disk again and again",
        Verdict::Fails => "does not fit",
    }
}

fn as_text(plan: &Planned, advice: &[String], memory: u64) -> String {
    let mut text = String::new();
    for (usage, title) in [
        (Use::Mapped, "mapped from the files, wanted in memory"),
        (Use::Resident, "allocated"),
        (Use::Untouched, "in the files, not counted"),
    ] {
        text.push_str(&format!("{title}\n"));
        for line in plan.lines.iter().filter(|l| l.usage == usage) {
            text.push_str(&format!("  {:<28} {:>10}  {}\n", line.name, size(line.bytes), line.note));
        }
        text.push_str(&format!("  {:<28} {:>10}\n", "together", size(plan.bytes(usage))));
    }
    text.push_str(&format!(
        "\na token more costs {} of keys and values and {} of index keys; a stream at {} tokens holds {}\n",
        size(plan.kv_per_token),
        size(plan.index_per_token),
        plan.request.context,
        size(plan.state.total()),
    ));
    text.push_str(&format!(
        "needed {}, the machine has {} (a twentieth is left to the rest): {}",
        size(plan.needed()),
        size(memory),
        word(plan.verdict(memory)),
    ));
    for line in advice {
        text.push_str(&format!("\n  try {line}"));
    }
    text
}

fn as_json(plan: &Planned, advice: &[String], memory: u64, digest: &str) -> serde_json::Value {
    let line = |l: &castiron_model::PlanLine| serde_json::json!({ "name": l.name, "use": l.usage.name(), "bytes": l.bytes, "note": l.note });
    let r = &plan.request;
    serde_json::json!({
        "checkpoint": digest,
        "context": r.context,
        "streams": r.streams,
        "table": if r.table == TableMode::Memory { "memory" } else { "file" },
        "snapshots": r.snapshots,
        "chunk": r.chunk,
        "activations": r.activations.name(),
        "lines": plan.lines.iter().map(line).collect::<Vec<_>>(),
        "kv_bytes_per_token": plan.kv_per_token,
        "index_bytes_per_token": plan.index_per_token,
        "state_bytes_per_stream": plan.state.total(),
        "snapshot_bytes": plan.snapshot,
        "mapped_bytes": plan.bytes(Use::Mapped),
        "resident_bytes": plan.bytes(Use::Resident),
        "untouched_bytes": plan.bytes(Use::Untouched),
        "needed_bytes": plan.needed(),
        "smallest_machine_bytes": plan.smallest_machine(),
        "host_memory_bytes": memory,
        "fits": plan.verdict(memory) == Verdict::Fits,
        "verdict": word(plan.verdict(memory)),
        "advice": advice,
    })
}

/// The memory of this machine, or the limit of its container when that is lower.
fn host_memory() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")
        .context("this system does not say how much memory it has; give --host-memory")?;
    let total = meminfo(&text).ok_or_else(|| anyhow!("/proc/meminfo has no MemTotal; give --host-memory"))?;
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|t| t.trim().parse().ok());
    Ok(limit.map_or(total, |limit: u64| limit.min(total)))
}

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A number of bytes with an optional unit.
fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit = match text[digits..].trim() {
        "" | "B" => Some(1),
        "kB" => Some(1_000),
        "MB" => Some(1_000_000),
        "GB" => Some(1_000_000_000),
        "TB" => Some(1_000_000_000_000),
        "KiB" => Some(1 << 10),
        "MiB" => Some(1 << 20),
        "GiB" => Some(1 << 30),
        "TiB" => Some(1 << 40),
        _ => None,
    };
    let number = text[..digits].parse::<u64>().ok();
    let bytes = number.zip(unit).and_then(|(n, unit)| n.checked_mul(unit)).filter(|&n| n > 0);
    bytes.ok_or_else(|| format!("{text:?} is not a number of bytes, such as 137438953472, 128GiB or 96GB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        assert_eq!(bytes("137438953472"), Ok(1 << 37));
        assert_eq!((bytes("128GiB"), bytes("96 GB")), (Ok(1 << 37), Ok(96_000_000_000)));
        for bad in ["", "GB", "-1", "1.5GB", "12 Gb", "0", "99999999999TiB"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn meminfo_is_read() {
        assert_eq!(meminfo("MemFree: 1 kB\nMemTotal:       24689372 kB\n"), Some(24_689_372 * 1024));
        assert_eq!(meminfo("MemTotal: many"), None);
    }
}
