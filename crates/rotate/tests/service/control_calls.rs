//! Sleeps and wakes whose calls fail, of all kinds of engines over sockets: none of them is given up.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use poorwill_rotate::config::Config;
use poorwill_rotate::engine::engine_of;
use poorwill_rotate::measure::{GpuMemory, Measured, Meter};
use poorwill_rotate::service::{ModelCommand, Service};
use poorwill_rotation_policy::{Gpu, StageName};
use serde_json::json;
use tokio::time::timeout;

use super::engines::script::{Received, Script, Scripted, ok};
use super::engines::sglang::{Fault, State as Sglang};

/// After this time a test has failed.
const STUCK: Duration = Duration::from_secs(120);
const GIB: u64 = 1 << 30;

/// How a call fails: before or behind what it does.
const FAULTS: [Fault; 3] = [Fault::Refused, Fault::DoneAndRefused, Fault::DoneAndBroken];

/// An engine with paths for its sleep and wake.
trait Sleeper: Send + 'static {
    fn answer(&mut self, asked: &Received) -> Scripted;
    fn has_memory(&self) -> bool;
    /// The request after so many fails; of an engine with one request for each move, that one.
    fn fail(&mut self, after: usize, fault: Fault);
    /// Whether that has happened.
    fn has_failed(&mut self) -> bool;
}

impl Sleeper for Sglang {
    fn answer(&mut self, asked: &Received) -> Scripted {
        Self::answer(self, asked)
    }

    fn has_memory(&self) -> bool {
        assert!(!self.has_ended, "a request has ended it");
        self.has_memory
    }

    fn fail(&mut self, after: usize, fault: Fault) {
        self.fault = Some((after, fault));
    }

    fn has_failed(&mut self) -> bool {
        self.fault.take().is_none()
    }
}

/// Its paths of sleep, wake and state.
struct Simple {
    is_awake: bool,
    fault: Option<(usize, Fault)>,
}

impl Sleeper for Simple {
    fn answer(&mut self, asked: &Received) -> Scripted {
        let (_, path) = asked.line.split_once(' ').unwrap();
        let moves = path.starts_with("/sleep") || path.starts_with("/wake_up");
        let fault = match &mut self.fault {
            Some((_, fault)) if moves => Some(*fault),
            _ => None,
        };
        if fault.is_some() {
            self.fault = None;
        }
        if fault == Some(Fault::Refused) {
            return Scripted::Text(502, "bad gateway".to_owned());
        }
        if moves {
            self.is_awake = path.starts_with("/wake_up");
        }
        match fault {
            Some(Fault::DoneAndRefused) => Scripted::Text(502, "bad gateway".to_owned()),
            Some(_) => Scripted::Broken,
            None if path == "/is_sleeping" => ok(&json!({ "is_sleeping": !self.is_awake }).to_string()),
            None if path == "/v1/completions" => {
                assert!(self.is_awake, "it is asked while it sleeps");
                ok(r#"{"choices":[{"text":" three","finish_reason":"length"}]}"#)
            }
            None => ok(""),
        }
    }

    fn has_memory(&self) -> bool {
        self.is_awake
    }

    fn fail(&mut self, after: usize, fault: Fault) {
        self.fault = Some((after, fault));
    }

    fn has_failed(&mut self) -> bool {
        self.fault.take().is_none()
    }
}

#[derive(Debug)]
struct Memory<S>(Arc<Mutex<S>>);

impl<S: Sleeper + std::fmt::Debug> Meter for Memory<S> {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        let free_bytes = if self.0.lock().unwrap().has_memory() { 4 * GIB } else { 10 * GIB };
        let memory = gpus.iter().map(|_| GpuMemory::new(free_bytes, 10 * GIB)).collect();
        Box::pin(async move { Ok(memory) })
    }
}

impl std::fmt::Debug for Simple {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Simple").field("is_awake", &self.is_awake).finish_non_exhaustive()
    }
}

async fn until(service: &Service, stage: StageName) {
    let mut events = service.events();
    let reached = async {
        while service.snapshot().await.models[0].stage != stage {
            let _next = events.recv().await;
        }
    };
    if timeout(STUCK, reached).await.is_err() {
        panic!("not {stage}: {:#?}", service.snapshot().await.models);
    }
}

/// A new service, as after a restart.
fn serve<S: Sleeper + std::fmt::Debug>(engine: &Arc<Mutex<S>>, config: &Config) -> Service {
    let meter = Arc::new(Memory(Arc::clone(engine)));
    Service::start_with(config.clone(), meter, &engine_of).unwrap()
}

