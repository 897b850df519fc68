//! The granules that a spot check compares: one in [`SAMPLE`], different ones each time, at least one.

pub(in crate::pool) const SAMPLE: u64 = 64;

#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct Sample {
    residue: u64,
}

impl Sample {
    /// The `turn`-th choice. [`SAMPLE`] turns choose each granule once, or as many turns as there are granules.
    pub(in crate::pool) fn of(turn: u64, count: u64) -> Self {
        Self { residue: turn % count.clamp(1, SAMPLE) }
    }

    pub(in crate::pool) fn takes(self, nth: u64) -> bool {
        nth % SAMPLE == self.residue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_granule_has_its_turn_and_no_check_is_empty() {
        for count in [1, 2, 63, 64, 65, 200] {
            let mut seen = vec![0; usize::try_from(count).unwrap()];
            for turn in 0..SAMPLE.min(count) {
                let chosen: Vec<u64> = (0..count).filter(|nth| Sample::of(turn, count).takes(*nth)).collect();
                assert!(
                    !chosen.is_empty() && chosen.len() as u64 <= count.div_ceil(SAMPLE),
                    "{turn} of {count}"
                );
                chosen.iter().for_each(|nth| seen[usize::try_from(*nth).unwrap()] += 1);
            }
            assert!(seen.iter().all(|times| *times == 1), "{count}: {seen:?}");
        }
    }
}
