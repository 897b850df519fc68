//! The body of an answer: own bytes, an engine's bytes, or keep-alive comments until the engine's bytes come.
//!
//! The client's connection polls it, as fast as the client reads. Dropping it cancels the request to the engine. A
//! client that reads nothing does not poll it, so the connection holds the token that ends the answer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::account::{Account, End};
use super::api_error::{ApiError, Dialect};
use super::connection::Connection;
use super::engines::EngineBody;
use super::stored::IdReader;
use super::trial::OnTrial;
use super::tunnel::Opening;
use super::usage::UsageReader;
use crate::backend::{Admission, Backend, Route, Trial};

const COMMENT: &[u8] = b": waiting\n\n";

/// The connection has to be broken off.
#[derive(Debug, thiserror::Error)]
#[error("the answer broke off")]
pub(super) struct Broken;

/// Completes after the client has disconnected.
pub(super) type Gone = Pin<Box<dyn Future<Output = ()> + Send>>;
/// Resolves to an engine's events, or to a final error event.
pub(super) type Upcoming = Pin<Box<dyn Future<Output = Result<Box<Forwarded>, Ending>> + Send>>;

/// A stream that ended before it began.
#[derive(Debug)]
pub(super) struct Ending {
    pub(super) event: Bytes,
    pub(super) status: http::StatusCode,
}

pub(super) struct AnswerBody {
    flow: Flow,
    account: Account,
    connection: Arc<Connection>,
    gone: Gone,
    /// By an operator.
    cancelled: Pin<Box<WaitForCancellationFutureOwned>>,
}

pub(super) enum Flow {
    /// Own bytes, until they are sent.
    Whole(Option<Bytes>),
    Forwarded(Box<Forwarded>),
    Waiting(Waiting),
    /// A WebSocket, which leaves HTTP and has no body.
    Upgraded(Box<Opening>),
    /// An error event was sent. The answer breaks off after this many flushes of the connection.
    Breaking {
        flushes: u64,
    },
}

pub(super) struct Forwarded {
    pub(super) upstream: EngineBody,
    pub(super) aborted: Pin<Box<WaitForCancellationFutureOwned>>,
    pub(super) admission: Admission,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) route: Arc<Route>,
    /// Of errors.
    pub(super) dialect: Dialect,
    /// The end of the stream so far, if an error event can be appended.
    pub(super) events: Option<Tail>,
    pub(super) usage: Option<UsageReader>,
    /// For an answer that the engine stores.
    pub(super) stored: Option<IdReader>,
    /// Whether only closing the connection marks the end of the answer.
    pub(super) is_open: bool,
    /// What its model's canaries say.
    pub(super) on_trial: Option<OnTrial>,
    /// What waits for them: a last frame, or the end.
    pub(super) held: Option<Option<Frame<Bytes>>>,
    /// Comments while it is held back.
    pub(super) comments: Option<Comments>,
    /// Whether its last frame is one of them.
    pub(super) says_comment: bool,
}

/// A client that waits for its stream.
pub(super) struct Waiting {
    upcoming: Upcoming,
    /// Of errors.
    dialect: Dialect,
    every: Duration,
    next: Pin<Box<Sleep>>,
}

/// The last bytes of an event stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tail([u8; 4]);

impl Tail {
    pub(super) fn new() -> Self {
        Self(*b"\n\n\n\n")
    }

    fn push(&mut self, data: &[u8]) {
        let Self(tail) = self;
        let last = &data[data.len().saturating_sub(tail.len())..];
        let kept = tail.len() - last.len();
        tail.copy_within(last.len().., 0);
        tail[kept..].copy_from_slice(last);
    }

    fn is_amid_event(self) -> bool {
        !(self.0.ends_with(b"\n\n") || self.0.ends_with(b"\r\n\r\n") || self.0.ends_with(b"\r\r"))
    }
}

/// Comments in a stream of which nothing comes.
pub(super) struct Comments {
    every: Duration,
    next: Option<Pin<Box<Sleep>>>,
}

impl Comments {
    pub(super) fn new(every: Duration) -> Self {
        Self { every, next: None }
    }

    fn poll_due(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let every = self.every;
        let next = self.next.get_or_insert_with(|| Box::pin(tokio::time::sleep(every)));
        ready!(next.as_mut().poll(cx));
        self.next = None;
        Poll::Ready(())
    }
}

impl Waiting {
    pub(super) fn new(upcoming: Upcoming, dialect: Dialect, every: Duration) -> Self {
        // The first comment is sent at once.
        Self { upcoming, dialect, every, next: Box::pin(tokio::time::sleep_until(Instant::now())) }
    }
}

impl AnswerBody {
    pub(super) fn new(flow: Flow, account: Account, connection: Arc<Connection>, gone: Gone) -> Self {
        let cancelled = Box::pin(account.cancelled().clone().cancelled_owned());
        let mut answer = Self { flow, account, connection, gone, cancelled };
        answer.note_endings();
        if answer.is_end_stream() {
            // hyper does not poll an empty body.
            answer.account.end = End::Whole;
        }
        answer
    }

