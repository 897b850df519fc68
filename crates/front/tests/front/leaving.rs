//! Disconnecting clients, slow clients, and shutdown.

use std::io;
use std::time::Duration;

use poorwill_front::proxy::Timeouts;
use tokio::io::AsyncWriteExt;

use super::setup::{END, EVENTS, Setup, Verdict, answer, chunk, post, run, run_on_one_thread};

const ASK: &str = r#"{"model":"org/one","stream":true}"#;
/// Longer than a test, so that only the tested timeout fires.
const LONG: Duration = Duration::from_secs(600);

fn short_timeouts() -> Timeouts {
    Timeouts { head: LONG, body: LONG, ..Timeouts::default() }
}

#[test]
fn a_client_that_disconnects_leaves_the_queue() {
    run(async {
        for lines in ["", "keep_alive = \"5ms\""] {
            let setup = Setup::with_timeouts(lines, short_timeouts()).await;
            setup.say(Verdict::Wait);
            let client = setup.asking(ASK).await;
            setup.until(|seen| seen.waiting == 1).await;
            drop(client);
            let seen = setup.until(|seen| seen.waiting == 0).await;
            assert_eq!((seen.gave_up, seen.admitted), (1, 0));
        }
    });
}

#[test]
fn a_client_that_goes_takes_its_request_from_the_engine() {
    run(async {
        let setup = Setup::with_timeouts("", short_timeouts()).await;
        // Before the engine's answer.
        let client = setup.asking(ASK).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        drop(client);
        assert_eq!(engine.ended().await, b"");
        setup.until(|seen| seen.running == 0).await;
        // In a stream without data.
        let mut client = setup.asking(ASK).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(EVENTS).await;
        engine.send(chunk("data: 1\n\n")).await;
        client.head().await;
        client.chunk().await.unwrap();
        drop(client);
        assert_eq!(engine.ended().await, b"");
        setup.until(|seen| seen.running == 0).await;
        // In a stream with data, with a reset.
        let mut client = setup.asking(ASK).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(EVENTS).await;
        client.head().await;
        client.stream.set_zero_linger().unwrap();
        drop(client);
        while engine.stream.write_all(chunk("data: 1\n\n").as_bytes()).await.is_ok() {}
        let seen = setup.until(|seen| seen.running == 0).await;
        assert_eq!(seen.suspects, 0, "the engine has done nothing");
    });
}

#[test]
fn a_client_that_reads_nothing_blocks_no_other() {
    run_on_one_thread(async {
        let timeouts = Timeouts { reader: Duration::from_millis(50), ..short_timeouts() };
        for ask in [ASK, r#"{"model":"org/one"}"#] {
            let setup = Setup::with_timeouts("", timeouts).await;
            let mut client = setup.asking(ask).await;
            let mut engine = setup.engine().await;
            engine.message().await;
            engine.send(EVENTS).await;
            setup.fill(&mut engine).await;
            assert_eq!(setup.until(|_| true).await.running, 1);
            setup.backend.aborted.cancel();
            let seen = setup.until(|seen| seen.running == 0).await;
            assert_eq!(seen.suspects, 0, "the engine has done nothing");
            engine.ended().await;
            assert_eq!(client.reset().await, io::ErrorKind::ConnectionReset);
        }
    });
}

