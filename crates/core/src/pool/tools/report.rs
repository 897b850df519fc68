//! Requests and reports of sleep and wake. Reports have one shape in Rust, JSON and Python: sizes in
//! bytes and times in seconds, as the names say.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::loss_ranges::LostRange;
use crate::driver::{DeviceInfo, DeviceRange};
use crate::tag::Tag;

/// How deep a sleep goes; [`crate::tag`] has the table.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// let sleep = arena.sleep(&SleepRequest::all(Level::Two))?;
/// assert_eq!((sleep.level.number(), sleep.discarded_bytes), (2, 2 << 20));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Level {
    /// Weights are backed up.
    One,
    /// Weights are dropped.
    Two,
}

impl Level {
    /// As vLLM numbers them.
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
///
/// ```
/// use std::time::Duration;
///
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, TagState};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::kv_cache()))?;
/// let request = SleepRequest::of([Tag::kv_cache()], Level::One).within(Duration::from_secs(30));
/// arena.sleep(&request)?;
/// assert_eq!(arena.tag_state(&Tag::weights())?, TagState::Awake);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SleepRequest {
    /// The level.
    pub level: Level,
    /// `None`: all.
    pub tags: Option<Vec<Tag>>,
    /// Longest wait, before the sleep begins, for other calls on the tags and for work on known streams.
    /// Others and its own copies have no limit.
    pub wait_max: Option<Duration>,
    /// Device memory whose bytes need not survive.
    pub unused: Vec<DeviceRange>,
    /// Device memory whose bytes survive, although the level drops their tag.
    pub kept: Vec<DeviceRange>,
    /// Tags that do not sleep.
    pub kept_awake: Vec<Tag>,
    /// Whether memory is lent instead of released.
    pub lends: bool,
}

impl SleepRequest {
    /// All tags.
    #[must_use]
    pub fn all(level: Level) -> Self {
        Self {
            level,
            tags: None,
            wait_max: None,
            unused: vec![],
            kept: vec![],
            kept_awake: vec![],
            lends: false,
        }
    }

    /// These tags.
    #[must_use]
    pub fn of(tags: impl Into<Vec<Tag>>, level: Level) -> Self {
        Self { tags: Some(tags.into()), ..Self::all(level) }
    }

    /// With these tags; `None`: all.
    #[must_use]
    pub fn choosing(mut self, tags: impl Into<Option<Vec<Tag>>>) -> Self {
        self.tags = tags.into();
        self
    }

    /// With device memory whose bytes need not survive, such as what another allocator holds free inside a block.
    ///
    /// Granules that lie wholly in it are neither compared nor backed up, and what was stored of them is dropped. The
    /// wake maps them again, with undefined bytes. Ranges may overlap; where no block lives they have no effect. A
    /// preparation may still back some of them up.
    ///
    /// ```
    /// use poorwill::{AllocRequest, Arena, Config, DeviceRange, Level, SleepRequest, Tag};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
    /// let block = arena.alloc(&AllocRequest::new(8 << 20, Tag::weights()))?;
    /// let unused = DeviceRange::new(block.range.addr + (2 << 20), 4 << 20);
    /// let sleep = arena.sleep(&SleepRequest::all(Level::One).without([unused]))?;
    /// assert_eq!((sleep.copied_bytes, sleep.unused_bytes), (4 << 20, 4 << 20));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A range past the last address fails the sleep with
    /// [`PoolError::InvalidRange`](crate::PoolError::InvalidRange).
    #[must_use]
    pub fn without(mut self, unused: impl Into<Vec<DeviceRange>>) -> Self {
        self.unused = unused.into();
        self
    }

