//! Limits of what clients can take together.
//!
//! Promises: a connection with a request in progress is never closed to make a place. Of the others, the one without a
//! request for longest goes first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::account::Permit;

/// Descriptors for control, engines' processes, and files.
const RESERVE: usize = 384;
/// Each client's request takes a second connection, to its engine.
const DESCRIPTORS_EACH: usize = 2;
/// A new connection has this long to send a request before it can be closed for another one.
const GRACE: Duration = Duration::from_millis(100);

/// How many retries a busy front expects.
const RETRIES_PER_SECOND: f64 = 50.0;
/// Seconds over which retries are spread.
const JITTER_MIN: f64 = 2.0;
const JITTER_MAX: f64 = 30.0;
const GOLDEN_RATIO: f64 = 1.618_033_988_749_895;

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
    idle: BTreeMap<u64, (Instant, Arc<Notify>)>,
    /// Those that were chosen to close.
    leaving: BTreeSet<u64>,
}

/// What a connection is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    /// A part of a head has come.
    Head,
    Request,
    /// The answer is complete, but not flushed.
    Answered,
}

/// For one connection, until dropped.
#[derive(Debug)]
pub(super) struct Slot {
    all: Arc<Connections>,
    /// Its key in `idle`.
    key: Mutex<u64>,
    closing: Arc<Notify>,
    phase: watch::Sender<Phase>,
}

