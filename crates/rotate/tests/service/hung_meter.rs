//! A meter that hangs, as NVML does with a broken driver: what goes on without it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use poorwill_rotate::config::{CanaryKind, Config, Model};
use poorwill_rotate::engine::{Answer, Content, Engine, EngineError, EngineFuture};
use poorwill_rotate::measure::{GpuMemory, Held, Measured, Meter};
use poorwill_rotate::service::{EventKind, ModelCommand, Service};
use poorwill_rotation_policy::{EngineState, Gpu, StageName};
use tokio::time::{sleep, timeout};

use super::mock::{Fault, Machine};

/// After this time a test has failed.
const STUCK: Duration = Duration::from_secs(60);
const GIB: u64 = 1 << 30;
const URL: &str = "http://127.0.0.1:9000";

fn config(lines: &str) -> Config {
    let file = format!("[[model]]\nname = \"m\"\nurl = \"{URL}\"\n{lines}");
    Config::parse(&file, &|_| Err("no secrets here".to_owned())).unwrap()
}

/// Measures as another meter, or never.
#[derive(Debug)]
struct Hanging {
    inner: Arc<dyn Meter>,
    hangs: AtomicBool,
}

impl Hanging {
    fn new(inner: Arc<dyn Meter>) -> Arc<Self> {
        Arc::new(Self { inner, hangs: AtomicBool::new(false) })
    }

    fn set(&self, hangs: bool) {
        self.hangs.store(hangs, Ordering::SeqCst);
    }

    fn hangs(&self) -> bool {
        self.hangs.load(Ordering::SeqCst)
    }
}

impl Meter for Hanging {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        if self.hangs() { Box::pin(std::future::pending()) } else { self.inner.measure(gpus) }
    }

    fn held<'a>(&'a self, gpus: &'a [Gpu], pids: Vec<u32>) -> Held<'a> {
        if self.hangs() { Box::pin(std::future::pending()) } else { self.inner.held(gpus, pids) }
    }
}

/// How many looks failed in sequence, at each failure.
fn failed_looks(events: &mut Events) -> Vec<u32> {
    let mut failed = Vec::new();
    while let Ok(event) = events.try_recv() {
        if let EventKind::LookFailed { failed: nth, .. } = &event.what {
            failed.push(*nth);
        }
    }
    failed
}

type Events = tokio::sync::broadcast::Receiver<Arc<poorwill_rotate::service::ServiceEvent>>;

#[tokio::test(start_paused = true)]
async fn awake_models_are_served_and_looked_at_while_the_meter_hangs() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let meter = Hanging::new(machine.meter());
    let service = Service::start_with(config(""), meter.clone(), &*machine.connect()).unwrap();
    let (m, _) = service.find("m").unwrap();
    drop(timeout(STUCK, service.admit(m)).await.unwrap().unwrap());
    meter.set(true);
    for _ in 0..20 {
        drop(timeout(STUCK, service.admit(m)).await.unwrap().unwrap());
        sleep(Duration::from_secs(10)).await;
    }
    let status = timeout(STUCK, service.snapshot()).await.expect("the status waits for the meter");
    assert!(status.models[0].is_ready && status.models[0].last_failure.is_none(), "{:?}", status.models);
    // Its engine is looked at all the same.
    let mut events = service.events();
    machine.set_fault(URL, Fault::Unwell);
    sleep(STUCK).await;
    assert_eq!(failed_looks(&mut events), [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_look_that_is_under_way_does_not_count_after_a_reload() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let before = config("");
    let service = Service::start_with(before.clone(), machine.meter(), &*machine.connect()).unwrap();
    let (m, _) = service.find("m").unwrap();
    let admission = timeout(STUCK, service.admit(m)).await.unwrap().unwrap();
    let mut events = service.events();
    machine.set_fault(URL, Fault::Silent);
    let failed = async {
        while failed_looks(&mut events).is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(STUCK, failed).await.expect("no look failed");
    // The next look is under way, and gets no answer.
    let rules = &before.models[0].rules;
    sleep(rules.look_again() + Duration::from_millis(500)).await;
    machine.clear_faults(URL);
    let mut after = before.clone();
    after.models[0].http.health = "/other".to_owned();
    service.reload_with(after, machine.connect().into()).await.unwrap();
    sleep(10 * rules.look_every).await;
    assert_eq!(failed_looks(&mut events), [0_u32; 0], "the look of before counts");
    assert!(!admission.aborted.is_cancelled());
    // The watch goes on.
    machine.set_fault(URL, Fault::Silent);
    timeout(STUCK, admission.aborted.cancelled()).await.expect("it is not looked at");
    assert_eq!(failed_looks(&mut events), [1, 2, 3]);
}

/// An engine that answers while its process has a file.
#[derive(Debug)]
struct ByFile(PathBuf);

impl Engine for ByFile {
    fn probe(&self) -> EngineFuture<'_, EngineState> {
        let state = if self.0.exists() { EngineState::Awake } else { EngineState::Gone };
        Box::pin(std::future::ready(Ok(state)))
    }

    fn sleep(&self) -> EngineFuture<'_, ()> {
        unreachable!("it cannot sleep")
    }

    fn wake(&self) -> EngineFuture<'_, ()> {
        unreachable!("it cannot sleep")
    }

    fn is_awake(&self) -> EngineFuture<'_, bool> {
        Box::pin(std::future::ready(Ok(self.0.exists())))
    }

    fn generate(&self, _: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
        let content = Content::Text("three".to_owned());
        Box::pin(std::future::ready(Ok(Answer { kind: CanaryKind::Completion, content })))
    }
}

