//! Which pages may use the front, and what their browsers have to know (CORS).
//!
//! Without keys, each client that reaches the front may use it, also a page of any site in a browser on this machine.
//! So a page of another site is refused unless its origin is configured, and a front on loopback answers to loopback
//! names only.

use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, header};

use super::api_error::ApiError;
use crate::settings;
use poorwill_net::site;

/// With keys, a page needs one like everybody else.
pub(super) fn check(parts: &Parts, front: &settings::Front) -> Result<(), ApiError> {
    let headers = &parts.headers;
    if !front.keys.is_empty() {
        return Ok(());
    }
    let host = site::host(&parts.uri, headers).ok();
    let is_named = headers.contains_key(header::HOST) || parts.uri.authority().is_some();
    let is_local_name = host.as_ref().is_some_and(|host| site::is_loopback(host.host()));
    if front.listen.ip().is_loopback() && is_named && !is_local_name {
        return Err(ApiError::forbidden_host());
    }
    if !headers.contains_key(header::ORIGIN) && site::is_from_other_site(headers) {
        return Err(ApiError::forbidden_origin());
    }
    let is_ours = |origin: &HeaderValue| {
        let text = origin.to_str().unwrap_or_default();
        host.as_ref().is_some_and(|host| site::is_origin(text, host)) || is_allowed(origin, front)
    };
    headers.get_all(header::ORIGIN).iter().all(is_ours).then_some(()).ok_or_else(ApiError::forbidden_origin)
}

fn is_allowed(origin: &HeaderValue, front: &settings::Front) -> bool {
    let is_it =
        |allowed: &String| allowed == "*" || origin.as_bytes().eq_ignore_ascii_case(allowed.as_bytes());
    front.origins.iter().any(is_it)
}

/// The headers with which a browser gives an answer to a page.
#[derive(Debug)]
pub(super) struct Cors {
    /// Of the page, if it is allowed.
    origin: Option<HeaderValue>,
    /// Whether answers to others differ.
    varies: bool,
}

impl Cors {
    pub(super) fn new(headers: &HeaderMap, front: &settings::Front) -> Self {
        let mut all = headers.get_all(header::ORIGIN).iter();
        let only = all.next().filter(|_| all.next().is_none());
        let origin = only.filter(|origin| is_allowed(origin, front)).cloned();
        Self { origin, varies: !front.origins.is_empty() }
    }

    pub(super) fn add(self, headers: &mut HeaderMap) {
        if self.varies {
            headers.append(header::VARY, HeaderValue::from_static("Origin"));
        }
        let Some(origin) = self.origin else { return };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        let exposed = HeaderValue::from_static("x-request-id, retry-after");
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
}

/// The headers that answer a browser's question before a request, which carries no key.
pub(super) fn preflight(parts: &Parts, front: &settings::Front) -> Option<HeaderMap> {
    let is_asked = parts.method == Method::OPTIONS
        && parts.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
        && Cors::new(&parts.headers, front).origin.is_some();
    is_asked.then(|| {
        let mut headers = HeaderMap::new();
        let methods = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE");
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        if let Some(names) = parts.headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
        }
        headers
    })
}
