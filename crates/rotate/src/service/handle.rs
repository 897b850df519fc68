//! One model's engine, and how it runs the policy's tasks.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use poorwill_front::backend::Trial;
use tokio::sync::{Notify, watch};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use super::first_answer::{self, FirstAnswer};
use crate::config::{self, CanaryKind};
use crate::engine::{Answer, Content, Engine, EngineError};
use crate::hibernation::{EngineProcesses, HibernateError, Hibernator};
use crate::measure::{self, Meter};
use crate::supervise::Supervisor;
use poorwill_rotation_policy::{EngineState, Gpu, GpuMemory, Task, TaskOutcome};

/// Interval of probes while an engine starts.
const PROBE_EVERY: Duration = Duration::from_millis(50);

/// By how much a start ends before its timeout, to say why.
const READY_MARGIN: Duration = Duration::from_millis(100);

/// For the answer of an engine before its end, and of what is at its address.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// For storing in an engine that it sleeps, since a sleep or wake waits for that.
const STORE_MAX: Duration = Duration::from_secs(5);

/// For lent memory to be given up.
const CLEAR_MAX: Duration = Duration::from_secs(8);

/// For SIGTERM, where an engine answers nothing any more.
const SILENT_GRACE: Duration = Duration::from_secs(2);

/// Lines of an ended engine's output in a message, and those among which they are found.
const QUOTED_LINES: usize = 5;
const READ_LINES: usize = 20;

#[derive(Debug)]
pub(super) struct EngineHandle {
    model: String,
    engine: Arc<dyn Engine>,
    supervisor: Option<Arc<Supervisor>>,
    meter: Arc<dyn Meter>,
    hibernator: Arc<dyn Hibernator>,
    /// Such a command has its own limit, also for an engine that answers nothing.
    has_stop_command: bool,
    gpus: Vec<Gpu>,
    canary: Mutex<FirstAnswer>,
    /// Whether its last start failed before there was an engine.
    not_started: AtomicBool,
    /// First answers that could not be written.
    unwritten: AtomicU64,
    /// Whether its last sleep or wake is a sleep without a good answer.
    sleep_failed: Arc<tokio::sync::Mutex<bool>>,
}

impl EngineHandle {
    pub(super) fn new(
        model: &config::Model,
        engine: Arc<dyn Engine>,
        supervisor: Option<Arc<Supervisor>>,
        (meter, hibernator): (Arc<dyn Meter>, Arc<dyn Hibernator>),
        kept_at: Option<PathBuf>,
    ) -> Self {
        let canary = Mutex::new(FirstAnswer::of(model, kept_at));
        Self {
            model: model.name.clone(),
            engine,
            supervisor,
            meter,
            hibernator,
            has_stop_command: model.start.as_ref().is_some_and(|start| !start.stop_command.is_empty()),
            gpus: model.rules.gpus.clone(),
            canary,
            not_started: AtomicBool::new(false),
            unwritten: AtomicU64::new(0),
            sleep_failed: Arc::default(),
        }
    }

    pub(super) fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    /// `None` for an engine that the service does not start.
    pub(super) fn supervisor(&self) -> Option<&Arc<Supervisor>> {
        self.supervisor.as_ref()
    }

    pub(super) fn hibernator(&self) -> &dyn Hibernator {
        &*self.hibernator
    }

    pub(super) fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// What its processes have used of all cores; `None` for an engine that the service does not start.
    pub(super) async fn cpu_time(&self) -> Option<Duration> {
        let supervisor = self.supervisor.clone()?;
        // This reads files.
        spawn_blocking(move || supervisor.cpu_time()).await.ok()
    }

    /// Whether its last start failed before there was an engine, which is then no failure of the engine.
    pub(super) fn was_not_started(&self) -> bool {
        self.not_started.load(Ordering::Relaxed)
    }

    /// The kind by which its canary was answered, or is configured to be asked.
    pub(super) fn canary_kind(&self) -> Option<CanaryKind> {
        self.canary().known()
    }

    pub(super) fn state_writes_failed(&self) -> u64 {
        let records = self.supervisor.as_ref().map_or(0, |supervisor| supervisor.unwritten());
        records + self.unwritten.load(Ordering::Relaxed)
    }

    /// With the moves of the handle before, and its first answer, if that was to the same question.
    pub(super) fn remembering(mut self, before: &Self) -> Self {
        self.canary().inherit(&before.canary());
        self.sleep_failed = Arc::clone(&before.sleep_failed);
        self
    }

