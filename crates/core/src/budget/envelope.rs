//! The envelope: one budget, and who has claimed how much of it.
//!
//! Whoever needs memory of a device (weights, activations, graph captures, key-value cache, a pool) claims it here
//! before taking it. What is claimed never exceeds the budget. A claim that is dropped is returned.
//!
//! A forked child has a copy of the book that means nothing: dropping a claim there does nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use super::cap::Share;
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
pub struct Envelope(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    budget_bytes: u64,
    total_bytes: u64,
    /// The process that the book is of.
    process: u32,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    next_id: u64,
    claims: BTreeMap<u64, Claimed>,
}

/// An entry of the book.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Claimed {
    /// Who claims.
    pub name: Tag,
    /// How much, in bytes.
    pub bytes: u64,
    /// Most that was measured for it, in bytes. `None` where nobody measures.
    pub peak_bytes: Option<u64>,
}

impl Envelope {
    /// Nothing is claimed yet of `budget_bytes`; `total_bytes` is what the budget was cut from, for messages.
    #[must_use]
    pub fn new(budget_bytes: u64, total_bytes: u64) -> Self {
        let total_bytes = total_bytes.max(budget_bytes);
        let process = std::process::id();
        Self(Arc::new(Shared { budget_bytes, total_bytes, process, book: Mutex::default() }))
    }

    /// All of it, in bytes.
    #[must_use]
    pub fn budget_bytes(&self) -> u64 {
        self.0.budget_bytes
    }

    /// What nobody has claimed, in bytes.
    #[must_use]
    pub fn unclaimed_bytes(&self) -> u64 {
        self.0.budget_bytes - self.book().claimed_bytes()
    }

    /// The claims, in the order in which they were made.
    #[must_use]
    pub fn claims(&self) -> Vec<Claimed> {
        self.book().claims.values().cloned().collect()
    }

    /// Claims `bytes` for `name`. Several claims may have one name.
    ///
    /// # Errors
    /// When fewer are unclaimed; nothing has changed then.
    pub fn claim(&self, name: Tag, bytes: u64) -> Result<Claim, ClaimError> {
        let mut book = self.book();
        let fits_bytes = self.0.budget_bytes - book.claimed_bytes();
        if bytes > fits_bytes {
            return Err(self.refusal(&book, name, bytes, fits_bytes));
        }
        Ok(self.enter(&mut book, name, bytes))
    }

    /// Claims all that is unclaimed, which may be nothing.
    pub fn claim_rest(&self, name: Tag) -> Claim {
        let mut book = self.book();
        let bytes = self.0.budget_bytes - book.claimed_bytes();
        self.enter(&mut book, name, bytes)
    }

    fn enter(&self, book: &mut Book, name: Tag, bytes: u64) -> Claim {
        let id = book.next_id;
        book.next_id += 1;
        book.claims.insert(id, Claimed { name: name.clone(), bytes, peak_bytes: None });
        Claim { envelope: self.clone(), id, name }
    }

