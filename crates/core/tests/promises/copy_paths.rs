//! Copies of a wake over two copy paths, on a device that reports kernel copies: which path they take. No promise of
//! a wake depends on it.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use poorwill_core::{
    AllocRequest, Driver, DriverErrorKind, Level, Op, Pool, PoolConfig, PoolError, SleepRequest, StreamId,
    Tag, TagState, Verify, WakeReport, WakeRequest,
};
use poorwill_testkit::clock::Clock;
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::latch::{Latch, hold};
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;

const CHUNK_GRANULES: u64 = 4;

/// Granules of a burst that measures a copy path.
const TRIAL_GRANULES: u64 = 32;

/// A test's reaction to a copy to the device, when it is queued or waited for.
type OnCopy = Box<dyn Fn(Call) -> Verdict + Send>;

/// A pool whose wakes are observed.
struct Scene {
    driver: Arc<dyn Driver>,
    tenant: Tenant,
    /// Bytes by stream.
    copied: Arc<Mutex<BTreeMap<StreamId, u64>>>,
    on_copy: Arc<Mutex<Option<OnCopy>>>,
}

impl Scene {
    fn new(kernel_copies: bool) -> Self {
        Self::by(kernel_copies, None)
    }

    /// By this clock, or the machine's.
    fn by(kernel_copies: bool, clock: Option<&Arc<Clock>>) -> Self {
        let device = TestDevice::open(512);
        let (copied, on_copy): (Arc<Mutex<BTreeMap<_, _>>>, Arc<Mutex<Option<OnCopy>>>) = Default::default();
        let (seen, reacting) = (Arc::clone(&copied), Arc::clone(&on_copy));
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            if call.op != Op::CopyToDevice {
                return Verdict::Pass;
            }
            if let Some(stream) = call.stream {
                *seen.lock().unwrap().entry(stream).or_default() += call.bytes;
            }
            reacting.lock().unwrap().as_ref().map_or(Verdict::Pass, |react| react(call))
        });
        let driver = match clock {
            Some(clock) => driver.by(clock),
            None => driver,
        };
        let driver: Arc<dyn Driver> = Arc::new(driver.with_info(|info| {
            (info.kernel_copies, info.copy_streams, info.save_streams) = (kernel_copies, 1, 1);
        }));
        let config = PoolConfig::default().in_chunks_of(CHUNK_GRANULES).in_segments_of(8);
        let pool = Arc::new(Pool::new(Arc::clone(&driver), config).unwrap());
        Self { driver, tenant: Tenant::new(&pool, 5), copied, on_copy }
    }

    fn load(&mut self, granules: u64, tag: &Tag) {
        let granule = self.tenant.granule();
        self.tenant.load(granules * granule, tag);
    }

    /// A cache, whose bytes are not preserved.
    fn cache(&self, granules: u64) {
        let request = AllocRequest::new(granules * self.tenant.granule(), Tag::kv_cache());
        self.tenant.pool.alloc(&request).unwrap();
    }

    fn sleep(&self) {
        self.tenant.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
        self.copied.lock().unwrap().clear();
    }

    /// Wakes, and returns the bytes copied on each stream.
    fn wake(&self, request: &WakeRequest) -> (WakeReport, BTreeMap<StreamId, u64>) {
        let report = self.tenant.pool.wake(request).unwrap();
        (report, std::mem::take(&mut *self.copied.lock().unwrap()))
    }

    fn check(&self) {
        for known in &self.tenant.blocks {
            let len = known.bytes.len();
            let read = poorwill_testkit::pattern::read(&self.tenant.pool, known.block.id, len).unwrap();
            assert!(read == known.bytes, "{}", known.block.range);
        }
    }
}

fn verified() -> WakeRequest {
    WakeRequest::all().verifying(Verify::All)
}

#[test]
fn both_copy_paths_are_tried_and_the_faster_takes_the_rest() {
    let mut scene = Scene::new(true);
    scene.load(5 * TRIAL_GRANULES, &Tag::weights());
    scene.cache(24);
    scene.sleep();
    let (report, both) = scene.wake(&verified());
    assert_eq!(both.values().sum::<u64>(), report.copied_bytes);
    assert_eq!(both.len(), 2, "{both:?}");
    scene.check();
    assert_eq!(scene.wake(&WakeRequest::all()).1, BTreeMap::new());
    scene.check();
}

#[test]
fn small_copies_use_the_engine_alone() {
    // By a clock that stands still, by which no copy is ever held up.
    let mut scene = Scene::by(true, Some(&Arc::new(Clock::default())));
    scene.load(TRIAL_GRANULES / 2, &Tag::weights());
    scene.sleep();
    let (report, copied) = scene.wake(&verified());
    assert!(copied.values().eq([&report.copied_bytes]), "{copied:?}");
    scene.check();
}

