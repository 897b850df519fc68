//! As much of HTTP/1.1 as these tests ask with: one request for each connection, and what came of it byte by byte.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use super::fixture::HANGS;

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// Asks, and reads the answer to its end.
pub(crate) fn ask(
    port: u16,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> io::Result<Answer> {
    let mut stream = send(port, method, path, headers, body)?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    parsed(&bytes)
}

/// Asks, and leaves the answer to be read.
pub(crate) fn send(
    port: u16,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(HANGS))?;
    let more: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n{more}\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes())?;
    Ok(stream)
}

/// An answer as it came. One that is not whole is an error.
pub(crate) fn parsed(bytes: &[u8]) -> io::Result<Answer> {
    let odd = || {
        let text = String::from_utf8_lossy(bytes).into_owned();
        io::Error::new(io::ErrorKind::InvalidData, format!("no whole answer: {text:?}"))
    };
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").ok_or_else(odd)?;
    let head = String::from_utf8(bytes[..end].to_vec()).map_err(|_| odd())?.to_ascii_lowercase();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(odd)?;
    let value =
        |name: &str| head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    let rest = &bytes[end + 4..];
    let body = if value("transfer-encoding") == Some("chunked") {
        unchunked(rest).ok_or_else(odd)?
    } else {
        let whole = value("content-length").is_none_or(|length| length.parse() == Ok(rest.len()));
        if whole { rest.to_vec() } else { return Err(odd()) }
    };
    Ok(Answer { status, body: String::from_utf8(body).map_err(|_| odd())? })
}

/// Nothing if the last chunk is missing.
fn unchunked(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = bytes.windows(2).position(|two| two == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).ok()?, 16).ok()?;
        if size == 0 {
            return (&bytes[end..] == b"\r\n\r\n").then_some(body);
        }
        body.extend_from_slice(bytes.get(end + 2..end + 2 + size)?);
        bytes = bytes.get(end + 2 + size..)?.strip_prefix(b"\r\n")?;
    }
}
