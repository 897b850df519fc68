//! Answers that go on: what is new, for as long as a follower stays.
//!
//! Promises: each follower reads at its own speed. An answer ends at the service's end, and when its key is removed. A
//! follower that is gone is noticed, since something is sent now and then.

use std::future::Future;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};
use tokio_util::sync::CancellationToken;

use crate::supervise::LogFollower;

pub(super) const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(15);

/// What is followed, from where one follower is.
pub(super) trait Followed: Send {
    /// The first bytes.
    const PREAMBLE: &'static str;

    /// What is new; empty if nothing is.
    fn read(&mut self) -> String;

    /// Waits until something may be new. False if nothing will be any more.
    fn wait_for_more(&mut self) -> impl Future<Output = bool> + Send;

    /// Says nothing new.
    fn keep_alive(&self) -> String;
}

struct Follower<S, F> {
    followed: S,
    keep_alive: Interval,
    may_see: F,
    shutdown: CancellationToken,
    has_begun: bool,
    _permit: OwnedSemaphorePermit,
}

/// The answer to one follower, until `shutdown`, or until `may_see` returns false.
pub(super) fn stream<S: Followed, F: Fn() -> bool + Send>(
    followed: S,
    keep_alive: Duration,
    may_see: F,
    shutdown: CancellationToken,
    permit: OwnedSemaphorePermit,
) -> impl Stream<Item = io::Result<Bytes>> + Send {
    let mut keep_alive = interval_at(Instant::now() + keep_alive, keep_alive);
    keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let follower = Follower {
        followed,
        keep_alive,
        may_see,
        shutdown,
        has_begun: S::PREAMBLE.is_empty(),
        _permit: permit,
    };
    unfold(follower, |mut follower| async {
        let text = follower.next().await?;
        Some((Ok(Bytes::from(text)), follower))
    })
}

impl<S: Followed, F: Fn() -> bool> Follower<S, F> {
    async fn next(&mut self) -> Option<String> {
        if !std::mem::replace(&mut self.has_begun, true) {
            return Some(S::PREAMBLE.to_owned());
        }
        loop {
            if self.shutdown.is_cancelled() {
                return None;
            }
            let text = self.followed.read();
            if !text.is_empty() {
                return (self.may_see)().then_some(text);
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return None,
                goes_on = self.followed.wait_for_more() => if !goes_on {
                    return None;
                },
                _ = self.keep_alive.tick() => return (self.may_see)().then(|| self.followed.keep_alive()),
            }
        }
    }
}

impl Followed for LogFollower {
    const PREAMBLE: &'static str = "";

    fn read(&mut self) -> String {
        self.read()
    }

    async fn wait_for_more(&mut self) -> bool {
        self.wait_for_more().await;
        true
    }

    fn keep_alive(&self) -> String {
        self.again()
    }
}
