//! What a store has, and what calls do to it. It has neither connections nor a clock: time passes by [`Store::pass`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;

use super::calls::{Compare, KeySpan, Operation, PutCall, RangeCall, TxnCall};
use super::limits::StoreLimits;
use super::refusal::{
    COMPACTED, FUTURE, LEASE_EXISTS, LONG_LEASE, NO_KEY, NO_LEASE, Refusal, TOO_MANY, TWICE,
};

/// As many as etcd takes.
const OPERATIONS_MAX: usize = 128;
const TTL_MAX_S: i64 = 9_000_000_000;

/// What a key has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoredValue {
    pub(super) value: Bytes,
    pub(super) create_revision: u64,
    pub(super) mod_revision: u64,
    pub(super) version: u64,
    pub(super) lease: i64,
}

/// What a key had and has since a revision; `None` where it does not exist.
#[derive(Debug, Clone)]
pub(super) struct PastChange {
    pub(super) key: Bytes,
    pub(super) revision: u64,
    pub(super) now: Option<StoredValue>,
    before: Option<StoredValue>,
}

impl PastChange {
    fn bytes(&self) -> usize {
        let of = |value: &Option<StoredValue>| value.as_ref().map_or(0, |value| value.value.len());
        self.key.len() + of(&self.now) + of(&self.before)
    }
}

#[derive(Debug)]
struct StoredLease {
    ttl: Duration,
    ends: Duration,
    keys: BTreeSet<Bytes>,
}

/// What is found by a read.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) entries: Vec<(Bytes, StoredValue)>,
    pub(super) has_more: bool,
    /// Of all in its span, without a limit.
    pub(super) count: usize,
}

/// What an operation of a transaction has done.
#[derive(Debug)]
pub(super) enum Done {
    Found(Found),
    Put,
    Deleted(usize),
}

/// The keys and leases of a fleet.
#[derive(Debug)]
pub(super) struct Store {
    cluster: u64,
    limits: StoreLimits,
    revision: u64,
    now: Duration,
    entries: BTreeMap<Bytes, StoredValue>,
    bytes: usize,
    leases: BTreeMap<i64, StoredLease>,
    next_lease: i64,
    past: VecDeque<PastChange>,
    past_bytes: usize,
    /// Changes and reads before it are forgotten.
    compacted: u64,
}

impl Store {
    /// An empty one, whose leases have other ids than those of another cluster.
    pub(super) fn new(cluster: u64, limits: StoreLimits) -> Self {
        Self {
            cluster,
            limits,
            revision: 1,
            now: Duration::ZERO,
            entries: BTreeMap::new(),
            bytes: 0,
            leases: BTreeMap::new(),
            next_lease: (cluster >> 2).cast_signed() + 1,
            past: VecDeque::new(),
            past_bytes: 0,
            compacted: 0,
        }
    }

