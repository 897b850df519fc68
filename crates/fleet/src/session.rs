//! A lease that is kept alive, and whether it is certain to live.
//!
//! Promises:
//!
//! - [`LeaseClock::is_valid`] is false before etcd can end the lease. A renewal counts from when it was asked for. A part of
//!   the time is left for clocks that go slower than etcd's.
//! - It reads the clock each time, so a process that was stopped sees at once that its time is over.
//! - A lease that could not be renewed in time is renewed all the same. Only if etcd has ended it, another is granted.
//! - Ended in order, the lease is revoked, and what was under it is gone at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::clock::Moment;
use crate::etcd::{Etcd, EtcdError, LeaseId};

/// Of a lease's time, the part for clocks that differ: a twentieth.
const DRIFT_PARTS: u32 = 20;
/// Renewals in the time of a lease.
const RENEWALS: u32 = 3;
/// Attempts in that time while none succeeds.
const ATTEMPTS: u32 = 20;

/// A lease that is shorter would end at every pause of a machine.
const LEASE_MIN: Duration = Duration::from_secs(2);
const LEASE_MAX: Duration = Duration::from_secs(3600);
const LEASE: Duration = Duration::from_secs(10);

/// The time of a lease, as it is configured or usual.
///
/// # Errors
/// No lease may have it.
pub fn check_lease(lease: Option<Duration>) -> Result<Duration, String> {
    let lease = lease.unwrap_or(LEASE);
    if lease.subsec_nanos() > 0 || !(LEASE_MIN..=LEASE_MAX).contains(&lease) {
        return Err(format!("lease is {lease:?}; say whole seconds from 2 s to 1 h"));
    }
    Ok(lease)
}

/// Tells whether a lease is certain to live. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct LeaseClock(Arc<AtomicU64>);

impl LeaseClock {
    /// Whether it lives now.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        Moment::now() < Moment::from_nanos(self.0.load(Ordering::Acquire))
    }

    fn set(&self, until: Moment) {
        self.0.store(until.as_nanos(), Ordering::Release);
    }
}

/// A lease, as long as its owner wants it. Dropping it stops renewing.
#[derive(Debug)]
pub struct Session {
    clock: LeaseClock,
    lease: watch::Receiver<Option<LeaseId>>,
    ending: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Session {
    /// Has a lease granted and renewed from now on. What fails is tried again, and is in the log.
    ///
    /// etcd grants whole seconds: parts of them are left out, and one second is the least.
    #[must_use]
    pub fn start(etcd: Etcd, ttl: Duration) -> Self {
        let ttl = Duration::from_secs(ttl.as_secs().max(1));
        let (clock, ending) = (LeaseClock::default(), CancellationToken::new());
        let (sender, lease) = watch::channel(None);
        let keeper = Keeper { etcd, ttl, clock: clock.clone(), lease: sender };
        let until = ending.clone();
        let task = tokio::spawn(async move {
            let kept = until.run_until_cancelled(keeper.keep()).await;
            debug_assert!(kept.is_none(), "it is kept for ever");
            keeper.end().await;
        });
        Self { clock, lease, ending, task }
    }

    /// Whether it lives.
    #[must_use]
    pub fn clock(&self) -> LeaseClock {
        self.clock.clone()
    }

    /// The lease that etcd knows, if one was granted. Behind each change, what was under the last one is gone.
    #[must_use]
    pub fn lease(&self) -> watch::Receiver<Option<LeaseId>> {
        self.lease.clone()
    }

    /// Revokes it.
    pub async fn end(mut self) {
        self.ending.cancel();
        if let Err(error) = (&mut self.task).await {
            tracing::warn!(%error, "cannot revoke a lease, which will expire");
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.ending.is_cancelled() {
            self.task.abort();
        }
    }
}

struct Keeper {
    etcd: Etcd,
    ttl: Duration,
    clock: LeaseClock,
    lease: watch::Sender<Option<LeaseId>>,
}

impl Keeper {
    async fn keep(&self) {
        let mut was_logged = false;
        loop {
            let known = *self.lease.borrow();
            let asked_at = Moment::now();
            let done = match known {
                Some(lease) => self.etcd.renew(lease, self.ttl).await.map(|()| lease),
                None => self.etcd.grant(self.ttl).await,
            };
            match done {
                Ok(lease) => {
                    self.clock.set(asked_at.after(self.ttl - self.ttl / DRIFT_PARTS));
                    if known.is_none() {
                        self.lease.send_replace(Some(lease));
                    }
                    if std::mem::take(&mut was_logged) {
                        tracing::info!(%lease, "renewing the lease again");
                    }
                    // Not from the answer on, which may have come late.
                    sleep(Moment::now().until(asked_at.after(self.ttl / RENEWALS))).await;
                }
                Err(error) if error.is_lease_gone() => {
                    tracing::warn!(%error, "lost the lease; requesting another one");
                    self.lost();
                }
                Err(error) => {
                    if !std::mem::replace(&mut was_logged, true) {
                        tracing::warn!(%error, "cannot renew the lease; retrying");
                    }
                    sleep(self.ttl / ATTEMPTS).await;
                }
            }
        }
    }

    fn lost(&self) {
        self.clock.set(Moment::default());
        self.lease.send_replace(None);
    }

    async fn end(&self) {
        let lease = *self.lease.borrow();
        self.lost();
        let Some(lease) = lease else { return };
        let revoked: Result<(), EtcdError> = self.etcd.revoke(lease).await;
        if let Err(error) = revoked {
            tracing::warn!(%error, "cannot revoke the lease, which will expire");
        }
    }
}
