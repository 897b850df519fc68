//! Tells requests by pages of other sites from others, for both listeners.
//!
//! A page in a browser can send requests even to loopback, also under a name of its own that resolves to it. It cannot
//! change `Host`, `Origin` and `Sec-Fetch-Site`, so these show that it is foreign.

use std::net::IpAddr;

use http::header::{self, HeaderMap, HeaderName};
use http::uri::{Authority, Uri};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The host that a request names.
///
/// # Errors
/// It names none, several, or contradicts itself.
pub fn host(uri: &Uri, headers: &HeaderMap) -> Result<Authority, &'static str> {
    let mut all = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (all.next(), all.next()) else {
        return Err("the request has to have one Host header");
    };
    let host = host.to_str().ok().and_then(|text| text.parse::<Authority>().ok());
    let host = host.filter(|host| !host.as_str().contains('@')).ok_or("the Host header is no host")?;
    if uri.authority().is_some_and(|other| other != &host) {
        return Err("the request names another host than its Host header");
    }
    Ok(host)
}

/// Whether a host is this machine. Asks no resolver.
#[must_use]
pub fn is_loopback(host: &str) -> bool {
    let unbracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    match unbracketed.parse::<IpAddr>() {
        Ok(ip) => ip.to_canonical().is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

/// Whether a browser says that another site's page asked.
#[must_use]
pub fn is_from_other_site(headers: &HeaderMap) -> bool {
    headers.get_all(SEC_FETCH_SITE).iter().any(|site| !matches!(site.as_bytes(), b"same-origin" | b"none"))
}

/// Whether an origin has this host and port. The scheme may differ behind a TLS proxy.
#[must_use]
pub fn is_origin(origin: &str, host: &Authority) -> bool {
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
