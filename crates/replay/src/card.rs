//! The device that a trace is replayed on.

/// A card, or a slice of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Card {
    /// All of its memory.
    pub total_bytes: u64,
    /// What contexts, libraries and other processes have.
    pub taken_bytes: u64,
    /// The most that this process may map; `None` for all that is left.
    pub budget_bytes: Option<u64>,
}

impl Card {
    /// The card of which so much was seen to be usable; `known` is what else is known of it.
    pub(crate) fn seen(known: Option<Self>, usable_bytes: u64) -> Self {
        let total_bytes = known.map_or(0, |card| card.total_bytes).max(usable_bytes);
        Self { total_bytes, taken_bytes: total_bytes - usable_bytes, budget_bytes: None }
    }

    /// What an allocator may map.
    ///
    /// ```
    /// use poorwill_replay::Card;
    ///
    /// let card = Card { total_bytes: 80 << 30, taken_bytes: 1 << 30, budget_bytes: None };
    /// assert_eq!(card.usable_bytes(), 79 << 30);
    /// assert_eq!(Card { budget_bytes: Some(20 << 30), ..card }.usable_bytes(), 20 << 30);
    /// ```
    #[must_use]
    pub fn usable_bytes(self) -> u64 {
        let left = self.total_bytes.saturating_sub(self.taken_bytes);
        self.budget_bytes.map_or(left, |budget| budget.min(left))
    }
}
