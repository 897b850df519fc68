//! Who asks gets memory of lenders first, and then of owners that give some up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use poorwill_broker::{Ask, Asked, Client, ClientError};
use poorwill_testkit::latch::Latch;
use poorwill_testkit::watchdog::eventually;

use crate::bounds::pretend;
use crate::peer::Peer;
use crate::support::{DEVICE, Served, chunks, connect, options, taken_back, waiting};

/// Freed, given up, missing.
fn sums(asked: &Asked) -> (u64, u64, u64) {
    (asked.freed_bytes, asked.given_up_bytes, asked.missing_bytes)
}

#[test]
fn an_ask_frees_no_more_than_it_needs_the_oldest_first() {
    let broker = Served::start(options());
    let (old, young, asker) = (broker.client("old"), broker.client("young"), broker.client("asker"));
    old.lend(chunks(&[(1, 4), (2, 16)])).unwrap();
    young.lend(chunks(&[(7, 8), (8, 8)])).unwrap();
    asker.lend(chunks(&[(9, 8)])).unwrap();
    assert_eq!(sums(&asker.ask(&Ask::freeing(3)).unwrap()), (4, 0, 0));
    assert_eq!(sums(&asker.ask(&Ask::freeing(20)).unwrap()), (24, 0, 0));
    assert_eq!((taken_back(&old), taken_back(&young)), (vec![], vec![(8, 8)]));
    assert_eq!(taken_back(&asker), [(9, 8)]);
}

#[test]
fn another_device_gives_nothing() {
    let broker = Served::start(options());
    let (lender, asker) = (broker.client("lender"), connect(&broker.path, "GPU-2", "asker"));
    lender.lend(chunks(&[(1, 4)])).unwrap();
    assert_eq!(sums(&asker.ask(&Ask::freeing(4)).unwrap()), (0, 0, 4));
    assert_eq!(sums(&asker.ask(&Ask::freeing(Ask::ALL)).unwrap()), (0, 0, 0));
    assert_eq!(taken_back(&lender), [(1, 4)]);
}

#[test]
fn all_is_everything_on_the_device() {
    let broker = Served::start(options());
    let (lender, asker) = (broker.client("lender"), broker.client("asker"));
    lender.lend(chunks(&[(1, 4), (2, 4)])).unwrap();
    asker.lend(chunks(&[(1, 2)])).unwrap();
    assert_eq!(sums(&asker.ask(&Ask::freeing(Ask::ALL)).unwrap()), (10, 0, 0));
}

/// An owner that gives up what is wanted, and says what that was.
fn owner(broker: &Served, name: &str, announced: u64) -> (Client, Receiver<u64>) {
    let client = broker.client(name);
    let (wanted, asked) = channel();
    client
        .on_give_up(move |bytes| {
            wanted.send(bytes).unwrap();
            bytes
        })
        .unwrap();
    client.announce(announced).unwrap();
    (client, asked)
}

#[test]
fn owners_are_asked_for_what_is_not_lent_the_oldest_first() {
    let broker = Served::start(options());
    let asker = broker.client("asker");
    let (lender, asked_lender) = owner(&broker, "old", 10);
    let (_owner, asked_owner) = owner(&broker, "young", 10);
    lender.lend(chunks(&[(1, 4)])).unwrap();
    assert_eq!(sums(&asker.ask(&waiting(17)).unwrap()), (4, 13, 0));
    assert_eq!((asked_lender.recv(), asked_owner.recv()), (Ok(10), Ok(3)));
    // What was asked for is announced no more.
    let announced: Vec<u64> = asker.status().unwrap().lenders.iter().map(|row| row.announced_bytes).collect();
    assert_eq!(announced, [7]);
    assert_eq!(sums(&asker.ask(&waiting(Ask::ALL)).unwrap()), (0, 7, 0));
    assert_eq!(asker.status().unwrap().totals.given_up_bytes, 20);
}

#[test]
fn an_owner_is_not_asked_without_time_by_itself_or_without_a_callback() {
    let broker = Served::start(options());
    let (client, asked) = owner(&broker, "owner", 10);
    let mute = broker.client("mute");
    mute.announce(10).unwrap();
    assert_eq!(sums(&mute.ask(&Ask::freeing(5)).unwrap()), (0, 0, 5));
    assert_eq!(sums(&client.ask(&waiting(5)).unwrap()), (0, 0, 5));
    assert!(asked.try_recv().is_err());
    let error = client.on_give_up(|bytes| bytes).unwrap_err();
    assert!(matches!(error, ClientError::BadRequest { .. }), "{error}");
}

#[test]
fn an_owner_that_gives_less_is_made_up_for_by_the_next() {
    let broker = Served::start(options());
    let asker = broker.client("asker");
    let first = broker.client("first");
    first.on_give_up(|_| 1).unwrap();
    first.announce(10).unwrap();
    let (_second, asked) = owner(&broker, "second", 10);
    assert_eq!(sums(&asker.ask(&waiting(10)).unwrap()), (0, 10, 0));
    assert_eq!(asked.recv(), Ok(9));
}

/// An owner that waits for a latch before it answers, and says when it is asked.
fn slow_owner(broker: &Served) -> (Client, Receiver<u64>, Arc<Latch>) {
    let (owner, latch) = (broker.client("slow"), Arc::new(Latch::default()));
    let (wanted, asked): (Sender<u64>, _) = channel();
    let held = Arc::clone(&latch);
    owner
        .on_give_up(move |bytes| {
            wanted.send(bytes).unwrap();
            held.pass();
            bytes
        })
        .unwrap();
    owner.announce(10).unwrap();
    (owner, asked, latch)
}

