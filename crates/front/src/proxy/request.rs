//! Checks of a request: path, headers, and key.

use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version, header};

use super::api_error::{ApiError, NOT_BEGUN};
use super::direct::Direct;
use super::path::check_path;
use super::{multipart, websocket};
use crate::settings::paths::{self, decoded};
use crate::settings::{self, Key};

/// Anthropic's header for a key.
static X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Azure's header for a key.
static API_KEY: HeaderName = HeaderName::from_static("api-key");

#[derive(Debug, PartialEq, Eq)]
pub(super) enum About {
    Health,
    /// The list of models.
    Models,
    /// The same, as Ollama's clients ask for it.
    Tags,
    Model(String),
    Engine(PathAndQuery),
    Direct(Direct, PathAndQuery),
}

pub(super) fn about(parts: &Parts, front: &settings::Front) -> Result<About, ApiError> {
    let head_max_bytes = front.head_max_bytes;
    if parts.method == Method::CONNECT || parts.method == Method::TRACE {
        return Err(ApiError::no_method("GET, HEAD, POST"));
    }
    if head_bytes(parts) > head_max_bytes {
        return Err(ApiError::large_head(head_max_bytes));
    }
    check_host(parts)?;
    if let Some(direct) = Direct::of(parts, front)? {
        let path = parts.uri.path_and_query().cloned().ok_or_else(ApiError::no_path)?;
        return Ok(About::Direct(direct, path));
    }
    let path = parts.uri.path();
    if path == "/health" {
        return Ok(About::Health);
    }
    if path == "/v1/models" {
        return Ok(About::Models);
    }
    if path == "/api/tags" {
        return Ok(About::Tags);
    }
    // The name is only looked up. Many names contain a slash, which some clients encode.
    if let Some(name) = path.strip_prefix("/v1/models/") {
        let name =
            decoded(name).ok_or_else(|| ApiError::bad("the name in the path is not encoded rightly"))?;
        return Ok(About::Model(name));
    }
    let is_open = paths::is_open(path, &front.paths);
    if let Some(rest) = path.strip_prefix('/').filter(|_| is_open || path.starts_with("/v1/")) {
        check_path(rest)?;
    }
    let is_readable = || paths::is_readable(path, &front.paths);
    // A browser's question before it reads is answered elsewhere.
    let is_asked = parts.method == Method::OPTIONS && is_readable();
    if !(is_open || is_asked) {
        return Err(if is_readable() {
            ApiError::no_method("GET, HEAD")
        } else if paths::is_administration(path) {
            ApiError::no_passthrough()
        } else {
            ApiError::unlisted_path(path)
        });
    }
    let path = parts.uri.path_and_query().cloned().ok_or_else(ApiError::no_path)?;
    Ok(About::Engine(path))
}

/// HTTP/1.1 requires one `Host`. A request URI with a host has to match it.
fn check_host(parts: &Parts) -> Result<(), ApiError> {
    let mut hosts = parts.headers.get_all(header::HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() || (host.is_none() && parts.version == Version::HTTP_11) {
        return Err(ApiError::bad("a request has one `Host`"));
    }
    if let Some(authority) = parts.uri.authority() {
        let is_same =
            host.is_none_or(|host| host.as_bytes().eq_ignore_ascii_case(authority.as_str().as_bytes()));
        if !is_same || parts.uri.scheme_str() != Some("http") {
            return Err(ApiError::bad("this is no proxy for others: ask for a path"));
        }
    }
    Ok(())
}

fn head_bytes(parts: &Parts) -> u64 {
    let of_line =
        parts.method.as_str().len() + parts.uri.path_and_query().map_or(0, |path| path.as_str().len());
    let of_fields: usize =
        parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    u64::try_from(of_line + of_fields).unwrap_or(u64::MAX)
}

/// Without configured keys, every client is accepted.
pub(super) fn check_key<'a>(headers: &HeaderMap, keys: &'a [Key]) -> Result<Option<&'a Key>, ApiError> {
    if keys.is_empty() {
        return Ok(None);
    }
    let given = given_key(headers).ok_or_else(ApiError::no_key)?;
    // Compares all keys, so that timing does not reveal which one matches.
    let found = keys.iter().fold(None, |found, key| if key.matches(given) { Some(key) } else { found });
    found.map(Some).ok_or_else(ApiError::no_key)
}

