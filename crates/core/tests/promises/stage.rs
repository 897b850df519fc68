//! Sleeping and waking in two phases: a group does it together or not at all, and nothing waits for ever.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use poorwill_core::pool::UndoneBecause;
use poorwill_core::{
    AllocRequest, Decision, DecisionError, Driver, Level, LocalDecision, Pool, PoolConfig, PoolError,
    SleepReport, SleepRequest, Staged, Tag, TagState, Verdict, WakeReport, WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::scripted::{Call, ScriptedDriver, Verdict as CallVerdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::{eventually, watched};

/// Longer than any test takes.
const NEVER: Duration = Duration::from_hours(1);

fn tenant_on(driver: Arc<dyn Driver>, seed: u64) -> Tenant {
    let pool = Pool::new(driver, PoolConfig::default().in_chunks_of(4).in_segments_of(8)).unwrap();
    let mut tenant = Tenant::new(&Arc::new(pool), seed);
    let granule = tenant.granule();
    for bytes in [3 * granule + 100, 700, 10 * granule] {
        tenant.load(bytes, &Tag::weights());
    }
    tenant.load(5 * granule, &Tag::runtime());
    tenant
}

fn tenant(device: &TestDevice) -> Tenant {
    tenant_on(device.driver(), 7)
}

fn all() -> SleepRequest {
    SleepRequest::all(Level::One)
}

fn local() -> Arc<LocalDecision> {
    Arc::default()
}

fn stage_sleep(tenant: &Tenant, decision: &Arc<LocalDecision>) -> Result<Staged<SleepReport>, PoolError> {
    tenant.pool.stage_sleep(&all(), Arc::clone(decision) as Arc<dyn Decision>, NEVER)
}

fn stage_wake(tenant: &Tenant, decision: &Arc<LocalDecision>) -> Result<Staged<WakeReport>, PoolError> {
    tenant.pool.stage_wake(&WakeRequest::all(), Arc::clone(decision) as Arc<dyn Decision>, NEVER)
}

fn state(tenant: &Tenant) -> TagState {
    let [weights, runtime] = [Tag::weights(), Tag::runtime()].map(|tag| tenant.pool.tag_state(&tag).unwrap());
    assert_eq!(weights, runtime);
    weights
}

#[test]
fn a_staged_sleep_holds_all_its_memory_until_it_is_committed() {
    watched(|| {
        let device = TestDevice::open(64);
        let tenant = tenant(&device);
        let resident_bytes = device.resident_bytes();
        let staged = stage_sleep(&tenant, &local()).unwrap();
        assert_eq!(device.resident_bytes(), resident_bytes);
        assert!(device.host_bytes() > 0, "the backups are stored");
        let report = staged.commit().unwrap();
        assert_eq!(
            (report.released_bytes, report.copied_bytes),
            (resident_bytes, report.planned_release_bytes)
        );
        assert_eq!((device.resident_bytes(), state(&tenant)), (0, TagState::AsleepBackedUp));
        tenant.pool.wake(&WakeRequest::all()).unwrap();
        tenant.verify();
    });
}

/// What was spare when it was planned may be gone when it releases.
#[test]
fn a_sleep_counts_no_memory_that_a_trim_gave_back_meanwhile() {
    watched(|| {
        let device = TestDevice::open(2048);
        let tenant = Tenant::new(&Arc::new(Pool::new(device.driver(), PoolConfig::default()).unwrap()), 7);
        // The pool keeps a granule ahead where it holds more than 1024.
        for (bytes, tag) in [(1100 * tenant.granule(), Tag::weights()), (700, Tag::new("lora").unwrap())] {
            tenant.pool.alloc(&AllocRequest::new(bytes, tag)).unwrap();
        }
        let staged = stage_sleep(&tenant, &local()).unwrap();
        let trimmed_bytes = tenant.pool.trim().unwrap();
        assert!(trimmed_bytes > 0, "nothing was spare");
        let left_bytes = tenant.pool.stats().unwrap().mapped_bytes;
        let report = staged.commit().unwrap();
        assert_eq!([report.planned_release_bytes, report.released_bytes], [left_bytes; 2]);
        assert_eq!(tenant.pool.stats().unwrap().mapped_bytes, 0);
    });
}

#[test]
fn a_sleep_that_is_undone_leaves_every_byte_and_other_calls_go_on() {
    watched(|| {
        let device = TestDevice::open(64);
        let tenant = tenant(&device);
        let weights = SleepRequest::of([Tag::weights()], Level::One);
        let staged = tenant.pool.stage_sleep(&weights, local(), NEVER).unwrap();
        // Another tag does not wait; this one does.
        tenant.pool.alloc(&AllocRequest::new(tenant.granule(), Tag::kv_cache())).unwrap();
        let request = AllocRequest::new(tenant.granule(), Tag::weights());
        let refused = tenant.pool.alloc(&request.clone().within(Duration::ZERO)).unwrap_err();
        assert!(matches!(refused, PoolError::TimedOut { .. }), "{refused}");
        let pool = Arc::clone(&tenant.pool);
        let waits = thread::spawn(move || pool.alloc(&request).unwrap());
        staged.undo().unwrap();
        waits.join().unwrap();
        assert_eq!(state(&tenant), TagState::Awake);
        tenant.verify();
        tenant.pool.sleep(&all()).unwrap();
        tenant.pool.wake(&WakeRequest::all()).unwrap();
        tenant.verify();
    });
}

#[test]
fn a_staged_wake_is_verified_and_can_still_be_undone() {
    watched(|| {
        let device = TestDevice::open(64);
        let tenant = tenant(&device);
        tenant.pool.sleep(&all()).unwrap();
        let staged = stage_wake(&tenant, &local()).unwrap();
        assert!(device.resident_bytes() > 0);
        assert_eq!(state(&tenant), TagState::AsleepBackedUp);
        staged.undo().unwrap();
        assert_eq!((device.resident_bytes(), state(&tenant)), (0, TagState::AsleepBackedUp));
        let report = stage_wake(&tenant, &local()).unwrap().commit().unwrap();
        assert!(report.verified_bytes > 0);
        assert_eq!(state(&tenant), TagState::Awake);
        tenant.verify();
    });
}

/// Staged with no time to decide.
pub(crate) fn expect_undone(result: &Result<(), PoolError>) {
    let Err(PoolError::Undone { because, .. }) = result else { panic!("{result:?}") };
    assert_eq!(*because, UndoneBecause::Undecided { waited: Duration::ZERO });
}

#[test]
fn nothing_is_undecided_after_its_time() {
    watched(|| {
        let device = TestDevice::open(64);
        let tenant = tenant(&device);
        let sleep = tenant.pool.stage_sleep(&all(), local(), Duration::ZERO).unwrap();
        expect_undone(&sleep.wait().map(drop));
        assert_eq!(state(&tenant), TagState::Awake);
        tenant.verify();
        // A verdict that comes too late changes nothing.
        let late = tenant.pool.stage_sleep(&all(), local(), Duration::ZERO).unwrap();
        eventually("undone", || tenant.pool.sleep(&all().within(Duration::ZERO)).is_ok());
        expect_undone(&late.commit().map(drop));
        let wake = tenant.pool.stage_wake(&WakeRequest::all(), local(), Duration::ZERO).unwrap();
        expect_undone(&wake.wait().map(drop));
        assert_eq!((device.resident_bytes(), state(&tenant)), (0, TagState::AsleepBackedUp));
    });
}

#[test]
fn a_verdict_stays_what_it_is() {
    watched(|| {
        let device = TestDevice::open(64);
        let tenant = tenant(&device);
        let decision = local();
        let staged = stage_sleep(&tenant, &decision).unwrap();
        decision.decide(Verdict::Commit).unwrap();
        assert!(matches!(staged.undo(), Err(PoolError::Committed { op: "sleep" })));
        assert_eq!(state(&tenant), TagState::AsleepBackedUp);
        let decision = local();
        let staged = stage_wake(&tenant, &decision).unwrap();
        decision.decide(Verdict::Undo).unwrap();
        let undone = staged.commit().unwrap_err();
        assert!(
            matches!(undone, PoolError::Undone { op: "wake", because: UndoneBecause::Decided }),
            "{undone}"
        );
        assert_eq!(device.resident_bytes(), 0);
        // A participant that comes after the verdict does not begin, nor one that cannot read it.
        for verdict in [Verdict::Undo, Verdict::Commit] {
            let decision = local();
            decision.decide(verdict).unwrap();
            let late = stage_wake(&tenant, &decision).unwrap_err();
            assert!(matches!(late, PoolError::Undone { .. }), "{late}");
        }
        let lost = Lossy::once_staged();
        lost.is_lost.store(true, Ordering::Relaxed);
        let refused = tenant.pool.stage_wake(&WakeRequest::all(), lost, NEVER).unwrap_err();
        assert!(matches!(refused, PoolError::Undecided { .. }), "{refused}");
        assert_eq!((device.resident_bytes(), state(&tenant)), (0, TagState::AsleepBackedUp));
    });
}

#[test]
fn a_handle_that_is_dropped_and_a_pool_that_is_closed_undo() {
    watched(|| {
        let device = TestDevice::open(64);
        let tenant = tenant(&device);
        let decision = local();
        drop(stage_sleep(&tenant, &decision).unwrap());
        assert_eq!(decision.verdict().unwrap(), Some(Verdict::Undo));
        // It waits for the undo.
        tenant.pool.sleep(&all()).unwrap();
        tenant.pool.wake(&WakeRequest::all()).unwrap();
        tenant.verify();
        let decision = local();
        let staged = stage_sleep(&tenant, &decision).unwrap();
        tenant.pool.close().unwrap();
        let undone = staged.wait().unwrap_err();
        assert!(matches!(undone, PoolError::Undone { because: UndoneBecause::Closed, .. }), "{undone}");
        assert_eq!((device.resident_bytes(), decision.verdict().unwrap()), (0, Some(Verdict::Undo)));
        assert!(matches!(stage_sleep(&tenant, &local()), Err(PoolError::Closed)));
    });
}

#[test]
fn one_that_refuses_does_not_let_the_others_wait() {
    watched(|| {
        let devices = [(); 2].map(|()| TestDevice::open(64));
        let tenants = devices.each_ref().map(tenant);
        let decision = local();
        let first = stage_sleep(&tenants[0], &decision).unwrap();
        let hold = tenants[1].pool.hold(&Tag::weights(), "mlx5_0").unwrap();
        let refused = stage_sleep(&tenants[1], &decision).unwrap_err();
        assert!(matches!(refused, PoolError::Held { .. }), "{refused}");
        assert!(matches!(first.wait(), Err(PoolError::Undone { because: UndoneBecause::Decided, .. })));
        drop(hold);
        for tenant in &tenants {
            assert_eq!(state(tenant), TagState::Awake);
            tenant.verify();
        }
    });
}

/// The register of a group, out of reach while `is_lost`.
#[derive(Debug, Default)]
struct Lossy {
    decision: LocalDecision,
    is_lost: AtomicBool,
}

impl Lossy {
    /// A register that is lost once a participant is staged.
    fn once_staged() -> Arc<Self> {
        Arc::default()
    }

    fn reach(&self) -> Result<&LocalDecision, DecisionError> {
        let problem = "the folder is gone".to_owned();
        if self.is_lost.load(Ordering::Relaxed) { Err(DecisionError { problem }) } else { Ok(&self.decision) }
    }
}

impl Decision for Lossy {
    fn decide(&self, proposed: Verdict) -> Result<Verdict, DecisionError> {
        self.reach()?.decide(proposed)
    }

    fn verdict(&self) -> Result<Option<Verdict>, DecisionError> {
        self.reach()?.verdict()
    }

    fn note_staged(&self) -> Result<(), DecisionError> {
        self.is_lost.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// The others may have committed. So it neither commits nor undoes, and says why.
#[test]
fn without_its_decision_a_participant_keeps_everything_and_says_so() {
    watched(|| {
        let device = TestDevice::open(64);
        let tenant = tenant(&device);
        let resident_bytes = device.resident_bytes();
        let lossy = Lossy::once_staged();
        let register = Arc::clone(&lossy) as Arc<dyn Decision>;
        let staged = tenant.pool.stage_sleep(&all(), register, Duration::ZERO).unwrap();
        eventually("a problem", || staged.problem().is_some());
        assert_eq!(device.resident_bytes(), resident_bytes);
        lossy.decision.decide(Verdict::Commit).unwrap();
        lossy.is_lost.store(false, Ordering::Relaxed);
        assert_eq!(staged.wait().unwrap().released_bytes, resident_bytes);
        let staged = tenant.pool.stage_wake(&WakeRequest::all(), Lossy::once_staged(), NEVER).unwrap();
        eventually("a problem", || staged.problem().is_some());
        let undecided = staged.commit().unwrap_err();
        assert!(matches!(undecided, PoolError::Undecided { verdict: Verdict::Commit, .. }), "{undecided}");
        // Closing needs no verdict, since it releases everything.
        tenant.pool.close().unwrap();
        assert_eq!(device.resident_bytes(), 0);
    });
}

#[test]
fn a_panic_in_a_callback_undoes_the_group() {
    watched(|| {
        let device = TestDevice::open(64);
        let tenant = tenant(&device);
        tenant.pool.sleep(&all()).unwrap();
        let decision = local();
        let request = WakeRequest::all().telling(|_| panic!("by the test"));
        let staged = tenant.pool.stage_wake(&request, decision.clone(), NEVER);
        assert!(matches!(staged, Err(PoolError::Poisoned)), "{staged:?}");
        assert_eq!(decision.verdict().unwrap(), Some(Verdict::Undo));
        assert_eq!((device.resident_bytes(), state(&tenant)), (0, TagState::AsleepBackedUp));
        tenant.pool.wake(&WakeRequest::all()).unwrap();
        tenant.verify();
    });
}

/// Fails `burst` calls from the `nth` on, while armed.
#[derive(Debug, Default)]
struct Failing {
    is_armed: AtomicBool,
    calls: AtomicU64,
    first: AtomicU64,
    burst: AtomicU64,
}

impl Failing {
    fn arm(&self, first: u64, burst: u64) {
        self.calls.store(0, Ordering::Relaxed);
        self.first.store(first, Ordering::Relaxed);
        self.burst.store(burst, Ordering::Relaxed);
        self.is_armed.store(true, Ordering::Relaxed);
    }

    /// Whether the calls to fail were reached.
    fn disarm(&self) -> bool {
        self.is_armed.store(false, Ordering::Relaxed);
        self.calls.load(Ordering::Relaxed) > self.first.load(Ordering::Relaxed)
    }

    fn judge(&self, call: Call) -> CallVerdict {
        if !self.is_armed.load(Ordering::Relaxed) {
            return CallVerdict::Pass;
        }
        let call_number = self.calls.fetch_add(1, Ordering::Relaxed);
        let first = self.first.load(Ordering::Relaxed);
        let fails = (first..first + self.burst.load(Ordering::Relaxed)).contains(&call_number);
        if fails { CallVerdict::device_failure(call) } else { CallVerdict::Pass }
    }
}

struct Rank {
    tenant: Tenant,
    failing: Arc<Failing>,
    device: TestDevice,
}

impl Rank {
    fn new(seed: u64) -> Self {
        let device = TestDevice::open(64);
        let failing = Arc::new(Failing::default());
        let script = Arc::clone(&failing);
        let driver = ScriptedDriver::new(device.driver(), move |call| script.judge(call));
        Self { tenant: tenant_on(Arc::new(driver), seed), failing, device }
    }
}

/// What a group of two did: `true` if it committed.
fn together<R>(
    ranks: &[Rank; 2],
    stage: impl Fn(&Tenant, &Arc<LocalDecision>) -> Result<Staged<R>, PoolError>,
) -> (bool, Vec<Result<R, PoolError>>) {
    let decision = local();
    let staged = ranks.each_ref().map(|rank| stage(&rank.tenant, &decision));
    if staged.iter().all(Result::is_ok) {
        decision.decide(Verdict::Commit).unwrap();
    }
    let ended = staged.into_iter().map(|one| one.and_then(Staged::wait)).collect();
    (decision.decide(Verdict::Undo).unwrap() == Verdict::Commit, ended)
}

/// Whichever call of whichever participant fails: both sleep, or both are awake with their bytes.
#[test]
fn whatever_fails_a_group_is_never_half_asleep() {
    watched(|| {
        let stride = DeviceKind::of_this_run().stride() as u64;
        let ranks = [Rank::new(1), Rank::new(2)];
        let (mut commits, mut undone, mut stranded) = (0, 0_u64, 0);
        for (victim, burst) in [(0, 1), (1, 1), (0, 3), (1, 3)] {
            for first in (burst % stride..).step_by(usize::try_from(stride).unwrap()) {
                ranks[victim].failing.arm(first, burst);
                let (is_committed, ended) = together(&ranks, stage_sleep);
                let mut reached = ranks[victim].failing.disarm();
                let run = format!("rank {victim}, call {first}..{}: {ended:?}", first + burst);
                let is_stranded = ended.iter().any(|one| matches!(one, Err(PoolError::Stranded { .. })));
                for rank in &ranks {
                    let state = state_of(&rank.tenant);
                    assert_eq!(state == TagState::AsleepBackedUp, is_committed, "{run}");
                    assert!(state == TagState::Awake || is_committed || is_stranded, "{run}");
                }
                undone += u64::from(!is_committed);
                stranded += u32::from(is_stranded);
                if !is_committed {
                    // What is stranded has its memory, and a wake maps it again.
                    ranks.iter().for_each(|rank| drop(rank.tenant.pool.wake(&WakeRequest::all()).unwrap()));
                    ranks.iter().for_each(|rank| rank.tenant.verify());
                    ranks.iter().for_each(|rank| drop(rank.tenant.pool.sleep(&all()).unwrap()));
                }
                ranks[victim].failing.arm(first, burst);
                let (is_committed, ended) = together(&ranks, stage_wake);
                reached |= ranks[victim].failing.disarm();
                let run = format!("rank {victim}, call {first}..{}: {ended:?}", first + burst);
                for rank in &ranks {
                    assert_eq!(state_of(&rank.tenant) == TagState::Awake, is_committed, "{run}");
                    if !is_committed {
                        rank.tenant.pool.trim().unwrap();
                        rank.tenant.pool.wake(&WakeRequest::all()).unwrap();
                    }
                    rank.tenant.verify();
                }
                commits += u32::from(is_committed);
                undone += u64::from(!is_committed);
                if !reached {
                    break;
                }
            }
        }
        // With a large stride, it is by chance whether a failure falls between an unmapping and its undo.
        assert!(
            commits >= 4 && undone > 40 / stride && (stranded > 0 || stride > 1),
            "{commits}, {undone}, {stranded}"
        );
        for Rank { tenant, device, .. } in ranks {
            tenant.pool.close().unwrap();
            assert_eq!(device.resident_bytes(), 0);
            device.expect_no_host_bytes("the pool is closed");
        }
    });
}

fn state_of(tenant: &Tenant) -> TagState {
    let states = [Tag::weights(), Tag::runtime()].map(|tag| tenant.pool.tag_state(&tag).unwrap());
    states.into_iter().find(|state| *state != TagState::Awake).unwrap_or(TagState::Awake)
}

/// Many threads stage, commit, undo and close; every handle ends.
#[test]
fn stages_of_many_threads_all_end() {
    watched(|| {
        let device = TestDevice::open(64);
        let tenant = tenant(&device);
        let ended = Mutex::new((0, 0));
        thread::scope(|scope| {
            for nth in 0..4_u32 {
                let (tenant, ended) = (&tenant, &ended);
                scope.spawn(move || {
                    for turn in 0..DeviceKind::of_this_run().cases(12) {
                        let commits = (nth + turn) % 2 == 0;
                        let mut ends = (0, 0);
                        if let Ok(staged) = stage_sleep(tenant, &local()) {
                            ends.0 += u32::from(commits && staged.commit().is_ok());
                        }
                        if let Ok(staged) = stage_wake(tenant, &local()) {
                            ends.1 += u32::from(commits && staged.commit().is_ok());
                        }
                        let mut ended = ended.lock().unwrap();
                        *ended = (ended.0 + ends.0, ended.1 + ends.1);
                    }
                });
            }
        });
        let (sleeps, wakes) = *ended.lock().unwrap();
        assert!(sleeps > 0 && wakes > 0);
        tenant.pool.wake(&WakeRequest::all()).unwrap();
        tenant.verify();
    });
}
