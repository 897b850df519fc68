//! Engines as sets of processes, which a helper takes off their GPUs.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use poorwill::ByteSize;
use poorwill::hibernation::ProcessState;
use serde_json::Value;

use super::driver::hangs_at_end;
use super::helper::{HelperProcess, command_of};
use super::mark::{HibernationMark, Marks};
use super::protocol::{Ask, HelperError, Inspected, inspected, state_of};
use super::{EngineProcesses, HibernateError, HibernationFuture, Hibernator};
use crate::config::Hibernate;

/// The [`Hibernator`] of a service.
///
/// ```no_run
/// use poorwill_rotate::config::Hibernate;
/// use poorwill_rotate::hibernation::{EngineProcesses, Hibernator, Sets};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let sets = Sets::new(&Hibernate::default(), None, ["one"].into_iter());
/// let engine = EngineProcesses { model: "one".to_owned(), pids: vec![4711] };
/// sets.hibernate(&engine).await?;
/// sets.resume(&engine).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Sets {
    helper: HelperProcess,
    state: Option<PathBuf>,
    marks: Marks,
    /// Engines that came back, and have to be taken off again before their end.
    returned: Marks,
    settings: Mutex<Settings>,
    /// One engine at a time is measured against the limit.
    reserving: tokio::sync::Mutex<()>,
}

#[derive(Debug, Clone, Copy)]
struct Settings {
    wait_max: Duration,
    host_max_bytes: Option<u64>,
}

impl From<&Hibernate> for Settings {
    fn from(config: &Hibernate) -> Self {
        Self { wait_max: config.wait_max, host_max_bytes: config.host_max_bytes }
    }
}

