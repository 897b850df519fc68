//! What an operator can change where a GPU spends most of its time in swaps.
//!
//! Promises: advice is one sentence with what was seen, about models that were seen. There is none for a small share, or
//! before enough was seen.

use std::collections::BTreeMap;
use std::time::Duration;

use poorwill::ByteSize;

use super::snapshot::{GpuNow, Snapshot, Swap, SwapPath};
use crate::config::{Config, Model};

/// The share of time in swaps from which on there is advice.
const LARGE: f64 = 0.5;
/// What has to be seen before.
const WINDOW_MIN_S: f64 = 60.0;
/// A turn of so many swaps makes a share of a tenth.
const SWAPS_PER_TURN: f64 = 9.0;
/// The largest lack of memory that is worth a mention.
const LACK_MAX: u64 = 4;

/// A model that became ready on the GPU in the window.
struct Arrivals<'a> {
    model: &'a Model,
    count: usize,
    swap_s: f64,
    need_bytes: Option<u64>,
    admitted: u64,
}

/// For each GPU.
pub(super) fn advise(now: &mut Snapshot, config: &Config, unix_ms: u64) {
    for nth in 0..now.gpus.len() {
        now.gpus[nth].advice = advice(now, &now.gpus[nth], config, unix_ms);
    }
}

fn advice(now: &Snapshot, gpu: &GpuNow, config: &Config, unix_ms: u64) -> Option<String> {
    let seen = gpu.swapping;
    if seen.recent_share < LARGE || seen.recent_window_s < WINDOW_MIN_S {
        return None;
    }
    let window = Duration::try_from_secs_f64(seen.recent_window_s).unwrap_or_default();
    let from = unix_ms.saturating_sub(u64::try_from(window.as_millis()).unwrap_or(u64::MAX));
    let (all, oldest) = arrivals(now, gpu, config, from);
    // Not all swaps of the window are kept.
    let seen_s =
        Duration::from_millis(unix_ms.saturating_sub(oldest)).as_secs_f64().min(seen.recent_window_s);
    let [first, second, ..] = &all[..] else { return Some(of_one(all.first())) };
    let count: usize = all.iter().map(|one| one.count).sum();
    let swap_s = all.iter().map(|one| one.swap_s).sum::<f64>() / as_f64(count);
    let turn_s = seen_s * (1.0 - seen.recent_share) / as_f64(count);
    let pair = format!("`{}` and `{}`", first.model.name, second.model.name);
    Some(
        of_memory(&pair, first, second, gpu.total_bytes)
            .unwrap_or_else(|| of_turns(&all, &pair, swap_s, turn_s)),
    )
}

/// The models that became ready since then, the most frequent first, and when the first did.
fn arrivals<'a>(now: &Snapshot, gpu: &GpuNow, config: &'a Config, from: u64) -> (Vec<Arrivals<'a>>, u64) {
    let is_in = |swap: &&Swap| swap.at_unix_ms >= from && swap.path != SwapPath::Found;
    let (mut by_model, mut oldest) = (BTreeMap::<&str, (usize, f64)>::new(), from);
    for swap in now.swaps.iter().filter(is_in) {
        let (count, swap_s) = by_model.entry(&swap.model).or_default();
        (*count, *swap_s) = (*count + 1, *swap_s + swap.whole_s);
    }
    if let Some(last) = now.swaps.last().filter(is_in) {
        oldest = last.at_unix_ms;
    }
    let arrivals = now.models.iter().filter_map(|model| {
        let nth = model.gpus.iter().position(|other| *other == gpu.gpu)?;
        let (count, swap_s) = *by_model.get(model.name.as_str())?;
        let configured = config.models.iter().find(|other| other.name == model.name)?;
        let need_bytes = model.known_need_bytes.as_ref().and_then(|bytes| bytes.get(nth)).copied();
        Some(Arrivals { model: configured, count, swap_s, need_bytes, admitted: model.admitted })
    });
    let mut arrivals: Vec<_> = arrivals.collect();
    arrivals.sort_by_key(|one| std::cmp::Reverse(one.count));
    (arrivals, oldest)
}

