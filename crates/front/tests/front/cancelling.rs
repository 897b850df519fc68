//! Requests that an operator cancels: each state ends in words, at the client and at the engine.

use std::io;
use std::time::Duration;

use poorwill_front::proxy::Timeouts;

use super::setup::{EVENTS, Setup, Verdict, Wire, answer, chunk, post_with, run, run_on_one_thread};

const ASK: &str = r#"{"model":"small","stream":true}"#;

async fn asking(setup: &Setup, path: &str) -> Wire {
    let mut client = setup.client().await;
    client.send(post_with(path, "X-Request-Id: it\r\n", ASK)).await;
    client
}

/// Cancels the only request with the identifier.
fn cancel(setup: &Setup) {
    assert_eq!(setup.backend.requests.cancel("it"), 1);
}

#[test]
fn a_request_without_an_answer_gets_an_error_in_its_api() {
    for (path, words) in
        [("/v1/chat/completions", r#""code":"cancelled""#), ("/v1/messages", r#""type":"error""#)]
    {
        run(async move {
            let setup = Setup::new("").await;
            let said = async |mut client: Wire| {
                let (head, body) = client.json().await;
                assert_eq!((head.status(), head.field("x-should-retry")), (410, Some("false")), "{body}");
                let body = body.to_string();
                assert!(body.contains(words) && body.contains("an operator cancelled"), "{body}");
            };
            // Its body is not complete.
            let ask = post_with(path, "X-Request-Id: it\r\n", ASK);
            let mut reading = setup.client().await;
            reading.send(&ask[..ask.len() - 2]).await;
            while setup.backend.requests.active(1).1 == 0 {
                tokio::task::yield_now().await;
            }
            cancel(&setup);
            said(reading).await;
            // It waits for its model.
            setup.say(Verdict::Wait);
            let waiting = asking(&setup, path).await;
            setup.until(|seen| seen.waiting == 1).await;
            cancel(&setup);
            said(waiting).await;
            assert_eq!(setup.until(|seen| seen.waiting == 0).await.gave_up, 1);
            // Its engine has said nothing yet.
            setup.say(Verdict::Admit);
            let running = asking(&setup, path).await;
            let mut engine = setup.engine().await;
            engine.message().await;
            cancel(&setup);
            said(running).await;
            assert_eq!(engine.ended().await, b"");
            assert_eq!(setup.until(|seen| seen.running == 0).await.suspects, 0);
            // Others, and later ones, are served.
            let mut next = asking(&setup, path).await;
            setup.answered(answer("{}")).await;
            assert_eq!(next.json().await.0.status(), 200);
        });
    }
}

#[test]
fn a_stream_ends_with_an_event_and_leaves_its_engine() {
    run(async {
        let setup = Setup::new("keep_alive = \"5ms\"").await;
        // While it waits.
        setup.say(Verdict::Wait);
        let mut client = asking(&setup, "/v1/messages").await;
        assert_eq!(client.head().await.status(), 200);
        cancel(&setup);
        let said = String::from_utf8(client.bytes(1).await).unwrap() + &read_to_end(&mut client).await;
        assert!(said.contains("event: error\ndata: {") && said.contains("an operator cancelled"), "{said}");
        assert_eq!(setup.until(|seen| seen.waiting == 0).await.gave_up, 1);
        // Amid an event.
        setup.say(Verdict::Admit);
        let mut client = asking(&setup, "/v1/completions").await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(format!("{EVENTS}{}", chunk("data: 1\n\ndata: {"))).await;
        client.head().await;
        assert_eq!(client.chunk().await.as_deref(), Some("data: 1\n\ndata: {"));
        cancel(&setup);
        let event = client.chunk().await.unwrap();
        assert!(event.starts_with("\n\ndata: {\"error\":") && event.contains("cancelled"), "{event}");
        assert_eq!(client.ended().await, b"", "it must not look complete");
        assert_eq!(engine.ended().await, b"");
        // Amid something else.
        let mut client = asking(&setup, "/v1/completions").await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234").await;
        client.head().await;
        assert_eq!(client.bytes(4).await, b"1234");
        cancel(&setup);
        assert_eq!(client.ended().await, b"");
        assert_eq!(engine.ended().await, b"");
        assert_eq!(setup.until(|seen| seen.running == 0).await.suspects, 0);
    });
}

/// All chunks up to the last one.
async fn read_to_end(client: &mut Wire) -> String {
    let mut all = String::new();
    loop {
        let more = String::from_utf8(client.bytes(1).await).unwrap();
        all += &more;
        if all.ends_with("\r\n0\r\n\r\n") {
            return all;
        }
    }
}

#[test]
fn a_client_that_reads_nothing_is_cut_off() {
    run_on_one_thread(async {
        let timeouts = Timeouts { reader: Duration::from_millis(50), ..Timeouts::default() };
        let setup = Setup::with_timeouts("", timeouts).await;
        let mut client = asking(&setup, "/v1/completions").await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(EVENTS).await;
        setup.fill(&mut engine).await;
        cancel(&setup);
        setup.until(|seen| seen.running == 0).await;
        engine.ended().await;
        assert_eq!(client.reset().await, io::ErrorKind::ConnectionReset);
    });
}

#[test]
fn all_requests_with_the_identifier_end_and_no_other() {
    run(async {
        let setup = Setup::new("").await;
        setup.say(Verdict::Wait);
        let mut both = [asking(&setup, "/v1/completions").await, asking(&setup, "/v1/completions").await];
        let mut other = setup.client().await;
        other.send(post_with("/v1/completions", "X-Request-Id: it2\r\n", ASK)).await;
        setup.until(|seen| seen.waiting == 3).await;
        assert_eq!(setup.backend.requests.cancel("i"), 0);
        assert_eq!(setup.backend.requests.cancel("it"), 2);
        for client in &mut both {
            assert_eq!(client.json().await.0.status(), 410);
        }
        setup.say(Verdict::Admit);
        setup.answered(answer("{}")).await;
        assert_eq!(other.json().await.0.status(), 200);
    });
}
