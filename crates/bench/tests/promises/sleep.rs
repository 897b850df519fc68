//! Cycles of sleep and wake through an arena: what is reported, what is compared, and that nothing stays behind.

use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Arc;

use poorwill::{
    AllocRequest, Arena, CopyPart, DeviceRange, HostBuffer, PoolConfig, PrepareEnd, StreamId, Tag,
};
use poorwill_bench::sleep::{CycleKind, SleepBenchReport, SleepError, SleepPlan, SleepStage, run};
use poorwill_testkit::device::TestDevice;

const MIB: u64 = 1 << 20;

fn arena(capacity_bytes: u64) -> Arena {
    arena_with(capacity_bytes, PoolConfig::default())
}

fn arena_with(capacity_bytes: u64, config: PoolConfig) -> Arena {
    Arena::over(TestDevice::with_capacity(capacity_bytes).driver(), config).unwrap()
}

fn plan(bytes: u64, cycles: u32) -> SleepPlan {
    SleepPlan { cycles: NonZeroU32::new(cycles).unwrap(), ..SleepPlan::new(NonZeroU64::new(bytes).unwrap()) }
}

fn changing(part: &str, plan: SleepPlan) -> SleepPlan {
    SleepPlan { changed: part.parse().unwrap(), ..plan }
}

/// Runs, and holds the figures of the report against each other and the device.
fn checked(arena: &Arena, plan: &SleepPlan) -> (SleepBenchReport, Vec<SleepStage>) {
    let free_bytes = || arena.driver().memory_info().unwrap().free_bytes;
    let before_bytes = free_bytes();
    let mut seen = Vec::new();
    let report = run(arena, plan, &mut |stage| seen.push(stage)).unwrap();
    let stats = arena.stats().unwrap();
    assert_eq!([stats.live_bytes, stats.mapped_bytes, stats.reserved_bytes, stats.backup_bytes], [0; 4]);
    assert_eq!(free_bytes(), before_bytes);

    assert!(report.verified && !report.moved && report.mismatch.is_none());
    assert_eq!(report.clean_cycles, plan.cycles.get());
    assert_eq!(report.changed_fraction, plan.changed);
    let granule_bytes = arena.driver().info().granule_bytes;
    let all_bytes = check_copied(&report, granule_bytes);
    check_cycles(&report, plan.cycles.get(), all_bytes);
    check_figures(&report);

    let limits = &report.limits;
    assert_eq!((limits.granule_bytes, limits.pin_bytes >= report.bytes), (granule_bytes, true));
    assert!(limits.link_bytes > 0 && limits.link_bytes <= 1 << 30);
    assert!(limits.digest_bytes > 0 && limits.digest_bytes <= 2 << 30);

    let memory = &report.memory;
    assert_eq!(memory.before.backup_bytes, 0);
    let stored_bytes = report.stored_bytes.unwrap();
    assert!(memory.after.backup_bytes >= stored_bytes && memory.after.backup_raw_bytes >= all_bytes);
    assert_eq!(memory.after_first.backup_bytes, memory.after.backup_bytes);
    let free_bytes = [memory.before, memory.after_first, memory.after].map(|memory| memory.device_free_bytes);
    assert!(free_bytes.iter().all(|bytes| *bytes < before_bytes), "{free_bytes:?}");
    assert!(memory.after.process_resident_bytes.unwrap() > 0);
    // A driver that does not count its host memory says 0.
    let host_bytes = report.host_bytes.unwrap();
    assert!(host_bytes == 0 || host_bytes >= stored_bytes, "{host_bytes} of {stored_bytes}");
    (report, seen)
}

/// What was copied by whom. Returns the load in whole granules.
fn check_copied(report: &SleepBenchReport, granule_bytes: u64) -> u64 {
    let copied = report.copied_bytes;
    let all_bytes = copied.first.unwrap();
    assert!(all_bytes >= report.bytes && all_bytes.is_multiple_of(granule_bytes));
    assert_eq!(copied.wake, Some(all_bytes));
    let prepare = report.prepare.as_ref().unwrap();
    assert_eq!((prepare.end, prepare.unchanged_bytes), (PrepareEnd::Finished, 0));
    let changed_bytes = report.changed_granules * granule_bytes;
    // Where comparing costs as much as copying, everything is copied, by the sleep.
    let (ahead, unchanged, changed) =
        if report.fast_digests { (all_bytes, 0, changed_bytes) } else { (0, all_bytes, all_bytes) };
    assert_eq!(prepare.copied_bytes, ahead);
    assert_eq!([copied.prepared, copied.clean], [Some(unchanged); 2]);
    assert_eq!(copied.changed, Some(changed));
    all_bytes
}

