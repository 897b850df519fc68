//! Which changes of a node's records are news, and how often they are written.
//!
//! Promises:
//!
//! - A stage, a need, and what else decides about placements is news at once.
//! - Counts, sizes, rates and costs are news once they leave their steps. A record is written for them once in
//!   [`RECORD_EVERY`] at most.
//! - For these, a node writes at most one record a second on average, whatever its traffic. Those that waited longest
//!   come first.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use poorwill_fleet::name::ModelName;
use poorwill_fleet::records::{GpuRecord, ModelRecord, NodeRecord, Requests};

/// How often a record is written for a count, size, rate or cost.
const RECORD_EVERY: Duration = Duration::from_secs(5);
/// How often a node writes any record for one.
const WRITE_EVERY: Duration = Duration::from_secs(1);
/// Most such writes at once, after a time without any.
const BURST: u32 = 5;
/// Free host memory changes all the time.
const HOST_STEP_BYTES: u64 = 1 << 30;
/// A smaller change is none.
const HOST_CLOSE_BYTES: u64 = HOST_STEP_BYTES + HOST_STEP_BYTES / 2;

/// What was given out last, and when.
#[derive(Debug, Default)]
pub(super) struct Pace {
    node: Option<Written<NodeRecord>>,
    models: BTreeMap<ModelName, Written<ModelRecord>>,
    allowance: Allowance,
}

#[derive(Debug)]
struct Written<T> {
    record: T,
    at: Instant,
}

/// So many writes a second, and a few at once.
#[derive(Debug, Default)]
struct Allowance {
    /// When all that was written is paid for.
    paid_at: Option<Instant>,
}

/// A record whose parts are news at different times.
trait Paced: Eq + Sized {
    /// Counts and free host memory in steps. What is close to what was written stays as that.
    fn stepped(self, before: Option<&Self>) -> Self;

    /// Whether more than a count, size, rate or cost is different.
    fn is_urgent(&self, before: &Self) -> bool;
}

impl Pace {
    /// The records to have in etcd now.
    pub(super) fn settle(
        &mut self,
        node: NodeRecord,
        models: BTreeMap<ModelName, ModelRecord>,
        now: Instant,
    ) -> (NodeRecord, BTreeMap<ModelName, ModelRecord>) {
        let mut late = Vec::new();
        let (mut node, later) = compared(self.node.take(), node, now);
        late.extend(later.map(|record| (node.at, Late::Node(record))));
        let mut before = std::mem::take(&mut self.models);
        for (name, model) in models {
            let (written, later) = compared(before.remove(&name), model, now);
            late.extend(later.map(|record| (written.at, Late::Model(name.clone(), record))));
            self.models.insert(name, written);
        }
        late.sort_by_key(|(at, _)| *at);
        for (_, late) in late {
            if !self.allowance.take(now) {
                break;
            }
            match late {
                Late::Node(record) => node = Written { record, at: now },
                Late::Model(name, record) => {
                    self.models.insert(name, Written { record, at: now });
                }
            }
        }
        let record = node.record.clone();
        self.node = Some(node);
        let of_model =
            |(name, written): (&ModelName, &Written<ModelRecord>)| (name.clone(), written.record.clone());
        (record, self.models.iter().map(of_model).collect())
    }
}

/// A record that may be written when the allowance is there.
enum Late {
    Node(NodeRecord),
    Model(ModelName, ModelRecord),
}

/// What is written of a record that is new or urgently different, and else what was. In that case also the record, if it
/// is different and due.
fn compared<T: Paced>(before: Option<Written<T>>, record: T, now: Instant) -> (Written<T>, Option<T>) {
    let record = record.stepped(before.as_ref().map(|written| &written.record));
    match before {
        Some(written) if !record.is_urgent(&written.record) => {
            let is_due = now.saturating_duration_since(written.at) >= RECORD_EVERY;
            let later = (is_due && record != written.record).then_some(record);
            (written, later)
        }
        _ => (Written { record, at: now }, None),
    }
}

