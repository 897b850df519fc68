//! Connections to engines. The request that uses one drives it, so that no other task has to wake.
//!
//! Promises:
//!
//! - One is kept only behind an answer of 2xx whose length its head says, if the whole request was sent. Some engines
//!   answer an error without reading the request's body, whose bytes would begin the next request. Others close behind
//!   each stream without saying so. Nodes of a fleet are fronts, which do neither, so behind them any clean end is enough.
//! - One that its engine has closed, or on which it has said something unasked, is not used again.
//! - Dropping a request, or its answer, closes its connection.

use std::collections::HashMap;
use std::error::Error;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, Uri};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::upgrade::{OnUpgrade, Upgraded};
use poorwill_net::tls::{ClientTls, Connector};
use tokio::time::Instant;

use super::segments::Segments;

/// Idle connections to each engine. More would take descriptors that clients and control need.
const IDLE_MAX: usize = 64;

/// Reads and writes.
type Driver = dyn Future<Output = hyper::Result<()>> + Send;

/// All engines.
pub(super) struct Engines {
    connector: Connector,
    kept: Arc<Kept>,
}

/// Connections without a request.
struct Kept {
    idle: Mutex<KeptLinks>,
    idle_max: Duration,
    are_fronts: bool,
}

#[derive(Default)]
struct KeptLinks {
    /// By the engine's URL. The newest is last.
    links: HashMap<Arc<str>, Vec<(Instant, Link)>>,
    /// Whether a task closes those that are idle for too long.
    is_swept: bool,
}

/// A connection, with at most one request.
pub(super) struct Link {
    url: Arc<str>,
    sender: SendRequest<Segments>,
    driver: Pin<Box<Driver>>,
    /// False once the driver has ended.
    is_open: bool,
    is_reused: bool,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// No connection came about.
    Unconnected(Box<dyn Error + Send + Sync>),
    /// The connection ended before the answer's head did.
    Broken {
        error: hyper::Error,
        /// Whether no byte of the request was sent.
        is_unsent: bool,
    },
}

impl Unanswered {
    pub(super) fn cause(&self) -> &(dyn Error + 'static) {
        match self {
            Self::Unconnected(error) => &**error,
            Self::Broken { error, .. } => error,
        }
    }
}

impl Engines {
    /// `are_fronts` says that these are nodes of a fleet.
    pub(super) fn new(
        connect_max: Duration,
        idle_max: Duration,
        tls: Option<ClientTls>,
        are_fronts: bool,
    ) -> Self {
        let kept = Kept { idle: Mutex::default(), idle_max, are_fronts };
        Self { connector: poorwill_net::client::connector(connect_max, tls), kept: Arc::new(kept) }
    }

    /// A kept connection, or else a new one.
    pub(super) async fn link(&self, url: &str) -> Result<Link, Unanswered> {
        let kept = poll_fn(|cx| Poll::Ready(self.kept.take(url, cx))).await;
        match kept {
            Some(link) => Ok(link),
            None => self.connect(url).await,
        }
    }

    /// A new connection.
    pub(super) async fn connect(&self, url: &str) -> Result<Link, Unanswered> {
        let uri: Uri = url.parse().map_err(|error| Unanswered::Unconnected(Box::new(error)))?;
        let stream = self.connector.connect(uri).await.map_err(Unanswered::Unconnected)?;
        let made = http1::Builder::new().handshake(stream).await;
        let (sender, driver) = made.map_err(|error| Unanswered::Broken { error, is_unsent: true })?;
        let driver = Box::pin(driver.with_upgrades());
        Ok(Link { url: url.into(), sender, driver, is_open: true, is_reused: false })
    }

    /// Sends a request, and reads the head of its answer.
    pub(super) async fn send(
        &self,
        mut link: Link,
        request: Request<Segments>,
    ) -> Result<Response<EngineBody>, Unanswered> {
        let mut answered = pin!(link.sender.try_send_request(request));
        let answer = poll_fn(|cx| {
            link.drive(cx);
            answered.as_mut().poll(cx)
        });
        let (parts, body) = match answer.await {
            Ok(answer) => answer.into_parts(),
            Err(mut failed) => {
                let is_unsent = failed.take_message().is_some();
                return Err(Unanswered::Broken { error: failed.into_error(), is_unsent });
            }
        };
        let has_end = self.kept.are_fronts || body.size_hint().exact().is_some();
        let may_keep = parts.status.is_success() && has_end;
        let kept = may_keep.then(|| Arc::clone(&self.kept));
        let mut body = EngineBody { body, link: Some(link), kept, first: None };
        if body.body.is_end_stream() && parts.status != StatusCode::SWITCHING_PROTOCOLS {
            // Its client's connection does not poll an empty body.
            poll_fn(|cx| {
                body.has_ended(cx);
                Poll::Ready(())
            })
            .await;
        }
        Ok(Response::from_parts(parts, body))
    }
}

