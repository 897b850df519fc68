//! How many slots there are, and how often a layer is computed: rules over measured times, and nothing else.

/// Fewest slots: one is computed on while the other is filled.
pub const SLOTS_MIN: usize = 2;

/// Most slots: what more would even out is no variation of single layers.
pub const SLOTS_MAX: usize = 8;

/// Most often that a part of a layer is computed again.
const REPEATS_MAX: u32 = 1 << 16;

/// How many times as often, at most, as was measured last. What is measured with a few repeats may be less than the
/// measurement varies, and a rule of proportion makes anything of that.
const GROWTH_MAX: u32 = 4;

/// How long single layers took, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// The one in the middle.
    pub median_s: f64,
    /// The slowest.
    pub slowest_s: f64,
}

/// How many slots a prefetching pass needs.
///
/// A slot is taken from the beginning of a layer's copy to the end of its computing: at worst for the slowest copy
/// and the slowest computing together. In a steady pass a copy begins once in the longer of the two medians. So
/// many slots as copies begin while one is taken are in use at the same time; with one more, no copy waits for the
/// layer that is being computed. Two times that never vary and are equal make it 3, one that is far longer than the
/// other as well. It is [`SLOTS_MIN`] at least, and the least of [`SLOTS_MAX`], the number of layers, and what
/// there is room for at most (which is `SLOTS_MIN` or more).
#[must_use]
pub fn slots_of(copying: Times, computing: Times, layers: usize, room: usize) -> usize {
    let taken_s = copying.slowest_s + computing.slowest_s;
    let period_s = copying.median_s.max(computing.median_s);
    let mut slots = SLOTS_MIN;
    // One more for as long as those but one have less time than one is taken. Also ends where times are no numbers.
    while slots < SLOTS_MAX && taken_s > period_s * f64::from(u32::try_from(slots - 1).unwrap_or(u32::MAX)) {
        slots += 1;
    }
    slots.min(layers).min(room).max(SLOTS_MIN)
}

/// How often a part of a layer is computed again so that computing the layer takes about as long as its copy, if
/// computing it takes `once_s` without, and `computing_s` with `repeats`: in proportion, rounded, at most four times as
/// often as `repeats` and 65536 times, and not at all where it takes longer without. As long as the answer is another
/// than `repeats`, it is to be measured and asked about again.
#[must_use]
pub fn repeats_of(copying_s: f64, once_s: f64, repeats: u32, computing_s: f64) -> u32 {
    let most = repeats.max(1).saturating_mul(GROWTH_MAX).min(REPEATS_MAX);
    let each_s = (computing_s - once_s).max(1e-9) / f64::from(repeats.max(1));
    let rounded = ((copying_s - once_s) / each_s).round().clamp(0.0, f64::from(most));
    // Neither truncates: it is a whole number between these.
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

    /// From a millionth of a second to ten seconds.
    fn scales() -> impl Iterator<Item = f64> + Clone {
        (-6..=1).flat_map(|power| [1.0, 2.3, 7.1].map(|part| part * 10f64.powi(power)))
    }

    #[test]
    fn times_that_do_not_vary_take_three_slots() {
        for seconds in scales() {
            assert_eq!(slots_of(steady(seconds), steady(seconds), 32, 8), 3);
            for factor in [0.01, 0.5, 0.99] {
                assert_eq!(slots_of(steady(seconds), steady(seconds * factor), 32, 8), 3);
                assert_eq!(slots_of(steady(seconds * factor), steady(seconds), 32, 8), 3);
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
                let slots = slots_of(copying, steady(compute_s), 32, 100);
                assert!((SLOTS_MIN..=SLOTS_MAX).contains(&slots) && slots >= before);
                // As many copies as begin while a slot is taken, and one.
                let begun = (copy_s * slower + compute_s) / copy_s.max(compute_s);
                let most = f64::from(u32::try_from(slots).unwrap() - 1);
                assert!(slots == SLOTS_MAX || most >= begun - 1e-9, "{slots} {begun}");
                assert!(slots == SLOTS_MIN || most - 1.0 < begun + 1e-9, "{slots} {begun}");
                before = slots;
                for bound in [1, 2, 3, 5] {
                    let expected = slots.min(bound).max(SLOTS_MIN);
                    assert_eq!(slots_of(copying, steady(compute_s), bound, 100), expected);
                    assert_eq!(slots_of(copying, steady(compute_s), 32, bound), expected);
                }
            }
            if copy_s >= compute_s {
                assert_eq!(before, SLOTS_MAX);
            }
        }
        for wrong in [f64::NAN, f64::INFINITY, 0.0] {
            let slots = slots_of(steady(wrong), steady(wrong), 32, 8);
            assert!((SLOTS_MIN..=SLOTS_MAX).contains(&slots), "{wrong}: {slots}");
        }
    }

    #[test]
    fn computing_takes_as_long_as_copying_or_once() {
        for (copy_s, once_s) in scales().flat_map(|copy_s| scales().map(move |once_s| (copy_s, once_s))) {
            let each_s = once_s / 10.0;
            let takes_s = |repeats: u32| once_s + f64::from(repeats) * each_s;
            let repeats = (0..8).fold(10, |repeats: u32, _| {
                let next = repeats_of(copy_s, once_s, repeats, takes_s(repeats));
                assert!(next <= repeats.max(1) * 4, "{copy_s} {once_s}: {next} after {repeats}");
                next
            });
            let took_s = takes_s(repeats);
            match repeats {
                0 => assert!(once_s + each_s / 2.0 >= copy_s - 1e-12, "{copy_s} {once_s}"),
                REPEATS_MAX => assert!(took_s <= copy_s * 1.0001, "{copy_s} {once_s}"),
                _ => assert!((took_s - copy_s).abs() <= each_s * 0.5001, "{copy_s} {once_s}: {repeats}"),
            }
            // Asked again with what that took, it is the same.
            if repeats > 0 {
                assert_eq!(repeats_of(copy_s, once_s, repeats, took_s), repeats);
            }
            // What is lost in noise is asked about again, with more of it.
            let unseen = repeats_of(copy_s, once_s, 10, once_s);
            assert_eq!(unseen, if copy_s > once_s { 40 } else { 0 }, "{copy_s} {once_s}");
        }
        for (copy_s, once_s) in [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (f64::INFINITY, 1.0), (0.0, 0.0)] {
            assert!((0..=REPEATS_MAX).contains(&repeats_of(copy_s, once_s, 3, once_s)));
        }
    }

    #[test]
    fn computing_with_a_part_that_does_not_grow_is_come_near_to() {
        // So much in any case, so much for the first of each, and so much each time.
        let took = |repeats: u32| 0.004 + if repeats > 0 { 0.001 } else { 0.0 } + 0.0005 * f64::from(repeats);
        let mut repeats = 1;
        for _ in 0..8 {
            repeats = repeats_of(0.020, took(0), repeats, took(repeats));
        }
        assert!((took(repeats) - 0.020).abs() < 0.001, "{repeats}");
    }
}
