//! The helper's process: started at the first request, and again whenever it ends.
//!
//! Promises: a request is answered, or fails when the helper that got it ends. Between two helpers requests wait. The
//! helper's input closes with the service, so it does not outlive it.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::HibernationFuture;
use super::protocol::{Ask, HelperError, Line, Ready, Request};

/// For its first line: it loads the driver.
const READY_MAX: Duration = Duration::from_secs(60);
/// For what is under way when the service ends.
const END_MAX: Duration = Duration::from_secs(30);
/// Pauses between two helpers.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// After a helper that cannot be used.
const UNUSABLE_PAUSE: Duration = Duration::from_secs(30);
/// A helper that ran for this long ends the growth of pauses.
const STEADY: Duration = Duration::from_secs(60);

type HelperReply = oneshot::Sender<Result<Value, HelperError>>;

enum HelperMessage {
    Ask(Ask, HelperReply),
    End(oneshot::Sender<()>),
}

/// Asks a helper that it starts by itself.
#[derive(Debug)]
pub struct HelperProcess {
    messages: mpsc::UnboundedSender<HelperMessage>,
    command: Arc<RwLock<Vec<String>>>,
    /// How many helpers came after an earlier one, whether that could be used or not.
    restarts: watch::Receiver<u64>,
}

impl HelperProcess {
    /// With the helper's program and arguments; without any, this program's own, with this folder for its journal. Nothing
    /// runs yet.
    #[must_use]
    pub fn new(command: Vec<String>, journal: Option<PathBuf>) -> Self {
        let (messages, inbox) = mpsc::unbounded_channel();
        let (restarted, restarts) = watch::channel(0);
        let command = Arc::new(RwLock::new(command));
        tokio::spawn(run(inbox, Arc::clone(&command), journal, restarted));
        Self { messages, command, restarts }
    }

    /// The next helper has this command.
    pub(super) fn set_command(&self, command: Vec<String>) {
        *self.command.write().unwrap_or_else(PoisonError::into_inner) = command;
    }

    pub(super) async fn ask(&self, operation: Ask) -> Result<Value, HelperError> {
        let ended =
            || HelperError::no_helper("no helper for hibernation is asked any more: the service is ending");
        let (reply, answer) = oneshot::channel();
        self.messages.send(HelperMessage::Ask(operation, reply)).map_err(|_| ended())?;
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
        if self.messages.send(HelperMessage::End(reply)).is_ok() {
            let _ended = ended.await;
        }
    }
}

/// Starts a helper, and ends it. Returns its version.
///
/// # Errors
/// Why it cannot be used.
pub async fn check(command: &[String]) -> Result<String, String> {
    let own = own_command(None);
    let (mut helper, ready) = HelperChild::start(if command.is_empty() { &own } else { command }).await?;
    helper.close().await;
    Ok(ready.version)
}

struct HelperChild {
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    pending: HashMap<u64, HelperReply>,
    next_id: u64,
}

/// Why a helper is served no more.
enum HelperEnd {
    /// By itself, and how.
    Died(String),
    /// The service is ending.
    Closed(Option<oneshot::Sender<()>>),
}

async fn run(
    mut inbox: mpsc::UnboundedReceiver<HelperMessage>,
    command: Arc<RwLock<Vec<String>>>,
    journal: Option<PathBuf>,
    restarted: watch::Sender<u64>,
) {
    // The first helper is started for a request, and later ones at once.
    let mut first = None;
    let mut pause = PAUSE_MIN;
    let (mut was_ready, mut is_again) = (false, false);
    loop {
        if !was_ready && first.is_none() {
            match inbox.recv().await {
                Some(HelperMessage::Ask(operation, reply)) => first = Some((operation, reply)),
                Some(HelperMessage::End(reply)) => {
                    let _gone = reply.send(());
                    return;
                }
                None => return,
            }
        }
        let mut words = command.read().unwrap_or_else(PoisonError::into_inner).clone();
        if words.is_empty() {
            words = own_command(journal.as_deref());
        }
        let begun = Instant::now();
        match HelperChild::start(&words).await {
            Ok((mut helper, ready)) => {
                report(&ready);
                if is_again {
                    restarted.send_modify(|restarts| *restarts += 1);
                }
                (was_ready, is_again) = (true, true);
                match helper.serve(first.take(), &mut inbox).await {
                    HelperEnd::Died(how) => {
                        let why = format!("the helper for hibernation ended: {how}; it is started again");
                        tracing::warn!("{why}");
                        helper.fail_pending(&why);
                        pause = if begun.elapsed() >= STEADY { PAUSE_MIN } else { pause };
                        sleep(pause).await;
                        pause = (pause * 2).min(PAUSE_MAX);
                    }
                    HelperEnd::Closed(reply) => {
                        helper.close().await;
                        if let Some(reply) = reply {
                            let _gone = reply.send(());
                        }
                        return;
                    }
                }
            }
            Err(reason) => {
                tracing::warn!("the helper for hibernation cannot be used: {reason}");
                (was_ready, is_again) = (false, true);
                if refuse_all(first.take(), &reason, &mut inbox).await {
                    return;
                }
            }
        }
    }
}

