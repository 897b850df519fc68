//! Steps that sleep, wake, prepare and hold, at once or staged.

use std::sync::Arc;
use std::time::Duration;

use poorwill_core::{
    Decision, DriverErrorKind, Dropped, Level, LocalDecision, PoolError, SleepReport, SleepRequest, Staged,
    Tag, TagState, Verdict, Verify, WakeReport, WakeRequest, chain,
};
use poorwill_testkit::watchdog::eventually;

use super::worker::{Known, Worker};
use crate::property::sorted;
use crate::stage::expect_undone;

/// Longer than any test takes.
const NEVER: Duration = Duration::from_hours(1);

/// How a staged call ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Committed,
    CommittedElsewhere,
    Undone,
    Dropped,
    /// Its time is over at once.
    Undecided,
}

impl Worker {
    pub(super) fn sleep(&mut self) {
        let tags = self.some_tags();
        let level = if self.one_in(4) { Level::Two } else { Level::One };
        let mut request = SleepRequest::of(tags.clone(), level);
        if self.world.setup.lends && self.one_in(2) {
            request = request.lending();
        }
        let slept = if self.one_in(3) {
            let world = Arc::clone(&self.world);
            self.stage(&tags, |decision, undo_after| world.pool.stage_sleep(&request, decision, undo_after))
        } else {
            self.world.pool.sleep(&request).map(Some)
        };
        let mut after = self.model.clone();
        match (slept, after.sleep(level, Some(&tags))) {
            (Ok(Some(report)), Some(falling)) => {
                self.model = after;
                self.fell_asleep(&report, &falling);
            }
            (Ok(None), Some(_)) => {
                self.world.saw("a sleep that was undone");
                self.check_bytes_of(&tags);
            }
            (Err(PoolError::SleepConflict { .. } | PoolError::Undefined { .. }), None) => {
                self.world.saw("a conflict");
            }
            (Err(error), Some(_)) => {
                self.expect_failed_copy(&error);
                self.check_bytes_of(&tags);
            }
            (slept, falling) => panic!("{slept:?} where the model says {falling:?}"),
        }
    }

    fn fell_asleep(&mut self, report: &SleepReport, falling: &[Tag]) {
        let released_bytes = report.released_bytes + report.shared_backup_bytes;
        assert_eq!(report.planned_release_bytes, released_bytes, "{report:?}");
        assert_eq!(sorted(report.tags.clone()), sorted(falling.to_vec()));
        self.world.saw("a sleep");
        if report.resident_bytes > 0 {
            self.world.saw("resident memory");
        }
        for known in &mut self.live {
            let (tag, policy) = &self.tags[known.tag];
            let is_dropped = self.model.state(tag) == TagState::AsleepDropped;
            if is_dropped && falling.contains(tag) && policy.dropped == Dropped::Zeros {
                known.set(vec![0; known.bytes.len()]);
            }
        }
        let all_sleep = self.live.iter().all(|known| self.model.state(&self.tags[known.tag].0).is_asleep());
        let count = report.already_asleep_tags.len() + report.tags.len();
        if self.world.setup.is_alone() && all_sleep && count == self.tags.len() {
            let stats = self.world.pool.stats().unwrap();
            assert_eq!(stats.mapped_bytes, stats.resident_bytes, "all sleep");
        }
    }

    /// What can go wrong in this configuration, and nothing else.
    pub(super) fn expect_failed_copy(&mut self, error: &PoolError) {
        match error {
            PoolError::SleepFailed { source, .. } | PoolError::PrepareFailed { source, .. } => {
                use DriverErrorKind::{OutOfDisk, OutOfHostMemory};
                let lacks = matches!(source.kind, OutOfHostMemory { .. } | OutOfDisk { .. });
                assert!(lacks && self.world.setup.is_short(), "{}", chain(error));
                self.world.saw("too little host memory");
            }
            PoolError::Lost { .. } if self.world.setup.spoils() => self.heal(),
            error => panic!("{}", chain(error)),
        }
    }

    pub(super) fn wake(&mut self) {
        let tags = self.some_tags();
        let spoils = self.world.setup.spoils();
        let verify = if spoils || self.one_in(2) { Verify::All } else { Verify::Sample };
        let mut request = WakeRequest::of(tags.clone()).verifying(verify);
        let accepts = spoils && self.one_in(2);
        if accepts {
            request = request.accepting_losses();
        }
        let woken = if self.one_in(3) {
            let world = Arc::clone(&self.world);
            self.stage(&tags, |decision, undo_after| world.pool.stage_wake(&request, decision, undo_after))
        } else {
            self.world.pool.wake(&request).map(Some)
        };
        match woken {
            Ok(Some(report)) => self.woke(&report, &tags, accepts),
            Ok(None) => {
                self.world.saw("a wake that was undone");
                self.check_bytes_of(&tags);
            }
            Err(PoolError::OverLimit { .. } | PoolError::DeviceFull { .. }) => {
                self.world.saw("a refused wake");
                self.expect_too_much(&tags);
            }
            Err(PoolError::Corrupt { .. }) => {
                assert!(spoils, "nothing was spoiled");
                self.world.saw("a spoiled backup");
            }
            Err(PoolError::WakeFailed { ref source, .. })
                if self.world.setup.is_short()
                    && matches!(source.kind, DriverErrorKind::OutOfHostMemory { .. }) => {}
            Err(error) => panic!("{}", chain(&error)),
        }
    }

