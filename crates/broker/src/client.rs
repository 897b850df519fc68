//! A process's connection to the broker of its user: it lends, takes back, announces and asks.
//!
//! Each call ends within its timeout. After a failure of the connection the client is lost for good, with what it lent.
//! Every later call says so at once, and the caller goes on without a broker.

mod error;
mod events;
mod line;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use error::ClientError;
use events::Events;
use line::{Line, LineError};

use crate::protocol::{
    Answer, Ask, Asked, BrokerStatus, Request, SPARED_MAX, Spared, VERSION, WITHIN_MS_MAX,
};

/// Longer timeouts are cut to it.
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

/// What a client says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The device of all that it lends and asks for: any word that is the same in all processes, as a UUID.
    pub device: String,
    /// Its name for people.
    pub name: String,
}

/// Memory that is lent, or comes back.
#[derive(Debug)]
pub struct LentChunk {
    /// The lender's own number of it.
    pub id: u64,
    /// How much memory it is.
    pub bytes: u64,
    /// What it holds was dropped: losing it costs the lender least, so it goes first.
    pub is_dropped: bool,
    /// What keeps it on the device.
    pub descriptor: OwnedFd,
}

/// A connection to a broker. Threads take turns; a forked child cannot use it.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    timeout: Duration,
    pid: u32,
    id: u64,
    link: Mutex<Link>,
    freed: Condvar,
    events: Mutex<Option<Events>>,
}

#[derive(Debug)]
enum Link {
    Free(Line),
    InUse,
    Lost,
}

impl Client {
    /// What calls usually wait at most.
    pub const TIMEOUT: Duration = Duration::from_secs(1);

    /// Connects to the broker at a path. Each call waits `timeout` at most, and never more than a day.
    ///
    /// # Errors
    /// If there is no broker of this user and this version.
    pub fn connect(path: &Path, hello: &Hello, timeout: Duration) -> Result<Self, ClientError> {
        let request =
            Request::Hello { version: VERSION, device: hello.device.clone(), name: hello.name.clone() };
        let timeout = timeout.min(TIMEOUT_MAX);
        let (line, id) = Line::open(path, &request, timeout)?;
        Ok(Self {
            path: path.to_owned(),
            timeout,
            pid: std::process::id(),
            id,
            link: Mutex::new(Link::Free(line)),
            freed: Condvar::new(),
            events: Mutex::new(None),
        })
    }

    /// Adds to what this client lends, all or nothing. The descriptors are closed here in either case.
    ///
    /// # Errors
    /// If a chunk has no bytes or an id that is lent already, or the broker is lost.
    pub fn lend(&self, chunks: Vec<LentChunk>) -> Result<(), ClientError> {
        let line = |chunk: LentChunk| ((chunk.id, chunk.bytes, chunk.is_dropped), chunk.descriptor);
        let (list, descriptors) = chunks.into_iter().map(line).unzip();
        match self.call("lend", &Request::Lend { chunks: list }, descriptors, Duration::ZERO)? {
            (Answer::Done, _) => Ok(()),
            _ => Err(self.strange("lend")),
        }
    }

    /// What is still there of these chunks, or of all that this client lent. It is lent no more.
    ///
    /// # Errors
    /// If the broker is lost, and with it all that was lent.
    pub fn take_back(&self, ids: Option<&[u64]>) -> Result<Vec<LentChunk>, ClientError> {
        let request = Request::TakeBack { ids: ids.map(<[u64]>::to_vec) };
        match self.call("take_back", &request, Vec::new(), Duration::ZERO)? {
            (Answer::Chunks { chunks }, descriptors) if chunks.len() == descriptors.len() => {
                let chunk =
                    |((id, bytes, is_dropped), descriptor)| LentChunk { id, bytes, is_dropped, descriptor };
                Ok(chunks.into_iter().zip(descriptors).map(chunk).collect())
            }
            _ => Err(self.strange("take_back")),
        }
    }

    /// Says how much this client could give up besides, if [`Client::on_give_up`] is called. It replaces what was said
    /// before; what others ask for is taken off it.
    ///
    /// # Errors
    /// If the broker is lost.
    pub fn announce(&self, bytes: u64) -> Result<(), ClientError> {
        match self.call("announce", &Request::Announce { bytes }, Vec::new(), Duration::ZERO)? {
            (Answer::Done, _) => Ok(()),
            _ => Err(self.strange("announce")),
        }
    }

    /// Asks for memory on this client's device. It waits for owners as long as the ask says, besides the timeout.
    ///
    /// # Errors
    /// If the broker is lost. That there is too little memory is no error.
    pub fn ask(&self, ask: &Ask) -> Result<Asked, ClientError> {
        let within_ms = u64::try_from(ask.within.as_millis()).unwrap_or(u64::MAX);
        if ask.spared.len() > SPARED_MAX || within_ms > WITHIN_MS_MAX {
            let why = format!("an ask spares over {SPARED_MAX} processes or waits over {WITHIN_MS_MAX} ms");
            return Err(ClientError::BadRequest { path: self.path.clone(), request: "ask", why });
        }
        let request = Request::Ask {
            bytes: ask.bytes,
            spared: Spared { processes: ask.spared.clone(), asker: ask.spares_asker },
            within_ms,
        };
        match self.call("ask", &request, Vec::new(), ask.within)? {
            (Answer::Asked(asked), _) => Ok(asked),
            _ => Err(self.strange("ask")),
        }
    }

