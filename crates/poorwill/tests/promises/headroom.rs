//! A budget's headroom can be allocated.

use poorwill::{AllocRequest, Arena, Cap, Device, DeviceSpec, PoolConfig, Tag};
use poorwill_testkit::device::{DeviceKind, skipped_unless};

/// The device of this run by name, as users open it.
fn device() -> Option<Device> {
    let spec = match DeviceKind::of_this_run() {
        DeviceKind::Host => DeviceSpec::host_of(8 << 30),
        DeviceKind::Cuda(ordinal) => DeviceSpec::Cuda { ordinal },
        DeviceKind::Fake => return None,
    };
    Some(Device::open(&spec).unwrap())
}

fn skipped() -> bool {
    skipped_unless(
        |kind| kind != DeviceKind::Fake,
        "the fake library has not the name of NVIDIA's; see tests/plain/budget",
    )
}

/// What can be allocated beside memory in use, a granule at a time, until the device refuses.
fn had_bytes(device: &Device) -> u64 {
    let driver = device.driver();
    let granule_bytes = driver.info().granule_bytes;
    let mut had = Vec::new();
    // Large blocks first: there are many granules.
    for bytes in [granule_bytes << 9, granule_bytes << 4, granule_bytes] {
        while let Ok(backing) = driver.create(bytes) {
            had.push((backing, bytes));
        }
    }
    for (backing, _) in &had {
        driver.release(*backing).unwrap();
    }
    had.iter().map(|(_, bytes)| bytes).sum()
}

#[test]
fn the_headroom_is_what_can_be_allocated() {
    if skipped() {
        return;
    }
    let device = device().unwrap();
    let headroom_bytes = device.budget(None).headroom_bytes.unwrap();
    let had_bytes = had_bytes(&device);
    println!("headroom {headroom_bytes}, had {had_bytes}");
    let difference = headroom_bytes.abs_diff(had_bytes);
    assert!(difference <= had_bytes / 200, "headroom {headroom_bytes}, and {had_bytes} could be had");
}

#[test]
fn a_pool_maps_what_the_budget_allows_and_no_more() {
    if skipped() {
        return;
    }
    let device = device().unwrap();
    let granule_bytes = device.driver().info().granule_bytes;
    for cap in ["0.25", "0.125", "1GiB", "1025m"] {
        let cap: Cap = cap.parse().unwrap();
        let (budget, envelope) = device.envelope(Some(cap)).unwrap();
        let budget_bytes = budget.budget_bytes.unwrap();
        assert_eq!(budget_bytes, cap.of(budget.total_bytes.unwrap()));
        let arena = Arena::open_within(&device, &envelope, PoolConfig::default()).unwrap();
        let whole_bytes = budget_bytes / granule_bytes * granule_bytes;
        let block = arena.alloc(&AllocRequest::new(whole_bytes, Tag::weights())).unwrap();
        assert!(arena.alloc(&AllocRequest::new(1, Tag::weights())).is_err());
        assert!(arena.stats().unwrap().mapped_bytes <= budget_bytes);
        arena.free(block.id).unwrap();
        arena.close().unwrap();
        drop(arena);
        assert_eq!(envelope.unclaimed_bytes(), budget_bytes);
    }
}
