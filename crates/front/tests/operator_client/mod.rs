//! A client of an operators' listener, and the answers that it reads.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// After this time a test has failed. Nothing is measured by it.
pub(crate) const STUCK: Duration = Duration::from_secs(120);

/// Sends a request with these header lines, which may contain another host.
pub(crate) async fn ask(address: SocketAddr, what: &str, head: &str, body: &str) -> Answer {
    let is_host_said = head.to_ascii_lowercase().contains("host:");
    let host = if is_host_said { String::new() } else { format!("Host: {address}\r\n") };
    let length = if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
    send(address, &format!("{what} HTTP/1.1\r\nConnection: close\r\n{host}{length}{head}\r\n{body}")).await
}

pub(crate) async fn send(address: SocketAddr, text: &str) -> Answer {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    tokio::time::timeout(STUCK, stream.read_to_end(&mut bytes)).await.expect("an answer").unwrap();
    Answer::of(&bytes)
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: BTreeMap<String, String>,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The message of an error.
    pub(crate) fn message(&self) -> String {
        assert!(self.status >= 400, "{self:?}");
        assert_eq!(self.head["content-type"], "application/json", "{self:?}");
        self.json()["error"]["message"].as_str().unwrap().to_owned()
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {text:?}"));
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let head = lines
            .map(|line| line.split_once(": ").unwrap())
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()));
        Self { status, head: head.collect(), body: body.to_owned() }
    }
}

/// OpenMetrics text, parsed strictly.
pub(crate) struct Metrics {
    pub(crate) types: BTreeMap<String, String>,
    pub(crate) samples: BTreeMap<String, f64>,
}

impl Metrics {
    pub(crate) fn of(text: &str) -> Self {
        let mut metrics = Self { types: BTreeMap::new(), samples: BTreeMap::new() };
        let (mut family, mut has_help) = (String::new(), String::new());
        let mut lines = text.lines();
        assert_eq!(lines.next_back(), Some("# EOF"));
        for line in lines {
            if let Some(help) = line.strip_prefix("# HELP ") {
                has_help = help.split_once(' ').expect("a text").0.to_owned();
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert_eq!(has_help, name, "a type comes behind its help");
                assert!(name.starts_with("poorwill_") && !name.ends_with("_total"), "{name}");
                assert!(metrics.types.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
                family = name.to_owned();
            } else if let Some(rest) = line.strip_prefix("# UNIT ") {
                let (name, unit) = rest.split_once(' ').unwrap();
                assert!(name == family && name.ends_with(&format!("_{unit}")), "{line}");
            } else {
                let (sample, value) = line.rsplit_once(' ').unwrap();
                let name = sample.split('{').next().unwrap();
                let suffix =
                    name.strip_prefix(&family).unwrap_or_else(|| panic!("{line} is not of {family}"));
                let may_be: &[&str] = match metrics.types[&family].as_str() {
                    "counter" => &["_total"],
                    "gauge" => &[""],
                    "histogram" => &["_bucket", "_sum", "_count"],
                    other => panic!("{other}"),
                };
                assert!(may_be.contains(&suffix), "{line}");
                let value = value.parse().unwrap();
                assert!(metrics.samples.insert(sample.to_owned(), value).is_none(), "{sample} twice");
            }
        }
        metrics
    }

    pub(crate) fn at(&self, sample: &str) -> f64 {
        *self.samples.get(sample).unwrap_or_else(|| panic!("no {sample} in {:#?}", self.samples))
    }
}
