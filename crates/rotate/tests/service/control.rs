//! Control over real sockets: requests, commands, and access checks. The service behind it is a fake.

use std::time::Duration;

use poorwill_front::requests::{Ended, Tokens};
use poorwill_rotate::fleet::NotReady;
use poorwill_rotate::service::{EventKind, ModelCommand, ModelNow, Swap, SwapPath};
use poorwill_rotation_policy::StageName;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::operator::{Metrics, Options, PLAIN, STUCK, event, is_it, running, snapshot, stage, swap};

/// The limit of followers.
const FOLLOWERS: usize = 64;

#[tokio::test]
async fn status_and_health_are_read() {
    let control = running(PLAIN).await;
    let answer = control.ask("GET /rotate/status", "", "").await;
    assert_eq!((answer.status, answer.json()), (200, serde_json::to_value(snapshot()).unwrap()));
    assert_eq!(answer.head["cache-control"], "no-store");
    assert_eq!(answer.head["x-content-type-options"], "nosniff");
    assert_eq!(control.ask("GET /health", "", "").await.json(), json!({"status": "ok"}));
}

#[tokio::test]
async fn a_node_says_whether_routers_may_send_to_it() {
    let control = running(Options { keys: &["key"], ..PLAIN }).await;
    let ready = async |head| control.ask("GET /fleet/ready", head, "").await;
    let answer = ready("").await;
    assert!(answer.status == 404 && answer.message().contains("[fleet]"), "{answer:?}");
    *control.api.ready.lock().unwrap() = Some(Ok(()));
    assert_eq!(ready("").await.status, 200);
    let not_ready =
        NotReady { reason: "it has no lease", problem: Some("http://etcd:2379 is away".to_owned()) };
    *control.api.ready.lock().unwrap() = Some(Err(not_ready));
    let answer = ready("").await;
    assert_eq!((answer.status, answer.message().as_str()), (503, "it has no lease"), "a probe has no key");
    let answer = ready("Authorization: Bearer key\r\n").await;
    assert_eq!(answer.message(), "it has no lease: http://etcd:2379 is away");
    let metrics = control.ask("GET /metrics", "Authorization: Bearer key\r\n", "").await.body;
    for line in ["poorwill_rotate_fleet_ready 0\n", "poorwill_rotate_fleet_placements_refused 3\n"] {
        assert!(metrics.contains(line), "{metrics}");
    }
}

#[tokio::test]
async fn commands_reach_the_model_and_return_its_state() {
    let control = running(PLAIN).await;
    let two = "org%2Ftwo%20%22q%22%5C";
    for (path, body, name, command) in [
        ("one/wake", "", "one", ModelCommand::Wake),
        ("one/sleep", "", "one", ModelCommand::Sleep),
        ("one-alias/restart", "", "one-alias", ModelCommand::Restart),
        ("one/pin", "", "one", ModelCommand::Pin(true)),
        ("one/pin", "{}", "one", ModelCommand::Pin(true)),
        ("one/pin", "{\"pinned\": false}", "one", ModelCommand::Pin(false)),
        (&format!("{two}/pin"), "{\"pinned\": true}", "org/two \"q\"\\", ModelCommand::Pin(true)),
    ] {
        let answer = control.ask(&format!("POST /rotate/models/{path}"), "", body).await;
        assert_eq!(answer.status, 202, "{path} {answer:?}");
        assert_eq!(control.api.commands.lock().unwrap().pop(), Some((name.to_owned(), command)), "{path}");
        let now = control.api.snapshot.lock().unwrap().clone();
        let model = now.models.iter().find(|model| is_it(model, name)).unwrap();
        assert_eq!(answer.json(), serde_json::to_value(model).unwrap());
    }
    assert!(control.api.snapshot.lock().unwrap().models[1].is_pinned);
}

/// What the model can never do is refused, whatever its stage, and not accepted to fail later.
#[tokio::test]
async fn commands_that_can_do_nothing_are_refused_with_the_reason() {
    let control = running(PLAIN).await;
    let refused = async |path: &str| {
        let answer = control.ask(&format!("POST /rotate/models/{path}"), "", "").await;
        assert_eq!(answer.status, 409, "{path} {answer:?}");
        assert_eq!(*control.api.commands.lock().unwrap(), []);
        answer.message()
    };
    let change = |change: fn(&mut ModelNow)| change(&mut control.api.snapshot.lock().unwrap().models[0]);
    let message = refused("one-alias/hibernate").await;
    assert!(
        message.starts_with("`one`: hibernate is refused: ") && message.contains("[hibernate]"),
        "{message}"
    );
    change(|one| one.cannot_hibernate = Some("it has a communicator".to_owned()));
    assert!(refused("one/hibernate").await.ends_with("it has a communicator"));
    change(|one| (one.cannot_hibernate, one.is_supervised) = (None, false));
    assert!(refused("one/hibernate").await.contains("it has no command"));
    assert!(refused("one/restart").await.contains("it has no command"));
    let accepted = control.ask("POST /rotate/models/three/hibernate", "", "").await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
}

