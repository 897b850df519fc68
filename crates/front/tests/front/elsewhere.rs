//! Nodes and routers of a fleet: requests that are not the node's any more, and requests that go to another node.

use poorwill_front::affinity::Affinity;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::setup::{EVENTS, InFleet, Setup, Wire, answer, chunk, last_answer, post_with, run};

const ASK: &str = r#"{"model":"org/one","prompt":"a"}"#;
const RIGHT: &str = r#"{"right":true}"#;

async fn reply(client: &mut Wire) -> (u16, Value) {
    let (head, body) = client.json().await;
    (head.status(), body)
}

fn code(body: &Value) -> &str {
    body["error"]["code"].as_str().unwrap()
}

#[test]
fn a_request_that_is_not_the_nodes_any_more_does_not_reach_its_engine() {
    run(async {
        for ask in [ASK, ""] {
            let setup = Setup::new("passthrough = true").await;
            // Before it waits, and behind that.
            for checks in 0..=2 {
                setup.backend.fleet.lock().unwrap().checks_left = Some(checks);
                let mut client = match ask {
                    "" => setup.client().await,
                    ask => setup.asking(ask).await,
                };
                if ask.is_empty() {
                    client.send("GET /engines/org%2Fone/metrics HTTP/1.1\r\nHost: a\r\n\r\n").await;
                }
                if checks == 2 {
                    assert_eq!(setup.answered(last_answer(RIGHT)).await.1, ask.as_bytes());
                    assert_eq!(reply(&mut client).await.0, 200);
                    continue;
                }
                let (status, body) = reply(&mut client).await;
                assert_eq!((status, code(&body)), (421, "not_member"), "{checks}");
                assert_eq!(setup.backend.seen.borrow().suspects, 0, "the engine is not to blame");
            }
        }
    });
}

/// A router with the setup's engine as its first destination, and another one.
async fn two() -> (Setup, TcpListener) {
    let setup = Setup::new("").await;
    let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", other.local_addr().unwrap());
    setup.backend.fleet.lock().unwrap().others = Some(vec![url]);
    (setup, other)
}

/// What a node says before its engine has the request.
fn refusal(status: &str, body: &str) -> String {
    answer(body).replacen("200 OK", &format!("{status} No\r\nx-poorwill-not-begun: 1"), 1)
}

#[test]
fn a_request_goes_elsewhere_while_no_answer_has_begun() {
    run(async {
        // What a node refuses before its engine has it is marked.
        for what in ["421", "429", "503", "closes", "leaves", "stands still"] {
            let (setup, other) = two().await;
            let mut client = setup.asking(ASK).await;
            let mut first = setup.engine().await;
            assert_eq!(first.message().await.1, ASK.as_bytes());
            match what {
                "closes" => drop(first),
                // Its node has lost its lease, and says nothing.
                "leaves" => {
                    let left = std::mem::take(&mut setup.backend.fleet.lock().unwrap().left);
                    left.cancel();
                }
                "stands still" => setup.backend.fleet.lock().unwrap().still.cancel(),
                status => first.send(refusal(status, "{}")).await,
            }
            let mut second = Wire::new(other.accept().await.unwrap().0);
            let (head, body) = second.message().await;
            assert_eq!(body, ASK.as_bytes(), "{what}: all of it");
            assert_eq!(head.field("host").unwrap(), other.local_addr().unwrap().to_string());
            second.send(answer(RIGHT)).await;
            assert_eq!(reply(&mut client).await, (200, serde_json::json!({ "right": true })), "{what}");
        }
    });
}

/// It was taken back in vain: the other node refuses it, and the first one would have come to it.
#[test]
fn a_request_that_was_taken_back_may_return() {
    run(async {
        let (setup, other) = two().await;
        let url = format!("http://{}", setup.engine.local_addr().unwrap());
        setup.backend.fleet.lock().unwrap().others.as_mut().unwrap().push(url);
        let mut client = setup.asking(ASK).await;
        let mut first = setup.engine().await;
        first.message().await;
        setup.backend.fleet.lock().unwrap().still.cancel();
        let mut second = Wire::new(other.accept().await.unwrap().0);
        second.message().await;
        second.send(refusal("429", "{}")).await;
        let mut again = setup.engine().await;
        assert_eq!(again.message().await.1, ASK.as_bytes());
        again.send(answer(RIGHT)).await;
        assert_eq!(reply(&mut client).await.0, 200);
    });
}

#[test]
fn nothing_listens_there_any_more() {
    run(async {
        let (setup, other) = two().await;
        let Setup { engine, backend, address, .. } = setup;
        drop(engine);
        let mut client = Wire::to(address).await;
        client.send(super::setup::post(ASK)).await;
        let mut second = Wire::new(other.accept().await.unwrap().0);
        second.message().await;
        second.send(answer(RIGHT)).await;
        assert_eq!(reply(&mut client).await.0, 200);
        drop(backend);
    });
}

#[test]
fn an_answer_that_has_begun_is_not_asked_for_again() {
    run(async {
        let (setup, other) = two().await;
        let mut client = setup.asking(ASK).await;
        let mut first = setup.engine().await;
        first.message().await;
        first.send(EVENTS).await;
        first.send(chunk("data: 1\n\n")).await;
        assert_eq!(client.head().await.status(), 200);
        assert_eq!(client.chunk().await.unwrap(), "data: 1\n\n");
        drop(first);
        let rest = String::from_utf8(client.ended().await).unwrap();
        assert!(rest.contains("engine_broke_off"), "{rest}");
        let late = tokio::select! {
            biased;
            _ = other.accept() => true,
            () = tokio::task::yield_now() => false,
        };
        assert!(!late, "it was sent again");
    });
}

