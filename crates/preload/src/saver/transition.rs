//! Pause and resume, over all devices.
//!
//! A pause goes in steps: first what is backed up, on each device, and last what is dropped. So a failure loses no bytes
//! unless the device fails while others have dropped theirs. What the steps before did is undone.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use poorwill::{
    Arena, BackupView, BlockId, DeviceRange, PoolError, SleepReport, Tag, WakeReport, WakeRequest, chain,
};
use serde::Serialize;

use super::arenas::{Arenas, Opened, RegionPart};
use crate::backup::BackupKind;
use crate::code::{Failure, Result};
use crate::environment::{self, Backend};
use crate::message::note;
use crate::sync::lock;

/// One pause or resume at a time, and what belongs to it.
#[derive(Debug)]
pub(super) struct Transitions {
    turn: Mutex<()>,
    /// For the next pause.
    unused: Mutex<Vec<DeviceRange>>,
    reports: Mutex<Reports>,
    /// Backups that callers read, until the next pause or resume.
    views: Mutex<BTreeMap<(BlockId, u64, u64), BackupView>>,
}

/// Of the last pause and the last resume.
#[derive(Debug, Serialize)]
struct Reports {
    pause: Vec<Paused>,
    resume: Vec<Resumed>,
}

#[derive(Debug, Serialize)]
struct Paused {
    device: u32,
    /// Moved to disk after the sleep.
    spilled_bytes: u64,
    sleep: SleepReport,
}

#[derive(Debug, Serialize)]
struct Resumed {
    device: u32,
    /// Host memory that was given back after the wake.
    released_host_bytes: u64,
    wake: WakeReport,
}

/// Tags of one arena that sleep or wake together.
struct Step {
    opened: Arc<Opened>,
    tags: Vec<Tag>,
    spills: bool,
}

impl Transitions {
    pub(super) const fn new() -> Self {
        Self {
            turn: Mutex::new(()),
            unused: Mutex::new(Vec::new()),
            reports: Mutex::new(Reports { pause: Vec::new(), resume: Vec::new() }),
            views: Mutex::new(BTreeMap::new()),
        }
    }

    pub(super) fn set_unused(&self, ranges: Vec<DeviceRange>) {
        *lock(&self.unused) = ranges;
    }

    /// Where the host has the bytes of a range of a block. They stay there until the next pause or resume.
    pub(super) fn backup(&self, arena: &Arena, block: BlockId, range: DeviceRange) -> Result<*const u8> {
        match lock(&self.views).entry((block, range.addr, range.bytes)) {
            Entry::Occupied(view) => Ok(view.get().as_ptr()),
            Entry::Vacant(view) => Ok(view.insert(arena.view_backup(range)?).as_ptr()),
        }
    }

    /// Puts the memory of a tag to sleep, or all.
    pub(super) fn pause(&self, arenas: &Arenas, name: Option<&str>) -> Result<()> {
        // A bad value is an error before anything sleeps.
        environment::wake_timeout()?;
        let _turn = lock(&self.turn);
        lock(&self.views).clear();
        let unused = mem::take(&mut *lock(&self.unused));
        let (mut paused, mut awake_before): (Vec<Paused>, Vec<Step>) = (Vec::new(), Vec::new());
        for step in steps(arenas, name) {
            let slept = step.awake().and_then(|awake| {
                awake_before.push(awake);
                step.sleep(&unused)
            });
            match slept {
                Ok(slept) => paused.push(slept),
                Err(failure) => return Err(undo_pause(&awake_before, failure)),
            }
        }
        note_refused(&paused);
        note_repeated("paused", name, paused.iter().any(|it| !it.sleep.already_asleep_tags.is_empty()));
        lock(&self.reports).pause = paused;
        Ok(())
    }

    /// Wakes the memory of a tag, or all.
    pub(super) fn resume(&self, arenas: &Arenas, name: Option<&str>, retains: bool) -> Result<()> {
        let timeout = environment::wake_timeout()?;
        let _turn = lock(&self.turn);
        lock(&self.views).clear();
        let mut resumed: Vec<(Arc<Opened>, WakeReport)> = Vec::new();
        for opened in arenas.all() {
            let tags: Vec<Tag> = opened.parts(name).into_iter().map(|part| part.tag).collect();
            if tags.is_empty() {
                continue;
            }
            let mut request = WakeRequest::of(tags);
            request.wait_max = timeout;
            match opened.arena().wake(&request) {
                Ok(wake) => resumed.push((opened, wake)),
                Err(error) => return Err(undo_resume(&resumed, error.into())),
            }
        }
        note_repeated("active", name, resumed.iter().any(|(_, wake)| !wake.already_awake_tags.is_empty()));
        let (mut reports, mut lost) = (Vec::new(), None);
        for (opened, wake) in resumed {
            opened.note_resumed(&wake.tags, retains);
            let dropped = if retains { Ok(0) } else { opened.drop_mapped_backups(&wake.tags) };
            let released_host_bytes = dropped.unwrap_or_else(|error| {
                match error {
                    // The memory is awake, and some of its bytes are wrong.
                    PoolError::Lost { .. } => lost = lost.take().or(Some(error)),
                    _ => note(&format!(
                        "host memory of backups stays in use after a resume: {}",
                        chain(&error)
                    )),
                }
                0
            });
            reports.push(Resumed { device: opened.ordinal(), released_host_bytes, wake });
        }
        lock(&self.reports).resume = reports;
        lost.map_or(Ok(()), |lost| Err(lost.into()))
    }

