//! URLs of servers: a scheme, a host and a port.

use std::net::Ipv6Addr;

use http::Uri;

/// Accepts `http://`, a host and a port. The message does not repeat the URL, which may contain a password.
///
/// # Errors
/// What is wrong with it.
pub fn check_url(url: &str) -> Result<(), String> {
    match url.strip_prefix("http://") {
        Some(rest) => check_rest(url, rest),
        None => {
            Err("it has to begin with http://; engines are on this machine, or behind a proxy that is"
                .to_owned())
        }
    }
}

/// The same, or `https://`.
///
/// # Errors
/// What is wrong with it.
pub fn check_secure_url(url: &str) -> Result<(), String> {
    match url.strip_prefix("https://").or_else(|| url.strip_prefix("http://")) {
        Some(rest) => check_rest(url, rest),
        None => Err("it has to begin with http:// or https://".to_owned()),
    }
}

fn check_rest(url: &str, rest: &str) -> Result<(), String> {
    if rest.contains(['/', '?', '#', '@', '\\']) || url.parse::<Uri>().is_err() {
        return Err("it has a host and a port, and nothing after them".to_owned());
    }
    let is_host = |host: &str| match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => !host.is_empty() && !host.contains([':', '[', ']']),
    };
    let is_number = |port: &str| port.bytes().all(|digit| digit.is_ascii_digit());
    let port = rest.rsplit_once(':').filter(|(host, port)| is_host(host) && is_number(port));
    match port.map(|(_, port)| port.parse::<u16>()) {
        Some(Ok(1..)) => Ok(()),
        _ => Err("it has no port; say http://127.0.0.1:8000".to_owned()),
    }
}
