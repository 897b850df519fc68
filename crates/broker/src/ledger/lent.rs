//! The chunks of one lender, found by id, and by size among those that cost as much to lose.

use std::collections::{BTreeMap, BTreeSet};

use super::chunk::{Chunk, LENDER_CHUNKS_MAX, LedgerError};
use crate::protocol::LENDER_BYTES_MAX;

#[derive(Debug)]
pub(super) struct Lent<M> {
    by_id: BTreeMap<u64, Chunk<M>>,
    /// Those whose bytes were dropped, and the others.
    by_size: [BTreeSet<(u64, u64)>; 2],
    bytes: u64,
}

impl<M> Default for Lent<M> {
    fn default() -> Self {
        Self { by_id: BTreeMap::new(), by_size: Default::default(), bytes: 0 }
    }
}

impl<M> Lent<M> {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// The bytes of chunks that can be added, all of them.
    pub(super) fn check(&self, chunks: &[Chunk<M>]) -> Result<u64, LedgerError> {
        let (mut ids, mut bytes) = (BTreeSet::new(), 0_u64);
        for chunk in chunks {
            if self.by_id.contains_key(&chunk.id) || !ids.insert(chunk.id) {
                return Err(LedgerError::Duplicate { id: chunk.id });
            }
            if chunk.bytes == 0 {
                return Err(LedgerError::Empty { id: chunk.id });
            }
            bytes = bytes.saturating_add(chunk.bytes);
        }
        if self.bytes.saturating_add(bytes) > LENDER_BYTES_MAX {
            return Err(LedgerError::Bytes { bytes });
        }
        if self.by_id.len() + chunks.len() > LENDER_CHUNKS_MAX {
            return Err(LedgerError::Chunks { chunks: chunks.len() });
        }
        Ok(bytes)
    }

    /// Adds a chunk that was checked.
    pub(super) fn insert(&mut self, chunk: Chunk<M>) {
        self.bytes += chunk.bytes;
        self.by_size[at(chunk.is_dropped)].insert((chunk.bytes, chunk.id));
        self.by_id.insert(chunk.id, chunk);
    }

    /// Of those whose bytes were dropped, or of the others: the smallest chunk that has `bytes`, or else the largest.
    pub(super) fn take_towards(&mut self, bytes: u64, is_dropped: bool) -> Option<Chunk<M>> {
        let of = &self.by_size[at(is_dropped)];
        let found = of.range((bytes, 0)..).next().or_else(|| of.last()).copied();
        self.remove(found?.1)
    }

    /// What is there of these.
    pub(super) fn take(&mut self, ids: &[u64]) -> Vec<Chunk<M>> {
        let ids: BTreeSet<u64> = ids.iter().copied().collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    pub(super) fn drain(&mut self) -> Vec<Chunk<M>> {
        std::mem::take(self).by_id.into_values().collect()
    }

    fn remove(&mut self, id: u64) -> Option<Chunk<M>> {
        let chunk = self.by_id.remove(&id)?;
        self.by_size[at(chunk.is_dropped)].remove(&(chunk.bytes, id));
        self.bytes -= chunk.bytes;
        Some(chunk)
    }
}

fn at(is_dropped: bool) -> usize {
    usize::from(!is_dropped)
}
