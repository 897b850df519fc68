//! The life of one engine's processes.
//!
//! Each engine has two threads. One reads its output and ends with the last writer. The *keeper* tracks descendants,
//! notices the end of the first process, and reaps it. Neither needs an async runtime or the supervisor.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use poorwill::proc::descriptors_folder;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpgrp, kill_process, kill_process_group};
use tokio::sync::Notify;

use super::error::SuperviseError;
use super::family::{Family, Members};
use super::log::{Log, LogFile};
use super::proc::{self, Identity};
use super::state::{MARK, Record, StateFile};
use super::stop::{self, end_at_once};
use crate::config::Start;
use poorwill_net::descriptors;

/// How often the keeper checks the first process.
const TICK: Duration = Duration::from_millis(50);
/// Ticks between two scans for descendants.
const SCAN_TICKS: u32 = 100;
/// First and longest pause between scans for processes that should end.
const PAUSE_MIN: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// How long killed processes may take: the kernel has to release their memory.
const KILL_MAX: Duration = Duration::from_secs(30);

/// Shared by a supervisor and its engine's threads.
pub(super) struct Shared {
    start: Start,
    state: Option<StateFile>,
    /// Variables of this process that no engine gets, unless its own `environment` has them.
    withheld: Mutex<BTreeSet<String>>,
    /// Records that could not be written.
    unwritten: AtomicU64,
    log: Arc<Log>,
    inner: Mutex<RunState>,
    /// Notified when an engine has ended by itself.
    notify: Notify,
}

#[derive(Default)]
struct RunState {
    /// The last engine, until all of its processes are gone.
    run: Option<Run>,
    /// How it ended, until that is reported.
    ended: Option<String>,
}

struct Run {
    family: Family,
    /// Whether the first process has ended.
    is_over: bool,
    is_stopping: bool,
}

impl Run {
    fn of(leader: Identity) -> Self {
        Self { family: Family::of(leader, Instant::now()), is_over: false, is_stopping: false }
    }
}

impl Shared {
    /// Adopts the recorded engine if it still runs.
    pub(super) fn open(model: &str, start: Start, state: Option<&Path>) -> Result<Arc<Self>, SuperviseError> {
        if proc::identity(std::process::id()).map_err(|error| unreadable(&error))?.is_none() {
            return Err(unreadable(&io::Error::other("/proc does not show this process")));
        }
        let shared = Arc::new(Self {
            start,
            state: state.map(|folder| StateFile::of(model, folder)),
            withheld: Mutex::default(),
            unwritten: AtomicU64::new(0),
            log: Arc::default(),
            inner: Mutex::default(),
            notify: Notify::new(),
        });
        let Some(state) = &shared.state else { return Ok(shared) };
        let Some(record) = state.read()? else { return Ok(shared) };
        match record.process().map_err(|error| unreadable(&error))? {
            Some(leader) => {
                shared.adopt(leader, &record)?;
                // From here on its id identifies it, even if it changes its environment.
                shared.record(&record.with(leader));
            }
            None => {
                shared.log.note(&format!("{} is not there any more", record.description()));
                state.remove()?;
            }
        }
        Ok(shared)
    }

    fn adopt(self: &Arc<Self>, leader: Identity, record: &Record) -> Result<(), SuperviseError> {
        let output = reopened(leader.pid, record);
        let lost = match &output {
            Ok(_) => "what it wrote meanwhile is lost".to_owned(),
            Err(reason) => format!("what it writes is lost: {reason}"),
        };
        self.log.note(&format!("adopted process {}, which an earlier service started; {lost}", leader.pid));
        if let Ok(output) = output {
            self.read_all(output)?;
        }
        self.lock().run = Some(Run::of(leader));
        self.keeper()?(leader, None);
        Ok(())
    }