    /// Runs a task, before which so much is needed. Dropping the future abandons it; the engine may complete it or not.
    pub(super) async fn run(&self, task: Task, limit: Duration, need: Option<Vec<u64>>) -> TaskOutcome {
        let done = match task {
            Task::Probe => self.probe(limit).await.map(TaskOutcome::Probed).or_else(later),
            Task::Start => Ok(self.start(limit).await.map_or_else(|failed| failed, |()| TaskOutcome::Done)),
            Task::Stop => self.stop(limit).await.map(|()| TaskOutcome::Done),
            Task::Sleep => self.sleep().await.map(|()| TaskOutcome::Done).map_err(|error| error.to_string()),
            Task::SleepKeeping => Ok(self.sleep_keeping().await),
            Task::Hibernate => Ok(self.hibernate().await),
            Task::Resume => self.resume(limit, need).await.map(|()| TaskOutcome::Done).or_else(later),
            Task::Wake => {
                self.wake(limit, need).await.map(|()| TaskOutcome::Done).map_err(|error| error.to_string())
            }
            Task::Confirm => {
                self.engine.is_awake().await.map(TaskOutcome::Awake).map_err(|error| error.to_string())
            }
            Task::Canary | Task::CanaryBeside => self.check_canary(limit).await.map(TaskOutcome::Canary),
            Task::Measure => match self.meter.measure(&self.gpus).await {
                Ok(memory) => {
                    // What is lent is free where it is needed.
                    let of = |one: &measure::GpuMemory| GpuMemory {
                        free_bytes: one.available_bytes(),
                        total_bytes: one.total_bytes,
                    };
                    Ok(TaskOutcome::Measured(memory.iter().map(of).collect()))
                }
                Err(error) => Err(error.to_string()),
            },
        };
        done.unwrap_or_else(TaskOutcome::Failed)
    }

    async fn sleep(&self) -> Result<(), EngineError> {
        *self.sleep_failed.lock().await = true;
        self.engine.sleep().await?;
        *self.sleep_failed.lock().await = false;
        Ok(())
    }

    async fn sleep_keeping(&self) -> TaskOutcome {
        *self.sleep_failed.lock().await = true;
        match self.engine.sleep_keeping().await {
            Ok(()) => {
                *self.sleep_failed.lock().await = false;
                TaskOutcome::Done
            }
            Err(error @ EngineError::Unsupported { .. }) => TaskOutcome::Unsupported(error.to_string()),
            Err(error) => TaskOutcome::Failed(error.to_string()),
        }
    }

    /// Waits for [`store_asleep`](Self::store_asleep), whose mark would be wrong from here on.
    async fn wake(&self, limit: Duration, need: Option<Vec<u64>>) -> Result<(), EngineError> {
        *self.sleep_failed.lock().await = false;
        self.clear(limit, need).await;
        self.engine.wake().await
    }

    /// Has what others lend given up before its engine takes memory without asking. Without a known need that is all.
    async fn clear(&self, limit: Duration, need: Option<Vec<u64>>) {
        if !self.meter.counts_lent() {
            return;
        }
        let clearing = async {
            let spared = self.processes().await.pids;
            self.meter.clear(&self.gpus, need, spared).await;
        };
        if timeout(CLEAR_MAX.min(limit / 2), clearing).await.is_err() {
            tracing::warn!(model = self.model, "lent memory was not given up in time; going on without");
        }
    }

