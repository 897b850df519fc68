//! One model's engine, and how it runs the policy's tasks.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Deserialize as _;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::config::{self, CanaryKind};
use crate::engine::{Answer, Engine, EngineError};
use crate::measure::Meter;
use crate::policy::{EngineState, Gpu, Outcome, Task};
use crate::supervise::Supervisor;

/// Interval of probes while an engine starts.
const PROBE_EVERY: Duration = Duration::from_millis(50);

/// Lines of an ended engine's output in a message, and those among which they are found.
const QUOTED_LINES: usize = 5;
const READ_LINES: usize = 20;

#[derive(Debug)]
pub(super) struct EngineHandle {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) supervisor: Option<Arc<Supervisor>>,
    pub(super) meter: Arc<dyn Meter>,
    pub(super) gpus: Vec<Gpu>,
    canary: Mutex<CanaryCheck>,
}

#[derive(Debug)]
struct CanaryCheck {
    expect: Option<String>,
    /// The model, the most tokens and the prompt, as one text.
    asked: String,
    /// The kind that was answered last.
    known: Option<CanaryKind>,
    /// The model's first answer.
    first: Option<Answer>,
    /// The file that keeps it for the next service.
    kept_at: Option<PathBuf>,
}

impl EngineHandle {
    pub(super) fn new(
        model: &config::Model,
        engine: Arc<dyn Engine>,
        supervisor: Option<Arc<Supervisor>>,
        meter: Arc<dyn Meter>,
        kept_at: Option<PathBuf>,
    ) -> Self {
        let asked = format!("{}\n{}\n{}", model.served_as, model.canary.tokens, model.canary.prompt);
        let first = kept_at.as_ref().and_then(|path| kept(path, &asked));
        let first = first.filter(|first| model.canary.kind.is_none_or(|kind| kind == first.kind));
        let known = first.as_ref().map(|first| first.kind);
        let canary = CanaryCheck { expect: model.canary.expect.clone(), asked, known, first, kept_at };
        Self { engine, supervisor, meter, gpus: model.rules.gpus.clone(), canary: Mutex::new(canary) }
    }

    /// Runs a task. Dropping the future abandons it; the engine may complete it or not.
    pub(super) async fn run(&self, task: Task, limit: Duration) -> Outcome {
        let done = match task {
            Task::Probe => self.probe().await.map(Outcome::Probed),
            Task::Start => self.start().await.map(|()| Outcome::Done),
            Task::Stop => self.stop(limit).await.map(|()| Outcome::Done),
            Task::Sleep => {
                self.engine.sleep().await.map(|()| Outcome::Done).map_err(|error| error.to_string())
            }
            Task::Wake => self.engine.wake().await.map(|()| Outcome::Done).map_err(|error| error.to_string()),
            Task::Confirm => {
                self.engine.is_awake().await.map(Outcome::Awake).map_err(|error| error.to_string())
            }
            Task::Canary => self.check_canary().await.map(Outcome::Canary),
            Task::Measure => match self.meter.measure(&self.gpus).await {
                Ok(memory) => Ok(Outcome::Free(memory.iter().map(|one| one.free_bytes).collect())),
                Err(error) => Err(error.to_string()),
            },
        };
        done.unwrap_or_else(Outcome::Failed)
    }

    async fn probe(&self) -> Result<EngineState, String> {
        let found = self.engine.probe().await.map_err(|error| error.to_string())?;
        let runs = self.supervisor.as_ref().is_some_and(|supervisor| supervisor.is_running());
        if found == EngineState::Gone && runs {
            return Err("its process runs, but does not answer".to_owned());
        }
        Ok(found)
    }

    /// Refuses a foreign engine at this address, which would be taken for this one.
    async fn check_address(&self) -> Result<(), String> {
        match self.engine.probe().await {
            Ok(EngineState::Awake | EngineState::Asleep) | Err(EngineError::Unsupported { .. }) => Err(
                "an engine that was not started here answers at its address; end it, or give it another address"
                    .to_owned(),
            ),
            _ => Ok(()),
        }
    }

    async fn start(&self) -> Result<(), String> {
        let Some(supervisor) = &self.supervisor else {
            return Err("it cannot be started here: it has no command".to_owned());
        };
        if !supervisor.is_running() {
            self.check_address().await?;
        }
        supervisor.start().await.map_err(|error| error.to_string())?;
        // Other errors mean "not ready yet". The policy's timeout ends the loop.
        loop {
            match self.engine.probe().await {
                Ok(EngineState::Awake | EngineState::Asleep) => return Ok(()),
                Err(error @ EngineError::Unsupported { .. }) => return Err(error.to_string()),
                Ok(EngineState::Gone) | Err(_) => {}
            }
            if !supervisor.is_running() {
                return Err(format!("it ended while it started; {}", self.last_words()));
            }
            sleep(PROBE_EVERY).await;
        }
    }

