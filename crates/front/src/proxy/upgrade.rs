//! What a connection says when it leaves HTTP for a WebSocket.

use http::{HeaderMap, HeaderValue, header};

/// The end of both handshakes. These headers are of one hop, so each has its own.
pub(super) fn switch(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
}
