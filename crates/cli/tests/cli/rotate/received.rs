//! The bytes that a request received, and what is allowed with faulty engines. Allowed are the right answer,
//! a clear error, and an answer that is visibly incomplete.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::fixture::TOKENS;
use super::http;
use super::watch::now;

/// A request of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) model: &'a str,
    pub(crate) prompt: &'a str,
    pub(crate) is_stream: bool,
    /// When its client goes away, if it does.
    pub(crate) leaves_after: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Received {
    Right,
    /// An error: its status, and its code.
    Refused(u16, String),
    /// It broke off.
    Broken,
    /// The client did not wait for it.
    Left,
}

/// What came, and when by the clock on the wall, in milliseconds.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) came: Received,
    pub(crate) sent: u128,
    pub(crate) first: u128,
    /// Whether it had words of its engine.
    pub(crate) is_answer: bool,
}

impl Request<'_> {
    /// Asks, and waits so long at most. A client that stays longer leaves an answer that may hang.
    ///
    /// # Errors
    /// What came that may not.
    pub(crate) fn ask(
        &self,
        port: u16,
        truth: &str,
        most: Duration,
        may_hang: impl FnOnce() -> bool,
    ) -> Result<Reply, String> {
        let body = json!({
            "model": self.model, "prompt": self.prompt, "max_tokens": TOKENS, "temperature": 0,
            "stream": self.is_stream,
        });
        let sent = now();
        let stream = http::send(port, "POST", "/v1/completions", &[], &body.to_string());
        let mut stream = stream.map_err(|error| format!("{self:?} cannot be sent: {error}"))?;
        let (bytes, first, is_over) = read(&mut stream, self.leaves_after.unwrap_or(most));
        let is_answer = bytes.starts_with(b"HTTP/1.1 200 ");
        let came = match (is_over, self.leaves_after) {
            (true, _) => judged(&bytes, self.is_stream, truth),
            (false, Some(_)) => Ok(Received::Left),
            (false, None) if may_hang() => Ok(Received::Left),
            (false, None) => Err(format!("it hangs for {most:?}")),
        };
        let came = came.map_err(|error| {
            format!(
                "{self:?}, where {truth:?} is right: {error}; it was {:?}",
                String::from_utf8_lossy(&bytes)
            )
        })?;
        Ok(Reply { came, sent, first, is_answer })
    }
}

/// What comes within so long, when the first of it came, and whether the other side is done.
pub(crate) fn read(stream: &mut TcpStream, most: Duration) -> (Vec<u8>, u128, bool) {
    let (began, mut bytes, mut first, mut piece) = (Instant::now(), Vec::new(), None, [0; 4096]);
    loop {
        let left = most.saturating_sub(began.elapsed());
        if left.is_zero() {
            return (bytes, first.unwrap_or_else(now), false);
        }
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1)))).unwrap();
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(len) => {
                first = first.or_else(|| Some(now()));
                bytes.extend_from_slice(&piece[..len]);
            }
            Err(error)
                if [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted]
                    .contains(&error.kind()) => {}
            // It was reset, which every client sees.
            Err(_) => break,
        }
    }
    (bytes, first.unwrap_or_else(now), true)
}

/// What it was, or why it may not be.
pub(crate) fn judged(bytes: &[u8], is_stream: bool, truth: &str) -> Result<Received, String> {
    let whole = http::parsed(bytes);
    let is_chunked = |end: usize| bytes[..end].to_ascii_lowercase().windows(26).any(|some| some == CHUNKED);
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").ok_or("it has no head")?;
    match whole {
        Ok(answer) if answer.status != 200 => refused(answer.status, &answer.body),
        Ok(answer) if is_stream => {
            let events: Vec<&str> =
                answer.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
            let Some(("[DONE]", events)) = events.split_last().map(|(last, events)| (*last, events)) else {
                return Err("a stream that is whole does not say so".to_owned());
            };
            let output =
                events.iter().map(|event| text(event).ok_or(*event)).collect::<Result<String, &str>>();
            let output = output.map_err(|event| format!("`{event}` has no text"))?;
            if output == truth { Ok(Received::Right) } else { Err(format!("it says {output:?}")) }
        }
        Ok(answer) => match text(&answer.body) {
            Some(output) if output == truth => Ok(Received::Right),
            output => Err(format!("it says {output:?}")),
        },
        Err(_) if !bytes.starts_with(b"HTTP/1.1 200 ") => Err("an error broke off".to_owned()),
        Err(_) if is_stream => {
            if !is_chunked(end) {
                return Err("nobody sees where such a stream ends".to_owned());
            }
            let body = some_of(&bytes[end + 4..]);
            let events = body.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
            // An event may have broken off, too, and the last may say what went wrong.
            let output: String = events.filter_map(text).collect();
            if truth.starts_with(&output) { Ok(Received::Broken) } else { Err(format!("it says {output:?}")) }
        }
        Err(_) => Ok(Received::Broken),
    }
}

