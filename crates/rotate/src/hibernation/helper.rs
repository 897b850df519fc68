//! The helper's process: started at the first request, and again whenever it ends.
//!
//! Promises: a request is answered, or fails when the helper that got it ends. Between two helpers requests wait. The
//! helper's input closes with the service, so it does not outlive it.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::HibernationFuture;
use super::protocol::{Ask, HelperError, Line, Ready, Request};
use crate::config::Hibernate;

/// For its first line: it loads the driver.
const READY_MAX: Duration = Duration::from_secs(60);
/// For what is under way when its input ends.
const END_MAX: Duration = Duration::from_secs(30);
/// For the system to end what was killed.
const KILL_MAX: Duration = Duration::from_secs(5);
/// Pauses between two helpers.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// After a helper that cannot be used now.
const UNUSABLE_PAUSE: Duration = Duration::from_secs(30);
/// After one that cannot be used on this machine, until its driver is another one.
const UNSUPPORTED_PAUSE: Duration = Duration::from_secs(600);
/// A helper that ran for this long ends the growth of pauses.
const STEADY: Duration = Duration::from_secs(60);

type HelperReply = oneshot::Sender<Result<Value, HelperError>>;
type Asked = (Ask, HelperReply);

/// Asks a helper that it starts by itself.
#[derive(Debug)]
pub struct HelperProcess {
    asked: mpsc::UnboundedSender<Asked>,
    ends: mpsc::UnboundedSender<oneshot::Sender<()>>,
    command: watch::Sender<Vec<String>>,
    /// How many helpers came after an earlier one, whether that could be used or not.
    restarts: watch::Receiver<u64>,
    /// The driver's version, by the last helper that was ready.
    driver: watch::Receiver<Option<String>>,
}

impl HelperProcess {
    /// With the helper's program and arguments. Nothing runs yet.
    #[must_use]
    pub fn new(command: Vec<String>) -> Self {
        let (asked, inbox) = mpsc::unbounded_channel();
        let (ends, ended) = mpsc::unbounded_channel();
        let (command, commands) = watch::channel(command);
        let (restarted, restarts) = watch::channel(0);
        let (found, driver) = watch::channel(None);
        tokio::spawn(run(Keeper { inbox, commands, restarted, driver: found }, ended));
        Self { asked, ends, command, restarts, driver }
    }

    /// The driver's version; `None` until a helper has said it.
    pub(super) fn driver(&self) -> Option<String> {
        self.driver.borrow().clone()
    }

    /// The next helper has this command. One that could not be used is started again.
    pub(super) fn set_command(&self, command: Vec<String>) {
        self.command.send_replace(command);
    }

    pub(super) async fn ask(&self, operation: Ask) -> Result<Value, HelperError> {
        let ended =
            || HelperError::no_helper("no helper for hibernation is asked any more: the service is ending");
        let (reply, answer) = oneshot::channel();
        self.asked.send((operation, reply)).map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    pub(super) fn restarted(&self) -> HibernationFuture<'_, ()> {
        let mut restarts = self.restarts.clone();
        restarts.mark_unchanged();
        Box::pin(async move {
            if restarts.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        })
    }

    pub(super) async fn end(&self) {
        let (reply, ended) = oneshot::channel();
        if self.ends.send(reply).is_ok() {
            let _ended = ended.await;
        }
    }
}

/// The helper's program and arguments. Without any in the configuration, this very program's own, also where another
/// version has replaced its file. Its journal is in the folder `state`.
pub(super) fn command_of(config: &Hibernate, state: Option<&Path>) -> Vec<String> {
    if !config.helper.is_empty() {
        return config.helper.clone();
    }
    let journal = state.map(|folder| ["--journal".to_owned(), journal_in(folder).display().to_string()]);
    let words = ["/proc/self/exe", "hibernate", "--serve"].map(str::to_owned);
    words.into_iter().chain(journal.into_iter().flatten()).collect()
}

/// Of the own helper of a service with this state folder.
#[must_use]
pub fn journal_in(state: &Path) -> PathBuf {
    state.join("hibernate")
}

/// Starts the helper of a service with this configuration and state folder, and ends it. Returns its version.
///
/// # Errors
/// Why it cannot be used.
pub async fn check(config: &Hibernate, state: Option<&Path>) -> Result<String, String> {
    let mut helper = HelperChild::start(&command_of(config, state)).map_err(|error| error.message)?;
    let ready = helper.ready().await.map_err(|error| error.message);
    helper.close().await;
    Ok(ready?.version)
}