    /// The reports of the last pause and resume, as JSON.
    pub(super) fn report(&self) -> Result<String> {
        let reports = lock(&self.reports);
        serde_json::to_string(&*reports).map_err(|error| Failure::Argument(error.to_string()))
    }
}

/// First what is backed up, then what is dropped.
fn steps(arenas: &Arenas, name: Option<&str>) -> Vec<Step> {
    let (mut kept, mut dropped) = (Vec::new(), Vec::new());
    for opened in arenas.all() {
        let (of_none, backed_up): (Vec<RegionPart>, Vec<RegionPart>) =
            opened.parts(name).into_iter().partition(|part| part.kind == BackupKind::None);
        for (steps, parts) in [(&mut kept, backed_up), (&mut dropped, of_none)] {
            let spills = parts.iter().any(|part| part.kind == BackupKind::Disk);
            let tags: Vec<Tag> = parts.into_iter().map(|part| part.tag).collect();
            if !tags.is_empty() {
                steps.push(Step { opened: Arc::clone(&opened), tags, spills });
            }
        }
    }
    kept.extend(dropped);
    kept
}

impl Step {
    /// Those of its tags that are awake now.
    fn awake(&self) -> Result<Self> {
        let mut tags = Vec::new();
        for tag in &self.tags {
            if !self.opened.arena().tag_state(tag)?.is_asleep() {
                tags.push(tag.clone());
            }
        }
        Ok(Self { opened: Arc::clone(&self.opened), tags, spills: false })
    }

    fn sleep(&self, unused: &[DeviceRange]) -> Result<Paused> {
        let Self { opened, tags, spills } = self;
        let sleep = opened.arena().sleep(&opened.pausing(tags.clone()).without(unused))?;
        let spilled_bytes = if *spills { opened.arena().spill(Some(tags))? } else { 0 };
        Ok(Paused { device: opened.ordinal(), spilled_bytes, sleep })
    }
}

impl Opened {
    /// Drops the backups that stay for no later pause, of these tags.
    fn drop_mapped_backups(&self, tags: &[Tag]) -> Result<u64, PoolError> {
        let mapped =
            |part: &RegionPart| part.kind == BackupKind::Cpu(Backend::Mmap) && tags.contains(&part.tag);
        let mapped: Vec<Tag> = self.parts(None).into_iter().filter(mapped).map(|part| part.tag).collect();
        if mapped.is_empty() { Ok(0) } else { self.arena().drop_backups(Some(&mapped)) }
    }
}

/// Wakes what was awake before the pause. The last step may have failed halfway, with its tags asleep.
fn undo_pause(awake_before: &[Step], failure: Failure) -> Failure {
    let undone = awake_before.iter().filter(|step| !step.tags.is_empty()).map(|step| {
        let woken = step.opened.arena().wake(&WakeRequest::of(step.tags.clone()));
        woken.map(drop).map_err(Failure::from)
    });
    with_undo(failure, undone)
}

fn undo_resume(resumed: &[(Arc<Opened>, WakeReport)], failure: Failure) -> Failure {
    let undone = resumed.iter().filter(|(_, wake)| !wake.tags.is_empty()).map(|(opened, wake)| {
        let slept = opened.arena().sleep(&opened.pausing(wake.tags.clone()));
        slept.map(drop).map_err(Failure::from)
    });
    with_undo(failure, undone)
}

/// Tries all of them; the first failure counts.
fn with_undo(failed: Failure, undone: impl Iterator<Item = Result<()>>) -> Failure {
    let failures: Vec<Failure> = undone.filter_map(Result::err).collect();
    match failures.into_iter().next() {
        None => failed,
        Some(undo) => Failure::NotUndone { failed: Box::new(failed), undo: Box::new(undo) },
    }
}

/// Of a broker that takes nothing, once: pauses release memory as they would without it.
fn note_refused(paused: &[Paused]) {
    static IS_NOTED: AtomicBool = AtomicBool::new(false);
    if let Some(why) = paused.iter().find_map(|it| it.sleep.lend_refused.as_deref())
        && !IS_NOTED.swap(true, Ordering::Relaxed)
    {
        note(&format!("a pause released what it was to lend, as others do while this lasts: {why}"));
    }
}

/// Of the tag that the caller named. A pause or resume of all is meant for what is left.
fn note_repeated(state: &str, name: Option<&str>, is_repeated: bool) {
    if let Some(name) = name.filter(|_| is_repeated) {
        note(&format!("memory of `{}` had been {state} before, and stays so", name.escape_debug()));
    }
}
