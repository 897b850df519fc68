//! Limits of what clients take together.

use std::time::Duration;

use poorwill_rotate::front::Timeouts;

use super::setup::{Setup, Verdict, Wire, answer, run};

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
fn half_sent_heads_keep_nobody_out() {
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
