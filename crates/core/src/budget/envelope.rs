//! The envelope: one budget, and who has claimed how much of it.
//!
//! Whoever needs memory of a device (weights, activations, graph captures, key-value cache, a pool) claims it here
//! before taking it. What is claimed never exceeds the budget. A claim that is dropped is returned.
//!
//! A forked child has a copy of the ledger that means nothing, and perhaps one whose lock is held for ever: nothing of it
//! may be used there. Dropping a claim there does nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use super::cap::Share;
use super::rule::Budget;
use super::source::SourceName;
use crate::bytes::ByteSize;
use crate::tag::Tag;

/// A budget that is handed out by name. Cheap to clone; clones are the same envelope.
///
/// ```
/// use poorwill_core::{Tag, budget::Envelope};
///
/// let envelope = Envelope::new(10 << 30, 12 << 30);
/// let weights = envelope.claim(Tag::weights(), 8 << 30).unwrap();
/// let refused = envelope.claim(Tag::kv_cache(), 3 << 30).unwrap_err();
/// assert_eq!(refused.fits_bytes, 2 << 30);
/// drop(weights);
/// assert_eq!(envelope.unclaimed_bytes(), 10 << 30);
/// ```
#[derive(Debug, Clone)]
pub struct Envelope(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    ground: BudgetBasis,
    /// The process that the ledger is of.
    process: u32,
    ledger: Mutex<Ledger>,
}

/// What a budget was decided on, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetBasis {
    /// All of the budget, in bytes.
    pub budget_bytes: u64,
    /// What the budget was cut from, in bytes. `None` where nobody told.
    pub total_bytes: Option<u64>,
    /// Whose figure that is.
    pub total_from: Option<SourceName>,
    /// What was free when the budget was decided, in bytes.
    pub free_bytes: Option<u64>,
    /// What this process had in use then, in bytes.
    pub own_bytes: u64,
}

#[derive(Debug, Default)]
struct Ledger {
    next_id: u64,
    claims: BTreeMap<u64, Claimed>,
    /// Their sum: at most the budget.
    claimed_bytes: u64,
}

/// An entry of the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Claimed {
    /// Who claims.
    pub name: Tag,
    /// How much, in bytes.
    pub bytes: u64,
    /// Most that was measured for it, in bytes. `None` where nobody measures.
    pub peak_bytes: Option<u64>,
    /// Set where it is for what is in use already, which nobody can release.
    #[serde(skip)]
    pub in_use: Option<InUse>,
}

/// Whose use of a device a claim stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InUse {
    /// This process's, its context included: it stays.
    Own,
    /// Everybody's, as far as it keeps the budget from being had now: it changes as others come and go.
    Everybodys,
}

impl Envelope {
    /// Nothing is claimed yet of `budget_bytes`; `total_bytes` is what the budget was cut from, for messages.
    #[must_use]
    pub fn new(budget_bytes: u64, total_bytes: u64) -> Self {
        let total_bytes = Some(total_bytes.max(budget_bytes));
        Self::on(BudgetBasis { budget_bytes, total_bytes, total_from: None, free_bytes: None, own_bytes: 0 })
    }

    /// Nothing is claimed yet of a budget. `None` where it is not known.
    #[must_use]
    pub fn of(budget: &Budget) -> Option<Self> {
        let budget_bytes = budget.budget_bytes?;
        Some(Self::on(BudgetBasis {
            budget_bytes,
            total_bytes: budget.total_bytes,
            total_from: budget.total_from,
            free_bytes: budget.free_bytes,
            own_bytes: budget.process_used_bytes.unwrap_or(0),
        }))
    }

    fn on(ground: BudgetBasis) -> Self {
        Self(Arc::new(Inner { ground, process: std::process::id(), ledger: Mutex::default() }))
    }

    /// All of it, in bytes.
    #[must_use]
    pub fn budget_bytes(&self) -> u64 {
        self.0.ground.budget_bytes
    }

    /// What nobody has claimed, in bytes.
    #[must_use]
    pub fn unclaimed_bytes(&self) -> u64 {
        self.budget_bytes() - self.ledger().claimed_bytes
    }

    /// The claims, in the order in which they were made.
    #[must_use]
    pub fn claims(&self) -> Vec<Claimed> {
        self.ledger().claims.values().cloned().collect()
    }

