//! The queue of finished spans, and the task that sends them to the collector.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::Full;
use opentelemetry::Context;
use opentelemetry_http::HttpError;
use opentelemetry_otlp::{Protocol, RetryPolicy, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter as _, SpanProcessor};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

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
    spans: mpsc::Sender<SpanData>,
    health: Arc<Health>,
}

/// What is known of the collector.
#[derive(Debug, Default)]
struct Health {
    is_failing: AtomicBool,
    /// Spans that were dropped since it failed.
    lost: AtomicU64,
    /// Why the last request failed.
    reason: Mutex<Option<String>>,
}

/// Sends requests to the collector, in Tokio.
#[derive(Debug)]
struct Sending {
    http: transport::HttpClient<Full<Bytes>>,
    headers: HeaderMap,
    health: Arc<Health>,
}

impl Exporting {
    pub(super) fn start(export: &TraceExport, resource: &Resource) -> Result<(Self, SpanQueue), String> {
        let health = Arc::new(Health::default());
        let sending = Sending {
            http: transport::client(CONNECT_MAX, Some(IDLE_MAX)),
            headers: export.headers.clone(),
            health: Arc::clone(&health),
        };
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(sending)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(export.endpoint.clone())
            .with_timeout(SEND_MAX)
            // A retry would block the thread. The next batch is one.
            .with_retry_policy(RetryPolicy::default().with_max_retries(0))
            .build();
        let mut exporter = exporter.map_err(|error| error.to_string())?;
        exporter.set_resource(resource);
        let (spans, waiting) = mpsc::channel(QUEUE_MAX);
        let ending = CancellationToken::new();
        let task = tokio::spawn(export_all(exporter, waiting, ending.clone(), Arc::clone(&health)));
        Ok((Self { ending, task: Mutex::new(Some(task)) }, SpanQueue { spans, health }))
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
    exporter: SpanExporter,
    mut waiting: mpsc::Receiver<SpanData>,
    ending: CancellationToken,
    health: Arc<Health>,
) {
    loop {
        let mut batch = Vec::new();
        gather(&mut waiting, &ending, &mut batch).await;
        if batch.is_empty() {
            return;
        }
        let count = batch.len();
        match exporter.export(batch).await {
            Ok(()) => health.works(),
            Err(error) => health.lost(count, &health.reason().take().unwrap_or_else(|| error.to_string())),
        }
    }
}

/// Fills a batch. It stays empty if no span can come any more.
async fn gather(
    waiting: &mut mpsc::Receiver<SpanData>,
    ending: &CancellationToken,
    batch: &mut Vec<SpanData>,
) {
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
    fn reason(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }

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

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        match self.spans.try_send(span) {
            // The service is ending.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.health.lost(1, &format!("{QUEUE_MAX} spans wait for it"));
            }
        }
    }

    /// [`Exporting::end`] does it, without blocking a thread.
    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

impl Sending {
    async fn send(&self, mut request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        request.headers_mut().extend(self.headers.clone());
        let response = self.http.request(request.map(Full::new)).await?;
        let (parts, body) = response.into_parts();
        let read = transport::read(body, ANSWER_MAX_BYTES).await;
        if !parts.status.is_success() {
            let text = transport::one_line(&String::from_utf8_lossy(&read.bytes));
            return Err(format!("it answers {}: {text}", parts.status).into());
        }
        Ok(Response::from_parts(parts, read.bytes.into()))
    }
}

impl opentelemetry_http::HttpClient for Sending {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let sent = tokio::time::timeout(SEND_MAX, self.send(request)).await;
            let late = || format!("no answer within {} s", SEND_MAX.as_secs()).into();
            let sent = sent.unwrap_or_else(|_| Err(late()));
            if let Err(error) = &sent {
                let causes: Vec<String> = transport::causes(&**error).map(ToString::to_string).collect();
                *self.health.reason() = Some(causes.join(": "));
            }
            sent
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::super::kept::KeptSpans;
    use super::*;
    use crate::config::Config;
    use poorwill_front::requests::{RequestNow, RequestState, Tokens};

    fn span() -> SpanData {
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
        let mut stream = listener.accept().await.unwrap().0;
        for status in statuses {
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
            let answer = format!("HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n");
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    }

    fn start(listener: &TcpListener) -> (Exporting, SpanQueue) {
        let text = format!(
            "[traces]\nendpoint = \"http://{}/v1/traces\"\n[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"\n",
            listener.local_addr().unwrap()
        );
        let config = Config::parse(&text, &|_| Ok(String::new())).unwrap();
        Exporting::start(&config.traces.unwrap(), &Resource::builder_empty().build()).unwrap()
    }

    #[tokio::test]
    async fn a_full_queue_drops_spans_and_blocks_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (exporting, queue) = start(&listener);
        // On one thread no task takes them in between.
        let span = span();
        (0..QUEUE_MAX + 10).for_each(|_| queue.on_end(span.clone()));
        assert_eq!(queue.health.lost.load(Ordering::Relaxed), 10);
        let statuses = [200; QUEUE_MAX / BATCH_MAX];
        tokio::join!(collector(listener, &statuses), exporting.end(Duration::from_secs(60)));
        assert!(!queue.health.is_failing.load(Ordering::Relaxed), "it works again");
        queue.on_end(span);
        assert_eq!(queue.health.lost.load(Ordering::Relaxed), 0, "what comes after the end is not lost");
    }

    #[tokio::test]
    async fn a_collector_that_fails_loses_spans_until_it_works() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (exporting, queue) = start(&listener);
        let span = span();
        (0..2 * BATCH_MAX).for_each(|_| queue.on_end(span.clone()));
        tokio::join!(collector(listener, &[200, 503]), exporting.end(Duration::from_secs(60)));
        assert!(queue.health.is_failing.load(Ordering::Relaxed));
        assert_eq!(queue.health.lost.load(Ordering::Relaxed), u64::try_from(BATCH_MAX).unwrap());
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
