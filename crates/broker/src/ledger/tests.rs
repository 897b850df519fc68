//! The ledger against a model that looks at everything anew, and rules that need no model.

mod model;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use poorwill_testkit::effort::Effort;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::{Chunk, Effect, Ledger, LedgerError};
use crate::protocol::{Ask, Asked, LENDER_BYTES_MAX, Spared};
use model::{LedgerModel, ModelEffect};

/// Memory that says whether it exists.
#[derive(Debug)]
struct Token(u64, Rc<RefCell<BTreeSet<u64>>>);

impl Drop for Token {
    fn drop(&mut self) {
        assert!(self.1.borrow_mut().remove(&self.0), "it was dropped before");
    }
}

#[derive(Debug, Clone)]
enum Op {
    Join { device: usize },
    Leave { client: usize },
    Listen { client: usize },
    StopListening { client: usize },
    Lend { client: usize, chunks: Vec<(u64, u64)> },
    TakeBack { client: usize, ids: Option<Vec<u64>> },
    Announce { client: usize, bytes: u64 },
    Ask { client: usize, bytes: u64, spared: Spared, within: u64 },
    GaveUp { client: usize, ask: u64, bytes: u64 },
    Wait { seconds: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let client = || 0..5_usize;
    let chunks = vec((0..8_u64, prop_oneof![1 => Just(0_u64), 20 => 1..9_u64]), 0..6);
    let wanted = prop_oneof![1 => Just(Ask::ALL), 8 => 0..30_u64];
    let spared =
        (vec(0..3_u32, 0..2), any::<bool>()).prop_map(|(processes, asker)| Spared { processes, asker });
    prop_oneof![
        2 => (0..2_usize).prop_map(|device| Op::Join { device }),
        1 => client().prop_map(|client| Op::Leave { client }),
        2 => client().prop_map(|client| Op::Listen { client }),
        1 => client().prop_map(|client| Op::StopListening { client }),
        6 => (client(), chunks).prop_map(|(client, chunks)| Op::Lend { client, chunks }),
        2 => (client(), option::of(vec(0..8_u64, 0..6))).prop_map(|(client, ids)| Op::TakeBack { client, ids }),
        3 => (client(), 0..12_u64).prop_map(|(client, bytes)| Op::Announce { client, bytes }),
        5 => (client(), wanted, spared, 0..6_u64)
            .prop_map(|(client, bytes, spared, within)| Op::Ask { client, bytes, spared, within }),
        4 => (client(), 0..3_u64, 0..12_u64).prop_map(|(client, ask, bytes)| Op::GaveUp { client, ask, bytes }),
        2 => (1..4_u64).prop_map(|seconds| Op::Wait { seconds }),
    ]
}

/// The ledger beside its model, and all memory that exists.
#[derive(Default)]
struct Pair {
    ledger: Ledger<Token>,
    model: LedgerModel,
    clients: Vec<u64>,
    ids: u64,
    asks: u64,
    now: u64,
    alive: Rc<RefCell<BTreeSet<u64>>>,
    tokens: u64,
}

impl Pair {
    fn client(&self, nth: usize) -> Option<u64> {
        (!self.clients.is_empty()).then(|| self.clients[nth % self.clients.len()])
    }