    /// With device memory whose bytes survive, although the level drops their tag: what no one would write again.
    ///
    /// Every granule that it touches is backed up, and the wake brings it back. After that these bytes are defined, unless
    /// they were undefined before, and the rest is what the tag's policy says. Ranges may overlap; where no block lives,
    /// and in tags that are backed up anyway, they have no effect.
    ///
    /// ```
    /// use poorwill::{AllocRequest, Arena, Config, DeviceRange, Level, SleepRequest, Tag, WakeRequest};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
    /// let block = arena.alloc(&AllocRequest::new(8 << 20, Tag::weights()))?;
    /// arena.write_all(block.id, 100, b"scale")?;
    /// let scale = DeviceRange::new(block.range.addr + 100, 5);
    /// let sleep = arena.sleep(&SleepRequest::all(Level::Two).keeping([scale]))?;
    /// assert_eq!((sleep.kept_bytes, sleep.discarded_bytes), (2 << 20, 6 << 20));
    /// arena.wake(&WakeRequest::all())?;
    /// assert_eq!(arena.read_vec(block.id, 100, 5)?, b"scale");
    /// assert!(arena.read_vec(block.id, 0, 5).is_err(), "these were dropped");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A range past the last address fails the sleep with
    /// [`PoolError::InvalidRange`](crate::PoolError::InvalidRange).
    #[must_use]
    pub fn keeping(mut self, kept: impl Into<Vec<DeviceRange>>) -> Self {
        self.kept = kept.into();
        self
    }

    /// Without these tags, whatever else is chosen: another program works with their memory.
    ///
    /// ```
    /// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, TagState};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
    /// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
    /// arena.alloc(&AllocRequest::new(2 << 20, Tag::kv_cache()))?;
    /// let sleep = arena.sleep(&SleepRequest::all(Level::One).keeping_awake([Tag::weights()]))?;
    /// assert_eq!(sleep.tags, [Tag::kv_cache()]);
    /// assert_eq!(arena.tag_state(&Tag::weights())?, TagState::Awake);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A tag that the pool does not have fails the sleep with
    /// [`PoolError::UnknownTag`](crate::PoolError::UnknownTag).
    #[must_use]
    pub fn keeping_awake(mut self, tags: impl Into<Vec<Tag>>) -> Self {
        self.kept_awake = tags.into();
        self
    }

    /// With this `wait_max`; after [`PoolError::TimedOut`](crate::PoolError::TimedOut) nothing has changed.
    #[must_use]
    pub fn within(mut self, wait_max: Duration) -> Self {
        self.wait_max = Some(wait_max);
        self
    }

    /// Lends memory to the pool's broker ([`Pool::lend_through`](crate::Pool::lend_through)) instead of releasing it. What
    /// nothing else needed is mapped again by the wake, without a copy. Backups are made as ever, and what a broker does
    /// not take is released.
    #[must_use]
    pub fn lending(mut self) -> Self {
        self.lends = true;
        self
    }
}

/// How much of a wake is compared with its backups' digests.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, Verify, WakeRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// let wake = arena.wake(&WakeRequest::all().verifying(Verify::All))?;
/// assert_eq!(wake.verified_bytes, wake.copied_bytes);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verify {
    /// A rotating sixty-fourth of each tag, at least one granule, and all whose backups are not kept.
    ///
    /// A spoiled backup outside the sample wakes unnoticed, and its owner reads wrong bytes. They are never stored
    /// as the owner's: the next sleep or preparation that would overwrite the backup fails with
    /// [`PoolError::Lost`](crate::PoolError::Lost). For an immutable tag a sleep compares a sample only.
    Sample,
    /// Every granule.
    All,
}

/// Progress of a wake.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, WakeProgress, WakeRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// arena.wake(&WakeRequest::all().telling(|progress: WakeProgress| {
///     println!("{} of {} bytes", progress.filled_bytes, progress.total_bytes);
/// }))?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WakeProgress {
    /// Copied or zeroed.
    pub filled_bytes: u64,
    /// To copy or zero.
    pub total_bytes: u64,
}

/// Progress callback, on one thread at a time: the caller's or one of the wake's.
///
/// ```
/// use poorwill::WakeRequest;
///
/// let request = WakeRequest::all().telling(|progress| println!("{progress:?}"));
/// assert!(request.progress.is_some());
/// ```
#[derive(Clone)]
pub struct OnProgress(Arc<dyn Fn(WakeProgress) + Send + Sync>);

impl OnProgress {
    pub(in crate::pool) fn call(&self, progress: WakeProgress) {
        (self.0)(progress);
    }
}

impl fmt::Debug for OnProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnProgress")
    }
}

