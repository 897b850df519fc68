//! The envelope: one budget and the claims on it.
//!
//! Users of device memory (weights, activations, graph captures, key-value cache, a pool) claim it before
//! taking it. Claims never exceed the budget.
//!
//! A forked child must not use its copy of the ledger, whose lock may be held for ever. Dropping a claim
//! there does nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use super::cap::Share;
use super::rule::Budget;
use super::source::SourceName;
use crate::bytes::ByteSize;
use crate::tag::Tag;

/// A budget claimed by name. Clones are cheap and are the same envelope.
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
    basis: BudgetBasis,
    process: u32,
    ledger: Mutex<Ledger>,
}

/// Figures behind a budget, for messages.
///
/// ```
/// use poorwill::{Envelope, Tag};
///
/// let envelope = Envelope::new(10 << 30, 12 << 30);
/// let refused = envelope.claim(Tag::weights(), 11 << 30).unwrap_err();
/// assert_eq!((refused.basis.budget_bytes, refused.basis.total_bytes), (10 << 30, Some(12 << 30)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetBasis {
    /// The budget.
    pub budget_bytes: u64,
    /// What the budget is a part of. `None` if unknown.
    pub total_bytes: Option<u64>,
    /// Source of the total.
    pub total_from: Option<SourceName>,
    /// Free when the budget was decided.
    pub free_bytes: Option<u64>,
    /// Used by this process then.
    pub own_bytes: u64,
}

#[derive(Debug, Default)]
struct Ledger {
    next_id: u64,
    claims: BTreeMap<u64, Claimed>,
    /// Their sum; at most the budget.
    claimed_bytes: u64,
}

/// An entry of the ledger.
///
/// ```
/// use poorwill::{Envelope, Tag};
///
/// let envelope = Envelope::new(10 << 30, 12 << 30);
/// let _weights = envelope.claim(Tag::weights(), 8 << 30)?;
/// for claimed in envelope.claims() {
///     println!("{} bytes for {}", claimed.bytes, claimed.name);
/// }
/// # Ok::<(), poorwill::ClaimError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Claimed {
    /// Claimant.
    pub name: Tag,
    /// Size.
    pub bytes: u64,
    /// Highest measurement, if any.
    pub peak_bytes: Option<u64>,
    /// Set for memory already in use, which no claimant can release.
    #[serde(skip)]
    pub in_use: Option<InUse>,
}

/// Which processes' use a claim stands for.
///
/// ```
/// use poorwill::Envelope;
/// use poorwill::budget::InUse;
///
/// let envelope = Envelope::new(10 << 30, 12 << 30);
/// let _context = envelope.claim_in_use(InUse::Own, 1 << 30);
/// assert_eq!(envelope.claims()[0].in_use, Some(InUse::Own));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InUse {
    /// This process's, context included; it stays.
    Own,
    /// All processes', as far as it keeps the budget from being available now. It changes with them.
    AllProcesses,
}

impl Envelope {
    /// Without claims. `total_bytes` is for messages.
    #[must_use]
    pub fn new(budget_bytes: u64, total_bytes: u64) -> Self {
        let total_bytes = Some(total_bytes.max(budget_bytes));
        Self::on(BudgetBasis { budget_bytes, total_bytes, total_from: None, free_bytes: None, own_bytes: 0 })
    }

    /// Without claims. `None` if the budget is unknown.
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

    fn on(basis: BudgetBasis) -> Self {
        Self(Arc::new(Inner { basis, process: std::process::id(), ledger: Mutex::default() }))
    }

    /// The whole budget.
    #[must_use]
    pub fn budget_bytes(&self) -> u64 {
        self.0.basis.budget_bytes
    }

    /// The rest.
    #[must_use]
    pub fn unclaimed_bytes(&self) -> u64 {
        self.budget_bytes() - self.ledger().claimed_bytes
    }

    /// In order of claiming.
    #[must_use]
    pub fn claims(&self) -> Vec<Claimed> {
        self.ledger().claims.values().cloned().collect()
    }