impl Allowance {
    /// Counts a write, if there may be one now.
    fn take(&mut self, now: Instant) -> bool {
        let paid_at = self.paid_at.map_or(now, |at| at.max(now));
        let may_be = paid_at + WRITE_EVERY <= now + WRITE_EVERY * BURST;
        if may_be {
            self.paid_at = Some(paid_at + WRITE_EVERY);
        }
        may_be
    }
}

impl Paced for NodeRecord {
    fn stepped(mut self, before: Option<&Self>) -> Self {
        let host_free_bytes = self.host_free_bytes;
        self.host_free_bytes = match before.map(|before| before.host_free_bytes) {
            Some(before) if host_free_bytes.abs_diff(before) <= HOST_CLOSE_BYTES => before,
            _ => host_free_bytes / HOST_STEP_BYTES * HOST_STEP_BYTES,
        };
        self
    }

    fn is_urgent(&self, before: &Self) -> bool {
        let mut paced = self.clone();
        paced.host_free_bytes = before.host_free_bytes;
        for (gpu, before) in paced.gpus.iter_mut().zip(&before.gpus) {
            *gpu = GpuRecord { budget_bytes: before.budget_bytes, ..*gpu };
        }
        paced != *before
    }
}

impl Paced for ModelRecord {
    fn stepped(mut self, before: Option<&Self>) -> Self {
        let held = before.map(|before| before.requests).unwrap_or_default();
        self.requests = Requests {
            running: step(self.requests.running, held.running),
            queued: step(self.requests.queued, held.queued),
        };
        self
    }

    fn is_urgent(&self, before: &Self) -> bool {
        let Self { requests, rate, host_bytes, costs, .. } = *before;
        Self { requests, rate, host_bytes, costs, ..self.clone() } != *before
    }
}

