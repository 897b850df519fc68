//! Loads taken through an arena: what is reported, what fails, and that nothing stays behind.

use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use poorwill::{Arena, Op, PoolConfig, PoolError};
use poorwill_bench::churn::{
    ChurnEvent, ChurnPlan, ChurnProgress, ChurnReport, Load, Step, peak_live_bytes, run,
};
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};

/// What every load fits into at its full size.
const LARGE_BYTES: u64 = 64 << 30;

fn arena(capacity_bytes: u64, limit_bytes: Option<u64>) -> Arena {
    let driver = TestDevice::with_capacity(capacity_bytes).driver();
    Arena::over(driver, PoolConfig::default().limited_to(limit_bytes)).unwrap()
}

/// Whether the device is too small for the loads at their full size.
fn skipped() -> bool {
    let fits = |_| TestDevice::capacity_bytes_max() >= LARGE_BYTES;
    skipped_unless(fits, "loads of full size need a device of 64 GiB")
}

fn plan(load: Load, rounds: u32) -> ChurnPlan {
    ChurnPlan { rounds: NonZeroU32::new(rounds).unwrap(), ..ChurnPlan::new(load) }
}

/// Runs, and holds against each other what the pool, the device and the observer say.
fn checked(arena: &Arena, plan: &ChurnPlan) -> (ChurnReport, Vec<ChurnProgress>) {
    let free_bytes = || arena.driver().memory_info().unwrap().free_bytes;
    let before_bytes = free_bytes();
    let mut seen = Vec::new();
    let report = run(arena, plan, &mut |progress| {
        seen.push(*progress);
        Ok(())
    })
    .unwrap();
    let stats = arena.stats().unwrap();
    assert_eq!([stats.live_bytes, stats.mapped_bytes, stats.reserved_bytes], [0; 3]);
    assert_eq!(free_bytes(), before_bytes);

    assert_eq!((report.load, report.seed, report.rounds), (plan.load, plan.seed, plan.rounds.get()));
    assert_eq!(report.limit_bytes, arena.limit_bytes());
    assert_eq!(report.peak_live_bytes, seen.iter().map(|progress| progress.live_bytes).max().unwrap_or(0));
    assert_eq!(report.live_bytes, seen.last().map_or(0, |progress| progress.live_bytes));
    assert_eq!(report.peak_mapped_bytes, stats.peak_mapped_bytes);
    assert!(report.live_bytes <= report.held_bytes && report.held_bytes <= report.peak_mapped_bytes);
    assert_eq!(report.created_bytes.iter().sum::<u64>(), stats.created_bytes);
    assert!(seen.iter().map(|progress| progress.step).eq(1..=seen.len()));
    (report, seen)
}

fn assert_ratio(ratio: Option<f64>, part: u64, whole: u64) {
    let part_again = ratio.unwrap() * f64::from(u32::try_from(whole >> 20).unwrap());
    let part = f64::from(u32::try_from(part >> 20).unwrap());
    assert!((part_again / part - 1.0).abs() < 1e-3, "{ratio:?}: {part} of {whole}");
}

#[test]
fn every_load_runs_at_full_size() {
    if skipped() {
        return;
    }
    for load in Load::ALL {
        let (report, seen) = checked(&arena(LARGE_BYTES, None), &ChurnPlan::new(load));
        let steps = load.steps(0);
        assert_eq!((report.failed, report.created_bytes.len(), report.limit_bytes), (None, 1, LARGE_BYTES));
        assert_eq!(report.peak_live_bytes, peak_live_bytes(&steps));
        assert!(report.peak_mapped_bytes >= report.peak_live_bytes);
        assert_ratio(report.peak_ratio, report.peak_mapped_bytes, report.peak_live_bytes);
        assert_ratio(report.held_ratio, report.held_bytes, report.live_bytes);
        let done = |step: &Step, progress: &ChurnProgress| match *step {
            Step::Alloc { bytes } => (progress.event, progress.bytes) == (ChurnEvent::Alloc, bytes),
            Step::Free { block } => (progress.event, progress.block) == (ChurnEvent::Free, block),
        };
        assert!(steps.iter().zip(&seen).all(|(step, progress)| done(step, progress)));
        assert_eq!(steps.len(), seen.len());
    }
}

#[test]
fn a_round_begins_with_nothing_live_and_does_the_same_again() {
    if skipped() {
        return;
    }
    let plan = plan(Load::Moe, 3);
    let (report, seen) = checked(&arena(LARGE_BYTES, None), &plan);
    assert_eq!((report.failed, report.created_bytes.len()), (None, 3));
    assert_eq!(report.peak_live_bytes, peak_live_bytes(&plan.steps()));
    // Between the rounds, every block that stayed is freed.
    let kept = 24 * 12;
    assert_eq!(seen.len(), 3 * plan.steps().len() + 2 * kept);
    assert_eq!(seen.iter().filter(|progress| progress.live_bytes == 0).count(), 2);
    let bytes =
        |steps: &[ChurnProgress]| -> Vec<u64> { steps.iter().map(|progress| progress.bytes).collect() };
    assert_eq!(bytes(&seen[..672]), bytes(&seen[672 + kept..][..672]));
    assert_eq!(seen.last().unwrap().block, 3 * 480 - 20 + 3, "the last raw tensor of the last layer");
}