    /// Claims `bytes`. Several claims may share a name.
    ///
    /// # Errors
    /// If fewer are unclaimed; nothing has changed.
    pub fn claim(&self, name: Tag, bytes: u64) -> Result<Claim, ClaimError> {
        let mut ledger = self.ledger();
        let fits_bytes = self.budget_bytes() - ledger.claimed_bytes;
        if bytes > fits_bytes {
            return Err(self.refusal(&ledger, None, name, bytes));
        }
        Ok(self.insert(&mut ledger, name, bytes, None))
    }

    /// Claims the rest, which may be nothing.
    pub fn claim_rest(&self, name: Tag) -> Claim {
        self.claim_up_to(name, u64::MAX)
    }

    /// Claims `bytes`, or the rest if that is less.
    pub fn claim_up_to(&self, name: Tag, bytes: u64) -> Claim {
        let mut ledger = self.ledger();
        let bytes = bytes.min(self.budget_bytes() - ledger.claimed_bytes);
        self.insert(&mut ledger, name, bytes, None)
    }

    /// Claims memory already in use, or the rest if that is less.
    pub fn claim_in_use(&self, users: InUse, bytes: u64) -> Claim {
        let mut ledger = self.ledger();
        let bytes = bytes.min(self.budget_bytes() - ledger.claimed_bytes);
        self.insert(&mut ledger, Tag::in_use(), bytes, Some(users))
    }

    fn insert(&self, ledger: &mut Ledger, name: Tag, bytes: u64, in_use: Option<InUse>) -> Claim {
        let id = ledger.next_id;
        ledger.next_id += 1;
        ledger.claimed_bytes += bytes;
        ledger.claims.insert(id, Claimed { name: name.clone(), bytes, peak_bytes: None, in_use });
        Claim { envelope: self.clone(), id, name }
    }

    /// Refuses `name`; `claim` is its existing entry.
    fn refusal(&self, ledger: &Ledger, claim: Option<u64>, name: Tag, asked_bytes: u64) -> ClaimError {
        let others = ledger.claims.iter().filter(|(id, _)| Some(**id) != claim);
        let claims: Vec<Claimed> = others.map(|(_, claimed)| claimed.clone()).collect();
        let others_bytes: u64 = claims.iter().map(|claimed| claimed.bytes).sum();
        let basis = self.0.basis;
        ClaimError { name, asked_bytes, fits_bytes: basis.budget_bytes - others_bytes, basis, claims }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // A panic cannot leave the ledger half written: changes are single insertions, removals and
        // assignments.
        self.0.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of a budget, claimed until dropped.
///
/// ```
/// use poorwill::{Envelope, Tag};
///
/// let envelope = Envelope::new(10 << 30, 12 << 30);
/// let graphs = envelope.claim(Tag::cudagraph(), 1 << 30)?;
/// graphs.measured(3 << 30);
/// assert_eq!(graphs.over_bytes(), 2 << 30);
/// graphs.resize(3 << 30)?;
/// # Ok::<(), poorwill::ClaimError>(())
/// ```
#[derive(Debug)]
#[must_use = "a claim that is dropped is returned"]
pub struct Claim {
    envelope: Envelope,
    id: u64,
    name: Tag,
}

impl Claim {
    /// Claimant.
    #[must_use]
    pub fn name(&self) -> &Tag {
        &self.name
    }

    /// Size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.read(|claimed| claimed.bytes)
    }

    /// Highest measurement.
    #[must_use]
    pub fn peak_bytes(&self) -> Option<u64> {
        self.read(|claimed| claimed.peak_bytes)
    }

    /// By how much the peak exceeds the claim.
    #[must_use]
    pub fn over_bytes(&self) -> u64 {
        self.read(|claimed| claimed.peak_bytes.unwrap_or(0).saturating_sub(claimed.bytes))
    }

    /// Records the current use.
    pub fn measured(&self, bytes: u64) {
        if let Some(claimed) = self.envelope.ledger().claims.get_mut(&self.id) {
            claimed.peak_bytes = claimed.peak_bytes.max(Some(bytes));
        }
    }

    /// Changes the size.
    ///
    /// # Errors
    /// As for [`Envelope::claim`].
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

    /// The envelope of the claim.
    #[must_use]
    pub fn envelope(&self) -> &Envelope {
        &self.envelope
    }

    /// Drops the claim.
    pub fn release(self) {}

    fn read<T: Default>(&self, of: impl FnOnce(&Claimed) -> T) -> T {
        self.envelope.ledger().claims.get(&self.id).map(of).unwrap_or_default()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.envelope.0.process == std::process::id() {
            let mut ledger = self.envelope.ledger();
            if let Some(claimed) = ledger.claims.remove(&self.id) {
                ledger.claimed_bytes -= claimed.bytes;
            }
        }
    }
}

/// The claim does not fit.
///
/// ```
/// use poorwill::{Envelope, Tag};
///
/// let envelope = Envelope::new(10 << 30, 12 << 30);
/// let refused = envelope.claim(Tag::weights(), 11 << 30).unwrap_err();
/// assert_eq!((refused.fits_bytes, refused.needed_budget_bytes()), (10 << 30, 11 << 30));
/// println!("{refused}"); // With the other claims, and what would help.
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimError {
    /// Claimant.
    pub name: Tag,
    /// Requested size.
    pub asked_bytes: u64,
    /// What would fit.
    pub fits_bytes: u64,
    /// Figures of the budget.
    pub basis: BudgetBasis,
    /// Other claims.
    pub claims: Vec<Claimed>,
}

impl ClaimError {
    /// Sum of all claims, without memory already in use.
    #[must_use]
    pub fn needed_bytes(&self) -> u64 {
        let others = self.claims.iter().filter(|claimed| claimed.in_use.is_none());
        others.map(|claimed| claimed.bytes).fold(self.asked_bytes, u64::saturating_add)
    }

