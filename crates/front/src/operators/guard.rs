//! Access checks of operators' listeners: API keys, and protection against pages of other sites.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::Authority;
use http::{Method, StatusCode};

use super::answer::ControlError;
use crate::settings;
use poorwill_net::site;

/// On every answer: no caching, no content sniffing, no embedding by other sites.
const ON_ALL: [(HeaderName, HeaderValue); 3] = [
    (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (HeaderName::from_static("cross-origin-resource-policy"), HeaderValue::from_static("same-origin")),
];

/// What a probe or a browser reads without a key: it has no data.
const OPEN: [&str; 3] = ["/", "/health", "/fleet/ready"];

/// Who may read and command.
#[derive(Clone)]
pub struct Access {
    control: Arc<dyn Fn() -> Arc<settings::Control> + Send + Sync>,
    /// Whether it listens on loopback only. Then a foreign `Host` is a DNS rebinding attack.
    is_local: bool,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("is_local", &self.is_local).finish_non_exhaustive()
    }
}

impl Access {
    /// At this address; the keys are asked for each time.
    #[must_use]
    pub fn new(
        address: SocketAddr,
        control: impl Fn() -> Arc<settings::Control> + Send + Sync + 'static,
    ) -> Self {
        Self { control: Arc::new(control), is_local: address.ip().to_canonical().is_loopback() }
    }

    /// Whether this is one of the keys now, or none is needed.
    #[must_use]
    pub fn has_key(&self, given: Option<&str>) -> bool {
        has_key(&(self.control)(), given)
    }
}

/// Lets a request through, or refuses it.
pub async fn guard(State(access): State<Access>, request: Request, next: Next) -> Response {
    let mut response = match check(&access, &request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    for (name, value) in ON_ALL {
        response.headers_mut().insert(name, value);
    }
    response
}

fn check(access: &Access, request: &Request) -> Result<(), ControlError> {
    let host = site::host(request.uri(), request.headers())
        .map_err(|message| ControlError::new(StatusCode::BAD_REQUEST, message))?;
    if access.is_local && !site::is_loopback(host.host()) {
        return Err(ControlError::new(
            StatusCode::FORBIDDEN,
            format!(
                "this listens on this machine only, and was asked for by the name `{}`, which is another's; ask for \
                 it by localhost or by 127.0.0.1",
                host.host()
            ),
        ));
    }
    let path = request.uri().path();
    let is_open = OPEN.contains(&path) || path == "/metrics" && (access.control)().metrics_are_open;
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    // Links from other sites to the page are fine: the page itself contains no data.
    if !(is_open && is_read) {
        check_origin(&host, request.headers())?;
    }
    if !is_open && !access.has_key(key(request.headers())) {
        let message =
            "a key is needed, and this is none; say Authorization: Bearer KEY with a key of control's keys";
        return Err(ControlError::new(StatusCode::UNAUTHORIZED, message));
    }
    Ok(())
}

/// The key that a request says.
#[must_use]
pub fn key(headers: &HeaderMap) -> Option<&str> {
    let (scheme, key) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// Compares all keys, so that timing does not reveal which one matches.
fn has_key(control: &settings::Control, given: Option<&str>) -> bool {
    if control.keys.is_empty() {
        return true;
    }
    given.is_some_and(|given| control.keys.iter().fold(false, |is_one, key| key.matches(given) | is_one))
}

/// Clients other than browsers send none of these headers.
fn check_origin(host: &Authority, headers: &HeaderMap) -> Result<(), ControlError> {
    if site::is_from_other_site(headers) {
        return Err(ControlError::new(StatusCode::FORBIDDEN, "a page of another site asked for this"));
    }
    for origin in headers.get_all(header::ORIGIN) {
        let is_ours = origin.to_str().is_ok_and(|origin| site::is_origin(origin, host));
        if !is_ours {
            let message = format!(
                "a page of another site asked for this; a proxy in between has to pass on the name that it was reached \
                 by as Host, which is `{host}` here"
            );
            return Err(ControlError::new(StatusCode::FORBIDDEN, message));
        }
    }
    Ok(())
}