/// Counts such an engine, and hangs while it is away if it should.
#[derive(Debug)]
struct FileMeter {
    file: PathBuf,
    hangs_without: AtomicBool,
}

impl Meter for FileMeter {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        let is_there = self.file.exists();
        if !is_there && self.hangs_without.load(Ordering::SeqCst) {
            return Box::pin(std::future::pending());
        }
        let free_bytes = if is_there { 4 * GIB } else { 10 * GIB };
        let memory = gpus.iter().map(|_| GpuMemory::new(free_bytes, 10 * GIB)).collect();
        Box::pin(std::future::ready(Ok(memory)))
    }
}

async fn until(service: &Service, stage: StageName) {
    let reached = async {
        while service.snapshot().await.models[0].stage != stage {
            sleep(Duration::from_millis(5)).await;
        }
    };
    if timeout(STUCK, reached).await.is_err() {
        panic!("not {stage}: {:#?}", service.snapshot().await.models);
    }
}

fn with_file(file: &Path) -> Config {
    let file = file.display();
    let script = format!("trap 'rm {file}; exit' TERM; touch {file}; while :; do sleep 0.01; done");
    config(&format!(
        "command = [\"sh\", \"-c\", \"{script}\"]\n[model.rules]\nsleeps = false\nresidence_min = \"0s\"\n\
         release_max = \"200ms\"\n"
    ))
}

/// Before its stop, and behind it.
#[tokio::test]
async fn a_model_is_stopped_and_comes_back_though_its_memory_is_not_measured() {
    for hangs_before in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("up");
        let by_file = Arc::new(FileMeter { file: file.clone(), hangs_without: AtomicBool::new(false) });
        let meter = Hanging::new(by_file.clone());
        let its = file.clone();
        let connect =
            move |_: &Model| -> Result<Arc<dyn Engine>, EngineError> { Ok(Arc::new(ByFile(its.clone()))) };
        let service = Service::start_with(with_file(&file), meter.clone(), &connect).unwrap();
        let (m, _) = service.find("m").unwrap();
        drop(timeout(STUCK, service.admit(m)).await.unwrap().unwrap());
        if hangs_before {
            meter.set(true);
        } else {
            by_file.hangs_without.store(true, Ordering::SeqCst);
        }
        assert!(service.command("m", ModelCommand::Sleep));
        until(&service, StageName::Cold).await;
        assert!(!file.exists());
        let now = service.snapshot().await.models.remove(0);
        assert!(now.last_failure.is_none() && now.starts == 1, "{now:?}");
        meter.set(false);
        by_file.hangs_without.store(false, Ordering::SeqCst);
        drop(timeout(STUCK, service.admit(m)).await.unwrap().unwrap());
        service.shut_down(STUCK, true).await;
        assert!(!file.exists());
    }
}