    /// The smallest budget that would do.
    #[must_use]
    pub fn needed_budget_bytes(&self) -> u64 {
        let has_in_use = self.claims.iter().any(|claimed| claimed.in_use.is_some());
        let own_bytes = if has_in_use { self.basis.own_bytes } else { 0 };
        self.needed_bytes().saturating_add(own_bytes)
    }

    /// What would help, taking less included. Following it succeeds, unless other processes change their use.
    #[must_use]
    pub fn hint(&self) -> String {
        self.advice(true)
    }

    /// What would help without taking less.
    #[must_use]
    pub fn remedy(&self) -> String {
        self.advice(false)
    }

    fn advice(&self, or_less: bool) -> String {
        let BudgetBasis { budget_bytes, total_bytes, total_from, free_bytes, .. } = self.basis;
        let less = (or_less && self.fits_bytes > 0)
            .then(|| format!("claim at most {}", ByteSize(self.fits_bytes).rounded_down()));
        let is_releasable = self.claims.iter().any(|claimed| claimed.in_use.is_none());
        let release = is_releasable.then(|| "release a claim".to_owned());
        let needed_bytes = self.needed_budget_bytes();
        let needed = ByteSize(needed_bytes).rounded_up();
        let raise = match total_bytes {
            None => Some(format!("raise the budget to {needed}")),
            Some(total) => Share::at_least(needed_bytes, total)
                .map(|share| format!("raise the budget to {needed} (a share of {share})")),
        };
        // Free memory matters only where other processes' use was claimed.
        let counts_free = self.claims.iter().any(|claimed| claimed.in_use == Some(InUse::AllProcesses));
        let lacking = free_bytes.filter(|free| counts_free && self.needed_bytes() > *free);
        let (remark, step) = match (raise, lacking) {
            (None, _) => {
                let from = total_from.map_or_else(String::new, |from| format!(", by {from}"));
                let total = ByteSize(total_bytes.unwrap_or(budget_bytes));
                let remark =
                    format!("no budget would do: {needed} are needed, and there are {total} in all{from}");
                (Some(remark), None)
            }
            (Some(raise), Some(free)) => {
                let end = "end what else uses the device".to_owned();
                let step = if needed_bytes > budget_bytes { format!("{end} and {raise}") } else { end };
                (Some(format!("{} are free now", ByteSize(free).rounded_down())), Some(step))
            }
            (Some(raise), None) => (None, Some(raise)),
        };
        let steps: Vec<String> = less.into_iter().chain(release).chain(step).collect();
        let steps = match &steps[..] {
            [] => None,
            [step] => Some(step.clone()),
            [steps @ .., last] => Some(format!("{}, or {last}", steps.join(", "))),
        };
        remark.into_iter().chain(steps).collect::<Vec<_>>().join("; ")
    }
}

impl fmt::Display for ClaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, asked_bytes, fits_bytes, basis, claims } = self;
        // Two figures that differ by little must not look the same.
        let looks_same = ByteSize(*asked_bytes).to_string() == ByteSize(*fits_bytes).to_string();
        let requested =
            if looks_same { format!("{asked_bytes} B") } else { ByteSize(*asked_bytes).to_string() };
        let fits = if looks_same { format!("{fits_bytes} B") } else { ByteSize(*fits_bytes).to_string() };
        write!(
            f,
            "cannot claim {requested} for `{name}`: the budget is {}, of which ",
            ByteSize(basis.budget_bytes)
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
    use super::super::source::Reading;
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
    fn figures_that_look_the_same_are_printed_exactly() {
        let refused = Envelope::new(GIB, 2 * GIB).claim(tag("weights"), GIB + 1).unwrap_err().to_string();
        assert!(refused.contains("cannot claim 1073741825 B") && refused.contains("1073741824 B would fit"));
    }

    /// A device of 24 GiB that other processes use too.
    fn shared(free_bytes: u64, own_bytes: u64, cap: &str) -> (Envelope, Claim) {
        let readings = [
            Reading::bytes(SourceName::CudaTotal, 24 * GIB),
            Reading::bytes(SourceName::CudaFree, free_bytes),
        ];
        let budget = Budget::decide(&readings, Some(own_bytes), Some(cap.parse().unwrap()));
        let envelope = Envelope::of(&budget).unwrap();
        let in_use_bytes = budget.budget_bytes.unwrap() - budget.headroom_bytes.unwrap();
        let in_use = envelope.claim_in_use(InUse::AllProcesses, in_use_bytes);
        (envelope, in_use)
    }

    #[test]
    fn following_the_hint_succeeds() {
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
        // No budget gives memory that is not free, and memory in use cannot be released.
        let refused = envelope.claim(tag("weights"), 15 * GIB).unwrap_err().to_string();
        let steps = "14 GiB are free now; claim at most 11 GiB, or end what else uses the device and raise the budget to \
                    16 GiB (a share of 0.67)";
        assert!(refused.ends_with(steps), "{refused}");
        envelope.claim(tag("weights"), 11 * GIB).unwrap().release();
        let (others_gone, _in_use) = shared(23 * GIB, GIB, "16GiB");
        others_gone.claim(tag("weights"), 15 * GIB).unwrap().release();
        let (envelope, _in_use) = shared(0, GIB, "1.0");
        let refused = envelope.claim(tag("weights"), GIB).unwrap_err().to_string();
        assert!(refused.ends_with("0 B are free now; end what else uses the device"), "{refused}");
    }

    #[test]
    fn other_processes_count_only_when_claimed_for() {
        let readings =
            [Reading::bytes(SourceName::CudaTotal, 24 * GIB), Reading::bytes(SourceName::CudaFree, 10 * GIB)];
        let envelope = |cap: &str| {
            let envelope =
                Envelope::of(&Budget::decide(&readings, Some(GIB), Some(cap.parse().unwrap()))).unwrap();
            let own = envelope.claim_in_use(InUse::Own, GIB);
            (envelope, own)
        };
        let (half, _own) = envelope("0.5");
        let refused = half.claim(tag("pool"), 15 * GIB).unwrap_err().to_string();
        assert!(refused.ends_with("claim at most 11 GiB, or raise the budget to 16 GiB (a share of 0.67)"));
        let (enough, _own) = envelope("16GiB");
        enough.claim(tag("pool"), 15 * GIB).unwrap().release();
        // The name marks nothing: this claim can be released.
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
    fn a_peak_is_compared_with_its_claim() {
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
