//! `kill -9` of each process at each of its steps: nothing leaks, and those that are left get their answers.

use std::path::PathBuf;
use std::process::Command;

use poorwill_broker::Ask;
use poorwill_testkit::watchdog::eventually;
use rustix::process::{Pid, Signal, kill_process};

use crate::actor::{Actor, acts};
use crate::support::{DEVICE, chunks, connect, descriptors, taken_back};

struct Stage {
    path: PathBuf,
    broker: Actor,
    /// What the broker has without connections.
    descriptors: usize,
    _folder: tempfile::TempDir,
}

impl Stage {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let broker = Actor::broker(&path);
        let descriptors = descriptors(broker.pid());
        Self { path, broker, descriptors, _folder: folder }
    }

    fn client(&self) -> Actor {
        let mut client = Actor::client(&self.path);
        assert_eq!(client.does("connect"), "done");
        client
    }

    /// Fails unless the broker comes to hold nothing for any client.
    fn expect_nothing_left(&self) {
        let pid = self.broker.pid();
        eventually("the broker has closed all it held", || descriptors(pid) == self.descriptors);
    }
}

/// What a lender does, a step after the other.
const LENDER: [&str; 5] = ["connect", "lend 1 4", "lend 2 4", "take_back", "lend 3 4"];

#[test]
fn a_broker_can_be_killed_after_any_step_of_a_lender() {
    if acts() {
        return;
    }
    for steps in 1..=LENDER.len() {
        let mut stage = Stage::new();
        let mut lender = Actor::client(&stage.path);
        for step in &LENDER[..steps] {
            assert!(!lender.does(step).contains("Lost"));
        }
        stage.broker.kill();
        for step in ["take_back", "lend 9 1", "announce 1", "ask 1"] {
            let said = lender.does(step);
            assert!(said.starts_with("Lost"), "{said}");
        }
        let said = Actor::client(&stage.path).does("connect");
        assert!(said.starts_with("NotThere"), "{said}");
        // Another one begins in its place.
        stage.broker = Actor::broker(&stage.path);
        assert_eq!(lender.does("connect"), "done");
        assert_eq!([lender.does("lend 1 4"), lender.does("take_back")], ["done", "[1]"]);
    }
}

#[test]
fn a_broker_that_is_killed_while_an_owner_is_asked_lets_the_asker_go_on() {
    if acts() {
        return;
    }
    let mut stage = Stage::new();
    let (mut owner, mut asker) = (stage.client(), stage.client());
    assert_eq!([owner.does("listen"), owner.does("announce 8")], ["done", "done"]);
    asker.say("ask 8");
    assert_eq!(owner.hear(), "asked for 8");
    stage.broker.kill();
    let said = asker.hear();
    assert!(said.starts_with("Lost"), "{said}");
    let said = owner.does("announce 8");
    assert!(said.starts_with("Lost"), "{said}");
}

#[test]
fn a_lender_can_be_killed_after_any_step() {
    if acts() {
        return;
    }
    let stage = Stage::new();
    for steps in 1..=LENDER.len() {
        let mut lender = Actor::client(&stage.path);
        for step in &LENDER[..steps] {
            lender.does(step);
        }
        lender.kill();
        stage.expect_nothing_left();
    }
    let mut half = Actor::client(&stage.path);
    assert_eq!(half.does("half"), "done");
    half.kill();
    stage.expect_nothing_left();
    let mut other = stage.client();
    assert_eq!(other.does("ask 4"), "0 4");
}

/// A forked child keeps its parent's connection open.
#[test]
fn a_lender_whose_connection_another_process_keeps_can_be_killed() {
    if acts() {
        return;
    }
    let stage = Stage::new();
    let mut lender = Actor::client(&stage.path);
    let heir: i32 = lender.does("share").parse().unwrap();
    let other = connect(&stage.path, DEVICE, "other");
    eventually("the chunk is lent", || other.status().unwrap().totals.lent_bytes == 4);
    lender.kill();
    eventually("the lender is gone", || other.status().unwrap().lenders.is_empty());
    drop(other);
    stage.expect_nothing_left();
    kill_process(Pid::from_raw(heir).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn an_owner_can_be_killed_while_it_is_asked() {
    if acts() {
        return;
    }
    let stage = Stage::new();
    let (mut owner, mut asker, lender) =
        (stage.client(), stage.client(), connect(&stage.path, DEVICE, "lender"));
    assert_eq!([owner.does("listen"), owner.does("announce 8")], ["done", "done"]);
    lender.lend(chunks(&[(7, 2)])).unwrap();
    asker.say("ask 9");
    assert_eq!(owner.hear(), "asked for 7");
    owner.kill();
    assert_eq!(asker.hear(), "2 7");
    drop((asker, lender));
    stage.expect_nothing_left();
}

#[test]
fn an_asker_can_be_killed_while_it_waits() {
    if acts() {
        return;
    }
    let stage = Stage::new();
    let (mut owner, lender) = (stage.client(), connect(&stage.path, DEVICE, "lender"));
    assert_eq!([owner.does("listen"), owner.does("announce 8")], ["done", "done"]);
    lender.lend(chunks(&[(1, 2), (2, 3)])).unwrap();
    let mut asker = stage.client();
    asker.say("ask 10");
    assert_eq!(owner.hear(), "asked for 5");
    let before = descriptors(stage.broker.pid());
    asker.kill();
    // Its socket and its process.
    eventually("all of the asker is closed", || descriptors(stage.broker.pid()) == before - 2);
    assert_eq!(taken_back(&lender), []);
    lender.lend(chunks(&[(1, 2)])).unwrap();
    assert_eq!(lender.ask(&Ask::freeing(2)).unwrap().freed_bytes, 2);
    drop((owner, lender));
    stage.expect_nothing_left();
}

#[test]
fn a_broker_without_descriptors_refuses_and_goes_on() {
    if acts() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker.sock");
    let mut broker = Actor::start("broker of few descriptors", &path, |_: &mut Command| {});
    assert_eq!(broker.hear(), "ready");
    let client = connect(&path, DEVICE, "client");
    let before = descriptors(broker.pid());
    let many: Vec<(u64, u64)> = (0..300).map(|id| (id, 1)).collect();
    let error = client.lend(chunks(&many)).unwrap_err();
    assert!(error.to_string().contains("ulimit"), "{error}");
    assert_eq!(descriptors(broker.pid()), before);
    client.lend(chunks(&many[..5])).unwrap();
    assert_eq!(taken_back(&client).len(), 5);
}
