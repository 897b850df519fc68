//! A client's socket, with or without TLS.
//!
//! The state of TLS is beside the socket, not around it. A connection asks the socket itself whether its client has
//! gone, and resets it. What is broken off has no `close_notify`, so that no client takes it for complete.

use std::future::poll_fn;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use futures_util::task::AtomicWaker;
use poorwill_net::tls::ServerTls;
use rustls::ServerConnection;
use tokio::io::{Interest, ReadBuf, Ready};
use tokio::net::TcpStream;

#[derive(Debug)]
pub(super) struct Socket {
    tcp: TcpStream,
    /// In a box, since most have none.
    tls: Option<Box<Tls>>,
}

#[derive(Debug)]
struct Tls {
    session: Mutex<ServerConnection>,
    /// Woken when bytes were taken from the socket by another one than the reader.
    reader: AtomicWaker,
}

/// The socket, as rustls wants it.
struct Raw<'a>(&'a TcpStream);

impl io::Read for Raw<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(buffer)
    }
}

impl io::Write for Raw<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Socket {
    /// # Errors
    /// TLS cannot begin.
    pub(super) fn new(tcp: TcpStream, tls: Option<&ServerTls>) -> Result<Self, rustls::Error> {
        // The gain is small, and a socket that refuses is about to fail anyway.
        let _ = tcp.set_nodelay(true);
        let session = tls.map(|tls| ServerConnection::new(tls.config())).transpose()?;
        let tls =
            session.map(|session| Box::new(Tls { session: Mutex::new(session), reader: AtomicWaker::new() }));
        Ok(Self { tcp, tls })
    }

    pub(super) fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.peer_addr()
    }

    pub(super) fn set_zero_linger(&self) -> io::Result<()> {
        self.tcp.set_zero_linger()
    }

    /// Whether the client has closed, as far as the system knows.
    pub(super) fn is_read_closed(&self) -> bool {
        use futures_util::FutureExt as _;
        let ready = self.tcp.ready(Interest::READABLE).now_or_never();
        ready.is_some_and(|ready| ready.is_ok_and(Ready::is_read_closed))
    }

    /// Waits until there may be something to read.
    pub(super) async fn readable(&self) -> io::Result<()> {
        let Some(tls) = &self.tls else { return self.tcp.readable().await };
        // The handshake may be waiting for the socket to take its part.
        poll_fn(|cx| tls.with(|session| self.poll_send(session, cx))).await?;
        self.tcp.readable().await
    }

    /// What there is now.
    pub(super) fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match &self.tls {
            None => self.tcp.try_read(buffer),
            Some(tls) => tls.with(|session| self.read(session, buffer)),
        }
    }

    pub(super) fn poll_read(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<usize>> {
        if let Some(tls) = &self.tls {
            tls.reader.register(cx.waker());
        }
        loop {
            let read = match &self.tls {
                None => self.tcp.try_read_buf(buffer),
                Some(_) => {
                    self.try_read(buffer.initialize_unfilled()).inspect(|count| buffer.advance(*count))
                }
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
            ready!(self.tcp.poll_read_ready(cx))?;
        }
    }

    /// Waits for bytes, and leaves them there. Zero if the client has closed its sending side.
    pub(super) async fn peek(&self) -> io::Result<usize> {
        let Some(tls) = &self.tls else { return self.tcp.peek(&mut [0]).await };
        loop {
            match tls.with(|session| self.peek_now(session)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => {
                    tls.reader.wake();
                    return done;
                }
            }
            self.tcp.readable().await?;
        }
    }

    pub(super) fn poll_write(&self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let Some(tls) = &self.tls else {
            loop {
                ready!(self.tcp.poll_write_ready(cx))?;
                match self.tcp.try_write_vectored(slices) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    done => return Poll::Ready(done),
                }
            }
        };
        tls.with(|session| {
            // What was written before goes first, so that no more is stored than one write.
            ready!(self.poll_send(session, cx))?;
            let count = session.writer().write_vectored(slices)?;
            // The rest goes with the next write or flush.
            match self.poll_send(session, cx) {
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                _ => Poll::Ready(Ok(count)),
            }
        })
    }

    /// Ready once the socket has taken all that was written.
    pub(super) fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &self.tls {
            None => Poll::Ready(Ok(())),
            Some(tls) => tls.with(|session| self.poll_send(session, cx)),
        }
    }

    /// Writes as much as the socket takes now.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<()> {
        match &self.tls {
            None => self.tcp.try_write(bytes).map(drop),
            Some(tls) => tls.with(|session| {
                session.writer().write_all(bytes)?;
                self.send(session)
            }),
        }
    }

    /// Closes the sending side, after what was written.
    pub(super) fn poll_close_writing(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(tls) = &self.tls {
            ready!(tls.with(|session| {
                session.send_close_notify();
                self.poll_send(session, cx)
            }))?;
        }
        Poll::Ready(self.shut_down())
    }

    /// As [`poll_close_writing`](Self::poll_close_writing), with as much as the socket takes now.
    pub(super) fn close_writing(&self) -> io::Result<()> {
        if let Some(tls) = &self.tls {
            tls.with(|session| {
                session.send_close_notify();
                self.send(session)
            })?;
        }
        self.shut_down()
    }

    fn shut_down(&self) -> io::Result<()> {
        let twin = self.tcp.as_fd().try_clone_to_owned()?;
        std::net::TcpStream::from(twin).shutdown(Shutdown::Write)
    }

    /// Reads and drops everything until the client closes.
    pub(super) async fn discard(&self) {
        while self.tcp.readable().await.is_ok() {
            match self.tcp.try_read(&mut [0; 16 << 10]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    fn read(&self, session: &mut ServerConnection, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match session.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // A request says itself where it ends, so a client that only closes its socket cuts nothing off unseen.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                done => return done,
            }
            self.receive(session)?;
        }
    }

    fn peek_now(&self, session: &mut ServerConnection) -> io::Result<usize> {
        loop {
            let state = session.process_new_packets().map_err(broken)?;
            let waiting = state.plaintext_bytes_to_read();
            if waiting > 0 || state.peer_has_closed() || self.receive(session)? == 0 {
                return Ok(waiting);
            }
        }
    }

    /// Takes what the socket has. Zero at its end.
    fn receive(&self, session: &mut ServerConnection) -> io::Result<usize> {
        let count = session.read_tls(&mut Raw(&self.tcp))?;
        let processed = session.process_new_packets();
        // An answer of the handshake, or why it fails.
        let sent = self.send(session);
        if let Err(error) = processed {
            tracing::debug!(%error, peer = ?self.tcp.peer_addr().ok(), "a client's TLS handshake failed");
            return Err(broken(error));
        }
        sent.map(|()| count)
    }

    /// What the socket takes now of what is written.
    fn send(&self, session: &mut ServerConnection) -> io::Result<()> {
        while session.wants_write() {
            match session.write_tls(&mut Raw(&self.tcp)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                done => done.map(drop)?,
            }
        }
        Ok(())
    }

    fn poll_send(&self, session: &mut ServerConnection, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            self.send(session)?;
            if !session.wants_write() {
                return Poll::Ready(Ok(()));
            }
            ready!(self.tcp.poll_write_ready(cx))?;
        }
    }
}

impl Tls {
    fn with<T>(&self, act: impl FnOnce(&mut ServerConnection) -> T) -> T {
        act(&mut self.session.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn broken(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