/// Which tags wake, and how.
///
/// ```
/// use std::time::Duration;
///
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, WakeRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::kv_cache()))?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// arena.wake(&WakeRequest::of([Tag::weights()]))?; // Before new weights are written.
/// arena.wake(&WakeRequest::all().within(Duration::from_secs(30)))?; // The rest.
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct WakeRequest {
    /// `None`: all that sleep.
    pub tags: Option<Vec<Tag>>,
    /// `None`: all with [`fast_digests`](crate::DeviceInfo::fast_digests) or accepted losses, else a sample.
    pub verify: Option<Verify>,
    /// Whether intact bytes wake although others are lost.
    pub accepts_losses: bool,
    /// Longest wait for other owners' memory, for work and for calls on the tags. Other calls on them wait
    /// too, so a sleep that makes space must name other tags. `None`: no wait for other owners, else no
    /// limit.
    pub wait_max: Option<Duration>,
    /// Progress callback.
    pub progress: Option<OnProgress>,
}

impl WakeRequest {
    /// All sleeping tags.
    #[must_use]
    pub fn all() -> Self {
        Self::default()
    }

    /// These tags.
    #[must_use]
    pub fn of(tags: impl Into<Vec<Tag>>) -> Self {
        Self { tags: Some(tags.into()), ..Self::default() }
    }

    /// With these tags; `None`: all that sleep.
    #[must_use]
    pub fn choosing(mut self, tags: impl Into<Option<Vec<Tag>>>) -> Self {
        self.tags = tags.into();
        self
    }

    /// With this verification; `None`: by device.
    #[must_use]
    pub fn verifying(mut self, verify: impl Into<Option<Verify>>) -> Self {
        self.verify = verify.into();
        self
    }

    /// Wakes what is intact; [`WakeReport::lost`] names the rest, undefined until rewritten and marked
    /// ([`crate::Pool::mark_restored`]) or freed.
    #[must_use]
    pub fn accepting_losses(mut self) -> Self {
        self.accepts_losses = true;
        self
    }

    pub(in crate::pool) fn verify_on(&self, device: &DeviceInfo) -> Verify {
        let all = device.fast_digests || self.accepts_losses;
        self.verify.unwrap_or(if all { Verify::All } else { Verify::Sample })
    }

    /// With this `wait_max`, counted from the call.
    #[must_use]
    pub fn within(mut self, wait_max: Duration) -> Self {
        self.wait_max = Some(wait_max);
        self
    }

    /// With a progress callback, which must not call the pool.
    #[must_use]
    pub fn telling(mut self, on_progress: impl Fn(WakeProgress) + Send + Sync + 'static) -> Self {
        self.progress = Some(OnProgress(Arc::new(on_progress)));
        self
    }
}

/// How a release is known.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, Release, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// match arena.sleep(&SleepRequest::all(Level::One))?.release {
///     Release::Confirmed => println!("the driver's figure agrees"),
///     other => println!("by the calls: {}", other.name()),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Release {
    /// The driver's figure for this process fell by at least as much.
    Confirmed,
    /// Every release succeeded; other processes change the device's free memory.
    Ledger,
    /// Some release failed: always an error.
    Shortfall,
}

