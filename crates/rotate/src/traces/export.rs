//! The queue of finished spans, and the task that sends them to the collector.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Uri, header};
use http_body_util::Full;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::otlp::{self, TraceResource, Variable};
use super::span::Span;
use crate::config::TraceExport;
use poorwill_net::client as transport;

/// More finished spans are dropped.
const QUEUE_MAX: usize = 4096;
/// Most spans in one request.
const BATCH_MAX: usize = 512;
/// How long a batch waits for more spans.
const BATCH_EVERY: Duration = Duration::from_secs(1);
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// For one request.
const SEND_MAX: Duration = Duration::from_secs(10);
/// How long an unused connection to the collector is kept.
const IDLE_MAX: Duration = Duration::from_secs(30);
const ANSWER_MAX_BYTES: usize = 64 << 10;

/// The task that exports.
#[derive(Debug)]
pub(super) struct Exporting {
    ending: CancellationToken,
    task: Mutex<Option<JoinHandle<()>>>,
}

/// Takes finished spans. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct SpanQueue {
    spans: mpsc::Sender<Span>,
    health: Arc<Health>,
}

/// What is known of the collector.
#[derive(Debug, Default)]
struct Health {
    is_failing: AtomicBool,
    /// Spans that were dropped since it failed.
    lost: AtomicU64,
}

/// Spans that an answer of success refuses (OTLP's `partialSuccess`).
#[derive(Debug)]
struct RefusedSpans {
    spans: usize,
    reason: String,
}

/// Sends requests to the collector.
#[derive(Debug)]
struct Sending {
    http: transport::HttpClient<Full<Bytes>>,
    endpoint: Uri,
    headers: HeaderMap,
    resource: TraceResource,
}

impl Exporting {
    pub(super) fn start(export: &TraceExport, variable: Variable<'_>) -> Result<(Self, SpanQueue), String> {
        let endpoint: Uri = export.endpoint.parse().map_err(|error| format!("endpoint: {error}"))?;
        let mut headers = otlp::headers_from(variable);
        headers.extend(export.headers.clone());
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let agent = HeaderValue::from_static(concat!("poorwill/", env!("CARGO_PKG_VERSION")));
        headers.entry(header::USER_AGENT).or_insert(agent);
        let http = transport::client(CONNECT_MAX, Some(IDLE_MAX));
        let resource = TraceResource::new(&export.service, variable);
        let sending = Sending { http, endpoint, headers, resource };
        let (queue, waiting) = SpanQueue::new();
        let ending = CancellationToken::new();
        let task = tokio::spawn(export_all(sending, waiting, ending.clone(), Arc::clone(&queue.health)));
        Ok((Self { ending, task: Mutex::new(Some(task)) }, queue))
    }

    pub(super) async fn end(&self, timeout: Duration) {
        self.ending.cancel();
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task
            && tokio::time::timeout(timeout, task).await.is_err()
        {
            tracing::warn!("the last traces were not exported in time");
        }
    }
}

async fn export_all(
    sending: Sending,
    mut waiting: mpsc::Receiver<Span>,
    ending: CancellationToken,
    health: Arc<Health>,
) {
    loop {
        let mut batch = Vec::new();
        gather(&mut waiting, &ending, &mut batch).await;
        if batch.is_empty() {
            return;
        }
        // The next batch is the retry.
        match sending.export(&batch).await {
            Ok(None) => health.works(),
            Ok(Some(refused)) => {
                let spans = refused.spans.min(batch.len());
                let reason = format!("it refused {spans} of {} spans: {}", batch.len(), refused.reason);
                health.lost(spans, &reason);
            }
            Err(reason) => health.lost(batch.len(), &reason),
        }
    }
}

/// Fills a batch. It stays empty if no span can come any more.
async fn gather(waiting: &mut mpsc::Receiver<Span>, ending: &CancellationToken, batch: &mut Vec<Span>) {
    let mut due = None;
    while batch.len() < BATCH_MAX {
        let is_due = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        let most = BATCH_MAX - batch.len();
        tokio::select! {
            biased;
            count = waiting.recv_many(batch, most) => {
                if count == 0 {
                    return;
                }
                due = due.or_else(|| Some(tokio::time::Instant::now() + BATCH_EVERY));
            }
            () = ending.cancelled(), if !waiting.is_closed() => waiting.close(),
            () = is_due => return,
        }
    }
}

