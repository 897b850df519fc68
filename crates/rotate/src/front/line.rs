//! A client's connection, as the HTTP server and the requests on it see it.
//!
//! Beside reading and writing it knows four things that the server does not tell: when all that was written has gone
//! out, that the client has gone away, also where something that it sent is still unread, that an answer which is to end
//! does not since its client reads nothing, and how to close so that an answer to somebody who is still sending arrives.

use std::future::Future;
use std::io::{self, IoSlice};
use std::net::Shutdown;
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

/// Between two looks whether a client has gone that has sent its next request already, which hides that it has.
const LOOK: Duration = Duration::from_secs(1);
/// How long what a client still sends is read and thrown away, so that it gets to reading the answer.
const LINGER: Duration = Duration::from_secs(2);

/// A connection that requests hold as well as the server.
#[derive(Debug)]
pub(super) struct Line {
    stream: TcpStream,
    flushes: AtomicU64,
    flushed: AtomicWaker,
    lingers: AtomicBool,
    is_cut: AtomicBool,
    /// Fires when the answer that is under way has to end; none where that is up to the engine and the client.
    ending: watch::Sender<Option<CancellationToken>>,
}

impl Line {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            flushes: AtomicU64::new(0),
            flushed: AtomicWaker::new(),
            lingers: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            ending: watch::Sender::new(None),
        }
    }

    /// What fires when the answer that is under way has to end; nothing when it is over.
    pub(super) fn ends_with(&self, ending: Option<CancellationToken>) {
        self.ending.send_replace(ending);
    }

    /// Waits until an answer has had to end for so long, and is still under way.
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
                // Who sends is here.
                _ = endings.changed() => {}
            }
        }
    }

    /// How often all that there was to write had gone out.
    pub(super) fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Acquire)
    }

    /// Waits until all has gone out once more than so many times.
    pub(super) fn poll_flushed(&self, cx: &mut Context<'_>, since: u64) -> Poll<()> {
        self.flushed.register(cx.waker());
        if self.flushes() > since { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Whether an answer that is given now goes to somebody who may be sending still.
    pub(super) fn linger(&self, lingers: bool) {
        self.lingers.store(lingers, Ordering::Release);
    }

    /// The connection will be reset instead of closed, for answers whose end is that of the connection, and those that
    /// nobody reads.
    pub(super) fn cut(&self) {
        self.is_cut.store(true, Ordering::Release);
        // A socket that does not take it is broken already.
        let _ = self.stream.set_zero_linger();
    }

    /// Whether it was.
    pub(super) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Acquire)
    }

    /// Waits until the client sends no more. Where it has sent its next request already, that is found out within a second
    /// or so.
    pub(super) async fn gone(self: Arc<Self>) {
        loop {
            // Nobody else reads while a request is under way, once its body has been read.
            match self.stream.peek(&mut [0]).await {
                Ok(0) | Err(_) => return,
                Ok(_) => tokio::time::sleep(LOOK).await,
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

/// What the server reads from and writes to.
#[derive(Debug)]
pub(super) struct Io {
    line: Arc<Line>,
    lingering: Option<Pin<Box<Sleep>>>,
}

impl Io {
    pub(super) fn new(line: Arc<Line>) -> Self {
        Self { line, lingering: None }
    }
}

impl AsyncRead for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.line.stream.poll_read_ready(cx))?;
            match self.line.stream.try_read_buf(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done.map(|_| ())),
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
            ready!(self.line.stream.poll_write_ready(cx))?;
            match self.line.stream.try_write_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// The server calls it when it has nothing left to write.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.line.flushes.fetch_add(1, Ordering::AcqRel);
        self.line.flushed.wake();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingering.is_none() {
            if let Err(error) = self.line.close_writing() {
                return Poll::Ready(Err(error));
            }
            if !self.line.lingers.load(Ordering::Acquire) {
                return Poll::Ready(Ok(()));
            }
        }
        let Self { line, lingering } = &mut *self;
        let limit = lingering.get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
        let mut waste = [0; 16 << 10];
        loop {
            if limit.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            ready!(line.stream.poll_read_ready(cx))?;
            match line.stream.try_read(&mut waste) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => return Poll::Ready(Ok(())),
                Ok(_) => {}
            }
        }
    }
}
