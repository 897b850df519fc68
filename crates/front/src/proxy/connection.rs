//! A client's connection, shared by the HTTP server and the requests on it.
//!
//! It adds what hyper does not offer:
//!
//! - It reports when all written bytes have been flushed.
//! - It detects a disconnected client, even with unread bytes.
//! - It detects an answer that should end, or that is complete, but whose client reads nothing.
//! - It closes so that a client that is still sending can read the answer.
//! - A client that has not sent a whole head takes little memory, and not for long.

use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::future::select_all;
use futures_util::task::AtomicWaker;
use http::HeaderMap;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::api_error::{ApiError, Dialect};
use super::places::{HeadsFull, SHORT_HEAD_BYTES, Slot};
use super::socket::Socket;
use super::timeouts::Timeouts;

/// Poll interval for clients that have sent their next request already, which hides a disconnect.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// How long bytes of a client that is still sending are discarded.
const LINGER: Duration = Duration::from_secs(2);
/// Header lines that a head may have. hyper decides about those with more.
const FIELDS_MAX: usize = 64;

#[derive(Debug)]
pub(super) struct Connection {
    socket: Socket,
    /// Asked once: each question is a system call.
    peer: Option<SocketAddr>,
    slot: Slot,
    flushes: AtomicU64,
    flushed: AtomicWaker,
    lingers: AtomicBool,
    is_head_refused: AtomicBool,
    is_cut: AtomicBool,
    ending: Mutex<AnswerEnding>,
}

/// What ends the answer in progress.
#[derive(Debug, Default)]
struct AnswerEnding {
    /// The first that fires. Empty where the engine and client decide.
    tokens: Vec<CancellationToken>,
    /// Counts changes.
    version: u64,
}

impl Connection {
    /// Its place among all connections.
    pub(super) fn slot(&self) -> &Slot {
        &self.slot
    }

    pub(super) fn new(socket: Socket, slot: Slot) -> Self {
        let peer = socket.peer_addr().ok();
        Self {
            peer: peer.map(|peer| SocketAddr::new(peer.ip().to_canonical(), peer.port())),
            socket,
            slot,
            flushes: AtomicU64::new(0),
            flushed: AtomicWaker::new(),
            lingers: AtomicBool::new(false),
            is_head_refused: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            ending: Mutex::default(),
        }
    }

    /// The client's address, or that of a proxy before it. `None` if it disconnected at once.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    fn ending(&self) -> MutexGuard<'_, AnswerEnding> {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called in the task that polls [`overdue`](Self::overdue).
    pub(super) fn ends_with(&self, tokens: Vec<CancellationToken>) {
        let mut ending = self.ending();
        if !(tokens.is_empty() && ending.tokens.is_empty()) {
            *ending = AnswerEnding { tokens, version: ending.version + 1 };
        }
    }

    /// Waits until an answer has run for `after` longer than its tokens allow.
    pub(super) async fn overdue(&self, after: Duration) {
        let mut version = 0;
        let mut overdue = None;
        poll_fn(|cx| {
            let ending = self.ending();
            if ending.version != version {
                version = ending.version;
                let fired = ending.tokens.iter().map(|token| Box::pin(token.clone().cancelled_owned()));
                let fired: Vec<_> = fired.collect();
                overdue = (!fired.is_empty()).then(|| {
                    Box::pin(async move {
                        select_all(fired).await;
                        tokio::time::sleep(after).await;
                    })
                });
            }
            drop(ending);
            overdue.as_mut().map_or(Poll::Pending, |overdue| overdue.as_mut().poll(cx))
        })
        .await;
    }

