//! Going on from what a session holds gives the bytes of a fresh run.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::ops::ControlFlow;
use std::path::Path;

use castiron_engine::sampling::{Params, Sampler};
use castiron_engine::session::{Limits, Session};
use castiron_engine::stop::StopIds;
use castiron_format::{Checkpoint, Source};
use castiron_model::{Model, Options};

fn session() -> Session {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny_b");
    let checkpoint = Checkpoint::open(Source::Dir(path)).unwrap();
    Session::new(Model::open(&checkpoint, &Options::default()).unwrap()).unwrap()
}

fn ids(count: u32, seed: u32) -> Vec<u32> {
    (0..count).map(|i| (i * 31 + i * i % 7 + seed) % 90).collect()
}

fn go(_: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn reply(session: &mut Session, count: usize) -> Vec<u32> {
    let vocab = session.model().vocab();
    let mut sampler = Sampler::new(Params { seed: 3, ..Params::neutral(vocab) }).unwrap();
    let limits = Limits { max_tokens: count, stop: StopIds::new(&[], &[]) };
    session.generate(&mut sampler, &limits, |_| ControlFlow::Continue(())).unwrap().ids
}

/// The reply to `ids`, and the state after it, of a session that never held anything else.
fn fresh(ids: &[u32], count: usize) -> (Vec<u32>, String) {
    let mut session = session();
    assert_eq!(session.resume(ids, go).unwrap().cached, 0);
    let reply = reply(&mut session, count);
    (reply, session.state_hash().unwrap())
}

#[test]
fn any_next_prompt_equals_a_fresh_run() {
    let mut held = session();
    let base = ids(60, 0);
    held.resume(&base, go).unwrap();
    let first = reply(&mut held, 9);
    let mut longer = base.clone();
    longer.extend(&first);
    longer.extend(ids(11, 5));
    let mut edited = base.clone();
    edited[40] = 1;
    // Longer, the same again (from its mark), an edit, a beginning, something else.
    let cases: [(&[u32], usize); 6] =
        [(&longer, 68), (&longer, 80), (&base, 60), (&edited, 0), (&base[..20], 0), (&longer[30..], 0)];
    for (prompt, cached) in cases {
        let resumed = held.resume(prompt, go).unwrap();
        assert_eq!(resumed.cached, cached, "{} ids", prompt.len());
        assert_eq!(held.ids(), prompt);
        let again = reply(&mut held, 7);
        assert_eq!((again, held.state_hash().unwrap()), fresh(prompt, 7), "{} ids", prompt.len());
    }
}

#[test]
fn an_interrupted_resume_goes_on_later() {
    let mut held = session();
    held.set_chunk(8);
    let prompt = ids(50, 2);
    let stop = |done: usize| if done >= 16 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let resumed = held.resume(&prompt, stop).unwrap();
    assert!(resumed.flow.is_break());
    assert_eq!(held.ids().len(), 16);
    assert_eq!(held.resume(&prompt, go).unwrap().cached, 16);
    assert_eq!((reply(&mut held, 5), held.state_hash().unwrap()), fresh(&prompt, 5));
}

#[test]
fn a_prompt_that_is_refused_changes_nothing() {
    let mut held = session();
    let prompt = ids(30, 4);
    held.resume(&prompt, go).unwrap();
    let before = held.state_hash().unwrap();
    let context = held.model().context() as usize;
    assert!(held.resume(&vec![1; context + 1], go).is_err());
    assert!(held.resume(&[1, u32::MAX], go).is_err());
    assert_eq!((held.ids(), held.state_hash().unwrap()), (&prompt[..], before));
}
