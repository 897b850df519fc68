//! The places of clients' connections.
//!
//! Promises:
//!
//! - A connection with a request in progress is never closed to make a place.
//! - Of the others, those of a peer that has more than its share go first, and the one without a request for longest.
//! - Unfinished heads together hold a bounded number of bytes. Short ones always fit.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Descriptors for control, engines' processes, and files.
const RESERVE: usize = 384;
/// Each client's request takes a second connection, to its engine.
const DESCRIPTORS_EACH: usize = 2;
/// A new connection has this long to send a request before it can be closed for another one.
const GRACE: Duration = Duration::from_millis(100);
/// A peer with more than this part of all places has more than its share.
const SHARE: usize = 16;
/// This part of all places is made free before it is needed.
const SPARE: usize = 64;
/// An IPv6 client usually has all addresses with one prefix of this length.
const PREFIX_BITS: u32 = 64;
/// A shorter head takes no part of `HEADS_MAX_BYTES`.
pub(super) const SHORT_HEAD_BYTES: usize = 4 << 10;
/// Of all unfinished heads, less what short ones hold.
const HEADS_MAX_BYTES: usize = 16 << 20;

/// How many connections of clients the descriptors of this process allow.
pub(super) fn connections_that_fit() -> usize {
    use rustix::process::{Resource, getrlimit};
    let most = getrlimit(Resource::Nofile).current;
    fitting(most.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX)))
}

fn fitting(descriptors: usize) -> usize {
    let reserve = RESERVE.min(descriptors / 2);
    ((descriptors - reserve) / DESCRIPTORS_EACH).max(1)
}

/// All connections of clients.
#[derive(Debug, Default)]
pub(super) struct Connections {
    state: Mutex<Counted>,
    /// Wakes [`Connections::place`].
    changed: Notify,
}

#[derive(Debug, Default)]
struct Counted {
    open: usize,
    /// The next key of `idle`.
    next: u64,
    /// Those without a request, the oldest first.
    idle: BTreeMap<u64, Idle>,
    /// Those that were chosen to close.
    leaving: BTreeSet<u64>,
    peers: HashMap<IpAddr, PeerConnections>,
    /// The peers by their count of connections.
    by_open: BTreeSet<(usize, IpAddr)>,
    /// Of unfinished heads, beyond [`SHORT_HEAD_BYTES`] each.
    heads_bytes: usize,
}

#[derive(Debug)]
struct Idle {
    since: Instant,
    peer: IpAddr,
    closing: Arc<Notify>,
}

#[derive(Debug, Default)]
struct PeerConnections {
    open: usize,
    /// Keys of `idle`.
    idle: BTreeSet<u64>,
}

/// What a connection is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    /// A part of a head has come.
    Head {
        since: Instant,
        bytes: usize,
    },
    Request,
    /// The answer is complete, but not flushed.
    Answered,
}

/// For one connection, until dropped.
#[derive(Debug)]
pub(super) struct Slot {
    all: Arc<Connections>,
    peer: IpAddr,
    closing: Arc<Notify>,
    state: Mutex<SlotState>,
}

#[derive(Debug)]
struct SlotState {
    /// Its key in `idle`.
    key: u64,
    phase: Phase,
}

/// Unfinished heads hold too many bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct HeadsFull;

impl Connections {
    fn locked(&self) -> MutexGuard<'_, Counted> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place among `max`. Closes connections without a request to make one.
    pub(super) async fn place(self: Arc<Self>, peer: IpAddr, max: usize) -> Slot {
        let peer = network_of(peer);
        loop {
            let changed = self.changed.notified();
            let retry_at = {
                let mut state = self.locked();
                if state.open < max {
                    let closing = Arc::new(Notify::new());
                    let key = state.open(peer, &closing);
                    // For those that come next.
                    let spare = max / SPARE;
                    if spare > 0 {
                        state.close_one(max - spare);
                    }
                    drop(state);
                    let state = Mutex::new(SlotState { key, phase: Phase::Idle });
                    return Slot { all: Arc::clone(&self), peer, closing, state };
                }
                state.close_one(max)
            };
            let retry_at = async {
                match retry_at {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = changed => {}
                () = retry_at => {}
            }
        }
    }
}

/// Where one client can have many addresses, what they have in common.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << (128 - PREFIX_BITS))))
        }
        address @ IpAddr::V4(_) => address,
    }
}

