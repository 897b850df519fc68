//! A WebSocket between a client and an engine, after its handshake.
//!
//! Promises: frames pass unchanged both ways, no faster than they are read. Each end may close its own direction. One
//! without data for too long, or whose model has to leave, ends with a close frame. Pings are no data.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{Instant, sleep_until, timeout};

use super::account::{Account, End};
use super::frames::{self, Frames};
use crate::backend::ModelNumber;
use crate::backend::{Admission, Backend};

/// For one read of a direction.
const READ_BYTES: usize = 16 << 10;
/// The codes of close frames: the end goes away, and it may be tried again.
const GOING_AWAY: u16 = 1001;
const TRY_AGAIN: u16 = 1013;

/// Both ends, after an engine has agreed.
pub(super) struct Opening {
    pub(super) client: OnUpgrade,
    pub(super) engine: Upgraded,
    pub(super) admission: Admission,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) model: ModelNumber,
}

/// Runs on its client's connection, after that has spoken its last HTTP.
pub(super) struct Tunnel {
    pub(super) opening: Opening,
    pub(super) account: Account,
    pub(super) limits: TunnelLimits,
}

/// Where a request leaves a tunnel to its connection.
pub(super) type TunnelPlace = Arc<Mutex<Option<Tunnel>>>;

#[derive(Debug, Clone, Copy)]
pub(super) struct TunnelLimits {
    /// Longest time without data.
    pub(super) idle: Duration,
    /// For a client to answer a close, and to follow an engine that has closed.
    pub(super) reader: Duration,
}

/// How a tunnel ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TunnelEnd {
    Closed,
    ClientBroke,
    EngineBroke,
    Idle,
    Aborted,
    /// By an operator.
    Cancelled,
}

/// One way of the bytes.
struct Direction<R, W> {
    from: R,
    to: W,
    frames: Frames,
    /// Whether a part of the last bytes may be sent, and the rest not.
    is_writing: bool,
}

/// Which end of a direction broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BrokenAt {
    From,
    To,
}

/// When data passed last.
struct Activity(Mutex<Instant>);

impl Tunnel {
    /// Until both ends have closed, or one has to.
    pub(super) async fn run(mut self) {
        let Opening { client, engine, admission, backend, model } = self.opening;
        // Without it, the client left during the handshake.
        let Ok(client) = client.await else { return };
        let (client, engine) = (TokioIo::new(client), TokioIo::new(engine));
        let aborted = admission.aborted.clone();
        let (account, limits) = (&self.account, self.limits);
        let stopped = async {
            tokio::select! {
                () = aborted.cancelled() => TunnelEnd::Aborted,
                () = account.cancelled().cancelled() => TunnelEnd::Cancelled,
            }
        };
        let answered = admission.answered.clone();
        let sent = move |bytes| {
            answered.add();
            account.sent(bytes, true);
        };
        let (ended, client) = pass(client, engine, limits, stopped, sent).await;
        // The model need not wait for the client's goodbye.
        drop(admission);
        if ended == TunnelEnd::EngineBroke {
            backend.suspect(model);
        }
        // A client that is late loses only the rest of the goodbye.
        let _ = timeout(limits.reader, leave(client, ended)).await;
        self.account.end = match ended {
            TunnelEnd::Closed | TunnelEnd::Idle => End::Whole,
            TunnelEnd::ClientBroke => End::Left,
            TunnelEnd::EngineBroke | TunnelEnd::Aborted | TunnelEnd::Cancelled => End::Broken,
        };
    }
}

/// The client's end is left, as its reader, its writer, and whether a frame may be sent to it.
async fn pass<C, E>(
    client: C,
    engine: E,
    limits: TunnelLimits,
    stopped: impl Future<Output = TunnelEnd>,
    mut sent: impl FnMut(usize),
) -> (TunnelEnd, (impl AsyncRead + Unpin, impl AsyncWrite + Unpin, bool))
where
    C: AsyncRead + AsyncWrite + Unpin,
    E: AsyncRead + AsyncWrite + Unpin,
{
    let (client_reader, client_writer) = tokio::io::split(client);
    let (engine_reader, engine_writer) = tokio::io::split(engine);
    let mut up = Direction::new(client_reader, engine_writer);
    let mut down = Direction::new(engine_reader, client_writer);
    let activity = Activity(Mutex::new(Instant::now()));
    let ended = {
        let mut up = std::pin::pin!(up.run(&activity, |_| {}));
        let mut down = std::pin::pin!(down.run(&activity, &mut sent));
        let of_up = |at| if at == BrokenAt::From { TunnelEnd::ClientBroke } else { TunnelEnd::EngineBroke };
        let of_down = |at| if at == BrokenAt::From { TunnelEnd::EngineBroke } else { TunnelEnd::ClientBroke };
        let both = async {
            tokio::select! {
                done = up.as_mut() => match done {
                    Ok(()) => down.await.map_err(of_down),
                    Err(at) => Err(of_up(at)),
                },
                done = down.as_mut() => match done {
                    // An engine that has closed reads no more than the client's own close.
                    Ok(()) => timeout(limits.reader, up).await.unwrap_or(Ok(())).map_err(of_up),
                    Err(at) => Err(of_down(at)),
                },
            }
        };
        tokio::select! {
            biased;
            ended = stopped => ended,
            done = both => done.err().unwrap_or(TunnelEnd::Closed),
            () = activity.idle(limits.idle) => TunnelEnd::Idle,
        }
    };
    let is_between = down.frames.is_between() && !down.is_writing;
    (ended, (up.from, down.to, is_between))
}

