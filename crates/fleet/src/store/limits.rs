//! How much a store takes in.

/// What is beyond them is refused, and room comes back with what is removed.
///
/// ```
/// use poorwill_fleet::store::StoreLimits;
///
/// let usual = StoreLimits::default();
/// assert!(StoreLimits { keys: 1000, ..usual }.keys < usual.keys);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLimits {
    /// Keys at a time.
    pub keys: usize,
    /// Of all keys and their values.
    pub bytes: usize,
    /// Leases at a time.
    pub leases: usize,
    /// Watches at a time.
    pub watches: usize,
    /// Changes of the past, for reads and watches that have begun.
    pub past: usize,
    /// Of these. A watch that tells all of it at once stays below the client's limit.
    pub past_bytes: usize,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self {
            keys: 1_000_000,
            bytes: 512 << 20,
            leases: 100_000,
            watches: 8192,
            past: 100_000,
            past_bytes: 32 << 20,
        }
    }
}
