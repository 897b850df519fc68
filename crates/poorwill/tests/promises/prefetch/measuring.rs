//! What the measurement reports, finds, and refuses.

use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Arc;

use poorwill::offload::{DISABLE_UVA, Switches};
use poorwill::{Arena, Config, Device, Driver};
use poorwill_bench::offload::{OffloadError, OffloadPlan, OffloadReport, OffloadStage, Source, run};
use poorwill_testkit::device::{DeviceKind, TestDevice};

use super::arena;
use super::careless::{Careless, Fault, Held};

fn plan(bytes: u64, layers: u32) -> OffloadPlan {
    OffloadPlan {
        layers: NonZeroU32::new(layers).unwrap(),
        ..OffloadPlan::new(NonZeroU64::new(bytes).unwrap())
    }
}

/// Checks the figures of a report against each other.
fn check(report: &OffloadReport) {
    assert!(report.verified && report.mismatch.is_none());
    assert_eq!(report.host_bytes_asked, report.layer_bytes * u64::from(report.layers));
    assert!((2..=8).contains(&report.slots) && report.part_bytes <= report.layer_bytes && report.passes > 1);
    let figures = [
        report.pin_gib_per_s,
        report.explicit_gib_per_s,
        report.prefetch_gib_per_s,
        report.compute_s,
        report.transfer_s,
        report.side_by_side_s,
        report.prefetch_s,
        report.compute_transfer_ratio,
    ];
    assert!(figures.iter().all(|figure| figure.is_finite() && *figure > 0.0), "{report:?}");
    assert!((0.0..=1.0).contains(&report.overlap));
    let spread = report.prefetch_spread_s;
    assert!(spread.min <= report.prefetch_s && report.prefetch_s <= spread.max);
    assert_eq!(report.uva_s.is_some(), report.uva_gib_per_s.is_some());
    assert_eq!(report.pinned, report.pageable_because.is_none());
}

#[test]
fn every_device_is_measured_and_left_as_it_was() {
    for (granules, layers) in [(1, 1), (7, 2), (13, 3), (64, 32)] {
        let device = TestDevice::open(64);
        let arena = arena(device.driver());
        let granule_bytes = device.info().granule_bytes;
        let mut stages = Vec::new();
        let measured = run(&arena, &Source::Driver, &plan(granules * granule_bytes, layers), &mut |stage| {
            stages.push(stage);
        });
        let report = measured.unwrap();
        check(&report);
        assert_eq!(report.layer_bytes, granules / u64::from(layers) * granule_bytes);
        assert_eq!(report.device, device.info().id);
        let in_place = device.kind() == DeviceKind::Host || (device.info().kernel_copies && report.pinned);
        assert_eq!(report.uva_s.is_some(), in_place, "{}", report.uva_how);
        assert_eq!(
            (stages.first(), stages.last()),
            (Some(&OffloadStage::Memory), Some(&OffloadStage::Prefetch))
        );
        assert_eq!(arena.stats().unwrap().mapped_bytes, 0);
        assert_eq!(device.memory_info().unwrap().free_bytes, device.info().total_bytes);
        assert_eq!(device.host_bytes(), 0);
        // It can be done again.
        check(&run(&arena, &Source::Driver, &plan(4 * granule_bytes, 4), &mut |_| {}).unwrap());
    }
}

