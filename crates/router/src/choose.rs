//! Which copy of a model a request goes to.

use poorwill_fleet::policy::Rules;
use poorwill_fleet::records::{Costs, Stage};
use poorwill_front::affinity::{Affinity, hash};

use super::rendezvous;
use super::table::Copy;

/// The load of a copy that refused a request a moment ago.
pub(super) const FAILED: u64 = u64::MAX;

/// The copy that made what the request goes on from, if it may still have that. Else the awake one of its key.
///
/// Without a key, the better of two awake copies by chance. That spreads requests almost as well as the best of all, and
/// does not send all routers to the same one. See Mitzenmacher, "The power of two choices in randomized load balancing"
/// (2001). Without an awake copy, the one that is ready first.
pub(super) fn choose<'a>(
    copies: &[&'a Copy],
    affinity: Affinity,
    load: impl Fn(&Copy) -> u64,
    mut chance: impl FnMut(usize) -> usize,
) -> Option<&'a Copy> {
    let usable = copies.iter().copied().filter(|copy| !copy.record.stage.is_out());
    let made_it = |copy: &&Copy| {
        let is_it = affinity.place == Some(hash(copy.url.as_bytes()));
        is_it && copy.record.stage.is_ready()
    };
    if affinity.place.is_some()
        && let Some(maker) = usable.clone().find(made_it)
    {
        return Some(maker);
    }
    let (awake, others): (Vec<&Copy>, Vec<&Copy>) =
        usable.partition(|copy| copy.record.stage == Stage::Awake);
    if let Some(key) = affinity.key {
        let loads = awake.iter().map(|copy| (copy.node.as_str(), load(copy)));
        let (good, loads): (Vec<&Copy>, Vec<(&str, u64)>) =
            awake.iter().copied().zip(loads).filter(|(_, (_, load))| *load != FAILED).unzip();
        if let Some(at) = rendezvous::choose(key, &loads) {
            return good.get(at).copied();
        }
    }
    match awake.len() {
        0 => {
            let ready_ms = |copy: &&Copy| {
                let load = load(copy);
                (load == FAILED, ready_in_ms(copy.record.stage, copy.record.costs), load)
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

/// What has begun is half done.
pub(super) fn ready_in_ms(stage: Stage, costs: Costs) -> u64 {
    let all_ms = costs.ready_ms(stage, Rules::default().usual_costs);
    match stage {
        Stage::Waking | Stage::Starting => all_ms / 2,
        Stage::Failed | Stage::Unknown => u64::MAX,
        _ => all_ms,
    }
}

#[cfg(test)]
mod tests {
    use poorwill_fleet::records::{ModelRecord, Requests};

    use super::*;

    fn copy(node: &str, stage: Stage, running: u32) -> Copy {
        let mut record = ModelRecord::new(stage, vec![0]);
        record.requests = Requests { running, queued: 0 };
        Copy { node: node.parse().unwrap(), url: format!("http://{node}"), record }
    }

    fn chosen(copies: &[Copy], in_flight: u64) -> String {
        let mut rng = fastrand::Rng::with_seed(3);
        let all: Vec<&Copy> = copies.iter().collect();
        let of_ours = |copy: &Copy| if copy.node.as_str() == "a" { in_flight } else { 0 };
        let load = |copy: &Copy| of_ours(copy).max(published(copy));
        choose(&all, Affinity::default(), load, |below| rng.usize(..below)).unwrap().node.to_string()
    }

    fn published(copy: &Copy) -> u64 {
        copy.record.requests.all()
    }

    fn drawn(copies: &[Copy], affinity: Affinity, failed: &str) -> String {
        let all: Vec<&Copy> = copies.iter().collect();
        let load = |copy: &Copy| if copy.node.as_str() == failed { FAILED } else { published(copy) };
        choose(&all, affinity, load, |_| 0).unwrap().node.to_string()
    }

    #[test]
    fn a_key_has_its_copy_among_awake_ones() {
        let mut copies = [
            copy("a", Stage::Awake, 4),
            copy("b", Stage::Awake, 4),
            copy("c", Stage::Awake, 4),
            copy("d", Stage::Asleep, 0),
        ];
        let mut seen = std::collections::BTreeSet::new();
        for key in 0..100 {
            let affinity = Affinity { key: Some(key), place: None };
            let first = drawn(&copies, affinity, "");
            assert_eq!(drawn(&copies, affinity, ""), first);
            let other = drawn(&copies, affinity, &first);
            assert!(other != first && other != "d", "{first} {other}");
            seen.insert(first);
        }
        assert_eq!(seen.len(), 3);
        // Above the bound.
        copies[0].record.requests.running = 12;
        assert!((0..100).all(|key| drawn(&copies, Affinity { key: Some(key), place: None }, "") != "a"));
        // All have failed.
        let all: Vec<&Copy> = copies.iter().collect();
        let chosen = choose(&all, Affinity { key: Some(1), place: None }, |_| FAILED, |_| 0);
        assert_eq!(chosen.map(|copy| copy.record.stage), Some(Stage::Awake));
    }

    #[test]
    fn what_goes_on_from_a_response_goes_where_that_was_made() {
        let copies = [copy("a", Stage::Awake, 0), copy("b", Stage::Asleep, 9), copy("c", Stage::Stopped, 0)];
        let place =
            |name: &str| Affinity { key: Some(1), place: Some(hash(format!("http://{name}").as_bytes())) };
        assert_eq!(drawn(&copies, place("b"), ""), "b");
        // It has refused another one, and no other node has it.
        assert_eq!(drawn(&copies, place("b"), "b"), "b");
        // It was lost with its process, or is gone.
        for maker in ["c", "gone"] {
            assert_eq!(drawn(&copies, place(maker), ""), "a", "{maker}");
        }
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
            let best = choose(&all, Affinity::default(), published, |below| rng.usize(..below)).unwrap();
            assert_ne!(best.node.as_str(), "n4", "the worst loses to any other");
        }
    }

    #[test]
    fn without_an_awake_copy_the_cheapest_wake_is_chosen() {
        let stages = [Stage::Stopped, Stage::OnDisk, Stage::Hibernating, Stage::Asleep, Stage::Failed];
        let copies: Vec<Copy> = stages.map(|stage| copy("x", stage, 0)).into_iter().collect();
        let all: Vec<&Copy> = copies.iter().collect();
        let best =
            |all: &[&Copy]| choose(all, Affinity::default(), published, |_| 0).map(|copy| copy.record.stage);
        assert_eq!(best(&all), Some(Stage::Asleep));
        assert_eq!(best(&all[..3]), Some(Stage::Hibernating));
        assert_eq!(best(&all[4..]), Some(Stage::Failed));
        assert_eq!(best(&[]), None);
        let mut slow = copy("slow", Stage::Asleep, 0);
        slow.record.costs.wake_ms = Some(60_000);
        assert_eq!(best(&[&slow, all[2]]), Some(Stage::Hibernating));
    }
}
