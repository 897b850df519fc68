//! How the pool uses its tag locks and commands.

use std::time::Duration;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use super::commands::{Commands, next_command, pause};
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

#[test]
fn no_command_is_lost_and_the_end_is_seen() {
    loom::model(|| {
        let commands = Arc::new(Monitor::new(Commands::default()));
        let done = Arc::new(Monitor::new(false));
        let (heard, working) = (Arc::clone(&commands), Arc::clone(&done));
        let reaper = thread::spawn(move || {
            while next_command(&heard) {
                *working.lock_anyway() = true;
                working.notify();
            }
        });
        commands.lock_anyway().request_work();
        commands.notify();
        let mut worked = done.lock_anyway();
        while !*worked {
            worked = done.wait(worked).expect("no thread panics");
        }
        drop(worked);
        commands.lock_anyway().stop();
        commands.notify();
        reaper.join().unwrap();
        assert!(!next_command(&commands), "the end stays the end");
    });
}

/// A reaper that polls, and gets the command to end in between.
#[test]
fn a_pause_takes_the_next_command_and_sees_the_end() {
    loom::model(|| {
        let commands = Arc::new(Monitor::new(Commands::default()));
        let heard = Arc::clone(&commands);
        let reaper = thread::spawn(move || {
            while next_command(&heard) {
                // loom's waits do not time out.
                while pause(&heard, Duration::from_millis(1)) {}
            }
        });
        commands.lock_anyway().request_work();
        commands.notify();
        commands.lock_anyway().request_work();
        commands.notify();
        commands.lock_anyway().stop();
        commands.notify();
        reaper.join().unwrap();
        assert!(!pause(&commands, Duration::from_millis(1)), "the end stays the end");
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
