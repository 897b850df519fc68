//! Copies of what sleeps in other devices' idle memory.
//!
//! A sleep makes them once its backups are current, and brokers hold them from then on, also while the tags are awake. So
//! an unchanged sleep copies none. A wake takes back what is still there, and reads it instead of the backup. What it has at
//! hand meanwhile is given up as well, if a broker asks.
//!
//! Promise: whatever fails here, sleeps and wakes do the same without. A copy is read only where its digests are those of
//! the backup, and all that it gives is compared. One that gave other bytes is not read again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::sync::Arc;

use crate::digest::Digest;
use crate::driver::{DriverError, DriverErrorKind, Pending};
use crate::lend::{BrokerError, Lent};
use crate::peer::Peer;
use crate::pool::parts::backups::Stored;
use crate::pool::parts::open_copies::{CopyAtHand, OpenCopies};
use crate::pool::parts::peer_copies::PeerCopy;
use crate::pool::shared::Shared;
use crate::pool::state::PoolState;
use crate::pool::tools::keys::{Location, SegmentKey, TagKey};
use crate::pool::tools::mapping::Mapping;
use crate::tag::TagState;

/// Copies of a pool at most, the largest chunks first: each is an open file of a broker.
const COPIES_MAX: usize = 512;

/// A chunk with the digests of its backup.
type WantedCopy = (Location, Vec<Option<Digest>>);

/// By the number of the peer.
type CopiesByPeer = BTreeMap<usize, Vec<CopyAtHand>>;

/// What a sleep has copied.
#[derive(Debug, Default)]
pub(super) struct PeerCopied {
    bytes: u64,
    /// Why some was not, where that is no lack of memory.
    refused: Option<String>,
}

impl PeerCopied {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    fn refuse(&mut self, peer: &Peer, error: &dyn Display) {
        self.refused.get_or_insert_with(|| format!("{}: {error}", peer.memory.memory_name()));
    }
}

impl Shared {
    /// Copies what no other device has as it is now, of what is `leaving` of these tags. All of it is mapped, with current
    /// backups.
    pub(super) fn copy_to_peers(&self, tags: &BTreeSet<TagKey>, leaving: &[Location]) -> PeerCopied {
        let mut copied = PeerCopied::default();
        // Where digests are slow, a copy that is not its backup's would be found late.
        if self.peers().is_empty() || !self.driver().info().fast_digests {
            return copied;
        }
        let (mut wanted, current) = self.lock_state().copies_wanted(tags, leaving);
        self.give_up_left_copies();
        wanted.extend(self.gone_of(&current).into_iter().map(|(location, copy)| (location, copy.digests)));
        wanted.sort_by_key(|(_, digests)| std::cmp::Reverse(digests.len()));
        wanted.truncate(COPIES_MAX.saturating_sub(self.lock_state().peer_copies().len()));
        let mut opened = Vec::new();
        for (peer, held) in self.made_at_peers(wanted, &mut copied) {
            let hand_over = self.opened().hand_over();
            let open = self.opened().add(peer, held);
            let announced = self.announce(peer, 0);
            drop(hand_over);
            match announced {
                Ok(()) => opened.push(open),
                Err(error) => {
                    copied.refuse(&self.peers()[peer], &error);
                    drop(self.opened().close(self.driver(), &open));
                }
            }
        }
        for open in opened {
            self.copy_to_peer(&open, &mut copied);
        }
        copied
    }