    /// Claims `bytes` for `name`. Several claims may have one name.
    ///
    /// # Errors
    /// When fewer are unclaimed; nothing has changed then.
    pub fn claim(&self, name: Tag, bytes: u64) -> Result<Claim, ClaimError> {
        let mut ledger = self.ledger();
        let fits_bytes = self.budget_bytes() - ledger.claimed_bytes;
        if bytes > fits_bytes {
            return Err(self.refusal(&ledger, None, name, bytes));
        }
        Ok(self.enter(&mut ledger, name, bytes, None))
    }

    /// Claims all that is unclaimed, which may be nothing.
    pub fn claim_rest(&self, name: Tag) -> Claim {
        self.claim_up_to(name, u64::MAX)
    }

    /// Claims `bytes`, or what is unclaimed if that is less.
    pub fn claim_up_to(&self, name: Tag, bytes: u64) -> Claim {
        let mut ledger = self.ledger();
        let bytes = bytes.min(self.budget_bytes() - ledger.claimed_bytes);
        self.enter(&mut ledger, name, bytes, None)
    }

    /// Claims `bytes` for what is in use already, or what is unclaimed if that is less.
    pub fn claim_in_use(&self, whose: InUse, bytes: u64) -> Claim {
        let mut ledger = self.ledger();
        let bytes = bytes.min(self.budget_bytes() - ledger.claimed_bytes);
        self.enter(&mut ledger, Tag::in_use(), bytes, Some(whose))
    }

    fn enter(&self, ledger: &mut Ledger, name: Tag, bytes: u64, in_use: Option<InUse>) -> Claim {
        let id = ledger.next_id;
        ledger.next_id += 1;
        ledger.claimed_bytes += bytes;
        ledger.claims.insert(id, Claimed { name: name.clone(), bytes, peak_bytes: None, in_use });
        Claim { envelope: self.clone(), id, name }
    }

    /// Why `name`, which is `claim` if it has one already, cannot have so much.
    fn refusal(&self, ledger: &Ledger, claim: Option<u64>, name: Tag, asked_bytes: u64) -> ClaimError {
        let others = ledger.claims.iter().filter(|(id, _)| Some(**id) != claim);
        let claims: Vec<Claimed> = others.map(|(_, claimed)| claimed.clone()).collect();
        let others_bytes: u64 = claims.iter().map(|claimed| claimed.bytes).sum();
        let ground = self.0.ground;
        ClaimError { name, asked_bytes, fits_bytes: ground.budget_bytes - others_bytes, ground, claims }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // The ledger is changed by single insertions, removals and assignments: no panic leaves it half written.
        self.0.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of a budget that somebody has for as long as this lives.
#[derive(Debug)]
#[must_use = "a claim that is dropped is returned"]
pub struct Claim {
    envelope: Envelope,
    id: u64,
    name: Tag,
}

impl Claim {
    /// Who claims.
    #[must_use]
    pub fn name(&self) -> &Tag {
        &self.name
    }

    /// How much, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.read(|claimed| claimed.bytes)
    }

    /// Most that was measured for it, in bytes.
    #[must_use]
    pub fn peak_bytes(&self) -> Option<u64> {
        self.read(|claimed| claimed.peak_bytes)
    }

    /// By how much the peak exceeds the claim, in bytes.
    #[must_use]
    pub fn over_bytes(&self) -> u64 {
        self.read(|claimed| claimed.peak_bytes.unwrap_or(0).saturating_sub(claimed.bytes))
    }

    /// Notes what is in use for it now, in bytes.
    pub fn measured(&self, bytes: u64) {
        if let Some(claimed) = self.envelope.ledger().claims.get_mut(&self.id) {
            claimed.peak_bytes = claimed.peak_bytes.max(Some(bytes));
        }
    }

    /// Makes it `bytes` large.
    ///
    /// # Errors
    /// When fewer are unclaimed beside it; it stays as it was then.
    pub fn resize(&self, bytes: u64) -> Result<(), ClaimError> {
        let mut ledger = self.envelope.ledger();
        let held_bytes = ledger.claims.get(&self.id).map_or(0, |claimed| claimed.bytes);
        let others_bytes = ledger.claimed_bytes - held_bytes;
        if bytes > self.envelope.budget_bytes() - others_bytes {
            return Err(self.envelope.refusal(&ledger, Some(self.id), self.name.clone(), bytes));
        }
        if let Some(claimed) = ledger.claims.get_mut(&self.id) {
            claimed.bytes = bytes;
            ledger.claimed_bytes = others_bytes + bytes;
        }
        Ok(())
    }

    /// What it is a part of.
    #[must_use]
    pub fn envelope(&self) -> &Envelope {
        &self.envelope
    }

    /// Returns it; what dropping does, by name.
    pub fn release(self) {}

    fn read<T: Default>(&self, of: impl FnOnce(&Claimed) -> T) -> T {
        self.envelope.ledger().claims.get(&self.id).map(of).unwrap_or_default()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // In a forked child somebody may hold the lock for ever.
        if self.envelope.0.process == std::process::id() {
            let mut ledger = self.envelope.ledger();
            if let Some(claimed) = ledger.claims.remove(&self.id) {
                ledger.claimed_bytes -= claimed.bytes;
            }
        }
    }
}

/// A claim that does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimError {
    /// Who claims.
    pub name: Tag,
    /// How much was asked for, in bytes.
    pub asked_bytes: u64,
    /// What would have fitted, in bytes.
    pub fits_bytes: u64,
    /// The budget, and what it was decided on.
    pub ground: BudgetBasis,
    /// What the others have claimed.
    pub claims: Vec<Claimed>,
}