    pub(super) fn last_words(&self) -> String {
        quoted(&self.supervisor.as_ref().map(|supervisor| supervisor.log(READ_LINES)).unwrap_or_default())
    }

    /// Half of the time for a graceful end, then with force.
    async fn stop(&self, limit: Duration) -> Result<(), String> {
        match &self.supervisor {
            Some(supervisor) => {
                supervisor.stop(limit / 2).await.map_err(|error| error.to_string())?;
                self.check_address().await
            }
            None => Err("it cannot be stopped here: it has no command".to_owned()),
        }
    }

    fn canary(&self) -> MutexGuard<'_, CanaryCheck> {
        self.canary.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether its answer is right, unless there is none.
    async fn check_canary(&self) -> Result<Result<(), String>, String> {
        let known = self.canary().known;
        let answer = self.engine.generate(known).await.map_err(|error| error.to_string())?;
        Ok(self.judge(answer).await)
    }

    /// A model's first answer counts as right.
    async fn judge(&self, answer: Answer) -> Result<(), String> {
        let Some((path, kept)) = self.canary().judge(answer)? else {
            return Ok(());
        };
        if let Err(error) = write(&path, &kept.to_string()).await {
            tracing::warn!(path = %path.display(), %error, "the first answer is not kept for the next start");
        }
        Ok(())
    }
}

impl CanaryCheck {
    /// Returns what is to be written where. An answer of another kind is the first of its kind: the engine no longer
    /// serves the one before.
    fn judge(&mut self, answer: Answer) -> Result<Option<(PathBuf, Value)>, String> {
        self.known = Some(answer.kind);
        if let Some(expected) = &self.expect {
            return answer.contains(expected).map(|()| None);
        }
        if let Some(first) = self.first.as_ref().filter(|first| first.kind == answer.kind) {
            let place = self.kept_at.as_ref().map(|path| format!(" (kept in {})", path.display()));
            let place = place.unwrap_or_default();
            return answer.agrees_with(first).map(|()| None).map_err(|reason| reason + &place);
        }
        let kept = self.kept_at.clone().map(|path| {
            (path, json!({ "asked": self.asked, "kind": answer.kind, "said": answer.to_json() }))
        });
        self.first = Some(answer);
        Ok(kept)
    }
}

/// Replaces the file atomically.
async fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        tokio::fs::create_dir_all(folder).await?;
    }
    let whole = path.with_extension("new");
    tokio::fs::write(&whole, text).await?;
    tokio::fs::rename(&whole, path).await
}

/// The first answer, if the file has one to the same prompt. Without a kind, it is of a completion.
fn kept(path: &PathBuf, asked: &str) -> Option<Answer> {
    let text = std::fs::read_to_string(path).ok()?;
    let kept: Value = serde_json::from_str(&text).ok()?;
    if kept.get("asked")?.as_str()? != asked {
        return None;
    }
    let kind = match kept.get("kind") {
        None => CanaryKind::Completion,
        Some(kind) => CanaryKind::deserialize(kind).ok()?,
    };
    Answer::of_json(kind, kept.get("said")?)
}

