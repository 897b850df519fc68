//! Cycles of sleep and wake through an arena: what is reported, what is compared, and that nothing stays behind.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Arc;

use poorwill::cycle::{CycleError, CycleReport, Plan, Stage, run};
use poorwill::{AllocRequest, Arena, Config, CopyPart, DeviceRange, HostBuffer, PoolConfig, StreamId, Tag};

fn arena(device: &str) -> Arena {
    Arena::open(Config::on(device.parse().unwrap())).unwrap()
}

fn plan(bytes: u64, cycles: u32) -> Plan {
    Plan { cycles: NonZeroU32::new(cycles).unwrap(), ..Plan::new(NonZeroU64::new(bytes).unwrap()) }
}

/// Runs, and holds the figures of the report against each other and the device.
fn checked(arena: &Arena, plan: &Plan) -> (CycleReport, Vec<Stage>) {
    let free_bytes = || arena.driver().memory_info().unwrap().free_bytes;
    let before_bytes = free_bytes();
    let mut seen = Vec::new();
    let report = run(arena, plan, &mut |stage| seen.push(stage)).unwrap();
    let stats = arena.stats().unwrap();
    assert_eq!([stats.live_bytes, stats.mapped_bytes, stats.reserved_bytes, stats.backup_bytes], [0; 4]);
    assert_eq!(free_bytes(), before_bytes);

    assert!(report.verified && !report.moved && report.mismatch.is_none());
    assert_eq!(report.cycle_count, plan.cycles.get());
    let last = plan.cycles.get();
    let reported: Vec<u32> = report.cycles.iter().map(|cycle| cycle.cycle).collect();
    let expected: Vec<u32> = (1..=last).filter(|cycle| *cycle <= 3 || *cycle == last).collect();
    assert_eq!(reported, expected);
    let mut backup_bytes = 0;
    for cycle in &report.cycles {
        let (sleep, wake) = (&cycle.sleep, &cycle.wake);
        assert!(!cycle.moved);
        let compared = last <= 5 || [1, last].contains(&cycle.cycle);
        assert_eq!(cycle.verified, compared.then_some(true), "cycle {}", cycle.cycle);
        assert_eq!(cycle.device_released_bytes, i64::try_from(sleep.released_bytes).unwrap());
        backup_bytes = sleep.copied_bytes + sleep.unchanged_bytes;
        assert!(backup_bytes >= report.bytes);
        assert_eq!([wake.copied_bytes, wake.verified_bytes], [backup_bytes; 2]);
        assert_eq!(if cycle.cycle == 1 { sleep.unchanged_bytes } else { sleep.copied_bytes }, 0);
        assert!(cycle.sleep_s >= sleep.seconds && cycle.wake_s >= wake.seconds);
        assert!(cycle.wake_without_verify_s <= cycle.wake_s && cycle.wake_link_ratio > 0.0);
    }
    for spread in [report.sleep_s, report.wake_s, report.wake_without_verify_s].map(Option::unwrap) {
        assert!(0.0 < spread.min && spread.min <= spread.median && spread.median <= spread.max);
    }
    assert!(report.wake_link_ratio.unwrap() > 0.0);

    let limits = &report.limits;
    assert!(limits.to_device_bytes_per_s > 0.0 && limits.to_host_bytes_per_s > 0.0);
    assert!(limits.bring_in_s > 0.0 && limits.give_back_s > 0.0);
    assert!(limits.link_bytes > 0 && limits.link_bytes <= 1 << 30);
    assert_eq!(limits.granule_bytes, arena.driver().info().granule_bytes);

    let dropping = report.dropping.as_ref().unwrap();
    assert_eq!(dropping.cycles.len(), 3);
    assert!(dropping.cycles.iter().any(|cycle| cycle.drop_s.to_bits() == dropping.drop_s.to_bits()));
    assert!(dropping.drop_ratio > 0.0 && dropping.wake_empty_ratio > 0.0);

    let memory = &report.memory;
    assert_eq!([memory.before.backup_bytes, memory.after.backup_bytes], [0, backup_bytes]);
    assert_eq!(memory.after_first.backup_bytes, memory.after.backup_bytes);
    let free_bytes = [memory.before, memory.after_first, memory.after].map(|held| held.device_free_bytes);
    assert!(free_bytes.iter().all(|bytes| *bytes < before_bytes), "{free_bytes:?}");
    assert!(memory.after.process_resident_bytes.unwrap() > 0);
    (report, seen)
}

