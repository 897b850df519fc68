//! Which member is asked, and for how long.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::time::{sleep, timeout};

use super::error::EtcdError;
use super::http::{Call, Http, Lines, unreachable};

/// How long things may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connecting to a member.
    pub connect: Duration,
    /// A call; of a transaction, the call of each member.
    pub call: Duration,
    /// How long a member may be silent until another one is asked as well.
    pub hedge: Duration,
}

impl Limits {
    /// Short enough that a lease of so long is renewed in time by another member while one is silent.
    #[must_use]
    pub fn for_lease(ttl: Duration) -> Self {
        let usual = Self::default();
        let call = (ttl * 3 / 4).min(usual.call);
        Self { connect: call.min(usual.connect), call, hedge: (ttl / 8).min(usual.hedge) }
    }
}

impl Default for Limits {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self { connect: ms(2000), call: ms(3000), hedge: ms(750) }
    }
}

pub(super) struct Members {
    endpoints: Vec<String>,
    /// The member that answered last.
    at: AtomicUsize,
    limits: Limits,
    http: Http,
}

type Asking<'a, T> = Pin<Box<dyn Future<Output = (usize, Result<T, EtcdError>)> + Send + 'a>>;

impl Members {
    pub(super) fn new(endpoints: Vec<String>, limits: Limits, http: Http) -> Self {
        Self { endpoints, at: AtomicUsize::new(0), limits, http }
    }

    pub(super) fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// Begins with the next member from now on.
    pub(super) fn avoid(&self) {
        self.at.fetch_add(1, Ordering::Relaxed);
    }

    /// For a call that may be carried out twice: while a member is silent, others are asked as well. The first good answer
    /// counts.
    pub(super) async fn hedge<T: DeserializeOwned + Send>(&self, call: &Call) -> Result<T, EtcdError> {
        let mut turns = Turns::of(self, call.path());
        let mut asking: Vec<Asking<'_, T>> = Vec::new();
        let over = sleep(self.limits.call);
        tokio::pin!(over);
        loop {
            match turns.next() {
                Some((turn, endpoint)) => {
                    asking.push(Box::pin(async move { (turn, self.http.answer(endpoint, call).await) }));
                }
                None if asking.is_empty() => return Err(turns.into_error()),
                None => {}
            }
            tokio::select! {
                biased;
                (turn, answered) = first_done(&mut asking) => {
                    if let Some(done) = turns.judged(turn, answered) {
                        return done;
                    }
                }
                () = sleep(self.limits.hedge), if turns.has_next() => {}
                () = &mut over => {
                    turns.end_all();
                    return Err(turns.into_error());
                }
            }
        }
    }

    /// For a call that must not overtake a later one: only one member is asked at a time.
    pub(super) async fn ask_in_turn<T: DeserializeOwned>(&self, call: &Call) -> Result<T, EtcdError> {
        self.ask_each(call.path(), |endpoint| self.http.answer(endpoint, call)).await
    }

    /// A stream, of the first member that opens it.
    pub(super) async fn stream(&self, call: &Call) -> Result<Lines, EtcdError> {
        self.ask_each(call.path(), |endpoint| self.http.lines(endpoint, call)).await
    }

    async fn ask_each<'a, T, A>(
        &'a self,
        path: &'static str,
        ask: impl Fn(&'a str) -> A + Send,
    ) -> Result<T, EtcdError>
    where
        A: Future<Output = Result<T, EtcdError>> + Send,
    {
        let mut turns = Turns::of(self, path);
        while let Some((turn, endpoint)) = turns.next() {
            let answered = timeout(self.limits.call, ask(endpoint)).await;
            let answered = answered.unwrap_or_else(|_| Err(turns.silence(turn)));
            if let Some(done) = turns.judged(turn, answered) {
                return done;
            }
        }
        Err(turns.into_error())
    }
}

/// The first one that is done. It is not asked any more.
async fn first_done<T>(asking: &mut Vec<Asking<'_, T>>) -> (usize, Result<T, EtcdError>) {
    poll_fn(|context| {
        for at in 0..asking.len() {
            if let Poll::Ready(done) = asking[at].as_mut().poll(context) {
                drop(asking.swap_remove(at));
                return Poll::Ready(done);
            }
        }
        Poll::Pending
    })
    .await
}

/// The members in turn, from the one that answered last on.
struct Turns<'a> {
    members: &'a Members,
    path: &'static str,
    first: usize,
    asked: usize,
    /// Why each has failed.
    failed: BTreeMap<usize, Vec<String>>,
}

impl<'a> Turns<'a> {
    fn of(members: &'a Members, path: &'static str) -> Self {
        let first = members.at.load(Ordering::Relaxed);
        Self { members, path, first, asked: 0, failed: BTreeMap::new() }
    }

    fn has_next(&self) -> bool {
        self.asked < self.members.endpoints.len()
    }

    fn next(&mut self) -> Option<(usize, &'a str)> {
        let turn = self.asked;
        self.has_next().then(|| {
            self.asked += 1;
            (turn, self.endpoint(turn))
        })
    }

    fn endpoint(&self, turn: usize) -> &'a str {
        let endpoints = &self.members.endpoints;
        &endpoints[self.first.wrapping_add(turn) % endpoints.len()]
    }

    /// What the call comes to, unless another member has to be asked.
    fn judged<T>(&mut self, turn: usize, answered: Result<T, EtcdError>) -> Option<Result<T, EtcdError>> {
        match answered {
            Err(EtcdError::Unreachable { tried, .. }) => drop(self.failed.insert(turn, tried)),
            Err(error) if error.is_of_member() => drop(self.failed.insert(turn, vec![error.to_string()])),
            done => {
                if turn > 0 {
                    self.members.at.store(self.first.wrapping_add(turn), Ordering::Relaxed);
                }
                return Some(done);
            }
        }
        None
    }

    fn silence(&self, turn: usize) -> EtcdError {
        let (endpoint, call) = (self.endpoint(turn), self.members.limits.call);
        unreachable(self.path, format!("{endpoint} is silent for {call:?}"))
    }

    /// No more is waited for.
    fn end_all(&mut self) {
        for turn in (0..self.asked).filter(|turn| !self.failed.contains_key(turn)).collect::<Vec<_>>() {
            let silence = self.silence(turn);
            let _never_done = self.judged::<()>(turn, Err(silence));
        }
    }

    fn into_error(self) -> EtcdError {
        EtcdError::Unreachable { path: self.path, tried: self.failed.into_values().flatten().collect() }
    }
}
