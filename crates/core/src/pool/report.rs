//! What sleep and wake are asked, and what they say afterwards.
//!
//! The reports have one shape in Rust, JSON and Python: plain byte counts, seconds, tags by name.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::lost::LostRange;
use crate::driver::DeviceInfo;
use crate::tag::Tag;

/// How deep a sleep goes; the table in [`crate::tag`] says what each level does with a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Level {
    /// Weights are kept in host memory.
    One,
    /// Weights are dropped.
    Two,
}

impl Level {
    /// Its number, as in vLLM's interface.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::One => 1,
            Self::Two => 2,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number())
    }
}

impl Serialize for Level {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(self.number())
    }
}

/// Which tags sleep, and how deep.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SleepRequest {
    /// The level.
    pub level: Level,
    /// The tags; `None` is every tag of the pool.
    pub tags: Option<Vec<Tag>>,
    /// The longest that the call waits before it begins: for other calls at work on the tags, and for work on streams
    /// that the pool knows. Work on others, and copies of the sleep's own, are waited for until they end. `None`: for
    /// all of it until it has ended.
    pub wait_max: Option<Duration>,
}

impl SleepRequest {
    /// Every tag, at `level`.
    #[must_use]
    pub fn all(level: Level) -> Self {
        Self { level, tags: None, wait_max: None }
    }

    /// These tags, at `level`.
    #[must_use]
    pub fn of(tags: impl Into<Vec<Tag>>, level: Level) -> Self {
        Self { level, tags: Some(tags.into()), wait_max: None }
    }

    /// The same for these tags; `None` is every tag of the pool.
    #[must_use]
    pub fn choosing(mut self, tags: impl Into<Option<Vec<Tag>>>) -> Self {
        self.tags = tags.into();
        self
    }

    /// The same, waiting for `wait_max` at most before it begins; then it is refused with an error that names what it
    /// waited for ([`PoolError::TimedOut`](super::PoolError::TimedOut)), and nothing has happened.
    #[must_use]
    pub fn within(mut self, wait_max: Duration) -> Self {
        self.wait_max = Some(wait_max);
        self
    }
}

/// How much of what a wake copies back is compared with the digests of the backups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verify {
    /// A sixty-fourth of each tag's granules, at least one, and others each time; every granule of what is not kept in
    /// host memory afterwards.
    ///
    /// A backup that has spoiled in host memory is woken unnoticed if it is not in the sample, and the owner works with its
    /// bytes. They are never stored as the owner's own: before a sleep, or a preparation, writes over the backup of a
    /// granule that was not in the sample, it looks whether that is still what was stored, and fails with
    /// [`PoolError::Lost`](super::PoolError::Lost) if not.
    Sample,
    /// Every granule.
    All,
}

/// How far a wake is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WakeProgress {
    /// Copied back, or zeroed, in bytes.
    pub filled_bytes: u64,
    /// All that is to be, in bytes.
    pub total_bytes: u64,
}

/// A function that is told how far a wake is, now and then, by one thread at a time: the one that wakes, or one of the
/// wake's own beside it.
#[derive(Clone)]
pub struct OnProgress(Arc<dyn Fn(WakeProgress) + Send + Sync>);

impl OnProgress {
    pub(super) fn call(&self, progress: WakeProgress) {
        (self.0)(progress);
    }
}

impl fmt::Debug for OnProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnProgress")
    }
}

/// Which tags wake, and how.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct WakeRequest {
    /// The tags; `None` is every tag that sleeps.
    pub tags: Option<Vec<Tag>>,
    /// How much is verified. `None`: every granule where the device computes digests at the speed of its memory
    /// ([`DeviceInfo::fast_digests`](crate::DeviceInfo::fast_digests)) or losses are accepted, else a sample.
    pub verify: Option<Verify>,
    /// Whether what is intact comes back where backups have spoiled.
    pub accepts_losses: bool,
    /// The longest that the call waits: for memory of the device that others are about to give back, for work that holds
    /// what it needs, and for other calls at work on the tags. Whoever else wants one of the tags waits as long: to make
    /// buffer, name the tags that are to sleep. `None` does not wait for memory of others, and for work and calls until
    /// they have ended.
    pub wait_max: Option<Duration>,
    /// Who is told how far it is.
    pub progress: Option<OnProgress>,
}

impl WakeRequest {
    /// Every tag that sleeps.
    #[must_use]
    pub fn all() -> Self {
        Self::default()
    }

    /// These tags.
    #[must_use]
    pub fn of(tags: impl Into<Vec<Tag>>) -> Self {
        Self { tags: Some(tags.into()), ..Self::default() }
    }

    /// The same for these tags; `None` is every tag that sleeps.
    #[must_use]
    pub fn choosing(mut self, tags: impl Into<Option<Vec<Tag>>>) -> Self {
        self.tags = tags.into();
        self
    }

    /// The same, with every granule compared, or a sample; `None` is as the device computes digests.
    #[must_use]
    pub fn verifying(mut self, verify: impl Into<Option<Verify>>) -> Self {
        self.verify = verify.into();
        self
    }

