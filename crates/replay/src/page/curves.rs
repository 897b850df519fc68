//! Values over all steps, as those of a few steps that keep what each part has of lows and highs.
//!
//! All curves keep the same steps, so at each of them every value is exact.

use std::collections::BTreeSet;

/// Values at the steps that were kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Curves {
    /// In their order, each once.
    pub(super) steps: Vec<usize>,
    /// For each curve, as far as it goes.
    pub(super) values: Vec<Vec<u64>>,
}

/// Keeps `most` steps, more only if there are more `always` or hundreds of curves.
pub(super) fn curves(all: &[&[u64]], always: &[usize], most: usize) -> Curves {
    let length = all.iter().map(|values| values.len()).max().unwrap_or(0);
    let ends = [0, length.saturating_sub(1)];
    let forced: BTreeSet<usize> = always.iter().copied().chain(ends).filter(|step| *step < length).collect();
    let steps: Vec<usize> =
        if length <= most { (0..length).collect() } else { thinned(all, &forced, length, most) };
    let kept = |values: &&[u64]| steps.iter().map_while(|step| values.get(*step).copied()).collect();
    let values = all.iter().map(kept).collect();
    Curves { steps, values }
}

const BUCKETS_MIN: usize = 8;

fn thinned(all: &[&[u64]], forced: &BTreeSet<usize>, length: usize, most: usize) -> Vec<usize> {
    let mut width = length.div_ceil((most / 2).max(BUCKETS_MIN));
    let mut extremes: Vec<Vec<Extremes>> = all.iter().map(|values| Extremes::of(values, width)).collect();
    loop {
        let mut kept = forced.clone();
        for found in extremes.iter().flatten() {
            kept.extend([found.low, found.high]);
        }
        // A line that ends early ends where it did.
        kept.extend(all.iter().filter_map(|values| values.len().checked_sub(1)));
        if kept.len() <= most || length.div_ceil(width) <= BUCKETS_MIN {
            return kept.into_iter().collect();
        }
        width *= 2;
        for (values, found) in all.iter().zip(&mut extremes) {
            *found = found.chunks(2).map(|pair| Extremes::joined(values, pair)).collect();
        }
    }
}

/// Steps of the lowest and highest values of neighbours; the first of equal ones.
#[derive(Debug, Clone, Copy)]
struct Extremes {
    low: usize,
    high: usize,
}

impl Extremes {
    fn of(values: &[u64], width: usize) -> Vec<Self> {
        let starts = (0..values.len()).step_by(width);
        let of = |start: usize| {
            let mut found = Self { low: start, high: start };
            for step in start..(start + width).min(values.len()) {
                found.take_in(values, step);
            }
            found
        };
        starts.map(of).collect()
    }

    fn joined(values: &[u64], pair: &[Self]) -> Self {
        let mut found = pair[0];
        for other in &pair[1..] {
            found.take_in(values, other.low);
            found.take_in(values, other.high);
        }
        found
    }

    fn take_in(&mut self, values: &[u64], step: usize) {
        if values[step] < values[self.low] {
            self.low = step;
        }
        if values[step] > values[self.high] {
            self.high = step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_steps_are_all_kept() {
        let (long, short) = ([3, 1, 2], [7]);
        let found = curves(&[&long, &short], &[], 3);
        assert_eq!(found, Curves { steps: vec![0, 1, 2], values: vec![vec![3, 1, 2], vec![7]] });
        assert_eq!(curves(&[], &[5], 10).steps, [] as [usize; 0]);
    }

    #[test]
    fn lows_and_highs_of_each_part_are_kept() {
        let mut random = fastrand::Rng::with_seed(5);
        for lines in [1, 3, 9] {
            let all: Vec<Vec<u64>> = (0..lines)
                .map(|line| (0..50_000 - line * 5000).map(|_| random.u64(1000..9000)).collect())
                .collect();
            let mut all = all;
            // A peak and a gap of one step each, and neither at a round place.
            for (line, values) in all.iter_mut().enumerate() {
                (values[30_011 - line * 3600], values[111 + line]) = (1_000_000, 0);
            }
            let borrowed: Vec<&[u64]> = all.iter().map(Vec::as_slice).collect();
            let found = curves(&borrowed, &[777, 49_000, 99_999], 2000);
            assert!((200..=2000).contains(&found.steps.len()), "{lines}: {}", found.steps.len());
            assert!(found.steps.is_sorted_by(|one, other| one < other));
            for step in [0, 777, 49_000, 49_999] {
                assert!(found.steps.contains(&step), "{step}");
            }
            for (values, kept) in all.iter().zip(&found.values) {
                assert_eq!(kept.iter().max(), values.iter().max());
                assert_eq!(kept.iter().min(), values.iter().min());
                assert_eq!(kept.last(), values.last(), "it ends where it did");
                // Each eighth, too.
                for (at, eighth) in values.chunks(values.len().div_ceil(8)).enumerate() {
                    let from = at * values.len().div_ceil(8);
                    let near = |step: &usize| (from..from + eighth.len()).contains(step);
                    let seen = found.steps.iter().filter(|step| near(step)).map(|step| values[*step]);
                    assert!(seen.clone().count() >= 8, "{at}");
                    assert!(seen.max().unwrap() * 10 >= eighth.iter().max().unwrap() * 9, "{at}");
                }
            }
        }
    }
}