impl Counted {
    fn open(&mut self, peer: IpAddr, closing: &Arc<Notify>) -> u64 {
        self.open += 1;
        let of_peer = self.peers.entry(peer).or_default();
        self.by_open.remove(&(of_peer.open, peer));
        of_peer.open += 1;
        self.by_open.insert((of_peer.open, peer));
        self.add_idle(peer, closing)
    }

    fn close(&mut self, peer: IpAddr, key: u64) {
        self.remove_idle(peer, key);
        self.leaving.remove(&key);
        self.open -= 1;
        let Some(of_peer) = self.peers.get_mut(&peer) else { return };
        self.by_open.remove(&(of_peer.open, peer));
        of_peer.open -= 1;
        if of_peer.open == 0 {
            self.peers.remove(&peer);
        } else {
            self.by_open.insert((of_peer.open, peer));
        }
    }

    fn add_idle(&mut self, peer: IpAddr, closing: &Arc<Notify>) -> u64 {
        let key = self.next;
        self.next += 1;
        self.idle.insert(key, Idle { since: Instant::now(), peer, closing: Arc::clone(closing) });
        self.peers.entry(peer).or_default().idle.insert(key);
        key
    }

    fn remove_idle(&mut self, peer: IpAddr, key: u64) {
        if self.idle.remove(&key).is_some()
            && let Some(of_peer) = self.peers.get_mut(&peer)
        {
            of_peer.idle.remove(&key);
        }
    }

    /// Unless enough are leaving. If it is too early, returns when to try again.
    fn close_one(&mut self, max: usize) -> Option<Instant> {
        if self.open - self.leaving.len() < max {
            return None;
        }
        let key = self.most_expendable(max)?;
        let Idle { since, peer, closing } = self.idle.get(&key)?;
        let at = *since + GRACE;
        if at > Instant::now() {
            return Some(at);
        }
        closing.notify_one();
        let peer = *peer;
        self.remove_idle(peer, key);
        self.leaving.insert(key);
        None
    }

    /// `None` if all have requests.
    fn most_expendable(&self, max: usize) -> Option<u64> {
        let share = (max / SHARE).max(1);
        let has_more = |(open, _): &&(usize, IpAddr)| *open > share;
        let oldest = |(_, peer): &(usize, IpAddr)| self.peers.get(peer)?.idle.first().copied();
        let of_largest = self.by_open.iter().rev().take_while(has_more).find_map(oldest);
        of_largest.or_else(|| self.idle.first_key_value().map(|(key, _)| *key))
    }
}