async fn listen<S: Sleeper>(engine: &Arc<Mutex<S>>, config: &str) -> (Script, Config) {
    let its = Arc::clone(engine);
    let server = Script::of(move |asked| its.lock().unwrap().answer(asked)).await;
    let config = config.replace("URL", &server.url);
    let config = Config::parse(&config, &|_| Err("no secrets here".to_owned())).unwrap();
    (server, config)
}

/// The number of faults. An engine without a command would be quarantined, and refuse requests.
async fn survives<S>(engine: S, config: &str, rounds: usize) -> usize
where
    S: Sleeper + std::fmt::Debug,
{
    let engine = Arc::new(Mutex::new(engine));
    let (_server, config) = listen(&engine, config).await;
    let service = serve(&engine, &config);
    let model = service.find("m").unwrap().0;
    drop(timeout(STUCK, service.admit(model)).await.unwrap().unwrap());
    let mut faults = 0;
    for round in 0..rounds {
        let fault = FAULTS[round % FAULTS.len()];
        // Each move has several requests.
        let after = round / FAULTS.len();
        engine.lock().unwrap().fail(after, fault);
        assert!(service.command("m", ModelCommand::Sleep));
        until(&service, StageName::Asleep).await;
        faults += usize::from(engine.lock().unwrap().has_failed());
        engine.lock().unwrap().fail(after, fault);
        let admission = timeout(STUCK, service.admit(model)).await.unwrap();
        drop(admission.unwrap_or_else(|refused| panic!("{fault:?} after {after}: {refused:?}")));
        faults += usize::from(engine.lock().unwrap().has_failed());
    }
    faults
}

#[tokio::test]
async fn a_hundred_faults_of_control_calls_restart_no_healthy_engine() {
    let rules = "[model.rules]\nresidence_min = \"0s\"\n";
    let simple = || Simple { is_awake: true, fault: None };
    let vllm = format!("[[model]]\nname = \"m\"\nurl = \"URL\"\nneed = \"6GiB\"\n{rules}");
    let sglang =
        format!("[[model]]\nname = \"m\"\nurl = \"URL\"\nneed = \"6GiB\"\nengine = \"sglang\"\n{rules}");
    let http = format!(
        "[[model]]\nname = \"m\"\nurl = \"URL\"\nneed = \"6GiB\"\nengine = \"http\"\n[model.http]\n\
         sleep = {{ call = \"POST /sleep\" }}\nwake = {{ call = \"POST /wake_up\" }}\n\
         asleep = {{ call = \"GET /is_sleeping\", at = \"/is_sleeping\", is = true }}\n{rules}"
    );
    let faults = [
        survives(simple(), &vllm, 3 * 10).await,
        survives(simple(), &http, 3 * 10).await,
        survives(Sglang::new(), &sglang, 3 * 8).await,
    ];
    assert!(faults.iter().sum::<usize>() >= 100 && faults.iter().all(|faults| *faults >= 20), "{faults:?}");
}

/// Only its memory says that it sleeps: the answer to its release is lost.
#[tokio::test]
async fn a_sleep_that_only_memory_shows_is_known_to_the_next_service() {
    const RELEASE: usize = 4;
    let file = "[[model]]\nname = \"m\"\nurl = \"URL\"\nneed = \"6GiB\"\nengine = \"sglang\"\n";
    for fault in [Fault::DoneAndRefused, Fault::DoneAndBroken] {
        let engine = Arc::new(Mutex::new(Sglang::new()));
        let (_server, config) = listen(&engine, file).await;
        let service = serve(&engine, &config);
        let model = service.find("m").unwrap().0;
        drop(timeout(STUCK, service.admit(model)).await.unwrap().unwrap());
        engine.lock().unwrap().fail(RELEASE, fault);
        assert!(service.command("m", ModelCommand::Sleep));
        until(&service, StageName::Asleep).await;
        assert!(engine.lock().unwrap().has_failed() && !engine.lock().unwrap().has_memory());
        let stored = async {
            while engine.lock().unwrap().is_moving() {
                tokio::task::yield_now().await;
            }
        };
        timeout(STUCK, stored).await.expect("that it sleeps is never stored in it");
        service.shut_down(Duration::ZERO, false).await;

        let next = serve(&engine, &config);
        until(&next, StageName::Asleep).await;
        drop(timeout(STUCK, next.admit(model)).await.unwrap().unwrap());
        assert!(engine.lock().unwrap().has_memory());
    }
}