/// The last lines that say something.
fn quoted(lines: &[String]) -> String {
    let mut said: Vec<&str> =
        lines.iter().map(|line| line.trim_end()).filter(|line| !line.is_empty()).collect();
    let quoted = said.split_off(said.len().saturating_sub(QUOTED_LINES));
    if quoted.is_empty() {
        return "it wrote nothing".to_owned();
    }
    format!("its last lines: {}", quoted.join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    use crate::engine::{Content, EngineFuture};
    use crate::measure::Measured;

    /// Answers probes in turn, the last one for good.
    #[derive(Debug)]
    struct Probed(Mutex<VecDeque<Result<EngineState, EngineError>>>);

    impl Engine for Probed {
        fn probe(&self) -> EngineFuture<'_, EngineState> {
            let mut answers = self.0.lock().unwrap();
            let answer = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
            Box::pin(async move { answer.unwrap() })
        }

        fn sleep(&self) -> EngineFuture<'_, ()> {
            unreachable!()
        }

        fn wake(&self) -> EngineFuture<'_, ()> {
            unreachable!()
        }

        fn is_awake(&self) -> EngineFuture<'_, bool> {
            unreachable!()
        }

        fn generate(&self, _known: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
            unreachable!()
        }
    }

    #[derive(Debug)]
    struct NoMeter;

    impl Meter for NoMeter {
        fn measure<'a>(&'a self, _gpus: &'a [Gpu]) -> Measured<'a> {
            unreachable!()
        }
    }

    /// Starts a command whose engine answers probes like this.
    async fn started(answers: Vec<Result<EngineState, EngineError>>) -> Result<(), String> {
        let text = "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"\ncommand = [\"sleep\", \"600\"]";
        let model = config::Config::parse(text, &|_| Ok(String::new())).unwrap().models.remove(0);
        let start = model.start.clone().unwrap();
        let supervisor = Arc::new(Supervisor::new("one", start, None).unwrap());
        let engine = Arc::new(Probed(Mutex::new(answers.into())));
        let handle =
            EngineHandle::new(&model, engine, Some(Arc::clone(&supervisor)), Arc::new(NoMeter), None);
        let outcome = tokio::time::timeout(Duration::from_secs(60), handle.start()).await;
        supervisor.stop(Duration::ZERO).await.unwrap();
        outcome.expect("a start that ends")
    }

    #[tokio::test]
    async fn a_start_ends_at_once_if_the_engine_lacks_what_is_needed() {
        let refused = EngineError::Refused { request_line: "GET".into(), status: 503, message: "no".into() };
        let unsupported =
            || EngineError::Unsupported { request_line: "GET".into(), reason: "too old".into() };
        let early = || vec![Ok(EngineState::Gone), Err(refused.clone())];
        let with = |last| early().into_iter().chain([last]).collect::<Vec<_>>();
        assert_eq!(started(with(Ok(EngineState::Awake))).await, Ok(()));
        assert_eq!(started(with(Err(unsupported()))).await, Err("GET: too old".to_owned()));
        let foreign = started(vec![Err(unsupported())]).await.unwrap_err();
        assert!(foreign.contains("not started here"), "{foreign}");
    }

    #[test]
    fn an_answer_is_compared_with_the_first_of_its_kind() {
        let folder = std::env::temp_dir().join(format!("poorwill-canary-{}", std::process::id()));
        let path = folder.join("one.first-answer");
        let check = |first: Option<Answer>| CanaryCheck {
            expect: None,
            asked: "one".to_owned(),
            known: None,
            first,
            kept_at: Some(path.clone()),
        };
        let vector = |numbers: [f64; 2]| Answer {
            kind: CanaryKind::Embedding,
            content: Content::Vector(numbers.to_vec()),
        };
        let mut canary = check(None);
        let (_, written) = canary.judge(vector([1.0, 2.0])).unwrap().expect("the first is kept");
        assert_eq!(canary.judge(vector([1.01, 2.0])), Ok(None));
        let error = canary.judge(vector([2.0, -1.0])).unwrap_err();
        assert!(error.contains("cosine") && error.contains("one.first-answer"), "{error}");
        assert_eq!(canary.known, Some(CanaryKind::Embedding));

        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&path, written.to_string()).unwrap();
        assert_eq!(kept(&path, "one"), Some(vector([1.0, 2.0])));
        assert_eq!(kept(&path, "two"), None);
        // As written before kinds.
        std::fs::write(&path, r#"{"asked":"one","said":" three"}"#).unwrap();
        let text = kept(&path, "one").unwrap();
        assert_eq!((text.kind, &text.content), (CanaryKind::Completion, &Content::Text(" three".to_owned())));
        std::fs::remove_dir_all(&folder).unwrap();

        let mut canary = check(Some(text));
        assert!(canary.judge(vector([1.0, 2.0])).unwrap().is_some(), "the engine is now of another kind");
        assert!(canary.judge(vector([2.0, -1.0])).is_err());
    }

    #[test]
    fn lines_that_say_nothing_are_not_quoted() {
        let lines = |text: &str| text.split('\n').map(str::to_owned).collect::<Vec<_>>();
        let usage = "one\nerror: a\n\nUsage: b\n\nTry --help \n[poorwill] c\nd";
        assert_eq!(
            quoted(&lines(usage)),
            "its last lines: error: a | Usage: b | Try --help | [poorwill] c | d"
        );
        assert_eq!(quoted(&lines(" \n")), "it wrote nothing");
        assert_eq!(quoted(&[]), "it wrote nothing");
    }
}
