//! Access checks: API keys, and protection against pages of other sites.
//!
//! A page in an operator's browser can send requests even to loopback. It cannot change `Host`, `Origin` and
//! `Sec-Fetch-Site`, so these show that it is foreign.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::Authority;
use http::{Method, StatusCode, Uri};

use super::HandlerState;
use super::answer::ControlError;
use crate::config;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// On every answer: no caching, no content sniffing, no embedding by other sites.
const ON_ALL: [(HeaderName, HeaderValue); 3] = [
    (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (HeaderName::from_static("cross-origin-resource-policy"), HeaderValue::from_static("same-origin")),
];

pub(super) async fn guard(State(shared): State<HandlerState>, request: Request, next: Next) -> Response {
    let mut response = match check(&shared, &request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    for (name, value) in ON_ALL {
        response.headers_mut().insert(name, value);
    }
    response
}

fn check(shared: &HandlerState, request: &Request) -> Result<(), ControlError> {
    let host = host(request.uri(), request.headers())?;
    if shared.is_local && !is_loopback(host.host()) {
        return Err(ControlError::new(
            StatusCode::FORBIDDEN,
            format!(
                "this listens on this machine only, and was asked for by the name `{}`, which is another's; ask for \
                 it by localhost or by 127.0.0.1",
                host.host()
            ),
        ));
    }
    let is_open = matches!(request.uri().path(), "/" | "/health");
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    // Links from other sites to the page are fine: the page itself contains no data.
    if !(is_open && is_read) {
        check_origin(&host, request.headers())?;
    }
    if !is_open && !has_key(&shared.api.control(), key(request.headers())) {
        let message =
            "a key is needed, and this is none; say Authorization: Bearer KEY with a key of control's keys";
        return Err(ControlError::new(StatusCode::UNAUTHORIZED, message));
    }
    Ok(())
}

pub(super) fn key(headers: &HeaderMap) -> Option<&str> {
    let (scheme, key) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// Compares all keys, so that timing does not reveal which one matches.
pub(super) fn has_key(control: &config::Control, given: Option<&str>) -> bool {
    if control.keys.is_empty() {
        return true;
    }
    given.is_some_and(|given| control.keys.iter().fold(false, |is_one, key| key.matches(given) | is_one))
}

/// Missing, repeated or contradictory hosts are errors.
fn host(uri: &Uri, headers: &HeaderMap) -> Result<Authority, ControlError> {
    let error = |message: &str| ControlError::new(StatusCode::BAD_REQUEST, message);
    let mut all = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (all.next(), all.next()) else {
        return Err(error("the request has to have one Host header"));
    };
    let host = host.to_str().ok().and_then(|text| text.parse::<Authority>().ok());
    let host = host.filter(|host| !host.as_str().contains('@'));
    let host = host.ok_or_else(|| error("the Host header is no host"))?;
    if uri.authority().is_some_and(|other| other != &host) {
        return Err(error("the request names another host than its Host header"));
    }
    Ok(host)
}

/// Asks no resolver.
fn is_loopback(host: &str) -> bool {
    let unbracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    match unbracketed.parse::<IpAddr>() {
        Ok(ip) => ip.to_canonical().is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

/// Clients other than browsers send none of these headers.
fn check_origin(host: &Authority, headers: &HeaderMap) -> Result<(), ControlError> {
    for site in headers.get_all(SEC_FETCH_SITE) {
        if !matches!(site.as_bytes(), b"same-origin" | b"none") {
            return Err(ControlError::new(StatusCode::FORBIDDEN, "a page of another site asked for this"));
        }
    }
    for origin in headers.get_all(header::ORIGIN) {
        let is_ours = origin.to_str().is_ok_and(|origin| is_origin(origin, host));
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

/// Compares host and port. The scheme may differ behind a TLS proxy.
fn is_origin(origin: &str, host: &Authority) -> bool {
    let (default, rest) = match origin.split_once("://") {
        Some(("http", rest)) => (80, rest),
        Some(("https", rest)) => (443, rest),
        _ => return false,
    };
    let Ok(from) = rest.parse::<Authority>() else { return false };
    let port = |of: &Authority| of.port_u16().unwrap_or(default);
    from.host().eq_ignore_ascii_case(host.host()) && port(&from) == port(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_here() {
        for name in ["localhost", "LOCALHOST", "127.0.0.1", "127.8.9.1", "[::1]", "[::ffff:127.0.0.1]"] {
            assert!(is_loopback(name), "{name}");
        }
        for name in
            ["localhost.example.org", "example.org", "10.0.0.1", "[::2]", "0.0.0.0", "127.0.0.1.nip.io", ""]
        {
            assert!(!is_loopback(name), "{name}");
        }
    }

    #[test]
    fn an_origin_is_ours_by_host_and_port() {
        let host = |text: &str| text.parse::<Authority>().unwrap();
        for (origin, ours) in [
            ("http://localhost:8081", "localhost:8081"),
            ("http://LocalHost:8081", "localhost:8081"),
            ("http://gpu", "gpu"),
            ("http://gpu:80", "gpu"),
            ("https://gpu", "gpu:443"),
            ("https://gpu", "gpu"),
            ("http://[::1]:8081", "[::1]:8081"),
        ] {
            assert!(is_origin(origin, &host(ours)), "{origin} {ours}");
        }
        for (origin, ours) in [
            ("http://localhost:3000", "localhost:8081"),
            ("http://127.0.0.1:8081", "localhost:8081"),
            ("null", "localhost:8081"),
            ("", "localhost:8081"),
            ("file://localhost:8081", "localhost:8081"),
            ("http://localhost:8081.example.org", "localhost:8081"),
            ("http://example.org", "localhost:8081"),
        ] {
            assert!(!is_origin(origin, &host(ours)), "{origin} {ours}");
        }
    }
}
