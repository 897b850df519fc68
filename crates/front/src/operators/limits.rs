//! What each client may take.

use std::time::Duration;

/// How long answers may take at shutdown.
pub const DRAIN_MAX: Duration = Duration::from_secs(5);
/// Longest request body.
pub const BODY_MAX_BYTES: usize = 16 << 10;
/// Timeout for a request head, and for a body.
pub(super) const REQUEST_MAX: Duration = Duration::from_secs(10);