/// Ends whatever [`Keeper::keep`] does at the service's end.
async fn run(mut keeper: Keeper, mut ends: mpsc::UnboundedReceiver<oneshot::Sender<()>>) {
    let mut helper = None;
    let reply = tokio::select! {
        reply = ends.recv() => reply,
        () = keeper.keep(&mut helper) => None,
    };
    if let Some(mut helper) = helper {
        helper.close().await;
    }
    if let Some(reply) = reply {
        let _gone = reply.send(());
    }
}

/// Keeps a helper running.
struct Keeper {
    inbox: mpsc::UnboundedReceiver<Asked>,
    commands: watch::Receiver<Vec<String>>,
    restarted: watch::Sender<u64>,
    driver: watch::Sender<Option<String>>,
}

impl Keeper {
    /// Until there are no more requests.
    async fn keep(&mut self, helper: &mut Option<HelperChild>) {
        // The first helper is started for a request, and later ones at once.
        let mut first = None;
        let mut pause = PAUSE_MIN;
        let (mut was_ready, mut is_again) = (false, false);
        loop {
            if !was_ready && first.is_none() {
                first = self.inbox.recv().await;
                if first.is_none() {
                    return;
                }
            }
            let begun = Instant::now();
            let error = match self.start(helper).await {
                Ok(child) => {
                    if is_again {
                        self.restarted.send_modify(|restarts| *restarts += 1);
                    }
                    (was_ready, is_again) = (true, true);
                    let Some(how) = child.serve(first.take(), &mut self.inbox).await else { return };
                    let why = format!("the helper for hibernation ended: {how}; it is started again");
                    tracing::warn!("{why}");
                    child.fail_pending(&why);
                    *helper = None;
                    pause = if begun.elapsed() >= STEADY { PAUSE_MIN } else { pause };
                    sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                    continue;
                }
                Err(error) => error,
            };
            tracing::warn!("cannot use the helper for hibernation: {error}");
            if let Some(unusable) = helper.as_mut() {
                unusable.kill().await;
            }
            *helper = None;
            (was_ready, is_again) = (false, true);
            self.refuse_all(first.take(), &error).await;
        }
    }

    async fn start<'a>(
        &mut self,
        helper: &'a mut Option<HelperChild>,
    ) -> Result<&'a mut HelperChild, HelperError> {
        let words = self.commands.borrow_and_update().clone();
        let child = helper.insert(HelperChild::start(&words)?);
        let ready = child.ready().await?;
        tracing::info!(version = ready.version, "the helper for hibernation is ready");
        if ready.driver.is_some() {
            self.driver.send_replace(ready.driver);
        }
        Ok(child)
    }

    /// Refuses requests for a while, or until there is another command.
    async fn refuse_all(&mut self, first: Option<Asked>, error: &HelperError) {
        let refuse = |(_, reply): Asked| drop(reply.send(Err(error.clone())));
        first.into_iter().for_each(refuse);
        let until = Instant::now() + if error.is_impossible() { UNSUPPORTED_PAUSE } else { UNUSABLE_PAUSE };
        loop {
            tokio::select! {
                // What was asked for after another command came is for that one.
                biased;
                Ok(()) = self.commands.changed() => return,
                () = sleep_until(until) => return,
                asked = self.inbox.recv() => match asked {
                    Some(asked) => refuse(asked),
                    None => return,
                },
            }
        }
    }
}

/// In a process group of its own, so that Ctrl-C leaves it to the service, and a kill takes its children along.
struct HelperChild {
    program: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    is_ready: bool,
    pending: HashMap<u64, HelperReply>,
    next_id: u64,
}

/// What the helper says beside its answers, which is for people, becomes part of the service's log.
async fn log_lines(errors: ChildStderr) {
    let mut lines = BufReader::new(errors).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        tracing::warn!(line, "the helper for hibernation reports");
    }
}

impl HelperChild {
    fn start(words: &[String]) -> Result<Self, HelperError> {
        let (program, arguments) =
            words.split_first().ok_or(HelperError::no_helper("there is no command"))?;
        let mut command = Command::new(program);
        command.args(arguments).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let failed = |error| HelperError::no_helper(format!("cannot start `{program}`: {error}"));
        let mut child = command.spawn().map_err(failed)?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let output = output.ok_or(HelperError::no_helper("its output cannot be read"))?;
        if let Some(errors) = child.stderr.take() {
            tokio::spawn(log_lines(errors));
        }
        Ok(Self {
            program: program.clone(),
            child,
            input,
            lines: BufReader::new(output).lines(),
            is_ready: false,
            pending: HashMap::new(),
            next_id: 0,
        })
    }