    pub(super) fn cluster(&self) -> u64 {
        self.cluster
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// So much later. What is under a lease that is over is removed.
    pub(super) fn pass(&mut self, elapsed: Duration) {
        self.now += elapsed;
        let is_over = |(_, lease): &(&i64, &StoredLease)| lease.ends <= self.now;
        let over: Vec<i64> = self.leases.iter().filter(is_over).map(|(id, _)| *id).collect();
        for id in over {
            self.end(id);
        }
    }

    pub(super) fn range(&self, call: &RangeCall) -> Result<Found, Refusal> {
        self.check_range(call)?;
        Ok(self.found(call))
    }

    pub(super) fn txn(&mut self, call: &TxnCall) -> Result<(bool, Vec<(u64, Done)>), Refusal> {
        check(call)?;
        let has_succeeded = call.compare.iter().all(|compare| self.is_so(compare));
        let operations = if has_succeeded { &call.success } else { &call.failure };
        self.check_operations(operations)?;
        let next = self.revision + 1;
        let apply = |operation: &Operation| {
            let done = match operation {
                Operation::Range(range) => Done::Found(self.found(range)),
                Operation::Put(PutCall { key, value, lease }) => {
                    self.write(key, Some((value.clone(), *lease)), next);
                    Done::Put
                }
                Operation::Delete(span) => {
                    let keys: Vec<Bytes> = self.within(span).map(|(key, _)| key.clone()).collect();
                    keys.iter().for_each(|key| self.write(key, None, next));
                    Done::Deleted(keys.len())
                }
            };
            (self.revision, done)
        };
        Ok((has_succeeded, operations.iter().map(apply).collect()))
    }

    /// Returns its id, which is a new one for 0, and for how many seconds it is granted.
    pub(super) fn grant(&mut self, id: i64, ttl_s: i64) -> Result<(i64, i64), Refusal> {
        if ttl_s > TTL_MAX_S {
            return Err(LONG_LEASE);
        }
        if self.leases.contains_key(&id) {
            return Err(LEASE_EXISTS);
        }
        if self.leases.len() >= self.limits.leases {
            return Err(Refusal::full(self.limits.leases, "leases"));
        }
        let mut granted = id;
        while granted == 0 || id == 0 && self.leases.contains_key(&granted) {
            granted = self.next_lease;
            self.next_lease += 1;
        }
        let ttl_s = ttl_s.max(1);
        let ttl = Duration::from_secs(ttl_s.unsigned_abs());
        self.leases.insert(granted, StoredLease { ttl, ends: self.now + ttl, keys: BTreeSet::new() });
        Ok((granted, ttl_s))
    }

    /// For how many seconds it lasts from now on; 0 if it has ended.
    pub(super) fn keep_alive(&mut self, id: i64) -> u64 {
        let Some(lease) = self.leases.get_mut(&id) else { return 0 };
        lease.ends = self.now + lease.ttl;
        lease.ttl.as_secs()
    }

    /// How many seconds are left, and for how many it was granted; -1 and 0 if it has ended.
    pub(super) fn time_to_live(&self, id: i64) -> (i64, u64) {
        let Some(lease) = self.leases.get(&id) else { return (-1, 0) };
        (lease.ends.saturating_sub(self.now).as_secs().cast_signed(), lease.ttl.as_secs())
    }

    pub(super) fn revoke(&mut self, id: i64) -> Result<(), Refusal> {
        if self.end(id) { Ok(()) } else { Err(NO_LEASE) }
    }

    /// All changes in a span from a revision on. If some are forgotten, the first revision from which on none is.
    pub(super) fn changes(&self, span: &KeySpan, from: u64) -> Result<Vec<&PastChange>, u64> {
        if from < self.compacted {
            return Err(self.compacted);
        }
        let first = self.past.partition_point(|change| change.revision < from);
        Ok(self.past.range(first..).filter(|change| span.has(&change.key)).collect())
    }

    /// Forgets what was before a revision.
    pub(super) fn compact(&mut self, revision: u64) -> Result<(), Refusal> {
        match () {
            () if revision > self.revision => return Err(FUTURE),
            () if revision <= self.compacted => return Err(COMPACTED),
            () => self.compacted = revision,
        }
        while self.past.front().is_some_and(|change| change.revision < revision) {
            self.forget_one();
        }
        Ok(())
    }

    fn within<'a>(&'a self, span: &'a KeySpan) -> impl Iterator<Item = (&'a Bytes, &'a StoredValue)> {
        self.entries.range(span.key.clone()..).take_while(|(key, _)| span.has(key))
    }

    fn found(&self, call: &RangeCall) -> Found {
        let span = call.span();
        let mut all: BTreeMap<&Bytes, &StoredValue> = self.within(&span).collect();
        let revision = if call.revision == 0 { self.revision } else { call.revision };
        for change in self.past.iter().rev().take_while(|change| change.revision > revision) {
            match &change.before {
                _ if !span.has(&change.key) => {}
                Some(before) => drop(all.insert(&change.key, before)),
                None => drop(all.remove(&change.key)),
            }
        }
        let count = all.len();
        let wanted = |value: &StoredValue| !call.count_only && value.mod_revision >= call.min_mod_revision;
        let mut wanted = all.into_iter().filter(|(_, value)| wanted(value));
        let most = if call.limit == 0 { usize::MAX } else { call.limit };
        let entries = wanted.by_ref().take(most);
        let entries = entries.map(|(key, value)| match call.keys_only {
            true => (key.clone(), StoredValue { value: Bytes::new(), ..value.clone() }),
            false => (key.clone(), value.clone()),
        });
        Found { entries: entries.collect(), has_more: wanted.next().is_some(), count }
    }

    fn is_so(&self, compare: &Compare) -> bool {
        let has = self.entries.get(compare.key());
        match compare {
            Compare::Create { create_revision, .. } => {
                has.map_or(0, |has| has.create_revision) == *create_revision
            }
            Compare::Lease { lease, .. } => has.map_or(0, |has| has.lease) == *lease,
        }
    }

    fn check_range(&self, call: &RangeCall) -> Result<(), Refusal> {
        match call.revision {
            _ if call.key.is_empty() => Err(NO_KEY),
            revision if revision > self.revision => Err(FUTURE),
            revision if revision > 0 && revision < self.compacted => Err(COMPACTED),
            _ => Ok(()),
        }
    }

    /// Whether all of them can be carried out. What they remove makes room for what they put.
    fn check_operations(&self, operations: &[Operation]) -> Result<(), Refusal> {
        let spans = operations.iter().filter_map(|operation| match operation {
            Operation::Delete(span) => Some(span),
            Operation::Put(_) | Operation::Range(_) => None,
        });
        let removed: BTreeMap<&Bytes, &StoredValue> = spans.flat_map(|span| self.within(span)).collect();
        let mut keys = self.entries.len() - removed.len();
        let mut bytes =
            self.bytes - removed.iter().map(|(key, of)| key.len() + of.value.len()).sum::<usize>();
        for PutCall { key, value, lease } in operations.iter().filter_map(put) {
            if *lease != 0 && !self.leases.contains_key(lease) {
                return Err(NO_LEASE);
            }
            let before = self.entries.get(key);
            keys += usize::from(before.is_none());
            bytes += key.len() + value.len();
            bytes -= before.map_or(0, |before| key.len() + before.value.len());
        }
        for (has, most, what) in
            [(keys, self.limits.keys, "keys"), (bytes, self.limits.bytes, "bytes of keys and values")]
        {
            if has > most {
                return Err(Refusal::full(most, what));
            }
        }
        operations.iter().try_for_each(|operation| match operation {
            Operation::Range(range) => self.check_range(range),
            Operation::Put(_) | Operation::Delete(_) => Ok(()),
        })
    }

