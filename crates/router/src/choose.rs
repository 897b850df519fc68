//! Which copy of a model a request goes to.

use poorwill_fleet::policy::Rules;
use poorwill_fleet::records::{Costs, Stage};

use super::table::Copy;

/// The better of two awake copies by chance. That spreads requests almost as well as the best of all, and does not send
/// all routers to the same one. See Mitzenmacher, "The power of two choices in randomized load balancing" (2001).
/// Without an awake copy, the one that is ready first.
///
/// `in_flight` are this router's own requests to a copy, which its node may not have published yet.
pub(super) fn choose<'a>(
    copies: &[&'a Copy],
    in_flight: impl Fn(&Copy) -> u64,
    mut chance: impl FnMut(usize) -> usize,
) -> Option<&'a Copy> {
    let usable = copies.iter().copied().filter(|copy| !copy.record.stage.is_out());
    let (awake, others): (Vec<&Copy>, Vec<&Copy>) =
        usable.partition(|copy| copy.record.stage == Stage::Awake);
    let load = |copy: &Copy| in_flight(copy).max(copy.record.requests.all());
    match awake.len() {
        0 => {
            let ready_ms = |copy: &&Copy| {
                let load = load(copy);
                (load == u64::MAX, ready_in_ms(copy.record.stage, copy.record.costs), load)
            };
            // One that is out is better than none: it may be back.
            others.into_iter().min_by_key(ready_ms).or_else(|| copies.first().copied())
        }
        1 => awake.first().copied(),
        count => {
            let first = chance(count);
            // Another one than the first.
            let second = (first + 1 + chance(count - 1)) % count;
            [awake[first], awake[second]].into_iter().min_by_key(|copy| load(copy))
        }
    }
}

/// By its own measurements, or else by what is usual.
fn ready_in_ms(stage: Stage, costs: Costs) -> u64 {
    let usual = Rules::default().usual_costs;
    let ms = |own: Option<u64>, usual: Option<u64>| own.or(usual).unwrap_or_default();
    let wake_ms = ms(costs.wake_ms, usual.wake_ms);
    match stage {
        Stage::Awake => 0,
        Stage::Waking => wake_ms / 2,
        Stage::Asleep => wake_ms,
        Stage::Sleeping => ms(costs.sleep_ms, usual.sleep_ms) + wake_ms,
        Stage::Hibernating => ms(costs.resume_ms, usual.resume_ms),
        Stage::OnDisk => ms(costs.reload_ms, usual.reload_ms),
        Stage::Starting => ms(costs.start_ms, usual.start_ms) / 2,
        Stage::Stopped => ms(costs.start_ms, usual.start_ms),
        Stage::Failed | Stage::Unknown => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use poorwill_fleet::records::{ModelRecord, Requests};

    use super::*;

    fn copy(node: &str, stage: Stage, running: u32) -> Copy {
        let mut record = ModelRecord::new(stage, vec![0]);
        record.requests = Requests { running, queued: 0 };
        Copy { node: node.parse().unwrap(), lease: 1, url: format!("http://{node}"), record }
    }

    fn chosen(copies: &[Copy], in_flight: u64) -> String {
        let mut rng = fastrand::Rng::with_seed(3);
        let all: Vec<&Copy> = copies.iter().collect();
        let of_ours = |copy: &Copy| if copy.node.as_str() == "a" { in_flight } else { 0 };
        choose(&all, of_ours, |below| rng.usize(..below)).unwrap().node.to_string()
    }

    #[test]
    fn awake_copies_come_first_and_the_less_busy_of_them() {
        let two = [copy("a", Stage::Awake, 3), copy("b", Stage::Awake, 2), copy("c", Stage::Asleep, 0)];
        assert_eq!(chosen(&two, 0), "b");
        let two = [copy("a", Stage::Awake, 0), copy("b", Stage::Awake, 2), copy("c", Stage::Asleep, 0)];
        assert_eq!(chosen(&two, 0), "a");
        // What was sent a moment ago counts, though its node has not published it.
        assert_eq!(chosen(&two, 5), "b");
    }

    #[test]
    fn two_different_ones_are_compared() {
        let all: Vec<Copy> = (0..5).map(|nth| copy(&format!("n{nth}"), Stage::Awake, nth)).collect();
        let all: Vec<&Copy> = all.iter().collect();
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..1000 {
            let best = choose(&all, |_| 0, |below| rng.usize(..below)).unwrap();
            assert_ne!(best.node.as_str(), "n4", "the worst loses to any other");
        }
    }

    #[test]
    fn without_an_awake_copy_the_cheapest_wake_is_chosen() {
        let stages = [Stage::Stopped, Stage::OnDisk, Stage::Hibernating, Stage::Asleep, Stage::Failed];
        let copies: Vec<Copy> = stages.map(|stage| copy("x", stage, 0)).into_iter().collect();
        let all: Vec<&Copy> = copies.iter().collect();
        let best = |all: &[&Copy]| choose(all, |_| 0, |_| 0).map(|copy| copy.record.stage);
        assert_eq!(best(&all), Some(Stage::Asleep));
        assert_eq!(best(&all[..3]), Some(Stage::Hibernating));
        assert_eq!(best(&all[4..]), Some(Stage::Failed));
        assert_eq!(best(&[]), None);
        let mut slow = copy("slow", Stage::Asleep, 0);
        slow.record.costs.wake_ms = Some(60_000);
        assert_eq!(best(&[&slow, all[2]]), Some(Stage::Hibernating));
    }
}
