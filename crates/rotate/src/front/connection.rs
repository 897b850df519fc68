//! A client's connection, shared by the HTTP server and the requests on it.
//!
//! It adds what hyper does not offer:
//!
//! - It reports when all written bytes have been flushed.
//! - It detects a disconnected client, even with unread bytes.
//! - It detects an answer that should end, but whose client reads nothing.
//! - It closes so that a client that is still sending can read the answer.

use std::future::Future;
use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, Ready};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use super::limits::Slot;

/// Poll interval for clients that have sent their next request already, which hides a disconnect.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// How long bytes of a client that is still sending are discarded.
const LINGER: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    pub(super) slot: Slot,
    flushes: AtomicU64,
    flushed: AtomicWaker,
    lingers: AtomicBool,
    is_cut: AtomicBool,
    /// Ends the answer in progress; `None` where the engine and client decide.
    ending: watch::Sender<Option<CancellationToken>>,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, slot: Slot) -> Self {
        Self {
            stream,
            slot,
            flushes: AtomicU64::new(0),
            flushed: AtomicWaker::new(),
            lingers: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            ending: watch::Sender::new(None),
        }
    }

    /// The client's address, or that of a proxy before it. `None` if it has disconnected.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        let peer = self.stream.peer_addr().ok()?;
        Some(SocketAddr::new(peer.ip().to_canonical(), peer.port()))
    }

    pub(super) fn ends_with(&self, ending: Option<CancellationToken>) {
        self.ending.send_replace(ending);
    }

    /// Waits until an answer has run for `after` longer than its token allows.
    pub(super) async fn overdue(&self, after: Duration) {
        let mut endings = self.ending.subscribe();
        loop {
            let ending = endings.borrow_and_update().clone();
            let overdue = async {
                match ending {
                    Some(ending) => ending.cancelled().await,
                    None => std::future::pending().await,
                }
                tokio::time::sleep(after).await;
            };
            tokio::select! {
                () = overdue => return,
                // The sender is in `self`, so it is alive.
                _ = endings.changed() => {}
            }
        }
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
        let _ = self.stream.set_zero_linger();
    }

    pub(super) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Acquire)
    }

    /// Waits until the client closes its sending side. Takes about a second if it has sent its next request already.
    pub(super) async fn gone(self: Arc<Self>) {
        loop {
            // No other task reads after the body of a request.
            match self.stream.peek(&mut [0]).await {
                Ok(0) | Err(_) => return,
                Ok(_) => tokio::time::sleep(POLL_EVERY).await,
            }
            let ready = self.stream.ready(Interest::READABLE).now_or_never();
            if ready.is_some_and(|ready| ready.is_ok_and(Ready::is_read_closed)) {
                return;
            }
        }
    }

    fn close_writing(&self) -> io::Result<()> {
        let twin = self.stream.as_fd().try_clone_to_owned()?;
        std::net::TcpStream::from(twin).shutdown(Shutdown::Write)
    }
}

#[derive(Debug)]
pub(super) struct Io {
    connection: Arc<Connection>,
    lingering: Option<Pin<Box<Sleep>>>,
}

impl Io {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self { connection, lingering: None }
    }
}

impl AsyncRead for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.connection.stream.poll_read_ready(cx))?;
            match self.connection.stream.try_read_buf(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => {
                    if done.as_ref().is_ok_and(|count| *count > 0) {
                        self.connection.slot.received();
                    }
                    return Poll::Ready(done.map(|_| ()));
                }
            }
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.connection.stream.poll_write_ready(cx))?;
            match self.connection.stream.try_write_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// hyper calls this when it has nothing left to write.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.connection.flushes.fetch_add(1, Ordering::AcqRel);
        self.connection.flushed.wake();
        self.connection.slot.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingering.is_none() {
            if let Err(error) = self.connection.close_writing() {
                return Poll::Ready(Err(error));
            }
            if !self.connection.lingers.load(Ordering::Acquire) {
                return Poll::Ready(Ok(()));
            }
        }
        let Self { connection, lingering } = &mut *self;
        let limit = lingering.get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
        let mut discarded = [0; 16 << 10];
        loop {
            if limit.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            ready!(connection.stream.poll_read_ready(cx))?;
            match connection.stream.try_read(&mut discarded) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => return Poll::Ready(Ok(())),
                Ok(_) => {}
            }
        }
    }
}