    /// A wake was refused: with what is awake it needs more than there may be, even if all blocks lie apart.
    fn expect_too_much(&self, waking: &[Tag]) {
        let granule = self.world.granule;
        let tag_of = |known: &Known| &self.tags[known.tag].0;
        let needs =
            |known: &&Known| !self.model.state(tag_of(known)).is_asleep() || waking.contains(tag_of(known));
        let granules = |known: &Known| known.block.range.bytes.div_ceil(granule) + 1;
        let needed: u64 = self.live.iter().filter(needs).map(granules).sum();
        let limit = self.world.setup.limit_granules;
        assert!(needed > limit || !self.world.setup.is_alone(), "{needed} of {limit} granules are refused");
    }

    fn woke(&mut self, report: &WakeReport, tags: &[Tag], accepts: bool) {
        self.world.saw("a wake");
        if report.returned_bytes > 0 {
            self.world.saw("memory that came back");
        }
        assert_eq!(sorted(report.tags.clone()), sorted(self.model.wake(Some(tags))));
        if !report.lost.is_empty() {
            assert!(accepts, "lost: {:?}", report.lost);
            self.world.saw("an accepted loss");
            assert_eq!(self.world.pool.lost_ranges().unwrap().len(), report.lost.len());
            self.heal();
        }
        self.check_bytes_of(tags);
    }

    /// `None` if it was undone.
    fn stage<T>(
        &mut self,
        tags: &[Tag],
        begin: impl FnOnce(Arc<dyn Decision>, Duration) -> Result<Staged<T>, PoolError>,
    ) -> Result<Option<T>, PoolError> {
        use Ending::{Committed, CommittedElsewhere, Dropped, Undecided, Undone};
        let ending = [Committed, CommittedElsewhere, Undone, Dropped, Undecided][self.random.usize(..5)];
        let undo_after = if ending == Undecided { Duration::ZERO } else { NEVER };
        let decision = Arc::new(LocalDecision::default());
        let staged = begin(Arc::clone(&decision) as Arc<dyn Decision>, undo_after)?;
        self.work_beside(tags);
        match ending {
            Committed => staged.commit().map(Some),
            CommittedElsewhere => {
                expect_of_commit(&decision, Verdict::Commit);
                staged.wait().map(Some)
            }
            Undone => staged.undo().map(|()| None),
            Dropped => {
                drop(staged);
                expect_of_commit(&decision, Verdict::Undo);
                eventually("the undo has ended", || Arc::strong_count(&decision) == 1);
                Ok(None)
            }
            Undecided => {
                expect_undone(&staged.wait().map(drop));
                Ok(None)
            }
        }
    }

    pub(super) fn prepare(&mut self) {
        let request = SleepRequest::of(self.some_tags(), Level::One);
        let preparation = match self.world.pool.prepare_sleep(&request) {
            Ok(preparation) => preparation,
            Err(PoolError::SleepConflict { .. } | PoolError::Undefined { .. }) => return,
            Err(error) => return self.expect_failed_copy(&error),
        };
        match self.random.u8(..4) {
            0 => preparation.cancel(),
            1 => drop(preparation.wait().map_err(|error| self.expect_failed_copy(&error))),
            2 => drop(preparation),
            _ => self.preparing.push(preparation),
        }
    }

    /// Those whose end is known by now.
    pub(super) fn end_preparations(&mut self) {
        let ended: Vec<_> =
            self.preparing.extract_if(.., |preparation| preparation.progress().is_ended).collect();
        for preparation in ended {
            drop(preparation.wait().map_err(|error| self.expect_failed_copy(&error)));
        }
    }

    /// A held tag does not sleep.
    pub(super) fn hold(&mut self) {
        let (tag, _) = self.tags[self.random.usize(..self.tags.len())].clone();
        let state = self.model.state(&tag);
        match self.world.pool.hold(&tag, "the soak") {
            Ok(hold) => {
                let slept = self.world.pool.sleep(&SleepRequest::of([tag.clone()], Level::One));
                let is_used = self.live.iter().any(|known| self.tags[known.tag].0 == tag);
                assert!(matches!(slept, Err(PoolError::Held { .. })) || !is_used, "{slept:?}");
                self.world.saw("a hold");
                drop(hold);
            }
            Err(PoolError::Asleep { .. }) => assert!(state.is_asleep()),
            Err(error) => panic!("{}", chain(&error)),
        }
    }
}

/// A proposal to commit gets the verdict that counts.
fn expect_of_commit(decision: &LocalDecision, expected: Verdict) {
    assert_eq!(decision.decide(Verdict::Commit).unwrap(), expected);
}