#[test]
fn where_kernels_do_not_copy_there_is_one_copy_path() {
    let mut scene = Scene::new(false);
    scene.load(24, &Tag::weights());
    scene.cache(60);
    scene.sleep();
    assert_eq!(scene.wake(&verified()).1.len(), 1);
    scene.check();
}

#[test]
fn a_copy_path_that_is_held_up_leaves_the_copies_to_the_other() {
    let mut scene = Scene::new(true);
    scene.load(8 * TRIAL_GRANULES, &Tag::weights());
    scene.sleep();
    let (report, both) = scene.wake(&WakeRequest::all());
    let total_bytes = report.copied_bytes;
    for held in both.into_keys() {
        scene.sleep();
        let latch = Arc::new(Latch::default());
        hold(&*scene.driver, held, &latch);
        // The wake cannot end before everything is queued, nor before the latch is open.
        let copied = Arc::clone(&scene.copied);
        *scene.on_copy.lock().unwrap() = Some(Box::new(move |_| {
            if copied.lock().unwrap().values().sum::<u64>() == total_bytes {
                latch.open();
            }
            Verdict::Pass
        }));
        let (_, copied) = scene.wake(&verified());
        *scene.on_copy.lock().unwrap() = None;
        // The share of each path depends on time. That the wake ends shows that the rest went on.
        assert!(copied.len() == 2 && copied[&held] < total_bytes, "{copied:?}");
        assert_eq!(copied.values().sum::<u64>(), total_bytes);
        scene.check();
    }
}

#[test]
fn progress_is_reported_while_copies_are_queued_and_may_panic() {
    let mut scene = Scene::new(true);
    scene.load(8 * TRIAL_GRANULES, &Tag::weights());
    scene.sleep();
    let reports = Arc::new(Mutex::new(Vec::new()));
    let (notes, queued) = (Arc::clone(&reports), Arc::clone(&scene.copied));
    let request = verified().telling(move |progress| {
        let queued_bytes: u64 = queued.lock().unwrap().values().sum();
        notes.lock().unwrap().push((progress.filled_bytes, progress.total_bytes, queued_bytes));
    });
    let (report, _) = scene.wake(&request);
    let reports = std::mem::take(&mut *reports.lock().unwrap());
    let total_bytes = report.copied_bytes;
    assert!(reports.is_sorted_by(|a, b| a.0 < b.0), "{reports:?}");
    assert!(
        reports.iter().all(|(filled, total, queued)| *total == total_bytes && filled <= queued),
        "{reports:?}"
    );
    assert_eq!(reports.last().map(|report| report.0), Some(total_bytes));
    // Buffers do not suffice for all of it, so some had arrived before the last was queued.
    assert!(reports[0].2 < total_bytes, "{reports:?}");

    scene.sleep();
    let request = verified().telling(|_| panic!("a test's own panic"));
    let panicked = catch_unwind(AssertUnwindSafe(|| scene.tenant.pool.wake(&request)));
    assert!(panicked.is_err());
    assert_eq!(scene.tenant.pool.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
    scene.wake(&verified());
    scene.check();
}

#[test]
fn whichever_copy_fails_everything_sleeps_again() {
    let mut scene = Scene::new(true);
    scene.load(5 * TRIAL_GRANULES, &Tag::weights());
    // When it is queued, and when it is waited for. When the last is waited for, everything is queued.
    let last = 5 * TRIAL_GRANULES / CHUNK_GRANULES - 1;
    for (nth, waiting) in [0, 1, 9, last].into_iter().flat_map(|nth| [(nth, false), (nth, true)]) {
        scene.sleep();
        let before = scene.driver.memory_info().unwrap();
        let count = Mutex::new(0);
        *scene.on_copy.lock().unwrap() = Some(Box::new(move |call| {
            let mut count = count.lock().unwrap();
            *count += u64::from(call.waiting == waiting);
            let is_it = call.waiting == waiting && *count == nth + 1;
            if is_it { Verdict::device_failure(call) } else { Verdict::Pass }
        }));
        let reports = Arc::new(Mutex::new(0));
        let notes = Arc::clone(&reports);
        let request = WakeRequest::all().telling(move |_| *notes.lock().unwrap() += 1);
        let failed = scene.tenant.pool.wake(&request).unwrap_err();
        *scene.on_copy.lock().unwrap() = None;
        let PoolError::WakeFailed { source, .. } = &failed else { panic!("{failed}") };
        assert!(matches!(source.kind, DriverErrorKind::Device { .. }), "{failed}");
        assert!(*reports.lock().unwrap() <= nth, "nothing is reports once something has failed");
        assert_eq!(scene.tenant.pool.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
        assert_eq!(scene.driver.memory_info().unwrap(), before, "copy {nth}, waiting: {waiting}");
        scene.wake(&verified());
        scene.check();
    }
}
