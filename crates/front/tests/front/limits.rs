//! Limits of what clients take together.

use std::collections::BTreeSet;
use std::time::Duration;

use poorwill_front::backend::Refusal;
use poorwill_front::proxy::Timeouts;
use tokio::io::AsyncWriteExt as _;

use super::setup::{END, Setup, Verdict, Wire, answer, chunk, post_with, run};

const ASK_ONE: &str = r#"{"model":"org/one","prompt":"x"}"#;
const HEALTH: &str = "GET /health HTTP/1.1\r\nHost: a\r\n\r\n";
const HALF_HEAD: &str = "GET /health HTTP/1.1\r\nHo";

async fn half_sent(setup: &Setup, count: usize) -> Vec<Wire> {
    let mut all = Vec::new();
    for _ in 0..count {
        let mut client = setup.client().await;
        client.send(HALF_HEAD).await;
        all.push(client);
    }
    all
}

#[test]
fn half_sent_heads_keep_no_client_out() {
    run(async {
        let setup = Setup::new("connections_max = 8").await;
        let mut silent = half_sent(&setup, 40).await;
        let mut client = setup.client().await;
        client.send(HEALTH).await;
        assert_eq!(client.message().await.0.status(), 200);
        // Those that came first have left.
        for one in &mut silent[..33] {
            assert!(one.ended().await.is_empty());
        }
    });
}

#[test]
fn a_flood_closes_its_own_connections() {
    run(async {
        let setup = Setup::new("connections_max = 32").await;
        let mut client = setup.client().await;
        client.send(HEALTH).await;
        assert_eq!(client.message().await.0.status(), 200);
        let mut flood = Vec::new();
        for _ in 0..100 {
            let mut one = Wire::between("127.0.0.2", setup.address).await;
            one.send(HALF_HEAD).await;
            flood.push(one);
        }
        for one in &mut flood[..60] {
            assert!(one.ended().await.is_empty());
        }
        // It has been idle for longer than all of those.
        client.send(HEALTH).await;
        assert_eq!(client.message().await.0.status(), 200);
    });
}

#[test]
fn a_request_in_progress_keeps_its_connection() {
    run(async {
        let setup = Setup::new("connections_max = 3").await;
        setup.say(Verdict::Wait);
        let mut asking = setup.asking(ASK_ONE).await;
        setup.until(|seen| seen.waiting == 1).await;
        let _silent = half_sent(&setup, 12).await;
        let mut client = setup.client().await;
        client.send(HEALTH).await;
        assert_eq!(client.message().await.0.status(), 200);
        setup.say(Verdict::Admit);
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(answer("{}")).await;
        assert_eq!(asking.message().await.0.status(), 200);
        // It has no request any more, so it leaves as the others.
        let _silent = half_sent(&setup, 12).await;
        asking.ended().await;
    });
}

#[test]
fn a_client_waits_while_all_have_requests() {
    run(async {
        let setup = Setup::new("connections_max = 1").await;
        setup.say(Verdict::Wait);
        let mut first = setup.asking(ASK_ONE).await;
        setup.until(|seen| seen.waiting == 1).await;
        let mut second = setup.client().await;
        second.send(HEALTH).await;
        setup.say(Verdict::Admit);
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(answer("{}")).await;
        assert_eq!(first.message().await.0.status(), 200);
        assert_eq!(second.message().await.0.status(), 200);
    });
}

#[test]
fn a_client_that_reads_no_answer_leaves_its_place() {
    run(async {
        let timeouts = Timeouts { unread: Duration::from_millis(100), ..Timeouts::default() };
        let setup = Setup::with_timeouts("connections_max = 1", timeouts).await;
        let first = setup.client().await;
        // Until the front writes, and no client reads.
        let ask = "GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n".repeat(100);
        let mut second = loop {
            if first.stream.try_write(ask.as_bytes()).is_err() && setup.backend.requests.active(1).1 == 0 {
                break setup.client().await;
            }
            tokio::task::yield_now().await;
        };
        second.send(HEALTH).await;
        assert_eq!(second.message().await.0.status(), 200);
    });
}