#[tokio::test]
async fn unknown_or_invalid_requests_are_errors() {
    let control = running(PLAIN).await;
    for ask in ["POST /rotate/models/nine/wake", "GET /rotate/models/nine/log"] {
        let answer = control.ask(ask, "", "").await;
        assert_eq!(answer.status, 404);
        assert!(
            answer.message().contains("`nine`") && answer.message().contains("one, org/two"),
            "{answer:?}"
        );
        assert_eq!(answer.json()["error"]["models"], json!(["one", "org/two \"q\"\\", "three"]));
    }
    for (ask, body, status, word) in [
        ("POST /rotate/models/one/dance", "", 404, "`dance`"),
        ("POST /rotate/models/org/two/wake", "", 404, "%2F"),
        ("GET /rotate", "", 404, "/rotate/status"),
        ("GET /rotate/models/one/wake", "", 405, "POST"),
        ("POST /rotate/status", "", 405, "GET"),
        ("POST /rotate/models/%FF/wake", "", 400, "UTF-8"),
        ("POST /rotate/models/one/pin", "{\"pinned\": 1}", 400, "boolean"),
        ("POST /rotate/models/one/pin", "{\"pined\": true}", 400, "pined"),
        ("POST /rotate/models/one/pin", "{", 400, "pinned"),
        ("GET /rotate/models/one/log?lines=many", "", 400, "lines"),
        ("GET /rotate/models/one/log?lines=10001", "", 400, "10000"),
        ("GET /rotate/events?past=-1", "", 400, "past"),
    ] {
        let answer = control.ask(ask, "", body).await;
        assert!(answer.status == status && answer.message().contains(word), "{ask} {answer:?}");
    }
    assert!(control.ask("GET /rotate/events", "Last-Event-ID: x\r\n", "").await.message().contains("number"));
    assert_eq!(*control.api.commands.lock().unwrap(), []);
}

#[tokio::test]
async fn a_body_may_be_so_long_and_no_longer() {
    let control = running(PLAIN).await;
    let most = format!("{:<16384}", "{\"pinned\": true}");
    assert_eq!(control.ask("POST /rotate/models/one/pin", "", &most).await.status, 202);
    for ask in ["POST /rotate/models/one/pin", "POST /rotate/models/one/wake", "POST /rotate/reload"] {
        let answer = control.ask(ask, "", &format!("{most} ")).await;
        assert!(answer.status == 413 && answer.message().contains("16384"), "{ask} {answer:?}");
    }
    let chunked = format!(
        "POST /rotate/models/one/pin HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\
         \r\n\r\n4001\r\n{most} \r\n0\r\n\r\n"
    );
    assert_eq!(control.send(&chunked).await.status, 413);
    assert_eq!(control.api.commands.lock().unwrap().len(), 1);
    assert_eq!(*control.api.reloaded.lock().unwrap(), 0);
    // A head of this length that has not ended.
    let head = format!("{:x<32768}", "GET /health HTTP/1.1\r\nLarge: ");
    assert_eq!(control.send(&head).await.status, 431);
}

#[tokio::test]
async fn the_log_is_plain_text() {
    let control = running(PLAIN).await;
    (1..=300).for_each(|line| control.api.log.note(&format!("<b>{line}</b>")));
    let answer = control.ask("GET /rotate/models/one/log?lines=2", "", "").await;
    assert_eq!(
        (answer.status, answer.body.as_str()),
        (200, "[poorwill] <b>299</b>\n[poorwill] <b>300</b>\n")
    );
    assert_eq!(answer.head["content-type"], "text/plain; charset=utf-8");
    assert_eq!(control.ask("GET /rotate/models/one/log", "", "").await.body.lines().count(), 200);
}

#[tokio::test]
async fn a_log_is_followed_by_holders_of_a_key() {
    let control = running(Options { keys: &["alpha", "beta"], ..PLAIN }).await;
    let path = "/rotate/models/one/log?follow=true&lines=1";
    assert_eq!(control.ask(&format!("GET {path}"), "", "").await.status, 401);
    control.api.log.note("1");
    control.api.log.note("2");
    let mut followers = Vec::new();
    for key in ["alpha", "beta"] {
        let head = format!("Authorization: Bearer {key}\r\n");
        followers.push(control.followed(path, &head, "text/plain").await);
    }
    for follower in &mut followers {
        assert_eq!(follower.until("\n").await.as_deref(), Some("[poorwill] 2"));
    }
    control.api.log.note("3");
    for follower in &mut followers {
        assert_eq!(follower.until("\n").await.as_deref(), Some("[poorwill] 3"));
    }
    *control.api.control.lock().unwrap() = super::operator::control(&["beta"]);
    control.api.log.note("4");
    let [alpha, beta] = &mut followers[..] else { panic!("there are two") };
    assert_eq!((alpha.until("\n").await, beta.until("\n").await.as_deref()), (None, Some("[poorwill] 4")));
    control.shutdown.cancel();
    assert_eq!(beta.until("\n").await, None);
}

#[tokio::test]
async fn an_engine_that_was_not_started_here_has_no_log() {
    let control = running(PLAIN).await;
    control.api.snapshot.lock().unwrap().models[0].is_supervised = false;
    for query in ["", "?follow=true"] {
        let answer = control.ask(&format!("GET /rotate/models/one/log{query}"), "", "").await;
        assert!(answer.status == 409 && answer.message().contains("not started here"), "{answer:?}");
    }
}

#[tokio::test]
async fn all_models_are_put_to_sleep() {
    let control = running(PLAIN).await;
    let answer = control.ask("POST /rotate/sleep", "", "").await;
    let names = ["one", "org/two \"q\"\\", "three"];
    assert_eq!((answer.status, answer.json()), (202, json!({"models": names})));
    let asked = names.map(|name| (name.to_owned(), ModelCommand::Sleep));
    assert_eq!(*control.api.commands.lock().unwrap(), asked);
}

