//! The log line at the end of each request, and the limit of requests at a time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::{HeaderValue, Request, StatusCode};

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

/// Dropping it writes the log line of a request.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) id: HeaderValue,
    method: String,
    /// Without its query.
    path: String,
    peer: Option<SocketAddr>,
    /// The name of the client's key, never the key.
    pub(super) key: Option<String>,
    pub(super) model: Option<String>,
    pub(super) status: Option<StatusCode>,
    pub(super) waited: Duration,
    /// Until the first byte of the engine's body.
    ttft: Option<Duration>,
    pub(super) bytes: u64,
    pub(super) end: End,
    pub(super) permit: Option<Permit>,
    /// Among the requests with the same key.
    pub(super) key_permit: Option<Permit>,
    begun: Instant,
}

impl Account {
    pub(super) fn new<B>(id: HeaderValue, request: &Request<B>, peer: Option<SocketAddr>) -> Self {
        Self {
            id,
            method: start_of(request.method().as_str()),
            path: start_of(request.uri().path()),
            peer,
            key: None,
            model: None,
            status: None,
            waited: Duration::ZERO,
            ttft: None,
            bytes: 0,
            end: End::Left,
            permit: None,
            key_permit: None,
            begun: Instant::now(),
        }
    }

    /// Takes the time of the engine's first byte. Later calls change nothing.
    pub(super) fn mark_first_byte(&mut self) {
        self.ttft.get_or_insert_with(|| self.begun.elapsed());
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let end = match self.end {
            End::Left => "left",
            End::Whole => "whole",
            End::Broken => "broken",
        };
        tracing::info!(
            request_id = self.id.to_str().unwrap_or_default(),
            method = self.method,
            path = self.path,
            peer = self.peer.map(tracing::field::display),
            key = self.key.as_deref(),
            model = self.model.as_deref().unwrap_or_default(),
            status = self.status.map_or(0, |status| status.as_u16()),
            end,
            waited_ms = milliseconds(self.waited),
            ttft_ms = self.ttft.map(milliseconds),
            total_ms = milliseconds(self.begun.elapsed()),
            bytes = self.bytes,
            "a request is over"
        );
    }
}

fn start_of(text: &str) -> String {
    text.chars().take(PATH_MAX).collect()
}

fn milliseconds(passed: Duration) -> u64 {
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