impl Slot {
    fn locked(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes have come.
    ///
    /// # Errors
    /// They continue a head for which there is no space.
    pub(super) fn received(&self, count: usize) -> Result<(), HeadsFull> {
        let mut state = self.locked();
        let (since, before) = match state.phase {
            Phase::Idle => (Instant::now(), 0),
            Phase::Head { since, bytes } => (since, bytes),
            Phase::Request | Phase::Answered => return Ok(()),
        };
        let bytes = before.saturating_add(count);
        state.phase = Phase::Head { since, bytes };
        drop(state);
        let more = beyond_short(bytes) - beyond_short(before);
        if more == 0 {
            return Ok(());
        }
        let mut all = self.all.locked();
        all.heads_bytes += more;
        // The first bytes may be a body's as well.
        if before > 0 && all.heads_bytes > HEADS_MAX_BYTES { Err(HeadsFull) } else { Ok(()) }
    }

    /// When the first byte of an unfinished head came.
    pub(super) fn head_since(&self) -> Option<Instant> {
        if let Phase::Head { since, .. } = self.locked().phase { Some(since) } else { None }
    }

    /// A request begins.
    pub(super) fn begin(&self) {
        let (key, phase) = {
            let mut state = self.locked();
            (state.key, std::mem::replace(&mut state.phase, Phase::Request))
        };
        let mut all = self.all.locked();
        all.heads_bytes -= phase.heads_bytes();
        all.remove_idle(self.peer, key);
        if all.leaving.remove(&key) {
            drop(all);
            // It stays, so another one has to go.
            self.all.changed.notify_one();
        }
    }

    /// The answer is complete. The connection is idle after its next flush.
    pub(super) fn answered(&self) {
        self.locked().phase = Phase::Answered;
    }

    pub(super) fn is_answered(&self) -> bool {
        self.locked().phase == Phase::Answered
    }

    /// All written bytes are flushed.
    pub(super) fn flushed(&self) {
        let mut state = self.locked();
        if state.phase != Phase::Answered {
            return;
        }
        state.phase = Phase::Idle;
        state.key = self.all.locked().add_idle(self.peer, &self.closing);
        drop(state);
        self.all.changed.notify_one();
    }

    /// Waits until the connection has to close for another one.
    pub(super) async fn wait_until_chosen(&self) {
        loop {
            self.closing.notified().await;
            if matches!(self.locked().phase, Phase::Idle | Phase::Head { .. }) {
                return;
            }
        }
    }
}

impl Phase {
    /// Its part of [`Counted::heads_bytes`].
    fn heads_bytes(self) -> usize {
        if let Self::Head { bytes, .. } = self { beyond_short(bytes) } else { 0 }
    }
}

fn beyond_short(bytes: usize) -> usize {
    bytes.saturating_sub(SHORT_HEAD_BYTES)
}

impl Drop for Slot {
    fn drop(&mut self) {
        let (key, phase) = {
            let state = self.locked();
            (state.key, state.phase)
        };
        let mut all = self.all.locked();
        all.heads_bytes -= phase.heads_bytes();
        all.close(self.peer, key);
        drop(all);
        self.all.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    async fn place(all: &Arc<Connections>, peer: &str) -> Slot {
        Arc::clone(all).place(address(peer), 32).await
    }

    #[test]
    fn descriptors_are_left_for_others() {
        assert_eq!(fitting(65_536), 32_576);
        assert_eq!(fitting(1024), 320);
        assert_eq!(fitting(128), 32);
        assert_eq!(fitting(1), 1);
    }

    #[test]
    fn a_network_is_one_peer() {
        for (one, other, is_same) in [
            ("2001:db8::1", "2001:db8::ffff:1", true),
            ("2001:db8::1", "2001:db8:0:1::1", false),
            ("::ffff:192.0.2.1", "192.0.2.1", true),
            ("192.0.2.1", "192.0.2.2", false),
        ] {
            assert_eq!(network_of(address(one)) == network_of(address(other)), is_same, "{one} {other}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_more_than_a_share_goes_first() {
        let all = Arc::new(Connections::default());
        let older = place(&all, "192.0.2.1").await;
        let (mut many, mut more) = (Vec::new(), Vec::new());
        for _ in 0..31 {
            many.push(place(&all, "192.0.2.2").await);
        }
        while more.len() < many.len() {
            let next = tokio::spawn(Arc::clone(&all).place(address("192.0.2.3"), 32));
            // Time passes at once.
            tokio::time::timeout(GRACE * 2, many[0].wait_until_chosen()).await.unwrap();
            drop(many.remove(0));
            more.push(next.await.unwrap());
        }
        // The first one still has its place.
        assert!(all.locked().idle.contains_key(&older.locked().key));
        drop((older, many, more));
        let left = all.locked();
        assert_eq!((left.open, left.peers.len(), left.by_open.len(), left.idle.len()), (0, 0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn long_heads_have_a_budget() {
        let all = Arc::new(Connections::default());
        let (one, other) = (place(&all, "192.0.2.1").await, place(&all, "192.0.2.1").await);
        // What comes first is not refused, for it may have a body.
        assert_eq!(one.received(HEADS_MAX_BYTES + SHORT_HEAD_BYTES), Ok(()));
        assert_eq!(one.received(1), Err(HeadsFull));
        assert_eq!(other.received(1), Ok(()));
        assert_eq!(other.received(SHORT_HEAD_BYTES - 1), Ok(()));
        assert_eq!(other.received(1), Err(HeadsFull));
        one.begin();
        assert_eq!(other.received(1), Ok(()));
        // A body is none of it.
        assert_eq!(one.received(HEADS_MAX_BYTES), Ok(()));
        drop(other);
        assert_eq!(all.locked().heads_bytes, 0);
    }
}