#[test]
fn a_disconnect_after_a_pipelined_request_is_noticed() {
    run(async {
        let setup = Setup::with_timeouts("", short_timeouts()).await;
        setup.say(Verdict::Wait);
        let mut client = setup.client().await;
        client.send(post(ASK) + &post(ASK)).await;
        setup.until(|seen| seen.waiting == 1).await;
        drop(client);
        assert_eq!(setup.until(|seen| seen.waiting == 0).await.gave_up, 1);
        setup.say(Verdict::Admit);
        let mut client = setup.client().await;
        client.send(post(ASK) + &post(ASK)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(EVENTS).await;
        client.head().await;
        drop(client);
        assert_eq!(engine.ended().await, b"");
        assert_eq!(setup.until(|seen| seen.running == 0).await.admitted, 1);
    });
}

#[test]
fn a_client_that_closes_its_sending_side_counts_as_gone() {
    run(async {
        let setup = Setup::with_timeouts("", short_timeouts()).await;
        setup.say(Verdict::Wait);
        let mut client = setup.asking(ASK).await;
        setup.until(|seen| seen.waiting == 1).await;
        client.stream.shutdown().await.unwrap();
        assert_eq!(setup.until(|seen| seen.waiting == 0).await.gave_up, 1);
        assert_eq!(client.ended().await, b"");
        // Answers without waiting are still sent.
        let mut client = setup.client().await;
        client.send("GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n").await;
        client.stream.shutdown().await.unwrap();
        assert_eq!(client.json().await.0.status(), 200);
    });
}

#[test]
fn an_incomplete_body_reaches_no_engine() {
    run(async {
        let setup = Setup::with_timeouts("requests_max = 1", short_timeouts()).await;
        let asked = post(ASK);
        let mut client = setup.client().await;
        client.send(&asked[..asked.len() - 1]).await;
        drop(client);
        // A client slower than the timeout.
        let timeouts = Timeouts { body: Duration::from_millis(20), ..short_timeouts() };
        let other = Setup::with_timeouts("", timeouts).await;
        let mut client = other.client().await;
        client.send(&asked[..asked.len() - 1]).await;
        let (head, body) = client.json().await;
        assert_eq!(head.status(), 408, "{body}");
        assert_eq!(other.until(|_| true).await.admitted, 0);
        // A slow client that arrives. The first one's permit is free by now, or soon.
        loop {
            let mut client = setup.client().await;
            for byte in asked.as_bytes() {
                client.send([*byte]).await;
            }
            tokio::select! {
                mut engine = setup.engine() => {
                    assert_eq!(engine.message().await.1, ASK.as_bytes());
                    engine.send(answer("{}")).await;
                    assert_eq!(client.message().await.0.status(), 200);
                    break;
                }
                (head, _) = client.message() => assert_eq!(head.status(), 429),
            }
        }
    });
}

#[test]
fn a_late_head_closes_the_connection() {
    run(async {
        let timeouts = Timeouts { head: Duration::from_millis(20), ..short_timeouts() };
        let setup = Setup::with_timeouts("", timeouts).await;
        let mut client = setup.client().await;
        client.send("GET /health HTTP/1.1\r\nHo").await;
        client.ended().await;
        let mut silent = setup.client().await;
        assert_eq!(silent.ended().await, b"");
    });
}

#[test]
fn answers_that_are_under_way_end_before_the_front_does() {
    run(async {
        let setup = Setup::with_timeouts("", short_timeouts()).await;
        let mut idle = setup.client().await;
        idle.send("GET /health HTTP/1.1\r\nHost: a\r\n\r\n").await;
        idle.message().await;
        let mut client = setup.asking(ASK).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(EVENTS).await;
        engine.send(chunk("data: 1\n\n")).await;
        client.head().await;
        client.chunk().await.unwrap();
        setup.shutdown.cancel();
        assert_eq!(idle.ended().await, b"");
        assert!(!setup.served.is_finished());
        engine.send(chunk("data: 2\n\n")).await;
        assert_eq!(client.chunk().await.unwrap(), "data: 2\n\n");
        engine.send(END).await;
        assert_eq!(client.chunk().await, None);
        assert_eq!(client.ended().await, b"");
        setup.served.await.unwrap().unwrap();
        assert!(tokio::net::TcpStream::connect(setup.address).await.is_err());
    });
}

#[test]
fn a_front_that_is_dropped_takes_its_connections_with_it() {
    run(async {
        let setup = Setup::with_timeouts("", short_timeouts()).await;
        setup.say(Verdict::Wait);
        let mut client = setup.asking(ASK).await;
        setup.until(|seen| seen.waiting == 1).await;
        setup.served.abort();
        client.ended().await;
        setup.until(|seen| seen.waiting == 0).await;
    });
}
