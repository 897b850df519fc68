//! A broker bounds what it reads, and goes on whatever a peer sends.

use std::os::fd::OwnedFd;

use poorwill_broker::{Client, ClientError};
use poorwill_testkit::watchdog::{TEST_TIMEOUT, eventually};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags};

use crate::actor::{Actor, acts};
use crate::peer::{Peer, socket};
use crate::support::{DEVICE, Served, chunks, connect, descriptors, hello, memory, options, taken_back};

fn memories(count: u64) -> Vec<OwnedFd> {
    (0..count).map(memory).collect()
}

/// The broker's last words to a peer.
fn last_words(peer: &Peer) -> String {
    let words = peer.answer().expect("the broker says why it closes");
    assert_eq!(peer.answer(), None, "{words}");
    words
}

#[test]
fn what_is_no_request_is_answered_and_closed() {
    if acts() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker.sock");
    let broker = Actor::broker(&path);
    let before = descriptors(broker.pid());
    let long = [&b"."[..], &[b'a'; 64 << 10]].concat();
    let firsts: [(&[u8], u64, &str); 8] = [
        (b"hello", 0, "byte 104"),
        (b".hello", 3, "no hello"),
        (b".{}", 0, "missing field `version`"),
        (&long, 2, "a packet is longer"),
        (br#".{"request":"status"}"#, 0, "no hello"),
        (br#".{"request":"status","version":1}"#, 0, "not a request for now"),
        (br#".{"request":"hello","version":1,"device":"","name":""}"#, 0, "empty"),
        (br#".{"request":"events","version":1,"client":1}"#, 0, "no client 1"),
    ];
    for (packet, count, words) in firsts {
        let peer = Peer::connect(&path);
        peer.send(packet, &memories(count)).unwrap();
        let said = last_words(&peer);
        assert!(said.contains(words), "{said}");
    }
    let spares = format!(
        r#".{{"request":"ask","bytes":1,"spared":{{"processes":[{}1],"asker":false}},"within_ms":0}}"#,
        "1,".repeat(4096)
    );
    let later: [(&str, u64, &str); 10] = [
        (".[", 1, "no request"),
        (r#".{"request":"steal"}"#, 0, "unknown variant `steal`"),
        (r#".{"request":"status"}"#, 1, "1 descriptors came where none belong"),
        (r#".{"request":"lend","chunks":[[1,2,false],[3,4,true]]}"#, 1, "2 chunks came with 1 descriptors"),
        (r#".{"request":"lend","chunks":[[1,2,false]]}"#, 253, "1 chunks came with 253 descriptors"),
        (r#".{"request":"gave_up","ask":1,"bytes":1}"#, 0, "not a request for now"),
        (r#".{"request":"hello","version":1,"device":"a","name":"a"}"#, 0, "not a request for now"),
        (r#".{"request":"announce","bytes":18446744073709551616}"#, 0, "no request"),
        (&spares, 0, "spares over 4096 processes"),
        (
            r#".{"request":"ask","bytes":1,"spared":{"processes":[],"asker":false},"within_ms":600001}"#,
            0,
            "waits over 600000 ms",
        ),
    ];
    for (packet, count, words) in later {
        let peer = Peer::hello(&path);
        peer.send(packet, &memories(count)).unwrap();
        let said = last_words(&peer);
        assert!(said.contains(words), "{said}");
    }
    let status = connect(&path, DEVICE, "client").status().unwrap();
    let problem = status.last_problem.unwrap();
    let ours = format!("process {} was disconnected", std::process::id());
    assert!(problem.starts_with(&ours) && problem.ends_with("over 600000 ms"), "{problem}");
    assert_eq!(status.lenders, []);
    eventually("all that came is closed", || descriptors(broker.pid()) == before);
}

#[test]
fn a_message_without_an_end_is_cut_off() {
    let broker = Served::start(options());
    let peer = Peer::hello(&broker.path);
    let packet = [b'+'; 32 << 10];
    while peer.send(packet, &[]).is_ok() {}
    let said = last_words(&peer);
    assert!(said.contains("a message is longer"), "{said}");
}

#[test]
fn a_client_that_never_reads_is_disconnected_and_holds_up_no_other() {
    let mut options = options();
    options.queue_bytes_max = 1 << 10;
    let broker = Served::start(options);
    let silent = Peer::hello(&broker.path);
    let client = broker.client("client");
    client.lend(chunks(&[(1, 1)])).unwrap();
    let mut sent = 0;
    let end = loop {
        match silent.send(r#".{"request":"status"}"#, &[]) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 100_000, "the broker keeps all answers");
        if sent % 100 == 0 {
            assert_eq!(client.status().unwrap().lenders.len(), 1);
        }
    };
    assert!(matches!(end, Errno::PIPE | Errno::CONNRESET), "{end}");
    assert_eq!(taken_back(&client), [(1, 1)]);
}

#[test]
fn answers_wait_for_a_client_that_reads_late() {
    let broker = Served::start(options());
    let late = Peer::hello(&broker.path);
    // Far more than the socket takes.
    for _ in 0..2000 {
        late.send(r#".{"request":"status"}"#, &[]).unwrap();
    }
    for _ in 0..2000 {
        assert!(late.answer().unwrap().contains("lenders"));
    }
}

#[test]
fn a_peer_that_says_nothing_is_disconnected() {
    let mut options = options();
    options.hello = std::time::Duration::from_millis(1);
    let broker = Served::start(options);
    let said = last_words(&Peer::connect(&broker.path));
    assert!(said.contains("has not said what it wants"), "{said}");
}

#[test]
fn more_connections_than_there_may_be_are_refused() {
    let mut options = options();
    options.connections_max = 1;
    let broker = Served::start(options);
    let client = broker.client("client");
    let error = Client::connect(&broker.path, &hello(), TEST_TIMEOUT).unwrap_err();
    assert!(matches!(error, ClientError::Full { connections: 1, .. }), "{error}");
    client.status().unwrap();
}

#[test]
fn another_version_is_refused_with_both() {
    let broker = Served::start(options());
    let old = Peer::connect(&broker.path);
    old.send(r#".{"version":0,"greeting":"of old"}"#, &[]).unwrap();
    let said = last_words(&old);
    assert_eq!(said, r#".{"answer":"refused","refusal":{"why":"version","broker":1,"client":0}}"#);
}

/// A broker that says the same to each client: of another version, or one that is stuck.
pub(crate) fn pretend(answers: &'static [&'static str]) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker.sock");
    let listener = socket();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        while let Ok(socket) = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC) {
            let peer = Peer(socket);
            for answer in answers {
                // A client that has given up is not there any more.
                let _ = peer.send(answer, &[]);
            }
            kept.push(peer);
        }
    });
    (folder, path)
}

#[test]
fn a_broker_of_another_version_is_named_with_both() {
    let (_folder, path) =
        pretend(&[r#".{"answer":"refused","refusal":{"why":"version","broker":2,"client":1}}"#]);
    let error = Client::connect(&path, &hello(), TEST_TIMEOUT).unwrap_err();
    assert!(matches!(error, ClientError::OtherVersion { broker: 2, client: 1, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(path.to_str().unwrap()) && text.contains("start a broker"), "{text}");
}

#[test]
fn a_broker_that_is_ending_is_not_there() {
    let ends: [&'static [&'static str]; 2] =
        [&[r#".{"answer":"refused","refusal":{"why":"ending"}}"#], &[""]];
    for answers in ends {
        let (_folder, path) = pretend(answers);
        let error = Client::connect(&path, &hello(), TEST_TIMEOUT).unwrap_err();
        assert!(matches!(error, ClientError::NotThere { .. }), "{error}");
    }
}

#[test]
fn a_broker_that_does_not_answer_is_lost_after_the_timeout() {
    let brief = std::time::Duration::from_millis(20);
    let (_folder, path) = pretend(&[]);
    let error = Client::connect(&path, &hello(), brief).unwrap_err();
    assert!(matches!(error, ClientError::NoAnswer { request: "hello", within_ms: 20, .. }), "{error}");
    let (_folder, path) = pretend(&[r#".{"answer":"welcome","client":1}"#]);
    // A machine that stalls may need a second try.
    let client = std::iter::repeat_with(|| Client::connect(&path, &hello(), brief)).find_map(Result::ok);
    let client = client.expect("it is repeated without end");
    let error = client.announce(1).unwrap_err();
    assert!(matches!(error, ClientError::NoAnswer { request: "announce", .. }), "{error}");
    let error = client.announce(1).unwrap_err();
    assert!(matches!(error, ClientError::Lost { .. }), "{error}");
}

#[test]
fn a_broker_that_answers_nonsense_is_lost() {
    for answer in [r#".{"answer":"done"}"#, ".{", "?", r#".{"answer":"chunks","chunks":[[1,1,false]]}"#] {
        let answers: &'static [&'static str] = vec![r#".{"answer":"welcome","client":1}"#, answer].leak();
        let (_folder, path) = pretend(answers);
        let client = Client::connect(&path, &hello(), TEST_TIMEOUT).unwrap();
        let error = client.take_back(None).unwrap_err();
        assert!(matches!(error, ClientError::Lost { .. }) && client.is_lost(), "{answer}: {error}");
    }
}
