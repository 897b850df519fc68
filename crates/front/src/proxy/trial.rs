//! What holds an answer back while its engine sleeps, or the canary beside it runs.
//!
//! Promises: nothing of a stream of events passes from its beginning, or the cut of its model's turn, until a canary has
//! begun right. Nor does a whole answer begin. No answer ends well before that was right to its end. One that the canary
//! proves wrong breaks off.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::backend::Trial;

/// The ends of streams in the dialects with events.
const LAST: [&[u8]; 10] = [
    b"data: [DONE]",
    b"data:[DONE]",
    b"\"finish_reason\":\"",
    b"\"finish_reason\": \"",
    b"\"stop_reason\":\"",
    b"\"stop_reason\": \"",
    b"\"message_stop\"",
    b"\"response.completed\"",
    b"\"response.incomplete\"",
    b"\"response.failed\"",
];
/// More than any of them has, so that one in two parts is found.
const KEPT: usize = 32;

pub(super) struct OnTrial {
    state: watch::Receiver<Trial>,
    /// Its next change; false where there will be none.
    change: Pin<Box<dyn Future<Output = bool> + Send>>,
    is_over: bool,
    /// The last bytes that passed.
    passed: Vec<u8>,
}

impl OnTrial {
    pub(super) fn new(state: watch::Receiver<Trial>) -> Self {
        let change = next_change(&state);
        Self { state, change, is_over: false, passed: Vec::new() }
    }

    /// What the canary says now. The task is woken when it says something else.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Trial {
        while !self.is_over {
            let Poll::Ready(is_open) = self.change.as_mut().poll(cx) else { break };
            self.is_over = !is_open;
            if is_open {
                self.change = next_change(&self.state);
            }
        }
        *self.state.borrow()
    }

    /// Whether it will say no more.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether these bytes of a stream tell its client that it is complete, while that has to wait for the canary.
    pub(super) fn is_last(&mut self, data: &[u8]) -> bool {
        self.passed.extend_from_slice(data);
        let is_held = *self.state.borrow() != Trial::Right;
        let has = |end: &&[u8]| self.passed.windows(end.len()).any(|part| part == *end);
        let is_last = is_held && LAST.iter().any(has);
        self.passed.drain(..self.passed.len().saturating_sub(KEPT));
        is_last
    }
}

fn next_change(state: &watch::Receiver<Trial>) -> Pin<Box<dyn Future<Output = bool> + Send>> {
    let mut state = state.clone();
    state.mark_unchanged();
    Box::pin(async move { state.changed().await.is_ok() })
}

/// Waits until a stream may begin, or until a whole answer may go. False where the canary was wrong.
pub(super) async fn await_start(state: watch::Receiver<Trial>, is_stream: bool) -> bool {
    until(state, |trial| trial == Trial::Right || is_stream && trial == Trial::Begun).await
}

/// Whether something is held back.
pub(super) fn is_held(state: &watch::Receiver<Trial>) -> bool {
    *state.borrow() != Trial::Right
}

/// Whether the canary was wrong, or nothing will say that it was right.
pub(super) fn is_wrong(state: &watch::Receiver<Trial>) -> bool {
    let trial = *state.borrow();
    trial == Trial::Wrong || trial != Trial::Right && state.has_changed().is_err()
}

/// After so long in which nothing is held back.
pub(super) async fn late(limit: Duration, state: Option<watch::Receiver<Trial>>) {
    let Some(mut state) = state else { return tokio::time::sleep(limit).await };
    let mut left = limit;
    loop {
        let began = Instant::now();
        let was_held = *state.borrow_and_update() == Trial::Open;
        tokio::select! {
            biased;
            changed = state.changed() => if changed.is_err() {
                return tokio::time::sleep(left).await;
            },
            () = tokio::time::sleep(left), if !was_held => return,
        }
        if !was_held {
            left = left.saturating_sub(began.elapsed());
        }
    }
}

/// False where the canary was wrong, or its end is not reported any more.
async fn until(mut state: watch::Receiver<Trial>, may: impl Fn(Trial) -> bool + Send) -> bool {
    let ended = state.wait_for(|trial| *trial == Trial::Wrong || may(*trial)).await;
    ended.is_ok_and(|trial| *trial != Trial::Wrong)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[test]
    fn ends_are_found_in_parts() {
        let (_said, state) = watch::channel(Trial::Open);
        let mut on_trial = OnTrial::new(state);
        for (data, is_last) in
            [("data: {\"choices\":[{\"text\":\" a\"}]}\n\n", false), ("data: [DO", false), ("NE]\n\n", true)]
        {
            assert_eq!(on_trial.is_last(data.as_bytes()), is_last, "{data}");
        }
        let (_said, state) = watch::channel(Trial::Open);
        let mut on_trial = OnTrial::new(state);
        assert!(on_trial.is_last(b"event: message_stop\ndata: {\"type\": \"message_stop\"}\n\n"));
    }

    #[tokio::test]
    async fn what_is_not_known_to_be_right_is_wrong() {
        let (said, state) = watch::channel(Trial::Open);
        assert!(!is_wrong(&state));
        said.send_replace(Trial::Begun);
        assert!(await_start(state.clone(), true).await);
        drop(said);
        assert!(is_wrong(&state) && !await_start(state, false).await);
    }

    #[tokio::test(start_paused = true)]
    async fn each_change_wakes_what_is_held_back() {
        let (said, state) = watch::channel(Trial::Right);
        let mut on_trial = OnTrial::new(state);
        for trial in [Trial::Open, Trial::Begun, Trial::Right, Trial::Open] {
            let is_said = |cx: &mut Context<'_>| match on_trial.poll(cx) {
                now if now == trial => Poll::Ready(()),
                _ => Poll::Pending,
            };
            let seen = tokio::time::timeout(Duration::from_secs(60), poll_fn(is_said));
            let say = async {
                tokio::task::yield_now().await;
                said.send_replace(trial);
            };
            assert!(tokio::join!(seen, say).0.is_ok(), "{trial:?}");
        }
        drop(said);
        let last = poll_fn(|cx| Poll::Ready(on_trial.poll(cx))).await;
        assert!(last == Trial::Open && on_trial.is_over());
    }

    #[tokio::test(start_paused = true)]
    async fn no_engine_is_late_while_it_sleeps() {
        let second = Duration::from_secs(1);
        let (said, state) = watch::channel(Trial::Right);
        let late = late(second, Some(state));
        tokio::pin!(late);
        let mut within =
            async |millis| tokio::time::timeout(Duration::from_millis(millis), late.as_mut()).await.is_ok();
        assert!(!within(900).await);
        said.send_replace(Trial::Open);
        assert!(!within(60_000).await);
        said.send_replace(Trial::Right);
        assert!(!within(90).await && within(20).await);
    }
}