    fn copy_to_peer(&self, open: &Arc<OpenCopies>, copied: &mut PeerCopied) {
        let peer = &self.peers()[open.peer()];
        let mapped = self.opened().map(self.driver(), open);
        let is_mapped = mapped.map_err(|error| copied.refuse(peer, &error)).is_ok();
        let copies = open
            .write(|nth| self.streams().save(nth), |stream, part| self.driver().copy_within(stream, &[part]));
        // All are awaited: the bytes may change once the sleep is undone.
        for (location, copy) in copies {
            if let Err(error) = copy.and_then(Pending::wait) {
                copied.refuse(peer, &error);
                open.spoil(location.1);
            }
        }
        let _hand_over = self.opened().hand_over();
        let made = self.opened().close(self.driver(), open).filter(|_| is_mapped).unwrap_or_default();
        let bytes: u64 = made.iter().map(|held| held.copy.bytes).sum();
        match self.lend_copies(open.peer(), made) {
            Ok(()) => copied.bytes += bytes,
            Err(error) => copied.refuse(peer, &error),
        }
        // A broker that does not hear of it asks in vain.
        let _ = self.announce(open.peer(), 0);
    }

    /// Those of these that brokers have given up.
    fn gone_of(&self, current: &[(Location, PeerCopy)]) -> Vec<(Location, PeerCopy)> {
        let _hand_over = self.opened().hand_over();
        let (back, gone) = self.taken_back(current);
        for (peer, held) in back {
            // A refusal costs the copies.
            let _ = self.lend_copies(peer, held);
        }
        gone
    }

    /// Says what is at hand of a peer's, and will be, so that it is asked for.
    fn announce(&self, peer: usize, more_bytes: u64) -> Result<(), BrokerError> {
        self.peers()[peer].broker.announce(self.opened().bytes_of(peer) + more_bytes)
    }

    /// Memory for these, where other devices have some.
    fn made_at_peers(&self, wanted: Vec<WantedCopy>, copied: &mut PeerCopied) -> CopiesByPeer {
        let mut made = CopiesByPeer::new();
        if wanted.is_empty() {
            return made;
        }
        let mut idle: Vec<u64> = Vec::with_capacity(self.peers().len());
        for peer in self.peers() {
            let found = peer.memory.idle_bytes();
            found.as_ref().err().into_iter().for_each(|error| copied.refuse(peer, error));
            idle.push(found.unwrap_or(0));
        }
        let most = |idle: &[u64]| (0..idle.len()).max_by_key(|nth| idle[*nth]).unwrap_or(0);
        let mut peer = most(&idle);
        for (location, digests) in wanted {
            let bytes = digests.len() as u64 * self.shape().granule_bytes;
            // As many as fit on one: what a wake reads at once lies side by side.
            if idle[peer] < bytes {
                peer = most(&idle);
            }
            while idle[peer] >= bytes {
                match self.peers()[peer].memory.create(bytes) {
                    Ok(descriptor) => {
                        idle[peer] -= bytes;
                        let copy = PeerCopy { peer, bytes, digests };
                        made.entry(peer).or_default().push(CopyAtHand { location, copy, descriptor });
                        break;
                    }
                    // It has less than it says.
                    Err(DriverError { kind: DriverErrorKind::OutOfMemory { .. }, .. }) => idle[peer] = 0,
                    Err(error) => {
                        idle[peer] = 0;
                        copied.refuse(&self.peers()[peer], &error);
                    }
                }
                peer = most(&idle);
            }
        }
        made
    }

    /// By peer, and those that are gone. A broker that fails has nothing any more, and no further one is asked.
    fn taken_back(&self, known: &[(Location, PeerCopy)]) -> (CopiesByPeer, Vec<(Location, PeerCopy)>) {
        let (mut back, mut gone) = (CopiesByPeer::new(), Vec::new());
        for (peer, Peer { broker, .. }) in self.peers().iter().enumerate() {
            let mut of_peer: BTreeMap<u64, &(Location, PeerCopy)> =
                known.iter().filter(|(_, copy)| copy.peer == peer).map(|known| (known.0.1, known)).collect();
            if of_peer.is_empty() {
                continue;
            }
            let ids: Vec<u64> = of_peer.keys().copied().collect();
            let taken = broker.take_back(&ids);
            let has_failed = taken.is_err();
            for Lent { id, bytes, descriptor, .. } in taken.unwrap_or_default() {
                if let Some((location, copy)) = of_peer.remove(&id).filter(|(_, copy)| copy.bytes == bytes) {
                    let held = CopyAtHand { location: *location, copy: copy.clone(), descriptor };
                    back.entry(peer).or_default().push(held);
                }
            }
            gone.extend(of_peer.into_values().cloned());
            if has_failed {
                break;
            }
        }
        let mut state = self.lock_state();
        gone.iter().for_each(|(location, _)| state.peer_copies_mut().forget(*location));
        drop(state);
        (back, gone)
    }