    pub(super) fn launch(self: &Arc<Self>) -> Result<(), SuperviseError> {
        let found = self.scan()?;
        if let Some(run) = &self.lock().run {
            let leader = run.family.leader();
            if found.alive.contains(&leader) {
                return Err(SuperviseError::AlreadyRunning { pid: leader.pid });
            }
        }
        if !found.alive.is_empty() {
            return Err(SuperviseError::LeftBehind { pids: found.alive.iter().map(|one| one.pid).collect() });
        }
        let keep = self.keeper()?;
        let (output, (out, err)) = pipe()?;
        let name = pipe_name(&output);
        self.read_all(output)?;
        let record = Record::new(&self.start.command, name).map_err(|error| unreadable(&error))?;
        self.record(&record);

        let words = &self.start.command;
        let command = self.command(words, out, err).map(|mut command| {
            command.env(MARK, &record.mark);
            command
        });
        let spawned = command.and_then(|mut command| {
            // The command owns this side of the pipe. Dropping it lets the reader see the end.
            self.spawned(&mut command, words)
        });
        let mut child = spawned.inspect_err(|_| self.forget())?;
        let pid = child.id();
        // The process exists until it is reaped, even if it has ended.
        let leader = proc::identity(pid).and_then(|one| {
            one.ok_or_else(|| {
                io::Error::other(format!("/proc does not show process {pid}, which was started"))
            })
        });
        let leader = match leader {
            Ok(leader) => leader,
            Err(error) => {
                end_at_once(&mut child);
                self.forget();
                return Err(unreadable(&error));
            }
        };
        self.record(&record.with(leader));
        self.log.note(&format!("started process {pid}"));
        *self.lock() = RunState { run: Some(Run::of(leader)), ended: None };
        keep(leader, Some(child));
        Ok(())
    }

    /// A full disk is no failure of the engine, which runs without its record.
    fn record(&self, record: &Record) {
        let Some(state) = &self.state else { return };
        if let Err(error) = state.prepare().and_then(|prepared| prepared.commit(record)) {
            self.unwritten.fetch_add(1, Ordering::Relaxed);
            let lost = "should this service be killed, the next one would not know this engine";
            self.log.note(&format!("{error}; {lost}"));
            tracing::warn!("{error}; {lost}");
        }
    }

    pub(super) fn unwritten(&self) -> u64 {
        self.unwritten.load(Ordering::Relaxed)
    }

    pub(super) fn withhold(&self, variables: &BTreeSet<String>) {
        self.withheld.lock().unwrap_or_else(PoisonError::into_inner).clone_from(variables);
    }