impl ClaimError {
    /// What all who claim need together, in bytes, without what is in use already.
    #[must_use]
    pub fn needed_bytes(&self) -> u64 {
        let others = self.claims.iter().filter(|claimed| claimed.in_use.is_none());
        others.map(|claimed| claimed.bytes).fold(self.asked_bytes, u64::saturating_add)
    }

    /// What the budget would have to be, in bytes.
    #[must_use]
    pub fn needed_budget_bytes(&self) -> u64 {
        let has_in_use = self.claims.iter().any(|claimed| claimed.in_use.is_some());
        let own_bytes = if has_in_use { self.ground.own_bytes } else { 0 };
        self.needed_bytes().saturating_add(own_bytes)
    }

    /// What would help, of what can: whoever does it succeeds, unless others change what they have.
    #[must_use]
    pub fn hint(&self) -> String {
        self.ways(true)
    }

    /// What would help to get so much, for who cannot take less.
    #[must_use]
    pub fn remedy(&self) -> String {
        self.ways(false)
    }

    fn ways(&self, or_less: bool) -> String {
        let BudgetBasis { budget_bytes, total_bytes, total_from, free_bytes, .. } = self.ground;
        let less = (or_less && self.fits_bytes > 0)
            .then(|| format!("claim at most {}", ByteSize(self.fits_bytes).rounded_down()));
        let is_anybodys = self.claims.iter().any(|claimed| claimed.in_use.is_none());
        let release = is_anybodys.then(|| "release a claim".to_owned());
        let needed_bytes = self.needed_budget_bytes();
        let needed = ByteSize(needed_bytes).rounded_up();
        let raise = match total_bytes {
            None => Some(format!("raise the budget to {needed}")),
            Some(total) => Share::that_makes(needed_bytes, total)
                .map(|share| format!("raise the budget to {needed} (a share of {share})")),
        };
        // What others have matters where it was taken off.
        let counts_free = self.claims.iter().any(|claimed| claimed.in_use == Some(InUse::Everybodys));
        let lacking = free_bytes.filter(|free| counts_free && self.needed_bytes() > *free);
        let (fact, way) = match (raise, lacking) {
            (None, _) => {
                let from = total_from.map_or_else(String::new, |from| format!(", by {from}"));
                let total = ByteSize(total_bytes.unwrap_or(budget_bytes));
                let fact =
                    format!("no budget would do: {needed} are needed, and there are {total} in all{from}");
                (Some(fact), None)
            }
            (Some(raise), Some(free)) => {
                let end = "end what else uses the device".to_owned();
                let way = if needed_bytes > budget_bytes { format!("{end} and {raise}") } else { end };
                (Some(format!("{} are free now", ByteSize(free).rounded_down())), Some(way))
            }
            (Some(raise), None) => (None, Some(raise)),
        };
        let ways: Vec<String> = less.into_iter().chain(release).chain(way).collect();
        let ways = match &ways[..] {
            [] => None,
            [way] => Some(way.clone()),
            [ways @ .., last] => Some(format!("{}, or {last}", ways.join(", "))),
        };
        fact.into_iter().chain(ways).collect::<Vec<_>>().join("; ")
    }
}