    fn step(&mut self, op: Op) {
        self.now += 1;
        let now = Duration::from_secs(self.now);
        let effects = match op {
            Op::Join { device } => {
                self.ids += 1;
                self.clients.push(self.ids);
                let pid = (self.ids % 3) as u32;
                self.ledger.join(self.ids, device.to_string(), String::new(), pid);
                self.model.join(self.ids, device);
                return;
            }
            Op::Leave { client } => {
                let Some(id) = self.client(client) else { return };
                self.clients.retain(|other| *other != id);
                (self.ledger.leave(id, now), self.model.leave(id, self.now))
            }
            Op::Listen { client } => {
                let Some(id) = self.client(client) else { return };
                assert_eq!(self.ledger.listen(id, id + 1000), self.model.listen(id, id + 1000));
                return;
            }
            Op::StopListening { client } => {
                let Some(id) = self.client(client) else { return };
                (self.ledger.stop_listening(id, now), self.model.stop_listening(id, self.now))
            }
            Op::Lend { client, chunks } => {
                let Some(id) = self.client(client) else { return };
                let given = chunks.iter().map(|(id, bytes)| self.chunk(*id, *bytes)).collect();
                let done = self.ledger.lend(id, given, now);
                assert_eq!(done.is_ok(), self.model.lend(id, &chunks, self.now), "{done:?}");
                return;
            }
            Op::TakeBack { client, ids } => {
                let Some(id) = self.client(client) else { return };
                let back = self.ledger.take_back(id, ids.as_deref());
                let back: Vec<_> = back.iter().map(|chunk| (chunk.id, chunk.bytes)).collect();
                assert_eq!(back, self.model.take_back(id, ids.as_deref()));
                return;
            }
            Op::Announce { client, bytes } => {
                let Some(id) = self.client(client) else { return };
                self.ledger.announce(id, bytes, now).unwrap();
                self.model.announce(id, bytes, self.now);
                return;
            }
            Op::Ask { client, bytes, spared, within } => {
                let Some(id) = self.client(client) else { return };
                assert_eq!(self.ledger.is_waiting(id), self.model.is_waiting(id));
                if self.ledger.is_waiting(id) {
                    return;
                }
                self.asks += 1;
                let deadline = now + Duration::from_secs(within);
                let effects = self.ledger.ask(id, bytes, spared.clone(), now, deadline);
                (effects, self.model.ask((self.asks, id), bytes, spared, self.now, self.now + within))
            }
            Op::GaveUp { client, ask, bytes } => {
                let Some(id) = self.client(client) else { return };
                let ask = self.asks.saturating_sub(ask);
                (self.ledger.gave_up(id, ask, bytes, now), self.model.gave_up(id, ask, bytes, self.now))
            }
            Op::Wait { seconds } => {
                self.now += seconds;
                let now = Duration::from_secs(self.now);
                (self.ledger.expire(now), self.model.expire(self.now))
            }
        };
        let (done, expected) = effects;
        assert_eq!(done.iter().map(plain).collect::<Vec<_>>(), expected);
    }

    fn chunk(&mut self, id: u64, bytes: u64) -> Chunk<Token> {
        self.tokens += 1;
        self.alive.borrow_mut().insert(self.tokens);
        let memory = Token(self.tokens, Rc::clone(&self.alive));
        Chunk { id, bytes, is_dropped: model::is_dropped(id), memory }
    }