/// What the last destination says is what the client gets, and never that it came to a wrong one.
#[test]
fn without_another_destination_the_answer_is_said() {
    run(async {
        for (status, code_of) in [("421", "not_placed"), ("503", "busy")] {
            let setup = Setup::new("").await;
            *setup.backend.fleet.lock().unwrap() =
                InFleet { others: Some(Vec::new()), left: CancellationToken::new(), ..InFleet::default() };
            let mut client = setup.asking(ASK).await;
            let said = answer(r#"{"error":{"code":"busy","message":"a","type":"b"}}"#);
            let said = said.replacen("200 OK", &format!("{status} No\r\nx-poorwill-not-begun: 1"), 1);
            setup.answered(said).await;
            let (status, body) = reply(&mut client).await;
            assert_eq!((status, code(&body)), (503, code_of));
        }
    });
}

/// A living node says what is with the model, and how long that lasts. The others say nothing of it.
#[test]
fn the_client_reads_the_refusal_of_a_living_node() {
    run(async {
        let said = r#"{"error":{"code":"no_room","message":"a","type":"b"}}"#;
        for last in ["gone", "421", "503", "breaks off"] {
            let (setup, other) = two().await;
            let mut client = setup.asking(ASK).await;
            let mut first = setup.engine().await;
            first.message().await;
            if last == "gone" {
                drop(other);
                first.send(refusal("503", said)).await;
            } else {
                first.send(refusal("503", said)).await;
                let mut second = Wire::new(other.accept().await.unwrap().0);
                second.message().await;
                match last {
                    "breaks off" => drop(second),
                    status => second.send(refusal(status, &said.replace("no_room", "queue_full"))).await,
                }
            }
            let (status, body) = reply(&mut client).await;
            let wanted = match last {
                "503" => (503, "queue_full"),
                // It had the request.
                "breaks off" => (502, "engine_broke_off"),
                _ => (503, "no_room"),
            };
            assert_eq!((status, code(&body)), wanted, "{last}");
        }
    });
}

/// An engine that is busy has had the request. So has one that breaks off, and what it did may not be done twice.
#[test]
fn what_may_have_been_done_is_not_done_again() {
    run(async {
        let (setup, other) = two().await;
        let mut client = setup.asking(ASK).await;
        let said = answer(r#"{"error":{"code":"busy","message":"a","type":"b"}}"#);
        setup.answered(said.replacen("200 OK", "503 No", 1)).await;
        let (status, body) = reply(&mut client).await;
        assert_eq!((status, code(&body)), (503, "busy"));
        // A response that the engine stores, though it seems to wait in vain.
        setup.backend.fleet.lock().unwrap().still.cancel();
        let mut client = setup.client().await;
        client.send(post_with("/v1/responses", "", r#"{"model":"org/one","input":"a"}"#)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        drop(engine);
        let (status, body) = reply(&mut client).await;
        assert_eq!((status, code(&body)), (502, "engine_broke_off"));
        let is_asked = tokio::select! {
            biased;
            _ = other.accept() => true,
            () = tokio::task::yield_now() => false,
        };
        assert!(!is_asked, "it was sent again");
    });
}

#[test]
fn a_node_says_its_load_and_a_router_takes_it_off() {
    run(async {
        let said = answer(RIGHT).replacen("200 OK", "200 OK\r\nx-poorwill-load: 99", 1);
        for (load, wanted) in [(Some(3), Some("3")), (None, None)] {
            let setup = Setup::new("").await;
            setup.backend.fleet.lock().unwrap().load = load;
            let mut client = setup.asking(ASK).await;
            setup.answered(&said).await;
            // Not what its engine said.
            assert_eq!(client.json().await.0.field("x-poorwill-load"), wanted);
            assert_eq!(setup.backend.fleet.lock().unwrap().loads, []);
        }
        let setup = Setup::of_router().await;
        let mut client = setup.asking(ASK).await;
        setup.answered(&said).await;
        assert_eq!(client.json().await.0.field("x-poorwill-load"), None);
        let url = format!("http://{}", setup.engine.local_addr().unwrap());
        assert_eq!(setup.backend.fleet.lock().unwrap().loads, [(url, 99)]);
    });
}

#[test]
fn a_router_chooses_by_the_beginning_of_a_prompt() {
    run(async {
        let setup = Setup::of_router().await;
        let keys = async |body: &str| {
            let mut client = setup.asking(body).await;
            setup.answered(last_answer(RIGHT)).await;
            assert_eq!(reply(&mut client).await.0, 200);
            std::mem::take(&mut setup.backend.fleet.lock().unwrap().affinities)
        };
        let first = keys(ASK).await;
        assert!(matches!(first[..], [Affinity { key: Some(_), place: None }]), "{first:?}");
        assert_eq!(keys(ASK).await, first);
        assert_ne!(keys(r#"{"model":"org/one","prompt":"b"}"#).await, first);
        assert_eq!(keys(r#"{"model":"org/one"}"#).await, []);
        // A node has nothing to choose.
        let setup = Setup::new("").await;
        let mut client = setup.asking(ASK).await;
        setup.answered(last_answer(RIGHT)).await;
        assert_eq!(reply(&mut client).await.0, 200);
        assert_eq!(setup.backend.fleet.lock().unwrap().affinities, []);
    });
}

#[test]
fn a_router_says_that_a_node_is_not_there() {
    run(async {
        let Setup { engine, address, .. } = Setup::of_router().await;
        drop(engine);
        let mut client = Wire::to(address).await;
        client.send(super::setup::post(ASK)).await;
        let (head, body) = client.json().await;
        assert_eq!((head.status(), code(&body)), (503, "node_unreachable"));
        assert_eq!(head.field("retry-after"), Some("1"));
    });
}
