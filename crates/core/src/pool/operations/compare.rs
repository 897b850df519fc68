//! Comparing the device with its backups, before a sleep copies what differs.
//!
//! Digests are computed a piece at a time, all of them begun at once. What precedes a piece leaves meanwhile, as long as it
//! equals its backup: unmapping takes the processor as long as digests take the device.
//!
//! Promise: a granule that is kept equals its backup. Of granules promised not to change, a sixty-fourth was compared.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::leaving::Leaving;
use crate::digest::Digest;
use crate::driver::{DeviceRange, DriverError, Pending};
use crate::pool::parts::backups::sample::Sample;
use crate::pool::parts::backups::{BACK_UP, Save, Suspect, tags_of};
use crate::pool::shared::Shared;
use crate::pool::state::PoolState;
use crate::pool::tools::error::{Phase, PoolError, Result};
use crate::pool::tools::keys::TagKey;
use crate::tag::Changes;

/// In how many pieces digests are computed at most, each of a chunk at least.
const PIECES: usize = 16;

/// What comparing has found of a save's granules.
#[derive(Debug, Clone, Default)]
pub(super) struct Compared {
    /// Those that need not be copied, ascending.
    pub(super) kept: Vec<usize>,
    /// How many of them were not compared.
    pub(super) unchecked: usize,
    /// Digests of the device, ascending by granule.
    found: Vec<(usize, Digest)>,
}

impl Compared {
    /// The device's digests of these granules, if all are known.
    pub(super) fn digests(&self, granules: &[usize]) -> Option<Vec<Digest>> {
        let digest = |granule: &usize| {
            let nth = self.found.binary_search_by_key(granule, |(granule, _)| *granule).ok()?;
            Some(self.found[nth].1)
        };
        granules.iter().map(digest).collect()
    }
}

/// Queries, by their places, and their digests.
type PieceDigests = (Range<usize>, Pending<Vec<Digest>>);

#[derive(Clone, Copy)]
struct DigestQuery {
    turn: usize,
    granule: usize,
    /// Its backup's, if it has one that may serve on.
    stored: Option<Digest>,
    /// Promised not to change.
    is_promised: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Comparison<'a> {
    pub(super) shared: &'a Shared,
    /// In the order of their addresses.
    pub(super) saves: &'a [Save],
}

fn failed(source: DriverError) -> PoolError {
    PoolError::SleepFailed { phase: Phase::Compare, source }
}

impl Comparison<'_> {
    /// For each save. What equals its backup, and all before it, may have left by then.
    pub(super) fn compared(&self, leaving: &mut Leaving<'_>) -> Result<Vec<Compared>> {
        loop {
            // Spoiled backups are made anew where the device still has the bytes.
            if let Some(compared) = self.compare(leaving)? {
                return Ok(compared);
            }
        }
    }

    /// One attempt; `None` when spoiled backups had to be dropped.
    fn compare(&self, leaving: &mut Leaving<'_>) -> Result<Option<Vec<Compared>>> {
        let (shared, saves) = (self.shared, self.saves);
        let mut compared = vec![Compared::default(); saves.len()];
        let fast_digests = shared.driver().info().fast_digests;
        let (queries, sampled) = shared.lock_state().queries(saves, fast_digests, &mut compared);
        let broken = self.compare_pieces(&queries, &mut compared, leaving)?;
        if !self.are_changes(&compared, leaving)? {
            return Ok(None);
        }
        if let Some((DigestQuery { turn, granule, .. }, digests)) = broken {
            return Err(shared.immutable_changed(&saves[turn], granule, digests));
        }
        let mut state = shared.lock_state();
        sampled.into_iter().for_each(|tag| state.tags_mut().get_mut(tag).note_check());
        for (save, Compared { kept, found, .. }) in saves.iter().zip(&mut compared) {
            kept.sort_unstable();
            found.sort_unstable_by_key(|(granule, _)| *granule);
            state.backups_mut().mark_verified(save, kept);
        }
        Ok(Some(compared))
    }

    /// Returns the first promise that is broken, with the digests of the backup and of the device.
    fn compare_pieces(
        &self,
        queries: &[DigestQuery],
        compared: &mut [Compared],
        leaving: &mut Leaving<'_>,
    ) -> Result<Option<(DigestQuery, [Digest; 2])>> {
        let (pieces, mut end) = self.begin_digests(queries);
        let (mut broken, mut clean) = (None, 0);
        // All of them are awaited: nothing may be in flight when the sleep goes on, or ends.
        for (piece, digests) in pieces {
            let found = digests.wait().map_err(failed);
            end = end.and_then(|()| {
                let queries = &queries[piece];
                self.note(queries, found?, compared, &mut broken);
                let next = queries.last().map_or(0, |query| query.turn);
                self.leave_clean(&mut clean, next, compared, leaving)
            });
        }
        end.map(|()| broken)
    }

    /// In the order of the queries, spread over the streams. An error says that no further could be begun.
    fn begin_digests(&self, queries: &[DigestQuery]) -> (Vec<PieceDigests>, Result<()>) {
        let shared = self.shared;
        let chunk = shared.shape().granules(shared.shape().chunk_bytes);
        let share = queries.len().div_ceil(PIECES).max(chunk).max(1);
        let mut pieces = Vec::new();
        for (turn, of_piece) in queries.chunks(share).enumerate() {
            let next = |a: &DigestQuery, b: &DigestQuery| a.turn == b.turn && a.granule + 1 == b.granule;
            let range = |run: &[DigestQuery]| {
                shared.granule_range(&self.saves[run[0].turn], run[0].granule, run.len())
            };
            let ranges: Vec<DeviceRange> = of_piece.chunk_by(next).map(range).collect();
            match shared.driver().digest(shared.streams().save(turn), &ranges) {
                Ok(digests) => pieces.push((turn * share..turn * share + of_piece.len(), digests)),
                Err(error) => return (pieces, Err(failed(error))),
            }
        }
        (pieces, Ok(()))
    }

    fn note(
        &self,
        queries: &[DigestQuery],
        digests: Vec<Digest>,
        compared: &mut [Compared],
        broken: &mut Option<(DigestQuery, [Digest; 2])>,
    ) {
        let mut equal = Vec::new();
        for (query, found) in queries.iter().zip(digests) {
            let of_save = &mut compared[query.turn];
            of_save.found.push((query.granule, found));
            match query.stored {
                Some(stored) if stored == found => {
                    of_save.kept.push(query.granule);
                    equal.push(self.shared.granule_range(&self.saves[query.turn], query.granule, 1));
                }
                Some(stored) if query.is_promised => {
                    broken.get_or_insert((*query, [stored, found]));
                }
                _ => {}
            }
        }
        self.shared.lock_state().note_seen(equal);
    }

    /// Of the saves before `end`, the first `clean` equal their backups. Counts on, and unmaps what ends before the rest.
    fn leave_clean(
        &self,
        clean: &mut usize,
        end: usize,
        compared: &[Compared],
        leaving: &mut Leaving<'_>,
    ) -> Result<()> {
        let is_clean = |nth: usize| compared[nth].kept.len() == self.saves[nth].granules.len();
        while *clean < end && is_clean(*clean) {
            *clean += 1;
        }
        self.saves.get(*clean).map_or(Ok(()), |next| leaving.unmap_before(next.location))
    }

    /// Whether the backups to be overwritten are what was stored, so that differences are changes on the
    /// device. If not, drops the spoiled ones; what the device lacks too is lost.
    fn are_changes(&self, compared: &[Compared], leaving: &mut Leaving<'_>) -> Result<bool> {
        let shared = self.shared;
        let suspects: Vec<Suspect> = {
            let state = shared.lock_state();
            // A new extent replaces all that it overlaps.
            let unseen = |save: &Save| {
                let extent = DeviceRange::new(save.location.1, save.bytes);
                state.backups().unseen_in(save.tag, save.location.0, extent).collect::<Vec<_>>()
            };
            changed(self.saves, compared).flat_map(|(save, _)| unseen(save)).collect()
        };
        let granules: Vec<DeviceRange> = suspects.iter().map(|suspect| suspect.granule).collect();
        if shared.spoiled_of(suspects).map_err(failed)?.is_empty() {
            shared.lock_state().note_seen(granules);
            return Ok(true);
        }
        // What the device has serves in their place.
        leaving.put_back()?;
        let lost = shared.lose_spoiled(&tags_of(self.saves)).map_err(failed)?;
        if lost.is_empty() { Ok(false) } else { Err(PoolError::Lost { op: BACK_UP, lost }) }
    }
}

