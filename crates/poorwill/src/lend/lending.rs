//! Which broker: where it is, how it is started, and what it has.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use poorwill_broker::{Ask, BrokerStatus, Client, ClientError, Hello};

/// Through which broker an arena lends.
///
/// ```
/// use poorwill::lend::Lending;
/// use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, WakeRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let lending = Lending::default().at("/run/no/broker.sock");
/// let arena = Arena::open(Config::on("host:64MiB".parse()?).lending_by(lending))?;
/// let block = arena.alloc(&AllocRequest::new(8 << 20, Tag::weights()))?;
/// let sleep = arena.sleep(&SleepRequest::all(Level::One).lending())?;
/// assert!(sleep.lend_refused.is_some()); // There is no broker, so the memory is released.
/// arena.wake(&WakeRequest::all())?;
/// # arena.free(block.id)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lending {
    /// The broker's socket; [`default_path`](crate::broker::default_path) by default.
    pub socket: Option<PathBuf>,
    /// A command that runs a broker at the socket, for when there is none. By default none is started.
    pub start: Option<Vec<OsString>>,
    /// This process's name for people.
    pub name: Option<String>,
    /// How long a call, or the start of a broker, may take; 1 s by default.
    pub timeout: Option<Duration>,
}

impl Lending {
    /// Sets [`Self::socket`].
    #[must_use]
    pub fn at(mut self, socket: impl Into<PathBuf>) -> Self {
        self.socket = Some(socket.into());
        self
    }

    /// Sets [`Self::start`].
    #[must_use]
    pub fn starting(mut self, command: Vec<OsString>) -> Self {
        self.start = Some(command);
        self
    }

    /// Sets [`Self::name`].
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets [`Self::timeout`].
    #[must_use]
    pub fn within(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The broker's socket.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(poorwill_broker::default_path)
    }

    /// What is lent on a device, by its [`memory_name`](crate::DeviceInfo::memory_name), in bytes. 0 without a broker.
    ///
    /// # Errors
    /// There is a broker, and it does not answer.
    pub fn reclaimable_bytes(&self, memory_name: &str) -> Result<u64, ClientError> {
        Ok(self.status()?.map_or(0, |status| status.reclaimable_bytes(memory_name)))
    }

    /// What the broker has, of all devices; `None` without a broker.
    ///
    /// # Errors
    /// There is a broker, and it does not answer.
    pub fn status(&self) -> Result<Option<BrokerStatus>, ClientError> {
        self.connect_if_there("none")?.map(|client| client.status()).transpose()
    }

    /// Has so much of what is lent on a device given up, `u64::MAX` for all; of `spared` processes nothing. Returns the
    /// bytes, which may be a little more: 0 without a broker. Owners that have to make backups first get `wait_max`.
    ///
    /// # Errors
    /// There is a broker, and it does not answer.
    pub fn free(
        &self,
        memory_name: &str,
        bytes: u64,
        spared: Vec<u32>,
        wait_max: Duration,
    ) -> Result<u64, ClientError> {
        let Some(client) = self.connect_if_there(memory_name)? else { return Ok(0) };
        let asked = client.ask(&Ask::freeing(bytes).sparing(spared).waiting(wait_max))?;
        Ok(asked.freed_bytes.saturating_add(asked.given_up_bytes))
    }

    pub(crate) fn call_timeout(&self) -> Duration {
        self.timeout.unwrap_or(Client::TIMEOUT)
    }

    pub(super) fn connect(&self, memory_name: &str) -> Result<Client, ClientError> {
        let name = self.name.clone().unwrap_or_else(|| "poorwill".into());
        Client::connect(&self.path(), &Hello { device: memory_name.into(), name }, self.call_timeout())
    }

    fn connect_if_there(&self, memory_name: &str) -> Result<Option<Client>, ClientError> {
        match self.connect(memory_name) {
            Ok(client) => Ok(Some(client)),
            Err(ClientError::NotThere { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
