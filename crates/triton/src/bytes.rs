//! Arithmetic that saturates at `u64::MAX`.

use std::ops::{Add, Mul};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Bytes(pub(super) u64);

impl Bytes {
    pub(crate) const ZERO: Self = Self(0);

    pub(crate) fn of_tile(rows: u64, columns: u64, element_bytes: u64) -> Self {
        Self(rows) * columns * element_bytes
    }
}

impl Add for Bytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Mul<u64> for Bytes {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self(self.0.saturating_mul(times))
    }
}

#[test]
fn arithmetic_ends_at_the_top() {
    assert_eq!(Bytes::of_tile(3, 5, 2), Bytes(30));
    assert_eq!(Bytes::of_tile(u64::MAX, 2, 2), Bytes(u64::MAX));
    assert_eq!(Bytes(u64::MAX) + Bytes(1), Bytes(u64::MAX));
}
