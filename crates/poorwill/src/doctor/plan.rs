//! What is examined.

use std::path::PathBuf;
use std::time::Duration;

use poorwill_core::Tag;

use crate::budget::Caps;
use crate::device::DeviceSpec;

/// What to examine. By default every device, with all of its memory.
///
/// ```
/// use poorwill::doctor::{Plan, examine};
/// use poorwill::{DeviceSpec, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device: DeviceSpec = "host:8GiB".parse()?;
/// let plan = Plan::default().on(device).claiming([(Tag::weights(), 9 << 30)]);
/// assert!(examine(&plan)?.refused().is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// This device and the host device; `None` for all.
    pub device: Option<DeviceSpec>,
    /// The user's caps.
    pub caps: Caps,
    /// An engine's claims in bytes, before its key-value cache. Applies to the host device only when it is
    /// named or alone.
    pub claims: Vec<(Tag, u64)>,
    /// Time for GPUs. After it no further GPU is opened, and in its last 2 s none is measured.
    pub timeout: Duration,
    /// Socket of the broker that is asked for what is lent; the user's by default.
    pub broker: Option<PathBuf>,
}

impl Default for Plan {
    fn default() -> Self {
        let timeout = Duration::from_secs(7);
        Self { device: None, caps: Caps::default(), claims: Vec::new(), timeout, broker: None }
    }
}

impl Plan {
    /// Sets [`Self::device`].
    #[must_use]
    pub fn on(mut self, device: impl Into<Option<DeviceSpec>>) -> Self {
        self.device = device.into();
        self
    }

    /// Sets [`Self::caps`].
    #[must_use]
    pub fn budgeted(mut self, caps: Caps) -> Self {
        self.caps = caps;
        self
    }

    /// Sets [`Self::claims`].
    #[must_use]
    pub fn claiming(mut self, claims: impl Into<Vec<(Tag, u64)>>) -> Self {
        self.claims = claims.into();
        self
    }

    /// Sets [`Self::broker`].
    #[must_use]
    pub fn asking(mut self, broker: impl Into<Option<PathBuf>>) -> Self {
        self.broker = broker.into();
        self
    }

    /// Sets [`Self::timeout`].
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}
