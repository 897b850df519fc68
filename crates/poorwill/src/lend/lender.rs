//! An arena's line to the broker: made when it is needed, made again when it was lost, and a broker started where there is
//! none.
//!
//! Promise: no call takes longer than the client's timeout, the start of a broker, and what an ask waits. A broker that
//! was slow to fail is left alone for [`REST`].

use std::fmt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use poorwill_broker::{Ask, Client, ClientError, LentChunk};
use poorwill_core::lend::{AskedOf, Broker, BrokerError, GiveUp, Lent};

use super::lending::Lending;

/// How long a broker is left alone that has not answered, or could not be started.
const REST: Duration = Duration::from_secs(10);

/// How often a starting broker is looked for.
const LOOK: Duration = Duration::from_millis(5);

pub(super) struct Lender {
    lending: Lending,
    memory_name: String,
    link: Mutex<Link>,
    /// Asks the pool.
    give_up: OnceLock<GiveUp>,
}

impl fmt::Debug for Lender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lender")
            .field("lending", &self.lending)
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Link {
    client: Option<Arc<Client>>,
    /// Whether this client is asked for what is announced.
    is_asked: bool,
    /// The broker is left alone until then, for this reason.
    rests: Option<(Instant, BrokerError)>,
    started: Option<Started>,
}

#[derive(Debug)]
struct Started {
    broker: Child,
    at: Instant,
    /// It has answered, so its end is no failure to start.
    answered: bool,
}

impl Started {
    fn is_starting(&mut self, start_max: Duration) -> bool {
        // One that has ended is waited for here, so that nothing of it remains.
        let runs = matches!(self.broker.try_wait(), Ok(None));
        runs && !self.answered && self.at.elapsed() < start_max
    }
}

impl Lender {
    pub(super) fn new(lending: Lending, memory_name: String) -> Self {
        Self { lending, memory_name, link: Mutex::default(), give_up: OnceLock::new() }
    }

    /// Begins the start of a broker if there is none, and waits for nothing.
    pub(super) fn start_early(&self) {
        let mut link = self.link();
        // The first sleep says what failed.
        match self.lending.connect(&self.memory_name) {
            Ok(client) => link.client = Some(Arc::new(client)),
            Err(ClientError::NotThere { .. }) => drop(self.start(&mut link)),
            Err(_) => {}
        }
    }

    /// The broker, if it was reached before and is not lost.
    fn present(&self) -> Option<Arc<Client>> {
        self.link().client.clone().filter(|client| !client.is_lost())
    }

    /// The broker, reached anew if need be.
    fn reach(&self, may_start: bool) -> Result<Arc<Client>, BrokerError> {
        let mut link = self.link();
        if let Some(client) = link.client.as_ref().filter(|client| !client.is_lost()) {
            return Ok(Arc::clone(client));
        }
        if let Some((until, why)) = &link.rests
            && Instant::now() < *until
        {
            return Err(why.clone());
        }
        let client = self.reach_anew(&mut link, may_start)?;
        link.client = Some(Arc::clone(&client));
        link.is_asked = false;
        Ok(client)
    }

    fn reach_anew(&self, link: &mut Link, may_start: bool) -> Result<Arc<Client>, BrokerError> {
        loop {
            match self.lending.connect(&self.memory_name) {
                Ok(client) => {
                    link.started.iter_mut().for_each(|started| started.answered = true);
                    return Ok(Arc::new(client));
                }
                // That is known at once.
                Err(error @ ClientError::NotThere { .. }) if !may_start => return Err(refusal(&error)),
                Err(error @ ClientError::NotThere { .. }) => {
                    let timeout = self.lending.call_timeout();
                    let is_starting = link.started.as_mut().is_some_and(|one| one.is_starting(timeout));
                    if is_starting {
                        std::thread::sleep(LOOK);
                    } else if link.started.take_if(|started| !started.answered).is_some() {
                        let reason = format!("{error}; the broker that was started does not answer");
                        return Err(rest(link, true, BrokerError { reason }));
                    } else if self.lending.start.is_none() {
                        return Err(refusal(&error));
                    } else {
                        self.start(link).map_err(|error| rest(link, true, error))?;
                    }
                }
                Err(error) => return Err(rest(link, true, refusal(&error))),
            }
        }
    }

