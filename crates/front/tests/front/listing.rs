//! The list of requests in progress.

use poorwill_front::requests::{RequestNow, RequestState};

use super::setup::{END, EVENTS, Setup, Verdict, chunk, post_with, run};

impl Setup {
    /// Waits until the only request is in a state.
    async fn listed(&self, state: RequestState) -> RequestNow {
        loop {
            let (requests, _) = self.backend.requests.active(8);
            if let [request] = &requests[..]
                && request.state == state
            {
                return request.clone();
            }
            tokio::task::yield_now().await;
        }
    }
}

#[test]
fn a_request_is_listed_until_it_ends() {
    for lines in ["keep_alive = \"1h\"", "keep_alive = \"1ms\"", ""] {
        run(async move {
            let setup = Setup::new(lines).await;
            setup.say(Verdict::Wait);
            let mut client = setup.client().await;
            let ask = post_with(
                "/v1/completions?q=secret",
                "X-Request-Id: listed\r\n",
                r#"{"model":"small","stream":true}"#,
            );
            let (begin, rest) = ask.split_at(ask.len() - 3);
            client.send(begin).await;
            let now = setup.listed(RequestState::Reading).await;
            assert_eq!((now.id.as_str(), now.path.as_str()), ("listed", "/v1/completions"));
            assert_eq!(now.peer, Some(client.stream.local_addr().unwrap().to_string()));
            assert_eq!((now.model, now.waited_s), (None, None));
            client.send(rest).await;
            let now = setup.listed(RequestState::Waiting).await;
            assert_eq!(now.model.as_deref(), Some("org/one"), "the alias is resolved");
            assert!(now.waited_s.is_some() && now.ttft_s.is_none());
            setup.say(Verdict::Admit);
            let mut engine = setup.engine().await;
            engine.message().await;
            assert!(setup.listed(RequestState::Running).await.waited_s.is_some());
            engine.send(format!("{EVENTS}{}", chunk("data: 1\n\n"))).await;
            let now = setup.listed(RequestState::Streaming).await;
            assert!(now.ttft_s.is_some() && now.bytes >= 9, "{now:?}");
            engine.send(END).await;
            while setup.backend.requests.active(8).1 > 0 {
                tokio::task::yield_now().await;
            }
            let text = format!("{now:?}");
            assert!(!text.contains("secret"), "{text}");
        });
    }
}

#[test]
fn a_body_that_is_still_coming_has_the_name_of_its_key() {
    run(async {
        let setup = Setup::new("keys = [{ source = \"env:ONE\", name = \"team\" }]").await;
        let mut client = setup.client().await;
        let ask = post_with("/v1/completions", "Authorization: Bearer key-of-ONE\r\n", "{\"model\":\"two\"}");
        client.send(&ask[..ask.len() - 3]).await;
        loop {
            let now = setup.listed(RequestState::Reading).await;
            if now.key.is_some() {
                assert_eq!(now.key.as_deref(), Some("team"));
                break;
            }
            tokio::task::yield_now().await;
        }
    });
}