#[tokio::test]
async fn a_request_that_is_not_there_cannot_be_cancelled() {
    let control = running(PLAIN).await;
    let answer = control.ask("POST /rotate/requests/a%2Fb%0A/cancel", "", "").await;
    assert!(answer.status == 404 && answer.message().contains("`a/b\\n`"), "{answer:?}");
    assert_eq!(control.ask("GET /rotate/requests/a/cancel", "", "").await.status, 405);
}

#[tokio::test]
async fn a_reload_is_done_or_says_what_is_wrong() {
    let control = running(PLAIN).await;
    assert_eq!(control.ask("POST /rotate/reload", "", "").await.json(), json!({"reloaded": true}));
    control.api.reloads.lock().unwrap().push(Err("line 3: no such key".to_owned()));
    let answer = control.ask("POST /rotate/reload", "", "").await;
    assert_eq!((answer.status, answer.message().as_str()), (422, "line 3: no such key"));
}

#[tokio::test]
async fn a_reload_completes_after_its_client_has_left() {
    let control = running(Options { has_barrier: true, ..PLAIN }).await;
    let (begun, may_end) = control.api.barrier.as_ref().unwrap();
    let mut stream = TcpStream::connect(control.address).await.unwrap();
    stream.write_all(b"POST /rotate/reload HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    tokio::time::timeout(STUCK, begun.notified()).await.unwrap();
    drop(stream);
    // By now the disconnect has been noticed.
    assert_eq!(control.ask("GET /health", "", "").await.status, 200);
    may_end.notify_one();
    let done = async {
        while *control.api.reloaded.lock().unwrap() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(STUCK, done).await.expect("it comes to its end");
}

#[tokio::test]
async fn with_keys_only_the_page_and_health_are_for_everybody() {
    let control = running(Options { keys: &["alpha", "beta"], ..PLAIN }).await;
    let guarded = ["GET /rotate/status", "GET /rotate/events", "GET /metrics", "GET /rotate/models/one/log"];
    let commands =
        ["POST /rotate/reload", "POST /rotate/models/one/wake", "GET /nowhere", "GET //", "GET /health/"];
    let commands = commands.into_iter().chain(["POST /rotate/sleep", "POST /rotate/requests/a/cancel"]);
    for ask in guarded.into_iter().chain(commands) {
        for head in [
            "",
            "Authorization: Bearer gamma\r\n",
            "Authorization: Bearer \r\n",
            "Authorization: Basic alpha\r\n",
        ] {
            let answer = control.ask(ask, head, "").await;
            assert!(answer.status == 401 && answer.message().contains("Bearer"), "{ask} {head} {answer:?}");
            assert_eq!(answer.head["www-authenticate"], "Bearer");
        }
    }
    assert_eq!(*control.api.commands.lock().unwrap(), []);
    for open in ["GET /", "GET /health", "HEAD /"] {
        assert_eq!(control.ask(open, "", "").await.status, 200, "{open}");
    }
    for key in ["alpha", "beta"] {
        let head = format!("authorization: bearer {key}\r\n");
        assert_eq!(control.ask("GET /rotate/status", &head, "").await.status, 200);
        assert_eq!(control.ask("POST /rotate/models/one/wake", &head, "").await.status, 202);
    }
}

#[tokio::test]
async fn a_removed_key_ends_its_stream() {
    let control = running(Options { keys: &["alpha", "beta"], ..PLAIN }).await;
    let mut alpha = control.follow("/rotate/events", "Authorization: Bearer alpha\r\n").await;
    let mut beta = control.follow("/rotate/events", "Authorization: Bearer beta\r\n").await;
    control.send_event(stage(1));
    assert_eq!((alpha.id().await, beta.id().await), (1, 1));
    *control.api.control.lock().unwrap() = super::operator::control(&["beta"]);
    control.send_event(stage(2));
    assert!(alpha.next().await.is_none());
    assert_eq!(beta.id().await, 2);
    assert_eq!(control.ask("GET /metrics", "Authorization: Bearer alpha\r\n", "").await.status, 401);
}

#[tokio::test]
async fn other_sites_in_a_browser_are_kept_out() {
    let control = running(PLAIN).await;
    let port = control.address.port();
    let own = format!(
        "Host: localhost:{port}\r\nOrigin: http://localhost:{port}\r\nSec-Fetch-Site: same-origin\r\n"
    );
    for head in [own.as_str(), "Host: [::1]:9\r\n", "Host: localhost\r\n", "Sec-Fetch-Site: none\r\n"] {
        assert_eq!(control.ask("POST /rotate/models/one/wake", head, "").await.status, 202, "{head}");
    }
    control.api.commands.lock().unwrap().clear();
    let rebound = ["Host: evil.example\r\n".to_owned(), format!("Host: localhost.evil.example:{port}\r\n")];
    for head in &rebound {
        for ask in ["GET /", "GET /health", "GET /rotate/status", "POST /rotate/models/one/wake"] {
            let answer = control.ask(ask, head, "").await;
            assert!(answer.status == 403 && answer.message().contains("evil.example"), "{ask} {answer:?}");
        }
    }
    for head in [
        "Sec-Fetch-Site: cross-site\r\n",
        "Sec-Fetch-Site: same-site\r\n",
        "Origin: http://evil.example\r\n",
        "Origin: null\r\n",
        &format!("Origin: http://127.0.0.1:{}\r\n", port ^ 1),
        &format!("Origin: http://127.0.0.1:{port}\r\nOrigin: http://evil.example\r\n"),
    ] {
        for ask in [
            "POST /rotate/models/one/wake",
            "POST /rotate/reload",
            "GET /rotate/events",
            "POST /health",
            "POST /rotate/sleep",
            "POST /rotate/requests/a/cancel",
            "GET /rotate/models/one/log?follow=true",
        ] {
            assert_eq!(control.ask(ask, head, "").await.status, 403, "{ask} {head}");
        }
        assert_eq!(control.ask("GET /", head, "").await.status, 200, "a link to the page is fine");
    }
    for head in ["Host: localhost\r\nHost: localhost\r\n", "Host: a@localhost\r\n", "Host: \r\n"] {
        assert_eq!(control.ask("GET /rotate/status", head, "").await.status, 400, "{head}");
    }
    let answer = control.ask("GET http://evil.example/rotate/status", "Host: localhost\r\n", "").await;
    assert_eq!(answer.status, 400);
    assert_eq!(*control.api.commands.lock().unwrap(), []);
}

#[tokio::test]
async fn a_reachable_control_accepts_any_host_but_no_other_site() {
    let control = running(Options { keys: &["alpha"], listen: "0.0.0.0:0", ..PLAIN }).await;
    let head = "Authorization: Bearer alpha\r\nHost: gpu-7.example\r\n";
    assert_eq!(control.ask("GET /rotate/status", head, "").await.status, 200);
    let ours = format!("{head}Origin: https://gpu-7.example\r\n");
    assert_eq!(control.ask("POST /rotate/models/one/wake", &ours, "").await.status, 202);
    let other = format!("{head}Origin: https://evil.example\r\n");
    assert_eq!(control.ask("POST /rotate/models/one/wake", &other, "").await.status, 403);
}

#[tokio::test]
async fn events_come_in_order_and_again_after_a_reconnection() {
    let control = running(PLAIN).await;
    let mut first = control.follow("/rotate/events", "").await;
    control.send_event(stage(7));
    control.send_event(event(8, "one", EventKind::Ready { swap: swap() }));
    let (id, kind, data) = first.next().await.unwrap();
    assert_eq!((id, kind.as_str(), &data), (Some(7), "stage", &serde_json::to_value(&*stage(7)).unwrap()));
    let (id, kind, data) = first.next().await.unwrap();
    assert_eq!((id, kind.as_str(), &data["swap"]["path"]), (Some(8), "ready", &json!("hot")));
    (9..40).for_each(|seq| control.send_event(stage(seq)));
    for seq in 9..40 {
        assert_eq!(first.id().await, seq);
    }
    let mut back = control.follow("/rotate/events", "Last-Event-ID: 37\r\n").await;
    assert_eq!((back.id().await, back.id().await), (38, 39));
    let mut past = control.follow("/rotate/events?past=1", "").await;
    assert_eq!(past.id().await, 39);
    control.send_event(stage(40));
    for follower in [&mut first, &mut back, &mut past] {
        assert_eq!(follower.id().await, 40);
    }
}

#[tokio::test]
async fn a_slow_follower_gets_the_count_of_lost_events_and_goes_on() {
    const EVENTS: u64 = 3000;
    let control = running(PLAIN).await;
    let mut slow = control.follow("/rotate/events", "").await;
    for seq in 1..=EVENTS {
        control.send_event(event(
            seq,
            "one",
            EventKind::Failed { stage: StageName::Waking, reason: "x".repeat(16 << 10) },
        ));
    }
    let sample = "poorwill_rotate_failures_total{model=\"one\",stage=\"waking\"}";
    control.metrics_when(sample, 3000.0).await;
    control.send_event(stage(EVENTS + 1));
    let (mut last, mut lost) = (0, 0);
    while last <= EVENTS {
        let (id, kind, data) = slow.next().await.expect("it goes on");
        match id {
            Some(id) => {
                assert_eq!(id, last + 1);
                last = id;
            }
            None => {
                assert_eq!(kind, "lagged");
                lost += data["lost"].as_u64().unwrap();
                last += data["lost"].as_u64().unwrap();
            }
        }
    }
    assert!(lost > 0, "nothing was lost, so this shows nothing");
}

#[tokio::test]
async fn events_that_the_service_could_not_deliver_are_reported_as_lost() {
    let control = running(Options { events_kept: 4, ..PLAIN }).await;
    let mut follower = control.follow("/rotate/events", "").await;
    // On one thread no task takes them in between.
    (1..=100).for_each(|seq| control.send_event(stage(seq)));
    let (id, kind, data) = follower.next().await.unwrap();
    assert_eq!((id, kind.as_str(), data), (None, "lagged", json!({"lost": 96})));
    assert_eq!(follower.id().await, 97);
    control.metrics_when("poorwill_rotate_events_lost_total", 96.0).await;
}

#[tokio::test]
async fn so_many_may_follow_and_no_more() {
    let control = running(PLAIN).await;
    let mut all = Vec::new();
    for _ in 0..FOLLOWERS {
        all.push(control.follow("/rotate/events", "").await);
    }
    let answer = control.ask("GET /rotate/events", "", "").await;
    assert!(answer.status == 503 && answer.message().contains("64"), "{answer:?}");
    assert_eq!(control.ask("GET /rotate/status", "", "").await.status, 200, "the rest goes on");
    control.send_event(stage(1));
    for follower in &mut all {
        assert_eq!(follower.id().await, 1);
    }
}

#[tokio::test]
async fn metrics_agree_with_events_and_the_status() {
    let control = running(PLAIN).await;
    let failed = |seq, stage| event(seq, "one", EventKind::Failed { stage, reason: "it is gone".to_owned() });
    let shortfall = EventKind::Shortfall { gpu: 0, expected_bytes: 9, freed_bytes: 1 };
    control.send_event(event(1, "one", EventKind::Ready { swap: swap() }));
    control.send_event(event(
        2,
        "one",
        EventKind::Ready { swap: Swap { path: SwapPath::Cold, total_s: 100.0, ..swap() } },
    ));
    control.send_event(failed(3, StageName::Waking));
    control.send_event(failed(4, StageName::Canary));
    control.send_event(failed(5, StageName::Canary));
    control.send_event(event(6, "one", shortfall));
    for (seq, before) in [(7, StageName::FallingAsleep), (8, StageName::Ready)] {
        control.send_event(event(
            seq,
            "one",
            EventKind::Stage { before, before_s: 0.25, stage: StageName::ReleasingMemory },
        ));
    }
    control.send_event(event(9, "three", EventKind::Hibernated { residue_bytes: vec![2 << 30] }));
    control.send_event(event(10, "three", EventKind::Quarantined { for_s: 60.0, failures: 3 }));
    let metrics = control.metrics_when("poorwill_rotate_quarantines_total{model=\"three\"}", 1.0).await;
    let swaps = "poorwill_rotate_swap_seconds";
    let two = "org/two \\\"q\\\"\\\\";
    for (sample, value) in [
        (format!("{swaps}_count{{phase=\"total\",path=\"hot\"}}"), 1.0),
        (format!("{swaps}_sum{{phase=\"total\",path=\"hot\"}}"), 2.0),
        (format!("{swaps}_sum{{phase=\"total\",path=\"cold\"}}"), 100.0),
        (format!("{swaps}_sum{{phase=\"whole\",path=\"hot\"}}"), 2.5),
        (format!("{swaps}_sum{{phase=\"waking\",path=\"hot\"}}"), 1.5),
        (format!("{swaps}_sum{{phase=\"falling asleep\",path=\"away\"}}"), 0.25),
        (format!("{swaps}_bucket{{le=\"60.0\",phase=\"total\",path=\"cold\"}}"), 0.0),
        (format!("{swaps}_bucket{{le=\"120.0\",phase=\"total\",path=\"cold\"}}"), 1.0),
        (format!("{swaps}_bucket{{le=\"+Inf\",phase=\"total\",path=\"cold\"}}"), 1.0),
        ("poorwill_rotate_failures_total{model=\"one\",stage=\"waking\"}".to_owned(), 1.0),
        ("poorwill_rotate_failures_total{model=\"one\",stage=\"canary\"}".to_owned(), 2.0),
        ("poorwill_rotate_canary_failures_total{model=\"one\"}".to_owned(), 2.0),
        ("poorwill_rotate_canary_failures_total{model=\"three\"}".to_owned(), 0.0),
        ("poorwill_rotate_shortfalls_total{model=\"one\"}".to_owned(), 1.0),
        (format!("poorwill_rotate_queue{{model=\"{two}\"}}"), 5.0),
        ("poorwill_rotate_running{model=\"one\"}".to_owned(), 3.0),
        ("poorwill_rotate_ready{model=\"one\"}".to_owned(), 1.0),
        ("poorwill_rotate_ready{model=\"three\"}".to_owned(), 0.0),
        ("poorwill_rotate_admitted_total{model=\"one\"}".to_owned(), 40.0),
        ("poorwill_rotate_refused_total{model=\"one\"}".to_owned(), 2.0),
        ("poorwill_rotate_engine_starts_total{model=\"one\"}".to_owned(), 1.0),
        (format!("poorwill_rotate_oldest_wait_seconds{{model=\"{two}\"}}"), 7.5),
        ("poorwill_rotate_oldest_wait_seconds{model=\"one\"}".to_owned(), 0.0),
        ("poorwill_rotate_swap_cost_seconds{model=\"one\",step=\"wake\"}".to_owned(), 1.25),
        ("poorwill_rotate_swap_cost_seconds{model=\"one\",step=\"leave\"}".to_owned(), 0.5),
        ("poorwill_rotate_swap_cost_seconds{model=\"three\",step=\"resume\"}".to_owned(), 0.625),
        ("poorwill_rotate_residue_bytes{model=\"three\",gpu=\"1\"}".to_owned(), 2_147_483_648.0),
        ("poorwill_rotate_hibernation_host_bytes{model=\"three\"}".to_owned(), 2_147_483_648.0),
        ("poorwill_rotate_hibernation_host_bytes{model=\"one\"}".to_owned(), 0.0),
        ("poorwill_rotate_hibernations_total{model=\"three\"}".to_owned(), 1.0),
        ("poorwill_rotate_requests_waiting".to_owned(), 5.0),
        ("poorwill_rotate_requests_running".to_owned(), 3.0),
        ("poorwill_rotate_residents{gpu=\"0\"}".to_owned(), 2.0),
        ("poorwill_rotate_residents{gpu=\"1\"}".to_owned(), 1.0),
        ("poorwill_rotate_gpu_total_bytes{gpu=\"0\"}".to_owned(), 85_899_345_920.0),
        ("poorwill_rotate_gpu_free_bytes{gpu=\"0\"}".to_owned(), 9_663_676_416.0),
        ("poorwill_rotate_gpu_reclaimable_bytes{gpu=\"0\"}".to_owned(), 3_221_225_472.0),
        ("poorwill_rotate_gpu_promised_bytes{gpu=\"1\"}".to_owned(), 0.0),
        ("poorwill_rotate_lent_bytes_total".to_owned(), 9_663_676_416.0),
        ("poorwill_rotate_lent_taken_bytes_total".to_owned(), 4_294_967_296.0),
        ("poorwill_rotate_lent_brought_back_bytes_total".to_owned(), 2_147_483_648.0),
        ("poorwill_rotate_lent_given_up_bytes_total".to_owned(), 0.0),
        ("poorwill_rotate_gpu_swapping_seconds_total{gpu=\"0\"}".to_owned(), 30.75),
        ("poorwill_rotate_gpu_swapping_seconds_total{gpu=\"1\"}".to_owned(), 0.0),
        ("poorwill_rotate_events_lost_total".to_owned(), 0.0),
    ] {
        assert_eq!(metrics.at(&sample).to_bits(), f64::to_bits(value), "{sample}");
    }
    assert!(
        !metrics.samples.contains_key("poorwill_rotate_gpu_free_bytes{gpu=\"1\"}"),
        "it was not measured"
    );
    let starts = "poorwill_rotate_swap_cost_seconds{model=\"one\",step=\"start\"}";
    assert!(!metrics.samples.contains_key(starts), "it was not measured");
    assert_eq!(metrics.types[swaps], "histogram");
    assert_eq!(metrics.types["poorwill_rotate_gpu_free_bytes"], "gauge");
    assert_eq!(metrics.types["poorwill_rotate_admitted"], "counter");
    let answer = control.ask("GET /metrics", "", "").await;
    assert_eq!(answer.head["content-type"], "application/openmetrics-text; version=1.0.0; charset=utf-8");
    control.api.snapshot.lock().unwrap().models.truncate(1);
    let metrics = Metrics::of(&control.ask("GET /metrics", "", "").await.body);
    assert!(!metrics.samples.contains_key("poorwill_rotate_ready{model=\"three\"}"), "it is gone");
}

#[tokio::test]
async fn the_page_is_served_with_its_security_policy() {
    let control = running(PLAIN).await;
    let answer = control.ask("GET /", "", "").await;
    assert_eq!(answer.status, 200);
    for part in [
        "<title>Poorwill rotation</title>",
        include_str!("../../../front/src/operators/page/shared.css"),
        include_str!("../../../front/src/operators/page/shared.js"),
        include_str!("../../../front/src/operators/page/node.html"),
        include_str!("../../../front/src/operators/page/node.js"),
    ] {
        assert_eq!(answer.body.matches(part).count(), 1, "{part}");
    }
    assert_eq!(answer.head["content-type"], "text/html; charset=utf-8");
    let policy = &answer.head["content-security-policy"];
    for part in ["default-src 'none'", "script-src 'sha256-", "style-src 'sha256-", "frame-ancestors 'none'"]
    {
        assert!(policy.contains(part), "{policy}");
    }
    assert_eq!(answer.head["x-content-type-options"], "nosniff");
    assert_eq!(answer.head["cache-control"], "no-store");
}

#[tokio::test]
async fn when_the_service_ends_streams_end_and_so_does_this() {
    let control = running(PLAIN).await;
    let mut follower = control.follow("/rotate/events", "").await;
    let mut half = TcpStream::connect(control.address).await.unwrap();
    half.write_all(b"GET /health HTT").await.unwrap();
    control.shutdown.cancel();
    assert!(follower.next().await.is_none());
    tokio::time::timeout(STUCK, control.served).await.expect("it ends").unwrap().unwrap();
    assert!(TcpStream::connect(control.address).await.is_err(), "the listener is closed");
}

fn ended() -> Ended<'static> {
    Ended {
        model: Some("one"),
        status: Some(200),
        end: "whole",
        total: Duration::from_secs(3),
        waited: Some(Duration::from_secs(1)),
        ttft: Some(Duration::from_secs(2)),
        tokens: Tokens { prompt: Some(30), completion: Some(600) },
    }
}

#[tokio::test]
async fn ended_requests_are_counted_by_model_and_code() {
    let control = running(PLAIN).await;
    let requests = &control.api.requests;
    requests.record(&ended());
    let none = Tokens::default();
    requests.record(&Ended { status: Some(503), waited: None, ttft: None, tokens: none, ..ended() });
    requests.record(&Ended { status: None, end: "left", tokens: none, ..ended() });
    requests.record(&Ended { model: None, status: Some(404), ..ended() });
    let metrics = Metrics::of(&control.ask("GET /metrics", "", "").await.body);
    for (sample, value) in [
        ("requests_total{model=\"one\",code=\"200\",end=\"whole\"}", 1.0),
        ("requests_total{model=\"one\",code=\"503\",end=\"whole\"}", 1.0),
        ("requests_total{model=\"one\",code=\"0\",end=\"left\"}", 1.0),
        ("requests_total{model=\"\",code=\"404\",end=\"whole\"}", 1.0),
        ("request_seconds_sum{model=\"one\",class=\"2xx\"}", 3.0),
        ("request_seconds_count{model=\"one\",class=\"none\"}", 1.0),
        ("request_wait_seconds_sum{model=\"one\"}", 2.0),
        ("request_ttft_seconds_count{model=\"one\"}", 2.0),
        ("tokens_total{model=\"one\",kind=\"prompt\"}", 30.0),
        ("tokens_total{model=\"one\",kind=\"completion\"}", 600.0),
    ] {
        assert_eq!(
            metrics.at(&format!("poorwill_rotate_{sample}")).to_bits(),
            f64::to_bits(value),
            "{sample}"
        );
    }
    assert!(!metrics.samples.keys().any(|sample| sample.contains("class=\"4xx\"")), "it had no model");

    // The status has those of the last minute.
    let models = control.ask("GET /rotate/status", "", "").await.json()["models"].clone();
    let recent = json!({
        "answers": 3, "prompt_tokens_per_s": 0.5, "completion_tokens_per_s": 10.0, "ttft_s": 2.0,
    });
    assert_eq!(models[0]["recent"], recent);
    assert_eq!((&models[2]["recent"]["answers"], &models[2]["recent"]["ttft_s"]), (&json!(0), &json!(null)));
}

#[tokio::test]
async fn counters_of_removed_models_stay_until_scrapers_have_seen_them_and_others_go_on() {
    let control = running(PLAIN).await;
    let requests = &control.api.requests;
    for model in ["one", "three"] {
        requests.record(&Ended { model: Some(model), ..ended() });
    }
    requests.record(&Ended { model: None, status: Some(404), ..ended() });
    let failed =
        |seq, model| event(seq, model, EventKind::Failed { stage: StageName::Canary, reason: String::new() });
    control.send_event(failed(1, "three"));
    control.send_event(failed(2, "one"));
    control.metrics_when("poorwill_rotate_canary_failures_total{model=\"one\"}", 1.0).await;
    let scrape = async || Metrics::of(&control.ask("GET /metrics", "", "").await.body);
    let of = |metrics: &Metrics, model: &str| {
        let label = format!("model=\"{model}\"");
        metrics.samples.keys().filter(|sample| sample.contains(&label)).cloned().collect::<Vec<_>>()
    };
    let pass = async |seconds| {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(seconds)).await;
        tokio::time::resume();
    };
    let three = control.api.snapshot.lock().unwrap().models.pop().unwrap();
    let answers = "poorwill_rotate_requests_total{model=\"three\",code=\"200\",end=\"whole\"}";

    // It comes back in time, and goes on.
    assert_eq!(scrape().await.at(answers).to_bits(), f64::to_bits(1.0));
    pass(200).await;
    control.api.snapshot.lock().unwrap().models.push(three);
    scrape().await;
    requests.record(&Ended { model: Some("three"), ..ended() });
    control.api.snapshot.lock().unwrap().models.pop();
    assert_eq!(scrape().await.at(answers).to_bits(), f64::to_bits(2.0));
    pass(299).await;
    assert_eq!(scrape().await.at(answers).to_bits(), f64::to_bits(2.0), "counted from its second removal");
    pass(1).await;
    let metrics = scrape().await;
    assert_eq!(of(&metrics, "three"), [] as [String; 0]);
    assert_eq!(
        metrics.at("poorwill_rotate_canary_failures_total{model=\"one\"}").to_bits(),
        f64::to_bits(1.0)
    );
    assert!(!of(&metrics, "").is_empty(), "requests without a model");
    // One of its requests ran on until now.
    requests.record(&Ended { model: Some("three"), ..ended() });
    assert_eq!(scrape().await.at(answers).to_bits(), f64::to_bits(1.0));
    pass(300).await;
    assert_eq!(of(&scrape().await, "three"), [] as [String; 0]);
}

