//! How many hot copies a model should have.

use super::rules::Rules;
use crate::records::{ModelRecord, Rate};

/// What asks for a model, on all nodes together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Demand {
    pub(super) requests: u64,
    pub(super) rate: Rate,
    /// Hot copies that carry it.
    pub(super) copies: usize,
}

impl Demand {
    pub(super) fn of<'v>(records: impl Iterator<Item = &'v ModelRecord>, rules: &Rules) -> Self {
        let (mut requests, mut micros) = (0, 0_u64);
        for record in records {
            requests += record.requests.all();
            micros = micros.saturating_add(record.rate.as_micros());
        }
        let copies = if micros < rules.hot_rate_min.as_micros() {
            0
        } else {
            let by_requests = requests.div_ceil(u64::from(rules.requests_per_copy.max(1)));
            let by_rate = micros.div_ceil(rules.rate_per_copy.as_micros().max(1));
            usize::try_from(by_requests.max(by_rate).max(1)).unwrap_or(usize::MAX).min(rules.copies_max)
        };
        Self { requests, rate: Rate::from_micros(micros), copies }
    }

    /// The part of the demand that one hot copy has: millionths of a request per second.
    pub(super) fn share_micros(self) -> u64 {
        let waiting = self.requests.saturating_mul(1_000_000 / 60);
        let copies = u64::try_from(self.copies.max(1)).unwrap_or(u64::MAX);
        self.rate.as_micros().max(waiting) / copies
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{Requests, Stage};

    fn demand(running: u32, micros: u64) -> Demand {
        let mut record = ModelRecord::new(Stage::Awake, vec![0]);
        record.requests = Requests { running, queued: 0 };
        record.rate = Rate::from_micros(micros);
        Demand::of([&record].into_iter(), &Rules::default())
    }

    #[test]
    fn hot_copies_carry_requests_and_rates() {
        let copies = |running, micros| demand(running, micros).copies;
        assert_eq!(
            [(0, 0), (0, 1_200), (0, 2_000)].map(|(running, micros)| copies(running, micros)),
            [0, 0, 1]
        );
        assert_eq!([32, 33].map(|running| copies(running, 1_000_000)), [1, 2]);
        assert_eq!(copies(0, 16_000_001), 3);
        assert_eq!(copies(u32::MAX, 1_000_000), Rules::default().copies_max);
    }
}
