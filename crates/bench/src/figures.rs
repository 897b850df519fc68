//! Timing, rates and the spread of samples.

use std::time::Instant;

use serde::Serialize;

/// Spread of samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The least.
    pub min: f64,
    /// The middle one, or the mean of the middle two.
    pub median: f64,
    /// The most.
    pub max: f64,
}

impl Spread {
    pub(crate) fn of(figures: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = figures.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Some(Self { min, median: f64::midpoint(middle.0, middle.1), max })
    }
}

pub(crate) fn timed<T, E>(action: impl FnOnce() -> Result<T, E>) -> Result<(f64, T), E> {
    let started = Instant::now();
    let outcome = action()?;
    Ok((started.elapsed().as_secs_f64(), outcome))
}

pub(crate) fn rate(bytes: u64, seconds: f64) -> f64 {
    as_float(bytes) / seconds.max(1e-9)
}

pub(crate) fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| as_float(part) / as_float(whole))
}

/// Sizes of memory are far below 2^53, where a float begins to round.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn as_float(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads() {
        assert_eq!(Spread::of([]), None);
        for (figures, min, median, max) in [
            (&[2.0][..], 2.0, 2.0, 2.0),
            (&[3.0, 1.0], 1.0, 2.0, 3.0),
            (&[9.0, 1.0, 4.0], 1.0, 4.0, 9.0),
            (&[4.0, 1.0, 2.0, 8.0], 1.0, 3.0, 8.0),
        ] {
            assert_eq!(Spread::of(figures.iter().copied()), Some(Spread { min, median, max }));
        }
    }

    #[test]
    fn there_is_no_ratio_to_nothing() {
        assert_eq!([ratio(1, 0), ratio(0, 2), ratio(3, 2)], [None, Some(0.0), Some(1.5)]);
    }
}