impl fmt::Display for ClaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, asked_bytes, fits_bytes, ground, claims } = self;
        // Two figures that differ by little must not look the same.
        let looks_same = ByteSize(*asked_bytes).to_string() == ByteSize(*fits_bytes).to_string();
        let asked = if looks_same { format!("{asked_bytes} B") } else { ByteSize(*asked_bytes).to_string() };
        let fits = if looks_same { format!("{fits_bytes} B") } else { ByteSize(*fits_bytes).to_string() };
        write!(
            f,
            "cannot claim {asked} for `{name}`: the budget is {}, of which ",
            ByteSize(ground.budget_bytes)
        )?;
        for (nth, claimed) in claims.iter().enumerate() {
            let comma = if nth == 0 { "" } else { ", " };
            write!(f, "{comma}`{}` has {}", claimed.name, ByteSize(claimed.bytes))?;
        }
        let and = if claims.is_empty() { "" } else { " and " };
        write!(f, "{and}{fits} would fit; {}", self.hint())
    }
}

impl std::error::Error for ClaimError {}

#[cfg(test)]
mod tests {
    use super::super::source::Fact;
    use super::*;

    const GIB: u64 = 1 << 30;

    fn tag(name: &str) -> Tag {
        name.parse().unwrap()
    }

    #[test]
    fn claims_are_named_refused_and_returned() {
        let envelope = Envelope::new(10 * GIB, 12 * GIB);
        let weights = envelope.claim(tag("weights"), 6 * GIB).unwrap();
        let graph = envelope.claim(tag("cudagraph"), GIB).unwrap();
        let refused = envelope.claim(tag("kv_cache"), 4 * GIB).unwrap_err();
        assert_eq!((refused.fits_bytes, refused.needed_budget_bytes()), (3 * GIB, 11 * GIB));
        assert_eq!(
            refused.to_string(),
            "cannot claim 4 GiB for `kv_cache`: the budget is 10 GiB, of which `weights` has 6 GiB, `cudagraph` has \
             1 GiB and 3 GiB would fit; claim at most 3 GiB, release a claim, or raise the budget to 11 GiB (a share \
             of 0.92)"
        );
        graph.release();
        let kv = envelope.claim(tag("kv_cache"), 4 * GIB).unwrap();
        assert_eq!(envelope.unclaimed_bytes(), 0);
        let refused = envelope.claim(tag("more"), 3 * GIB).unwrap_err().to_string();
        assert!(refused.contains("0 B would fit; no budget would do: 13 GiB are needed"), "{refused}");
        assert!(refused.ends_with("and there are 12 GiB in all; release a claim"), "{refused}");
        drop((weights, kv));
        assert_eq!((envelope.claims(), envelope.unclaimed_bytes()), (Vec::new(), 10 * GIB));
        let refused = envelope.claim(tag("all"), u64::MAX).unwrap_err();
        assert_eq!(refused.needed_bytes(), u64::MAX);
        assert!(refused.to_string().contains("of which 10 GiB would fit; no budget would do"), "{refused}");
    }

    #[test]
    fn figures_that_look_the_same_are_told_exactly() {
        let refused = Envelope::new(GIB, 2 * GIB).claim(tag("weights"), GIB + 1).unwrap_err().to_string();
        assert!(refused.contains("cannot claim 1073741825 B") && refused.contains("1073741824 B would fit"));
    }

    /// What a device of 24 GiB says whose neighbours use so much.
    fn shared(free_bytes: u64, own_bytes: u64, cap: &str) -> (Envelope, Claim) {
        let facts =
            [Fact::bytes(SourceName::CudaTotal, 24 * GIB), Fact::bytes(SourceName::CudaFree, free_bytes)];
        let budget = Budget::decide(&facts, Some(own_bytes), Some(cap.parse().unwrap()));
        let envelope = Envelope::of(&budget).unwrap();
        let in_use_bytes = budget.budget_bytes.unwrap() - budget.headroom_bytes.unwrap();
        let in_use = envelope.claim_in_use(InUse::Everybodys, in_use_bytes);
        (envelope, in_use)
    }

