//! Tags: what an allocation is, and what sleep does with it.
//!
//! A [`TagPolicy`] is a row of this table. Another one can be declared before a tag's first allocation.
//!
//! | tag | level 1 | level 2 | wake |
//! |---|---|---|---|
//! | `weights` | backed up | dropped, *undefined* until marked restored | bytes back |
//! | `kv_cache` | dropped | dropped | zeroed |
//! | `runtime`, `cudagraph`, user's | backed up | backed up | bytes back |
//! | user's, declared discardable | dropped | dropped | as declared |

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Serialize, Serializer};

/// Longest name, in bytes.
pub const TAG_BYTES_MAX: usize = 64;

/// Label of an allocation. Cheap to clone; serializes as its name.
///
/// ```
/// use poorwill::Tag;
///
/// let adapter: Tag = "lora-7".parse()?;
/// assert_eq!((Tag::weights().as_str(), adapter.as_str()), ("weights", "lora-7"));
/// # Ok::<(), poorwill::InvalidTag>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(Arc<str>);

impl Tag {
    /// 1 to [`TAG_BYTES_MAX`] ASCII letters, digits, `_`, `-` and `.`.
    ///
    /// # Errors
    ///
    /// [`InvalidTag`] for any other name.
    pub fn new(name: &str) -> Result<Self, InvalidTag> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
        if name.is_empty() || name.len() > TAG_BYTES_MAX || !name.bytes().all(allowed) {
            return Err(InvalidTag { name: name.escape_debug().take(2 * TAG_BYTES_MAX).collect() });
        }
        Ok(Self(name.into()))
    }

    /// Model weights.
    #[must_use]
    pub fn weights() -> Self {
        Self("weights".into())
    }

    /// Key-value cache.
    #[must_use]
    pub fn kv_cache() -> Self {
        Self("kv_cache".into())
    }

    /// Engine state.
    #[must_use]
    pub fn runtime() -> Self {
        Self("runtime".into())
    }

    /// Memory of captured CUDA graphs.
    #[must_use]
    pub fn cudagraph() -> Self {
        Self("cudagraph".into())
    }

    /// Memory already in use, as a claim on a budget.
    #[must_use]
    pub fn in_use() -> Self {
        Self("in_use".into())
    }

    /// A whole pool, as a claim on a budget.
    #[must_use]
    pub fn pool() -> Self {
        Self("pool".into())
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tag({})", self.0)
    }
}

impl FromStr for Tag {
    type Err = InvalidTag;
    fn from_str(name: &str) -> Result<Self, InvalidTag> {
        Self::new(name)
    }
}

impl Serialize for Tag {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// Not a tag's name.
///
/// ```
/// use poorwill::Tag;
///
/// assert_eq!(Tag::new("my weights").unwrap_err().name, "my weights");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` cannot be a tag: use 1 to {TAG_BYTES_MAX} ASCII letters, digits, `_`, `-` or `.`")]
#[non_exhaustive]
pub struct InvalidTag {
    /// Escaped and shortened.
    pub name: String,
}

/// What a sleep does with a tag's bytes.
///
/// ```
/// use poorwill::{SleepAction, Tag, TagPolicy};
///
/// let weights = TagPolicy::built_in(&Tag::weights());
/// assert_eq!((weights.level_1, weights.level_2), (SleepAction::Backup, SleepAction::Drop));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SleepAction {
    /// Copied to host memory, with a digest per granule.
    Backup,
    /// Dropped.
    Drop,
}

/// What dropped memory holds after the wake.
///
/// ```
/// use poorwill::{Dropped, Tag, TagPolicy};
///
/// assert_eq!(TagPolicy::built_in(&Tag::kv_cache()).dropped, Dropped::Zeros);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Dropped {
    /// Zeros, written before the wake commits.
    Zeros,
    /// Anything; *undefined* until rewritten and marked restored.
    Undefined,
}

/// One row of the table.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Dropped, Level, SleepRequest, Tag, TagPolicy};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let scratch = Tag::new("scratch")?;
/// arena.declare_tag(&scratch, TagPolicy::discardable(Dropped::Undefined))?;
/// arena.alloc(&AllocRequest::new(2 << 20, scratch))?;
/// assert_eq!(arena.sleep(&SleepRequest::all(Level::One))?.discarded_bytes, 2 << 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TagPolicy {
    /// At sleep level 1.
    pub level_1: SleepAction,
    /// At sleep level 2.
    pub level_2: SleepAction,
    /// After dropping.
    pub dropped: Dropped,
}

impl TagPolicy {
    /// Backed up at both levels.
    pub const PRESERVED: Self =
        Self { level_1: SleepAction::Backup, level_2: SleepAction::Backup, dropped: Dropped::Undefined };

    /// For the parameters, see the fields.
    #[must_use]
    pub const fn new(level_1: SleepAction, level_2: SleepAction, dropped: Dropped) -> Self {
        Self { level_1, level_2, dropped }
    }

    /// Dropped at both levels.
    #[must_use]
    pub const fn discardable(dropped: Dropped) -> Self {
        Self { level_1: SleepAction::Drop, level_2: SleepAction::Drop, dropped }
    }

