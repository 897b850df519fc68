//! One broker at a path, whatever was left there, and an end that leaves nothing.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use poorwill_broker::{Broker, BrokerEnd, BrokerError, BrokerStop, Client, ClientError};
use poorwill_testkit::watchdog::{TEST_TIMEOUT, eventually};
use rustix::net::SocketAddrUnix;

use crate::actor::{Actor, acts};
use crate::bounds::pretend;
use crate::peer::{Peer, socket};
use crate::support::{Served, hello, options};

#[test]
fn of_brokers_that_start_at_once_one_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/broker.sock");
    let barrier = Barrier::new(8);
    let brokers: Vec<_> = std::thread::scope(|scope| {
        let start = || {
            barrier.wait();
            Broker::bind(&path, options())
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let others = brokers.iter().filter_map(|broker| broker.as_ref().err());
    assert_eq!(others.filter(|error| matches!(error, BrokerError::AlreadyRunning { .. })).count(), 7);
    let mode = folder.path().join("new").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    drop(brokers);
    assert!(!path.exists());
    Broker::bind(&path, options()).unwrap();
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker.sock");
    let left = socket();
    rustix::net::bind(&left, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&left, 1).unwrap();
    // It has no lock, as if that had been removed.
    let error = Broker::bind(&path, options()).unwrap_err();
    assert!(matches!(error, BrokerError::AlreadyRunning { .. }), "{error}");
    drop(left);
    // A process that another test starts may have the socket for a moment.
    eventually("a broker takes the place", || Broker::bind(&path, options()).is_ok());
    std::fs::write(&path, "a file").unwrap();
    let error = Broker::bind(&path, options()).unwrap_err();
    assert!(matches!(error, BrokerError::NoSocket { .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"a file");
}

#[test]
fn a_folder_that_others_may_write_to_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let error = Broker::bind(&folder.path().join("broker.sock"), options()).unwrap_err();
    assert!(matches!(error, BrokerError::Folder(_)), "{error}");
    assert!(error.to_string().contains(folder.path().to_str().unwrap()), "{error}");
}

#[test]
fn no_broker_is_named_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker.sock");
    let error = Client::connect(&path, &hello(), TEST_TIMEOUT).unwrap_err();
    assert!(matches!(error, ClientError::NotThere { .. }), "{error}");
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
}

#[test]
fn a_stopped_broker_leaves_no_socket() {
    let mut broker = Served::start(options());
    assert_eq!(broker.end(), Some(BrokerEnd::Stopped));
    assert!(!broker.path.exists());
    Broker::bind(&broker.path, options()).unwrap();
}

/// Brokers end as soon as they are idle, and others begin. A client is served or finds none.
#[test]
fn a_client_that_connects_to_an_idle_broker_is_served_or_finds_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker.sock");
    let is_over = AtomicBool::new(false);
    let use_often = || {
        let mut served = 0;
        while served < 50 && !is_over.load(Ordering::SeqCst) {
            match Client::connect(&path, &hello(), TEST_TIMEOUT) {
                Ok(client) => drop(client.status().unwrap()),
                Err(ClientError::NotThere { .. }) => {
                    std::thread::sleep(Duration::from_micros(100));
                    continue;
                }
                Err(error) => panic!("{error}"),
            }
            served += 1;
        }
    };
    let serve_once = || {
        let mut options = options();
        options.idle = Duration::ZERO;
        Broker::bind(&path, options)?.run(&BrokerStop::new().unwrap())
    };
    std::thread::scope(|scope| {
        let clients = [scope.spawn(use_often), scope.spawn(use_often)];
        while clients.iter().any(|client| !client.is_finished()) {
            let end = serve_once();
            is_over.store(end.is_err(), Ordering::SeqCst);
            assert_eq!(end.unwrap(), BrokerEnd::Idle);
        }
    });
}

#[test]
fn a_client_that_finds_an_ending_broker_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker.sock");
    let broker = Broker::bind(&path, options()).unwrap();
    let peer = Peer::connect(&path);
    let stop = BrokerStop::new().unwrap();
    stop.stop();
    assert_eq!(broker.run(&stop).unwrap(), BrokerEnd::Stopped);
    let said = peer.answer().unwrap();
    assert_eq!(said, r#".{"answer":"refused","refusal":{"why":"ending"}}"#);
}

#[test]
fn another_user_is_refused_on_both_sides() {
    if acts() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        let _ = writeln!(std::io::stderr(), "{name}: skipped: it takes root to be another user");
        return;
    }
    let broker = Served::start(options());
    // One that would take anyone.
    let (_folder, kind) = pretend(&[r#".{"answer":"welcome","client":1}"#]);
    let start_other = |path: &Path| {
        for (path, mode) in [(path.parent().unwrap(), 0o755), (path, 0o777)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        Actor::start("client", path, |command| {
            command.uid(65534).gid(65534);
        })
    };
    let said = start_other(&kind).does("connect");
    assert!(said.starts_with("OtherUser") && said.contains("broker: 0, client: 65534"), "{said}");
    let mut other = start_other(&broker.path);
    let said = other.does("connect");
    assert!(said.starts_with("OtherUser") && said.contains("broker: 0, client: 65534"), "{said}");
    let said = other.does("greet");
    assert_eq!(said, r#".{"answer":"refused","refusal":{"why":"user","broker":0,"client":65534}}"#);
    assert_eq!(broker.client("ours").status().unwrap().lenders, []);
}
