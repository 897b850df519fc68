//! The service with mock engines that hibernate by a scripted helper, in virtual time.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use poorwill_rotate::config::{Config, Hibernate};
use poorwill_rotate::hibernation::{EngineProcesses, HibernateError, HibernationFuture, Hibernator};
use poorwill_rotate::measure::Meter;
use poorwill_rotate::service::{ModelCommand, Service, Snapshot};
use poorwill_rotation_policy::StageName;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::mock::Machine;

/// Longer than any test takes.
const TIMEOUT: Duration = Duration::from_secs(600);
const GIB: u64 = 1 << 30;
const NAMES: [&str; 3] = ["a", "b", "c"];

/// Fails each n-th call, in turn before and after it has done its work.
#[derive(Debug)]
struct Scripted {
    machine: Arc<Machine>,
    fails_each: Option<u64>,
    calls: AtomicU64,
    marks: Mutex<BTreeSet<String>>,
    restart: Notify,
    ends: AtomicU64,
    resuming: Mutex<BTreeSet<String>>,
    /// Models that came back at the same time.
    together: Mutex<BTreeSet<BTreeSet<String>>>,
}

impl Scripted {
    async fn call<T>(&self, act: impl FnOnce() -> T) -> Result<T, HibernateError> {
        let nth = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        sleep(Duration::from_millis(30)).await;
        let Some(each) = self.fails_each.filter(|each| nth.is_multiple_of(*each)) else { return Ok(act()) };
        if (nth / each).is_multiple_of(2) {
            act();
        }
        let why = "the helper ended".to_owned();
        Err(if nth.is_multiple_of(3) { HibernateError::Later(why) } else { HibernateError::Failed(why) })
    }

    fn mark(&self, model: &str, is_marked: bool) {
        let mut marks = self.marks.lock().unwrap();
        if is_marked {
            marks.insert(model.to_owned())
        } else {
            marks.remove(model)
        };
    }
}

impl Hibernator for Scripted {
    fn is_hibernating<'a>(
        &'a self,
        of: &'a EngineProcesses,
    ) -> HibernationFuture<'a, Result<bool, HibernateError>> {
        Box::pin(async {
            let is_off = self.call(|| self.machine.is_off(&of.model)).await?;
            self.mark(&of.model, is_off);
            Ok(is_off)
        })
    }

    fn hibernate<'a>(&'a self, of: &'a EngineProcesses) -> HibernationFuture<'a, Result<(), HibernateError>> {
        Box::pin(async {
            self.mark(&of.model, true);
            let take_off = || {
                self.machine.off(&of.model, |one| {
                    assert!(!one.has_memory && !one.is_off, "it hibernates awake, or twice");
                    one.is_off = true;
                });
                self.machine.count_hibernation();
            };
            self.call(take_off).await
        })
    }

    fn resume<'a>(&'a self, of: &'a EngineProcesses) -> HibernationFuture<'a, Result<(), HibernateError>> {
        Box::pin(async {
            self.resuming.lock().unwrap().insert(of.model.clone());
            self.together.lock().unwrap().insert(self.resuming.lock().unwrap().clone());
            let back = self.call(|| self.machine.off(&of.model, |one| one.is_off = false)).await;
            self.resuming.lock().unwrap().remove(&of.model);
            back?;
            self.mark(&of.model, false);
            Ok(())
        })
    }

    fn may_hibernate(&self, model: &str) -> bool {
        self.marks.lock().unwrap().contains(model)
    }

    fn must_end_away(&self, _: &EngineProcesses) -> bool {
        false
    }

    /// Its process is gone, and an operator has started another one.
    fn forget(&self, model: &str) {
        self.machine.off(model, |one| one.is_off = false);
        self.mark(model, false);
    }

    fn host_bytes(&self, model: &str) -> u64 {
        u64::from(self.may_hibernate(model)) * GIB
    }

    fn configure(&self, _: &Hibernate) {}

    fn restarted(&self) -> HibernationFuture<'_, ()> {
        Box::pin(self.restart.notified())
    }

    fn end(&self) -> HibernationFuture<'_, ()> {
        self.ends.fetch_add(1, Ordering::Relaxed);
        Box::pin(async {})
    }
}

