//! An ask on its way: what it has got so far, what it still lacks, and which owners it waits for.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::chunk::ConnectionId;
use super::lent::Lent;
use crate::protocol::{Ask, Asked, Spared};

#[derive(Debug)]
pub(super) struct PendingAsk {
    client: ConnectionId,
    bytes: u64,
    spared: Spared,
    deadline: Duration,
    freed_bytes: u64,
    given_up_bytes: u64,
    /// All owners that were asked, and what was wanted of them.
    asked: BTreeMap<ConnectionId, u64>,
    waits_for: BTreeSet<ConnectionId>,
}

impl PendingAsk {
    pub(super) fn new(client: ConnectionId, bytes: u64, spared: Spared, deadline: Duration) -> Self {
        Self {
            client,
            bytes,
            spared,
            deadline,
            freed_bytes: 0,
            given_up_bytes: 0,
            asked: BTreeMap::new(),
            waits_for: BTreeSet::new(),
        }
    }

    pub(super) fn client(&self) -> ConnectionId {
        self.client
    }

    /// Whether this process keeps what it has.
    pub(super) fn spares(&self, pid: u32) -> bool {
        self.spared.processes.contains(&pid)
    }

    pub(super) fn spares_asker(&self) -> bool {
        self.spared.asker
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// What was lent and is now freed.
    pub(super) fn freed_bytes(&self) -> u64 {
        self.freed_bytes
    }

    fn lacking_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.freed_bytes.saturating_add(self.given_up_bytes))
    }

    /// Frees chunks whose bytes were dropped, or others: the largest first, but the smallest that is enough alone.
    pub(super) fn free<M>(&mut self, lent: &mut Lent<M>, is_dropped: bool) {
        while self.lacking_bytes() > 0 {
            let Some(chunk) = lent.take_towards(self.lacking_bytes(), is_dropped) else { break };
            self.freed_bytes += chunk.bytes;
        }
    }

    /// What to ask an owner for that could give up so much. `None`: nothing, or it was asked before.
    pub(super) fn ask_owner(&mut self, owner: ConnectionId, could_bytes: u64) -> Option<u64> {
        let under_way: u64 = self.waits_for.iter().filter_map(|owner| self.asked.get(owner)).sum();
        let bytes = self.lacking_bytes().saturating_sub(under_way).min(could_bytes);
        if bytes == 0 || self.asked.contains_key(&owner) {
            return None;
        }
        self.asked.insert(owner, bytes);
        self.waits_for.insert(owner);
        Some(bytes)
    }

    /// An owner's answer. False: none is awaited.
    pub(super) fn add_given_up(&mut self, owner: ConnectionId, bytes: u64) -> bool {
        let is_awaited = self.waits_for.remove(&owner);
        if is_awaited {
            self.given_up_bytes = self.given_up_bytes.saturating_add(bytes);
        }
        is_awaited
    }

    /// An owner will not answer. False: nothing waits for it.
    pub(super) fn forget(&mut self, owner: ConnectionId) -> bool {
        self.waits_for.remove(&owner)
    }

    pub(super) fn is_over(&self) -> bool {
        self.lacking_bytes() == 0 || self.waits_for.is_empty()
    }

    pub(super) fn finish(self) -> Asked {
        let asked_bytes: u64 = self.asked.values().sum();
        let missing_bytes = match self.bytes {
            Ask::ALL => asked_bytes.saturating_sub(self.given_up_bytes),
            _ => self.lacking_bytes(),
        };
        Asked { freed_bytes: self.freed_bytes, given_up_bytes: self.given_up_bytes, missing_bytes }
    }
}