    fn refusal(&self, book: &Book, name: Tag, asked_bytes: u64, fits_bytes: u64) -> ClaimError {
        let claims = book.claims.values().cloned().collect();
        let Shared { budget_bytes, total_bytes, .. } = *self.0;
        ClaimError { name, asked_bytes, fits_bytes, budget_bytes, total_bytes, claims }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // The book is changed by single insertions, removals and assignments: no panic leaves it half written.
        self.0.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    /// At most the budget, so it does not overflow.
    fn claimed_bytes(&self) -> u64 {
        self.claims.values().map(|claimed| claimed.bytes).sum()
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
        if let Some(claimed) = self.envelope.book().claims.get_mut(&self.id) {
            claimed.peak_bytes = claimed.peak_bytes.max(Some(bytes));
        }
    }

    /// Makes it `bytes` large.
    ///
    /// # Errors
    /// When fewer are unclaimed beside it; it stays as it was then.
    pub fn resize(&self, bytes: u64) -> Result<(), ClaimError> {
        let mut book = self.envelope.book();
        let held_bytes = book.claims.get(&self.id).map_or(0, |claimed| claimed.bytes);
        let fits_bytes = self.envelope.budget_bytes() - book.claimed_bytes() + held_bytes;
        if bytes > fits_bytes {
            return Err(self.envelope.refusal(&book, self.name.clone(), bytes, fits_bytes));
        }
        if let Some(claimed) = book.claims.get_mut(&self.id) {
            claimed.bytes = bytes;
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
        self.envelope.book().claims.get(&self.id).map(of).unwrap_or_default()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // In a forked child somebody may hold the lock for ever.
        if self.envelope.0.process == std::process::id() {
            self.envelope.book().claims.remove(&self.id);
        }
    }
}

/// A claim that does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimError {
    /// Who claims.
    pub name: Tag,
    /// How much was asked for, in bytes.
    pub asked_bytes: u64,
    /// What would have fitted, in bytes.
    pub fits_bytes: u64,
    /// All of the budget, in bytes.
    pub budget_bytes: u64,
    /// What the budget was cut from, in bytes.
    pub total_bytes: u64,
    /// What is claimed by whom; on a resize the claim itself, as it was, is among them.
    pub claims: Vec<Claimed>,
}

impl ClaimError {
    /// What the budget would have to be, in bytes.
    #[must_use]
    pub fn needed_bytes(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.fits_bytes).saturating_add(self.asked_bytes)
    }

    /// What would help.
    fn hint(&self) -> String {
        let needed = ByteSize(self.needed_bytes()).rounded_up();
        let less = (self.fits_bytes > 0)
            .then(|| format!("claim at most {}", ByteSize(self.fits_bytes).rounded_down()));
        let release = (!self.claims.is_empty()).then(|| "release a claim".to_owned());
        let smaller = less.into_iter().chain(release).collect::<Vec<_>>().join(", ");
        match Share::that_makes(self.needed_bytes(), self.total_bytes) {
            Some(share) if smaller.is_empty() => format!("raise the budget to {needed} (a share of {share})"),
            Some(share) => format!("{smaller}, or raise the budget to {needed} (a share of {share})"),
            None if smaller.is_empty() => format!("there are {} in all", ByteSize(self.total_bytes)),
            None => format!(
                "{smaller}; no budget would do, since {needed} are needed and there are {} in all",
                ByteSize(self.total_bytes)
            ),
        }
    }
}

impl fmt::Display for ClaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, asked_bytes, fits_bytes, budget_bytes, .. } = self;
        let [asked, fits, budget] = [*asked_bytes, *fits_bytes, *budget_bytes].map(ByteSize);
        write!(f, "cannot claim {asked} for `{name}`: the budget is {budget}, of which ")?;
        match &self.claims[..] {
            [] => f.write_str("nothing is claimed")?,
            claims => {
                for (nth, claimed) in claims.iter().enumerate() {
                    let comma = if nth == 0 { "" } else { ", " };
                    write!(f, "{comma}`{}` has {}", claimed.name, ByteSize(claimed.bytes))?;
                }
                write!(f, " and {fits} would fit")?;
            }
        }
        write!(f, "; {}", self.hint())
    }
}

impl std::error::Error for ClaimError {}

#[cfg(test)]
mod tests {
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
        assert_eq!((refused.fits_bytes, refused.needed_bytes()), (3 * GIB, 11 * GIB));
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
        assert!(refused.contains("0 B would fit; release a claim; no budget would do"), "{refused}");
        assert!(refused.contains("13 GiB are needed and there are 12 GiB in all"), "{refused}");
        drop((weights, kv));
        assert_eq!((envelope.claims(), envelope.unclaimed_bytes()), (Vec::new(), 10 * GIB));
        let refused = envelope.claim(tag("all"), u64::MAX).unwrap_err();
        assert_eq!(refused.needed_bytes(), u64::MAX);
        assert!(refused.to_string().contains("nothing is claimed"), "{refused}");
    }

    #[test]
    fn claims_are_resized() {
        let envelope = Envelope::new(10, 10);
        let first = envelope.claim(tag("a"), 4).unwrap();
        let second = envelope.claim_rest(tag("b"));
        assert_eq!(second.bytes(), 6);
        assert_eq!(first.resize(5).unwrap_err().fits_bytes, 4);
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