    /// Gives copies to their broker. What it does not take is gone.
    fn lend_copies(&self, peer: usize, held: Vec<CopyAtHand>) -> Result<(), BrokerError> {
        let (mut lent, mut copies) = (Vec::new(), Vec::new());
        for CopyAtHand { location, copy, descriptor } in held {
            // Losing it costs least of all.
            lent.push(Lent { id: location.1, bytes: copy.bytes, is_dropped: true, descriptor });
            copies.push((location, copy));
        }
        let answer = if lent.is_empty() { Ok(()) } else { self.peers()[peer].broker.lend(lent) };
        let mut state = self.lock_state();
        for (location, copy) in copies {
            match answer {
                Ok(()) => state.peer_copies_mut().insert(location, copy),
                Err(_) => state.peer_copies_mut().forget(location),
            }
        }
        answer
    }

    /// Maps the copies of these tags that are still there, and not in place anyway.
    pub(super) fn open_copies(&self, tags: &[TagKey]) -> Vec<Arc<OpenCopies>> {
        if self.peers().is_empty() {
            return Vec::new();
        }
        let known = self.lock_state().copies_of(tags);
        let hand_over = self.opened().hand_over();
        for peer in 0..self.peers().len() {
            let of_peer = known.iter().filter(|(_, copy)| copy.peer == peer);
            let bytes: u64 = of_peer.map(|(_, copy)| copy.bytes).sum();
            if bytes > 0 {
                // A broker that does not hear of it asks in vain.
                let _ = self.announce(peer, bytes);
            }
        }
        let (back, _) = self.taken_back(&known);
        let opened: Vec<Arc<OpenCopies>> =
            back.into_iter().map(|(peer, held)| self.opened().add(peer, held)).collect();
        drop(hand_over);
        // What cannot be mapped is not read.
        opened.iter().for_each(|open| _ = self.opened().map(self.driver(), open));
        opened
    }

    /// Nothing is to be queued there any more. The brokers have the copies again.
    pub(super) fn close_copies(&self, open: Vec<Arc<OpenCopies>>) {
        for open in open {
            let peer = open.peer();
            let _hand_over = self.opened().hand_over();
            let Some(mut held) = self.opened().close(self.driver(), &open) else { continue };
            let mut state = self.lock_state();
            held.retain(|held| state.peer_copies().get(held.location) == Some(&held.copy));
            let kept: BTreeSet<Location> = held.iter().map(|held| held.location).collect();
            let gone = open.locations().iter().filter(|location| !kept.contains(location));
            gone.for_each(|location| state.peer_copies_mut().forget(*location));
            drop(state);
            // A refusal costs the copies.
            let _ = self.lend_copies(peer, held);
            let _ = self.announce(peer, 0);
        }
    }

    /// Has brokers give up what is of no more use; without locks.
    pub(in crate::pool) fn give_up_left_copies(&self) {
        let left = self.lock_state().peer_copies_mut().take_left();
        for (nth, Peer { broker, .. }) in self.peers().iter().enumerate() {
            let ids: Vec<u64> = left.iter().filter(|(peer, _)| *peer == nth).map(|(_, id)| *id).collect();
            if !ids.is_empty() {
                // A broker that fails has nothing any more.
                drop(broker.take_back(&ids));
            }
        }
    }
}