impl Sets {
    /// With the marks that an earlier service left in the folder `state` for these models.
    #[must_use]
    pub fn new<'a>(config: &Hibernate, state: Option<&Path>, models: impl Iterator<Item = &'a str>) -> Self {
        let models: Vec<&str> = models.collect();
        let of = |kind| Marks::read(state, kind, models.iter().copied());
        Self {
            helper: HelperProcess::new(command_of(config, state)),
            state: state.map(Path::to_path_buf),
            marks: of("hibernating"),
            returned: of("returned"),
            settings: Mutex::new(config.into()),
            reserving: tokio::sync::Mutex::default(),
        }
    }

    fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Of those that have something on a GPU.
    async fn of_each<T>(
        &self,
        pids: &[u32],
        operation: impl Fn(Vec<u32>) -> Ask,
        parsed: impl Fn(&Value) -> Result<T, HelperError>,
    ) -> Result<Vec<(u32, T)>, HelperError> {
        let asked = pids.iter().map(|pid| self.helper.ask(operation(vec![*pid])));
        let answers = join_all(asked).await.into_iter().zip(pids);
        let each = answers.filter_map(|(answer, pid)| match answer.and_then(|answer| parsed(&answer)) {
            Ok(one) => Some(Ok((*pid, one))),
            Err(error) if error.is_without_gpu() => None,
            Err(error) => Some(Err(error)),
        });
        each.collect()
    }

    /// What an engine's mark names of its processes that still run.
    fn marked(&self, of: &EngineProcesses) -> Vec<u32> {
        let mut pids = self.marks.of(&of.model).map(|mark| mark.pids).unwrap_or_default();
        // Another process may have got the number.
        pids.retain(|pid| of.pids.contains(pid));
        pids
    }

    async fn states(&self, pids: &[u32]) -> Result<Vec<(u32, Option<ProcessState>)>, HibernateError> {
        let states = self.of_each(pids, |pids| Ask::State { pids }, state_of).await;
        states.map_err(|error| HibernateError::Later(format!("whether it hibernates is not known: {error}")))
    }

    async fn find(&self, of: &EngineProcesses) -> Result<bool, HibernateError> {
        let states = self.states(&self.marked(of)).await?;
        if let Some((pid, _)) = states.iter().find(|(_, state)| *state == Some(ProcessState::Failed)) {
            let why = format!("its process {pid} has lost its GPU: only its end is left");
            return Err(HibernateError::Failed(why));
        }
        let are_all = |wanted| states.iter().all(|(_, state)| *state == Some(wanted));
        if are_all(ProcessState::Running) {
            self.marks.remove(&of.model);
            return Ok(false);
        }
        if are_all(ProcessState::Checkpointed) {
            return Ok(true);
        }
        // An earlier helper ended amid its work.
        match self.put_back(of).await {
            Err(HibernateError::NeedsMore(why)) => Err(HibernateError::Later(why)),
            done => done.map(|()| false),
        }
    }

    async fn take_off(&self, of: &EngineProcesses) -> Result<(), HibernateError> {
        let found = self.users_of_gpus(of).await?;
        for (pid, one) in &found {
            check_movable(*pid, one)?;
        }
        let settings = *self.settings();
        if settings.host_max_bytes.is_some() {
            check_measured(&found)?;
        }
        let pids: Vec<u32> = found.iter().map(|(pid, _)| *pid).collect();
        let host_bytes = found.iter().map(|(_, one)| one.host_bytes).fold(0, u64::saturating_add);
        let left = self.reserve(of, &pids, host_bytes, settings.host_max_bytes).await?;
        let wait_max_ms = u64::try_from(settings.wait_max.as_millis()).unwrap_or(u64::MAX);
        let operation = Ask::Hibernate { pids: pids.clone(), wait_max_ms, host_bytes_max: left };
        match self.helper.ask(operation).await {
            Ok(answer) => {
                let taken = answer.get("host_bytes").and_then(Value::as_u64).unwrap_or(host_bytes);
                self.mark(of, &pids, taken)
            }
            Err(error) => {
                if error.is_impossible() {
                    self.marks.remove(&of.model);
                }
                Err(not_hibernated("", &error))
            }
        }
    }

    /// At least one.
    async fn users_of_gpus(&self, of: &EngineProcesses) -> Result<Vec<(u32, Inspected)>, HibernateError> {
        let inspect = self.of_each(&of.pids, |pids| Ask::Inspect { pids }, inspected);
        let mut found = inspect.await.map_err(|error| not_hibernated("it was not inspected: ", &error))?;
        // One that only looked for GPUs serves requests, and stays.
        let holds = |one: &Inspected| one.host_bytes > 0 || one.is_unmeasured;
        if found.iter().any(|(_, one)| holds(one)) {
            found.retain(|(_, one)| holds(one));
        }
        if found.is_empty() {
            let why = "none of its processes uses a GPU, as far as they are known";
            return Err(HibernateError::Impossible(why.to_owned()));
        }
        Ok(found)
    }

    /// Marks it with this much host memory. Returns what it may take of a limit.
    async fn reserve(
        &self,
        of: &EngineProcesses,
        pids: &[u32],
        host_bytes: u64,
        host_max_bytes: Option<u64>,
    ) -> Result<Option<u64>, HibernateError> {
        let _one_at_a_time = self.reserving.lock().await;
        let taken = self.marks.host_bytes_beside(&of.model);
        let left = host_max_bytes.map(|most| most.saturating_sub(taken));
        if left.is_some_and(|left| host_bytes > left) {
            return Err(HibernateError::Failed(format!(
                "it takes {} of host memory to hibernate, and {} of host_max are left; raise host_max, or have \
                 fewer engines hibernate",
                ByteSize(host_bytes),
                ByteSize(left.unwrap_or_default())
            )));
        }
        self.mark(of, pids, host_bytes)?;
        Ok(left)
    }

    fn mark(&self, of: &EngineProcesses, pids: &[u32], host_bytes: u64) -> Result<(), HibernateError> {
        self.marks.set(&of.model, HibernationMark { pids: pids.to_vec(), host_bytes }).map_err(|error| {
            HibernateError::Failed(format!(
                "that it hibernates cannot be written to the state folder: {error}"
            ))
        })
    }

    async fn put_back(&self, of: &EngineProcesses) -> Result<(), HibernateError> {
        let pids = self.marked(of);
        if !pids.is_empty()
            && let Err(error) = self.helper.ask(Ask::Resume { pids: pids.clone() }).await
        {
            // An earlier request may have done it, although its answer was lost.
            let states = self.states(&pids).await;
            let is_back = states
                .is_ok_and(|states| states.iter().all(|(_, state)| *state == Some(ProcessState::Running)));
            if !is_back {
                return Err(later_or_failed("it was not put back on its GPUs", &error));
            }
        }
        if !pids.is_empty() && self.hangs_at_end() {
            self.note_return(of, pids);
        }
        self.marks.remove(&of.model);
        Ok(())
    }

    fn hangs_at_end(&self) -> bool {
        self.helper.driver().is_some_and(|version| hangs_at_end(&version))
    }

    /// In memory in any case.
    fn note_return(&self, of: &EngineProcesses, pids: Vec<u32>) {
        let mark = HibernationMark { pids, host_bytes: 0 };
        if let Err(error) = self.returned.set(&of.model, mark.clone()) {
            let model = &of.model;
            tracing::warn!(model, %error, "cannot note for the next service that the engine came back");
            self.returned.keep(model, mark);
        }
    }
}