#[test]
fn a_head_that_has_begun_has_less_time() {
    run(async {
        let timeouts = Timeouts { head_rest: Duration::from_millis(200), ..Timeouts::default() };
        let setup = Setup::with_timeouts("", timeouts).await;
        let mut idle = setup.client().await;
        idle.send(HEALTH).await;
        assert_eq!(idle.message().await.0.status(), 200);
        assert!(half_sent(&setup, 1).await[0].ended().await.is_empty());
        idle.send(HEALTH).await;
        assert_eq!(idle.message().await.0.status(), 200);
    });
}

/// A request whose body has begun.
const SLOW: &str = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{";

async fn code_of(client: &mut Wire) -> (u16, String) {
    let (head, said) = client.json().await;
    assert_eq!(head.field("retry-after").is_some(), head.status() == 429);
    (head.status(), said["error"]["code"].as_str().unwrap().to_owned())
}

#[test]
fn bodies_that_wait_have_a_budget() {
    run(async {
        let setup = Setup::new("body_max = 4000\nbodies_max = 3000").await;
        setup.say(Verdict::Wait);
        let body = format!(r#"{{"model":"org/one","prompt":"{}"}}"#, "x".repeat(1000));
        let mut first = setup.asking(&body).await;
        // Chunked, so that it grows.
        let mut second = setup.client().await;
        let head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
        second.send(format!("{head}{}{END}", chunk(&body))).await;
        setup.until(|seen| seen.waiting == 2).await;
        for _ in 0..2 {
            assert_eq!(code_of(&mut setup.asking(&body).await).await, (429, "bodies_full".to_owned()));
        }
        let mut third = setup.client().await;
        third.send(format!("{head}{}", chunk(&body))).await;
        assert_eq!(code_of(&mut third).await, (429, "bodies_full".to_owned()));
        // This one could never fit.
        let large = format!("{body}{}", " ".repeat(2500));
        assert_eq!(code_of(&mut setup.asking(&large).await).await, (413, "body_too_large".to_owned()));
        setup.say(Verdict::Admit);
        for _ in 0..2 {
            let mut engine = setup.engine().await;
            engine.message().await;
            engine.send(answer("{}").replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
        }
        for client in [&mut first, &mut second] {
            assert_eq!(client.message().await.0.status(), 200);
        }
        let mut last = setup.asking(&body).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(answer("{}")).await;
        assert_eq!(last.message().await.0.status(), 200);
    });
}

#[test]
fn a_body_has_a_deadline() {
    run(async {
        let setup = Setup::new("body_time_max = \"200ms\"").await;
        let mut client = setup.client().await;
        client.send(SLOW).await;
        assert_eq!(code_of(&mut client).await, (408, "slow_body".to_owned()));
    });
}

#[test]
fn slow_bodies_leave_places_for_others() {
    run(async {
        let timeouts = Timeouts { body_slow: Duration::from_millis(10), ..Timeouts::default() };
        let setup = Setup::with_timeouts("requests_max = 8", timeouts).await;
        let mut slow = Vec::new();
        for _ in 0..8 {
            let mut client = setup.client().await;
            client.send(SLOW).await;
            slow.push(client);
        }
        // Half of them are refused.
        for _ in 0..4 {
            let answered = slow.iter().map(|client| Box::pin(client.stream.readable()));
            let (_, at, _) = futures_util::future::select_all(answered).await;
            assert_eq!(slow.remove(at).message().await.0.status(), 429);
        }
        let mut client = setup.asking(ASK_ONE).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(answer("{}")).await;
        assert_eq!(client.message().await.0.status(), 200);
    });
}

#[test]
fn bodies_that_are_late_leave_places_for_others() {
    run(async {
        let timeouts = Timeouts { body_slow: Duration::from_secs(4), ..Timeouts::default() };
        let setup = Setup::with_timeouts("requests_max = 8", timeouts).await;
        let mut late = Vec::new();
        for _ in 0..8 {
            let mut client = setup.client().await;
            client.send(SLOW).await;
            late.push(client);
        }
        // They have taken all places, and a quarter of them is refused long before they are slow.
        for _ in 0..2 {
            let answered = late.iter().map(|client| Box::pin(client.stream.readable()));
            let (_, at, _) = futures_util::future::select_all(answered).await;
            assert_eq!(code_of(&mut late.remove(at)).await, (429, "too_many_requests".to_owned()));
        }
        let mut client = setup.asking(ASK_ONE).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(answer("{}")).await;
        assert_eq!(client.message().await.0.status(), 200);
    });
}

#[test]
fn a_key_has_its_own_share() {
    run(async {
        let keys =
            "keys = [\"env:A\", { source = \"env:B\", name = \"team\", requests_max = 1, priority = 7 }]";
        let setup = Setup::new(keys).await;
        setup.say(Verdict::Wait);
        let with = |key: &str| {
            post_with("/v1/completions", &format!("Authorization: Bearer key-of-{key}\r\n"), ASK_ONE)
        };
        let mut first = setup.client().await;
        first.send(with("B")).await;
        setup.until(|seen| seen.waiting == 1 && seen.priority == 7).await;
        let mut second = setup.client().await;
        second.send(with("B")).await;
        assert_eq!(code_of(&mut second).await, (429, "key_requests_full".to_owned()));
        let mut other = setup.client().await;
        other.send(with("A")).await;
        setup.until(|seen| seen.waiting == 2 && seen.priority == 0).await;
        drop(first);
        setup.until(|seen| seen.gave_up == 1).await;
        // The share is free again when the front has dropped the request.
        loop {
            second.send(with("B")).await;
            let waits = setup.until(|seen| seen.waiting == 2);
            tokio::select! {
                _ = waits => break,
                said = code_of(&mut second) => assert_eq!(said.0, 429),
            }
        }
    });
}

#[test]
fn refused_clients_are_spread_over_time() {
    run(async {
        let setup = Setup::new("").await;
        setup.refuse(Refusal::QueueFull, None);
        let mut seconds = BTreeSet::new();
        for _ in 0..20 {
            let (head, _) = setup.asking(ASK_ONE).await.json().await;
            assert_eq!(head.status(), 429);
            seconds.insert(head.field("retry-after").unwrap().parse::<u64>().unwrap());
        }
        assert!(seconds.len() > 1 && seconds.iter().all(|wait| (1..=3).contains(wait)), "{seconds:?}");
    });
}

#[test]
fn heads_too_long_together_are_refused_in_words() {
    run(async {
        let setup = Setup::new("head_max = \"4MiB\"").await;
        // Each is allowed, and all together are not.
        let half = format!("GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Long: {}", "x".repeat(4_000_000));
        let mut long = Vec::new();
        for _ in 0..5 {
            let mut client = setup.client().await;
            // It may be refused before all is sent.
            let _ = client.stream.write_all(half.as_bytes()).await;
            long.push(client);
        }
        let answered = long.iter().map(|client| Box::pin(client.stream.readable()));
        let (_, at, _) = futures_util::future::select_all(answered).await;
        assert_eq!(code_of(&mut long.remove(at)).await, (429, "heads_full".to_owned()));
        // A short one has its place, in parts, too.
        let mut client = setup.client().await;
        client.send("GET /v1/models HTTP/1.1\r\n").await;
        setup.rounds().await;
        client.send("Host: a\r\n\r\n").await;
        assert_eq!(client.message().await.0.status(), 200);
        // With a place free, so has a long one.
        drop(long.pop());
        long[0].send("\r\n\r\n").await;
        assert_eq!(long[0].message().await.0.status(), 200);
    });
}