const CHUNKED: &[u8] = b"transfer-encoding: chunked";

/// The text of an answer, or of an event of it.
fn text(json: &str) -> Option<String> {
    serde_json::from_str::<Value>(json).ok()?["choices"][0]["text"].as_str().map(str::to_owned)
}

/// An error as OpenAI's interface has them.
fn refused(status: u16, body: &str) -> Result<Received, String> {
    let body: Value = serde_json::from_str(body).map_err(|error| format!("its error is no JSON: {error}"))?;
    let error = &body["error"];
    let has = |name: &str| error[name].as_str().is_some_and(|text| !text.is_empty());
    let code = error["code"].as_str().map_or_else(|| error["code"].to_string(), str::to_owned);
    if has("message") && has("type") && [429, 500, 502, 503].contains(&status) {
        Ok(Received::Refused(status, code))
    } else {
        Err(format!("its error is {status} and {body}"))
    }
}

/// What there is of a body in chunks.
fn some_of(mut bytes: &[u8]) -> String {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|two| two == b"\r\n") {
        let size =
            std::str::from_utf8(&bytes[..end]).ok().and_then(|size| usize::from_str_radix(size, 16).ok());
        let Some(size) = size else { break };
        let rest = &bytes[end + 2..];
        body.extend_from_slice(&rest[..size.min(rest.len())]);
        bytes = rest.get(size + 2..).unwrap_or_default();
    }
    String::from_utf8_lossy(&body).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(text: &str) -> String {
        let data = format!("data: {}\n\n", json!({ "choices": [{ "text": text }] }));
        format!("{:x}\r\n{data}\r\n", data.len())
    }

    fn of_stream(body: &str) -> Result<Received, String> {
        let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        judged(format!("{head}{body}").as_bytes(), true, "one two")
    }

    #[test]
    fn streams_are_right_broken_or_wrong() {
        let (done, end) = ("e\r\ndata: [DONE]\n\n\r\n", "0\r\n\r\n");
        let [one, two, three] = ["one", " two", " three"].map(event);
        assert_eq!(of_stream(&format!("{one}{two}{done}{end}")), Ok(Received::Right));
        for broken in ["", &one, &one[..one.len() - 9], &format!("{one}{two}{done}")] {
            assert_eq!(of_stream(broken), Ok(Received::Broken), "{broken}");
        }
        for wrong in [
            format!("{one}{done}{end}"),
            format!("{one}{two}{end}"),
            format!("{one}{three}{done}{end}"),
            format!("{one}{three}"),
            end.to_owned(),
        ] {
            assert!(of_stream(&wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn answers_and_errors_are_whole_and_right() {
        let of = |status: &str, body: &str, len: usize| {
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {len}\r\n\r\n");
            judged((head + body).as_bytes(), false, "one two")
        };
        let right = json!({ "choices": [{ "text": "one two" }] }).to_string();
        assert_eq!(of("200 OK", &right, right.len()), Ok(Received::Right));
        assert_eq!(of("200 OK", &right[..5], right.len()), Ok(Received::Broken));
        let wrong = right.replace("two", "three");
        let error = json!({ "error": { "message": "no", "type": "odd", "code": "so" } }).to_string();
        assert_eq!(of("503 No", &error, error.len()), Ok(Received::Refused(503, "so".to_owned())));
        for (status, body, len) in [
            ("200 OK", wrong.as_str(), wrong.len()),
            ("200 OK", "", 0),
            ("200 OK", &error, error.len()),
            ("503 No", "", 0),
            ("503 No", "{}", 2),
            ("503 No", &error, error.len() + 1),
            ("404 No", &error, error.len()),
        ] {
            assert!(of(status, body, len).is_err(), "{status} {body}");
        }
        assert!(judged(b"", false, "one two").is_err());
    }
}