impl Health {
    /// Warns once until the collector answers.
    fn lost(&self, count: usize, reason: &str) {
        self.lost.fetch_add(u64::try_from(count).unwrap_or(u64::MAX), Ordering::Relaxed);
        if !self.is_failing.swap(true, Ordering::Relaxed) {
            tracing::warn!(reason, "traces are dropped, until the collector of [traces] takes them");
        }
    }

    fn works(&self) {
        if self.is_failing.swap(false, Ordering::Relaxed) {
            let lost = self.lost.swap(0, Ordering::Relaxed);
            tracing::info!(lost, "traces are exported again");
        }
    }
}

impl SpanQueue {
    pub(super) fn new() -> (Self, mpsc::Receiver<Span>) {
        let (spans, waiting) = mpsc::channel(QUEUE_MAX);
        (Self { spans, health: Arc::default() }, waiting)
    }

    /// Drops it if there is no room.
    pub(super) fn push(&self, span: Span) {
        match self.spans.try_send(span) {
            // The service is ending.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.health.lost(1, &format!("{QUEUE_MAX} spans wait for it"));
            }
        }
    }
}

impl Sending {
    /// Spans that the collector refused of a request that it otherwise took.
    async fn export(&self, spans: &[Span]) -> Result<Option<RefusedSpans>, String> {
        let body = otlp::body(&self.resource, spans).map_err(|error| error.to_string())?;
        let sent = tokio::time::timeout(SEND_MAX, self.send(body)).await;
        sent.unwrap_or_else(|_| Err(format!("no answer within {} s", SEND_MAX.as_secs())))
    }

    async fn send(&self, body: Vec<u8>) -> Result<Option<RefusedSpans>, String> {
        let mut request = Request::post(&self.endpoint).body(body.into()).map_err(|error| said(&error))?;
        *request.headers_mut() = self.headers.clone();
        let (parts, body) = self.http.request(request).await.map_err(|error| said(&error))?.into_parts();
        let read = transport::read(body, ANSWER_MAX_BYTES).await;
        if !parts.status.is_success() {
            let text = transport::one_line(&String::from_utf8_lossy(&read.bytes));
            return Err(format!("it answers {}: {text}", parts.status));
        }
        Ok(RefusedSpans::of(&read.bytes))
    }
}

impl RefusedSpans {
    /// What an answer refuses. Collectors may answer with nothing, and with words for a request that they took whole.
    fn of(answer: &[u8]) -> Option<RefusedSpans> {
        let answer: Value = serde_json::from_slice(answer).ok()?;
        let partial = answer.get("partialSuccess")?;
        // JSON of protobuf writes 64 bits as a string.
        let spans = partial.get("rejectedSpans")?;
        let spans = spans.as_u64().or_else(|| spans.as_str()?.parse().ok()).filter(|spans| *spans > 0)?;
        let said = partial.get("errorMessage").and_then(Value::as_str).map(transport::one_line);
        let reason = said.filter(|said| !said.is_empty()).unwrap_or_else(|| "no reason given".to_owned());
        Some(RefusedSpans { spans: usize::try_from(spans).unwrap_or(usize::MAX), reason })
    }
}

