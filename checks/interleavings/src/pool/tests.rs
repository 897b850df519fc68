//! How the pool uses its tag locks and commands.

use std::time::Duration;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread::{self, JoinHandle};

use super::commands::{Commands, next_command, not_started, pause, request_work, stop};
use super::handover::HandoverLock;
use super::tag_lock::{Monitor, TagLock};

/// Two tags, and the work on the first: shared holders count one each, the exclusive one a hundred.
#[derive(Debug)]
struct Tags {
    locks: Monitor<[TagLock; 2]>,
    at_work: AtomicUsize,
}

const EXCLUSIVE: usize = 100;

impl Tags {
    fn new() -> Arc<Self> {
        Arc::new(Self { locks: Monitor::new(Default::default()), at_work: AtomicUsize::new(0) })
    }

    /// As an allocation or a copy does it.
    fn visit(&self) {
        let mut locks = self.locks.lock_anyway();
        while !locks[0].enter() {
            locks = self.locks.wait(locks).expect("no thread panics");
        }
        drop(locks);
        assert!(
            self.at_work.fetch_add(1, Ordering::SeqCst) < EXCLUSIVE,
            "a shared holder beside the exclusive one"
        );
        self.at_work.fetch_sub(1, Ordering::SeqCst);
        self.locks.lock_anyway()[0].leave();
        self.locks.notify();
    }

    /// As a sleep or a wake does it.
    fn work_exclusively_on(&self, tags: &[usize]) {
        let mut locks = self.locks.lock_anyway();
        while !tags.iter().all(|tag| locks[*tag].is_empty()) {
            locks = self.locks.wait(locks).expect("no thread panics");
        }
        assert!(tags.iter().all(|tag| locks[*tag].close()));
        drop(locks);
        assert_eq!(self.at_work.fetch_add(EXCLUSIVE, Ordering::SeqCst), 0, "not exclusive");
        self.at_work.fetch_sub(EXCLUSIVE, Ordering::SeqCst);
        let mut locks = self.locks.lock_anyway();
        tags.iter().for_each(|tag| locks[*tag].open());
        drop(locks);
        self.locks.notify();
    }
}

#[test]
fn no_holder_is_beside_the_exclusive_one() {
    loom::model(|| meet(1));
}

/// Three threads have too many interleavings for all of them: those with at most two forced switches.
#[test]
fn nor_are_two_shared_holders() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| meet(2));
}

fn meet(holders: usize) {
    let tags = Tags::new();
    let holders: Vec<_> = (0..holders)
        .map(|_| {
            let tags = Arc::clone(&tags);
            thread::spawn(move || tags.visit())
        })
        .collect();
    tags.work_exclusively_on(&[0]);
    holders.into_iter().for_each(|holder| holder.join().unwrap());
    assert!(tags.locks.lock_anyway()[0].is_empty());
}

#[test]
fn two_exclusive_holders_do_not_wait_for_each_other() {
    loom::model(|| {
        let tags = Tags::new();
        let other = Arc::clone(&tags);
        let other = thread::spawn(move || other.work_exclusively_on(&[0, 1]));
        tags.work_exclusively_on(&[1, 0]);
        other.join().unwrap();
        assert!(tags.locks.lock_anyway().iter().all(TagLock::is_empty));
    });
}

/// A reaper as the pool has it: started by a request that finds none under way.
#[derive(Debug)]
struct Reaper {
    commands: Monitor<Commands>,
    asked: AtomicUsize,
    seen: AtomicUsize,
    under_way: AtomicUsize,
}

impl Reaper {
    fn new() -> Arc<Self> {
        let commands = Monitor::new(Commands::default());
        let [asked, seen, under_way] = [0; 3].map(AtomicUsize::new);
        Arc::new(Self { commands, asked, seen, under_way })
    }

    fn ask(of: &Arc<Self>, most: impl Fn(&Monitor<Commands>) + Send + 'static) -> Option<JoinHandle<()>> {
        of.asked.fetch_add(1, Ordering::SeqCst);
        let reaper = Arc::clone(of);
        let run = move || {
            while next_command(&reaper.commands) {
                assert_eq!(reaper.under_way.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                reaper.seen.store(reaper.asked.load(Ordering::SeqCst), Ordering::SeqCst);
                most(&reaper.commands);
                reaper.under_way.fetch_sub(1, Ordering::SeqCst);
            }
        };
        request_work(&of.commands).then(|| thread::spawn(run))
    }
}

#[test]
fn no_command_is_lost_and_one_reaper_works_at_a_time() {
    loom::model(|| {
        let reaper = Reaper::new();
        let other = Arc::clone(&reaper);
        let other = thread::spawn(move || Reaper::ask(&other, |_| ()));
        let started = [Reaper::ask(&reaper, |_| ()), other.join().unwrap()];
        assert!(started.iter().any(Option::is_some), "one request has started it");
        started.into_iter().flatten().for_each(|reaper| reaper.join().unwrap());
        assert_eq!(reaper.seen.load(Ordering::SeqCst), 2, "the last request was followed");
    });
}

#[test]
fn one_that_did_not_start_is_started_by_the_next_request() {
    loom::model(|| {
        let commands = Monitor::new(Commands::default());
        assert!(request_work(&commands));
        not_started(&commands);
        assert!(request_work(&commands) && next_command(&commands));
        assert!(!next_command(&commands));
    });
}

/// A reaper that polls, and gets the command to end in between.
#[test]
fn a_pause_takes_the_next_command_and_sees_the_end() {
    loom::model(|| {
        let reaper = Reaper::new();
        // loom's waits do not time out.
        let poll = |commands: &Monitor<Commands>| while pause(commands, Duration::from_millis(1)) {};
        let first = Reaper::ask(&reaper, poll);
        let second = Reaper::ask(&reaper, poll);
        stop(&reaper.commands);
        [first, second].into_iter().flatten().for_each(|reaper| reaper.join().unwrap());
        assert!(!pause(&reaper.commands, Duration::from_millis(1)), "the end stays the end");
        assert!(!request_work(&reaper.commands) && !next_command(&reaper.commands), "and starts nothing");
    });
}

/// A thread that waits when the lock is handed over has had it when it comes back.
#[test]
fn a_waiter_has_the_lock_before_it_comes_back() {
    hand_over(2, false);
}

/// All hand it over, and no thread waits for ever.
#[test]
fn handing_over_ends() {
    hand_over(1, true);
    hand_over(2, true);
}

/// Some threads take the lock once each, or hand it over, beside one that hands it over to waiters.
fn hand_over(others: usize, they_do: bool) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let lock = Arc::new(HandoverLock::new(0));
        let other = |lock: Arc<HandoverLock<usize>>| {
            move || {
                let mut served = lock.lock_anyway();
                *served += 1;
                drop(if they_do { lock.yield_to_waiters(served) } else { served });
            }
        };
        let threads: Vec<_> = (0..others).map(|_| thread::spawn(other(Arc::clone(&lock)))).collect();
        let served = lock.lock_anyway();
        let (before, waiting) = (*served, lock.waiting());
        let served = lock.yield_to_waiters(served);
        // Who hands it over waits, too, and has been served.
        let least = if they_do { 0 } else { waiting };
        assert!(*served >= before + least, "{waiting} waited, and {} were served", *served - before);
        drop(served);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((*lock.lock_anyway(), lock.waiting()), (others, 0));
    });
}