    /// What the broker has, of all devices.
    ///
    /// # Errors
    /// If the broker is lost.
    pub fn status(&self) -> Result<BrokerStatus, ClientError> {
        match self.call("status", &Request::Status, Vec::new(), Duration::ZERO)? {
            (Answer::Status { status }, _) => Ok(status),
            _ => Err(self.strange("status")),
        }
    }

    /// From now on this client is asked for what it announces. `give_up` gets the bytes that are wanted, and returns how
    /// many it gave up. If the broker is lost, it gets `u64::MAX`: others can ask no more. It runs on a thread of its own,
    /// which ends with the client, after a call that is under way.
    ///
    /// # Errors
    /// If it was called before, or the broker is lost.
    pub fn on_give_up(&self, give_up: impl Fn(u64) -> u64 + Send + 'static) -> Result<(), ClientError> {
        self.check_process()?;
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.is_some() {
            let why = "this client has a callback already".to_owned();
            return Err(ClientError::BadRequest { path: self.path.clone(), request: "on_give_up", why });
        }
        let request = Request::Events { version: VERSION, client: self.id };
        let (line, _) = Line::open(&self.path, &request, self.timeout)?;
        *events = Some(
            Events::start(line, self.timeout, give_up)
                .map_err(|source| ClientError::NoThread { path: self.path.clone(), source })?,
        );
        Ok(())
    }

    /// Whether the connection has failed.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(*self.link(), Link::Lost)
    }

    /// Sends a request and reads its answer, which may take `extra` longer than the timeout.
    fn call(
        &self,
        request: &'static str,
        message: &Request,
        descriptors: Vec<OwnedFd>,
        extra: Duration,
    ) -> Result<(Answer, Vec<OwnedFd>), ClientError> {
        self.check_process()?;
        let mut line = self.take_line(request)?;
        let within = self.timeout + extra;
        let result = line.exchange(message, descriptors, Instant::now() + within);
        let is_lost = !matches!(result, Ok(_) | Err(LineError::Unsent(_)));
        *self.link() = if is_lost { Link::Lost } else { Link::Free(line) };
        self.freed.notify_all();
        match result {
            Ok((Answer::Bad { why }, _)) => {
                Err(ClientError::BadRequest { path: self.path.clone(), request, why })
            }
            Ok(answer) => Ok(answer),
            Err(error) => Err(error.into_client_error(&self.path, request, within)),
        }
    }

    /// The connection, once no other thread uses it.
    fn take_line(&self, request: &'static str) -> Result<Line, ClientError> {
        let (mut link, _) = self
            .freed
            .wait_timeout_while(self.link(), self.timeout, |link| matches!(link, Link::InUse))
            .unwrap_or_else(PoisonError::into_inner);
        let path = self.path.clone();
        match std::mem::replace(&mut *link, Link::InUse) {
            Link::Free(line) => Ok(line),
            Link::InUse => Err(ClientError::Busy { path, request, within_ms: self.timeout.as_millis() }),
            Link::Lost => {
                *link = Link::Lost;
                Err(ClientError::Lost { path, why: "the connection failed before".into() })
            }
        }
    }

    /// An answer to another request, or with other descriptors: what comes next cannot be trusted.
    fn strange(&self, request: &'static str) -> ClientError {
        *self.link() = Link::Lost;
        let why =
            format!("the answer to `{request}` does not fit, or descriptors of it are lacking (`ulimit -n`)");
        ClientError::Lost { path: self.path.clone(), why }
    }

    fn check_process(&self) -> Result<(), ClientError> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(ClientError::Forked { path: self.path.clone(), pid: self.pid })
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A forked child has no such thread, and must not end its parent's.
        let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(events) = events.filter(|_| self.pid == std::process::id()) {
            events.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Broker, BrokerOptions, BrokerStop};

    #[test]
    fn a_forked_child_gets_an_error_and_leaves_its_parent_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let broker = Broker::bind(&path, BrokerOptions::default()).unwrap();
        let stop = BrokerStop::new().unwrap();
        std::thread::scope(|scope| {
            let run = scope.spawn(|| broker.run(&stop));
            let hello = Hello { device: "GPU".into(), name: "parent".into() };
            let mut client = Client::connect(&path, &hello, Duration::from_secs(60)).unwrap();
            let parent = client.pid;
            client.pid = parent + 1;
            for error in [client.status().unwrap_err(), client.on_give_up(|bytes| bytes).unwrap_err()] {
                assert!(matches!(error, ClientError::Forked { .. }), "{error}");
            }
            client.pid = parent;
            assert!(client.status().is_ok());
            stop.stop();
            run.join().unwrap().unwrap();
        });
    }
}