/// Models of 6 GiB and a residue of 1 GiB on a GPU of 14 GiB: two of three fit only if the third one hibernates.
struct Rotation {
    machine: Arc<Machine>,
    helper: Arc<Scripted>,
    service: Service,
}

impl Rotation {
    fn start(hibernate: &str, fails_each: Option<u64>) -> Self {
        Self::start_on([0; 3], hibernate, fails_each)
    }

    /// The models on these GPUs.
    fn start_on(gpus: [usize; 3], hibernate: &str, fails_each: Option<u64>) -> Self {
        Self::start_by(Machine::meter, gpus, hibernate, fails_each)
    }

    /// The same with a meter of the machine.
    fn start_by(
        meter: impl Fn(&Arc<Machine>) -> Arc<dyn Meter>,
        gpus: [usize; 3],
        hibernate: &str,
        fails_each: Option<u64>,
    ) -> Self {
        let mut text = format!(
            "[hibernate]\nwait_max = \"100ms\"\n{hibernate}\n[every_model]\nturn_max = \"50ms\"\npause_min = \"50ms\"\npause_max = \"200ms\"\n\
             wait_max = \"20s\"\nslack = \"256MiB\"\nstop_max = \"1s\"\n"
        );
        for step in ["sleep", "release", "wake", "canary"] {
            text += &format!("{step}_max = \"300ms\"\n");
        }
        for (nth, name) in NAMES.iter().enumerate() {
            let port = 9000 + nth;
            text += &format!(
                "[[model]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{port}\"\ncommand = [\"true\"]\nneed = \"6GiB\"\ngpus = [{}]\n",
                gpus[nth]
            );
        }
        let config = Config::parse(&text, &|_| Err("no secrets here".to_owned())).unwrap();
        let machine = Machine::with_residue(14 * GIB, 6 * GIB, GIB);
        let helper = Arc::new(Scripted {
            machine: Arc::clone(&machine),
            fails_each,
            calls: AtomicU64::new(0),
            marks: Mutex::default(),
            restart: Notify::new(),
            ends: AtomicU64::new(0),
            resuming: Mutex::default(),
            together: Mutex::default(),
        });
        let connect = machine.connect();
        let hibernator: Arc<dyn Hibernator> = Arc::<Scripted>::clone(&helper);
        let service = Service::start_with_hibernator(config, meter(&machine), &*connect, hibernator).unwrap();
        Self { machine, helper, service }
    }

