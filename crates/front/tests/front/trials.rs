//! Answers beside a canary: what may pass when, and what becomes of them where it is wrong.

use poorwill_front::backend::Trial;
use tokio::sync::watch;

use super::setup::{END, EVENTS, Setup, Wire, answer, chunk, last_answer, run_on_one_thread};

const ASK: &str = r#"{"model":"org/one","stream":true}"#;
const WHOLE: &str = r#"{"model":"org/one"}"#;
const DONE: &str = "data: [DONE]\n\n";

fn on_trial(setup: &Setup) -> watch::Sender<Trial> {
    let trial = watch::Sender::new(Trial::Open);
    *setup.backend.trial.lock().unwrap() = Some(trial.subscribe());
    trial
}

/// A client whose engine has sent the first token of a stream.
async fn begun(setup: &Setup) -> (Wire, Wire) {
    let client = setup.asking(ASK).await;
    let mut engine = setup.engine().await;
    engine.message().await;
    engine.send(EVENTS).await;
    engine.send(chunk("data: 1\n\n")).await;
    setup.rounds().await;
    (client, engine)
}

#[test]
fn a_stream_begins_with_its_canary_and_ends_behind_it() {
    run_on_one_thread(async {
        let setup = Setup::new("").await;
        let trial = on_trial(&setup);
        let (mut client, mut engine) = begun(&setup).await;
        assert!(client.is_silent(), "a byte passed before the canary said anything");
        trial.send_replace(Trial::Begun);
        client.head().await;
        assert_eq!(client.chunk().await.unwrap(), "data: 1\n\n");
        // It is asked again.
        trial.send_replace(Trial::Open);
        engine.send(chunk("data: 2\n\n")).await;
        setup.rounds().await;
        assert!(client.is_silent());
        trial.send_replace(Trial::Begun);
        assert_eq!(client.chunk().await.unwrap(), "data: 2\n\n");
        engine.send(chunk("data: 3\n\n")).await;
        engine.send(chunk(DONE)).await;
        engine.send(END).await;
        assert_eq!(client.chunk().await.unwrap(), "data: 3\n\n");
        setup.rounds().await;
        assert!(client.is_silent(), "the stream ended before its canary");
        trial.send_replace(Trial::Right);
        assert_eq!(client.chunk().await.unwrap(), DONE);
        assert_eq!(client.chunk().await, None);
        assert_eq!(setup.until(|seen| seen.running == 0).await.admitted, 1);
    });
}

#[test]
fn a_stream_without_a_last_event_has_no_end_before_its_canary() {
    run_on_one_thread(async {
        let setup = Setup::new("").await;
        let trial = on_trial(&setup);
        let (mut client, mut engine) = begun(&setup).await;
        trial.send_replace(Trial::Begun);
        client.head().await;
        assert_eq!(client.chunk().await.unwrap(), "data: 1\n\n");
        engine.send(END).await;
        setup.rounds().await;
        assert!(client.is_silent());
        trial.send_replace(Trial::Wrong);
        let event = client.chunk().await.unwrap();
        assert!(event.contains("\"untrue\"") && event.starts_with("data: {\"error\":"), "{event}");
        assert_eq!(client.ended().await, b"");
    });
}

#[test]
fn what_a_wrong_engine_has_begun_breaks_off_in_words() {
    run_on_one_thread(async {
        let setup = Setup::new("").await;
        let trial = on_trial(&setup);
        let (mut client, _engine) = begun(&setup).await;
        trial.send_replace(Trial::Begun);
        client.head().await;
        assert_eq!(client.chunk().await.unwrap(), "data: 1\n\n");
        // As a service does, in this order.
        trial.send_replace(Trial::Wrong);
        setup.backend.aborted.cancel();
        let event = client.chunk().await.unwrap();
        assert!(event.contains("\"untrue\"") && event.contains("try again"), "{event}");
        assert_eq!(client.ended().await, b"");
        setup.until(|seen| seen.running == 0).await;
    });
}

#[test]
fn what_has_not_begun_is_asked_again_of_the_next_engine() {
    run_on_one_thread(async {
        for (ask, said) in [(ASK, EVENTS), (WHOLE, "")] {
            let setup = Setup::new("").await;
            let trial = on_trial(&setup);
            let mut client = setup.asking(ask).await;
            let mut engine = setup.engine().await;
            engine.message().await;
            // One has sent a token, the other nothing.
            if !said.is_empty() {
                engine.send(said).await;
                engine.send(chunk("data: asdf\n\n")).await;
            }
            setup.rounds().await;
            trial.send_replace(Trial::Wrong);
            *setup.backend.trial.lock().unwrap() = None;
            if said.is_empty() {
                engine.send(last_answer("\"asdf\"")).await;
            }
            assert_eq!(setup.until(|seen| seen.admitted == 2).await.running, 1);
            let (_, asked) = setup.answered(answer("\"right\"")).await;
            assert_eq!(asked, ask.as_bytes());
            let (head, body) = client.message().await;
            assert_eq!((head.status(), body.as_slice()), (200, &b"\"right\""[..]));
        }
    });
}

#[test]
fn an_engine_that_stays_wrong_is_asked_three_times() {
    run_on_one_thread(async {
        let setup = Setup::new("").await;
        let trial = on_trial(&setup);
        trial.send_replace(Trial::Wrong);
        let mut client = setup.asking(WHOLE).await;
        for _ in 0..3 {
            setup.answered(last_answer("\"asdf\"")).await;
        }
        let (head, body) = client.json().await;
        assert_eq!((head.status(), &body["error"]["code"]), (503, &"untrue".into()), "{body}");
        assert_eq!(setup.until(|seen| seen.running == 0).await.admitted, 3);
    });
}

#[test]
fn a_whole_answer_waits_for_the_end_of_its_canary() {
    run_on_one_thread(async {
        let setup = Setup::new("").await;
        let trial = on_trial(&setup);
        trial.send_replace(Trial::Begun);
        let mut client = setup.asking(WHOLE).await;
        setup.answered(answer("\"right\"")).await;
        setup.rounds().await;
        assert!(client.is_silent());
        trial.send_replace(Trial::Right);
        assert_eq!(client.message().await.1, b"\"right\"");
    });
}

#[test]
fn who_waits_for_a_canary_hears_of_it() {
    run_on_one_thread(async {
        let setup = Setup::new("keep_alive = \"5ms\"").await;
        let trial = on_trial(&setup);
        let mut client = setup.asking(ASK).await;
        assert_eq!(client.head().await.status(), 200);
        assert_eq!(client.chunk().await.unwrap(), ": waiting\n\n");
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(EVENTS).await;
        engine.send(chunk("data: 1\n\n")).await;
        trial.send_replace(Trial::Right);
        let mut said = String::new();
        while !said.ends_with("data: 1\n\n") {
            said += &client.chunk().await.unwrap();
        }
        assert_eq!(said.replace(": waiting\n\n", ""), "data: 1\n\n");
    });
}

#[test]
fn who_leaves_is_not_waited_for() {
    run_on_one_thread(async {
        let setup = Setup::new("").await;
        let _trial = on_trial(&setup);
        let (client, mut engine) = begun(&setup).await;
        drop(client);
        setup.until(|seen| seen.running == 0).await;
        assert_eq!(engine.ended().await, b"");
    });
}