#[test]
fn a_few_cycles_are_compared_and_reported_one_by_one() {
    let arena = arena("host:64MiB");
    let (report, seen) = checked(&arena, &plan(12 << 20, 3));
    assert_eq!((report.device.as_str(), report.tensors), ("host", 6));
    assert!(report.bytes <= 12 << 20 && report.bytes > (12 << 20) - 6);
    let cycles = [1, 2, 3].map(Stage::Cycle);
    assert_eq!(seen, [&[Stage::Limits, Stage::Load][..], &cycles, &[Stage::Drop]].concat());
    // The arena can be used again.
    checked(&arena, &plan(5 << 20, 4));
}

#[test]
fn many_cycles_make_no_longer_report() {
    let (report, _) = checked(&arena("host:64MiB"), &plan(1 << 20, 40));
    assert_eq!(report.cycles.len(), 4);
    let (first, last) = (report.memory.after_first, report.memory.after);
    assert_eq!(first.device_free_bytes, last.device_free_bytes);
}

#[test]
fn loads_of_any_size_run() {
    for bytes in [1, 4095, (2 << 20) + 1] {
        checked(&arena("host:64MiB"), &plan(bytes, 1));
    }
}

#[test]
fn the_bare_pieces_are_those_of_the_pool() {
    let config = PoolConfig { chunk_granules: 4, ..PoolConfig::default() };
    let arena = Arena::open(Config { pool: config, ..Config::on("host:128MiB".parse().unwrap()) }).unwrap();
    let plan = Plan { chunk_granules: 4, ..plan(40 << 20, 1) };
    let (report, _) = checked(&arena, &plan);
    let limits = &report.limits;
    assert_eq!(limits.chunk_bytes, 8 << 20);
    let bare_bytes = limits.chunks * limits.chunk_bytes + limits.granules * limits.granule_bytes;
    let mapped_bytes = report.cycles[0].wake.mapped_bytes;
    assert!(mapped_bytes.abs_diff(bare_bytes) <= 2 * limits.granule_bytes, "{mapped_bytes} {bare_bytes}");
}

#[test]
fn a_byte_that_is_wrong_is_found_when_somebody_looks() {
    for (cycles, found) in [(3, 2), (9, 9)] {
        let arena = arena("host:64MiB");
        // Behind the pool's back: it keeps what it finds.
        let mut spoil = |stage| {
            if stage == Stage::Cycle(2) {
                let blocks =
                    arena.snapshot().unwrap().segments.into_iter().flat_map(|segment| segment.blocks);
                let block = blocks.into_iter().find(|block| block.requested_bytes > Some(1 << 20)).unwrap();
                let part = CopyPart { device: DeviceRange::new(block.addr + 70_001, 1), host_offset: 0 };
                let buffer = Arc::new(HostBuffer::from(vec![0xC1]));
                arena.driver().copy_to_device(StreamId::DEFAULT, buffer, &[part]).unwrap().wait().unwrap();
            }
        };
        let report = run(&arena, &plan(8 << 20, cycles), &mut spoil).unwrap();
        assert!(!report.verified && !report.moved && report.dropping.is_none());
        let mismatch = report.mismatch.unwrap();
        assert!(mismatch.contains(&format!("after cycle {found} byte 70001 of tensor ")), "{mismatch}");
        let last = report.cycles.last().unwrap();
        assert_eq!((last.cycle, last.verified, report.cycle_count), (found, Some(false), found));
        let stats = arena.stats().unwrap();
        assert_eq!([stats.live_bytes, stats.mapped_bytes, stats.backup_bytes], [0; 3]);
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_taken() {
    let arena = arena("host:64MiB");
    let block = arena.alloc(&AllocRequest::new(32 << 20, Tag::runtime())).unwrap();
    for bytes in [40 << 20, 1 << 60, u64::MAX] {
        let error = run(&arena, &plan(bytes, 1), &mut |_| panic!("nothing begins")).unwrap_err();
        assert!(
            matches!(error, CycleError::TooLarge { free_bytes, .. } if free_bytes <= 32 << 20),
            "{error}"
        );
        assert!(error.to_string().contains("MiB free"), "{error}");
    }
    // What the pool has cached is no obstacle.
    arena.free(block.id).unwrap();
    assert!(run(&arena, &plan(40 << 20, 1), &mut |_| {}).unwrap().verified);
}