/// Closes so that a client can read why.
async fn leave(
    (mut reader, mut writer, is_between): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin, bool),
    ended: TunnelEnd,
) -> io::Result<()> {
    let close = match ended {
        TunnelEnd::Idle => Some(frames::close(GOING_AWAY, "no data for too long")),
        TunnelEnd::Cancelled => Some(frames::close(GOING_AWAY, "an operator cancelled it")),
        TunnelEnd::Aborted => Some(frames::close(TRY_AGAIN, "the model had to leave; try again")),
        TunnelEnd::Closed | TunnelEnd::ClientBroke | TunnelEnd::EngineBroke => None,
    };
    if let Some(close) = close.filter(|_| is_between) {
        writer.write_all(&close).await?;
    }
    writer.shutdown().await?;
    if ended != TunnelEnd::EngineBroke {
        // Unread bytes would reset the connection, and with it what the client has not read.
        tokio::io::copy(&mut reader, &mut tokio::io::sink()).await?;
    }
    Ok(())
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Direction<R, W> {
    fn new(from: R, to: W) -> Self {
        Self { from, to, frames: Frames::default(), is_writing: false }
    }

    async fn run(&mut self, activity: &Activity, mut sent: impl FnMut(usize)) -> Result<(), BrokenAt> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let count = self.from.read(&mut buffer).await.map_err(|_| BrokenAt::From)?;
            if count == 0 {
                return self.to.shutdown().await.map_err(|_| BrokenAt::To);
            }
            self.is_writing = true;
            if self.frames.push(&buffer[..count]) {
                activity.touch();
            }
            self.to.write_all(&buffer[..count]).await.map_err(|_| BrokenAt::To)?;
            self.to.flush().await.map_err(|_| BrokenAt::To)?;
            self.is_writing = false;
            sent(count);
        }
    }
}

impl Activity {
    fn touch(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Waits until nothing has passed for so long.
    async fn idle(&self, max: Duration) {
        loop {
            let until = *self.0.lock().unwrap_or_else(PoisonError::into_inner) + max;
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: TunnelLimits =
        TunnelLimits { idle: Duration::from_secs(60), reader: Duration::from_secs(5) };
    const DATA: &[u8] = &[0x81, 2, b'h', b'i'];
    const PING: &[u8] = &[0x89, 0];

    /// A tunnel's outer ends, and how it ended.
    fn tunnel() -> (tokio::io::DuplexStream, tokio::io::DuplexStream, tokio::task::JoinHandle<TunnelEnd>) {
        let ((client, front), (back, engine)) = (tokio::io::duplex(64), tokio::io::duplex(64));
        let passing = tokio::spawn(async move {
            let (ended, client) = pass(front, back, LIMITS, std::future::pending(), |_| {}).await;
            leave(client, ended).await.unwrap();
            ended
        });
        (client, engine, passing)
    }

    async fn read(from: &mut tokio::io::DuplexStream, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        from.read_exact(&mut bytes).await.unwrap();
        bytes
    }

    #[tokio::test(start_paused = true)]
    async fn pings_keep_no_tunnel_open_and_data_does() {
        let (mut client, mut engine, passing) = tunnel();
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_secs(50)).await;
            client.write_all(DATA).await.unwrap();
            assert_eq!(read(&mut engine, DATA.len()).await, DATA);
        }
        for _ in 0..2 {
            tokio::time::sleep(Duration::from_secs(25)).await;
            engine.write_all(PING).await.unwrap();
            assert_eq!(read(&mut client, PING.len()).await, PING);
        }
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest[..4], [0x88, 22, 3, 233], "{rest:?}");
        drop(client);
        assert_eq!(passing.await.unwrap(), TunnelEnd::Idle);
    }

    #[tokio::test(start_paused = true)]
    async fn no_close_is_written_into_a_frame() {
        let (mut client, mut engine, passing) = tunnel();
        engine.write_all(&DATA[..3]).await.unwrap();
        let mut all = Vec::new();
        client.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, DATA[..3]);
        drop(client);
        assert_eq!(passing.await.unwrap(), TunnelEnd::Idle);
    }

    #[tokio::test(start_paused = true)]
    async fn each_end_closes_its_own_direction() {
        let (mut client, mut engine, passing) = tunnel();
        client.write_all(DATA).await.unwrap();
        client.shutdown().await.unwrap();
        let mut all = Vec::new();
        engine.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, DATA);
        engine.write_all(DATA).await.unwrap();
        assert_eq!(read(&mut client, DATA.len()).await, DATA);
        drop(engine);
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        assert_eq!(passing.await.unwrap(), TunnelEnd::Closed);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_follows_an_engine_that_has_closed() {
        let (mut client, mut engine, passing) = tunnel();
        let begun = Instant::now();
        engine.shutdown().await.unwrap();
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        // Its own close still goes to the engine.
        client.write_all(DATA).await.unwrap();
        assert_eq!(read(&mut engine, DATA.len()).await, DATA);
        assert_eq!(engine.read(&mut [0]).await.unwrap(), 0);
        assert_eq!(begun.elapsed(), LIMITS.reader);
        drop(client);
        assert_eq!(passing.await.unwrap(), TunnelEnd::Closed);
    }
}
