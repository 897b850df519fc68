//! The handshake of WebSockets: what it says, and what an engine may see of it.
//!
//! Promise: keys that browsers' clients put into the subprotocols reach no engine.

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version, header};

use super::api_error::ApiError;

/// OpenAI's path for speech.
pub(super) const REALTIME: &str = "/v1/realtime";
/// OpenAI's clients in browsers, which cannot set headers, send their key as this subprotocol.
const KEY_PROTOCOL: &str = "openai-insecure-api-key.";
/// The subprotocol of `REALTIME`.
const REALTIME_PROTOCOL: &str = "realtime";
/// The only version there is.
const VERSION: &[u8] = b"13";

/// Whether a client offers to continue as a WebSocket. Other offers are ignored, as HTTP allows: Java's client offers `h2c`.
pub(super) fn is_offered(headers: &HeaderMap) -> bool {
    listed(headers, &header::UPGRADE).any(|protocol| {
        let name = protocol.split('/').next().unwrap_or_default();
        name.trim().eq_ignore_ascii_case("websocket")
    })
}

/// Refuses what no engine could answer.
pub(super) fn check(parts: &Parts) -> Result<(), ApiError> {
    let headers = &parts.headers;
    if parts.method != Method::GET {
        return Err(ApiError::no_method("GET"));
    }
    if headers.get(header::SEC_WEBSOCKET_VERSION).map(HeaderValue::as_bytes) != Some(VERSION) {
        return Err(ApiError::upgrade_required("this WebSocket's version is not 13, or is not said"));
    }
    let is_named =
        listed(headers, &header::CONNECTION).any(|name| name.trim().eq_ignore_ascii_case("upgrade"));
    if parts.version != Version::HTTP_11 || !is_named || !headers.contains_key(header::SEC_WEBSOCKET_KEY) {
        let text = "a WebSocket begins with HTTP/1.1, `Connection: Upgrade` and a `Sec-WebSocket-Key`";
        return Err(ApiError::bad(text));
    }
    Ok(())
}

/// The keys among the subprotocols.
pub(super) fn keys(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    listed(headers, &header::SEC_WEBSOCKET_PROTOCOL).filter_map(key_in)
}

fn key_in(protocol: &str) -> Option<&str> {
    protocol.trim().strip_prefix(KEY_PROTOCOL)
}

/// Removes the keys from what an engine sees.
pub(super) fn drop_keys(headers: &mut HeaderMap) {
    if keys(headers).next().is_none() {
        return;
    }
    let kept = listed(headers, &header::SEC_WEBSOCKET_PROTOCOL).filter(|one| key_in(one).is_none());
    let kept: Vec<&str> = kept.map(str::trim).collect();
    let kept = HeaderValue::try_from(kept.join(", ")).ok().filter(|kept| !kept.is_empty());
    headers.remove(header::SEC_WEBSOCKET_PROTOCOL);
    if let Some(kept) = kept {
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, kept);
    }
}

/// Whether a client offers this protocol. Browsers fail if none is chosen, and some engines choose none.
pub(super) fn offers_realtime(headers: &HeaderMap) -> bool {
    listed(headers, &header::SEC_WEBSOCKET_PROTOCOL).any(|one| one.trim() == REALTIME_PROTOCOL)
}

/// Chooses the protocol that the client has offered, if the engine chose none.
pub(super) fn choose_realtime(headers: &mut HeaderMap) {
    let realtime = HeaderValue::from_static(REALTIME_PROTOCOL);
    headers.entry(header::SEC_WEBSOCKET_PROTOCOL).or_insert(realtime);
}

fn listed<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> + use<'a> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(','))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_dropped_from_the_subprotocols() {
        for (lines, kept) in [
            (
                &["realtime, openai-insecure-api-key.k , openai-beta.realtime-v1"][..],
                Some("realtime, openai-beta.realtime-v1"),
            ),
            (&["realtime", "openai-insecure-api-key.k"], Some("realtime")),
            (&["openai-insecure-api-key.k"], None),
        ] {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(line));
            }
            assert_eq!(keys(&headers).collect::<Vec<_>>(), ["k"]);
            assert_eq!(offers_realtime(&headers), kept.is_some());
            drop_keys(&mut headers);
            let left: Vec<_> = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter().collect();
            assert_eq!(left.first().and_then(|left| left.to_str().ok()), kept);
            assert!(left.len() <= 1);
        }
    }
}
