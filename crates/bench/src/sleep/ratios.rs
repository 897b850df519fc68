//! Each figure beside its limit.

use serde::Serialize;

/// Figures beside their limits; `None` without either.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Ratios {
    /// The load over the slower of the link and host allocation.
    pub first_sleep: Option<LimitRatio>,
    /// As for a clean sleep.
    pub prepared_sleep: Option<LimitRatio>,
    /// A drop, a digest of the load at 0.7 times the rate, and 5 ms.
    pub clean_sleep: Option<LimitRatio>,
    /// A clean sleep, the changed granules over the link, and 5 ms.
    pub changed_sleep: Option<LimitRatio>,
    /// The load over the link.
    pub wake: Option<LimitRatio>,
    /// Driver calls that unmap.
    pub drop: Option<LimitRatio>,
    /// Driver calls that map.
    pub wake_empty: Option<LimitRatio>,
}

/// A figure beside its limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LimitRatio {
    /// The limit.
    pub limit_s: f64,
    /// The figure over the limit.
    pub ratio: f64,
    /// Highest acceptable ratio.
    pub ratio_aim: f64,
}

impl LimitRatio {
    pub(super) fn of(figure_s: Option<f64>, limit_s: Option<f64>, ratio_aim: f64) -> Option<Self> {
        let limit_s = limit_s.filter(|limit_s| limit_s.is_finite() && *limit_s > 0.0)?;
        Some(Self { limit_s, ratio: figure_s? / limit_s, ratio_aim })
    }

    /// Whether the ratio is acceptable.
    #[must_use]
    pub fn is_met(&self) -> bool {
        self.ratio <= self.ratio_aim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_without_a_limit_has_no_ratio() {
        let ratio_of = LimitRatio::of(Some(3.0), Some(2.0), 1.5);
        assert_eq!(ratio_of, Some(LimitRatio { limit_s: 2.0, ratio: 1.5, ratio_aim: 1.5 }));
        assert!(ratio_of.is_some_and(|ratio_of| ratio_of.is_met()));
        assert!(LimitRatio::of(Some(3.1), Some(2.0), 1.5).is_some_and(|ratio_of| !ratio_of.is_met()));
        for limit_s in [None, Some(0.0), Some(f64::INFINITY), Some(f64::NAN)] {
            assert_eq!(LimitRatio::of(Some(3.0), limit_s, 1.5), None);
        }
        assert_eq!(LimitRatio::of(None, Some(2.0), 1.5), None);
    }
}
