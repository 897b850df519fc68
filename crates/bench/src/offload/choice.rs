//! Rules for the number of slots and repeats, from measured times alone.

/// One slot is computed while the other is filled.
pub const SLOTS_MIN: usize = 2;

/// More would not even out single layers.
pub const SLOTS_MAX: usize = 8;

const REPEATS_MAX: u32 = 1 << 16;

/// Largest growth per measurement: below the noise, a proportion is arbitrary.
const GROWTH_MAX: u32 = 4;

/// Seconds of single layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// Median.
    pub median_s: f64,
    /// Slowest.
    pub slowest_s: f64,
}

/// Slots for a prefetching pass.
///
/// A slot is in use from the start of a layer's copy to the end of its computing, at worst for both slowest
/// times. In a steady pass one copy starts per longer median. Each copy that starts during one use needs a
/// slot. One more lets copies run ahead. Without variation the result is 3. It is at least [`SLOTS_MIN`], and
/// at most [`SLOTS_MAX`], `layers` and `slots_max`.
#[must_use]
pub fn choose_slots(copying: Times, computing: Times, layers: usize, slots_max: usize) -> usize {
    let use_s = copying.slowest_s + computing.slowest_s;
    let period_s = copying.median_s.max(computing.median_s);
    let mut slots = SLOTS_MIN;
    // Ends when the other slots cover one use, and for NaN.
    while slots < SLOTS_MAX && use_s > period_s * f64::from(u32::try_from(slots - 1).unwrap_or(u32::MAX)) {
        slots += 1;
    }
    slots.min(layers).min(slots_max).max(SLOTS_MIN)
}

/// Repeats of a part of a layer that make computing it as long as its copy.
///
/// Computing takes `once_s` alone and `computing_s` with `repeats`. The result is proportional, at most 4 ×
/// `repeats` and 65536, and 0 if computing is longer anyway. While it differs from `repeats`, measure and
/// call again.
#[must_use]
pub fn choose_repeats(copying_s: f64, once_s: f64, repeats: u32, computing_s: f64) -> u32 {
    let most = repeats.max(1).saturating_mul(GROWTH_MAX).min(REPEATS_MAX);
    let each_s = (computing_s - once_s).max(1e-9) / f64::from(repeats.max(1));
    let rounded = ((copying_s - once_s) / each_s).round().clamp(0.0, f64::from(most));
    // Whole and within bounds: the cast is exact.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let repeats = rounded as u32;
    repeats
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steady(seconds: f64) -> Times {
        Times { median_s: seconds, slowest_s: seconds }
    }

    /// From a microsecond to ten seconds.
    fn scales() -> impl Iterator<Item = f64> + Clone {
        (-6..=1).flat_map(|power| [1.0, 2.3, 7.1].map(|part| part * 10f64.powi(power)))
    }

    #[test]
    fn times_that_do_not_vary_take_three_slots() {
        for seconds in scales() {
            assert_eq!(choose_slots(steady(seconds), steady(seconds), 32, 8), 3);
            for factor in [0.01, 0.5, 0.99] {
                assert_eq!(choose_slots(steady(seconds), steady(seconds * factor), 32, 8), 3);
                assert_eq!(choose_slots(steady(seconds * factor), steady(seconds), 32, 8), 3);
            }
        }
    }

    #[test]
    fn slots_grow_with_what_varies_and_keep_their_bounds() {
        for (copy_s, compute_s) in
            scales().flat_map(|copy_s| scales().map(move |compute_s| (copy_s, compute_s)))
        {
            let mut before = 0;
            for slower in [1.0, 1.5, 2.0, 3.0, 10.0, 1e6] {
                let copying = Times { median_s: copy_s, slowest_s: copy_s * slower };
                let slots = choose_slots(copying, steady(compute_s), 32, 100);
                assert!((SLOTS_MIN..=SLOTS_MAX).contains(&slots) && slots >= before);
                // The copies that start during one use, and one.
                let begun = (copy_s * slower + compute_s) / copy_s.max(compute_s);
                let most = f64::from(u32::try_from(slots).unwrap() - 1);
                assert!(slots == SLOTS_MAX || most >= begun - 1e-9, "{slots} {begun}");
                assert!(slots == SLOTS_MIN || most - 1.0 < begun + 1e-9, "{slots} {begun}");
                before = slots;
                for bound in [1, 2, 3, 5] {
                    let expected = slots.min(bound).max(SLOTS_MIN);
                    assert_eq!(choose_slots(copying, steady(compute_s), bound, 100), expected);
                    assert_eq!(choose_slots(copying, steady(compute_s), 32, bound), expected);
                }
            }
            if copy_s >= compute_s {
                assert_eq!(before, SLOTS_MAX);
            }
        }
        for wrong in [f64::NAN, f64::INFINITY, 0.0] {
            let slots = choose_slots(steady(wrong), steady(wrong), 32, 8);
            assert!((SLOTS_MIN..=SLOTS_MAX).contains(&slots), "{wrong}: {slots}");
        }
    }

    #[test]
    fn computing_takes_as_long_as_copying_or_once() {
        for (copy_s, once_s) in scales().flat_map(|copy_s| scales().map(move |once_s| (copy_s, once_s))) {
            let each_s = once_s / 10.0;
            let takes_s = |repeats: u32| once_s + f64::from(repeats) * each_s;
            let repeats = (0..8).fold(10, |repeats: u32, _| {
                let next = choose_repeats(copy_s, once_s, repeats, takes_s(repeats));
                assert!(next <= repeats.max(1) * 4, "{copy_s} {once_s}: {next} after {repeats}");
                next
            });
            let took_s = takes_s(repeats);
            match repeats {
                0 => assert!(once_s + each_s / 2.0 >= copy_s - 1e-12, "{copy_s} {once_s}"),
                REPEATS_MAX => assert!(took_s <= copy_s * 1.0001, "{copy_s} {once_s}"),
                _ => assert!((took_s - copy_s).abs() <= each_s * 0.5001, "{copy_s} {once_s}: {repeats}"),
            }
            // A second call changes nothing.
            if repeats > 0 {
                assert_eq!(choose_repeats(copy_s, once_s, repeats, took_s), repeats);
            }
            // A difference lost in noise leads to more repeats.
            let unseen = choose_repeats(copy_s, once_s, 10, once_s);
            assert_eq!(unseen, if copy_s > once_s { 40 } else { 0 }, "{copy_s} {once_s}");
        }
        for (copy_s, once_s) in [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (f64::INFINITY, 1.0), (0.0, 0.0)] {
            assert!((0..=REPEATS_MAX).contains(&choose_repeats(copy_s, once_s, 3, once_s)));
        }
    }

    #[test]
    fn computing_with_a_part_that_does_not_grow_is_come_near_to() {
        // A constant, the first repeat, and each.
        let took = |repeats: u32| 0.004 + if repeats > 0 { 0.001 } else { 0.0 } + 0.0005 * f64::from(repeats);
        let mut repeats = 1;
        for _ in 0..8 {
            repeats = choose_repeats(0.020, took(0), repeats, took(repeats));
        }
        assert!((took(repeats) - 0.020).abs() < 0.001, "{repeats}");
    }
}