#[tokio::test]
async fn so_many_requests_in_progress_are_listed_as_asked_for() {
    let control = running(PLAIN).await;
    let none = json!({"count": 0, "requests": []});
    for ask in ["GET /rotate/requests", "GET /rotate/requests?max=0", "GET /rotate/requests?max=9999"] {
        assert_eq!(control.ask(ask, "", "").await.json(), none, "{ask}");
    }
    let answer = control.ask("GET /rotate/requests?max=x", "", "").await;
    assert!(answer.status == 400 && answer.message().contains("max"), "{answer:?}");
}

/// The second half of the page.
const TRACES: &str = "## Traces\n\n\
    With [`[traces]`](rotation-config.md), spans go to a collector by OTLP: JSON over HTTP. At most 4096 wait for it. \
    More are dropped, and so is what it does not take; a warning says so. Swaps are always recorded, and requests as \
    `sample` or their clients say. `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_EXPORTER_OTLP_HEADERS` are \
    read.\n\n\
    | span | parent | what it has |\n|---|---|---|\n\
    | `POST /v1/…` | the client's `traceparent` | OpenTelemetry's attributes of HTTP servers and generative models, \
    `poorwill.request.id`, `poorwill.key` (its name), `poorwill.end` |\n\
    | `wait` | the request | a link to the `swap` that it waited for |\n\
    | `chat MODEL` and the like | the request | the engine's answer, with the event `first byte`; the engine gets this \
    span in its `traceparent` |\n\
    | `swap` | none | `poorwill.swap.path`, `poorwill.swap.waited_s`, a child for each phase, links to each `leave` |\n\
    | `leave` | none | a child for each phase |\n";