    fn command(
        &self,
        words: &[String],
        out: io::PipeWriter,
        err: io::PipeWriter,
    ) -> Result<Command, SuperviseError> {
        let Some((program, args)) = words.split_first() else {
            return Err(self.not_spawned(words, &io::Error::other("there is no command")));
        };
        if let Some(folder) = self.start.folder.as_ref().filter(|folder| !folder.is_dir()) {
            let reason = format!("{} is no folder", folder.display());
            return Err(self.not_spawned(words, &io::Error::other(reason)));
        }
        let mut command = Command::new(program);
        for variable in self.withheld.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            command.env_remove(variable);
        }
        command.args(args).envs(&self.start.environment).process_group(0);
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        if let Some(folder) = &self.start.folder {
            command.current_dir(folder);
        }
        Ok(command)
    }

    fn not_spawned(&self, words: &[String], error: &io::Error) -> SuperviseError {
        let help = match error.kind() {
            io::ErrorKind::NotFound => "; give the whole path of the program, or have PATH lead to it",
            io::ErrorKind::PermissionDenied => "; see that it may be executed by this user",
            _ => "",
        };
        SuperviseError::Spawn {
            program: words.first().cloned().unwrap_or_default(),
            folder: self.start.folder.clone().unwrap_or_else(|| PathBuf::from(".")),
            reason: format!("{error}{help}"),
        }
    }

    fn read_all(&self, output: impl Read + Send + 'static) -> Result<(), SuperviseError> {
        let path = self.start.log.as_deref();
        let log_file =
            path.map(|path| LogFile::open(path, self.start.log_max_bytes, &self.log)).transpose()?;
        let log = Arc::clone(&self.log);
        let reader = thread::Builder::new().name("poorwill-log".into());
        let reader = reader.spawn(move || log.take_all(output, log_file));
        reader.map(drop).map_err(|error| resource_error("start a thread", &error))
    }

    /// The returned function gives the keeper its process and, for an own child, the handle to reap it.
    fn keeper(self: &Arc<Self>) -> Result<impl FnOnce(Identity, Option<Child>) + use<>, SuperviseError> {
        let (give, take) = mpsc::channel::<(Identity, Option<Child>)>();
        let shared = Arc::downgrade(self);
        let keeper = thread::Builder::new().name("poorwill-keeper".into());
        let keeper = keeper.spawn(move || {
            if let Ok((leader, child)) = take.recv() {
                keep(&shared, leader, child);
            }
        });
        keeper.map_err(|error| resource_error("start a thread", &error))?;
        // Sending fails only if the keeper has panicked.
        Ok(move |leader, child| drop(give.send((leader, child))))
    }

    pub(super) fn halt(&self, grace: Duration) -> Result<(), SuperviseError> {
        let mut found = self.scan()?;
        let leader = {
            let mut inner = self.lock();
            inner.ended = None;
            let Some(run) = &mut inner.run else { return Ok(()) };
            run.is_stopping = true;
            run.family.leader()
        };
        let mut term_max = grace;
        if !self.start.stop_command.is_empty() {
            let begun = Instant::now();
            let leader = found.alive.contains(&leader).then_some(leader.pid);
            if let Err(reason) = self.run_stop_command(leader, grace) {
                self.log.note(&format!("{reason}; sending signals"));
                tracing::warn!("{reason}; sending signals");
            }
            term_max = grace.saturating_sub(begun.elapsed()).max(grace / 2);
            found = self.scan()?;
        }
        let mut refused = None;
        self.signal(&found, Signal::TERM, &mut refused);
        let mut left = self.until_gone(term_max, |_| {})?;
        if !left.is_empty() {
            self.log.note(&format!("processes {left:?} are there after {term_max:?}, and are killed"));
            refused = None;
            left = self.until_gone(KILL_MAX, |found| self.signal(found, Signal::KILL, &mut refused))?;
        }
        if !left.is_empty() {
            return Err(SuperviseError::StillThere { pids: left, waited: KILL_MAX, refused });
        }
        *self.lock() = RunState::default();
        self.log.note("stopped");
        self.forget();
        Ok(())
    }

    /// For what outlived every process that is known, such as a container.
    pub(super) fn stop_stray(&self, most: Duration) {
        if !self.start.stop_command.is_empty()
            && let Err(reason) = self.run_stop_command(None, most)
        {
            self.log.note(&reason);
            tracing::warn!("{reason}");
        }
    }

    /// With the limit of descriptors that the service had at first, from a moment after its start on.
    fn spawned(&self, command: &mut Command, words: &[String]) -> Result<Child, SuperviseError> {
        let child = command.spawn().map_err(|error| self.not_spawned(words, &error))?;
        if let Err(error) = descriptors::restore(child.id()) {
            let pid = child.id();
            self.log.note(&format!("the limit of file descriptors stays raised for process {pid}: {error}"));
        }
        Ok(child)
    }

    /// Returns when the engine has ended, or else why it has not.
    fn run_stop_command(&self, leader: Option<u32>, most: Duration) -> Result<(), String> {
        let begun = Instant::now();
        let words = stop::words_of(&self.start.stop_command, leader)
            .ok_or("its stop_command needs the id of its first process, which has ended")?;
        let spawned = pipe().and_then(|(output, (out, err))| {
            self.read_all(output)?;
            self.spawned(&mut self.command(&words, out, err)?, &words)
        });
        let mut child = spawned.map_err(|error| format!("its stop_command did not run: {error}"))?;
        self.log.note(&format!("its stop_command runs as process {}", child.id()));
        let left = || most.saturating_sub(begun.elapsed());
        match stop::wait(&mut child, most) {
            Ok(Some(status)) if status.success() => match self.until_gone(left(), |_| {}) {
                Ok(alive) if alive.is_empty() => Ok(()),
                Ok(alive) => Err(format!("its stop_command left processes {alive:?} after {most:?}")),
                Err(error) => Err(error.to_string()),
            },
            Ok(Some(status)) => Err(format!("its stop_command ended {}", manner(status))),
            Ok(None) => Err(format!("its stop_command ran for {most:?}, and was killed")),
            Err(error) => Err(format!("its stop_command cannot be waited for: {error}")),
        }
    }

    fn forget(&self) {
        // A record that stays is detected as stale by its reader.
        if let Some(Err(error)) = self.state.as_ref().map(StateFile::remove) {
            self.log.note(&error.to_string());
        }
    }

    /// Scans until no process is left or `time` has passed. Returns those that are left.
    fn until_gone(&self, time: Duration, mut each: impl FnMut(&Members)) -> Result<Vec<u32>, SuperviseError> {
        let begun = Instant::now();
        let mut pause = PAUSE_MIN;
        let mut has_been_empty = false;
        loop {
            let found = self.scan()?;
            if found.alive.is_empty() {
                // Two empty scans are needed: one scan can miss a process that is being forked.
                if has_been_empty {
                    return Ok(Vec::new());
                }
                has_been_empty = true;
                continue;
            }
            has_been_empty = false;
            each(&found);
            if begun.elapsed() >= time {
                return Ok(found.alive.iter().map(|one| one.pid).collect());
            }
            thread::sleep(pause.min(time.saturating_sub(begun.elapsed())));
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn signal(&self, found: &Members, signal: Signal, refused: &mut Option<String>) {
        let mut note_result = |pid: u32, sent: Result<(), Errno>| match sent {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => *refused = Some(format!("process {pid} cannot be signalled: {error}")),
        };
        let group = self.lock().run.as_ref().map(|run| run.family.leader().pid);
        if let Some(group) = group.filter(|_| found.alive.len() > found.strays.len())
            && let Some(pid) = numbered(group).filter(|pid| *pid != getpgrp())
        {
            note_result(group, kill_process_group(pid, signal));
        }
        for one in &found.strays {
            if let (Ok(true), Some(pid)) = (proc::is_alive(*one), numbered(one.pid)) {
                note_result(one.pid, kill_process(pid, signal));
            }
        }
    }

    pub(super) fn scan(&self) -> Result<Members, SuperviseError> {
        if self.lock().run.is_none() {
            return Ok(Members::default());
        }
        let table = proc::table().map_err(|error| unreadable(&error))?;
        Ok(self.lock().run.as_mut().map(|run| run.family.scan(&table, Instant::now())).unwrap_or_default())
    }

    /// Of the last scan, if `/proc` cannot be read.
    pub(super) fn pids(&self) -> Vec<u32> {
        match self.scan() {
            Ok(found) => found.alive.iter().map(|one| one.pid).collect(),
            Err(_) => self.lock().run.as_ref().map(|run| run.family.known()).unwrap_or_default(),
        }
    }

    pub(super) fn is_running(&self) -> bool {
        let leader = self.lock().run.as_ref().filter(|run| !run.is_over).map(|run| run.family.leader());
        // An unknown state does not count as an end.
        leader.is_some_and(|leader| proc::is_alive(leader).unwrap_or(true))
    }

    pub(super) fn log(&self) -> &Arc<Log> {
        &self.log
    }

    pub(super) async fn wait(&self) -> String {
        loop {
            // Created before the check, so that no notification between the two is lost.
            let notified = self.notify.notified();
            if let Some(how) = self.lock().ended.take() {
                return how;
            }
            notified.await;
        }
    }

    fn over(&self, leader: Identity, how: &str) {
        self.log.note(how);
        let mut inner = self.lock();
        let Some(run) = inner.run.as_mut().filter(|run| run.family.leader() == leader) else { return };
        run.is_over = true;
        if !run.is_stopping {
            inner.ended = Some(how.to_owned());
            drop(inner);
            self.notify.notify_waiters();
        }
    }

    fn lock(&self) -> MutexGuard<'_, RunState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn keep(shared: &Weak<Shared>, leader: Identity, child: Option<Child>) {
    let mut ticks = 0;
    // An unknown state does not count as an end.
    while proc::is_alive(leader).unwrap_or(true) {
        let Some(shared) = shared.upgrade() else { break };
        if let Some(run) = shared.lock().run.as_mut().filter(|run| run.family.leader() == leader) {
            run.family.saw_leader(Instant::now());
        }
        ticks += 1;
        if ticks % SCAN_TICKS == 0 {
            // A failed scan is repeated later.
            drop(shared.scan());
        }
        drop(shared);
        thread::sleep(TICK);
    }
    // Before reaping: until then the group id cannot be reused, so remaining members are recognized.
    let left = shared.upgrade().and_then(|shared| shared.scan().ok()).unwrap_or_default().alive.len();
    let pid = leader.pid;
    let mut how = match child.map(|mut child| child.wait()) {
        Some(Ok(status)) => format!("process {pid} ended {}", manner(status)),
        Some(Err(error)) => format!("process {pid} ended, and how cannot be found out: {error}"),
        None => format!("process {pid} ended; how is not known, for an earlier service started it"),
    };
    if left > 0 {
        how.push_str(&format!("; {left} of its processes are left"));
    }
    if let Some(shared) = shared.upgrade() {
        shared.over(leader, &how);
    }
}

/// How it ended, to continue "it ended".
fn manner(status: ExitStatus) -> String {
    let Some(signal) = status.signal() else {
        return status
            .code()
            .map_or_else(|| format!("with {status}"), |code| format!("with exit code {code}"));
    };
    let name = match signal {
        1 => " (SIGHUP)",
        2 => " (SIGINT)",
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL: by another process, or by the system for lack of memory)",
        11 => " (SIGSEGV)",
        13 => " (SIGPIPE)",
        15 => " (SIGTERM)",
        _ => "",
    };
    format!("by signal {signal}{name}")
}

