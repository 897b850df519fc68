//! What is lent comes back, or is gone; and what a broker says of it.

use std::time::Duration;

use poorwill_broker::{Ask, Client, ClientError, LentChunk};
use poorwill_testkit::watchdog::eventually;

use crate::support::{DEVICE, Served, chunks, connect, hello, memory, number, options, taken_back};

#[test]
fn what_is_lent_comes_back_once() {
    let broker = Served::start(options());
    let lender = broker.client("lender");
    lender.lend(chunks(&[(3, 10), (1, 20)])).unwrap();
    lender.lend(chunks(&[(2, 30)])).unwrap();
    assert_eq!(taken_back(&lender), [(1, 20), (2, 30), (3, 10)]);
    assert_eq!(taken_back(&lender), []);
    lender.lend(chunks(&[(1, 5)])).unwrap();
    assert_eq!(taken_back(&lender), [(1, 5)]);
}

/// Over 253 descriptors go in several packets.
#[test]
fn many_chunks_come_back_in_their_order() {
    let broker = Served::start(options());
    let lender = broker.client("lender");
    let list: Vec<(u64, u64)> = (0..300).map(|id| (id, id + 1)).collect();
    lender.lend(chunks(&list)).unwrap();
    assert_eq!(taken_back(&lender), list);
}

/// Durations without an end are no sums that fail.
#[test]
fn waits_may_be_as_long_as_can_be_said() {
    let mut options = options();
    (options.idle, options.hello) = (Duration::MAX, Duration::MAX);
    let broker = Served::start(options);
    let client = Client::connect(&broker.path, &hello(), Duration::MAX).unwrap();
    client.lend(chunks(&[(1, 1)])).unwrap();
    let error = client.ask(&Ask::freeing(1).waiting(Duration::MAX)).unwrap_err();
    assert!(matches!(error, ClientError::BadRequest { .. }), "{error}");
    assert_eq!(taken_back(&client), [(1, 1)]);
}

#[test]
fn a_request_that_is_refused_changes_nothing() {
    let broker = Served::start(options());
    let lender = broker.client("lender");
    lender.lend(chunks(&[(1, 10)])).unwrap();
    for (list, words) in [
        (vec![(2, 1), (1, 1)], "chunk 1 is lent already"),
        (vec![(2, 1), (2, 1)], "chunk 2 is lent already"),
        (vec![(2, 1), (3, 0)], "chunk 3 has no bytes"),
        (vec![(2, 1), (3, 1 << 50)], "would exceed"),
    ] {
        let error = lender.lend(chunks(&list)).unwrap_err();
        assert!(
            matches!(error, ClientError::BadRequest { .. }) && error.to_string().contains(words),
            "{error}"
        );
    }
    let error = lender.announce(u64::MAX).unwrap_err();
    assert!(error.to_string().contains("exceeds"), "{error}");
    assert_eq!(taken_back(&lender), [(1, 10)]);
}

#[test]
fn a_lender_that_ends_lends_nothing_any_more() {
    let broker = Served::start(options());
    let (lender, other) = (broker.client("lender"), broker.client("other"));
    let (kept, written) = std::io::pipe().unwrap();
    lender.lend(vec![LentChunk { id: 1, bytes: 8, is_dropped: false, descriptor: written.into() }]).unwrap();
    assert_eq!(other.status().unwrap().lenders.len(), 1);
    drop(lender);
    // A pipe ends when its last writer is closed.
    assert_eq!(rustix::io::read(&kept, &mut [0; 1]), Ok(0));
    eventually("no lender is left", || other.status().unwrap().lenders.is_empty());
    assert_eq!(other.ask(&Ask::freeing(8)).unwrap().missing_bytes, 8);
}

#[test]
fn the_status_names_lenders_and_sums() {
    let broker = Served::start(options());
    let (lender, other) = (broker.client("a model"), connect(&broker.path, "GPU-2", "b"));
    assert_eq!(lender.status().unwrap().lenders, []);
    lender.lend(chunks(&[(1, 10), (2, 20)])).unwrap();
    lender.announce(5).unwrap();
    other.announce(7).unwrap();
    let status = other.status().unwrap();
    let rows: Vec<_> = status
        .lenders
        .iter()
        .map(|row| (&*row.device, &*row.name, row.pid, row.lent_bytes, row.chunks, row.announced_bytes))
        .collect();
    let pid = std::process::id();
    assert_eq!(rows, [(DEVICE, "a model", pid, 30, 2, 5), ("GPU-2", "b", pid, 0, 0, 7)]);
    assert!(status.lenders[0].lent_s.is_some() && status.lenders[1].lent_s.is_none());
    lender.ask(&Ask::freeing(10)).unwrap();
    assert_eq!(taken_back(&lender), [(2, 20)]);
    let totals = other.status().unwrap().totals;
    assert_eq!((totals.lent_bytes, totals.taken_bytes, totals.brought_back_bytes), (30, 10, 20));
}

#[test]
fn a_part_comes_back_and_the_rest_stays_lent() {
    let broker = Served::start(options());
    let client = broker.client("lender");
    client.lend(chunks(&[(1, 10), (2, 20), (3, 30)])).unwrap();
    let ids = |back: Vec<LentChunk>| back.iter().map(|chunk| chunk.id).collect::<Vec<_>>();
    assert_eq!(ids(client.take_back(Some(&[3, 1, 9, 3])).unwrap()), [1, 3]);
    assert!(client.take_back(Some(&[])).unwrap().is_empty());
    assert_eq!(taken_back(&client), [(2, 20)]);
}

#[test]
fn processes_that_are_spared_keep_what_they_lend() {
    let broker = Served::start(options());
    let (lender, asker) = (broker.client("lender"), broker.client("asker"));
    lender.lend(chunks(&[(1, 10)])).unwrap();
    let ours = std::process::id();
    let asked = asker.ask(&Ask::freeing(5).sparing(vec![ours])).unwrap();
    assert_eq!((asked.freed_bytes, asked.missing_bytes), (0, 5));
    let asked = asker.ask(&Ask::freeing(5).sparing(vec![ours + 1])).unwrap();
    assert_eq!((asked.freed_bytes, asked.missing_bytes), (10, 0));
}

#[test]
fn threads_take_turns() {
    let broker = Served::start(options());
    let client = broker.client("threads");
    let work = |first: u64| {
        for id in first..first + 20 {
            client.lend(vec![LentChunk { id, bytes: 1, is_dropped: false, descriptor: memory(id) }]).unwrap();
            client.status().unwrap();
        }
    };
    std::thread::scope(|scope| {
        for nth in 0..4 {
            scope.spawn(move || work(nth * 100));
        }
    });
    let chunks = client.take_back(None).unwrap();
    assert_eq!(chunks.len(), 80);
    assert!(chunks.iter().all(|chunk| number(&chunk.descriptor) == chunk.id));
}

#[test]
fn a_broker_that_ends_is_lost_for_good() {
    let mut broker = Served::start(options());
    let client = broker.client("lender");
    client.lend(chunks(&[(1, 1)])).unwrap();
    assert!(!client.is_lost());
    broker.end();
    for _ in 0..2 {
        let error = client.take_back(None).unwrap_err();
        assert!(matches!(&error, ClientError::Lost { path, .. } if *path == broker.path), "{error}");
        assert!(client.is_lost());
    }
    let error = client.on_give_up(|bytes| bytes).unwrap_err();
    assert!(matches!(error, ClientError::NotThere { .. }), "{error}");
}
