//! The arenas: one for each device, and one more for its memory that is backed up on disk.
//!
//! What a region allocates gets a tag of the arena for each of its tags and kinds, a *part*. Memory that is allocated
//! while a part is paused goes to another part of the same name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use poorwill::backup::Compress;
use poorwill::disk::DiskConfig;
use poorwill::{Arena, Device, DeviceOptions, DeviceSpec, Level, PoolConfig, SleepRequest, StoredAs, Tag};

use super::settings::Settings;
use crate::backup::BackupKind;
use crate::code::{Failure, Result};
use crate::environment;
use crate::sync::lock;

#[derive(Debug)]
pub(super) struct Arenas(Mutex<BTreeMap<(u32, bool), Arc<Opened>>>);

#[derive(Debug)]
pub(super) struct Opened {
    ordinal: u32,
    arena: Arena,
    /// Whether backups in host memory are raw, so that they can be read in place.
    is_viewable: bool,
    /// Whether pauses lend memory.
    lends: bool,
    parts: Mutex<Vec<RegionPart>>,
    /// Tags that were resumed while backups were retained.
    retained: Mutex<BTreeSet<Tag>>,
}

#[derive(Debug, Clone)]
pub(super) struct RegionPart {
    /// The region's tag.
    pub(super) name: String,
    pub(super) kind: BackupKind,
    pub(super) tag: Tag,
}

impl Arenas {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    pub(super) fn open(&self, ordinal: u32, kind: BackupKind, settings: &Settings) -> Result<Arc<Opened>> {
        let key = (ordinal, kind == BackupKind::Disk);
        let mut arenas = lock(&self.0);
        if let Some(opened) = arenas.get(&key) {
            return Ok(Arc::clone(opened));
        }
        let disk = (kind == BackupKind::Disk).then(|| DiskConfig::in_folder(settings.use_disk_folder()));
        let options = DeviceOptions::default().spilling_to(disk);
        let device = Device::open_with(&DeviceSpec::Cuda { ordinal }, options)?;
        let (compress, lending) = (environment::compress()?, environment::lending()?);
        let pool = PoolConfig::default().compressing(compress).caching_at_most(0);
        let arena = Arena::open_unbudgeted(&device, pool)?;
        if let Some(lending) = &lending {
            arena.lend_through(lending)?;
        }
        let opened = Opened::of(arena, ordinal, compress == Compress::Off);
        let opened = Arc::new(Opened { lends: lending.is_some(), ..opened });
        arenas.insert(key, Arc::clone(&opened));
        Ok(opened)
    }

    pub(super) fn all(&self) -> Vec<Arc<Opened>> {
        lock(&self.0).values().cloned().collect()
    }
}

impl Opened {
    pub(super) fn of(arena: Arena, ordinal: u32, is_viewable: bool) -> Self {
        let (parts, retained) = (Mutex::default(), Mutex::default());
        Self { ordinal, arena, is_viewable, lends: false, parts, retained }
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    pub(super) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// A sleep of these tags, as a pause has it.
    pub(super) fn pausing(&self, tags: Vec<Tag>) -> SleepRequest {
        let request = SleepRequest::of(tags, Level::One);
        if self.lends { request.lending() } else { request }
    }

    /// Notes whether backups can be read after the resume of these tags.
    pub(super) fn note_resumed(&self, tags: &[Tag], retains: bool) {
        let mut retained = lock(&self.retained);
        for tag in tags {
            if retains {
                retained.insert(tag.clone());
            } else {
                retained.remove(tag);
            }
        }
    }

    /// Whether the backup of an awake tag can be read.
    pub(super) fn is_retained(&self, tag: &Tag) -> bool {
        lock(&self.retained).contains(tag)
    }

    /// The arena's tag of the `nth` part of this name and kind.
    pub(super) fn part(&self, name: &str, kind: BackupKind, nth: usize) -> Result<Tag> {
        let mut parts = lock(&self.parts);
        let mut known = parts.iter().filter(|part| part.name == name && part.kind == kind);
        if let Some(part) = known.nth(nth) {
            return Ok(part.tag.clone());
        }
        let tag = new_tag(&parts, name, kind)?;
        self.arena.declare_tag(&tag, kind.policy())?;
        if self.is_viewable && matches!(kind, BackupKind::Cpu(_)) {
            self.arena.declare_backups(&tag, StoredAs::Viewable)?;
        }
        parts.push(RegionPart { name: name.to_owned(), kind, tag: tag.clone() });
        Ok(tag)
    }

    /// The parts of a name, or all.
    pub(super) fn parts(&self, name: Option<&str>) -> Vec<RegionPart> {
        let parts = lock(&self.parts);
        parts.iter().filter(|part| name.is_none_or(|name| part.name == name)).cloned().collect()
    }
}

/// A name that says what the part is, where the region's tag can be a part of it.
fn new_tag(parts: &[RegionPart], name: &str, kind: BackupKind) -> Result<Tag> {
    let named = |text: String| Tag::new(&text).ok().filter(|tag| parts.iter().all(|part| part.tag != *tag));
    let kind = kind.name();
    let plain = named(format!("{name}.{kind}"));
    let numbered = |number: u32| {
        named(format!("{name}.{kind}.{number}")).or_else(|| named(format!("tag.{kind}.{number}")))
    };
    let tag = plain.or_else(|| (2..u32::MAX).find_map(numbered));
    tag.ok_or_else(|| Failure::Argument(format!("`{name}` has too many parts")))
}