impl Connections {
    fn locked(&self) -> MutexGuard<'_, Counted> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place among `max`. Closes connections without a request to make one.
    pub(super) async fn place(self: Arc<Self>, max: usize) -> Slot {
        loop {
            let changed = self.changed.notified();
            let retry_at = {
                let mut state = self.locked();
                if state.open < max {
                    state.open += 1;
                    let closing = Arc::new(Notify::new());
                    let key = state.add_idle(&closing);
                    drop(state);
                    let phase = watch::Sender::new(Phase::Idle);
                    return Slot { all: Arc::clone(&self), key: Mutex::new(key), closing, phase };
                }
                state.close_oldest(max)
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

impl Counted {
    fn add_idle(&mut self, closing: &Arc<Notify>) -> u64 {
        let key = self.next;
        self.next += 1;
        self.idle.insert(key, (Instant::now(), Arc::clone(closing)));
        key
    }

    /// Unless enough are leaving. If it is too early, returns when to try again.
    fn close_oldest(&mut self, max: usize) -> Option<Instant> {
        if self.open - self.leaving.len() < max {
            return None;
        }
        let oldest = self.idle.first_entry()?;
        let at = oldest.get().0 + GRACE;
        if at > Instant::now() {
            return Some(at);
        }
        let (key, (_, closing)) = oldest.remove_entry();
        self.leaving.insert(key);
        closing.notify_one();
        None
    }
}

impl Slot {
    fn key(&self) -> MutexGuard<'_, u64> {
        self.key.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes have come.
    pub(super) fn received(&self) {
        self.phase.send_if_modified(|phase| {
            let is_first = *phase == Phase::Idle;
            if is_first {
                *phase = Phase::Head;
            }
            is_first
        });
    }

    /// A request begins.
    pub(super) fn begin(&self) {
        self.phase.send_replace(Phase::Request);
        let key = *self.key();
        let mut state = self.all.locked();
        state.idle.remove(&key);
        if state.leaving.remove(&key) {
            drop(state);
            // It stays, so another one has to go.
            self.all.changed.notify_one();
        }
    }

    /// The answer is complete. The connection is idle after its next flush.
    pub(super) fn answered(&self) {
        self.phase.send_replace(Phase::Answered);
    }

    /// All written bytes are flushed.
    pub(super) fn flushed(&self) {
        if *self.phase.borrow() != Phase::Answered {
            return;
        }
        self.phase.send_replace(Phase::Idle);
        *self.key() = self.all.locked().add_idle(&self.closing);
        self.all.changed.notify_one();
    }

    fn is_in_request(&self) -> bool {
        matches!(*self.phase.borrow(), Phase::Request | Phase::Answered)
    }

    /// Waits until the connection has to close: for another one, or since its head took longer than `head_max`.
    pub(super) async fn over(&self, head_max: Duration) {
        tokio::select! {
            () = self.chosen() => {}
            () = self.slow_head(head_max) => {}
        }
    }

    async fn chosen(&self) {
        loop {
            self.closing.notified().await;
            if !self.is_in_request() {
                return;
            }
        }
    }

    async fn slow_head(&self, head_max: Duration) {
        let mut phases = self.phase.subscribe();
        loop {
            let is_head = *phases.borrow_and_update() == Phase::Head;
            let limit = async {
                if !is_head {
                    return std::future::pending().await;
                }
                tokio::time::sleep(head_max).await;
            };
            tokio::select! {
                // The sender is in `self`, so it is alive.
                _ = phases.changed() => {}
                () = limit => return,
            }
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let key = *self.key();
        let mut state = self.all.locked();
        state.idle.remove(&key);
        state.leaving.remove(&key);
        state.open -= 1;
        drop(state);
        self.all.changed.notify_one();
    }
}

/// The requests in progress of each named key.
#[derive(Debug, Default)]
pub(super) struct KeyRequests(Mutex<BTreeMap<String, Arc<AtomicUsize>>>);

impl KeyRequests {
    /// Takes a place of the key. `None` if `max` are taken.
    pub(super) fn acquire(&self, name: &str, max: usize) -> Option<Permit> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let active = all.entry(name.to_owned()).or_default();
        Permit::acquire(active, max)
    }
}

/// Chooses `Retry-After` of refused requests. They come back at different times, and later the more there are.
#[derive(Debug)]
pub(super) struct Backoff(Mutex<Refusals>);

#[derive(Debug)]
struct Refusals {
    count: u32,
    /// Those whose clients have not come back, at `RETRIES_PER_SECOND`.
    away: f64,
    last: Instant,
}

impl Default for Backoff {
    fn default() -> Self {
        Self(Mutex::new(Refusals { count: 0, away: 0.0, last: Instant::now() }))
    }
}

impl Backoff {
    /// For one more refused request.
    pub(super) fn retry_after(&self) -> Duration {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retry_after(Instant::now())
    }
}

impl Refusals {
    fn retry_after(&mut self, now: Instant) -> Duration {
        let back = now.saturating_duration_since(self.last).as_secs_f64() * RETRIES_PER_SECOND;
        self.last = now;
        // More would spread no further, and only last longer.
        let most = (JITTER_MAX - JITTER_MIN) * RETRIES_PER_SECOND;
        self.away = ((self.away - back).max(0.0) + 1.0).min(most);
        self.count = self.count.wrapping_add(1);
        let spread = (JITTER_MIN + self.away / RETRIES_PER_SECOND).min(JITTER_MAX);
        // Multiples of the golden ratio spread evenly.
        let jitter = (f64::from(self.count) * GOLDEN_RATIO).fract() * spread;
        Duration::from_secs(1) + Duration::from_secs_f64(jitter.floor())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_requests_come_back_later_the_more_there_are() {
        let begun = Instant::now();
        let mut refusals = Refusals { count: 0, away: 0.0, last: begun };
        let mut seconds =
            |count, now| -> Vec<u64> { (0..count).map(|_| refusals.retry_after(now).as_secs()).collect() };
        let few = seconds(10, begun);
        assert!(
            few.iter().all(|wait| (1..=3).contains(wait)) && few.contains(&1) && few.contains(&2),
            "{few:?}"
        );
        let many = seconds(1000, begun);
        let last = &many[900..];
        assert!(
            last.iter().all(|wait| (1..=23).contains(wait)) && last.iter().any(|wait| *wait > 15),
            "{last:?}"
        );
        // Evenly: no second has more than a tenth of them.
        assert!((1..=23).all(|wait| last.iter().filter(|one| **one == wait).count() <= 10), "{last:?}");
        assert!(seconds(10_000, begun).iter().all(|wait| (1..=30).contains(wait)));
        let calm = seconds(10, begun + Duration::from_secs(60));
        assert!(calm.iter().all(|wait| (1..=2).contains(wait)), "{calm:?}");
    }

    #[test]
    fn descriptors_are_left_for_others() {
        assert_eq!(fitting(65_536), 32_576);
        assert_eq!(fitting(1024), 320);
        assert_eq!(fitting(128), 32);
        assert_eq!(fitting(1), 1);
    }
}