    /// For an engine that the policy knows to be asleep. If the sleep failed, only its memory says so.
    pub(super) async fn store_asleep(&self) {
        let mut sleep_failed = self.sleep_failed.lock().await;
        if !*sleep_failed {
            return;
        }
        let error = match timeout(STORE_MAX, self.engine.store_asleep()).await {
            Ok(Ok(())) => {
                *sleep_failed = false;
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("it did not answer within {:.1} s", STORE_MAX.as_secs_f64()),
        };
        tracing::warn!(
            model = self.model,
            error,
            "the engine sleeps by its memory, and that cannot be stored in it: the next service may start it again"
        );
    }

    /// Its engine's processes, whether or not it hibernates.
    async fn processes(&self) -> EngineProcesses {
        let pids = match self.supervisor.clone() {
            // This reads files.
            Some(supervisor) => spawn_blocking(move || supervisor.processes()).await.unwrap_or_default(),
            None => Vec::new(),
        };
        EngineProcesses { model: self.model.clone(), pids }
    }

    /// What its processes hold on each of its GPUs; `None` where that is not known.
    pub(super) async fn measure_held(&self) -> Option<Vec<u64>> {
        let pids = self.processes().await.pids;
        self.meter.held(&self.gpus, pids).await
    }

    async fn hibernate(&self) -> TaskOutcome {
        match self.hibernator.hibernate(&self.processes().await).await {
            Ok(()) => TaskOutcome::Done,
            Err(HibernateError::Impossible(reason)) => TaskOutcome::Unsupported(reason),
            Err(HibernateError::Later(reason)) => TaskOutcome::Later(reason),
            Err(HibernateError::Failed(reason) | HibernateError::NeedsMore(reason)) => {
                TaskOutcome::Failed(reason)
            }
        }
    }

    async fn resume(&self, limit: Duration, need: Option<Vec<u64>>) -> Result<(), HibernateError> {
        self.clear(limit, need).await;
        self.hibernator.resume(&self.processes().await).await
    }

    pub(super) async fn resume_within(&self, limit: Duration) -> Result<(), String> {
        match timeout(limit, self.resume(limit, None)).await {
            Ok(back) => back.map_err(|error| error.to_string()),
            Err(_) => Err(format!("it was not put back within {:.1} s", limit.as_secs_f64())),
        }
    }

    /// A helper that is slow to answer says nothing of the engine.
    async fn is_hibernating(&self, limit: Duration) -> Result<bool, HibernateError> {
        let processes = self.processes().await;
        let asked = timeout(limit, self.hibernator.is_hibernating(&processes)).await;
        asked.unwrap_or_else(|_| {
            let limit_s = limit.as_secs_f64();
            let why = format!("the helper for hibernation did not answer within {limit_s:.1} s");
            Err(HibernateError::Later(why))
        })
    }

    /// A hibernating engine might not answer a request, so the helper is asked first.
    async fn probe(&self, limit: Duration) -> Result<EngineState, HibernateError> {
        if self.hibernator.may_hibernate(&self.model) && self.is_hibernating(limit / 2).await? {
            return Ok(EngineState::Hibernating);
        }
        let failed = |error: EngineError| HibernateError::Failed(error.to_string());
        let found = self.engine.probe().await.map_err(failed)?;
        let runs = self.supervisor.as_ref().is_some_and(|supervisor| supervisor.is_running());
        if found == EngineState::Gone && runs {
            return Err(HibernateError::Failed("its process runs, but does not answer".to_owned()));
        }
        Ok(found)
    }

    /// Refuses a foreign engine at this address, which would be taken for this one. A hung one is there as well.
    async fn check_address(&self) -> Result<(), String> {
        match timeout(ANSWER_MAX, self.engine.probe()).await {
            Ok(
                Ok(EngineState::Awake | EngineState::Asleep | EngineState::Hibernating | EngineState::Moving)
                | Err(EngineError::Unsupported { .. }),
            ) => Err(
                "an engine that was not started here answers at its address; end it, or give it another address"
                    .to_owned(),
            ),
            Ok(_) => Ok(()),
            Err(_) => Err(format!(
                "what was not started here is at its address, and gave no answer within {:.1} s; end it, or give the \
                 engine another address",
                ANSWER_MAX.as_secs_f64()
            )),
        }
    }

    async fn start(&self, limit: Duration) -> Result<(), TaskOutcome> {
        let Some(supervisor) = &self.supervisor else {
            return Err(TaskOutcome::Failed("it cannot be started here: it has no command".to_owned()));
        };
        if !supervisor.is_running() {
            self.check_address().await.map_err(TaskOutcome::Failed)?;
        }
        // It takes more than it needs later, and nothing of it is lent.
        self.clear(limit, None).await;
        let started = supervisor.start().await;
        self.not_started.store(started.is_err(), Ordering::Relaxed);
        started.map_err(|error| TaskOutcome::Failed(error.to_string()))?;
        // The policy's timeout would not say what the engine answered last.
        let mut last = None;
        let ready = timeout(limit.saturating_sub(READY_MARGIN), self.until_ready(supervisor, &mut last));
        ready.await.unwrap_or_else(|_| {
            let last =
                last.map_or_else(|| "no connection was possible".to_owned(), |error| error.to_string());
            Err(TaskOutcome::Failed(format!("it was not ready within {:.1} s: {last}", limit.as_secs_f64())))
        })
    }

    /// Errors mean "not ready yet", except for those that waiting does not help.
    async fn until_ready(
        &self,
        supervisor: &Supervisor,
        last: &mut Option<EngineError>,
    ) -> Result<(), TaskOutcome> {
        loop {
            match self.engine.probe().await {
                Ok(
                    EngineState::Awake | EngineState::Asleep | EngineState::Hibernating | EngineState::Moving,
                ) => return Ok(()),
                Err(error @ EngineError::Unsupported { .. }) => {
                    return Err(TaskOutcome::Unsupported(error.to_string()));
                }
                Ok(EngineState::Gone) => {}
                Err(error) => {
                    if matches!(error, EngineError::Unexpected { .. }) && last.as_ref() != Some(&error) {
                        tracing::warn!(%error, "a starting engine answers, but is not ready");
                    }
                    *last = Some(error);
                }
            }
            if !supervisor.is_running() {
                let reason = format!("it ended while it started; {}", self.last_words());
                return Err(TaskOutcome::Failed(reason));
            }
            sleep(PROBE_EVERY).await;
        }
    }

    pub(super) fn last_words(&self) -> String {
        quoted(&self.supervisor.as_ref().map(|supervisor| supervisor.log(READ_LINES)).unwrap_or_default())
    }

    /// A process that is off its GPUs may not end by itself, so it is put back before. If that fails, it is killed.
    ///
    /// # Errors
    /// Why it could not be ended, or must not be.
    pub(super) async fn end(&self, supervisor: &Supervisor, grace: Duration) -> Result<(), String> {
        let mut grace = grace;
        if self.ends_away(grace).await? {
            grace = Duration::ZERO;
        } else if self.hibernator.may_hibernate(&self.model) {
            grace /= 2;
            if let Err(reason) = self.resume_within(grace).await {
                tracing::warn!(
                    model = self.model,
                    reason,
                    "cannot resume the hibernating engine; killing it"
                );
                grace = Duration::ZERO;
            }
        }
        // A stopped process, or one that waits for a lock, does not heed SIGTERM.
        let may_be_silent = !self.has_stop_command && grace > SILENT_GRACE && supervisor.is_running();
        if may_be_silent && timeout(ANSWER_MAX, self.engine.probe()).await.is_err() {
            grace = SILENT_GRACE;
        }
        supervisor.stop(grace).await.map_err(|error| error.to_string())?;
        self.hibernator.forget(&self.model);
        Ok(())
    }

    /// Whether its processes were taken off their GPUs for their end, since the driver hangs otherwise.
    async fn ends_away(&self, limit: Duration) -> Result<bool, String> {
        let processes = self.processes().await;
        if self.hibernator.may_hibernate(&self.model) {
            // The helper that answers knows the driver.
            let _ = self.is_hibernating(limit / 2).await;
        }
        if !self.hibernator.must_end_away(&processes) {
            return Ok(false);
        }
        let taken_off = async {
            if self.hibernator.is_hibernating(&processes).await == Ok(true) {
                return Ok(());
            }
            self.hibernator.hibernate(&processes).await?;
            match self.hibernator.is_hibernating(&processes).await? {
                true => Ok(()),
                false => Err(HibernateError::Failed("it is still on its GPUs".to_owned())),
            }
        };
        let late = |_| Err(HibernateError::Later(format!("not within {:.1} s", limit.as_secs_f64())));
        let done = timeout(limit, taken_off).await.unwrap_or_else(late);
        done.map(|()| true).map_err(|error| {
            format!(
                "its engine is left alone: it came back from hibernation, and on this driver the end of such a process \
                 hangs the machine unless it is taken off its GPUs before, which failed: {error}; hibernate its \
                 processes by hand before they end, or use another driver"
            )
        })
    }

    /// Half of the time for a graceful end, then with force.
    async fn stop(&self, limit: Duration) -> Result<(), String> {
        match &self.supervisor {
            Some(supervisor) => {
                self.end(supervisor, limit / 2).await?;
                if self.check_address().await.is_ok() {
                    return Ok(());
                }
                supervisor.stop_stray(limit / 2).await.map_err(|error| error.to_string())?;
                self.check_address().await
            }
            None => Err("it cannot be stopped here: it has no command".to_owned()),
        }
    }

    fn canary(&self) -> MutexGuard<'_, FirstAnswer> {
        self.canary.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether its answer is right, unless there is none.
    async fn check_canary(&self, limit: Duration) -> Result<Result<(), String>, String> {
        let known = self.canary().known();
        let mut answer = self.engine.generate(known).await;
        if let Err(error) = &answer
            && known.is_some()
            && error.is_unserved()
        {
            if let Err(reason) = self.canary().on_unserved(error) {
                return Ok(Err(reason));
            }
            answer = self.engine.generate(None).await;
        }
        let answer = answer.map_err(|error| error.to_string())?;
        let judged = self.judge(answer).await;
        if judged.is_ok() {
            self.steady(limit / 4).await;
        }
        Ok(judged)
    }

    /// Whether its canary may run beside requests.
    pub(super) fn tests_beside(&self) -> bool {
        self.canary().steady().is_some()
    }

    /// Whether its engine may keep requests over a sleep, as far as the canary behind the next wake is concerned.
    pub(super) fn may_keep(&self) -> bool {
        self.canary().is_sure_in_batch()
    }

    /// The canary beside requests, which wait for what `trial` says. Streams begin once it begins right, and wait again
    /// where it differs. It is right once it has said all that batches do not change.
    pub(super) async fn test_beside(&self, trial: &watch::Sender<Trial>, limit: Duration) -> TaskOutcome {
        trial.send_replace(Trial::Open);
        let known = self.canary().steady();
        let Some((kind, steady)) = known else {
            // Another question was configured meanwhile.
            return self.check_canary(limit).await.map_or_else(TaskOutcome::Failed, TaskOutcome::Canary);
        };
        let is_right = |text: &str| text.starts_with(&steady);
        let whole = Notify::new();
        let on_text = |text: &str| {
            let now = if is_right(text) || steady.starts_with(text) { Trial::Begun } else { Trial::Open };
            trial.send_if_modified(|trial| std::mem::replace(trial, now) != now);
            if is_right(text) {
                whole.notify_one();
            }
        };
        let answered = tokio::select! {
            answered = self.engine.generate_in_parts(kind, &on_text) => answered,
            () = whole.notified() => return TaskOutcome::Canary(Ok(())),
        };
        let text = match answered.map(|answer| answer.content) {
            Ok(Content::Text(text)) => text,
            Ok(_) => String::new(),
            Err(error) => return TaskOutcome::Failed(error.to_string()),
        };
        let right = is_right(&text);
        TaskOutcome::Canary(right.then_some(()).ok_or_else(|| self.canary().differs(&text)))
    }

    /// Once, finds out how much of a first answer stays the same beside requests, by asking several times at once. What
    /// cannot be found out in this time leaves the canary before requests.
    async fn steady(&self, limit: Duration) {
        let Some(kind) = self.canary().to_be_steadied() else { return };
        self.canary().is_being_steadied();
        // One comes as beside requests.
        let asked = async {
            let (streamed, ask) =
                (self.engine.generate_in_parts(kind, &|_| ()), || self.engine.generate(Some(kind)));
            tokio::try_join!(streamed, ask(), ask())
        };
        if let Ok(Ok((one, two, three))) = timeout(limit, asked).await {
            self.canary().steadied_by(&[one, two, three]);
        }
        if !self.tests_beside() {
            tracing::warn!(
                model = self.model,
                "its answers in a batch differ, or are late: its canary stays before requests"
            );
        }
    }

    /// After a canary beside requests that was wrong.
    pub(super) fn failed_beside(&self) {
        self.canary().failed_beside();
    }

    /// A model's first answer counts as right.
    async fn judge(&self, answer: Answer) -> Result<(), String> {
        let Some((path, kept)) = self.canary().judge(answer)? else {
            return Ok(());
        };
        if let Err(error) = first_answer::write(&path, &kept.to_string()).await {
            self.unwritten.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(path = %path.display(), %error, "cannot save the first answer for the next start");
        }
        Ok(())
    }
}

fn later(error: HibernateError) -> Result<TaskOutcome, String> {
    match error {
        HibernateError::Later(reason) => Ok(TaskOutcome::Later(reason)),
        HibernateError::NeedsMore(reason) => Ok(TaskOutcome::NeedsMore(reason)),
        other => Err(other.to_string()),
    }
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

    use crate::engine::EngineFuture;
    use crate::hibernation::HibernationFuture;
    use crate::measure::{Cleared, Measured};

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
            Box::pin(std::future::ready(Ok(())))
        }