    fn write(&mut self, key: &Bytes, value: Option<(Bytes, i64)>, revision: u64) {
        let before = self.entries.remove(key);
        if let Some(before) = &before {
            self.bytes -= key.len() + before.value.len();
            if let Some(lease) = self.leases.get_mut(&before.lease) {
                lease.keys.remove(key);
            }
        }
        let now = value.map(|(value, lease)| StoredValue {
            value,
            create_revision: before.as_ref().map_or(revision, |before| before.create_revision),
            mod_revision: revision,
            version: before.as_ref().map_or(1, |before| before.version + 1),
            lease,
        });
        if let Some(now) = &now {
            self.bytes += key.len() + now.value.len();
            if let Some(lease) = self.leases.get_mut(&now.lease) {
                lease.keys.insert(key.clone());
            }
            self.entries.insert(key.clone(), now.clone());
        }
        self.revision = revision;
        let change = PastChange { key: key.clone(), revision, now, before };
        self.past_bytes += change.bytes();
        self.past.push_back(change);
        // A revision is kept or forgotten as a whole.
        while self.past.len() > self.limits.past || self.past_bytes > self.limits.past_bytes {
            let Some(first) = self.past.front().map(|change| change.revision) else { break };
            if first == revision {
                break;
            }
            self.compacted = self.compacted.max(first + 1);
            self.forget_one();
        }
    }

    fn forget_one(&mut self) {
        let bytes = self.past.pop_front().map_or(0, |change| change.bytes());
        self.past_bytes -= bytes;
    }

    /// Ends a lease; false if there is none.
    fn end(&mut self, id: i64) -> bool {
        let Some(lease) = self.leases.remove(&id) else { return false };
        let next = self.revision + 1;
        lease.keys.iter().for_each(|key| self.write(key, None, next));
        true
    }
}

/// What can be checked without a store.
fn check(call: &TxnCall) -> Result<(), Refusal> {
    let TxnCall { compare, success, failure } = call;
    if [compare.len(), success.len(), failure.len()].iter().any(|count| *count > OPERATIONS_MAX) {
        return Err(TOO_MANY);
    }
    let key = |operation: &Operation| match operation {
        Operation::Range(RangeCall { key, .. })
        | Operation::Put(PutCall { key, .. })
        | Operation::Delete(KeySpan { key, .. }) => key.is_empty(),
    };
    if compare.iter().any(|compare| compare.key().is_empty()) || success.iter().chain(failure).any(key) {
        return Err(NO_KEY);
    }
    for operations in [success, failure] {
        let mut once = BTreeSet::new();
        let is_removed = |key: &Bytes| {
            operations.iter().any(|other| matches!(other, Operation::Delete(span) if span.has(key)))
        };
        if operations.iter().filter_map(put).any(|PutCall { key, .. }| !once.insert(key) || is_removed(key)) {
            return Err(TWICE);
        }
    }
    Ok(())
}

fn put(operation: &Operation) -> Option<&PutCall> {
    match operation {
        Operation::Put(put) => Some(put),
        Operation::Range(_) | Operation::Delete(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(store: &mut Store, key: &str, lease: i64) -> u64 {
        let put = PutCall { key: key.to_owned().into(), value: Bytes::new(), lease };
        store.txn(&TxnCall { success: vec![Operation::Put(put)], ..TxnCall::default() }).unwrap();
        store.revision()
    }

    fn all() -> KeySpan {
        KeySpan { key: "/".into(), range_end: vec![0].into() }
    }

    #[test]
    fn a_lease_takes_its_keys_along_when_its_time_has_passed() {
        let mut store = Store::new(1 << 40, StoreLimits::default());
        let (lease, _) = store.grant(0, 10).unwrap();
        assert!(lease > 1);
        put(&mut store, "/leased", lease);
        let last = put(&mut store, "/kept", 0);
        store.pass(Duration::from_secs(9));
        assert_eq!((store.keep_alive(lease), store.time_to_live(lease)), (10, (10, 10)));
        store.pass(Duration::from_secs(9));
        assert_eq!(store.revision(), last);
        store.pass(Duration::from_secs(1));
        assert_eq!((store.keep_alive(lease), store.time_to_live(lease)), (0, (-1, 0)));
        let removed: Vec<_> = store.changes(&all(), last + 1).unwrap();
        assert!(matches!(&removed[..], [PastChange { key, now: None, .. }] if key == "/leased"));
        assert_eq!(store.revoke(lease), Err(NO_LEASE));
    }
}
