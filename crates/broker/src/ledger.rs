//! Who lends what, and what becomes of it: a broker's state without sockets and without a clock.
//!
//! Chunks whose bytes were dropped leave first, by the oldest lender first: no wake copies them. Then leave the others,
//! then the asker's own, and never more than an ask needs. Owners that announced memory are asked then, once per ask,
//! oldest first, and no ask outlives its deadline. Memory that is freed is dropped before the answer exists.

mod chunk;
mod lent;
mod pending;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::protocol::{Asked, BrokerStatus, BrokerTotals, LENDER_BYTES_MAX, LenderStatus, Spared};
pub(crate) use chunk::{Chunk, ConnectionId, LedgerError};
use lent::Lent;
use pending::PendingAsk;

/// What is to be done outside.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Ask an owner, on its second connection.
    GiveUp { events: ConnectionId, ask: u64, bytes: u64 },
    /// Answer an ask.
    Answer { client: ConnectionId, asked: Asked },
    /// End a second connection, whose first has ended.
    Close { events: ConnectionId },
}

/// All clients with what they lend.
#[derive(Debug)]
pub(crate) struct Ledger<M> {
    clients: BTreeMap<ConnectionId, Lender<M>>,
    asks: BTreeMap<u64, PendingAsk>,
    asked: u64,
    totals: BrokerTotals,
}

#[derive(Debug)]
struct Lender<M> {
    device: String,
    name: String,
    pid: u32,
    lent: Lent<M>,
    /// Since something is lent without a break.
    since: Duration,
    announced_bytes: u64,
    announced_at: Duration,
    events: Option<ConnectionId>,
}

impl<M> Default for Ledger<M> {
    fn default() -> Self {
        let totals = BrokerTotals::default();
        Self { clients: BTreeMap::new(), asks: BTreeMap::new(), asked: 0, totals }
    }
}

impl<M> Ledger<M> {
    pub(crate) fn join(&mut self, client: ConnectionId, device: String, name: String, pid: u32) {
        let zero = Duration::ZERO;
        let lender = Lender {
            device,
            name,
            pid,
            lent: Lent::default(),
            since: zero,
            announced_bytes: 0,
            announced_at: zero,
            events: None,
        };
        self.clients.insert(client, lender);
    }

    /// The process of a client.
    pub(crate) fn pid(&self, client: ConnectionId) -> Option<u32> {
        self.clients.get(&client).map(|lender| lender.pid)
    }

    /// A client's second connection. False: there is no such client, or it has one.
    pub(crate) fn listen(&mut self, client: ConnectionId, events: ConnectionId) -> bool {
        let free = self.clients.get_mut(&client).filter(|lender| lender.events.is_none());
        free.map(|lender| lender.events = Some(events)).is_some()
    }

    /// A client's second connection has ended: it can be asked no more.
    pub(crate) fn stop_listening(&mut self, client: ConnectionId, now: Duration) -> Vec<Effect> {
        if let Some(lender) = self.clients.get_mut(&client) {
            lender.events = None;
        }
        self.forget_owner(client, now)
    }

    /// A client has ended. What it lends is dropped.
    pub(crate) fn leave(&mut self, client: ConnectionId, now: Duration) -> Vec<Effect> {
        let Some(lender) = self.clients.remove(&client) else { return Vec::new() };
        self.asks.retain(|_, ask| ask.client() != client);
        let mut effects = self.forget_owner(client, now);
        effects.extend(lender.events.map(|events| Effect::Close { events }));
        effects
    }

    fn forget_owner(&mut self, owner: ConnectionId, now: Duration) -> Vec<Effect> {
        let left: Vec<u64> =
            self.asks.iter_mut().filter_map(|(id, ask)| ask.forget(owner).then_some(*id)).collect();
        let mut effects = Vec::new();
        left.into_iter().for_each(|ask| self.advance(ask, now, &mut effects));
        effects
    }

    /// Adds to what a client lends, all or nothing.
    pub(crate) fn lend(
        &mut self,
        client: ConnectionId,
        chunks: Vec<Chunk<M>>,
        now: Duration,
    ) -> Result<(), LedgerError> {
        let Some(lender) = self.clients.get_mut(&client) else { return Ok(()) };
        let bytes = lender.lent.check(&chunks)?;
        if lender.lent.is_empty() {
            lender.since = now;
        }
        chunks.into_iter().for_each(|chunk| lender.lent.insert(chunk));
        add(&mut self.totals.lent_bytes, bytes);
        Ok(())
    }

    /// What a client lends and what is still there, of these ids or of all.
    pub(crate) fn take_back(&mut self, client: ConnectionId, ids: Option<&[u64]>) -> Vec<Chunk<M>> {
        let Some(lender) = self.clients.get_mut(&client) else { return Vec::new() };
        let back = match ids {
            Some(ids) => lender.lent.take(ids),
            None => lender.lent.drain(),
        };
        add(&mut self.totals.brought_back_bytes, back.iter().map(|chunk| chunk.bytes).sum());
        back
    }

    /// Replaces what a client has announced.
    pub(crate) fn announce(
        &mut self,
        client: ConnectionId,
        bytes: u64,
        now: Duration,
    ) -> Result<(), LedgerError> {
        if bytes > LENDER_BYTES_MAX {
            return Err(LedgerError::Announced { bytes });
        }
        if let Some(lender) = self.clients.get_mut(&client) {
            if lender.announced_bytes == 0 {
                lender.announced_at = now;
            }
            lender.announced_bytes = bytes;
        }
        Ok(())
    }