/// The next power of two, and the one before while the count is above three eighths of it. None is always news.
fn step(count: u32, before: u32) -> u32 {
    let is_kept = count > 0 && count <= before && u64::from(count) * 8 > u64::from(before) * 3;
    match count {
        _ if is_kept => before,
        0 => 0,
        _ => count.checked_next_power_of_two().unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use poorwill_fleet::records::{Costs, Rate, Stage};

    use super::*;

    /// As often as a node looks.
    const TICK: Duration = Duration::from_millis(500);

    fn model(nth: usize) -> ModelName {
        format!("model-{nth}").parse().unwrap()
    }

    fn node(host_free_bytes: u64) -> NodeRecord {
        let gpu = GpuRecord { total_bytes: 80 << 30, budget_bytes: 40 << 30 };
        NodeRecord { gpus: vec![gpu], host_free_bytes, ..NodeRecord::new("i") }
    }

    fn busy(running: u32) -> ModelRecord {
        let mut record = ModelRecord::new(Stage::Awake, vec![0]);
        record.requests.running = running;
        record
    }

    /// What differs between two answers.
    fn writes(
        before: &(NodeRecord, BTreeMap<ModelName, ModelRecord>),
        now: &(NodeRecord, BTreeMap<ModelName, ModelRecord>),
    ) -> usize {
        let of_models = now.1.iter().filter(|(name, record)| before.1.get(*name) != Some(record)).count();
        of_models + usize::from(before.0 != now.0)
    }

    #[test]
    fn counts_come_in_steps_that_hold() {
        let wanted = [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (u32::MAX, u32::MAX)];
        for (count, stepped) in wanted {
            assert_eq!(step(count, 0), stepped, "{count}");
        }
        // Between 4 and 5, and about any other border.
        assert_eq!([5, 4, 5, 4].map(|count| step(count, 8)), [8; 4]);
        assert_eq!([(3, 8), (1, 4), (1, 2), (0, 1)].map(|(count, held)| step(count, held)), [4, 1, 2, 0]);
        for (count, held) in (1..300).flat_map(|count| (0..12).map(move |held| (count, 1 << held))) {
            let stepped = step(count, held);
            assert!(stepped >= count && u64::from(stepped) * 3 < u64::from(count) * 8, "{count} {held}");
        }
    }

    #[test]
    fn a_node_writes_one_record_a_second_under_any_traffic() {
        for seed in 0..8 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (mut pace, began) = (Pace::default(), Instant::now());
            let models = rng.usize(1..60);
            let most = 1 << rng.u32(0..12);
            let mut now = began;
            let fresh = |rng: &mut fastrand::Rng| {
                let host_free_bytes = rng.u64(..(512 << 30));
                let records = (0..models).map(|nth| {
                    let mut record = busy(rng.u32(..most));
                    record.requests.queued = rng.u32(..most);
                    record.rate = Rate::from_micros(rng.u64(..100_000_000));
                    record.host_bytes = rng.u64(..(40 << 30));
                    record.costs = Costs { wake_ms: Some(rng.u64(..9000)), ..Costs::default() };
                    (model(nth), record)
                });
                (node(host_free_bytes), records.collect::<BTreeMap<_, _>>())
            };
            let (record, records) = fresh(&mut rng);
            let mut before = pace.settle(record, records, now);
            let (mut written, mut at) = (0_u32, vec![began; models]);
            for tick in 1..600 {
                now = began + TICK * tick;
                let (record, records) = fresh(&mut rng);
                let after = pace.settle(record, records, now);
                written += u32::try_from(writes(&before, &after)).unwrap();
                let seconds = (now - began).as_secs_f64();
                assert!(f64::from(written) <= seconds + f64::from(BURST), "{written} in {seconds} s");
                for (nth, at) in at.iter_mut().enumerate() {
                    if before.1[&model(nth)] != after.1[&model(nth)] {
                        assert!(now - *at >= RECORD_EVERY, "{:?}", now - *at);
                        *at = now;
                    }
                }
                before = after;
            }
            // None is left out for ever: all of them once, and some seconds for those that change by nothing.
            let oldest = at.iter().min().copied().unwrap_or(now);
            assert!(
                now - oldest < WRITE_EVERY * 2 * u32::try_from(models + 12).unwrap(),
                "{:?}",
                now - oldest
            );
        }
    }

    #[test]
    fn stages_and_needs_are_written_at_once() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        let mut settle = |record: ModelRecord, node: NodeRecord, after: Duration| {
            let (node, models) = pace.settle(node, [(model(0), record)].into(), now + after);
            (node, models[&model(0)].clone())
        };
        let (_, first) = settle(busy(3), node(7 << 30), Duration::ZERO);
        assert_eq!(first.requests.running, 4);
        let (_, held) = settle(busy(100), node(7 << 30), TICK);
        assert_eq!(held, first);
        let asleep = ModelRecord { stage: Stage::Asleep, need_bytes: Some(vec![1 << 30]), ..busy(0) };
        assert_eq!(settle(asleep.clone(), node(7 << 30), TICK * 2).1, asleep);
        let more = ModelRecord { need_bytes: Some(vec![2 << 30]), ..asleep };
        let draining = NodeRecord { is_draining: true, ..node(7 << 30) };
        assert_eq!(settle(more.clone(), draining.clone(), TICK * 3), (draining, more));
    }

    #[test]
    fn free_host_memory_is_news_beyond_a_step_and_a_half() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        let mut free = |mib: u64| {
            now += RECORD_EVERY;
            pace.settle(node(mib << 20), BTreeMap::new(), now).0.host_free_bytes >> 20
        };
        let seen = [7000, 7100, 7300, 7679, 7681, 6000, 5631].map(&mut free);
        assert_eq!(seen, [6144, 6144, 6144, 6144, 7168, 7168, 5120]);
    }
}
