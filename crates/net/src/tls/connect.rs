//! Connections of an HTTP client, with TLS for `https://`.

use std::error::Error;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use http::uri::Scheme;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tower_service::Service;

use super::failure::{TlsFailure, explained};
use super::files::ClientTls;

/// Opens connections within one timeout for all addresses of a name, and as long again for TLS.
#[derive(Debug, Clone)]
pub struct Connector {
    tcp: HttpConnector,
    most: Duration,
    tls: Option<ClientTls>,
}

impl Connector {
    /// Without TLS, `https://` is an error.
    #[must_use]
    pub fn new(mut tcp: HttpConnector, most: Duration, tls: Option<ClientTls>) -> Self {
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(most));
        Self { tcp, most, tls }
    }

    /// A new connection to the server of this URL.
    ///
    /// # Errors
    /// None came about in time.
    pub async fn connect(&self, uri: Uri) -> Result<TokioIo<Stream>, Box<dyn Error + Send + Sync>> {
        self.clone().call(uri).await
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Stream>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.tcp.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let of_tls = match (uri.scheme() == Some(&Scheme::HTTPS), &self.tls) {
            (false, _) => None,
            (true, Some(tls)) => Some((tls.clone(), uri.host().unwrap_or_default().to_owned())),
            (true, None) => return Box::pin(async { Err(TlsFailure::no_ca().into()) }),
        };
        let most = self.most;
        let connection = timeout(most, self.tcp.call(uri));
        Box::pin(async move {
            let in_time = connection.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
            let tcp = in_time?.into_inner();
            let stream = match of_tls {
                None => Stream::Plain(tcp),
                Some((tls, host)) => Stream::Tls(Box::new(secure(tcp, &host, tls, most).await?)),
            };
            Ok(TokioIo::new(stream))
        })
    }
}

async fn secure(tcp: TcpStream, host: &str, tls: ClientTls, most: Duration) -> io::Result<Secured> {
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let name = ServerName::try_from(address.to_owned()).map_err(|_| TlsFailure::no_name(host))?;
    let shaken = timeout(most, TlsConnector::from(tls.config()).connect(name, tcp)).await;
    let stream =
        shaken.map_err(|_| TlsFailure::late())?.map_err(|error| explained(error, tls.files(), true))?;
    Ok(Secured { stream, tls, is_new: true })
}

/// A connection to a server.
#[derive(Debug)]
pub enum Stream {
    /// Without TLS.
    Plain(TcpStream),
    /// With TLS.
    Tls(Box<Secured>),
}

/// With TLS.
#[derive(Debug)]
pub struct Secured {
    stream: TlsStream<TcpStream>,
    tls: ClientTls,
    /// Nothing was read yet.
    is_new: bool,
}

impl Secured {
    fn explained<T>(&self, done: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        done.map_err(|error| explained(error, self.tls.files(), self.is_new))
    }
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        match self {
            Self::Plain(tcp) => tcp.connected(),
            Self::Tls(secured) => secured.stream.get_ref().0.connected(),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, buffer),
            Self::Tls(secured) => {
                let before = buffer.filled().len();
                let done = Pin::new(&mut secured.stream).poll_read(cx, buffer);
                let done = secured.explained(done);
                secured.is_new &= buffer.filled().len() == before;
                done
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write_vectored(cx, slices),
            Self::Tls(secured) => {
                let done = Pin::new(&mut secured.stream).poll_write_vectored(cx, slices);
                secured.explained(done)
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Tls(secured) => {
                let done = Pin::new(&mut secured.stream).poll_flush(cx);
                secured.explained(done)
            }
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Tls(secured) => Pin::new(&mut secured.stream).poll_shutdown(cx),
        }
    }
}