    /// Frees `bytes` on the client's device. Owners are asked if that is not enough and the deadline is later than now.
    pub(crate) fn ask(
        &mut self,
        client: ConnectionId,
        bytes: u64,
        spared: Spared,
        now: Duration,
        deadline: Duration,
    ) -> Vec<Effect> {
        self.asked += 1;
        self.asks.insert(self.asked, PendingAsk::new(client, bytes, spared, deadline));
        let mut effects = Vec::new();
        self.advance(self.asked, now, &mut effects);
        effects
    }

    /// Whether a client's ask has no answer yet.
    pub(crate) fn is_waiting(&self, client: ConnectionId) -> bool {
        self.asks.values().any(|ask| ask.client() == client)
    }

    /// An owner's answer. One that nothing waits for changes nothing.
    pub(crate) fn gave_up(
        &mut self,
        owner: ConnectionId,
        ask: u64,
        bytes: u64,
        now: Duration,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let bytes = bytes.min(LENDER_BYTES_MAX);
        let is_awaited = self.asks.get_mut(&ask).is_some_and(|ask| ask.add_given_up(owner, bytes));
        if is_awaited {
            add(&mut self.totals.given_up_bytes, bytes);
            self.advance(ask, now, &mut effects);
        }
        effects
    }

    /// Answers the asks whose deadline has come.
    pub(crate) fn expire(&mut self, now: Duration) -> Vec<Effect> {
        let late = self.asks.iter().filter(|(_, ask)| ask.deadline() <= now);
        let late: Vec<u64> = late.map(|(id, _)| *id).collect();
        let mut effects = Vec::new();
        late.into_iter().for_each(|ask| self.advance(ask, now, &mut effects));
        effects
    }

    /// When [`Self::expire`] has something to do.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.asks.values().map(PendingAsk::deadline).min()
    }

    pub(crate) fn status(&self, now: Duration) -> BrokerStatus {
        let has_some = |lender: &&Lender<M>| !lender.lent.is_empty() || lender.announced_bytes > 0;
        let lenders = self.clients.values().filter(has_some);
        let lenders = lenders.map(|lender| LenderStatus {
            device: lender.device.clone(),
            name: lender.name.clone(),
            pid: lender.pid,
            lent_bytes: lender.lent.bytes(),
            chunks: lender.lent.len(),
            announced_bytes: lender.announced_bytes,
            lent_s: (!lender.lent.is_empty()).then(|| now.saturating_sub(lender.since).as_secs()),
        });
        BrokerStatus {
            pid: std::process::id(),
            lenders: lenders.collect(),
            totals: self.totals,
            last_problem: None,
        }
    }

    /// Takes an ask as far as it comes now, and answers it if no owner is left to wait for.
    fn advance(&mut self, id: u64, now: Duration, effects: &mut Vec<Effect>) {
        let Some(mut ask) = self.asks.remove(&id) else { return };
        self.take_lent(&mut ask);
        if now < ask.deadline() {
            self.ask_owners(id, &mut ask, effects);
        }
        if now >= ask.deadline() || ask.is_over() {
            effects.push(Effect::Answer { client: ask.client(), asked: ask.finish() });
        } else {
            self.asks.insert(id, ask);
        }
    }

    fn take_lent(&mut self, ask: &mut PendingAsk) {
        let order = self.neighbours(ask, |lender| (!lender.lent.is_empty()).then_some(lender.since));
        let own = ask.client();
        let (others, own): (Vec<ConnectionId>, Vec<_>) = order.into_iter().partition(|id| *id != own);
        let before = ask.freed_bytes();
        let own = if ask.spares_asker() { Vec::new() } else { own };
        for (order, is_dropped) in [(&others, true), (&others, false), (&own, true), (&own, false)] {
            for id in order {
                if let Some(lender) = self.clients.get_mut(id) {
                    ask.free(&mut lender.lent, is_dropped);
                }
            }
        }
        add(&mut self.totals.taken_bytes, ask.freed_bytes() - before);
    }

    fn ask_owners(&mut self, id: u64, ask: &mut PendingAsk, effects: &mut Vec<Effect>) {
        let order = self.neighbours(ask, |lender| {
            (lender.announced_bytes > 0 && lender.events.is_some()).then_some(lender.announced_at)
        });
        for owner in order {
            let Some(lender) = self.clients.get_mut(&owner).filter(|_| owner != ask.client()) else {
                continue;
            };
            let bytes = ask.ask_owner(owner, lender.announced_bytes);
            let Some((bytes, events)) = bytes.zip(lender.events) else { continue };
            // Until it announces anew, no other ask counts on it.
            lender.announced_bytes -= bytes;
            effects.push(Effect::GiveUp { events, ask: id, bytes });
        }
    }

    /// Clients on the asker's device that it does not spare, and for which there is a time, by that time.
    fn neighbours(
        &self,
        ask: &PendingAsk,
        since: impl Fn(&Lender<M>) -> Option<Duration>,
    ) -> Vec<ConnectionId> {
        let device = self.clients.get(&ask.client()).map(|lender| &lender.device);
        let near = self.clients.iter().filter(|(_, lender)| Some(&lender.device) == device);
        let near = near.filter(|(_, lender)| !ask.spares(lender.pid));
        let order: BTreeSet<(Duration, ConnectionId)> =
            near.filter_map(|(id, lender)| Some((since(lender)?, *id))).collect();
        order.into_iter().map(|(_, id)| id).collect()
    }
}

fn add(sum: &mut u64, bytes: u64) {
    *sum = sum.saturating_add(bytes);
}
