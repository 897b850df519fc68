use poorwill_core::{AllocRequest, Level, Pool, PoolConfig, SleepRequest, Tag, WakeRequest};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::pattern;
use std::time::Instant;

#[test]
#[ignore = "a measurement"]
fn zz_prepared() {
    for round in 0..3 {
        let device = TestDevice::with_capacity(60 << 30);
        let driver = device.machine();
        let sizes: Vec<u64> =
            (0..80).flat_map(|_| [32u64, 32, 8, 8, 110, 110].map(|mib| mib << 20)).collect();
        // The floor: the driver's own calls for as many handles.
        let total: u64 = sizes.iter().sum();
        let range = driver.reserve(total).unwrap();
        let mut handles = Vec::new();
        let mut at = range.addr;
        for bytes in &sizes {
            let id = driver.create(*bytes).unwrap();
            driver.map(poorwill_core::DeviceRange::new(at, *bytes), id).unwrap();
            at += bytes;
            handles.push(id);
        }
        driver.set_access(range).unwrap();
        driver.zero(poorwill_core::StreamId::DEFAULT, range).unwrap().wait().unwrap();
        let t = Instant::now();
        let mut at = range.addr;
        for bytes in &sizes {
            driver.unmap(poorwill_core::DeviceRange::new(at, *bytes)).unwrap();
            at += bytes;
        }
        let unmap_ms = t.elapsed().as_secs_f64() * 1e3;
        handles.iter().for_each(|id| driver.release(*id).unwrap());
        let floor_ms = t.elapsed().as_secs_f64() * 1e3;
        driver.unreserve(range).unwrap();
        std::thread::sleep(std::time::Duration::from_secs(1));
        let pool = Pool::new(device.driver(), PoolConfig::default()).unwrap();
        let mut blocks = Vec::new();
        for (n, bytes) in (0u64..).zip(&sizes) {
            let b = pool.alloc(&AllocRequest::new(*bytes, Tag::weights())).unwrap();
            pattern::fill(&pool, b.id, n, 1 << 20).unwrap();
            blocks.push(b);
            pool.alloc(&AllocRequest::new(4096, Tag::weights())).unwrap();
        }
        let request = SleepRequest::all(Level::One);
        let t = Instant::now();
        let report = pool.prepare_sleep(&request).unwrap().wait().unwrap();
        let prepare_ms = t.elapsed().as_secs_f64() * 1e3;
        std::thread::sleep(std::time::Duration::from_secs(1));
        for sleep in ["prepared first", "second", "third"] {
            let t = Instant::now();
            let slept = pool.sleep(&request).unwrap();
            let sleep_ms = t.elapsed().as_secs_f64() * 1e3;
            println!(
                "{{\"round\":{round},\"what\":\"{sleep}\",\"sleep_ms\":{sleep_ms:.2},\"floor_ms\":{floor_ms:.2},\"floor_unmap_ms\":{unmap_ms:.2},\"handles\":{},\"prepare_ms\":{prepare_ms:.0},\"copied\":{},\"phases\":{:?}}}",
                sizes.len(),
                slept.copied_bytes,
                slept.phases
            );
            let t = Instant::now();
            pool.wake(&WakeRequest::all()).unwrap();
            println!("wake {:.2} ms", t.elapsed().as_secs_f64() * 1e3);
        }
        let _ = report;
        pool.close().unwrap();
    }
}

#[test]
#[ignore = "a measurement"]
fn zz_lend() {
    use poorwill_core::Verify;
    use poorwill_core::lend::Broker;
    use poorwill_testkit::broker::HeldMemory;
    use std::sync::Arc;
    let device = TestDevice::with_capacity(60 << 30);
    let broker: Arc<HeldMemory> = Arc::default();
    let pool = Pool::new(device.driver(), PoolConfig::default()).unwrap();
    pool.lend_through(Arc::clone(&broker) as Arc<dyn Broker>).unwrap();
    let mut blocks = Vec::new();
    for n in 0..96u64 {
        let b = pool.alloc(&AllocRequest::new(256 << 20, Tag::weights())).unwrap();
        pattern::fill(&pool, b.id, n, 8 << 20).unwrap();
        blocks.push(b);
    }
    for round in 0..3 {
        let pool_tag = Tag::weights();
        let changes = [
            poorwill_core::Changes::Compared,
            poorwill_core::Changes::Immutable,
            poorwill_core::Changes::Volatile,
        ][round];
        pool.declare_changes(&pool_tag, changes).unwrap();
        println!("{{\"changes\":\"{changes:?}\"}}");
        for (name, lends, verify) in [
            ("plain", false, Verify::All),
            ("lend first", true, Verify::All),
            ("lend", true, Verify::All),
            ("lend", true, Verify::All),
            ("lend", true, Verify::All),
            ("lend sample", true, Verify::Sample),
            ("lend sample", true, Verify::Sample),
            ("plain", false, Verify::All),
            ("plain", false, Verify::All),
            ("quarter", true, Verify::All),
            ("quarter", true, Verify::All),
            ("all", true, Verify::All),
        ] {
            let mut request = SleepRequest::all(Level::One);
            if lends {
                request = request.lending();
            }
            let t = Instant::now();
            let slept = pool.sleep(&request).unwrap();
            let sleep_ms = t.elapsed().as_secs_f64() * 1e3;
            let g = Instant::now();
            if name == "quarter" {
                broker.give_up(6 << 30);
            }
            if name == "all" {
                broker.give_up(u64::MAX);
            }
            let give_ms = g.elapsed().as_secs_f64() * 1e3;
            let t = Instant::now();
            let woken = pool.wake(&WakeRequest::all().verifying(verify)).unwrap();
            let wake_ms = t.elapsed().as_secs_f64() * 1e3;
            println!(
                "{{\"what\":\"{name}\",\"sleep_ms\":{sleep_ms:.2},\"give_ms\":{give_ms:.2},\"wake_ms\":{wake_ms:.2},\"lent_gib\":{},\"returned_gib\":{},\"copied_gib\":{},\"sleep\":{:?},\"wake\":{:?}}}",
                (slept.lent_bytes + slept.resident_bytes) >> 30,
                woken.returned_bytes >> 30,
                woken.copied_bytes >> 30,
                slept.phases,
                woken.phases
            );
        }
    }
    for (n, b) in (0..).zip(&blocks) {
        assert!(pattern::read(&pool, b.id, 8 << 20).unwrap() == pattern::bytes(n, 8 << 20));
    }
    pool.close().unwrap();
}
