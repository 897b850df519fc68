//! A ledger as plain lists that are searched anew each time.

use std::collections::BTreeMap;

use crate::protocol::{Ask, Spared};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ModelEffect {
    GiveUp {
        events: u64,
        ask: u64,
        bytes: u64,
    },
    /// Freed, given up, missing.
    Answer {
        client: u64,
        sums: (u64, u64, u64),
    },
    Close {
        events: u64,
    },
}

#[derive(Debug)]
struct ModelLender {
    id: u64,
    device: usize,
    lent: Vec<(u64, u64)>,
    since: u64,
    announced: u64,
    announced_at: u64,
    events: Option<u64>,
}

#[derive(Debug)]
struct ModelAsk {
    client: u64,
    bytes: u64,
    spared: Spared,
    deadline: u64,
    freed: u64,
    given: u64,
    asked: Vec<(u64, u64)>,
    waits: Vec<u64>,
}

#[derive(Debug, Default)]
pub(super) struct LedgerModel {
    lenders: Vec<ModelLender>,
    asks: BTreeMap<u64, ModelAsk>,
    totals: (u64, u64, u64, u64),
}

impl ModelLender {
    fn pid(&self) -> u32 {
        (self.id % 3) as u32
    }
}

impl ModelAsk {
    fn lacks(&self) -> u64 {
        self.bytes.saturating_sub(self.freed + self.given)
    }
}

/// Whether the bytes of a chunk were dropped: of every third.
pub(super) fn is_dropped(id: u64) -> bool {
    id % 3 == 1
}

impl LedgerModel {
    pub(super) fn join(&mut self, id: u64, device: usize) {
        let lent = Vec::new();
        let lender = ModelLender { id, device, lent, since: 0, announced: 0, announced_at: 0, events: None };
        self.lenders.push(lender);
    }

    pub(super) fn leave(&mut self, id: u64, now: u64) -> Vec<ModelEffect> {
        let at = self.lenders.iter().position(|lender| lender.id == id).unwrap();
        let lender = self.lenders.remove(at);
        self.asks.retain(|_, ask| ask.client != id);
        let mut effects = self.forget(id, now);
        effects.extend(lender.events.map(|events| ModelEffect::Close { events }));
        effects
    }

    pub(super) fn listen(&mut self, id: u64, events: u64) -> bool {
        let lender = self.of(id);
        lender.events.is_none() && lender.events.replace(events).is_none()
    }

    pub(super) fn stop_listening(&mut self, id: u64, now: u64) -> Vec<ModelEffect> {
        self.of(id).events = None;
        self.forget(id, now)
    }

    fn forget(&mut self, owner: u64, now: u64) -> Vec<ModelEffect> {
        let mut effects = Vec::new();
        for id in self.asks.keys().copied().collect::<Vec<_>>() {
            let ask = self.asks.get_mut(&id).unwrap();
            if ask.waits.contains(&owner) {
                ask.waits.retain(|other| *other != owner);
                self.advance(id, now, &mut effects);
            }
        }
        effects
    }

    pub(super) fn lend(&mut self, id: u64, chunks: &[(u64, u64)], now: u64) -> bool {
        let lender = self.of(id);
        let mut all = lender.lent.clone();
        for (id, bytes) in chunks {
            if *bytes == 0 || all.iter().any(|(other, _)| other == id) {
                return false;
            }
            all.push((*id, *bytes));
        }
        if lender.lent.is_empty() {
            lender.since = now;
        }
        lender.lent = all;
        self.totals.0 += chunks.iter().map(|(_, bytes)| bytes).sum::<u64>();
        true
    }

    pub(super) fn take_back(&mut self, id: u64, ids: Option<&[u64]>) -> Vec<(u64, u64)> {
        let lent = &mut self.of(id).lent;
        let is_wanted = |(id, _): &(u64, u64)| ids.is_none_or(|ids| ids.contains(id));
        let (mut lent, rest) = std::mem::take(lent).into_iter().partition::<Vec<_>, _>(is_wanted);
        self.of(id).lent = rest;
        lent.sort_unstable();
        self.totals.2 += lent.iter().map(|(_, bytes)| bytes).sum::<u64>();
        lent
    }

    pub(super) fn announce(&mut self, id: u64, bytes: u64, now: u64) {
        let lender = self.of(id);
        if lender.announced == 0 {
            lender.announced_at = now;
        }
        lender.announced = bytes;
    }

    pub(super) fn is_waiting(&self, client: u64) -> bool {
        self.asks.values().any(|ask| ask.client == client)
    }

    pub(super) fn ask(
        &mut self,
        (id, client): (u64, u64),
        bytes: u64,
        spared: Spared,
        now: u64,
        deadline: u64,
    ) -> Vec<ModelEffect> {
        let ask = ModelAsk {
            client,
            bytes,
            spared,
            deadline,
            freed: 0,
            given: 0,
            asked: Vec::new(),
            waits: Vec::new(),
        };
        self.asks.insert(id, ask);
        let mut effects = Vec::new();
        self.advance(id, now, &mut effects);
        effects
    }