        fn is_awake(&self) -> EngineFuture<'_, bool> {
            unreachable!()
        }

        fn generate(&self, _kind: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
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

    /// A need, and the processes that are spared.
    type Clearing = (Option<Vec<u64>>, Vec<u32>);

    /// Records for what memory was cleared.
    #[derive(Debug, Default)]
    struct Clears(Mutex<Vec<Clearing>>);

    impl Meter for Clears {
        fn measure<'a>(&'a self, _gpus: &'a [Gpu]) -> Measured<'a> {
            unreachable!()
        }

        fn counts_lent(&self) -> bool {
            true
        }

        fn clear<'a>(&'a self, gpus: &'a [Gpu], need: Option<Vec<u64>>, spared: Vec<u32>) -> Cleared<'a> {
            assert_eq!(gpus, [Gpu(0)]);
            self.0.lock().unwrap().push((need, spared));
            Box::pin(std::future::ready(()))
        }
    }

    #[derive(Debug)]
    struct NoHibernator;

    impl Hibernator for NoHibernator {
        fn is_hibernating<'a>(
            &'a self,
            _: &'a EngineProcesses,
        ) -> HibernationFuture<'a, Result<bool, HibernateError>> {
            unreachable!()
        }

        fn hibernate<'a>(
            &'a self,
            _: &'a EngineProcesses,
        ) -> HibernationFuture<'a, Result<(), HibernateError>> {
            unreachable!()
        }

        fn resume<'a>(&'a self, _: &'a EngineProcesses) -> HibernationFuture<'a, Result<(), HibernateError>> {
            unreachable!()
        }

        fn may_hibernate(&self, _: &str) -> bool {
            false
        }

        fn must_end_away(&self, _: &EngineProcesses) -> bool {
            false
        }

        fn forget(&self, _: &str) {}

        fn host_bytes(&self, _: &str) -> u64 {
            0
        }

        fn configure(&self, _: &config::Hibernate) {}

        fn restarted(&self) -> HibernationFuture<'_, ()> {
            unreachable!()
        }

        fn end(&self) -> HibernationFuture<'_, ()> {
            unreachable!()
        }
    }

    /// Serves one kind of request, and records by which it was asked.
    #[derive(Debug)]
    struct Serves {
        kind: Mutex<CanaryKind>,
        asked: Mutex<Vec<Option<CanaryKind>>>,
    }

    impl Engine for Serves {
        fn probe(&self) -> EngineFuture<'_, EngineState> {
            unreachable!()
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

        fn generate(&self, kind: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
            self.asked.lock().unwrap().push(kind);
            let served = *self.kind.lock().unwrap();
            Box::pin(async move {
                match kind.is_none_or(|kind| kind == served) {
                    true => Ok(Answer { kind: served, content: Content::Text("three".to_owned()) }),
                    false => Err(EngineError::Refused {
                        request_line: "POST /v1".into(),
                        status: 404,
                        message: "Not Found".into(),
                    }),
                }
            })
        }
    }

    fn model(lines: &str) -> config::Model {
        let text = format!("[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"\n{lines}");
        config::Config::parse(&text, &|_| Ok(String::new())).unwrap().models.remove(0)
    }

    /// Another engine is at the address after the first answer.
    async fn checked_again(canary: &str) -> (Result<(), String>, Vec<Option<CanaryKind>>) {
        let kind = Mutex::new(CanaryKind::Chat);
        let engine = Arc::new(Serves { kind, asked: Mutex::default() });
        let model = model(&format!("[model.canary]\n{canary}"));
        let handle = EngineHandle::new(
            &model,
            Arc::clone(&engine) as _,
            None,
            (Arc::new(NoMeter), Arc::new(NoHibernator)),
            None,
        );
        handle.check_canary(Duration::from_secs(30)).await.unwrap().unwrap();
        *engine.kind.lock().unwrap() = CanaryKind::Completion;
        let checked = handle.check_canary(Duration::from_secs(30)).await.unwrap();
        let asked = std::mem::take(&mut *engine.asked.lock().unwrap());
        (checked, asked)
    }

    #[tokio::test]
    async fn no_other_kind_replaces_that_of_the_first_answer() {
        let chat = Some(CanaryKind::Chat);
        let (checked, asked) = checked_again("").await;
        let error = checked.unwrap_err();
        assert!(error.contains("no longer serves") && error.contains("POST /v1: it answered 404"), "{error}");
        assert_eq!(asked, [None, chat]);
        // Its answer is right by its content.
        let (checked, asked) = checked_again("expect = \"three\"").await;
        assert_eq!((checked, asked), (Ok(()), vec![None, chat, None]));
    }

    /// Starts a command whose engine answers probes like this.
    async fn start(
        answers: Vec<Result<EngineState, EngineError>>,
        limit: Duration,
    ) -> Result<(), TaskOutcome> {
        let model = model("command = [\"sleep\", \"600\"]");
        let start = model.start.clone().unwrap();
        let supervisor = Arc::new(Supervisor::new("one", start, None).unwrap());
        let engine = Arc::new(Probed(Mutex::new(answers.into())));
        let handle = EngineHandle::new(
            &model,
            engine,
            Some(Arc::clone(&supervisor)),
            (Arc::new(NoMeter), Arc::new(NoHibernator)),
            None,
        );
        let outcome = timeout(Duration::from_secs(120), handle.start(limit)).await;
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
        let limit = Duration::from_secs(60);
        assert_eq!(start(with(Ok(EngineState::Awake)), limit).await, Ok(()));
        assert_eq!(
            start(with(Err(unsupported())), limit).await,
            Err(TaskOutcome::Unsupported("GET: too old".to_owned()))
        );
        let foreign = start(vec![Err(unsupported())], limit).await;
        assert!(
            matches!(&foreign, Err(TaskOutcome::Failed(why)) if why.contains("not started here")),
            "{foreign:?}"
        );
        // One that is never ready says what it answered.
        let short = Duration::from_millis(200);
        let late = start(vec![Ok(EngineState::Gone), Err(refused.clone())], short).await;
        let failed = |why: &str| Err(TaskOutcome::Failed(why.to_owned()));
        assert_eq!(late, failed("it was not ready within 0.2 s: GET: it answered 503: no"));
        let silent = start(vec![Ok(EngineState::Gone)], short).await;
        assert_eq!(silent, failed("it was not ready within 0.2 s: no connection was possible"));
    }

    #[tokio::test]
    async fn what_outlived_its_processes_is_stopped_by_its_command() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("stopped");
        let lines = format!("command = [\"true\"]\nstop_command = [\"touch\", {mark:?}]");
        for (answers, is_stopped, outcome) in [
            (vec![EngineState::Gone], false, Ok(())),
            (vec![EngineState::Awake, EngineState::Gone], true, Ok(())),
            (vec![EngineState::Awake], true, Err("an engine that was not started here answers")),
        ] {
            let model = model(&lines);
            let supervisor = Supervisor::new("one", model.start.clone().unwrap(), None).unwrap();
            let engine = Arc::new(Probed(Mutex::new(answers.into_iter().map(Ok).collect())));
            let supervisor = Some(Arc::new(supervisor));
            let handle = EngineHandle::new(
                &model,
                engine,
                supervisor,
                (Arc::new(NoMeter), Arc::new(NoHibernator)),
                None,
            );
            match (handle.stop(Duration::from_secs(120)).await, outcome) {
                (Err(error), Err(words)) => assert!(error.contains(words), "{error}"),
                (stopped, wanted) => assert_eq!(stopped.is_ok(), wanted.is_ok(), "{stopped:?}"),
            }
            assert_eq!(mark.exists(), is_stopped);
            let _ = std::fs::remove_file(&mark);
        }
    }

    /// On a driver that hangs at the end of a process that came back.
    #[derive(Debug)]
    struct Hangs {
        hibernates: bool,
        is_away: Mutex<bool>,
        resumes: Mutex<u32>,
    }

    impl Hibernator for Hangs {
        fn is_hibernating<'a>(
            &'a self,
            _: &'a EngineProcesses,
        ) -> HibernationFuture<'a, Result<bool, HibernateError>> {
            Box::pin(async { Ok(*self.is_away.lock().unwrap()) })
        }

        fn hibernate<'a>(
            &'a self,
            of: &'a EngineProcesses,
        ) -> HibernationFuture<'a, Result<(), HibernateError>> {
            assert_eq!(of.pids.len(), 1);
            *self.is_away.lock().unwrap() = self.hibernates;
            let failed = Err(HibernateError::Failed("it has a communicator".to_owned()));
            let done = if self.hibernates { Ok(()) } else { failed };
            Box::pin(async { done })
        }

        fn resume<'a>(&'a self, _: &'a EngineProcesses) -> HibernationFuture<'a, Result<(), HibernateError>> {
            *self.resumes.lock().unwrap() += 1;
            Box::pin(async { Ok(()) })
        }

        fn may_hibernate(&self, _: &str) -> bool {
            *self.is_away.lock().unwrap()
        }

        fn must_end_away(&self, of: &EngineProcesses) -> bool {
            !of.pids.is_empty()
        }

        fn forget(&self, _: &str) {
            *self.is_away.lock().unwrap() = false;
        }

        fn host_bytes(&self, _: &str) -> u64 {
            0
        }

        fn configure(&self, _: &config::Hibernate) {}

        fn restarted(&self) -> HibernationFuture<'_, ()> {
            unreachable!()
        }

        fn end(&self) -> HibernationFuture<'_, ()> {
            unreachable!()
        }
    }

    #[tokio::test]
    async fn one_whose_end_would_hang_the_machine_is_taken_off_its_gpus_or_let_be() {
        for (is_away, hibernates, ends) in [(false, true, true), (true, true, true), (false, false, false)] {
            let model = model("command = [\"sleep\", \"600\"]");
            let supervisor = Arc::new(Supervisor::new("one", model.start.clone().unwrap(), None).unwrap());
            let engine = Arc::new(Probed(Mutex::new([Ok(EngineState::Gone)].into())));
            let (is_away, resumes) = (Mutex::new(is_away), Mutex::default());
            let hibernator = Arc::new(Hangs { hibernates, is_away, resumes });
            let tools = (Arc::new(NoMeter) as _, Arc::clone(&hibernator) as _);
            let handle = EngineHandle::new(&model, engine, Some(Arc::clone(&supervisor)), tools, None);
            supervisor.start().await.unwrap();
            let stopped = handle.stop(Duration::from_secs(240)).await;
            assert_eq!((stopped.is_ok(), supervisor.is_running()), (ends, !ends), "{stopped:?}");
            if let Err(reason) = stopped {
                for words in ["left alone", "hangs the machine", "it has a communicator", "by hand"] {
                    assert!(reason.contains(words), "{reason}");
                }
                supervisor.stop(Duration::ZERO).await.unwrap();
            }
            assert_eq!(*hibernator.resumes.lock().unwrap(), 0, "it never comes back for its end");
        }
    }

    /// It answers nothing.
    #[derive(Debug)]
    struct Silent;

    impl Engine for Silent {
        fn probe(&self) -> EngineFuture<'_, EngineState> {
            Box::pin(std::future::pending())
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

        fn generate(&self, _: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
            unreachable!()
        }
    }

    #[tokio::test]
    async fn a_silent_engine_leaves_its_stop_command_all_of_its_time() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("stopped");
        let steps = format!("sleep 3; touch '{}'; kill -s KILL ${{PID}}", mark.display());
        let model =
            model(&format!("command = [\"sleep\", \"600\"]\nstop_command = [\"sh\", \"-c\", {steps:?}]"));
        let supervisor = Arc::new(Supervisor::new("one", model.start.clone().unwrap(), None).unwrap());
        let tools = (Arc::new(NoMeter) as _, Arc::new(NoHibernator) as _);
        let handle = EngineHandle::new(&model, Arc::new(Silent), Some(Arc::clone(&supervisor)), tools, None);
        supervisor.start().await.unwrap();
        assert_eq!(handle.end(&supervisor, Duration::from_secs(3600)).await, Ok(()));
        assert!(mark.exists(), "longer than a silent engine has for SIGTERM");
        assert!(!supervisor.is_running());
    }

    /// Its sleep fails, and it answers only what wakes it.
    #[derive(Debug, Default)]
    struct Hung {
        wakes: Mutex<u32>,
        stores: Mutex<u32>,
    }

    impl Engine for Hung {
        fn probe(&self) -> EngineFuture<'_, EngineState> {
            unreachable!()
        }

        fn sleep(&self) -> EngineFuture<'_, ()> {
            let reason = "it broke".to_owned();
            let failed = EngineError::Unreachable { request_line: "POST /sleep".into(), reason };
            Box::pin(std::future::ready(Err(failed)))
        }

        fn wake(&self) -> EngineFuture<'_, ()> {
            *self.wakes.lock().unwrap() += 1;
            Box::pin(std::future::ready(Ok(())))
        }

        fn store_asleep(&self) -> EngineFuture<'_, ()> {
            *self.stores.lock().unwrap() += 1;
            Box::pin(std::future::pending())
        }

        fn is_awake(&self) -> EngineFuture<'_, bool> {
            unreachable!()
        }

        fn generate(&self, _: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
            unreachable!()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_hung_store_of_the_sleep_delays_no_wake_for_long() {
        let engine = Arc::new(Hung::default());
        let tools = (Arc::new(NoMeter) as _, Arc::new(NoHibernator) as _);
        let handle = EngineHandle::new(&model(""), Arc::clone(&engine) as _, None, tools, None);
        let handle = Arc::new(handle);
        let limit = Duration::from_secs(60);
        assert!(matches!(handle.run(Task::Sleep, limit, None).await, TaskOutcome::Failed(_)));
        let storing = tokio::spawn({
            let handle = Arc::clone(&handle);
            async move { handle.store_asleep().await }
        });
        tokio::task::yield_now().await;
        assert_eq!(*engine.stores.lock().unwrap(), 1);
        let woken = timeout(limit, handle.run(Task::Wake, limit, None)).await;
        assert_eq!(woken, Ok(TaskOutcome::Done));
        assert_eq!(*engine.wakes.lock().unwrap(), 1);
        assert!(timeout(limit, storing).await.is_ok_and(|stored| stored.is_ok()));
    }

    #[tokio::test(start_paused = true)]
    async fn what_accepts_and_never_answers_is_at_the_address() {
        let tools = (Arc::new(NoMeter) as _, Arc::new(NoHibernator) as _);
        let handle = EngineHandle::new(&model(""), Arc::new(Silent), None, tools, None);
        let found = handle.check_address().await.unwrap_err();
        assert!(found.contains("no answer within 2.0 s"), "{found}");
    }

    /// It answers nothing, and heeds no SIGTERM.
    #[tokio::test]
    async fn a_stopped_process_ends_long_before_the_limit_of_its_stop() {
        let model = model("command = [\"sleep\", \"600\"]");
        let supervisor = Arc::new(Supervisor::new("one", model.start.clone().unwrap(), None).unwrap());
        let tools = (Arc::new(NoMeter) as _, Arc::new(NoHibernator) as _);
        let handle = EngineHandle::new(&model, Arc::new(Silent), Some(Arc::clone(&supervisor)), tools, None);
        supervisor.start().await.unwrap();
        let pid = supervisor.processes()[0].to_string();
        let kill = std::process::Command::new("kill").args(["-s", "STOP", &pid]).status();
        assert!(kill.unwrap().success());
        // Without the short grace this takes an hour.
        let ended =
            timeout(Duration::from_secs(120), handle.end(&supervisor, Duration::from_secs(3600))).await;
        assert_eq!(ended, Ok(Ok(())));
        assert!(!supervisor.is_running());
    }

    #[tokio::test]
    async fn all_is_given_up_for_a_start_and_a_wake_spares_its_own() {
        let model = model("command = [\"sleep\", \"600\"]");
        let supervisor = Arc::new(Supervisor::new("one", model.start.clone().unwrap(), None).unwrap());
        let answers = VecDeque::from([Ok(EngineState::Gone), Ok(EngineState::Asleep)]);
        let (engine, meter) = (Arc::new(Probed(Mutex::new(answers))), Arc::new(Clears::default()));
        let tools = (Arc::clone(&meter) as _, Arc::new(NoHibernator) as _);
        let handle = EngineHandle::new(&model, engine, Some(Arc::clone(&supervisor)), tools, None);
        let limit = Duration::from_secs(60);
        assert_eq!(handle.run(Task::Start, limit, None).await, TaskOutcome::Done);
        assert_eq!(handle.run(Task::Wake, limit, Some(vec![7])).await, TaskOutcome::Done);
        let pids = supervisor.processes();
        supervisor.stop(Duration::ZERO).await.unwrap();
        assert!(!pids.is_empty());
        let cleared = meter.0.lock().unwrap().clone();
        assert_eq!(cleared, [(None, Vec::new()), (Some(vec![7]), pids)]);
    }

    /// Its clearing never ends.
    #[derive(Debug)]
    struct Stuck;

    impl Meter for Stuck {
        fn measure<'a>(&'a self, _gpus: &'a [Gpu]) -> Measured<'a> {
            unreachable!()
        }

        fn counts_lent(&self) -> bool {
            true
        }

        fn clear<'a>(&'a self, _: &'a [Gpu], _: Option<Vec<u64>>, _: Vec<u32>) -> Cleared<'a> {
            Box::pin(std::future::pending())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_broker_that_is_stuck_delays_no_wake_for_long() {
        let engine = Arc::new(Hung::default());
        let tools = (Arc::new(Stuck) as _, Arc::new(NoHibernator) as _);
        let handle = EngineHandle::new(&model(""), Arc::clone(&engine) as _, None, tools, None);
        for limit in [Duration::from_secs(60), Duration::from_secs(1)] {
            let woken = timeout(limit, handle.run(Task::Wake, limit, None)).await;
            assert_eq!(woken, Ok(TaskOutcome::Done));
        }
        assert_eq!(*engine.wakes.lock().unwrap(), 2);
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
