//! How many hot copies a model should have.

use super::rules::Rules;
use crate::records::{ModelRecord, Rate};

/// What asks for a model, on all nodes together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Demand {
    pub(super) requests: u64,
    pub(super) rate: Rate,
    /// With fewer hot copies it gets more.
    pub(super) least: usize,
    /// With more it gives some up. Between the two nothing changes.
    pub(super) most: usize,
}

impl Demand {
    pub(super) fn of<'v>(records: impl Iterator<Item = &'v ModelRecord>, rules: &Rules) -> Self {
        let (mut requests, mut micros) = (0, 0_u64);
        for record in records {
            requests += record.requests.all();
            micros = micros.saturating_add(record.rate.as_micros());
        }
        let copies = |percent: u32| {
            let percent = percent.clamp(1, 100);
            let is_rare = above(micros, percent) < u128::from(rules.hot_rate_min.as_micros());
            if is_rare {
                return 0;
            }
            let by_requests = above(requests, percent).div_ceil(u128::from(rules.requests_per_copy.max(1)));
            let by_rate = above(micros, percent).div_ceil(u128::from(rules.rate_per_copy.as_micros().max(1)));
            let copies = by_requests.max(by_rate).max(1);
            usize::try_from(copies).unwrap_or(usize::MAX).min(rules.copies_max)
        };
        let (least, most) = (copies(100), copies(rules.shrink_percent));
        Self { requests, rate: Rate::from_micros(micros), least, most }
    }

    /// The part of the demand that one hot copy has: millionths of a request per second.
    pub(super) fn share_micros(self) -> u64 {
        let waiting = self.requests.saturating_mul(1_000_000 / 60);
        let copies = u64::try_from(self.least.max(1)).unwrap_or(u64::MAX);
        self.rate.as_micros().max(waiting) / copies
    }
}

/// As if hot copies carried only so many percent of what they do.
fn above(demand: u64, percent: u32) -> u128 {
    (u128::from(demand) * 100).div_ceil(u128::from(percent))
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
    fn copies_grow_at_once_and_shrink_later() {
        let copies = |running, micros| (demand(running, micros).least, demand(running, micros).most);
        assert_eq!(copies(0, 0), (0, 0));
        assert_eq!(copies(0, 1_200), (0, 1));
        assert_eq!(copies(0, 2_000), (1, 1));
        assert_eq!(copies(32, 1_000_000), (1, 2));
        assert_eq!(copies(33, 1_000_000), (2, 2));
        assert_eq!(copies(0, 16_000_001), (3, 3));
        assert_eq!(copies(u32::MAX, 1_000_000).0, Rules::default().copies_max);
    }
}