    pub(super) fn gave_up(&mut self, owner: u64, ask: u64, bytes: u64, now: u64) -> Vec<ModelEffect> {
        let mut effects = Vec::new();
        if let Some(pending) = self.asks.get_mut(&ask).filter(|pending| pending.waits.contains(&owner)) {
            pending.waits.retain(|other| *other != owner);
            pending.given += bytes;
            self.totals.3 += bytes;
            self.advance(ask, now, &mut effects);
        }
        effects
    }

    pub(super) fn expire(&mut self, now: u64) -> Vec<ModelEffect> {
        let mut effects = Vec::new();
        for id in self.asks.keys().copied().collect::<Vec<_>>() {
            if self.asks[&id].deadline <= now {
                self.advance(id, now, &mut effects);
            }
        }
        effects
    }

    fn advance(&mut self, id: u64, now: u64, effects: &mut Vec<ModelEffect>) {
        let mut ask = self.asks.remove(&id).unwrap();
        let device = self.of(ask.client).device;
        self.take(&mut ask, device);
        let mut owners: Vec<&mut ModelLender> =
            self.lenders.iter_mut().filter(|owner| !ask.spared.processes.contains(&owner.pid())).collect();
        owners.sort_by_key(|owner| (owner.announced_at, owner.id));
        for owner in owners {
            let Some(events) = owner.events else { continue };
            let was_asked = ask.asked.iter().any(|(other, _)| *other == owner.id);
            if now >= ask.deadline || owner.device != device || owner.id == ask.client || was_asked {
                continue;
            }
            let awaited = ask.asked.iter().filter(|(other, _)| ask.waits.contains(other));
            let bytes =
                ask.lacks().saturating_sub(awaited.map(|(_, bytes)| bytes).sum()).min(owner.announced);
            if bytes > 0 {
                owner.announced -= bytes;
                ask.asked.push((owner.id, bytes));
                ask.waits.push(owner.id);
                effects.push(ModelEffect::GiveUp { events, ask: id, bytes });
            }
        }
        if ask.lacks() > 0 && !ask.waits.is_empty() && now < ask.deadline {
            self.asks.insert(id, ask);
            return;
        }
        let asked: u64 = ask.asked.iter().map(|(_, bytes)| bytes).sum();
        let missing = if ask.bytes == Ask::ALL { asked.saturating_sub(ask.given) } else { ask.lacks() };
        let sums = (ask.freed, ask.given, missing);
        effects.push(ModelEffect::Answer { client: ask.client, sums });
    }

    fn take(&mut self, ask: &mut ModelAsk, device: usize) {
        let is_near = |lender: &&mut ModelLender| {
            let is_spared = ask.spared.asker && lender.id == ask.client;
            lender.device == device && !is_spared && !ask.spared.processes.contains(&lender.pid())
        };
        let mut lenders: Vec<&mut ModelLender> = self.lenders.iter_mut().filter(is_near).collect();
        lenders.sort_by_key(|lender| (lender.id == ask.client, lender.since, lender.id));
        // By what is lost, and then by lenders as they are.
        let of = |is_own: bool, was_dropped: bool| (is_own, !was_dropped);
        for wanted in [of(false, true), of(false, false), of(true, true), of(true, false)] {
            for lender in &mut lenders {
                lender.lent.sort_unstable_by_key(|(id, bytes)| (*bytes, *id));
                while ask.lacks() > 0 {
                    let lent = lender.lent.iter().enumerate();
                    let fits = |id: u64| of(lender.id == ask.client, is_dropped(id)) == wanted;
                    let mut lent: Vec<_> = lent.filter(|(_, (id, _))| fits(*id)).collect();
                    let enough = lent.iter().position(|(_, (_, bytes))| *bytes >= ask.lacks());
                    let Some(last) = lent.pop() else { break };
                    let at = enough.and_then(|nth| lent.get(nth).copied()).unwrap_or(last).0;
                    let (_, bytes) = lender.lent.remove(at);
                    ask.freed += bytes;
                    self.totals.1 += bytes;
                }
            }
        }
    }

    /// Device, bytes, chunks, announced bytes and the time of lending of those that have some.
    pub(super) fn rows(&self, now: u64) -> Vec<(String, u64, usize, u64, Option<u64>)> {
        let mut rows = Vec::new();
        for lender in &self.lenders {
            let bytes = lender.lent.iter().map(|(_, bytes)| bytes).sum();
            let lent_s = (bytes > 0).then(|| now - lender.since);
            if bytes > 0 || lender.announced > 0 {
                rows.push((lender.device.to_string(), bytes, lender.lent.len(), lender.announced, lent_s));
            }
        }
        rows
    }

    /// How many chunks are lent.
    pub(super) fn chunks(&self) -> usize {
        self.lenders.iter().map(|lender| lender.lent.len()).sum()
    }

    pub(super) fn deadline(&self) -> Option<u64> {
        self.asks.values().map(|ask| ask.deadline).min()
    }

    /// Lent, taken, brought back, given up.
    pub(super) fn totals(&self) -> (u64, u64, u64, u64) {
        self.totals
    }

    fn of(&mut self, id: u64) -> &mut ModelLender {
        self.lenders.iter_mut().find(|lender| lender.id == id).unwrap()
    }
}