/// Opens the output of an adopted process, if it still writes to the earlier service's pipe.
fn reopened(pid: u32, record: &Record) -> Result<File, String> {
    let name = record.output.as_ref().ok_or("its output is unknown")?;
    if record.has_reader().map_err(|error| error.to_string())? {
        return Err("its earlier reader still runs".to_owned());
    }
    let is_it = |path: &PathBuf| fs::read_link(path).is_ok_and(|to| to.to_str() == Some(name));
    let path = ["1", "2"].map(|nth| descriptors_folder(pid).join(nth)).into_iter().find(is_it);
    let path = path.ok_or("it writes somewhere else")?;
    let open = || {
        // Opening must not wait for a writer; reading may.
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).map_err(io::Error::other)?;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&path)?;
        rustix::fs::fcntl_setfl(&file, OFlags::empty())?;
        Ok(file)
    };
    open().map_err(|error: io::Error| format!("cannot open {}: {error}", path.display()))
}

/// The side to read, and two to write: for output and errors.
fn pipe() -> Result<(io::PipeReader, (io::PipeWriter, io::PipeWriter)), SuperviseError> {
    let (output, input) = io::pipe().map_err(|error| resource_error("make a pipe", &error))?;
    let both = input.try_clone().map(|other| (input, other));
    both.map(|both| (output, both)).map_err(|error| resource_error("share a pipe", &error))
}

/// As `/proc/PID/fd` names it.
fn pipe_name(pipe: impl AsFd) -> Option<String> {
    rustix::fs::fstat(pipe).ok().map(|stat| format!("pipe:[{}]", stat.st_ino))
}

/// 0 and 1 have other meanings for signals.
fn numbered(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().filter(|pid| *pid > 1).and_then(Pid::from_raw)
}

fn unreadable(error: &io::Error) -> SuperviseError {
    SuperviseError::Proc { reason: error.to_string() }
}

fn resource_error(doing: &'static str, error: &io::Error) -> SuperviseError {
    SuperviseError::Resources { doing, reason: error.to_string() }
}
