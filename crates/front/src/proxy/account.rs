//! The log line at the end of each request, and the limit of requests at a time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{HeaderValue, Request, StatusCode};
use tokio_util::sync::CancellationToken;

use super::span;
use crate::requests::{Progress, RequestNow, RequestState, Requests, Tokens, Tracked};

/// Longer methods and paths are cut.
const PATH_MAX: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The client disconnected first.
    Left,
    /// Complete, even if it was an error.
    Whole,
    Broken,
}

/// Dropping it writes the log line of a request, and counts it.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) id: HeaderValue,
    /// The name of the client's key, never the key.
    pub(super) key: Option<String>,
    /// Of its key.
    pub(super) priority: i32,
    pub(super) model: Option<String>,
    pub(super) status: Option<StatusCode>,
    pub(super) end: End,
    pub(super) permit: Option<Permit>,
    /// Among the requests with the same key.
    pub(super) key_permit: Option<Permit>,
    /// As the engine counts them, if it does.
    pub(super) tokens: Tokens,
    tracked: Tracked,
}

impl Account {
    pub(super) fn new<B>(
        id: HeaderValue,
        request: &Request<B>,
        peer: Option<SocketAddr>,
        requests: &Arc<Requests>,
    ) -> Self {
        let now = RequestNow {
            id: id.to_str().unwrap_or_default().to_owned(),
            method: start_of(request.method().as_str()),
            path: start_of(request.uri().path()),
            peer: peer.map(|peer| peer.to_string()),
            key: None,
            model: None,
            state: RequestState::Reading,
            age_s: 0.0,
            waited_s: None,
            ttft_s: None,
            bytes: 0,
        };
        let tracked = requests.begin(now, span::parent(request.headers()));
        Self {
            id,
            key: None,
            priority: 0,
            model: None,
            status: None,
            end: End::Left,
            permit: None,
            key_permit: None,
            tracked,
            tokens: Tokens::default(),
        }
    }

    /// Lists the key and the model as well.
    pub(super) fn progress(&self) -> &Progress {
        let progress = self.tracked.progress();
        progress.is_of(self.key.as_deref(), self.model.as_deref());
        progress
    }

    /// Fires when an operator cancels it.
    pub(super) fn cancelled(&self) -> &CancellationToken {
        self.tracked.cancelled()
    }

    /// Adds bytes of the answer.
    pub(super) fn sent(&self, bytes: usize, is_of_engine: bool) {
        self.tracked.progress().sent(u64::try_from(bytes).unwrap_or_default(), is_of_engine);
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let end = match self.end {
            End::Left => "left",
            End::Whole => "whole",
            End::Broken => "broken",
        };
        let status = self.status.map(|status| status.as_u16());
        let last = self.tracked.end(self.model.as_deref(), status, end, self.tokens);
        tracing::info!(
            request_id = last.id,
            method = last.method,
            path = last.path,
            peer = last.peer.as_deref(),
            key = self.key.as_deref(),
            model = self.model.as_deref().unwrap_or_default(),
            status = status.unwrap_or(0),
            end,
            waited_ms = milliseconds(last.waited_s.unwrap_or(0.0)),
            ttft_ms = last.ttft_s.map(milliseconds),
            total_ms = milliseconds(last.age_s),
            bytes = last.bytes,
            prompt_tokens = self.tokens.prompt,
            completion_tokens = self.tokens.completion,
            "a request is over"
        );
    }
}

fn start_of(text: &str) -> String {
    text.chars().take(PATH_MAX).collect()
}

fn milliseconds(seconds: f64) -> u64 {
    let passed = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    u64::try_from(passed.as_millis()).unwrap_or(u64::MAX)
}

/// For one request, until dropped.
#[derive(Debug)]
pub(super) struct Permit(Arc<AtomicUsize>);

impl Permit {
    /// `None` if `max` are taken.
    pub(super) fn acquire(active: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let more = |count: usize| (count < max).then_some(count + 1);
        active.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(Self(Arc::clone(active)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