/// The saves of which some granules are to be copied.
pub(super) fn changed<'a, 'k>(
    saves: &'a [Save],
    compared: &'k [Compared],
) -> impl Iterator<Item = (&'a Save, &'k Compared)> + use<'a, 'k> {
    saves.iter().zip(compared).filter(|(save, compared)| compared.kept.len() < save.granules.len())
}

impl Shared {
    /// The tag's granules are compared from now on.
    fn immutable_changed(&self, save: &Save, granule: usize, digests: [Digest; 2]) -> PoolError {
        let [expected, found] = digests;
        let mut state = self.lock_state();
        let entry = state.tags_mut().get_mut(save.tag);
        entry.set_changes(Changes::Compared);
        let (tag, range) = (entry.name().clone(), self.granule_range(save, granule, 1));
        PoolError::ImmutableChanged { tag, range, expected, found }
    }
}

impl PoolState {
    /// The digests that a sleep needs, and the tags that are sampled. Skipped granules are kept at once.
    fn queries(
        &self,
        saves: &[Save],
        fast_digests: bool,
        compared: &mut [Compared],
    ) -> (Vec<DigestQuery>, BTreeSet<TagKey>) {
        let mut queries = Vec::new();
        let mut promised: BTreeMap<TagKey, Vec<DigestQuery>> = BTreeMap::new();
        for (turn, save) in saves.iter().enumerate() {
            let changes = self.tags().get(save.tag).changes();
            let backup = self.backups().get(save);
            for granule in save.granules.iter().copied() {
                let stored = backup.and_then(|backup| *backup.granules.get(granule)?);
                let digest = stored.map(|stored| stored.digest);
                let query = |stored, is_promised| DigestQuery { turn, granule, stored, is_promised };
                match changes {
                    Changes::Immutable if stored.is_some_and(|stored| stored.verified) => {
                        promised.entry(save.tag).or_default().push(query(digest, true));
                    }
                    // Where comparing costs as much as copying, copy.
                    _ if !fast_digests => {}
                    Changes::Volatile => queries.push(query(None, false)),
                    _ => queries.push(query(digest, false)),
                }
            }
        }
        let tags = promised.keys().copied().collect();
        // Each tag has its own sample: it may sleep alone or with others.
        for (tag, of_tag) in promised {
            let sample = Sample::of(self.tags().get(tag).checks(), of_tag.len() as u64);
            for (nth, query) in (0..).zip(of_tag) {
                if sample.takes(nth) {
                    queries.push(query);
                } else {
                    compared[query.turn].kept.push(query.granule);
                    compared[query.turn].unchecked += 1;
                }
            }
        }
        // What precedes a piece leaves while it is compared.
        queries.sort_unstable_by_key(|query| (query.turn, query.granule));
        (queries, tags)
    }
}
