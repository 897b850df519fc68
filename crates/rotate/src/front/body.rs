//! Reads a request's body.
//!
//! Promises: all bodies together hold at most `bodies_max`, of which large ones leave a quarter to small ones. A body
//! keeps its part until its last byte is dropped. Slow bodies take at most half of the places of requests, and none
//! takes longer than `body_time_max`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use tokio::time::{Instant, timeout_at};

use super::Timeouts;
use super::account::Permit;
use super::api_error::ApiError;
use crate::config::Front;

/// To allocate for a body at once, whatever its declared length. Longer bodies are large.
const FIRST_BYTES: u64 = 1 << 20;

/// All bodies.
#[derive(Debug, Default)]
pub(super) struct Bodies {
    bytes: AtomicU64,
    slow: Arc<AtomicUsize>,
}

/// The part of one body, until dropped.
#[derive(Debug)]
struct Reserved {
    bodies: Arc<Bodies>,
    bytes: u64,
}

impl Reserved {
    /// Whether a body of this length would fit now.
    fn fits(&self, bytes: u64, max: u64) -> bool {
        self.bodies.bytes.load(Ordering::Acquire).saturating_add(bytes) <= max_of_all(bytes, max)
    }

    /// False if all bodies together would be larger than `max`.
    fn grow_to(&mut self, bytes: u64, max: u64) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        let grown =
            |all: u64| all.checked_add(more).filter(|all| more == 0 || *all <= max_of_all(bytes, max));
        let is_grown = self.bodies.bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, grown).is_ok();
        if is_grown {
            self.bytes += more;
        }
        is_grown
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.bodies.bytes.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// Large bodies leave a quarter to small ones, unless one alone needs it.
fn max_of_all(bytes: u64, max: u64) -> u64 {
    if bytes > FIRST_BYTES { (max / 4 * 3).max(bytes) } else { max }
}

/// The owner of a body's bytes.
struct HeldBody {
    bytes: Bytes,
    _reserved: Reserved,
}

impl AsRef<[u8]> for HeldBody {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A body that is being read.
pub(super) struct BodyReader<'a> {
    from: Incoming,
    front: &'a Front,
    timeouts: Timeouts,
    reserved: Reserved,
    begun: Instant,
    /// The place of a slow body.
    slow: Option<Permit>,
}

impl<'a> BodyReader<'a> {
    pub(super) fn new(from: Incoming, front: &'a Front, timeouts: Timeouts, bodies: &Arc<Bodies>) -> Self {
        let reserved = Reserved { bodies: Arc::clone(bodies), bytes: 0 };
        Self { from, front, timeouts, reserved, begun: Instant::now(), slow: None }
    }

    pub(super) async fn read(mut self) -> Result<Bytes, ApiError> {
        let declared = self.from.size_hint().lower();
        self.expect(declared)?;
        let mut first = Bytes::new();
        let mut more: Option<BytesMut> = None;
        while let Some(frame) = self.frame().await? {
            // Trailers, which engines do not read.
            let Ok(data) = frame.into_data() else { continue };
            let had = more.as_ref().map_or(first.len(), BytesMut::len);
            let bytes = u64::try_from(had + data.len()).unwrap_or(u64::MAX);
            self.reserve(bytes)?;
            match &mut more {
                Some(all) => {
                    if all.capacity() < had + data.len() && bytes <= declared {
                        // It sends what it declared, so the buffer grows once.
                        all.reserve(usize::try_from(declared).unwrap_or_default().saturating_sub(had));
                    }
                    all.extend_from_slice(&data);
                }
                None if first.is_empty() => first = data,
                None => {
                    let capacity = usize::try_from(declared.min(FIRST_BYTES)).unwrap_or_default();
                    let mut all = BytesMut::with_capacity(capacity.max(first.len() + data.len()));
                    all.extend_from_slice(&first);
                    all.extend_from_slice(&data);
                    more = Some(all);
                }
            }
        }
        let bytes = more.map_or(first, BytesMut::freeze);
        Ok(Bytes::from_owner(HeldBody { bytes, _reserved: self.reserved }))
    }

    /// Refuses a declared length early. Only what has come is reserved, so that a promise of bytes takes none.
    fn expect(&self, declared: u64) -> Result<(), ApiError> {
        let bodies_max = self.allowed(declared)?;
        let fits = self.reserved.fits(declared, bodies_max);
        if fits { Ok(()) } else { Err(ApiError::bodies_full(bodies_max)) }
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), ApiError> {
        let bodies_max = self.allowed(bytes)?;
        let is_grown = self.reserved.grow_to(bytes, bodies_max);
        if is_grown { Ok(()) } else { Err(ApiError::bodies_full(bodies_max)) }
    }

    /// The limit of all bodies, if one alone may have this length.
    fn allowed(&self, bytes: u64) -> Result<u64, ApiError> {
        let bodies_max = self.front.bodies_max_bytes;
        let max = self.front.body_max_bytes.min(bodies_max);
        if bytes > max { Err(ApiError::large_body(max)) } else { Ok(bodies_max) }
    }

    /// `None` after the last frame.
    async fn frame(&mut self) -> Result<Option<Frame<Bytes>>, ApiError> {
        let idle = Instant::now() + self.timeouts.body;
        let end = self.begun + self.front.body_time_max;
        let slow = self.begun + self.timeouts.body_slow;
        loop {
            let until = if self.slow.is_none() { slow.min(idle) } else { idle }.min(end);
            match timeout_at(until, self.from.frame()).await {
                Ok(frame) => {
                    let broken = |_| ApiError::bad("the body broke off, or is framed wrongly");
                    return frame.transpose().map_err(broken);
                }
                Err(_) if until == end => return Err(ApiError::late_body(self.front.body_time_max)),
                Err(_) if until == idle => return Err(ApiError::slow_body(self.timeouts.body)),
                Err(_) => {
                    let max = (self.front.requests_max / 2).max(1);
                    let permit = Permit::acquire(&self.reserved.bodies.slow, max);
                    self.slow = Some(permit.ok_or_else(|| ApiError::many_slow_bodies(max))?);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn large_bodies_leave_a_quarter_to_small_ones() {
        let bodies = Arc::new(Bodies::default());
        let reserved = || Reserved { bodies: Arc::clone(&bodies), bytes: 0 };
        let (mut large, mut second, mut small) = (reserved(), reserved(), reserved());
        assert!(large.grow_to(10 * MIB, 16 * MIB));
        assert!(!second.fits(3 * MIB, 16 * MIB) && !second.grow_to(3 * MIB, 16 * MIB));
        assert!(second.grow_to(2 * MIB, 16 * MIB));
        assert!(small.grow_to(MIB, 16 * MIB));
        // One that nothing else hinders may have all.
        drop((large, second, small));
        assert!(reserved().grow_to(16 * MIB, 16 * MIB));
        assert_eq!(bodies.bytes.load(Ordering::Acquire), 0);
    }
}