    /// The same, but where backups have spoiled the wake succeeds with all that is intact: [`WakeReport::lost`] says what is
    /// not. Its bytes are undefined until they were written again ([`super::Pool::mark_restored`],
    /// [`super::Pool::mark_block_restored`]) or their blocks freed.
    #[must_use]
    pub fn accepting_losses(mut self) -> Self {
        self.accepts_losses = true;
        self
    }

    /// How much is verified on such a device.
    pub(super) fn verify_on(&self, device: &DeviceInfo) -> Verify {
        let all = device.fast_digests || self.accepts_losses;
        self.verify.unwrap_or(if all { Verify::All } else { Verify::Sample })
    }

    /// The same, waiting for `wait_max` at most, from the beginning of the call, for memory that others are about to give
    /// back, and for whatever else it has to wait.
    #[must_use]
    pub fn within(mut self, wait_max: Duration) -> Self {
        self.wait_max = Some(wait_max);
        self
    }

    /// The same; `on_progress` is called as bytes arrive. It must not call the pool.
    #[must_use]
    pub fn telling(mut self, on_progress: impl Fn(WakeProgress) + Send + Sync + 'static) -> Self {
        self.progress = Some(OnProgress(Arc::new(on_progress)));
        self
    }
}

/// How it is known that memory was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Release {
    /// The driver's own figure for this process fell by at least as much.
    Confirmed,
    /// Every release succeeded; the device's free memory is reported beside it, and other processes move it.
    Ledger,
    /// Some release failed. Always comes as an error.
    Shortfall,
}

impl Release {
    /// Its name in JSON and Python.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Ledger => "ledger",
            Self::Shortfall => "shortfall",
        }
    }
}

impl Serialize for Release {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// What a sleep did. Sizes in bytes, times in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SleepReport {
    /// The level asked for; 2 for a discard.
    pub level: Level,
    /// Tags that this call put to sleep.
    pub tags: Vec<Tag>,
    /// Tags that slept already: for them nothing was done.
    pub already_asleep_tags: Vec<Tag>,
    /// Whole duration.
    pub seconds: f64,
    /// What the plan was to give back.
    pub planned_release_bytes: u64,
    /// What was given back.
    pub released_bytes: u64,
    /// How that is known.
    pub release: Release,
    /// Copied to host memory.
    pub copied_bytes: u64,
    /// Not copied, because the backup's digest matched, or because the tag was declared immutable.
    pub unchanged_bytes: u64,
    /// Of which nobody compared, because the tag was declared immutable.
    pub skipped_bytes: u64,
    /// Whether the device computes digests at the speed of its memory. Where it does not (a driver that refuses
    /// the kernel), nothing is compared and everything is copied.
    pub fast_digests: bool,
    /// Held live bytes and were dropped, in whole granules.
    pub discarded_bytes: u64,
    /// What this process still holds of the device beyond this pool and its unmapped context; 0 where the driver
    /// has no figure for a process.
    pub unaccounted_bytes: u64,
    /// Free memory of the device before.
    pub device_free_before_bytes: u64,
    /// Free memory of the device after; absent when the device would not say any more.
    pub device_free_after_bytes: Option<u64>,
    /// Where the time went.
    pub phases: SleepPhases,
}

/// Where the time of a sleep went, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SleepPhases {
    /// Getting host memory, copying to it, and digests of what was stored, which run beside the copies.
    pub copy_s: f64,
    /// Comparing with the backups before that: digests of the device's granules.
    pub digest_s: f64,
    /// Unmapping.
    pub unmap_s: f64,
    /// Giving memory back.
    pub release_s: f64,
}

/// What a wake did. Sizes in bytes, times in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct WakeReport {
    /// Tags that this call woke.
    pub tags: Vec<Tag>,
    /// Tags that were awake already: for them nothing was done.
    pub already_awake_tags: Vec<Tag>,
    /// Whole duration.
    pub seconds: f64,
    /// Memory brought back to its addresses.
    pub mapped_bytes: u64,
    /// Copied from host memory.
    pub copied_bytes: u64,
    /// Overwritten with zeros.
    pub zeroed_bytes: u64,
    /// Compared with the backup's digests, and equal.
    pub verified_bytes: u64,
    /// Tags that are *undefined* now, until they are marked restored.
    pub undefined_tags: Vec<Tag>,
    /// What did not come back because its backup had spoiled, where that was accepted: undefined until it is written
    /// again.
    pub lost: Vec<LostRange>,
    /// Where the time went.
    pub phases: WakePhases,
}

/// Where the time of a wake went, in seconds. Copying runs beside the other phases, so they add up to more than
/// the whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct WakePhases {
    /// Getting memory from the device.
    pub create_s: f64,
    /// Mapping it and opening it for access.
    pub map_s: f64,
    /// From the first copy, or the first zeros, to the end of the last.
    pub copy_s: f64,
    /// Waiting for digests after that, and comparing them.
    pub verify_s: f64,
    /// Waiting, with nothing held, for memory that others gave back.
    pub wait_s: f64,
}

/// Adds a duration to a figure in seconds.
pub(super) fn add(figure: &mut f64, duration: Duration) {
    *figure += duration.as_secs_f64();
}