    /// What ends the answer although its client reads nothing.
    fn note_endings(&self) {
        let cancelled = self.account.cancelled().clone();
        match &self.flow {
            Flow::Forwarded(forwarded) => {
                self.connection.ends_with(vec![forwarded.admission.aborted.clone(), cancelled]);
            }
            Flow::Waiting(_) => self.connection.ends_with(vec![cancelled]),
            Flow::Whole(_) | Flow::Upgraded(_) | Flow::Breaking { .. } => {}
        }
    }

    fn poll_flow(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let is_cancelled = self.cancelled.as_mut().poll(cx).is_ready();
        loop {
            match &mut self.flow {
                Flow::Whole(bytes) => {
                    let Some(bytes) = bytes.take() else { return Poll::Ready(None) };
                    if bytes.is_empty() {
                        return Poll::Ready(None);
                    }
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Flow::Forwarded(forwarded) => {
                    let error = match ready!(poll_upstream(forwarded, is_cancelled, cx)) {
                        Ok(frame) => return Poll::Ready(frame.map(Ok)),
                        Err(error) => error,
                    };
                    self.account.end = End::Broken;
                    forwarded.count(&mut self.account);
                    let Some(tail) = forwarded.events else {
                        if forwarded.is_open {
                            self.connection.cut();
                        }
                        return Poll::Ready(Some(Err(Broken)));
                    };
                    let event = error.event(forwarded.dialect, tail.is_amid_event());
                    self.flow = Flow::Breaking { flushes: self.connection.flushes() };
                    return Poll::Ready(Some(Ok(Frame::data(event))));
                }
                Flow::Waiting(waiting) if is_cancelled => {
                    let error = ApiError::cancelled();
                    self.account.status = Some(error.status);
                    // This drops what it waits for.
                    self.flow = Flow::Whole(Some(error.event(waiting.dialect, false)));
                }
                Flow::Waiting(waiting) => match waiting.upcoming.as_mut().poll(cx) {
                    Poll::Ready(Ok(forwarded)) => {
                        self.flow = Flow::Forwarded(forwarded);
                        self.note_endings();
                    }
                    Poll::Ready(Err(ending)) => {
                        self.account.status = Some(ending.status);
                        self.flow = Flow::Whole(Some(ending.event));
                    }
                    Poll::Pending => {
                        ready!(waiting.next.as_mut().poll(cx));
                        waiting.next.as_mut().reset(Instant::now() + waiting.every);
                        return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))));
                    }
                },
                Flow::Upgraded(_) => return Poll::Ready(None),
                Flow::Breaking { flushes } => {
                    ready!(self.connection.poll_flushed(cx, *flushes));
                    return Poll::Ready(Some(Err(Broken)));
                }
            }
        }
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        self.connection.ends_with(Vec::new());
        if let Flow::Forwarded(forwarded) = &self.flow {
            forwarded.count(&mut self.account);
        }
        self.connection.slot().answered();
        if self.account.end == End::Left && self.connection.is_cut() {
            self.account.end = End::Broken;
        }
    }
}

impl Forwarded {
    /// Counts the tokens of what has come so far.
    fn count(&self, account: &mut Account) {
        account.tokens = self.usage.as_ref().map(UsageReader::tokens).unwrap_or_default();
    }
}

/// Whether an answer goes on, as far as its model's canaries say.
fn poll_trial(forwarded: &mut Forwarded, cx: &mut Context<'_>) -> Poll<Result<(), ApiError>> {
    let Some(on_trial) = &mut forwarded.on_trial else { return Poll::Ready(Ok(())) };
    let name = &forwarded.route.name;
    match on_trial.poll(cx) {
        Trial::Right => {}
        Trial::Wrong => return Poll::Ready(Err(ApiError::untrue(name))),
        Trial::Open | Trial::Begun if on_trial.is_over() && !forwarded.admission.aborted.is_cancelled() => {
            return Poll::Ready(Err(ApiError::untrue(name)));
        }
        Trial::Begun if forwarded.held.is_none() => {}
        Trial::Open | Trial::Begun => {
            ready!(forwarded.aborted.as_mut().poll(cx));
            return Poll::Ready(Err(ApiError::aborted(name)));
        }
    }
    Poll::Ready(Ok(()))
}

/// A comment for a client whose stream is held back.
fn poll_comment(forwarded: &mut Forwarded, cx: &mut Context<'_>) -> Poll<Frame<Bytes>> {
    let is_between = forwarded.events.is_some_and(|tail| !tail.is_amid_event());
    let Some(comments) = forwarded.comments.as_mut().filter(|_| is_between) else { return Poll::Pending };
    ready!(comments.poll_due(cx));
    forwarded.says_comment = true;
    Poll::Ready(Frame::data(Bytes::from_static(COMMENT)))
}