    #[test]
    fn whoever_follows_the_hint_succeeds() {
        let (envelope, _in_use) = shared(14 * GIB, GIB, "0.5");
        let refused = envelope.claim(tag("weights"), 13 * GIB).unwrap_err();
        assert_eq!(refused.needed_budget_bytes(), 14 * GIB);
        assert!(
            refused.to_string().ends_with("or raise the budget to 14 GiB (a share of 0.59)"),
            "{refused}"
        );
        for cap in ["14GiB", "0.59"] {
            let (envelope, _in_use) = shared(14 * GIB, GIB, cap);
            envelope.claim(tag("weights"), 13 * GIB).unwrap().release();
        }
        // What is not free no budget gives, and nobody can release what is in use.
        let refused = envelope.claim(tag("weights"), 15 * GIB).unwrap_err().to_string();
        let ways = "14 GiB are free now; claim at most 11 GiB, or end what else uses the device and raise the budget to \
                    16 GiB (a share of 0.67)";
        assert!(refused.ends_with(ways), "{refused}");
        envelope.claim(tag("weights"), 11 * GIB).unwrap().release();
        let (others_gone, _in_use) = shared(23 * GIB, GIB, "16GiB");
        others_gone.claim(tag("weights"), 15 * GIB).unwrap().release();
        let (envelope, _in_use) = shared(0, GIB, "1.0");
        let refused = envelope.claim(tag("weights"), GIB).unwrap_err().to_string();
        assert!(refused.ends_with("0 B are free now; end what else uses the device"), "{refused}");
    }

    #[test]
    fn where_others_were_not_taken_off_they_do_not_matter() {
        let facts =
            [Fact::bytes(SourceName::CudaTotal, 24 * GIB), Fact::bytes(SourceName::CudaFree, 10 * GIB)];
        let envelope = |cap: &str| {
            let envelope =
                Envelope::of(&Budget::decide(&facts, Some(GIB), Some(cap.parse().unwrap()))).unwrap();
            let own = envelope.claim_in_use(InUse::Own, GIB);
            (envelope, own)
        };
        let (half, _own) = envelope("0.5");
        let refused = half.claim(tag("pool"), 15 * GIB).unwrap_err().to_string();
        assert!(refused.ends_with("claim at most 11 GiB, or raise the budget to 16 GiB (a share of 0.67)"));
        let (enough, _own) = envelope("16GiB");
        enough.claim(tag("pool"), 15 * GIB).unwrap().release();
        // A name is no mark: this one can be released.
        let named = half.claim(tag("in_use"), 5 * GIB).unwrap();
        let refused = half.claim(tag("pool"), 8 * GIB).unwrap_err();
        assert_eq!(refused.needed_budget_bytes(), 14 * GIB);
        assert!(refused.to_string().contains("release a claim"), "{refused}");
        drop(named);
    }

    #[test]
    fn without_a_total_there_is_no_share() {
        let budget = Budget::decide(&[], None, Some("20GiB".parse().unwrap()));
        let refused = Envelope::of(&budget).unwrap().claim(tag("weights"), 21 * GIB).unwrap_err().to_string();
        assert!(refused.ends_with("claim at most 20 GiB, or raise the budget to 21 GiB"), "{refused}");
    }

    #[test]
    fn claims_are_resized() {
        let envelope = Envelope::new(10, 10);
        let first = envelope.claim(tag("a"), 4).unwrap();
        let second = envelope.claim_rest(tag("b"));
        assert_eq!(second.bytes(), 6);
        let refused = first.resize(5).unwrap_err();
        assert_eq!((refused.fits_bytes, refused.claims.len()), (4, 1));
        assert_eq!(first.bytes(), 4, "a refused resize changes nothing");
        second.resize(1).unwrap();
        first.resize(9).unwrap();
        assert_eq!((first.bytes(), envelope.unclaimed_bytes()), (9, 0));
        assert_eq!(envelope.claim_rest(tag("c")).bytes(), 0);
    }

    #[test]
    fn the_peak_is_held_against_the_claim() {
        let envelope = Envelope::new(10, 10);
        let claim = envelope.claim(tag("cudagraph"), 4).unwrap();
        assert_eq!((claim.peak_bytes(), claim.over_bytes()), (None, 0));
        for bytes in [3, 6, 2] {
            claim.measured(bytes);
        }
        assert_eq!((claim.peak_bytes(), claim.over_bytes()), (Some(6), 2));
        assert_eq!(envelope.claims()[0].peak_bytes, Some(6));
    }
}