#[test]
fn a_failed_allocation_is_reported() {
    if skipped() {
        return;
    }
    for (load, limit_bytes) in [(Load::Moe, 8 << 30), (Load::Dense, 20 << 30), (Load::Swizzle, 1 << 30)] {
        let (report, _) = checked(&arena(LARGE_BYTES, Some(limit_bytes)), &plan(load, 2));
        let failed = report.failed.unwrap();
        assert!(failed.contains("cannot allocate") && failed.contains("limit of"), "{failed}");
        assert!(report.peak_mapped_bytes <= limit_bytes && report.live_bytes > 0);
        assert_eq!((report.rounds, report.created_bytes.len()), (2, 1), "no round after the one that failed");
    }
    let (report, _) = checked(&arena(8 << 30, None), &ChurnPlan::new(Load::Dense));
    assert!(report.failed.unwrap().contains("device has"));
}

#[test]
fn where_nothing_fits_there_is_no_ratio() {
    let (report, seen) = checked(&arena(2 << 20, None), &ChurnPlan::new(Load::Moe));
    assert!(report.failed.is_some() && seen.is_empty());
    assert_eq!((report.peak_ratio, report.held_ratio), (None, None));
    assert_eq!(report.created_bytes, [0]);
}

#[test]
fn a_load_can_be_made_smaller() {
    let small = ChurnPlan { divisor: NonZeroU64::new(64).unwrap(), ..ChurnPlan::new(Load::Moe) };
    let (report, _) = checked(&arena(1 << 30, None), &small);
    assert_eq!((report.failed, report.peak_live_bytes), (None, (24_251 << 20) / 64));
    let least = ChurnPlan { divisor: NonZeroU64::MAX, ..small };
    assert!(least.steps().iter().all(|step| !matches!(step, Step::Alloc { bytes } if *bytes != 1)));
    assert_eq!(checked(&arena(1 << 30, None), &least).0.failed, None);
}

#[test]
fn an_observer_can_end_the_run_and_nothing_stays() {
    if skipped() {
        return;
    }
    let arena = arena(LARGE_BYTES, None);
    for last in [1, 30, 700] {
        let ended = run(&arena, &plan(Load::Moe, 2), &mut |progress| {
            if progress.step == last { Err(PoolError::Closed) } else { Ok(()) }
        });
        assert!(matches!(ended, Err(PoolError::Closed)));
        let stats = arena.stats().unwrap();
        assert_eq!([stats.live_bytes, stats.mapped_bytes], [0; 2]);
    }
}

/// Does `check` for every load and seed that makes a load of its own.
fn for_all_loads(check: impl Fn(&str, &ChurnPlan)) {
    for load in Load::ALL {
        let mut seen: Vec<Vec<Step>> = Vec::new();
        for seed in 0..DeviceKind::of_this_run().cases(21).into() {
            let steps = load.steps(seed);
            if !seen.contains(&steps) {
                seen.push(steps);
                check(&format!("{load:?}, seed {seed}"), &ChurnPlan { seed, ..ChurnPlan::new(load) });
            }
        }
    }
}

#[test]
fn no_load_holds_noticeably_more_than_it_needs() {
    if skipped() {
        return;
    }
    for_all_loads(|case, one_round| {
        let plan = ChurnPlan { rounds: NonZeroU32::new(3).unwrap(), ..*one_round };
        let (report, _) = checked(&arena(LARGE_BYTES, None), &plan);
        assert_eq!(report.failed, None, "{case}");
        if DeviceKind::of_this_run() != DeviceKind::Host {
            // On other devices an event completes late even without queued work. This load ends so soon that
            // freed memory is not stream-safe yet, and only a limit makes the pool wait.
            return;
        }
        let (peak_live, peak_mapped) = (report.peak_live_bytes, report.peak_mapped_bytes);
        assert!(peak_mapped * 100 <= peak_live * 101, "{case}: {peak_mapped} mapped for {peak_live}");
        let (live, held) = (report.live_bytes, report.held_bytes);
        assert!(held * 1000 <= live * 1005, "{case}: {held} held for {live}");
    });
}

/// Loads take what driver calls take, and these cost by the mapping, not by the byte.
#[test]
fn a_load_takes_few_mappings() {
    if skipped() {
        return;
    }
    for_all_loads(|case, one_round| {
        let maps = Arc::new(AtomicU64::new(0));
        let heard = Arc::clone(&maps);
        let driver = ScriptedDriver::new(TestDevice::with_capacity(LARGE_BYTES).driver(), move |call| {
            heard.fetch_add(u64::from(call.op == Op::Map), Ordering::Relaxed);
            Verdict::Pass
        });
        let arena = Arena::over(Arc::new(driver), PoolConfig::default()).unwrap();
        let (report, seen) = checked(&arena, one_round);
        assert_eq!(report.failed, None, "{case}");
        let allocs = seen.iter().filter(|progress| progress.event == ChurnEvent::Alloc).count() as u64;
        let maps = maps.load(Ordering::Relaxed);
        assert!(maps <= allocs * 3, "{case}: {maps} mappings for {allocs} blocks");
    });
}

#[test]
fn every_load_fits_a_limit_just_above_what_is_live() {
    if skipped() {
        return;
    }
    for_all_loads(|case, one_round| {
        let plan = ChurnPlan { rounds: NonZeroU32::new(2).unwrap(), ..*one_round };
        let granule = arena(LARGE_BYTES, None).driver().info().granule_bytes;
        let limit_bytes = peak_live_bytes(&plan.steps()) * 103 / 100 / granule * granule;
        let (report, _) = checked(&arena(LARGE_BYTES, Some(limit_bytes)), &plan);
        assert_eq!(report.failed, None, "{case} under a limit of {limit_bytes}");
        assert!(report.peak_mapped_bytes <= limit_bytes, "{case}");
    });
}
