//! How far a preparation is, and what it did.

use serde::{Serialize, Serializer};

use crate::tag::Tag;

/// How a preparation ended.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, PrepareEnd, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// let report = arena.prepare_sleep(&SleepRequest::all(Level::One))?.wait()?;
/// assert_eq!(report.end, PrepareEnd::Finished);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrepareEnd {
    /// Every chunk was visited.
    Finished,
    /// [`Preparation::cancel`](super::Preparation::cancel) ended it.
    Cancelled,
    /// A sleep or discard of one of the tags came first, or its backups were dropped. Or a sleep of any pool
    /// in the process lacked host memory, or the pool was closed.
    Overtaken,
}

impl PrepareEnd {
    /// Name in JSON and Python.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Cancelled => "cancelled",
            Self::Overtaken => "overtaken",
        }
    }
}

impl Serialize for PrepareEnd {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// What a preparation did. Sizes in bytes, times in seconds.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// let report = arena.prepare_sleep(&SleepRequest::all(Level::One))?.wait()?;
/// println!("{} bytes backed up in {:.3} s", report.copied_bytes, report.seconds);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PrepareReport {
    /// Tags that the sleep would back up.
    pub tags: Vec<Tag>,
    /// How it ended.
    pub end: PrepareEnd,
    /// Whole duration.
    pub seconds: f64,
    /// Copied to the backups.
    pub copied_bytes: u64,
    /// Written there for them: less where they are stored as codes.
    pub stored_bytes: u64,
    /// Not copied: the backup's digest matched, or the tag is immutable. What the sleep copies anyway is in
    /// neither figure.
    pub unchanged_bytes: u64,
}

/// The progress of a preparation.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// let preparation = arena.prepare_sleep(&SleepRequest::all(Level::One))?;
/// let progress = preparation.progress();
/// println!("{} of {} bytes", progress.done_bytes, progress.total_bytes);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrepareProgress {
    /// Visited so far.
    pub done_bytes: u64,
    /// Live bytes to visit, counted at the start in whole granules.
    pub total_bytes: u64,
    /// Whether it has ended.
    pub is_ended: bool,
}