/// The only key of a request. Different keys in several headers are none.
fn given_key(headers: &HeaderMap) -> Option<&str> {
    let mut only = None;
    for name in [&header::AUTHORIZATION, &X_API_KEY, &API_KEY] {
        for value in headers.get_all(name) {
            let value = value.to_str().ok()?;
            let key = if name == header::AUTHORIZATION {
                value.split_once(' ').filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))?.1
            } else {
                value
            };
            let key = key.trim();
            if only.is_some_and(|other| other != key) {
                return None;
            }
            only = Some(key);
        }
    }
    for key in websocket::keys(headers) {
        if only.is_some_and(|other| other != key) {
            return None;
        }
        only = Some(key);
    }
    only
}

/// Paths that take forms. Any page may send one without its browser's asking first, as [`origin`](super::origin) knows.
const FORM_PATHS: [&str; 4] =
    ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations"];

/// How a body is written.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BodyKind {
    Json,
    Form { boundary: String },
}

/// Refuses bodies by their headers.
pub(super) fn body_kind(path: &str, headers: &HeaderMap) -> Result<BodyKind, ApiError> {
    let mut kinds = headers.get_all(header::CONTENT_TYPE).iter();
    let kind = match (kinds.next(), kinds.next()) {
        (None, _) if !headers.contains_key(header::ORIGIN) => BodyKind::Json,
        (Some(kind), None) => kind
            .to_str()
            .ok()
            .and_then(|kind| {
                let form = FORM_PATHS.contains(&path).then(|| multipart::boundary(kind)).flatten();
                let form = form.map(|boundary| BodyKind::Form { boundary: boundary.to_owned() });
                form.or_else(|| is_json(kind).then_some(BodyKind::Json))
            })
            .ok_or_else(|| if is_form(kind) { no_form(path) } else { ApiError::no_json_type() })?,
        _ => return Err(ApiError::no_json_type()),
    };
    match headers.get(header::CONTENT_ENCODING).map(HeaderValue::as_bytes) {
        None | Some(b"" | b"identity") => Ok(kind),
        Some(_) => Err(ApiError::unsupported_type("compressed")),
    }
}

fn is_form(kind: &HeaderValue) -> bool {
    let name = b"multipart/";
    kind.as_bytes().get(..name.len()).is_some_and(|start| start.eq_ignore_ascii_case(name))
}

fn no_form(path: &str) -> ApiError {
    if FORM_PATHS.contains(&path) {
        ApiError::odd_form()
    } else {
        ApiError::form_elsewhere(path, &FORM_PATHS)
    }
}

fn is_json(kind: &str) -> bool {
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
}

/// Also drops headers that `Connection` names.
pub(super) fn drop_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        // These describe the message. A hop that names them is wrong.
        .filter(|name| name != header::CONTENT_LENGTH && name != header::CONTENT_TYPE)
        .collect();
    named.iter().for_each(|name| drop(headers.remove(name)));
    for name in [
        header::CONNECTION,
        header::TRANSFER_ENCODING,
        header::TE,
        header::UPGRADE,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
    ] {
        headers.remove(name);
    }
    for name in ["keep-alive", "proxy-connection", "http2-settings"] {
        headers.remove(name);
    }
}

/// Leaves what an engine may see of a client.
pub(super) fn upstream_headers(headers: &mut HeaderMap) {
    drop_hop(headers);
    for name in [
        header::AUTHORIZATION,
        header::COOKIE,
        header::HOST,
        header::CONTENT_LENGTH,
        header::EXPECT,
        header::ORIGIN,
        header::TRAILER,
    ] {
        headers.remove(name);
    }
    headers.remove(&X_API_KEY);
    headers.remove(&API_KEY);
    websocket::drop_keys(headers);
}

/// Leaves what a client may see of an engine.
pub(super) fn answer_headers(headers: &mut HeaderMap) {
    drop_hop(headers);
    headers.remove(header::SERVER);
    headers.remove(header::SET_COOKIE);
    headers.remove(&NOT_BEGUN);
    // The front decides which pages may read answers.
    let is_cors = |name: &&HeaderName| name.as_str().starts_with("access-control-");
    let cors: Vec<HeaderName> = headers.keys().filter(is_cors).cloned().collect();
    cors.iter().for_each(|name| drop(headers.remove(name)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_hop_names_is_dropped() {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("x-one , close, content-length"));
        for name in ["x-one", "x-two", "content-length"] {
            headers.insert(name, HeaderValue::from_static("1"));
        }
        drop_hop(&mut headers);
        assert_eq!(headers.len(), 2, "{headers:?}");
        assert!(headers.contains_key("x-two") && headers.contains_key("content-length"));
    }
}