    /// Its first line.
    async fn ready(&mut self) -> Result<Ready, HelperError> {
        let program = self.program.clone();
        let failed = |why: String| HelperError::no_helper(format!("`{program}` {why}"));
        let line = match timeout(READY_MAX, self.lines.next_line()).await {
            Ok(Ok(Some(line))) => line,
            Ok(Ok(None)) => {
                let how = self.end(END_MAX).await;
                return Err(failed(format!("ended before its first line, with {how}; see its errors above")));
            }
            Ok(Err(error)) => return Err(failed(format!("writes what cannot be read: {error}"))),
            Err(_) => return Err(failed(format!("wrote nothing in {} s", READY_MAX.as_secs()))),
        };
        match serde_json::from_str(&line) {
            Ok(Line { ready: Some(ready), .. }) => {
                self.is_ready = true;
                Ok(ready)
            }
            Ok(Line { unusable: Some(reason), kind, .. }) => Err(HelperError::unusable(reason, kind)),
            _ => Err(failed("is no helper: its first line is neither `ready` nor `unusable`".to_owned())),
        }
    }

    /// Until it ends, and how. `None` once there are no more requests.
    async fn serve(
        &mut self,
        first: Option<Asked>,
        inbox: &mut mpsc::UnboundedReceiver<Asked>,
    ) -> Option<String> {
        let mut asked = first;
        loop {
            if let Some((operation, reply)) = asked.take()
                && let Err(error) = self.send(operation, reply).await
            {
                self.end(END_MAX).await;
                return Some(error.to_string());
            }
            tokio::select! {
                line = self.lines.next_line() => match line {
                    Ok(Some(line)) => self.take_answer(&line),
                    Ok(None) => return Some(self.end(END_MAX).await),
                    Err(error) => {
                        self.kill().await;
                        return Some(error.to_string());
                    }
                },
                next = inbox.recv() => asked = Some(next?),
            }
        }
    }

    async fn send(&mut self, operation: Ask, reply: HelperReply) -> io::Result<()> {
        // A caller that gave up does not expect that it happens.
        if reply.is_closed() {
            return Ok(());
        }
        let id = self.next_id;
        self.next_id += 1;
        self.pending.insert(id, reply);
        let mut line = serde_json::to_vec(&Request { id, operation: &operation })?;
        line.push(b'\n');
        let closed = || io::Error::from(io::ErrorKind::BrokenPipe);
        let input = self.input.as_mut().ok_or_else(closed)?;
        input.write_all(&line).await?;
        input.flush().await
    }

    fn take_answer(&mut self, line: &str) {
        let answer: Result<Line, _> = serde_json::from_str(line);
        match answer {
            Ok(Line { id: Some(id), ok, error, .. }) => {
                // A caller that gave up has dropped its end.
                if let Some(reply) = self.pending.remove(&id) {
                    let _gone = reply.send(error.map_or(Ok(ok), Err));
                }
            }
            Ok(Line { recovered: Some(recovered), .. }) => {
                for one in &recovered {
                    tracing::warn!(process = %one, "the helper has recovered a process");
                }
            }
            _ => tracing::warn!(line, "ignored an unknown line of the helper for hibernation"),
        }
    }

    fn fail_pending(&mut self, why: &str) {
        for (_, reply) in self.pending.drain() {
            let _gone = reply.send(Err(HelperError::no_helper(why)));
        }
    }

    /// It finishes what is under way. Before its first line, nothing is.
    async fn close(&mut self) {
        let limit = if self.is_ready { END_MAX } else { Duration::ZERO };
        self.end(limit).await;
    }

    /// How it ended. One that lives on is killed, with its children.
    async fn end(&mut self, limit: Duration) -> String {
        drop(self.input.take());
        match timeout(limit, self.child.wait()).await {
            Ok(Ok(status)) => status.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => {
                self.kill().await;
                format!("it did not end within {} s, and was killed", limit.as_secs())
            }
        }
    }

    async fn kill(&mut self) {
        // Its number is that of its group, and still its own: it was not waited for.
        let Some(group) = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed())) else { return };
        let killed = kill_process_group(group, Signal::KILL).map_err(io::Error::from);
        let waited = timeout(KILL_MAX, self.child.wait()).await;
        if let Err(error) = killed {
            tracing::warn!(%error, "cannot kill the helper for hibernation");
        } else if waited.is_err() {
            tracing::warn!("killed the helper for hibernation, which has not ended yet");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_helper_has_its_journal_in_the_state_folder() {
        let own = |state: Option<&str>| command_of(&Hibernate::default(), state.map(Path::new)).join(" ");
        assert_eq!(own(None), "/proc/self/exe hibernate --serve");
        assert_eq!(own(Some("/srv")), "/proc/self/exe hibernate --serve --journal /srv/hibernate");
        let other = Hibernate { helper: vec!["mine".to_owned()], ..Hibernate::default() };
        assert_eq!(command_of(&other, Some(Path::new("/srv"))), ["mine"]);
    }
}