impl PoolState {
    /// Chunks that have backups and no copy of the same bytes; and the copies that have. Other copies of their
    /// tags, and those of tags without blocks, are of no more use.
    fn copies_wanted(
        &mut self,
        tags: &BTreeSet<TagKey>,
        leaving: &[Location],
    ) -> (Vec<WantedCopy>, Vec<(Location, PeerCopy)>) {
        let (mut wanted, mut current) = (Vec::new(), BTreeMap::new());
        let keys = tags.iter().flat_map(|tag| self.heap().segments().keys_of(*tag));
        let mut keys: BTreeSet<SegmentKey> = keys.collect();
        let digests: BTreeMap<SegmentKey, BTreeMap<u64, Digest>> =
            keys.iter().map(|key| (*key, self.digests_of(*key))).collect();
        let granule_bytes = self.heap().shape().granule_bytes;
        for location in leaving {
            let mapping = self.heap().segments().mapping(*location).filter(Mapping::is_mapped);
            let Some((mapping, of_segment)) = mapping.zip(digests.get(&location.0)) else { continue };
            let range = mapping.range;
            let is_large = range.bytes >= self.heap().shape().large_bytes();
            if !is_large || of_segment.range(range.addr..range.end()).next().is_none() {
                continue;
            }
            let granules = (range.addr..range.end()).step_by(usize::try_from(granule_bytes).unwrap_or(1));
            let of_chunk: Vec<Option<Digest>> =
                granules.map(|granule| of_segment.get(&granule).copied()).collect();
            let copy = self.peer_copies().get(*location);
            match copy.filter(|copy| copy.bytes == range.bytes && copy.digests == of_chunk) {
                Some(copy) => _ = current.insert(*location, copy.clone()),
                None => wanted.push((*location, of_chunk)),
            }
        }
        let tags: Vec<TagKey> = self.tags().iter().map(|(tag, _)| tag).collect();
        for tag in tags.into_iter().filter(|tag| self.heap().live_of(*tag).live_blocks == 0) {
            keys.extend(self.heap().segments().keys_of(tag));
        }
        for key in keys {
            let copies = self.peer_copies().of_segment(key).map(|(location, _)| location);
            let old: Vec<Location> = copies.filter(|location| !current.contains_key(location)).collect();
            old.into_iter().for_each(|location| self.peer_copies_mut().leave(location));
        }
        (wanted, current.into_iter().collect())
    }

    /// By address of the granule.
    fn digests_of(&self, key: SegmentKey) -> BTreeMap<u64, Digest> {
        let granule_bytes = self.heap().shape().granule_bytes;
        let Some(tag) = self.heap().segments().tag_of(key) else { return BTreeMap::new() };
        // A wake reads ahead from a disk, whatever is elsewhere.
        let extents = self.backups().of_segment(tag, key);
        let in_memory = extents.filter(|(_, backup)| backup.buffer.disk_bytes() == 0);
        let granules = in_memory.flat_map(|(extent, backup)| {
            let stored = (0..).zip(&backup.granules);
            stored.filter_map(move |(nth, stored)| {
                let Stored { digest, .. } = (*stored)?;
                Some((extent.addr + nth * granule_bytes, digest))
            })
        });
        granules.collect()
    }

    /// Those of tags with backups whose chunks have not come back.
    fn copies_of(&self, tags: &[TagKey]) -> Vec<(Location, PeerCopy)> {
        let tags = tags.iter().filter(|tag| self.tags().get(**tag).state() == TagState::AsleepBackedUp);
        let keys = tags.flat_map(|tag| self.heap().segments().keys_of(*tag));
        let copies = keys.flat_map(|key| self.peer_copies().of_segment(key));
        let absent = copies.filter(|(location, _)| !self.lent().has_come_back(*location));
        absent.map(|(location, copy)| (location, copy.clone())).collect()
    }

    /// Those of a tag that was dropped.
    pub(super) fn leave_copies(&mut self, tag: TagKey) {
        let keys = self.heap().segments().keys_of(tag);
        keys.into_iter().for_each(|key| self.peer_copies_mut().leave_segment(key));
    }
}