#[test]
fn an_ask_ends_at_its_deadline_without_the_owner() {
    let broker = Served::start(options());
    let (_owner, asked, latch) = slow_owner(&broker);
    let asker = broker.client("asker");
    let ask = Ask { within: std::time::Duration::from_millis(20), ..waiting(10) };
    assert_eq!(sums(&asker.ask(&ask).unwrap()), (0, 0, 10));
    assert_eq!(asked.recv(), Ok(10));
    // Its late answer is nothing to the next ask.
    latch.open();
    assert_eq!(sums(&asker.ask(&Ask::freeing(10)).unwrap()), (0, 0, 10));
}

#[test]
fn others_are_served_while_an_owner_is_waited_for() {
    let broker = Served::start(options());
    let (owner, asked, latch) = slow_owner(&broker);
    let (asker, other) = (broker.client("asker"), broker.client("other"));
    std::thread::scope(|scope| {
        let result = scope.spawn(|| asker.ask(&waiting(10)).unwrap());
        assert_eq!(asked.recv(), Ok(10));
        other.lend(chunks(&[(1, 1)])).unwrap();
        // What is lent meanwhile serves at the next answer.
        owner.lend(chunks(&[(1, 5)])).unwrap();
        assert_eq!(other.status().unwrap().lenders.len(), 2);
        latch.open();
        assert_eq!(sums(&result.join().unwrap()), (0, 10, 0));
    });
    assert_eq!(taken_back(&owner), [(1, 5)]);
}

#[test]
fn an_owner_that_ends_is_waited_for_no_longer() {
    let broker = Served::start(options());
    let (owner, asked, latch) = slow_owner(&broker);
    let asker = broker.client("asker");
    std::thread::scope(|scope| {
        let result = scope.spawn(|| asker.ask(&waiting(10)).unwrap());
        assert_eq!(asked.recv(), Ok(10));
        drop(owner);
        assert_eq!(sums(&result.join().unwrap()), (0, 0, 10));
    });
    latch.open();
}

/// Its client lives on, and still has what it lends.
#[test]
fn an_owner_that_listens_no_more_is_waited_for_no_longer() {
    let broker = Served::start(options());
    let owner = Peer::connect(&broker.path);
    owner.send(r#".{"request":"hello","version":1,"device":"GPU-5a5a5a5a","name":"peer"}"#, &[]).unwrap();
    let welcome = owner.answer().unwrap();
    let client = welcome.split_once(r#""client":"#).unwrap().1.trim_end_matches('}');
    let events = Peer::connect(&broker.path);
    events.send(format!(r#".{{"request":"events","version":1,"client":{client}}}"#), &[]).unwrap();
    assert_eq!(events.answer().unwrap(), welcome);
    owner.send(r#".{"request":"announce","bytes":9}"#, &[]).unwrap();
    assert_eq!(owner.answer().unwrap(), r#".{"answer":"done"}"#);
    let asker = broker.client("asker");
    std::thread::scope(|scope| {
        let result = scope.spawn(|| asker.ask(&waiting(4)).unwrap());
        let event = events.answer().unwrap();
        assert_eq!(event, r#".{"answer":"give_up","ask":1,"bytes":4}"#);
        drop(events);
        assert_eq!(sums(&result.join().unwrap()), (0, 0, 4));
    });
    assert_eq!(asker.status().unwrap().lenders[0].announced_bytes, 5);
}

#[test]
fn a_client_in_use_says_so_and_goes_on() {
    let broker = Served::start(options());
    let (_owner, asked, latch) = slow_owner(&broker);
    let hello = crate::support::hello();
    let brief = std::time::Duration::from_millis(20);
    // A machine that stalls may need a second try.
    let asker = std::iter::repeat_with(|| Client::connect(&broker.path, &hello, brief)).find_map(Result::ok);
    let asker = asker.expect("it is repeated without end");
    std::thread::scope(|scope| {
        let result = scope.spawn(|| asker.ask(&waiting(10)).unwrap());
        assert_eq!(asked.recv(), Ok(10));
        let error = asker.status().unwrap_err();
        assert!(matches!(error, ClientError::Busy { .. }), "{error}");
        latch.open();
        assert_eq!(sums(&result.join().unwrap()), (0, 10, 0));
    });
    assert!(!asker.is_lost());
}

#[test]
fn the_callback_ends_with_its_client() {
    let mut broker = Served::start(options());
    // One that does not see its clients end.
    let (_folder, stuck) = pretend(&[r#".{"answer":"welcome","client":1}"#]);
    let count = Arc::new(AtomicU64::new(0));
    let listen = |client: Client| {
        let counted = Counted::new(&count);
        let give_up = move |bytes| {
            let _ = &counted;
            bytes
        };
        client.on_give_up(give_up).unwrap();
        client
    };
    let dropped = listen(connect(&stuck, DEVICE, "dropped"));
    let _lost = listen(broker.client("lost"));
    assert_eq!(count.load(Ordering::SeqCst), 2);
    drop(dropped);
    eventually("the thread ends with its client", || count.load(Ordering::SeqCst) == 1);
    broker.end();
    eventually("the thread ends with its broker", || count.load(Ordering::SeqCst) == 0);
}

/// Counts those that exist.
struct Counted(Arc<AtomicU64>);

impl Counted {
    fn new(count: &Arc<AtomicU64>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
