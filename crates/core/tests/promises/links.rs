//! Wakes over the links of other devices: every byte comes back, whatever fails over there, and nothing of it is left.
//!
//! The own link is held in these wakes until another has carried something, and by a clock that stands still no copy is
//! ever late.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use poorwill_core::{
    Driver, DriverErrorKind, Level, Op, Pool, PoolConfig, SleepRequest, StreamId, Tag, Verify, WakeReport,
    WakeRequest,
};
use poorwill_testkit::clock::Clock;
use poorwill_testkit::device::{TestDevice, skipped_unless};
use poorwill_testkit::latch::{Latch, hold};
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};
use poorwill_testkit::storing::Storing;
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::{eventually, watched};

const GRANULES: u64 = 200;

/// Which copies over other links fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The first, when it is queued.
    First,
    /// The first that ends.
    FirstEnd,
    /// All, when they are queued.
    All,
}

struct Seen {
    refuses_streams: AtomicBool,
    refused: AtomicU64,
    created: AtomicU64,
    destroyed: AtomicU64,
    /// Streams whose copies the own link carries, learned while there is no other.
    own: Mutex<BTreeSet<StreamId>>,
    /// Holds streams that are being made.
    opening: Mutex<Option<Arc<Latch>>>,
    fault: Mutex<Fault>,
    over_links: AtomicU64,
    latch: Mutex<Arc<Latch>>,
}

impl Seen {
    fn see(&self, call: Call) -> Verdict {
        match call.op {
            Op::StreamCreate if self.refuses_streams.load(Ordering::SeqCst) => {
                let opening = self.opening.lock().unwrap().clone();
                opening.iter().for_each(|opening| opening.pass());
                self.refused.fetch_add(1, Ordering::SeqCst);
                return Verdict::Fail(DriverErrorKind::Unsupported { reason: "there is no memory".into() });
            }
            Op::StreamCreate => {
                self.created.fetch_add(1, Ordering::SeqCst);
                let opening = self.opening.lock().unwrap().clone();
                opening.iter().for_each(|opening| opening.pass());
            }
            Op::StreamDestroy => _ = self.destroyed.fetch_add(1, Ordering::SeqCst),
            Op::CopyToDevice | Op::Decode if call.waiting => return self.see_end(call),
            Op::CopyToDevice | Op::Decode => return self.see_copy(call),
            _ => {}
        }
        Verdict::Pass
    }

    fn see_copy(&self, call: Call) -> Verdict {
        let Some(carrier) = call.scratch.map(|scratch| scratch.copies).or(call.stream) else {
            return Verdict::Pass;
        };
        let mut own = self.own.lock().unwrap();
        if self.refuses_streams.load(Ordering::SeqCst) {
            own.insert(carrier);
        }
        if own.contains(&carrier) {
            return Verdict::Pass;
        }
        let before = self.over_links.fetch_add(1, Ordering::SeqCst);
        let fault = *self.fault.lock().unwrap();
        if fault != Fault::FirstEnd {
            self.latch.lock().unwrap().open();
        }
        match fault {
            Fault::First if before == 0 => Verdict::device_failure(call),
            Fault::All => Verdict::device_failure(call),
            _ => Verdict::Pass,
        }
    }

    /// While the own link is held, what ends came over another.
    fn see_end(&self, call: Call) -> Verdict {
        let latch = self.latch.lock().unwrap();
        if *self.fault.lock().unwrap() != Fault::FirstEnd || latch.is_open() {
            return Verdict::Pass;
        }
        latch.open();
        Verdict::device_failure(call)
    }
}

struct Scene {
    device: TestDevice,
    driver: Arc<dyn Driver>,
    tenant: Tenant,
    seen: Arc<Seen>,
}

impl Scene {
    fn new(storing: Storing, links_from_bytes: u64) -> Option<Self> {
        let device = TestDevice::linked(4 * GRANULES);
        if skipped_unless(|_| device.info().links > 0, "there is no other device with a link") {
            return None;
        }
        let seen = Arc::new(Seen {
            refuses_streams: AtomicBool::default(),
            refused: AtomicU64::default(),
            created: AtomicU64::default(),
            destroyed: AtomicU64::default(),
            own: Mutex::default(),
            opening: Mutex::default(),
            fault: Mutex::new(Fault::None),
            over_links: AtomicU64::default(),
            latch: Mutex::default(),
        });
        let script = Arc::clone(&seen);
        let driver = ScriptedDriver::new(device.driver(), move |call| script.see(call));
        let driver = driver.by(&Arc::new(Clock::default())).with_info(|info| {
            (info.fast_digests, info.kernel_copies, info.copy_streams, info.save_streams) =
                (true, true, 1, 4);
            info.fast_codec = storing == Storing::Codes;
        });
        let driver: Arc<dyn Driver> = Arc::new(driver);
        let config = storing
            .of(PoolConfig::default().in_chunks_of(4).in_segments_of(8))
            .linking_from(links_from_bytes);
        let pool = Pool::new(Arc::clone(&driver), config).unwrap();
        let mut tenant = Tenant::new(&Arc::new(pool), 1).storing(storing);
        let granule = tenant.granule();
        tenant.load(GRANULES * granule, &Tag::weights());
        let scene = Self { device, driver, tenant, seen };
        scene.seen.refuses_streams.store(true, Ordering::SeqCst);
        // They are being opened until the wake has shown which streams the own link has beside others.
        let opening = Arc::new(Latch::default());
        *scene.seen.opening.lock().unwrap() = Some(Arc::clone(&opening));
        scene.sleep();
        assert_eq!(scene.wake().linked_bytes, 0);
        opening.open();
        let links = scene.driver.info().links as u64;
        let is_opening = links_from_bytes == 1;
        eventually("they were refused", || !is_opening || scene.seen.refused.load(Ordering::SeqCst) >= links);
        scene.seen.refuses_streams.store(false, Ordering::SeqCst);
        *scene.seen.opening.lock().unwrap() = None;
        Some(scene)
    }