    pub(super) fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Acquire)
    }

    pub(super) fn poll_flushed(&self, cx: &mut Context<'_>, since: u64) -> Poll<()> {
        self.flushed.register(cx.waker());
        if self.flushes() > since { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Sets whether the client may still be sending.
    pub(super) fn linger(&self, lingers: bool) {
        self.lingers.store(lingers, Ordering::Release);
    }

    /// Resets the connection on close. For answers whose end is the end of the connection, and for clients that do not
    /// read.
    pub(super) fn cut(&self) {
        self.is_cut.store(true, Ordering::Release);
        // If the socket refuses, it is broken already.
        let _ = self.socket.set_zero_linger();
    }

    pub(super) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Acquire)
    }

    /// Waits until the client closes its sending side. Takes about a second if it has sent its next request already.
    pub(super) async fn wait_until_gone(self: Arc<Self>) {
        loop {
            // No other task reads after the body of a request.
            match self.socket.peek().await {
                Ok(0) | Err(_) => return,
                Ok(_) => tokio::time::sleep(POLL_EVERY).await,
            }
            if self.socket.is_read_closed() {
                return;
            }
        }
    }

    /// Reads the first head until it is complete, wrong, or not short any more. False if none comes.
    pub(super) async fn first_head(&self, head: &mut Vec<u8>, timeouts: Timeouts) -> bool {
        let begun = Instant::now();
        loop {
            let late = begun + timeouts.head;
            let late = self.slot.head_since().map_or(late, |since| late.min(since + timeouts.head_rest));
            if !matches!(timeout_at(late, self.socket.readable()).await, Ok(Ok(()))) {
                return false;
            }
            match self.read_first(head) {
                // hyper decides what the end of half a head means.
                Ok(0) => return !head.is_empty(),
                Ok(_) if is_unfinished(head) => {}
                Ok(_) => return true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return false,
            }
        }
    }

    fn read_first(&self, head: &mut Vec<u8>) -> io::Result<usize> {
        let mut part = [0; SHORT_HEAD_BYTES];
        let free = SHORT_HEAD_BYTES - head.len();
        let count = self.socket.try_read(&mut part[..free])?;
        if count > 0 {
            // It is short.
            let _ = self.slot.received(count);
            head.extend_from_slice(&part[..count]);
        }
        Ok(count)
    }

    /// Answers in the place of hyper, which reads a head.
    fn refuse_head(&self) {
        let error = ApiError::heads_full();
        let body = error.body(Dialect::OpenAi);
        let mut headers = HeaderMap::new();
        error.headers(&mut headers);
        let mut text =
            format!("HTTP/1.1 {}\r\nconnection: close\r\ncontent-length: {}\r\n", error.status, body.len());
        for (name, value) in &headers {
            text += &format!("{name}: {}\r\n", value.to_str().unwrap_or_default());
        }
        // All earlier answers are flushed. If the client reads nothing, it misses this one.
        let _ = self.socket.try_write(&[text.as_bytes(), b"\r\n", &body].concat());
        self.is_head_refused.store(true, Ordering::Release);
    }

    /// Closes so that a client that is still sending can read the answer, if it `has_answer`.
    pub(super) async fn close(&self, has_answer: bool) {
        let lingers = has_answer && self.lingers.load(Ordering::Acquire);
        let lingers = lingers || self.is_head_refused.load(Ordering::Acquire);
        if lingers && self.socket.close_writing().is_ok() {
            let _late = timeout(LINGER, self.socket.discard()).await;
        }
    }
}

fn is_unfinished(head: &[u8]) -> bool {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let parsed = httparse::Request::new(&mut fields).parse(head);
    head.len() < SHORT_HEAD_BYTES && matches!(parsed, Ok(httparse::Status::Partial))
}

#[derive(Debug)]
pub(super) struct Io {
    connection: Arc<Connection>,
    /// What was read before.
    first: Bytes,
    head_rest: Duration,
    /// For a head that comes in parts.
    late: Option<Pin<Box<Sleep>>>,
    unread: Duration,
    /// For a client that reads nothing of a complete answer.
    late_reader: Option<Pin<Box<Sleep>>>,
}

impl Io {
    pub(super) fn new(connection: Arc<Connection>, first: Vec<u8>, timeouts: Timeouts) -> Self {
        let Timeouts { head_rest, unread, .. } = timeouts;
        Self { connection, first: first.into(), head_rest, late: None, unread, late_reader: None }
    }

    fn poll_bytes(&self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let count = ready!(self.connection.socket.poll_read(cx, buffer))?;
        if count == 0 {
            return Poll::Ready(Ok(()));
        }
        Poll::Ready(self.connection.slot.received(count).map_err(|HeadsFull| {
            self.connection.refuse_head();
            io::ErrorKind::OutOfMemory.into()
        }))
    }

    /// The end of the time in which a client reads nothing of a complete answer, which holds its place.
    fn poll_unread(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if !self.connection.slot.is_answered() {
            self.late_reader = None;
            return Poll::Pending;
        }
        let late = self.late_reader.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.unread)));
        late.as_mut().poll(cx).map(|()| io::ErrorKind::TimedOut.into())
    }

    /// The end of the time for the rest of a head.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let Some(since) = self.connection.slot.head_since() else {
            self.late = None;
            return Poll::Pending;
        };
        let at = since + self.head_rest;
        let late = self.late.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if late.deadline() != at {
            late.as_mut().reset(at);
        }
        late.as_mut().poll(cx).map(|()| io::ErrorKind::TimedOut.into())
    }
}

impl AsyncRead for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.first.is_empty() {
            let count = self.first.len().min(buffer.remaining());
            buffer.put_slice(&self.first[..count]);
            self.first.advance(count);
            return Poll::Ready(Ok(()));
        }
        match self.poll_bytes(cx, buffer) {
            Poll::Pending => self.poll_late(cx).map(Err),
            read => read,
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.connection.socket.poll_write(cx, slices) {
            Poll::Pending => self.poll_unread(cx).map(Err),
            written => {
                self.late_reader = None;
                written
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// hyper calls this when it has nothing left to write.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Poll::Ready(sent) = self.connection.socket.poll_flush(cx) else {
            return self.poll_unread(cx).map(Err);
        };
        sent?;
        self.connection.flushes.fetch_add(1, Ordering::AcqRel);
        self.connection.flushed.wake();
        self.connection.slot.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.connection.socket.poll_close_writing(cx)
    }
}