#[test]
fn copies_that_are_not_made_or_torn_are_found() {
    for layers in [1, 2, 9] {
        let measured = |fault| {
            let device = TestDevice::open(64);
            let careless = Careless::new(device.driver(), fault, Held::Nothing);
            let arena = arena(Arc::clone(&careless) as Arc<dyn Driver>);
            let plan = plan(2 * u64::from(layers) * device.info().granule_bytes, layers);
            let report = run(&arena, &Source::Driver, &plan, &mut |_| {}).unwrap();
            drop(arena);
            assert_eq!(device.host_bytes(), 0);
            (report, careless.copies())
        };
        let last = usize::try_from(layers).unwrap();
        // The number of copies depends on timing: on how many slots are overwritten before a pass. The last
        // pass always ends with the copies of its layers; a fault in one of the others has no effect.
        let mut found = 0;
        for back in 1..=last {
            for fault in [Fault::NoCopy, Fault::Torn] {
                let copies = measured(Fault::None).1;
                let (report, made) = measured(fault(copies - back));
                if made != copies {
                    continue;
                }
                found += 1;
                let layer = last - back;
                let mismatch = report.mismatch.unwrap();
                assert!(!report.verified && mismatch.contains("in a pass with prefetching"), "{mismatch}");
                assert!(
                    mismatch.contains(&format!("layer {layer} was computed of other bytes")),
                    "{mismatch}"
                );
            }
        }
        assert!(found > 0 || layers > 2, "no two runs of {layers} layers made as many copies");
    }
}

#[test]
fn what_does_not_fit_is_refused_with_what_to_change() {
    let device = TestDevice::open(8);
    let arena = arena(device.driver());
    let granule_bytes = device.info().granule_bytes;
    let refused = |bytes, layers| {
        run(&arena, &Source::Driver, &plan(bytes, layers), &mut |_| panic!("nothing begins")).unwrap_err()
    };
    for (bytes, layers) in [(1, 1), (granule_bytes - 1, 1), (31 * granule_bytes, 32), (1 << 20, u32::MAX)] {
        let error = refused(bytes, layers);
        assert!(matches!(error, OffloadError::LayerTooSmall { .. }), "{error}");
        assert!(error.to_string().contains("granule") && error.to_string().contains("or more"), "{error}");
    }
    for (bytes, layers) in [(5 * granule_bytes, 1), (100 * granule_bytes, 20), (u64::MAX, 1)] {
        let error = refused(bytes, layers);
        assert!(matches!(error, OffloadError::Slots { .. }), "{error}");
        assert!(
            error.to_string().contains("2 slots") && error.to_string().contains("more layers"),
            "{error}"
        );
    }
    // Two slots are enough.
    check(&run(&arena, &Source::Driver, &plan(12 * granule_bytes, 3), &mut |_| {}).unwrap());
    // No computer has as much host memory.
    let error = refused(granule_bytes << 31, 1 << 30);
    assert!(matches!(error, OffloadError::HostMemory { is_limit: false, .. }), "{error}");
}

#[test]
fn buffers_of_a_device_are_held_to_its_limit_and_to_the_switches() {
    let config = Config::on("host:64MiB".parse().unwrap());
    let measured = |limit_bytes, switches| {
        let mut host_memory = config.host_memory;
        host_memory.limit_bytes = limit_bytes;
        let device = Device::open_with(&config.device, &host_memory).unwrap();
        let arena = Arena::open_on(&device, None, config.pool).unwrap();
        let source = Source::Buffers(device.clone(), switches);
        let report = run(&arena, &source, &plan(16 << 20, 4), &mut |_| {});
        assert_eq!(device.driver().host_memory().used_bytes, 0);
        report
    };
    let report = measured(None, Switches::default()).unwrap();
    check(&report);
    assert!(report.host_bytes_used >= 16 << 20 && report.uva_s.is_some(), "{report:?}");
    assert!(report.uva_how.contains("the same thing"), "{}", report.uva_how);
    check(&measured(Some(32 << 20), Switches::default()).unwrap());
    let error = measured(Some(15 << 20), Switches::default()).unwrap_err();
    assert!(error.to_string().contains("the limit for that is 15 MiB"), "{error}");

    let report =
        measured(None, Switches::default().without_pins("PIN_OFF").without_views(DISABLE_UVA)).unwrap();
    check(&report);
    assert!(report.uva_s.is_none() && report.uva_how.contains(DISABLE_UVA), "{}", report.uva_how);
    assert_eq!(report.pageable_because.as_deref(), Some("PIN_OFF=1 is set"));
}