/// The page of metrics, from the help, type and unit lines of a scrape in which every metric has a sample.
#[tokio::test]
async fn metrics_reference() {
    let control = running(PLAIN).await;
    control.api.requests.record(&ended());
    control.api.requests.repeated("one");
    control.send_event(event(1, "one", EventKind::Ready { swap: swap() }));
    let failed = EventKind::Failed { stage: StageName::Canary, reason: "other text".to_owned() };
    control.send_event(event(2, "one", failed));
    let sample = "poorwill_rotate_failures_total{model=\"one\",stage=\"canary\"}";
    control.metrics_when(sample, 1.0).await;
    let scrape = control.ask("GET /metrics", "", "").await.body;
    let comment = |kind: &str, name: &str| {
        let line = scrape.lines().find_map(|line| line.strip_prefix(&format!("# {kind} {name} ")));
        line.map(str::to_owned)
    };
    let mut text = super::reference::head("metrics_reference");
    text += "# Metrics and traces of a rotation\n\n`GET /metrics` of control answers with OpenMetrics text. Counters end in `_total`; \
             a histogram has `_bucket`, `_sum` and `_count`.\n\n\
             | metric | type | labels | unit | meaning |\n|---|---|---|---|---|\n";
    let names = scrape.lines().filter_map(|line| line.strip_prefix("# HELP ")?.split_once(' '));
    for (name, help) in names {
        let kind = comment("TYPE", name).unwrap();
        let suffix = if kind == "counter" { "_total" } else { "" };
        let labelled =
            |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', '_', ' ']));
        let sample =
            scrape.lines().find(|line| labelled(line)).unwrap_or_else(|| panic!("{name} has no sample"));
        let labels = sample.split_once('{').map_or("", |(_, rest)| rest.rsplit_once('}').unwrap().0);
        let labels: Vec<String> = labels
            .split(',')
            .filter_map(|label| label.split_once('='))
            .filter(|(label, _)| *label != "le")
            .map(|(label, _)| format!("`{label}`"))
            .collect();
        let unit = comment("UNIT", name).unwrap_or_default();
        text += &format!("| `{name}{suffix}` | {kind} | {} | {unit} | {help} |\n", labels.join(", "));
    }
    let stages: Vec<String> = StageName::ALL.iter().map(|stage| format!("`{stage}`")).collect();
    text += &format!(
        "\n`stage` and `phase` are stages of a model: {}. The phase `total` is the swap without the models that left for it, and `whole` with them. `path` is `hot` (woke \
         with its weights), `warm` (read its weights again), `cold` (was started), `found` (was awake when the service \
         began), or `away` (leaving). `step` is `resume`, `wake`, `start`, `leave` or `hibernate`; `kind` is `prompt` or `completion`.\n\nGauges \
         of a removed model, and what it admitted, refused and started, are gone at once. Its other counters and histograms stay for five minutes from the first scrape \
         without it, so that every scraper sees their last values.\n\n{TRACES}",
        stages.join(", ")
    );
    super::reference::check("metrics.md", &text);
}

