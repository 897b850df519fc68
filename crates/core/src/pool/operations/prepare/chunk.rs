//! A chunk that is held while it is measured or copied, and how it was then.

use super::job::Job;
use super::report::PrepareEnd;
use crate::driver::{BackingId, DeviceRange};
use crate::pool::parts::backups::{Backup, Save, Stored};
use crate::pool::parts::heap::Landmark;
use crate::pool::shared::Shared;
use crate::pool::state::PoolState;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::keys::TagKey;
use crate::tag::{Changes, TagState};

/// Keeps a chunk mapped and its tag awake.
pub(super) struct HeldChunk<'a> {
    shared: &'a Shared,
    tag: TagKey,
    range: DeviceRange,
}

impl Drop for HeldChunk<'_> {
    fn drop(&mut self) {
        self.shared.settle_after_panic();
        let mut state = self.shared.lock_state();
        state.heap_mut().copied(self.range);
        state.tags_mut().get_mut(self.tag).leave();
        self.shared.had_again(state);
    }
}

pub(super) struct Prepared<'a> {
    pub(super) held: HeldChunk<'a>,
    pub(super) save: Save,
    pub(super) snapshot: ChunkState,
    /// Stays in the index too, where a free or a drop of backups finds it.
    pub(super) stored: Option<Backup>,
    pub(super) changes: Changes,
}

pub(super) struct ChunkState {
    memory: Vec<BackingId>,
    invalidations: u64,
    pub(super) landmark: Landmark,
}

pub(super) enum NextStep<'a> {
    Chunk(Box<Prepared<'a>>),
    Gone,
    End(PrepareEnd),
}

impl Shared {
    /// Chunks are visited in order, so the last landmark is near.
    pub(super) fn hold_chunk(&self, job: &Job, save: &Save, near: Option<Landmark>) -> Result<NextStep<'_>> {
        if job.is_cancelled() {
            return Ok(NextStep::End(PrepareEnd::Cancelled));
        }
        let mut state = match self.open_state() {
            Err(PoolError::Closed) => return Ok(NextStep::End(PrepareEnd::Overtaken)),
            state => state?,
        };
        // The tag may be gone with the segment.
        let Some(tag) = state.heap().segments().tag_of(save.location.0) else { return Ok(NextStep::Gone) };
        let entry = state.tags().get(tag);
        // A call that dropped backups may have ended already.
        let dropped = job.forgets(tag).is_some_and(|before| before != state.backups().forgets(tag));
        if dropped || entry.wanted() > 0 || entry.is_taken() || entry.state() != TagState::Awake {
            return Ok(NextStep::End(PrepareEnd::Overtaken));
        }
        let (changes, invalidations) = (entry.changes(), state.backups().invalidations(tag));
        let Some((save, memory, landmark)) = state.current(save, near) else { return Ok(NextStep::Gone) };
        let stored = match state.backups().get(&save) {
            // Another call reads it, for which the sleep waits.
            Some(backup) if !backup.is_ours() && backup.has_unseen() => return Ok(NextStep::Gone),
            // Where a view or a read shares it, the sleep stores what has changed.
            backup => backup.map(Backup::share),
        };
        let range = DeviceRange::new(save.location.1, save.bytes);
        state.tags_mut().get_mut(tag).enter();
        state.heap_mut().copying(range);
        drop(state);
        let held = HeldChunk { shared: self, tag, range };
        let snapshot = ChunkState { memory, invalidations, landmark };
        Ok(NextStep::Chunk(Box::new(Prepared { held, save, snapshot, stored, changes })))
    }

    /// Stores a backup if its chunk is unchanged since the snapshot.
    pub(super) fn put_back(
        &self,
        held: &HeldChunk<'_>,
        save: &Save,
        snapshot: &ChunkState,
        mut backup: Backup,
    ) {
        assert_eq!(held.range.addr, save.location.1, "the extent that is held");
        let mut state = self.lock_state();
        if state.backups().invalidations(held.tag) != snapshot.invalidations {
            // A block may have been allocated there meanwhile.
            let unsure = |stored: &mut Stored| (stored.verified, stored.has_new_block) = (false, true);
            backup.granules.iter_mut().flatten().for_each(unsure);
        }
        if state
            .current(save, Some(snapshot.landmark))
            .is_some_and(|(_, memory, _)| memory == snapshot.memory)
        {
            state.backups_mut().insert(save, backup);
        }
    }
}

impl PoolState {
    /// The live granules, memory and a live block of an extent. `None` when it is unused or incomplete.
    fn current(&self, save: &Save, near: Option<Landmark>) -> Option<(Save, Vec<BackingId>, Landmark)> {
        let extent = DeviceRange::new(save.location.1, save.bytes);
        let (granules, memory, landmark) = self.heap().live_granules(save.location.0, extent, near)?;
        Some((Save { granules, ..*save }, memory, landmark))
    }
}