fn check_cycles(report: &SleepBenchReport, last: u32, all_bytes: u64) {
    let reported: Vec<(CycleKind, u32)> =
        report.cycles.iter().map(|cycle| (cycle.kind, cycle.number)).collect();
    let mut expected = vec![(CycleKind::First, 1), (CycleKind::Prepared, 1)];
    expected.extend(
        (1..=last).filter(|cycle| *cycle <= 3 || *cycle == last).map(|cycle| (CycleKind::Clean, cycle)),
    );
    expected.push((CycleKind::Changed, 1));
    assert_eq!(reported, expected);
    for cycle in &report.cycles {
        let (sleep, wake) = (&cycle.sleep, &cycle.wake);
        assert!(!cycle.moved);
        let compared = cycle.kind != CycleKind::Clean || last <= 5 || [1, last].contains(&cycle.number);
        assert_eq!(cycle.verified, compared.then_some(true), "{:?} {}", cycle.kind, cycle.number);
        assert_eq!(cycle.device_released_bytes, i64::try_from(sleep.released_bytes).unwrap());
        assert_eq!(sleep.copied_bytes + sleep.unchanged_bytes, all_bytes);
        assert_eq!((sleep.unchecked_bytes, wake.copied_bytes), (0, all_bytes));
        assert_eq!(wake.verified_bytes, all_bytes, "as wakes do by default where digests are fast");
        assert!(cycle.sleep_s >= sleep.seconds && cycle.wake_s >= wake.seconds);
        assert!(cycle.wake_without_verify_s <= cycle.wake_s && cycle.wake_link_ratio > 0.0);
    }
}

/// Every figure is there, and every ratio whose limit is.
fn check_figures(report: &SleepBenchReport) {
    let spreads = report.spreads.unwrap();
    for spread in [spreads.sleep_s, spreads.wake_s, spreads.wake_without_verify_s, spreads.wake_at_once_s] {
        assert!(0.0 < spread.min && spread.min <= spread.median && spread.median <= spread.max);
    }
    assert_eq!(report.clean_sleep_s, Some(spreads.sleep_s.median));
    assert_eq!(report.wake_s, Some(spreads.wake_s.median));
    assert_eq!(report.first_sleep_s, report.cycle(CycleKind::First).map(|cycle| cycle.sleep_s));
    assert_eq!(report.prepared_sleep_s, report.cycle(CycleKind::Prepared).map(|cycle| cycle.sleep_s));
    assert_eq!(report.changed_sleep_s, report.cycle(CycleKind::Changed).map(|cycle| cycle.sleep_s));
    let dropping = report.dropping.as_ref().unwrap();
    assert_eq!(dropping.cycles.len(), 3);
    let quickest = |figure: Option<f64>, all: Vec<f64>| all.iter().all(|one| figure.unwrap() <= *one);
    assert!(quickest(report.drop_s, dropping.cycles.iter().map(|cycle| cycle.drop_s).collect()));
    assert!(quickest(report.wake_empty_s, dropping.cycles.iter().map(|cycle| cycle.wake_empty_s).collect()));

    let (limits, ratios) = (&report.limits, &report.ratios);
    assert!(limits.to_device_bytes_per_s > 0.0 && limits.to_host_bytes_per_s > 0.0);
    assert!(limits.digest_bytes_per_s > 0.0 && limits.pin_bytes_per_s > 0.0);
    assert!(limits.map_s > 0.0 && limits.unmap_s > 0.0);
    assert!((report.link_gib_per_s * f64::from(1 << 30) / limits.to_device_bytes_per_s - 1.0).abs() < 1e-9);
    let always = [ratios.first_sleep, ratios.wake, ratios.drop, ratios.wake_empty];
    assert!(always.iter().all(|ratio| ratio.unwrap().ratio > 0.0), "{ratios:?}");
    for compared in [ratios.prepared_sleep, ratios.clean_sleep, ratios.changed_sleep] {
        assert_eq!(compared.is_some(), report.fast_digests);
        assert!(compared.is_none_or(|ratio| ratio.limit_s > 0.005 && ratio.ratio_aim >= 1.0));
    }
}

#[test]
fn a_few_cycles_are_compared_and_reported_one_by_one() {
    let arena = arena(64 * MIB);
    let (report, seen) = checked(&arena, &plan(12 * MIB, 3));
    assert_eq!((report.device.as_str(), report.tensors), (arena.driver().info().id.as_str(), 6));
    assert!(report.bytes <= 12 * MIB && report.bytes > 12 * MIB - 6);
    let cycle = |kind, number| SleepStage::Cycle { kind, number };
    let expected = [
        SleepStage::Limits,
        SleepStage::Load,
        cycle(CycleKind::First, 1),
        SleepStage::Load,
        SleepStage::Prepare,
        cycle(CycleKind::Prepared, 1),
        cycle(CycleKind::Clean, 1),
        cycle(CycleKind::Clean, 2),
        cycle(CycleKind::Clean, 3),
        cycle(CycleKind::Changed, 1),
        SleepStage::Drop,
    ];
    assert_eq!(seen, expected);
    // The arena can be used again.
    checked(&arena, &plan(5 * MIB, 4));
}

