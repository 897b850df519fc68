//! The ways in which the pool uses its gates and orders.

use std::time::Duration;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use super::gate::{Gate, Monitor};
use super::handover::HandoverLock;
use super::orders::{Orders, next_order, pause};

/// Two tags, and who is at work on the first: guests count one each, whoever is alone a hundred.
#[derive(Debug)]
struct Tags {
    gates: Monitor<[Gate; 2]>,
    at_work: AtomicUsize,
}

const ALONE: usize = 100;

impl Tags {
    fn new() -> Arc<Self> {
        Arc::new(Self { gates: Monitor::new(Default::default()), at_work: AtomicUsize::new(0) })
    }

    /// As an allocation or a copy does it.
    fn visit(&self) {
        let mut gates = self.gates.lock_anyway();
        while !gates[0].enter() {
            gates = self.gates.wait(gates).expect("no thread panics");
        }
        drop(gates);
        assert!(self.at_work.fetch_add(1, Ordering::SeqCst) < ALONE, "a guest beside one who is alone");
        self.at_work.fetch_sub(1, Ordering::SeqCst);
        self.gates.lock_anyway()[0].leave();
        self.gates.ring();
    }

    /// As a sleep or a wake does it.
    fn work_alone_on(&self, tags: &[usize]) {
        let mut gates = self.gates.lock_anyway();
        while !tags.iter().all(|tag| gates[*tag].is_empty()) {
            gates = self.gates.wait(gates).expect("no thread panics");
        }
        assert!(tags.iter().all(|tag| gates[*tag].close()));
        drop(gates);
        assert_eq!(self.at_work.fetch_add(ALONE, Ordering::SeqCst), 0, "not alone");
        self.at_work.fetch_sub(ALONE, Ordering::SeqCst);
        let mut gates = self.gates.lock_anyway();
        tags.iter().for_each(|tag| gates[*tag].open());
        drop(gates);
        self.gates.ring();
    }
}

#[test]
fn nobody_is_beside_one_who_is_alone() {
    loom::model(|| meet(1));
}

/// Three threads have too many interleavings for all of them: those with at most two forced switches.
#[test]
fn nor_are_two_guests() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| meet(2));
}

fn meet(guests: usize) {
    let tags = Tags::new();
    let guests: Vec<_> = (0..guests)
        .map(|_| {
            let tags = Arc::clone(&tags);
            thread::spawn(move || tags.visit())
        })
        .collect();
    tags.work_alone_on(&[0]);
    guests.into_iter().for_each(|guest| guest.join().unwrap());
    assert!(tags.gates.lock_anyway()[0].is_empty());
}

#[test]
fn two_who_want_the_same_tags_do_not_wait_for_each_other() {
    loom::model(|| {
        let tags = Tags::new();
        let other = Arc::clone(&tags);
        let other = thread::spawn(move || other.work_alone_on(&[0, 1]));
        tags.work_alone_on(&[1, 0]);
        other.join().unwrap();
        assert!(tags.gates.lock_anyway().iter().all(Gate::is_empty));
    });
}

#[test]
fn no_order_is_lost_and_the_end_is_heard() {
    loom::model(|| {
        let orders = Arc::new(Monitor::new(Orders::default()));
        let done = Arc::new(Monitor::new(false));
        let (heard, working) = (Arc::clone(&orders), Arc::clone(&done));
        let reaper = thread::spawn(move || {
            while next_order(&heard) {
                *working.lock_anyway() = true;
                working.ring();
            }
        });
        orders.lock_anyway().give();
        orders.ring();
        let mut worked = done.lock_anyway();
        while !*worked {
            worked = done.wait(worked).expect("no thread panics");
        }
        drop(worked);
        orders.lock_anyway().stop();
        orders.ring();
        reaper.join().unwrap();
        assert!(!next_order(&orders), "the end stays the end");
    });
}

/// A reaper that looks again and again, and is told to end in between.
#[test]
fn who_pauses_takes_the_next_order_and_hears_the_end() {
    loom::model(|| {
        let orders = Arc::new(Monitor::new(Orders::default()));
        let heard = Arc::clone(&orders);
        let reaper = thread::spawn(move || {
            while next_order(&heard) {
                // Here nobody is woken by the time alone.
                while pause(&heard, Duration::from_millis(1)) {}
            }
        });
        orders.lock_anyway().give();
        orders.ring();
        orders.lock_anyway().give();
        orders.ring();
        orders.lock_anyway().stop();
        orders.ring();
        reaper.join().unwrap();
        assert!(!pause(&orders, Duration::from_millis(1)), "the end stays the end");
    });
}

/// Whoever waits when the lock is handed over has had it when it comes back.
#[test]
fn who_waits_has_the_lock_before_it_comes_back() {
    hand_over(2, false);
}

/// All hand it over, and nobody waits for ever.
#[test]
fn those_who_hand_the_lock_to_each_other_come_to_an_end() {
    hand_over(1, true);
    hand_over(2, true);
}

/// Some have the lock once each, or hand it over themselves, beside one who hands it over to those who wait.
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
