//! The connections to a broker, which begin at their first use and again after a failure.
//!
//! Promise: a broker that does not answer holds up one call, and then none for some seconds.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use poorwill::broker::{Ask, Client, ClientError, Hello};

use super::lenders::{LendError, Lender, Lenders, Lent, LentTotals};

/// How long a broker that has not answered is asked nothing.
const PAUSE: Duration = Duration::from_secs(5);

/// For owners of the only copy, which make a backup before they give it up.
const GIVE_UP_MAX: Duration = Duration::from_secs(5);

/// As what the service is known to the broker.
const NAME: &str = "rotation";

/// A broker at a path, which may come and go.
#[derive(Debug)]
pub struct BrokerLink {
    path: PathBuf,
    timeout: Duration,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    /// By the name of their memory: a client asks for one only.
    clients: BTreeMap<String, Arc<Client>>,
    silent_until: Option<Instant>,
}

impl BrokerLink {
    /// To the broker at this path. Nothing is sent yet.
    #[must_use]
    pub fn to(path: PathBuf, timeout: Duration) -> Self {
        Self { path, timeout, open: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection that has ended since its last use is replaced, so that another broker at the path is found at once.
    fn call<T>(
        &self,
        memory: &str,
        call: impl Fn(&Client) -> Result<T, ClientError>,
    ) -> Result<T, LendError> {
        let mut called = call(&*self.client(memory)?);
        if matches!(called, Err(ClientError::Lost { .. })) {
            called = call(&*self.client(memory)?);
        }
        called.map_err(|error| failed(&mut self.lock(), &error))
    }

    fn client(&self, memory: &str) -> Result<Arc<Client>, LendError> {
        let mut open = self.lock();
        if open.silent_until.is_some_and(|until| Instant::now() < until) {
            let path = self.path.display();
            return Err(LendError(format!("the broker at {path} has not answered; it is asked again soon")));
        }
        if let Some(client) = open.clients.get(memory).filter(|client| !client.is_lost()) {
            return Ok(Arc::clone(client));
        }
        let hello = Hello { device: memory.to_owned(), name: NAME.to_owned() };
        let client = Client::connect(&self.path, &hello, self.timeout)
            .map(Arc::new)
            .map_err(|error| failed(&mut open, &error))?;
        open.clients.insert(memory.to_owned(), Arc::clone(&client));
        Ok(client)
    }
}

fn failed(open: &mut Open, error: &ClientError) -> LendError {
    if matches!(error, ClientError::NoAnswer { .. }) {
        open.silent_until = Some(Instant::now() + PAUSE);
    }
    LendError(error.to_string())
}

impl Lenders for BrokerLink {
    fn lent(&self) -> Result<Lent, LendError> {
        // A status is of all memory, so any name does.
        let status = self.call(NAME, Client::status)?;
        let lenders = status.lenders.into_iter().map(|one| Lender {
            memory: one.device,
            pid: one.pid,
            reclaimable_bytes: one.lent_bytes.saturating_add(one.announced_bytes),
        });
        let totals = LentTotals {
            lent_bytes: status.totals.lent_bytes,
            taken_bytes: status.totals.taken_bytes,
            brought_back_bytes: status.totals.brought_back_bytes,
            given_up_bytes: status.totals.given_up_bytes,
        };
        Ok(Lent { lenders: lenders.collect(), totals })
    }

    fn free(&self, memory: &str, bytes: u64, spared: &[u32]) -> Result<u64, LendError> {
        let ask = Ask::freeing(bytes).sparing(spared.to_vec()).waiting(GIVE_UP_MAX);
        let asked = self.call(memory, |client| client.ask(&ask))?;
        Ok(asked.freed_bytes.saturating_add(asked.given_up_bytes))
    }
}