fn report(ready: &Ready) {
    tracing::info!(version = ready.version, "the helper for hibernation is ready");
}

/// Refuses requests for a while. True if the service is ending.
async fn refuse_all(
    first: Option<(Ask, HelperReply)>,
    reason: &str,
    inbox: &mut mpsc::UnboundedReceiver<HelperMessage>,
) -> bool {
    let refuse = |reply: HelperReply| drop(reply.send(Err(HelperError::no_helper(reason))));
    if let Some((_, reply)) = first {
        refuse(reply);
    }
    let until = Instant::now() + UNUSABLE_PAUSE;
    loop {
        tokio::select! {
            message = inbox.recv() => match message {
                Some(HelperMessage::Ask(_, reply)) => refuse(reply),
                Some(HelperMessage::End(reply)) => {
                    let _gone = reply.send(());
                    return true;
                }
                None => return true,
            },
            () = sleep_until(until) => return false,
        }
    }
}

impl HelperChild {
    async fn start(words: &[String]) -> Result<(Self, Ready), String> {
        let (program, arguments) = words.split_first().ok_or("there is no command")?;
        let mut command = Command::new(program);
        // In a group of its own, so that Ctrl-C leaves it to the service.
        command.args(arguments).process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("cannot start `{program}`: {error}"))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let output = output.ok_or("its output cannot be read")?;
        let mut lines = BufReader::new(output).lines();
        let line = match timeout(READY_MAX, lines.next_line()).await {
            Ok(Ok(Some(line))) => line,
            Ok(Ok(None)) => {
                let status = child.wait().await;
                let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
                return Err(format!(
                    "`{program}` ended before its first line, with {how}; see its errors above"
                ));
            }
            Ok(Err(error)) => return Err(format!("what `{program}` writes cannot be read: {error}")),
            Err(_) => {
                kill(&mut child).await;
                return Err(format!("`{program}` wrote nothing in {} s", READY_MAX.as_secs()));
            }
        };
        let line: Result<Line, _> = serde_json::from_str(&line);
        let reason = match line {
            Ok(Line { ready: Some(ready), .. }) => {
                let helper = Self { child, input, lines, pending: HashMap::new(), next_id: 0 };
                return Ok((helper, ready));
            }
            Ok(Line { unusable: Some(reason), .. }) => reason,
            _ => format!("`{program}` is no helper: its first line is neither `ready` nor `unusable`"),
        };
        kill(&mut child).await;
        Err(reason)
    }

    async fn serve(
        &mut self,
        first: Option<(Ask, HelperReply)>,
        inbox: &mut mpsc::UnboundedReceiver<HelperMessage>,
    ) -> HelperEnd {
        if let Some((operation, reply)) = first
            && let Err(error) = self.send(operation, reply).await
        {
            return HelperEnd::Died(error.to_string());
        }
        loop {
            tokio::select! {
                line = self.lines.next_line() => match line {
                    Ok(Some(line)) => self.answered(&line),
                    Ok(None) => return HelperEnd::Died(self.how_it_ended().await),
                    Err(error) => return HelperEnd::Died(error.to_string()),
                },
                message = inbox.recv() => match message {
                    Some(HelperMessage::Ask(operation, reply)) => {
                        if let Err(error) = self.send(operation, reply).await {
                            return HelperEnd::Died(error.to_string());
                        }
                    }
                    Some(HelperMessage::End(reply)) => return HelperEnd::Closed(Some(reply)),
                    None => return HelperEnd::Closed(None),
                },
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

    fn answered(&mut self, line: &str) {
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
            _ => tracing::warn!(line, "a line of the helper for hibernation is not understood"),
        }
    }

    async fn how_it_ended(&mut self) -> String {
        match timeout(END_MAX, self.child.wait()).await {
            Ok(Ok(status)) => status.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it closed its output".to_owned(),
        }
    }

    fn fail_pending(&mut self, why: &str) {
        for (_, reply) in self.pending.drain() {
            let _gone = reply.send(Err(HelperError::no_helper(why)));
        }
    }

    /// It finishes what is under way.
    async fn close(&mut self) {
        drop(self.input.take());
        if timeout(END_MAX, self.child.wait()).await.is_err() {
            tracing::warn!("the helper for hibernation did not end in time, and is killed");
            kill(&mut self.child).await;
        }
    }
}

async fn kill(child: &mut Child) {
    if let Err(error) = child.kill().await {
        tracing::warn!(%error, "the helper for hibernation cannot be ended");
    }
}

/// This very program, also where another version has replaced its file.
fn own_command(journal: Option<&Path>) -> Vec<String> {
    let journal = journal.map(|folder| ["--journal".to_owned(), folder.display().to_string()]);
    let words = ["/proc/self/exe", "hibernate", "--serve"].map(str::to_owned);
    words.into_iter().chain(journal.into_iter().flatten()).collect()
}