/// Every metric of the dashboard is one of the page of metrics, with a sample's name.
#[test]
fn the_dashboard_names_metrics_that_exist() {
    let page = std::fs::read_to_string(super::reference::path("metrics.md")).unwrap();
    let mut samples = std::collections::BTreeSet::new();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    for row in rows.filter(|row| row.starts_with("poorwill_rotate_")) {
        let (name, rest) = row.split_once("` | ").unwrap();
        let suffixes: &[&str] =
            if rest.starts_with("histogram") { &["_bucket", "_sum", "_count"] } else { &[""] };
        samples.extend(suffixes.iter().map(|suffix| format!("{name}{suffix}")));
    }
    let text = include_str!("../../../../contrib/grafana/rotation.json");
    let board: serde_json::Value = serde_json::from_str(text).unwrap();
    assert!(!board["panels"].as_array().unwrap().is_empty());
    let named: Vec<&str> = text
        .split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
        .filter(|word| word.starts_with("poorwill_rotate_"))
        .collect();
    for shown in ["tokens_total", "oldest_wait_seconds", "swap_cost_seconds", "request_ttft_seconds_bucket"] {
        assert!(named.iter().any(|name| name.strip_prefix("poorwill_rotate_") == Some(shown)), "{shown}");
    }
    for name in named {
        assert!(samples.contains(name), "{name}");
    }
}

