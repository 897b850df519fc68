//! What holds an answer back while the canary beside it runs.
//!
//! Promises: nothing of an answer passes before the canary has begun right, and no answer ends well before it was right to
//! its end. One that the canary proves wrong breaks off.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::watch;

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
    verdict: Pin<Box<dyn Future<Output = bool> + Send>>,
    /// The last bytes that passed.
    passed: Vec<u8>,
}

impl OnTrial {
    pub(super) fn new(state: watch::Receiver<Trial>) -> Self {
        let verdict = Box::pin(until(state.clone(), |trial| trial == Trial::Right));
        Self { state, verdict, passed: Vec::new() }
    }

    /// Whether the canary was right to its end.
    pub(super) fn poll_verdict(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        self.verdict.as_mut().poll(cx)
    }

    /// Whether a stream that has begun goes on. Not while the canary is asked again.
    pub(super) fn is_open(&self) -> bool {
        matches!(*self.state.borrow(), Trial::Begun | Trial::Right)
    }

    /// Whether these bytes of a stream tell its client that it is complete.
    pub(super) fn is_last(&mut self, data: &[u8]) -> bool {
        self.passed.extend_from_slice(data);
        let is_last = LAST.iter().any(|end| self.passed.windows(end.len()).any(|part| part == *end));
        self.passed.drain(..self.passed.len().saturating_sub(KEPT));
        is_last
    }
}

/// Waits until a stream may begin, or until a whole answer may go. False where the canary was wrong.
pub(super) async fn await_start(state: watch::Receiver<Trial>, is_stream: bool) -> bool {
    until(state, |trial| trial == Trial::Right || is_stream && trial == Trial::Begun).await
}

/// Whether the canary was wrong, or nothing will say that it was right.
pub(super) fn is_wrong(state: &watch::Receiver<Trial>) -> bool {
    let trial = *state.borrow();
    trial == Trial::Wrong || trial != Trial::Right && state.has_changed().is_err()
}

/// False where the canary was wrong, or its end is not reported any more.
async fn until(mut state: watch::Receiver<Trial>, may: impl Fn(Trial) -> bool + Send) -> bool {
    let ended = state.wait_for(|trial| *trial == Trial::Wrong || may(*trial)).await;
    ended.is_ok_and(|trial| *trial != Trial::Wrong)
}

#[cfg(test)]
mod tests {
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
        assert!(!is_wrong(&state) && !OnTrial::new(state.clone()).is_open());
        said.send_replace(Trial::Begun);
        assert!(OnTrial::new(state.clone()).is_open() && await_start(state.clone(), true).await);
        drop(said);
        assert!(is_wrong(&state) && !await_start(state, false).await);
    }
}
