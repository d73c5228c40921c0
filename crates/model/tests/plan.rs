//! The plan against what a running model really holds.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use castiron_format::{Checkpoint, Source, TableMode};
use castiron_model::{Activations, Model, Options, PlanRequest, Use, Verdict, advice, plan};
use common::{f32_options, feed, id, repo};

/// Counts what is allocated, and the most at once.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged; the counters are atomics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`, and `alloc` above used the same allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn open(path: &str) -> Checkpoint {
    Checkpoint::open(Source::Dir(repo(path))).unwrap()
}

fn request(context: u32, activations: Activations) -> PlanRequest {
    PlanRequest {
        context,
        streams: 1,
        table: TableMode::File { cache_bytes: 1 << 20 },
        snapshots: 0,
        chunk: 64,
        activations,
    }
}

/// The counters are the whole program's, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

#[test]
fn states_are_planned_to_the_byte_and_the_rest_on_the_high_side() {
    let _turn = TURN.lock();
    states_are_exact();
    working_memory_and_weights_are_close();
    snapshots_are_bounded();
}

fn states_are_exact() {
    for name in ["tests/golden/tiny_a", "tests/golden/tiny_b", "tests/golden/tiny_nvfp4", "assets/tiny"] {
        for options in [Options::default(), f32_options()] {
            let checkpoint = open(name);
            let mut model = Model::open(&checkpoint, &options).unwrap();
            let slot = model.new_stream().unwrap();
            for step in [1, 3, 60, 1, 64, 7] {
                let start = model.length(slot).unwrap();
                let ids: Vec<u32> = (0..step).map(|i| id(u64::from(start) + i, model.vocab())).collect();
                feed(&mut model, slot, &ids, 50);
                let length = model.length(slot).unwrap();
                let planned =
                    plan(checkpoint.config(), &checkpoint.inventory(), &request(length, options.activations));
                assert_eq!(model.state_bytes(slot).unwrap(), planned.state, "{name} {options:?} at {length}");
            }
        }
    }
}

fn working_memory_and_weights_are_close() {
    for name in ["tests/golden/tiny_bf16", "tests/golden/tiny_fp8", "assets/tiny"] {
        let checkpoint = open(name);
        let before = NOW.load(Ordering::Relaxed);
        let options = Options { threads: 1, table: TableMode::File { cache_bytes: 0 }, ..Options::default() };
        let mut model = Model::open(&checkpoint, &options).unwrap();
        let slot = model.new_stream().unwrap();
        let opened = NOW.load(Ordering::Relaxed) - before;
        let rows = 128;
        let ids: Vec<u32> = (0..2 * rows).map(|i| id(i as u64, model.vocab())).collect();
        let mut row = |i: usize| castiron_model::Row {
            slot,
            position: i as u32,
            token: ids[i],
            logits: i + 1 == 2 * rows,
        };
        let (first, second): (Vec<_>, Vec<_>) =
            ((0..rows).map(&mut row).collect(), (rows..2 * rows).map(&mut row).collect());
        model.forward(&first, &[]).unwrap();
        let start = NOW.load(Ordering::Relaxed);
        let state = model.state_bytes(slot).unwrap().total();
        PEAK.store(start, Ordering::Relaxed);
        let out = model.forward(&second, &[]).unwrap();
        let grown = model.state_bytes(slot).unwrap().total() - state;
        // The residual of the first pass was there already.
        let wide = (rows * model.config().wide() * 4) as u64;
        let measured = (PEAK.load(Ordering::Relaxed) - start) as u64 - grown + wide;
        drop(out);
        let request = PlanRequest { chunk: rows, ..request(2 * rows as u32, Activations::Bf16) };
        let planned = plan(checkpoint.config(), &checkpoint.inventory(), &request);
        let line = |name: &str| planned.lines.iter().find(|l| l.name == name).unwrap().bytes;
        let working = line("working memory");
        assert!(
            measured <= working && working <= 3 * measured,
            "{name}: {measured} measured, {working} planned"
        );
        let (decoded, fresh) = (line("decoded vectors and scales"), planned.state.copied());
        let opened = opened as u64;
        assert!(
            opened <= decoded + fresh && decoded + fresh <= 3 * opened,
            "{name}: {opened} after opening, {decoded} and {fresh} planned"
        );
    }
}

