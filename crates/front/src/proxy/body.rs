//! Reads a request's body.
//!
//! Promises:
//!
//! - All bodies together hold at most `bodies_max`, of which large ones leave a quarter to small ones. A body keeps its
//!   part until its last byte is dropped. A declared length takes no memory.
//! - Slow bodies take at most half of the places of requests, late ones three quarters. None takes longer than
//!   `body_time_max`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use memmap2::MmapMut;
use tokio::time::{Instant, timeout_at};

use super::account::Permit;
use super::api_error::ApiError;
use super::timeouts::Timeouts;
use crate::settings::Front;

/// Longer bodies are large, and have pages of their own: a heap would keep them.
const LARGE_BYTES: u64 = 1 << 20;
/// Others get their turn after so many bytes.
const YIELD_EVERY_BYTES: usize = 256 << 10;

/// A body that takes longer than this part of [`Timeouts::body_slow`] is late.
const LATE_PART: u32 = 20;

/// All bodies.
#[derive(Debug, Default)]
pub(super) struct Bodies {
    bytes: AtomicU64,
    late: Arc<AtomicUsize>,
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
    if bytes > LARGE_BYTES { (max / 4 * 3).max(bytes) } else { max }
}

/// The bytes of a body so far.
enum Buffer {
    Heap(BytesMut),
    /// Pages that take memory when they are written.
    Pages {
        pages: MmapMut,
        len: usize,
    },
}

impl Buffer {
    fn len(&self) -> usize {
        match self {
            Self::Heap(bytes) => bytes.len(),
            Self::Pages { len, .. } => *len,
        }
    }

    /// Of the `declared` length, or of unknown length up to `max`.
    fn push(&mut self, data: &[u8], declared: u64, max: u64) -> io::Result<()> {
        let bytes = as_u64(self.len() + data.len());
        match self {
            Self::Heap(heap) if bytes <= LARGE_BYTES => {
                if heap.capacity() < as_usize(bytes) {
                    heap.reserve(as_usize(capacity_for(bytes, declared)) - heap.len());
                }
                heap.extend_from_slice(data);
            }
            Self::Heap(heap) => {
                let mut pages = MmapMut::map_anon(as_usize(if declared > 0 { declared } else { max }))?;
                let len = heap.len();
                pages[..len].copy_from_slice(heap);
                *self = Self::Pages { pages, len };
                self.push(data, declared, max)?;
            }
            Self::Pages { pages, len } => {
                let end = as_usize(bytes);
                pages[*len..end].copy_from_slice(data);
                *len = end;
            }
        }
        Ok(())
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Pages { pages, len } => &pages[..*len],
        }
    }
}

/// What to allocate for a body of which this has come. Its declared length is no reason to allocate.
fn capacity_for(bytes: u64, declared: u64) -> u64 {
    let grown = bytes.saturating_add(bytes / 2);
    if bytes > declared { grown } else { grown.min(declared) }
}

fn as_u64(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

fn as_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// The owner of a body's bytes.
struct HeldBody<B> {
    bytes: B,
    _reserved: Reserved,
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for HeldBody<B> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

/// A body that is being read.
pub(super) struct BodyReader<'a> {
    from: Incoming,
    front: &'a Front,
    timeouts: Timeouts,
    reserved: Reserved,
    begun: Instant,
    /// The places of a late body, and of a slow one.
    late: Option<Permit>,
    slow: Option<Permit>,
}

impl<'a> BodyReader<'a> {
    pub(super) fn new(from: Incoming, front: &'a Front, timeouts: Timeouts, bodies: &Arc<Bodies>) -> Self {
        let reserved = Reserved { bodies: Arc::clone(bodies), bytes: 0 };
        Self { from, front, timeouts, reserved, begun: Instant::now(), late: None, slow: None }
    }

    pub(super) async fn read(mut self) -> Result<Bytes, ApiError> {
        let declared = self.from.size_hint().lower();
        self.expect(declared)?;
        let mut whole = Bytes::new();
        let mut parts = Buffer::Heap(BytesMut::new());
        let mut since_yield = 0;
        while let Some(frame) = self.frame().await? {
            // Trailers, which engines do not read.
            let Ok(data) = frame.into_data() else { continue };
            let bytes = as_u64(parts.len() + data.len());
            self.reserve(bytes)?;
            if parts.len() == 0 && bytes == declared {
                whole = data;
                continue;
            }
            // A part is copied, so that it does not hold the whole buffer of its connection.
            let max = self.front.body_max_bytes;
            parts
                .push(&data, declared, max)
                .map_err(|_| ApiError::bodies_full(self.front.bodies_max_bytes))?;
            since_yield += data.len();
            if since_yield >= YIELD_EVERY_BYTES {
                since_yield = 0;
                tokio::task::yield_now().await;
            }
        }
        let _reserved = self.reserved;
        Ok(if parts.len() == 0 {
            Bytes::from_owner(HeldBody { bytes: whole, _reserved })
        } else {
            Bytes::from_owner(HeldBody { bytes: parts, _reserved })
        })
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
        let slow = self.timeouts.body_slow;
        loop {
            let next = match (&self.late, &self.slow) {
                (None, _) => Some(self.begun + slow / LATE_PART),
                (Some(_), None) => Some(self.begun + slow),
                (Some(_), Some(_)) => None,
            };
            let until = next.map_or(idle, |next| next.min(idle)).min(end);
            match timeout_at(until, self.from.frame()).await {
                Ok(frame) => {
                    let broken = |_| ApiError::bad("the body broke off, or is framed wrongly");
                    return frame.transpose().map_err(broken);
                }
                Err(_) if until == end => return Err(ApiError::late_body(self.front.body_time_max)),
                Err(_) if until == idle => return Err(ApiError::slow_body(self.timeouts.body)),
                Err(_) => self.take_longer()?,
            }
        }
    }

    /// Takes the next place of one that takes longer.
    fn take_longer(&mut self) -> Result<(), ApiError> {
        let all = self.front.requests_max;
        let (place, taken, max) = if self.late.is_none() {
            (&mut self.late, &self.reserved.bodies.late, all - all / 4)
        } else {
            (&mut self.slow, &self.reserved.bodies.slow, (all / 2).max(1))
        };
        *place = Some(Permit::acquire(taken, max).ok_or_else(|| ApiError::many_slow_bodies(max))?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_declared_length_allocates_nothing() {
        assert_eq!(capacity_for(1, 30 * MIB), 1);
        assert_eq!(capacity_for(8 * MIB, 30 * MIB), 12 * MIB);
        assert_eq!(capacity_for(25 * MIB, 30 * MIB), 30 * MIB);
        assert_eq!(capacity_for(10, 0), 15);
    }

    #[test]
    fn a_body_grows_into_pages() {
        let data: Vec<u8> = (0..u8::MAX).cycle().take(3_000_000).collect();
        for declared in [0, 3_000_000] {
            let mut buffer = Buffer::Heap(BytesMut::new());
            for part in data.chunks(70_001) {
                let is_large = as_u64(buffer.len() + part.len()) > LARGE_BYTES;
                buffer.push(part, declared, 4 * MIB).unwrap();
                assert_eq!(matches!(buffer, Buffer::Pages { .. }), is_large);
            }
            assert!(buffer.as_ref() == data);
        }
    }

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
