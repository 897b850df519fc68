//! The log line at the end of each request, and the limit of requests at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::{HeaderValue, StatusCode};

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
    pub(super) model: Option<String>,
    pub(super) status: Option<StatusCode>,
    pub(super) waited: Duration,
    pub(super) bytes: u64,
    pub(super) end: End,
    pub(super) permit: Option<Permit>,
    begun: Instant,
}

impl Account {
    pub(super) fn new(id: HeaderValue) -> Self {
        Self {
            id,
            model: None,
            status: None,
            waited: Duration::ZERO,
            bytes: 0,
            end: End::Left,
            permit: None,
            begun: Instant::now(),
        }
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
            model = self.model.as_deref().unwrap_or_default(),
            status = self.status.map_or(0, |status| status.as_u16()),
            end,
            waited_ms = milliseconds(self.waited),
            total_ms = milliseconds(self.begun.elapsed()),
            bytes = self.bytes,
            "a request is over"
        );
    }
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