#[test]
fn exactly_what_was_changed_is_copied() {
    let arena = arena(128 * MIB);
    let mut seen = Vec::new();
    for part in ["0", "1%", "0.25", "100%"] {
        let (report, _) = checked(&arena, &changing(part, plan(24 * MIB, 1)));
        let whole = report.changed_granules * report.limits.granule_bytes <= report.bytes;
        assert!(whole, "{part}: only granules inside tensors are written");
        seen.push(report.changed_granules);
    }
    assert_eq!((seen[0], seen[1]), (0, 1));
    assert!(seen[2] > 1 && seen[3] > 2 * seen[2], "{seen:?}");
}

#[test]
fn many_cycles_make_no_longer_report() {
    let (report, _) = checked(&arena(64 * MIB), &plan(MIB, 40));
    assert_eq!(report.cycles.len(), 3 + 4);
    let (first, last) = (report.memory.after_first, report.memory.after);
    assert_eq!(first.device_free_bytes, last.device_free_bytes);
}

#[test]
fn loads_of_any_size_run() {
    for bytes in [1, 4095, 2 * MIB + 1] {
        checked(&arena(64 * MIB), &plan(bytes, 1));
    }
}

#[test]
fn the_limits_use_the_chunks_of_the_pool() {
    let arena = arena_with(128 * MIB, PoolConfig::default().in_chunks_of(4));
    let plan = SleepPlan { chunk_granules: 4, ..plan(40 * MIB, 1) };
    let (report, _) = checked(&arena, &plan);
    let limits = &report.limits;
    assert_eq!(limits.chunk_bytes, 4 * limits.granule_bytes);
    let limit_bytes = limits.chunks * limits.chunk_bytes + limits.granules * limits.granule_bytes;
    let mapped_bytes = report.cycles[0].wake.mapped_bytes;
    assert!(mapped_bytes.abs_diff(limit_bytes) <= 2 * limits.granule_bytes, "{mapped_bytes} {limit_bytes}");
}

#[test]
fn a_wrong_byte_is_found_by_the_next_comparison() {
    for (at, cycles, found) in [
        ((CycleKind::First, 1), 1, (CycleKind::First, 1, "after the first sleep")),
        ((CycleKind::Prepared, 1), 1, (CycleKind::Prepared, 1, "after the prepared sleep")),
        ((CycleKind::Clean, 2), 3, (CycleKind::Clean, 2, "after clean sleep 2")),
        ((CycleKind::Clean, 2), 9, (CycleKind::Clean, 9, "after clean sleep 9")),
        ((CycleKind::Changed, 1), 1, (CycleKind::Changed, 1, "after the changed sleep")),
    ] {
        let arena = arena(64 * MIB);
        // Behind the pool's back: it keeps what it finds.
        let mut corrupt = |stage| {
            if stage == (SleepStage::Cycle { kind: at.0, number: at.1 }) {
                let blocks =
                    arena.snapshot().unwrap().segments.into_iter().flat_map(|segment| segment.blocks);
                let block = blocks.into_iter().find(|block| block.requested_bytes > Some(MIB)).unwrap();
                let part = CopyPart { device: DeviceRange::new(block.addr + 70_001, 1), host_offset: 0 };
                let buffer = Arc::new(HostBuffer::from(vec![0xC1]));
                arena.driver().copy_to_device(StreamId::DEFAULT, buffer, &[part]).unwrap().wait().unwrap();
            }
        };
        let report = run(&arena, &plan(8 * MIB, cycles), &mut corrupt).unwrap();
        assert!(!report.verified && !report.moved && report.dropping.is_none());
        let mismatch = report.mismatch.unwrap();
        assert!(mismatch.starts_with(&format!("{} byte 70001 of tensor ", found.2)), "{mismatch}");
        let last = report.cycles.last().unwrap();
        assert_eq!((last.kind, last.number, last.verified), (found.0, found.1, Some(false)));
        let stats = arena.stats().unwrap();
        assert_eq!([stats.live_bytes, stats.mapped_bytes, stats.backup_bytes], [0; 3]);
    }
}

#[test]
fn a_load_that_does_not_fit_is_refused_first() {
    let arena = arena(64 * MIB);
    let block = arena.alloc(&AllocRequest::new(32 * MIB, Tag::runtime())).unwrap();
    for bytes in [40 * MIB, 1 << 60, u64::MAX] {
        let error = run(&arena, &plan(bytes, 1), &mut |_| panic!("nothing begins")).unwrap_err();
        assert!(
            matches!(error, SleepError::TooLarge { free_bytes, .. } if free_bytes <= 32 * MIB),
            "{error}"
        );
        assert!(error.to_string().contains("MiB free"), "{error}");
    }
    // What the pool has cached is no obstacle.
    arena.free(block.id).unwrap();
    assert!(run(&arena, &plan(40 * MIB, 1), &mut |_| {}).unwrap().verified);
}
