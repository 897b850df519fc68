//! The HTTP client for control calls of engines, for collectors, and for a running rotation.
//!
//! Promises:
//!
//! - It uses no proxy from the environment and follows no redirect.
//! - Connecting has a timeout. Dropping a request, or the body of its answer, closes the connection.
//! - Without kept connections, no request is sent twice.

use std::error::Error;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body, Incoming};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::Value;

use crate::tls::{ClientTls, Connector, TlsFailure};

/// Most characters of a remote message in an error.
pub const EXCERPT_MAX: usize = 300;

/// A client of servers at `http://`. Clones share its connections.
pub type HttpClient<B> = legacy::Client<Connector, B>;

/// How often a connection without data is probed, and how often in vain.
const KEEPALIVE: Duration = Duration::from_secs(5);
const KEEPALIVE_TRIES: u32 = 3;

/// Keeps connections for reuse up to `idle`, or not at all.
#[must_use]
pub fn client<B: Body<Data: Send> + Send>(connect_max: Duration, idle: Option<Duration>) -> HttpClient<B> {
    let mut builder = legacy::Client::builder(TokioExecutor::new());
    match idle {
        Some(idle) => builder.pool_timer(TokioTimer::new()).pool_idle_timeout(idle),
        None => builder.pool_max_idle_per_host(0).retry_canceled_requests(false),
    };
    builder.build(connector(connect_max, None))
}

/// Opens connections to servers at `http://`, and at `https://` if it has TLS.
#[must_use]
pub fn connector(connect_max: Duration, tls: Option<ClientTls>) -> Connector {
    let mut connector = HttpConnector::new();
    // A machine that lost its power says nothing more.
    connector.set_keepalive(Some(KEEPALIVE));
    connector.set_keepalive_interval(Some(KEEPALIVE));
    connector.set_keepalive_retries(Some(KEEPALIVE_TRIES));
    Connector::new(connector, connect_max, tls)
}

/// A request without a body, or with this one as JSON.
///
/// # Errors
/// The URL is none.
pub fn request(method: &Method, url: &str, body: Option<&Value>) -> http::Result<Request<Full<Bytes>>> {
    let request = Request::builder().method(method).uri(url);
    match body {
        None => request.body(Full::default()),
        Some(body) => request
            .header(header::CONTENT_TYPE, "application/json")
            .body(body.to_string().into_bytes().into()),
    }
}

/// A body as far as it came.
#[derive(Debug)]
pub struct ReadBody {
    /// What came, up to the limit.
    pub bytes: Vec<u8>,
    /// Whether the body was longer.
    pub is_cut: bool,
    /// How it broke off, if it did.
    pub broke: Option<hyper::Error>,
}

/// Reads a body up to `most` bytes.
pub async fn read(body: Incoming, most: usize) -> ReadBody {
    read_in_parts(body, most, &mut |_| ()).await
}

/// The same, and has each part looked at as it comes.
pub async fn read_in_parts(
    mut body: Incoming,
    most: usize,
    on_part: &mut (dyn FnMut(&[u8]) + Send),
) -> ReadBody {
    let mut read = ReadBody { bytes: Vec::new(), is_cut: false, broke: None };
    while !read.is_cut {
        match body.frame().await {
            None => break,
            Some(Ok(frame)) => {
                let Ok(data) = frame.into_data() else { continue };
                let left = most - read.bytes.len();
                read.is_cut = data.len() > left;
                let data = &data[..data.len().min(left)];
                on_part(data);
                read.bytes.extend_from_slice(data);
            }
            Some(Err(error)) => {
                read.broke = Some(error);
                break;
            }
        }
    }
    read
}

/// Whether connecting took too long.
#[must_use]
pub fn is_late(error: &legacy::Error) -> bool {
    error.is_connect() && io_kinds(error).any(|kind| kind == io::ErrorKind::TimedOut)
}

/// Whether no server is there. False for causes on this machine.
#[must_use]
pub fn is_unreachable(error: &legacy::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable};
    let is_away = |kind| matches!(kind, ConnectionRefused | HostUnreachable | NetworkUnreachable);
    // Resolver errors have no `ErrorKind` of their own.
    let is_unknown_name = || causes(error).any(|cause| cause.to_string().starts_with("dns error"));
    error.is_connect() && !is_late(error) && (io_kinds(error).any(is_away) || is_unknown_name())
}

/// Whether connecting failed since this process or machine has no descriptor left, for which no engine is to blame.
#[must_use]
pub fn is_out_of_descriptors(error: &(dyn Error + 'static)) -> bool {
    use rustix::io::Errno;
    let full = [Errno::MFILE, Errno::NFILE].map(|error| Some(error.raw_os_error()));
    let is_full = |error: &io::Error| full.contains(&error.raw_os_error());
    causes(error).any(|cause| cause.downcast_ref().is_some_and(is_full))
}

/// What TLS failed by, if it did.
#[must_use]
pub fn tls_failure<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a TlsFailure> {
    causes(error).find_map(|cause| cause.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref())
}

/// An error, its cause, and so on.
pub fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |cause: &&'a (dyn Error + 'static)| (*cause).source())
}

fn io_kinds(error: &legacy::Error) -> impl Iterator<Item = io::ErrorKind> {
    causes(error).filter_map(|cause| cause.downcast_ref().map(io::Error::kind))
}

/// The beginning of a remote message, on one line.
#[must_use]
pub fn one_line(text: &str) -> String {
    let on_a_line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let all = on_a_line.trim();
    let mut beginning: String = all.chars().take(EXCERPT_MAX).collect();
    if all.chars().nth(EXCERPT_MAX).is_some() {
        beginning.push('…');
    }
    beginning
}