/// No models take turns.
fn of_one(only: Option<&Arrivals<'_>>) -> String {
    match only {
        None => "no model became ready in this time: see the failures of its models, and raise `start_max` or `wake_max` \
                 if they are only slow"
            .to_owned(),
        Some(Arrivals { model, count, .. }) => {
            let name = &model.name;
            let remedy = if model.rules.idle_max.is_some() { "raise its `idle_max`" } else { "see its failures" };
            format!("`{name}` alone came and went, {count} times: {remedy}")
        }
    }
}

/// Two models that nearly fit, or do.
fn of_memory(pair: &str, first: &Arrivals<'_>, second: &Arrivals<'_>, total: Option<u64>) -> Option<String> {
    let (total, both) = (total?, first.need_bytes?.saturating_add(second.need_bytes?));
    let lack = both.saturating_sub(total);
    if lack == 0 {
        return Some(format!("{pair} fit beside each other: give both one name as `together`"));
    }
    (lack <= total / LACK_MAX).then(|| {
        format!(
            "{pair} lack {} to be awake together: lower what their engines take, or use a larger GPU",
            ByteSize(lack)
        )
    })
}

/// Models that cannot be awake together.
fn of_turns(all: &[Arrivals<'_>], pair: &str, swap_s: f64, turn_s: f64) -> String {
    let turn_max_s = all.iter().map(|one| one.model.rules.turn_max.as_secs_f64()).fold(0.0, f64::max);
    let wanted_s = (swap_s * SWAPS_PER_TURN).ceil();
    if turn_s >= turn_max_s * 0.7 && turn_max_s < wanted_s {
        return format!(
            "turns of {pair} end at `turn_max`, {turn_max_s:.0} s, and a swap takes {swap_s:.1} s: raise it to {wanted_s:.0} s, \
             for fewer swaps and longer waits"
        );
    }
    let admitted: u64 = all.iter().map(|one| one.admitted).sum();
    let busiest = all.iter().max_by_key(|one| one.admitted);
    if let Some(busiest) = busiest
        && busiest.admitted.saturating_mul(2) > admitted
        && all.iter().all(|one| one.model.rules.keep_weight == busiest.model.rules.keep_weight)
    {
        let name = &busiest.model.name;
        return format!(
            "`{name}` gets most requests, and leaves as often as others: raise its `keep_weight`"
        );
    }
    format!(
        "models are awake for {turn_s:.1} s and a swap takes {swap_s:.1} s: raise `residence_min` or `grace`, so that each \
         answers more before it leaves, or keep fewer models on this GPU"
    )
}

fn as_f64(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use poorwill_front::requests::Recent;
    use poorwill_rotation_policy::StageName;

    use super::*;
    use crate::service::snapshot::{ModelNow, Swapping};

    const NOW: u64 = 1_000_000_000;
    const MIB: u64 = 1 << 20;

    /// What is seen, and what the advice has to say.
    struct Case {
        rules: &'static str,
        share: f64,
        /// Name, need in MiB, requests, swaps in the last 600 s.
        models: &'static [(&'static str, Option<u64>, u64, usize)],
        says: &'static [&'static str],
    }

    const SEEN: [Case; 9] = [
        Case { rules: "", share: 0.49, models: &[("a", None, 1, 9), ("b", None, 1, 9)], says: &[] },
        Case { rules: "", share: 0.9, models: &[], says: &["no model became ready", "`start_max`"] },
        Case {
            rules: "idle_max = \"1s\"",
            share: 0.9,
            models: &[("a", None, 1, 9)],
            says: &["`a` alone came and went, 9 times", "`idle_max`"],
        },
        Case { rules: "", share: 0.9, models: &[("a", None, 1, 9)], says: &["see its failures"] },
        Case {
            rules: "",
            share: 0.9,
            models: &[("a", Some(250), 1, 3), ("b", Some(150), 1, 9), ("c", Some(240), 1, 9)],
            says: &["`b` and `c` fit", "`together`"],
        },
        Case {
            rules: "",
            share: 0.9,
            models: &[("a", Some(250), 1, 9), ("b", Some(200), 1, 9)],
            says: &["`a` and `b` lack 50 MiB"],
        },
        // 600 s with 18 swaps of 2 s that take half of the time: turns of 16.7 s.
        Case {
            rules: "turn_max = \"17s\"",
            share: 0.5,
            models: &[("a", Some(400), 9, 9), ("b", Some(400), 1, 9)],
            says: &["`turn_max`, 17 s", "raise it to 18 s"],
        },
        Case {
            rules: "turn_max = \"60s\"",
            share: 0.5,
            models: &[("a", None, 9, 9), ("b", None, 1, 9)],
            says: &["`a` gets most requests", "`keep_weight`"],
        },
        Case {
            rules: "turn_max = \"60s\"",
            share: 0.5,
            models: &[("a", None, 1, 9), ("b", None, 1, 9)],
            says: &["awake for 16.7 s", "`grace`"],
        },
    ];

    fn swap(model: &str, at_unix_ms: u64, path: SwapPath, whole_s: f64) -> Swap {
        let (model, phases, left) = (model.to_owned(), Vec::new(), Vec::new());
        Swap { at_unix_ms, model, path, total_s: whole_s, whole_s, waited_s: None, phases, left }
    }

    fn model(name: &str, need_mib: Option<u64>, admitted: u64) -> ModelNow {
        ModelNow {
            name: name.to_owned(),
            aliases: Vec::new(),
            adapters: Vec::new(),
            engine: "http",
            url: String::new(),
            gpus: vec![0],
            stage: StageName::Ready,
            stage_s: 0.0,
            is_ready: true,
            is_starting: false,
            is_pinned: false,
            is_supervised: true,
            queued: 0,
            running: 0,
            kept: 0,
            admitted,
            refused: 0,
            held_bytes: None,
            residue_bytes: None,
            can_hibernate: false,
            cannot_hibernate: None,
            host_bytes: 0,
            need_bytes: None,
            known_need_bytes: need_mib.map(|mib| vec![mib * MIB]),
            failures: 0,
            last_failure: None,
            starts: 0,
            oldest_wait_s: None,
            wake_s: None,
            start_s: None,
            leave_s: None,
            hibernate_s: None,
            resume_s: None,
            canary_kind: None,
            state_writes_failed: 0,
            recent: Recent::default(),
        }
    }

    #[test]
    fn advice_is_about_what_was_seen() {
        for Case { rules, share, models, says } in SEEN {
            let mut file = format!("[every_model]\n{rules}\n");
            for (nth, (name, ..)) in models.iter().enumerate() {
                file += &format!("[[model]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{}\"\n", 1000 + nth);
            }
            if models.is_empty() {
                file += "[[model]]\nname = \"other\"\nurl = \"http://127.0.0.1:1\"\ngpus = [1]\n";
            }
            let config = Config::parse(&file, &|_| Ok(String::new())).unwrap();
            let swapping = Swapping { recent_share: share, recent_window_s: 600.0, share: 0.0, total_s: 0.0 };
            let gpu = GpuNow {
                gpu: 0,
                is_measured: true,
                total_bytes: Some(400 * MIB),
                free_bytes: None,
                reclaimable_bytes: None,
                promised_bytes: 0,
                models: Vec::new(),
                swapping,
                advice: None,
            };
            let mut now = Snapshot {
                uptime_s: 600.0,
                is_ending: false,
                profile: None,
                models: models
                    .iter()
                    .map(|(name, need, admitted, _)| model(name, *need, *admitted))
                    .collect(),
                gpus: vec![gpu],
                lending: None,
                swaps: Vec::new(),
            };
            for (name, _, _, count) in models {
                let arrivals = (0..*count).map(|_| swap(name, NOW - 600_000, SwapPath::Cold, 2.0));
                now.swaps.extend(arrivals);
            }
            // One that was there, and one that is too old.
            now.swaps.insert(0, swap("a", NOW, SwapPath::Found, 50.0));
            now.swaps.push(swap("a", NOW - 700_000, SwapPath::Cold, 50.0));
            advise(&mut now, &config, NOW);
            let advice = now.gpus[0].advice.clone();
            assert_eq!(advice.is_some(), !says.is_empty(), "{advice:?}");
            for words in says {
                assert!(advice.as_ref().unwrap().contains(words), "{advice:?} lacks {words}");
            }
            now.gpus[0].swapping.recent_window_s = 59.0;
            advise(&mut now, &config, NOW);
            assert_eq!(now.gpus[0].advice, None, "too little was seen");
        }
    }
}