    fn sleep(&self) {
        self.tenant.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    }

    fn wake(&self) -> WakeReport {
        let woken = self.tenant.pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
        let bytes = GRANULES * self.tenant.granule();
        assert_eq!((woken.copied_bytes, woken.verified_bytes), (bytes, bytes));
        self.tenant.verify();
        woken
    }

    /// Sleeps until other links are open: one that is still being refused is tried again behind the next sleep.
    fn open_links(&self) {
        let (before, links) = (self.open_streams(), self.driver.info().links as u64);
        eventually("links are open", || {
            self.sleep();
            self.wake();
            self.open_streams() == before + links
        });
    }

    /// A sleep, and a wake that other links must help.
    fn cycle(&self, fault: Fault) -> WakeReport {
        self.sleep();
        let latch = Arc::new(Latch::default());
        *self.seen.latch.lock().unwrap() = Arc::clone(&latch);
        *self.seen.fault.lock().unwrap() = fault;
        self.seen.over_links.store(0, Ordering::SeqCst);
        let own = self.seen.own.lock().unwrap().clone();
        own.into_iter().for_each(|stream| hold(&*self.driver, stream, &latch));
        let woken = self.wake();
        assert!(latch.is_open() && self.seen.over_links.load(Ordering::SeqCst) > 0);
        woken
    }

    fn open_streams(&self) -> u64 {
        self.seen.created.load(Ordering::SeqCst) - self.seen.destroyed.load(Ordering::SeqCst)
    }

    fn end(self) {
        let Self { device, driver, tenant, seen } = self;
        let pool = Arc::clone(&tenant.pool);
        drop(tenant);
        let _ = pool.close();
        drop((pool, driver));
        eventually("all streams have gone", || {
            seen.created.load(Ordering::SeqCst) == seen.destroyed.load(Ordering::SeqCst)
        });
        assert_eq!(device.resident_bytes(), 0);
    }
}

#[test]
fn a_wake_takes_other_links_beside_its_own() {
    watched(|| {
        for storing in Storing::ALL {
            let Some(scene) = Scene::new(storing, 1) else { return };
            scene.open_links();
            for _ in 0..3 {
                let woken = scene.cycle(Fault::None);
                assert!(woken.linked_bytes > 0 && woken.linked_bytes < woken.copied_bytes, "{woken:?}");
            }
            scene.end();
        }
    });
}

#[test]
fn a_link_that_fails_costs_no_byte_and_is_not_used_again() {
    watched(|| {
        for (storing, fault) in
            Storing::ALL.into_iter().flat_map(|s| [Fault::First, Fault::FirstEnd, Fault::All].map(|f| (s, f)))
        {
            let Some(scene) = Scene::new(storing, 1) else { return };
            scene.open_links();
            let links = scene.driver.info().links as u64;
            let mut lost = 0;
            while lost < links {
                let woken = scene.cycle(fault);
                let failed =
                    if fault == Fault::All { scene.seen.over_links.load(Ordering::SeqCst) } else { 1 };
                assert!(failed <= links - lost, "each link is tried once: {failed}");
                assert!(fault != Fault::All || woken.linked_bytes == 0, "{woken:?}");
                lost += failed;
            }
            scene.sleep();
            assert_eq!(scene.wake().linked_bytes, 0, "{storing:?}, {fault:?}");
            scene.end();
        }
    });
}

#[test]
fn small_sleeps_leave_other_links_alone() {
    let Some(scene) = Scene::new(Storing::Raw, u64::MAX) else { return };
    let before = scene.seen.created.load(Ordering::SeqCst);
    scene.sleep();
    assert_eq!(scene.wake().linked_bytes, 0);
    assert_eq!(scene.seen.created.load(Ordering::SeqCst), before);
    scene.end();
}

#[test]
fn a_pool_that_closes_while_links_are_being_opened_leaves_none() {
    let Some(scene) = Scene::new(Storing::Raw, 1) else { return };
    let opening = Arc::new(Latch::default());
    *scene.seen.opening.lock().unwrap() = Some(Arc::clone(&opening));
    let before = scene.seen.created.load(Ordering::SeqCst);
    eventually("one is being opened", || {
        scene.sleep();
        scene.wake();
        scene.seen.created.load(Ordering::SeqCst) > before
    });
    scene.tenant.pool.close().unwrap();
    opening.open();
    scene.end();
}