impl Kept {
    fn idle(&self) -> MutexGuard<'_, KeptLinks> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest that is still open.
    fn take(&self, url: &str, cx: &mut Context<'_>) -> Option<Link> {
        loop {
            let (since, mut link) = self.idle().links.get_mut(url)?.pop()?;
            link.drive(cx);
            if link.is_ready() && since.elapsed() < self.idle_max {
                link.is_reused = true;
                return Some(link);
            }
        }
    }

    fn put(self: &Arc<Self>, link: Link) {
        let mut idle = self.idle();
        let links = idle.links.entry(Arc::clone(&link.url)).or_default();
        if links.len() >= IDLE_MAX {
            return;
        }
        links.push((Instant::now(), link));
        if !std::mem::replace(&mut idle.is_swept, true) {
            tokio::spawn(Self::sweep(Arc::downgrade(self), self.idle_max));
        }
    }

    /// Closes what is idle for too long, until nothing is kept.
    async fn sweep(kept: Weak<Self>, every: Duration) {
        loop {
            tokio::time::sleep(every).await;
            let Some(kept) = kept.upgrade() else { return };
            let mut idle = kept.idle();
            let mut cx = Context::from_waker(Waker::noop());
            idle.links.retain(|_, links| {
                links.retain_mut(|(since, link)| {
                    link.drive(&mut cx);
                    link.is_ready() && since.elapsed() < every
                });
                !links.is_empty()
            });
            idle.is_swept = !idle.links.is_empty();
            if !idle.is_swept {
                return;
            }
        }
    }
}

impl Link {
    /// Whether an earlier request used it.
    pub(super) fn is_reused(&self) -> bool {
        self.is_reused
    }

    fn is_ready(&self) -> bool {
        self.is_open && self.sender.is_ready()
    }

    /// Reads and writes what can be. What fails reaches the request or the body.
    fn drive(&mut self, cx: &mut Context<'_>) {
        if self.is_open {
            self.is_open = self.driver.as_mut().poll(cx).is_pending();
        }
    }
}

/// The body of an engine's answer, with its connection.
pub(super) struct EngineBody {
    body: Incoming,
    /// `None` behind the end.
    link: Option<Link>,
    /// Where the connection goes behind a clean end. `None` if it is not kept.
    kept: Option<Arc<Kept>>,
    /// What [`begin`](Self::begin) has read.
    first: Option<Frame<Bytes>>,
}

impl EngineBody {
    /// Waits for the first frame, or the end.
    pub(super) async fn begin(&mut self) -> Result<(), hyper::Error> {
        if self.is_end_stream() {
            return Ok(());
        }
        let first = poll_fn(|cx| Pin::new(&mut *self).poll_frame(cx)).await;
        self.first = first.transpose()?;
        Ok(())
    }

    /// The other end of a WebSocket, which an answer of 101 begins.
    pub(super) async fn upgrade(mut self, upgrade: OnUpgrade) -> Result<Upgraded, hyper::Error> {
        let mut upgrade = pin!(upgrade);
        poll_fn(|cx| {
            self.link.iter_mut().for_each(|link| link.drive(cx));
            upgrade.as_mut().poll(cx)
        })
        .await
    }

    fn has_ended(&mut self, cx: &mut Context<'_>) {
        let Some(mut link) = self.link.take() else { return };
        // Nothing may have come behind the answer, and nothing of the request may be left.
        link.drive(cx);
        if let Some(kept) = self.kept.take().filter(|_| link.is_ready()) {
            kept.put(link);
        }
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        // The body asks first, or its connection would read nothing.
        let mut frame = Pin::new(&mut this.body).poll_frame(cx);
        if frame.is_pending()
            && let Some(link) = &mut this.link
        {
            link.drive(cx);
            frame = Pin::new(&mut this.body).poll_frame(cx);
        }
        match &frame {
            Poll::Ready(None) => this.has_ended(cx),
            Poll::Ready(Some(Ok(_))) if this.body.is_end_stream() => this.has_ended(cx),
            Poll::Ready(Some(Err(_))) => this.link = None,
            _ => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.as_ref().and_then(Frame::data_ref).map_or(0, Bytes::len);
        let first = u64::try_from(first).unwrap_or(u64::MAX);
        match self.body.size_hint().exact() {
            Some(rest) => SizeHint::with_exact(rest.saturating_add(first)),
            None => SizeHint::default(),
        }
    }
}