fn check_movable(pid: u32, one: &Inspected) -> Result<(), HibernateError> {
    if !one.obstacles.is_empty() {
        let why = format!("its process {pid} has {}", one.obstacles.join(" and "));
        return Err(HibernateError::Impossible(why));
    }
    if one.state != Some(ProcessState::Running) {
        let state = one.state.map_or("neither here nor away", ProcessState::as_str);
        let why = format!("its process {pid} is {state}, by another program: have that program put it back");
        return Err(HibernateError::Failed(why));
    }
    Ok(())
}

fn check_measured(found: &[(u32, Inspected)]) -> Result<(), HibernateError> {
    let Some((pid, _)) = found.iter().find(|(_, one)| one.is_unmeasured) else { return Ok(()) };
    Err(HibernateError::Impossible(format!(
        "the driver does not say what its process {pid} holds, so it cannot be compared with host_max; leave \
         host_max away"
    )))
}

fn not_hibernated(what: &str, error: &HelperError) -> HibernateError {
    if error.is_impossible() {
        return HibernateError::Impossible(error.to_string());
    }
    let why = format!("{what}{error}");
    if error.is_without_helper() { HibernateError::Later(why) } else { HibernateError::Failed(why) }
}

fn later_or_failed(what: &str, error: &HelperError) -> HibernateError {
    let why = format!("{what}: {error}");
    if error.needs_more() {
        HibernateError::NeedsMore(why)
    } else if error.is_for_later() {
        HibernateError::Later(why)
    } else {
        HibernateError::Failed(why)
    }
}

fn is_any_of(mark: &HibernationMark, of: &EngineProcesses) -> bool {
    mark.pids.iter().any(|pid| of.pids.contains(pid))
}

impl Hibernator for Sets {
    fn is_hibernating<'a>(
        &'a self,
        of: &'a EngineProcesses,
    ) -> HibernationFuture<'a, Result<bool, HibernateError>> {
        Box::pin(self.find(of))
    }

    fn hibernate<'a>(&'a self, of: &'a EngineProcesses) -> HibernationFuture<'a, Result<(), HibernateError>> {
        Box::pin(self.take_off(of))
    }

    fn resume<'a>(&'a self, of: &'a EngineProcesses) -> HibernationFuture<'a, Result<(), HibernateError>> {
        Box::pin(self.put_back(of))
    }

    fn may_hibernate(&self, model: &str) -> bool {
        self.marks.of(model).is_some()
    }

    fn must_end_away(&self, of: &EngineProcesses) -> bool {
        let has_returned = self.returned.of(&of.model).is_some_and(|mark| is_any_of(&mark, of));
        let is_away = self.marks.of(&of.model).is_some_and(|mark| is_any_of(&mark, of));
        has_returned || is_away && self.hangs_at_end()
    }

    fn forget(&self, model: &str) {
        self.marks.remove(model);
        self.returned.remove(model);
    }

    fn host_bytes(&self, model: &str) -> u64 {
        self.marks.of(model).map_or(0, |mark| mark.host_bytes)
    }

    fn configure(&self, config: &Hibernate) {
        self.helper.set_command(command_of(config, self.state.as_deref()));
        *self.settings() = config.into();
    }

    fn restarted(&self) -> HibernationFuture<'_, ()> {
        self.helper.restarted()
    }

    fn end(&self) -> HibernationFuture<'_, ()> {
        Box::pin(self.helper.end())
    }
}