fn snapshots_are_bounded() {
    let checkpoint = open("assets/tiny");
    let mut model = Model::open(&checkpoint, &Options { threads: 1, ..Options::default() }).unwrap();
    let slot = model.new_stream().unwrap();
    let ids: Vec<u32> = (0..203).map(|i| id(i, model.vocab())).collect();
    feed(&mut model, slot, &ids[..197], 64);
    let snapshot = model.snapshot(slot).unwrap();
    let (before, state) = (NOW.load(Ordering::Relaxed), model.state_bytes(slot).unwrap().total());
    drop(feed(&mut model, slot, &ids[197..], 6));
    let grown = model.state_bytes(slot).unwrap().total() - state;
    let held = (NOW.load(Ordering::Relaxed) - before) as u64 - grown;
    let planned = plan(checkpoint.config(), &checkpoint.inventory(), &request(203, Activations::Bf16));
    assert!(held <= planned.snapshot, "{held} held for a snapshot, {} planned", planned.snapshot);
    drop(snapshot);
}

#[test]
fn a_file_backed_table_does_not_count_and_one_in_memory_does() {
    let _turn = TURN.lock();
    let checkpoint = open("assets/tiny");
    let (config, inventory) = (checkpoint.config(), checkpoint.inventory());
    let table = inventory.components.iter().find(|c| c.name == "n-gram table").unwrap().bytes;
    let file = plan(config, &inventory, &request(1000, Activations::Bf16));
    let memory = plan(
        config,
        &inventory,
        &PlanRequest { table: TableMode::Memory, ..request(1000, Activations::Bf16) },
    );
    assert!(file.bytes(Use::Untouched) >= table);
    let cache = file.lines.iter().find(|l| l.name == "row cache").unwrap().bytes;
    assert_eq!(memory.needed(), file.needed() + table - cache);
    let parts: u64 = file.lines.iter().filter(|l| l.usage != Use::Resident).map(|l| l.bytes).sum();
    assert_eq!(parts, inventory.bytes, "every stored byte is in one line");
}

#[test]
fn verdicts_and_advice_follow_the_memory() {
    let _turn = TURN.lock();
    let checkpoint = open("assets/tiny");
    let (config, inventory) = (checkpoint.config(), checkpoint.inventory());
    let wanted = PlanRequest { streams: 4, snapshots: 12, ..request(262_144, Activations::Bf16) };
    let whole = plan(config, &inventory, &wanted);
    let enough = whole.smallest_machine();
    assert_eq!(whole.verdict(enough), Verdict::Fits);
    assert!(advice(config, &inventory, &wanted, enough).is_empty());
    assert_ne!(whole.verdict(enough - enough / 50), Verdict::Fits);
    // Every piece of advice that gives one number is true, and the next larger one is not.
    let half = enough / 2;
    let text = advice(config, &inventory, &wanted, half).join("\n");
    let number = |key: &str| -> u64 {
        let rest = text.split(key).nth(1).unwrap_or_else(|| panic!("{key} in {text}"));
        rest.trim_start().chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
    };
    let fits = |r: &PlanRequest| plan(config, &inventory, r).verdict(half) == Verdict::Fits;
    let context = number("--context") as u32;
    assert!(fits(&PlanRequest { context, ..wanted.clone() }));
    assert!(!fits(&PlanRequest { context: context + 64, ..wanted.clone() }));
    let streams = number("--streams") as usize;
    assert!(fits(&PlanRequest { streams, ..wanted.clone() }));
    assert!(!fits(&PlanRequest { streams: streams + 1, ..wanted.clone() }));
    assert!(advice(config, &inventory, &wanted, 1 << 20).join("\n").contains("no setting fits"));
    let memory = PlanRequest { table: TableMode::Memory, ..wanted };
    let text = advice(config, &inventory, &memory, half).join("\n");
    let smaller = plan(
        config,
        &inventory,
        &PlanRequest { table: TableMode::File { cache_bytes: 64 << 20 }, ..memory.clone() },
    );
    let saves = smaller.needed() < plan(config, &inventory, &memory).needed();
    assert_eq!(text.contains("--table file"), saves, "only when it helps: {text}");
}