    fn check(&self) {
        let status = self.ledger.status(Duration::from_secs(self.now));
        let rows: Vec<_> = status
            .lenders
            .iter()
            .map(|row| (row.device.clone(), row.lent_bytes, row.chunks, row.announced_bytes, row.lent_s))
            .collect();
        assert_eq!(rows, self.model.rows(self.now));
        assert_eq!(
            self.alive.borrow().len(),
            self.model.chunks(),
            "memory is dropped as soon as it is freed"
        );
        let deadline = self.ledger.deadline().map(|at| at.as_secs());
        assert_eq!(deadline, self.model.deadline());
        let totals = status.totals;
        let sums = (totals.lent_bytes, totals.taken_bytes, totals.brought_back_bytes, totals.given_up_bytes);
        assert_eq!(sums, self.model.totals());
    }
}

fn plain(effect: &Effect) -> ModelEffect {
    match effect {
        Effect::GiveUp { events, ask, bytes } => {
            ModelEffect::GiveUp { events: *events, ask: *ask, bytes: *bytes }
        }
        Effect::Close { events } => ModelEffect::Close { events: *events },
        Effect::Answer { client, asked } => ModelEffect::Answer {
            client: *client,
            sums: (asked.freed_bytes, asked.given_up_bytes, asked.missing_bytes),
        },
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: Effort::of_this_run().cases(400),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_ledger_is_its_model(ops in vec(op(), 1..60)) {
        let mut pair = Pair::default();
        // Two on a device, of which one can be asked.
        for op in [Op::Join { device: 0 }, Op::Join { device: 0 }, Op::Listen { client: 1 }] {
            pair.step(op);
        }
        for op in ops {
            pair.step(op);
            pair.check();
        }
    }
}

type Plain = Chunk<()>;

fn chunk(id: u64, bytes: u64) -> Plain {
    Chunk { id, bytes, is_dropped: false, memory: () }
}

fn ledger(lenders: &[&[u64]]) -> Ledger<()> {
    let mut ledger = Ledger::default();
    for (client, chunks) in (0..).zip(lenders) {
        ledger.join(client, "device".into(), String::new(), 7);
        let chunks = (0..).zip(*chunks).map(|(id, bytes)| chunk(id, *bytes)).collect();
        ledger.lend(client, chunks, Duration::from_secs(client)).unwrap();
    }
    ledger
}

fn ask(ledger: &mut Ledger<()>, client: u64, bytes: u64) -> Asked {
    let now = Duration::from_secs(100);
    match ledger.ask(client, bytes, Spared::default(), now, now).pop() {
        Some(Effect::Answer { asked, .. }) => asked,
        other => panic!("{other:?}"),
    }
}

fn left(ledger: &mut Ledger<()>, client: u64) -> Vec<u64> {
    ledger.take_back(client, None).iter().map(|chunk| chunk.bytes).collect()
}

#[test]
fn the_oldest_lender_gives_first_and_the_asker_last() {
    let mut ledger = ledger(&[&[4], &[4], &[4]]);
    let asked = ask(&mut ledger, 0, 6);
    assert_eq!((asked.freed_bytes, asked.missing_bytes), (8, 0));
    assert_eq!([0, 1, 2].map(|client| left(&mut ledger, client).len()), [1, 0, 0]);
}

#[test]
fn what_was_dropped_goes_before_what_a_wake_would_copy() {
    let mut ledger = ledger(&[&[4], &[], &[4]]);
    for client in [0, 1, 2] {
        let dropped = Chunk { is_dropped: true, ..chunk(7, 2) };
        ledger.lend(client, vec![dropped], Duration::from_secs(10 + client)).unwrap();
    }
    let mut left_after = |bytes| {
        ask(&mut ledger, 0, bytes);
        ledger.status(Duration::ZERO).lenders.iter().map(|row| row.lent_bytes).collect::<Vec<_>>()
    };
    assert_eq!(left_after(1), [6, 2, 4], "the oldest of the others gives what it dropped");
    assert_eq!(left_after(2), [6, 4]);
    assert_eq!(left_after(1), [6], "and then the rest");
    assert_eq!(left_after(1), [4]);
}

#[test]
fn no_more_is_freed_than_is_needed() {
    for (bytes, freed) in
        [(1, 1), (2, 2), (3, 4), (5, 8), (9, 9), (10, 10), (11, 12), (13, 13), (100, 15), (Ask::ALL, 15)]
    {
        let asked = ask(&mut ledger(&[&[2, 8, 1, 4]]), 0, bytes);
        assert_eq!(asked.freed_bytes, freed, "{bytes}");
        let missing = if bytes == Ask::ALL { 0 } else { bytes.saturating_sub(freed) };
        assert_eq!(asked.missing_bytes, missing, "{bytes}");
    }
}

#[test]
fn what_is_refused_leaves_nothing_behind() {
    let mut ledger = ledger(&[&[4]]);
    let now = Duration::ZERO;
    for (chunks, error) in [
        (vec![chunk(1, 1), chunk(0, 1)], LedgerError::Duplicate { id: 0 }),
        (vec![chunk(1, 1), chunk(1, 2)], LedgerError::Duplicate { id: 1 }),
        (vec![chunk(1, 1), chunk(2, 0)], LedgerError::Empty { id: 2 }),
        (vec![chunk(1, LENDER_BYTES_MAX)], LedgerError::Bytes { bytes: LENDER_BYTES_MAX }),
        (vec![chunk(1, u64::MAX), chunk(2, u64::MAX)], LedgerError::Bytes { bytes: u64::MAX }),
    ] {
        assert_eq!(ledger.lend(0, chunks, now), Err(error));
    }
    assert!(ledger.announce(0, LENDER_BYTES_MAX + 1, now).is_err());
    assert_eq!(left(&mut ledger, 0), [4]);
}