/// The page of the HTTP API names every route of control and every key of its JSON.
#[test]
fn api_reference() {
    let page = std::fs::read_to_string(super::reference::path("rotation-api.md")).unwrap();
    let text = include_str!("../../src/control/routes.rs");
    let routes: Vec<(&str, &str)> = text
        .split(".route(")
        .skip(1)
        .map(|rest| {
            let (route, rest) = rest.split_once("\", ").expect("a path and what answers");
            (rest.split_once('(').unwrap().0, route.trim_start().strip_prefix('"').unwrap())
        })
        .collect();
    let listed: Vec<&str> = page
        .split("\n## ")
        .find_map(|section| section.strip_prefix("Control\n"))
        .expect("the page has a section on control")
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(request, _)| request)
        .collect();
    assert_eq!(routes.len(), listed.len(), "{routes:?}, but the page has {listed:?}");
    for (method, route) in routes {
        let request = format!("{} {}", method.to_uppercase(), route.replace("{command}", "wake"));
        assert!(listed.contains(&request.as_str()), "{request}");
    }
    let mut keys = std::collections::BTreeSet::new();
    let all = [
        EventKind::Stage { before: StageName::Cold, before_s: 1.0, stage: StageName::Starting },
        EventKind::Ready { swap: swap() },
        EventKind::Failed { stage: StageName::Waking, reason: String::new() },
        EventKind::Shortfall { gpu: 0, expected_bytes: 1, freed_bytes: 0 },
        EventKind::Learnt { held_bytes: Vec::new() },
        EventKind::Grew { before_bytes: Vec::new(), need_bytes: Vec::new() },
        EventKind::Hibernated { residue_bytes: Vec::new() },
        EventKind::Quarantined { for_s: 1.0, failures: 1 },
    ];
    for what in all {
        collect(&serde_json::to_value(&*event(1, "one", what)).unwrap(), &mut keys);
    }
    collect(&serde_json::to_value(snapshot()).unwrap(), &mut keys);
    for key in keys {
        assert!(page.contains(&format!("`{key}`")), "{key}");
    }
}

fn collect(value: &serde_json::Value, keys: &mut std::collections::BTreeSet<String>) {
    for (key, value) in value.as_object().into_iter().flatten() {
        keys.insert(key.clone());
        collect(value, keys);
    }
    value.as_array().into_iter().flatten().for_each(|value| collect(value, keys));
}