/// With all causes.
fn said(error: &(dyn std::error::Error + 'static)) -> String {
    let causes: Vec<String> = transport::causes(error).map(ToString::to_string).collect();
    causes.join(": ")
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::super::kept::KeptSpans;
    use super::*;
    use crate::config::Config;
    use poorwill_front::requests::{RequestNow, RequestState, Tokens};

    fn span() -> Span {
        let now = RequestNow {
            id: String::new(),
            method: "POST".to_owned(),
            path: "/v1/completions".to_owned(),
            peer: None,
            key: None,
            model: None,
            state: RequestState::Reading,
            age_s: 0.0,
            waited_s: None,
            ttft_s: None,
            bytes: 0,
        };
        let kept = KeptSpans::default();
        kept.traces(1.0).request(&now, None).unwrap().end(&now, Some(200), "whole", Tokens::default());
        kept.one("POST")
    }

    /// Answers each request with the next status, then ends.
    async fn collector(listener: TcpListener, statuses: &[u16]) {
        let answers: Vec<(u16, &str)> = statuses.iter().map(|status| (*status, "")).collect();
        answering(listener, &answers).await;
    }

    async fn answering(listener: TcpListener, answers: &[(u16, &str)]) {
        let mut stream = listener.accept().await.unwrap().0;
        for (status, said) in answers {
            let mut text = Vec::new();
            let head = loop {
                stream.read_buf(&mut text).await.unwrap();
                if let Some(at) = text.windows(4).position(|end| end == b"\r\n\r\n") {
                    break at + 4;
                }
            };
            let lines = String::from_utf8_lossy(&text[..head]).to_lowercase();
            let length = lines.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            while text.len() < head + length.parse::<usize>().unwrap() {
                stream.read_buf(&mut text).await.unwrap();
            }
            let answer = format!("HTTP/1.1 {status} x\r\nContent-Length: {}\r\n\r\n{said}", said.len());
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    }

    fn start(listener: &TcpListener) -> (Exporting, SpanQueue) {
        let text = format!(
            "[traces]\nendpoint = \"http://{}/v1/traces\"\n[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"\n",
            listener.local_addr().unwrap()
        );
        let config = Config::parse(&text, &|_| Ok(String::new())).unwrap();
        Exporting::start(&config.traces.unwrap(), &|_| None).unwrap()
    }

    #[tokio::test]
    async fn a_full_queue_drops_spans_and_blocks_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (exporting, queue) = start(&listener);
        // On one thread no task takes them in between.
        let span = span();
        (0..QUEUE_MAX + 10).for_each(|_| queue.push(span.clone()));
        assert_eq!(queue.health.lost.load(Ordering::Relaxed), 10);
        let statuses = [200; QUEUE_MAX / BATCH_MAX];
        tokio::join!(collector(listener, &statuses), exporting.end(Duration::from_secs(60)));
        assert!(!queue.health.is_failing.load(Ordering::Relaxed), "it works again");
        queue.push(span);
        assert_eq!(queue.health.lost.load(Ordering::Relaxed), 0, "what comes after the end is not lost");
    }

    #[tokio::test]
    async fn a_collector_that_fails_loses_spans_until_it_works() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (exporting, queue) = start(&listener);
        let span = span();
        (0..2 * BATCH_MAX).for_each(|_| queue.push(span.clone()));
        tokio::join!(collector(listener, &[200, 503]), exporting.end(Duration::from_secs(60)));
        assert!(queue.health.is_failing.load(Ordering::Relaxed));
        assert_eq!(queue.health.lost.load(Ordering::Relaxed), u64::try_from(BATCH_MAX).unwrap());
    }

    #[test]
    fn spans_that_a_collector_refuses_are_read() {
        for (answer, refused) in [
            (r#"{"partialSuccess":{"rejectedSpans":"3","errorMessage":"too\nold"}}"#, Some((3, "too old"))),
            (r#"{"partialSuccess":{"rejectedSpans":2}}"#, Some((2, "no reason given"))),
            (r#"{"partialSuccess":{"rejectedSpans":"0","errorMessage":"slow down"}}"#, None),
            (r#"{"partialSuccess":{"rejectedSpans":-1}}"#, None),
            (r#"{"partialSuccess":{}}"#, None),
            ("{}", None),
            ("", None),
            ("<html>", None),
        ] {
            let read = RefusedSpans::of(answer.as_bytes());
            let read = read.as_ref().map(|refused| (refused.spans, &*refused.reason));
            assert_eq!(read, refused, "{answer}");
        }
    }

    #[tokio::test]
    async fn spans_that_are_refused_are_lost() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (exporting, queue) = start(&listener);
        let span = span();
        (0..5).for_each(|_| queue.push(span.clone()));
        let answers = [(200, r#"{"partialSuccess":{"rejectedSpans":"3"}}"#)];
        tokio::join!(answering(listener, &answers), exporting.end(Duration::from_secs(60)));
        assert!(queue.health.is_failing.load(Ordering::Relaxed));
        assert_eq!(queue.health.lost.load(Ordering::Relaxed), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_waits_a_moment_for_more() {
        let (sender, mut waiting) = mpsc::channel(10);
        let (ending, mut batch) = (CancellationToken::new(), Vec::new());
        let span = span();
        let sent = async {
            for _ in 0..3 {
                sender.try_send(span.clone()).unwrap();
                tokio::time::sleep(BATCH_EVERY / 4).await;
            }
        };
        tokio::join!(gather(&mut waiting, &ending, &mut batch), sent);
        assert_eq!(batch.len(), 3);
        ending.cancel();
        batch.clear();
        sender.try_send(span).unwrap();
        gather(&mut waiting, &ending, &mut batch).await;
        assert_eq!((batch.len(), waiting.is_closed()), (1, true));
    }
}