    fn start(&self, link: &mut Link) -> Result<(), BrokerError> {
        let Some((program, arguments)) = self.lending.start.as_deref().and_then(<[_]>::split_first) else {
            return Err(BrokerError { reason: "the command that starts a broker is empty".into() });
        };
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // Signals to this process's group are not for the broker, which serves others too.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let broker = command.spawn().map_err(|error| BrokerError {
            reason: format!("a broker cannot be started by `{}`: {error}", program.display()),
        })?;
        link.started = Some(Started { broker, at: Instant::now(), answered: false });
        Ok(())
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Broker for Lender {
    fn lend(&self, memory: Vec<Lent>) -> Result<(), BrokerError> {
        let chunks = memory.into_iter();
        let chunks = chunks
            .map(|Lent { id, bytes, is_dropped, descriptor }| LentChunk { id, bytes, is_dropped, descriptor })
            .collect();
        self.reach(true)?.lend(chunks).map_err(|error| self.note(&error))
    }

    fn take_back(&self, ids: &[u64]) -> Result<Vec<Lent>, BrokerError> {
        // A broker that was lost has lost what it had.
        let Some(client) = self.present() else { return Ok(Vec::new()) };
        let chunks = client.take_back(Some(ids)).map_err(|error| {
            // With the connection goes all that was lent: nothing may stay that its pool has forgotten.
            self.link().client = None;
            self.note(&error)
        });
        let chunks = chunks?.into_iter();
        Ok(chunks
            .map(|LentChunk { id, bytes, is_dropped, descriptor }| Lent { id, bytes, is_dropped, descriptor })
            .collect())
    }

    fn attach(&self, give_up: GiveUp) {
        // A pool has one broker, and calls this once.
        let _ = self.give_up.set(give_up);
    }

    fn announce(&self, bytes: u64) -> Result<(), BrokerError> {
        if bytes == 0 {
            // A broker that was lost asks no more.
            return self
                .present()
                .map_or(Ok(()), |client| client.announce(0).map_err(|error| self.note(&error)));
        }
        let client = self.reach(true)?;
        self.listen(&client).map_err(|error| self.note(&error))?;
        client.announce(bytes).map_err(|error| self.note(&error))
    }

    fn ask(&self, bytes: u64, of: AskedOf, wait_max: Duration) -> Result<u64, BrokerError> {
        let ask = Ask::freeing(bytes).waiting(wait_max);
        let ask = if of == AskedOf::Others { ask.of_others() } else { ask };
        let asked = self.reach(false)?.ask(&ask).map_err(|error| self.note(&error))?;
        Ok(asked.freed_bytes.saturating_add(asked.given_up_bytes))
    }
}

impl Lender {
    /// Has the broker ask for what is announced, if it does not yet.
    fn listen(&self, client: &Client) -> Result<(), ClientError> {
        let mut link = self.link();
        if let Some(give_up) = self.give_up.get().filter(|_| !link.is_asked) {
            let give_up = Arc::clone(give_up);
            client.on_give_up(move |bytes| give_up(bytes))?;
            link.is_asked = true;
        }
        Ok(())
    }

    /// A failed call. A broker that does not answer is left alone for a while.
    fn note(&self, error: &ClientError) -> BrokerError {
        let is_slow = matches!(error, ClientError::NoAnswer { .. });
        rest(&mut self.link(), is_slow, refusal(error))
    }
}

fn rest(link: &mut Link, rests: bool, error: BrokerError) -> BrokerError {
    if rests {
        link.rests = Some((Instant::now() + REST, error.clone()));
    }
    error
}

fn refusal(error: &ClientError) -> BrokerError {
    BrokerError { reason: error.to_string() }
}