    /// Whether both levels drop the bytes.
    #[must_use]
    pub const fn is_discardable(&self) -> bool {
        matches!((self.level_1, self.level_2), (SleepAction::Drop, SleepAction::Drop))
    }

    /// The row for `tag`, or [`TagPolicy::PRESERVED`].
    #[must_use]
    pub fn built_in(tag: &Tag) -> Self {
        match tag.as_str() {
            "weights" => {
                Self { level_1: SleepAction::Backup, level_2: SleepAction::Drop, dropped: Dropped::Undefined }
            }
            "kv_cache" => Self::discardable(Dropped::Zeros),
            _ => Self::PRESERVED,
        }
    }
}

/// How a tag's bytes change between two sleeps.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Changes, Config, Level, SleepRequest, Tag, WakeRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let block = arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// arena.write_all(block.id, 0, b"inference never writes these")?;
/// arena.declare_changes(&Tag::weights(), Changes::Immutable)?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// arena.wake(&WakeRequest::all())?;
/// assert_eq!(arena.sleep(&SleepRequest::all(Level::One))?.copied_bytes, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Changes {
    /// Unknown: granules that differ from their backup are copied; all where digests are slow.
    #[default]
    Compared,
    /// Never after a backup. Only a rotating sixty-fourth is compared; a difference is an error and ends the
    /// promise.
    Immutable,
    /// All: everything is copied, nothing compared.
    Volatile,
}

/// How a tag's backups are stored.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, StoredAs, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.declare_backups(&Tag::weights(), StoredAs::Viewable)?;
/// let block = arena.alloc(&AllocRequest::new(8 << 20, Tag::weights()))?;
/// arena.write_all(block.id, 0, b"weights")?;
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// let view = arena.view_backup(block.range)?;
/// assert_eq!(view[..7], *b"weights");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StoredAs {
    /// In extents of sixteen granules, as codes where the pool compresses.
    #[default]
    Compact,
    /// Raw, in one extent for each block, whatever its size. So a block's backup is at one host address, and can
    /// be [viewed](crate::Pool::view_backup). A block on disk wakes through twice its size of host memory.
    Viewable,
}

/// Where a tag's bytes are.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, TagState};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// assert_eq!(arena.tag_state(&Tag::weights())?, TagState::Awake);
/// arena.sleep(&SleepRequest::all(Level::One))?;
/// assert_eq!(arena.tag_state(&Tag::weights())?, TagState::AsleepBackedUp);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TagState {
    /// On the device, as written.
    Awake,
    /// On the device, but dropped by a sleep, or lost in part
    /// ([`Pool::lost_ranges`](crate::Pool::lost_ranges)). Reading undefined bytes is refused.
    Undefined,
    /// In host memory.
    AsleepBackedUp,
    /// Nowhere; the policy says what comes back.
    AsleepDropped,
    /// In device memory, not wholly mapped after a failed undo; a wake maps it.
    Stranded,
}

impl Serialize for TagState {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl TagState {
    /// Name in JSON and Python; [`fmt::Display`] is for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Awake => "awake",
            Self::Undefined => "undefined",
            Self::AsleepBackedUp => "asleep_backed_up",
            Self::AsleepDropped => "asleep_dropped",
            Self::Stranded => "stranded",
        }
    }

    /// Whether it has device memory, mapped or not.
    #[must_use]
    pub const fn is_held(self) -> bool {
        matches!(self, Self::Awake | Self::Undefined | Self::Stranded)
    }

    /// Whether its blocks need a wake.
    #[must_use]
    pub const fn is_asleep(self) -> bool {
        matches!(self, Self::AsleepBackedUp | Self::AsleepDropped | Self::Stranded)
    }
}

impl fmt::Display for TagState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Awake => "awake",
            Self::Undefined => "awake but undefined",
            Self::AsleepBackedUp => "asleep, backed up",
            Self::AsleepDropped => "asleep, dropped",
            Self::Stranded => "stranded: held but not wholly mapped",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table() {
        use SleepAction::{Backup, Drop};
        for (name, level_1, level_2) in [
            ("weights", Backup, Drop),
            ("kv_cache", Drop, Drop),
            ("runtime", Backup, Backup),
            ("cudagraph", Backup, Backup),
            ("lora-7", Backup, Backup),
        ] {
            let policy = TagPolicy::built_in(&Tag::new(name).expect(name));
            assert_eq!((policy.level_1, policy.level_2), (level_1, level_2), "{name}");
        }
        assert_eq!(TagPolicy::built_in(&Tag::kv_cache()).dropped, Dropped::Zeros);
        assert_eq!(TagPolicy::built_in(&Tag::weights()).dropped, Dropped::Undefined);
    }

    #[test]
    fn hostile_names() {
        let long = "x".repeat(TAG_BYTES_MAX + 1);
        for name in ["", " ", "a b", "weights\n", "\u{1b}[31m", "größe", "a/b", long.as_str()] {
            let error = Tag::new(name).expect_err(name);
            assert!(error.to_string().chars().all(|c| !c.is_control()), "{error:?}");
        }
        assert!(Tag::new(&"x".repeat(TAG_BYTES_MAX)).is_ok());
    }
}
