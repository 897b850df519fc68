//! Ending calls of a thread from another one.
//!
//! A token is given to a thread for a while, not to each call: whatever waits or copies there ends with it. Calls
//! look at it where they look at their deadline. So one that can be cancelled never blocks in the driver for a
//! stream that it knows.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::{PoolError, Result};

thread_local! {
    static CURRENT: RefCell<Option<CancellationToken>> = const { RefCell::new(None) };
}

/// Ends the calls of a thread that wait or copy, from any other thread.
///
/// A cancelled call is undone and fails with [`PoolError::Cancelled`], or it is past its point of no return and succeeds.
/// Clones are the same token.
///
/// ```
/// use std::thread;
///
/// use poorwill::{
///     AllocRequest, Arena, CancellationToken, Config, Level, PoolError, SleepRequest, Tag, TagState, WakeRequest,
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// let token = CancellationToken::default();
/// let woken = thread::scope(|scope| {
///     let waking = scope.spawn(|| token.scope(|| arena.wake(&WakeRequest::all())));
///     token.cancel(); // It is no longer wanted.
///     waking.join().unwrap()
/// });
/// if let Err(error) = woken {
///     assert!(matches!(error, PoolError::Cancelled { .. }));
///     assert_eq!(arena.tag_state(&Tag::weights())?, TagState::AsleepBackedUp);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct CancellationToken(Arc<AtomicBool>);

impl CancellationToken {
    /// From now on the calls in its scopes end. There is no way back.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Makes the calls of this thread in `act` end with it. The innermost of several scopes counts.
    pub fn scope<R>(&self, act: impl FnOnce() -> R) -> R {
        let _outer = Outer(CURRENT.replace(Some(self.clone())));
        act()
    }

    /// The one that ends this thread's calls.
    pub(in crate::pool) fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }
}

/// Puts the outer token back, also after a panic.
struct Outer(Option<CancellationToken>);

impl Drop for Outer {
    fn drop(&mut self) {
        CURRENT.replace(self.0.take());
    }
}

/// Whether a token may end this thread's calls.
pub(in crate::pool) fn is_cancellable() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

pub(in crate::pool) fn is_cancelled() -> bool {
    CURRENT.with_borrow(|current| current.as_ref().is_some_and(CancellationToken::is_cancelled))
}

/// Fails once this thread's calls are cancelled.
pub(in crate::pool) fn check(op: &dyn fmt::Display) -> Result<()> {
    if is_cancelled() { Err(PoolError::Cancelled { op: op.to_string() }) } else { Ok(()) }
}