    /// Retries until it is served, as a client does.
    async fn serve(&self, name: &str) {
        let (id, model) = self.service.find(name).unwrap();
        let asking = async {
            loop {
                if let Ok(admission) = self.service.admit(id).await {
                    assert!(self.machine.is_right(&model.url), "a request went to {name}, which is not well");
                    sleep(Duration::from_millis(2)).await;
                    drop(admission);
                    return;
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        if timeout(TIMEOUT, asking).await.is_err() {
            panic!("{name} is never served: {:#?}", self.service.snapshot().await.models);
        }
    }

    async fn until(&self, what: &str, is_so: impl Fn(&Snapshot) -> bool) {
        let probing = async {
            while !is_so(&self.service.snapshot().await) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        if timeout(TIMEOUT, probing).await.is_err() {
            panic!("never {what}: {:#?}", self.service.snapshot().await);
        }
    }

    async fn until_all(&self, stage: StageName) {
        self.until(stage.as_str(), |now| now.models.iter().all(|model| model.stage == stage)).await;
    }

    fn assert_well(&self) {
        assert!(!self.machine.was_asked_off(), "a hibernating engine was asked");
        assert!(!self.machine.was_overcommitted());
    }
}

#[tokio::test(start_paused = true)]
async fn models_hibernate_at_once_and_are_resumed_before_they_wake() {
    let rotation = Rotation::start("after = \"0s\"", None);
    rotation.until_all(StageName::Hibernating).await;
    for _ in 0..4 {
        for name in NAMES {
            rotation.serve(name).await;
        }
    }
    let snapshot = rotation.service.snapshot().await;
    let resuming: Vec<f64> = snapshot
        .swaps
        .iter()
        .flat_map(|swap| &swap.phases)
        .filter(|(stage, _)| *stage == StageName::Resuming)
        .map(|(_, s)| *s)
        .collect();
    assert!(resuming.len() >= 4 && resuming.iter().all(|seconds| *seconds >= 0.03), "{resuming:?}");
    for model in &snapshot.models {
        assert!(model.can_hibernate && model.resume_s.unwrap() >= 0.03, "{model:?}");
        assert!(model.hibernate_s.unwrap() >= 0.03 && model.residue_bytes == Some(vec![GIB]), "{model:?}");
    }
    assert!(rotation.machine.hibernations() >= 7);
    rotation.assert_well();
}

#[tokio::test(start_paused = true)]
async fn a_sleeper_hibernates_where_that_makes_two_fit() {
    let rotation = Rotation::start("", None);
    for name in &NAMES[..2] {
        rotation.serve(name).await;
    }
    assert_eq!((rotation.machine.awake_at_most(), rotation.machine.hibernations()), (2, 1));
    rotation.assert_well();
}

/// Calls of the helper fail before or after their work. No model is lost, and none is thought to be what it is not.
#[tokio::test(start_paused = true)]
async fn every_model_is_served_although_each_nth_call_of_the_helper_fails() {
    for each in 2..9 {
        let rotation = Rotation::start("after = \"0s\"", Some(each));
        for _ in 0..4 {
            for name in NAMES {
                rotation.serve(name).await;
                sleep(Duration::from_millis(200)).await;
            }
        }
        rotation.assert_well();
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_new_helper_each_hibernating_model_is_asked_for() {
    let rotation = Rotation::start("after = \"1h\"", None);
    for name in NAMES {
        assert!(rotation.service.command(name, ModelCommand::Hibernate));
    }
    rotation.until_all(StageName::Hibernating).await;
    let host_bytes: u64 = rotation.service.snapshot().await.models.iter().map(|model| model.host_bytes).sum();
    assert_eq!(host_bytes, 3 * GIB);
    // The new helper has put one back, whose journal said that its set was not whole.
    rotation.machine.off("b", |one| one.is_off = false);
    rotation.helper.restart.notify_one();
    rotation.until("asleep", |now| now.models[1].stage == StageName::Asleep).await;
    let stages: Vec<StageName> =
        rotation.service.snapshot().await.models.iter().map(|model| model.stage).collect();
    assert_eq!(stages, [StageName::Hibernating, StageName::Asleep, StageName::Hibernating]);
    rotation.serve("b").await;
    rotation.assert_well();
}

#[tokio::test(start_paused = true)]
async fn a_service_without_a_state_folder_puts_engines_back_before_it_ends() {
    let rotation = Rotation::start("after = \"0s\"", None);
    rotation.until_all(StageName::Hibernating).await;
    rotation.service.shut_down(Duration::from_secs(5), false).await;
    assert!(NAMES.iter().all(|name| !rotation.machine.is_off(name)), "none would be found");
    assert_eq!(rotation.helper.ends.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn at_the_end_engines_come_back_one_after_the_other_on_each_gpu_and_at_once_on_others() {
    for stops in [false, true] {
        let rotation = Rotation::start_on([0, 0, 1], "after = \"0s\"", None);
        rotation.until_all(StageName::Hibernating).await;
        rotation.service.shut_down(Duration::from_secs(5), stops).await;
        assert!(NAMES.iter().all(|name| !rotation.machine.is_off(name)));
        let together = rotation.helper.together.lock().unwrap().clone();
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        assert!(together.contains(&set(&["a", "c"])), "{together:?}");
        assert!(!together.iter().any(|one| one.is_superset(&set(&["a", "b"]))), "{together:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_others_lend_is_given_up_before_an_engine_is_resumed() {
    let rotation = Rotation::start_by(Machine::lending_meter, [0; 3], "after = \"0s\"", None);
    rotation.until_all(StageName::Hibernating).await;
    for _ in 0..3 {
        for name in NAMES {
            rotation.serve(name).await;
        }
    }
    rotation.assert_well();
    assert!(rotation.machine.lent_totals().taken_bytes > 0);
    rotation.service.shut_down(TIMEOUT, true).await;
}