/// The client gets this.
fn hand_out(forwarded: &mut Forwarded, frame: &Frame<Bytes>) {
    forwarded.says_comment = false;
    if let Some(data) = frame.data_ref() {
        forwarded.events.iter_mut().for_each(|tail| tail.push(data));
    }
}

/// `None` after the last frame.
fn poll_upstream(
    forwarded: &mut Forwarded,
    is_cancelled: bool,
    cx: &mut Context<'_>,
) -> Poll<Result<Option<Frame<Bytes>>, ApiError>> {
    if is_cancelled {
        return Poll::Ready(Err(ApiError::cancelled()));
    }
    match poll_trial(forwarded, cx) {
        Poll::Ready(Ok(())) => {}
        Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
        Poll::Pending => return poll_comment(forwarded, cx).map(|comment| Ok(Some(comment))),
    }
    if let Some(held) = forwarded.held.take() {
        held.iter().for_each(|frame| hand_out(forwarded, frame));
        return Poll::Ready(Ok(held));
    }
    // First, so that an engine that never pauses is ended.
    if forwarded.admission.aborted.is_cancelled() {
        return Poll::Ready(Err(ApiError::aborted(&forwarded.route.name)));
    }
    match Pin::new(&mut forwarded.upstream).poll_frame(cx) {
        Poll::Ready(Some(Ok(frame))) => {
            forwarded.admission.answered.add();
            forwarded.comments.iter_mut().for_each(|comments| comments.next = None);
            if let Some(data) = frame.data_ref() {
                forwarded.usage.iter_mut().for_each(|usage| usage.push(data));
                forwarded.stored.iter_mut().for_each(|stored| stored.push(data));
            }
            let data = frame.data_ref();
            if forwarded
                .on_trial
                .as_mut()
                .is_some_and(|on_trial| data.is_some_and(|data| on_trial.is_last(data)))
            {
                forwarded.held = Some(Some(frame));
                return poll_upstream(forwarded, is_cancelled, cx);
            }
            hand_out(forwarded, &frame);
            Poll::Ready(Ok(Some(frame)))
        }
        Poll::Ready(None) if forwarded.on_trial.is_some() => {
            forwarded.held = Some(None);
            poll_upstream(forwarded, is_cancelled, cx)
        }
        Poll::Ready(None) => Poll::Ready(Ok(None)),
        Poll::Ready(Some(Err(error))) => {
            tracing::warn!(model = forwarded.route.name, %error, "an engine broke off an answer that had begun");
            forwarded.backend.suspect(forwarded.route.model);
            Poll::Ready(Err(ApiError::broken(&forwarded.route.name)))
        }
        Poll::Pending => {
            ready!(forwarded.aborted.as_mut().poll(cx));
            Poll::Ready(Err(ApiError::aborted(&forwarded.route.name)))
        }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let Poll::Ready(frame) = self.poll_flow(cx) else {
            // hyper drops the body after an error, which cancels the request to the engine.
            ready!(self.gone.as_mut().poll(cx));
            return Poll::Ready(Some(Err(Broken)));
        };
        match &frame {
            Some(Ok(frame)) => {
                let len = frame.data_ref().map_or(0, Bytes::len);
                let is_engines = matches!(&self.flow, Flow::Forwarded(forwarded) if !forwarded.says_comment);
                self.account.sent(len, is_engines);
                if self.is_end_stream() {
                    self.account.end = End::Whole;
                }
            }
            None if self.account.end == End::Left => self.account.end = End::Whole,
            None | Some(Err(Broken)) => {}
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.flow {
            Flow::Whole(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Flow::Forwarded(forwarded) => {
                let is_held = forwarded.on_trial.is_some() || forwarded.held.is_some();
                !is_held && forwarded.upstream.is_end_stream()
            }
            Flow::Upgraded(_) => true,
            Flow::Waiting(_) | Flow::Breaking { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.flow {
            Flow::Whole(bytes) => SizeHint::with_exact(
                bytes.as_ref().map_or(0, |bytes| u64::try_from(bytes.len()).unwrap_or_default()),
            ),
            Flow::Forwarded(forwarded) => forwarded.upstream.size_hint(),
            Flow::Waiting(_) | Flow::Upgraded(_) | Flow::Breaking { .. } => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_knows_whether_an_event_is_over() {
        let mut tail = Tail::new();
        assert!(!tail.is_amid_event());
        for (data, is_amid) in [
            ("data: 1", true),
            ("\n", true),
            ("\n", false),
            ("x", true),
            ("\r\n", true),
            ("\r\n", false),
            ("abcde\n\n", false),
        ] {
            tail.push(data.as_bytes());
            assert_eq!(tail.is_amid_event(), is_amid, "{data:?}");
        }
    }
}