impl Release {
    /// Name in JSON and Python.
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

/// What a sleep did.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(4 << 20, Tag::weights()))?;
/// let sleep = arena.sleep(&SleepRequest::all(Level::One))?;
/// assert_eq!((sleep.released_bytes, sleep.copied_bytes), (4 << 20, 4 << 20));
/// println!("asleep in {:.3} s", sleep.seconds);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SleepReport {
    /// 2 for a discard.
    pub level: Level,
    /// Put to sleep.
    pub tags: Vec<Tag>,
    /// Asleep before.
    pub already_asleep_tags: Vec<Tag>,
    /// Whole duration.
    pub seconds: f64,
    /// To be released when that began: what had been mapped, and what was spare. All of it is, but for a shortfall and
    /// for `shared_backup_bytes`.
    pub planned_release_bytes: u64,
    /// Released: less `shared_backup_bytes`.
    pub released_bytes: u64,
    /// How that is known.
    pub release: Release,
    /// Lent instead: the device has it in use until others need it.
    pub lent_bytes: u64,
    /// Stays held, with its only copy, until others need it: of tags whose bytes
    /// [change all the time](crate::Changes::Volatile). It is backed up then.
    pub resident_bytes: u64,
    /// Why nothing was lent although the request says so, in the broker's words.
    pub lend_refused: Option<String>,
    /// Taken by backups from the memory that the device shares with the computer, so not given back; 0 where it has
    /// memory of its own.
    pub shared_backup_bytes: u64,
    /// Copied to backups.
    pub copied_bytes: u64,
    /// Written there for them: less where they are stored as codes.
    pub stored_bytes: u64,
    /// Not copied: equal digests, or immutable.
    pub unchanged_bytes: u64,
    /// Of those, not compared (immutable).
    pub unchecked_bytes: u64,
    /// Copied to other devices' memory besides: what these did not have as it is.
    pub peer_bytes: u64,
    /// Why something was not, where that is no lack of memory: which device, and its words.
    pub peer_refused: Option<String>,
    /// Neither copied nor compared: declared unused, in whole granules.
    pub unused_bytes: u64,
    /// Whether digests are fast; if not, everything is copied.
    pub fast_digests: bool,
    /// Dropped live bytes, in whole granules.
    pub discarded_bytes: u64,
    /// Of dropped tags, backed up since the request keeps them, in whole granules.
    pub kept_bytes: u64,
    /// Device memory of this process beyond this pool and the context; 0 if unknown.
    pub unaccounted_bytes: u64,
    /// Free before.
    pub device_free_before_bytes: u64,
    /// Free afterwards, if known.
    pub device_free_after_bytes: Option<u64>,
    /// Durations.
    pub phases: SleepPhases,
}

/// Time of a sleep.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// let phases = arena.sleep(&SleepRequest::all(Level::One))?.phases;
/// println!("{:.3} s for copies, {:.3} s for unmapping", phases.copy_s, phases.unmap_s);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SleepPhases {
    /// Host memory and copies, with what is unmapped beside them.
    pub copy_s: f64,
    /// Digests of the device's granules.
    pub digest_s: f64,
    /// Unmapping, also beside copies.
    pub unmap_s: f64,
    /// Releasing.
    pub release_s: f64,
}

/// What a wake did.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, WakeRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// arena.alloc(&AllocRequest::new(4 << 20, Tag::kv_cache()))?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// let wake = arena.wake(&WakeRequest::all())?;
/// assert_eq!((wake.copied_bytes, wake.zeroed_bytes), (2 << 20, 4 << 20));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct WakeReport {
    /// Woken.
    pub tags: Vec<Tag>,
    /// Awake before.
    pub already_awake_tags: Vec<Tag>,
    /// Whole duration.
    pub seconds: f64,
    /// Mapped again.
    pub mapped_bytes: u64,
    /// Of what its sleep had lent or left resident, back with its bytes.
    pub returned_bytes: u64,
    /// Copied back.
    pub copied_bytes: u64,
    /// Read from backups for them: less where these are codes.
    pub read_bytes: u64,
    /// Read from disk before that.
    pub disk_read_bytes: u64,
    /// Of the copied bytes, those that came over other devices' links.
    pub linked_bytes: u64,
    /// Of the copied bytes, those that came from other devices' memory.
    pub peer_bytes: u64,
    /// Zeroed.
    pub zeroed_bytes: u64,
    /// Compared and equal.
    pub verified_bytes: u64,
    /// *Undefined* until marked restored.
    pub undefined_tags: Vec<Tag>,
    /// Lost, where accepted; undefined until rewritten.
    pub lost: Vec<LostRange>,
    /// Durations.
    pub phases: WakePhases,
}

/// Time of a wake. Copying overlaps the rest, so the sum exceeds the whole.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, WakeRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// let phases = arena.wake(&WakeRequest::all())?.phases;
/// println!("{:.3} s for mapping, {:.3} s for copies", phases.map_s, phases.copy_s);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct WakePhases {
    /// Creating.
    pub create_s: f64,
    /// Mapping and setting access.
    pub map_s: f64,
    /// First copy or zeroing to the last.
    pub copy_s: f64,
    /// Digests, from the last copy on.
    pub verify_s: f64,
    /// Waiting for other owners, holding nothing.
    pub wait_s: f64,
}

pub(in crate::pool) fn add(figure: &mut f64, duration: Duration) {
    *figure += duration.as_secs_f64();
}
