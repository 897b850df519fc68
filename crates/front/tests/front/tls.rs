//! A front with TLS, and one that sends requests to it as a router does to a node.

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::client::legacy::connect::HttpConnector;
use poorwill_front::affinity::Affinity;
use poorwill_front::backend::{Admission, Backend, Listed, ModelNumber, Refused, Route};
use poorwill_front::proxy::{self, Timeouts};
use poorwill_front::requests::Requests;
use poorwill_front::settings::Front;
use poorwill_net::tls::{ClientFiles, ClientTls, Connector, Identity, Stream};
use poorwill_testkit::certificates::{Authority, Files, Use};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower_service::Service as _;

use super::setup::{
    EVENTS, FakeBackend, Setup, Verdict, Wire, answer, chunk, front_of, last_answer, post, run,
};

const ASK: &str = r#"{"model":"org/one","stream":true}"#;
/// Longer than a test.
const LONG: Duration = Duration::from_secs(600);

/// A front that asks for certificates, and what is needed to reach it.
struct Secure {
    setup: Setup,
    authority: Authority,
    router: Files,
    folder: TempDir,
}

impl Secure {
    async fn new() -> Self {
        let folder = TempDir::with_prefix("poorwill-front-tls-").unwrap();
        let mut authority = Authority::new(folder.path(), "ca");
        let node = authority.issue("node", &["127.0.0.1"], Use::Server);
        let router = authority.issue("router", &[], Use::Client);
        let lines = format!("{}\nclients_ca = {:?}", lines(&node), authority.ca);
        Self { setup: Setup::new(&lines).await, authority, router, folder }
    }

    fn files(&self, own: Option<&Files>) -> ClientFiles {
        files(&self.authority.ca, own)
    }

    async fn client(&self) -> Stream {
        connected(self.setup.address, self.files(Some(&self.router))).await.unwrap()
    }

    async fn asking(&self, body: &str) -> Stream {
        let mut client = self.client().await;
        client.write_all(post(body).as_bytes()).await.unwrap();
        client.flush().await.unwrap();
        client
    }
}

fn lines(own: &Files) -> String {
    format!("certificate = {:?}\ncertificate_key = {:?}", own.certificate, own.key)
}

fn files(ca: &Path, own: Option<&Files>) -> ClientFiles {
    let of = |own: &Files| Identity { certificate: own.certificate.clone(), key: own.key.clone() };
    ClientFiles { ca: ca.to_path_buf(), identity: own.map(of) }
}

async fn connected(address: SocketAddr, files: ClientFiles) -> Result<Stream, String> {
    let tls = ClientTls::new(files).unwrap();
    let mut connector = Connector::new(HttpConnector::new(), LONG, Some(tls));
    let uri = format!("https://{address}").parse().unwrap();
    let stream = connector.call(uri).await;
    stream.map(hyper_util::rt::TokioIo::into_inner).map_err(|error| error.to_string())
}

/// What a client without anything to lose gets for a request, or why it gets nothing.
async fn health(address: SocketAddr, files: ClientFiles) -> Result<String, String> {
    let mut stream = connected(address, files).await?;
    let ask = b"GET /health HTTP/1.1\r\nHost: front\r\nConnection: close\r\n\r\n";
    let mut said = String::new();
    let read = async {
        stream.write_all(ask).await?;
        stream.flush().await?;
        stream.read_to_string(&mut said).await
    };
    read.await.map_err(|error| error.to_string())?;
    Ok(said)
}

async fn head(client: &mut Stream) -> String {
    let mut said = Vec::new();
    while !said.ends_with(b"\r\n\r\n") {
        said.push(client.read_u8().await.unwrap());
    }
    String::from_utf8(said).unwrap()
}

#[test]
fn requests_and_answers_of_any_size_pass() {
    run(async {
        let secure = Secure::new().await;
        let mut client = secure.client().await;
        for size in [0, 1, 20_000, 3 << 20] {
            let text = "x".repeat(size);
            let body = format!(r#"{{"model":"org/one","prompt":"{text}"}}"#);
            let asked = post(&body);
            let reply = format!(r#"{{"text":"{text}"}}"#);
            let (sent, received) = (asked.len(), reply.len());
            let exchanged = async {
                // In parts, so that a reader waits for the next one.
                for part in asked.as_bytes().chunks(sent / 3 + 1) {
                    client.write_all(part).await.unwrap();
                    client.flush().await.unwrap();
                    tokio::task::yield_now().await;
                }
                assert!(head(&mut client).await.starts_with("HTTP/1.1 200"));
                let mut got = vec![0; received];
                client.read_exact(&mut got).await.unwrap();
                got
            };
            let (got, (_, body_there)) = tokio::join!(exchanged, secure.setup.answered(last_answer(&reply)));
            assert_eq!(body_there, body.as_bytes());
            assert_eq!(got, reply.as_bytes());
        }
    });
}

#[test]
fn a_client_that_leaves_cancels_its_request() {
    run(async {
        let secure = Secure::new().await;
        secure.setup.say(Verdict::Wait);
        // With a goodbye, and without.
        let mut polite = secure.asking(ASK).await;
        secure.setup.until(|seen| seen.waiting == 1).await;
        polite.shutdown().await.unwrap();
        secure.setup.until(|seen| seen.waiting == 0).await;
        let rude = secure.asking(ASK).await;
        secure.setup.until(|seen| seen.waiting == 1).await;
        drop(rude);
        let seen = secure.setup.until(|seen| seen.waiting == 0).await;
        assert_eq!((seen.gave_up, seen.admitted), (2, 0));
    });
}

#[test]
fn an_answer_that_is_broken_off_is_not_taken_for_complete() {
    run(async {
        let secure = Secure::new().await;
        let mut client = secure.asking(ASK).await;
        let mut engine = secure.setup.engine().await;
        engine.message().await;
        // Its end is the end of the connection.
        engine.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf").await;
        head(&mut client).await;
        let mut half = [0; 4];
        client.read_exact(&mut half).await.unwrap();
        drop(engine);
        // No goodbye has come.
        client.read_to_end(&mut Vec::new()).await.unwrap_err();

        let mut client = secure.asking(ASK).await;
        let mut engine = secure.setup.engine().await;
        engine.message().await;
        engine.send(answer("whole").replacen("\r\n", "\r\nConnection: close\r\n", 1)).await;
        let mut said = Vec::new();
        // By its length.
        while !said.ends_with(b"whole") {
            said.push(client.read_u8().await.unwrap());
        }
    });
}

#[test]
fn a_reader_that_is_slow_gets_everything() {
    run(async {
        let secure = Secure::new().await;
        let mut client = secure.asking(ASK).await;
        let mut engine = secure.setup.engine().await;
        engine.message().await;
        engine.send(EVENTS).await;
        let event = format!("data: {}\n\n", "y".repeat(60_000));
        let writing = tokio::spawn(async move {
            for _ in 0..200 {
                engine.send(chunk(&event)).await;
            }
            engine.send("0\r\n\r\n").await;
            engine
        });
        head(&mut client).await;
        let mut all = Vec::new();
        while !all.ends_with(b"\r\n0\r\n\r\n") {
            let mut part = vec![0; 10_000];
            let count = client.read(&mut part).await.unwrap();
            assert!(count > 0, "it ended after {} bytes", all.len());
            all.extend_from_slice(&part[..count]);
        }
        assert!(all.iter().filter(|byte| **byte == b'y').count() == 200 * 60_000);
        drop(writing.await.unwrap());
    });
}

#[test]
fn clients_without_a_certificate_of_the_ca_get_nothing() {
    run(async {
        let mut secure = Secure::new().await;
        let address = secure.setup.address;
        let said = health(address, secure.files(Some(&secure.router))).await.unwrap();
        assert!(said.starts_with("HTTP/1.1 200"), "{said}");
        let error = health(address, secure.files(None)).await.unwrap_err();
        assert!(error.contains("this process has none configured"), "{error}");
        let mut other = Authority::new(secure.folder.path(), "other");
        let strange = other.issue("strange", &[], Use::Client);
        let late = secure.authority.issue_expired("late", &[], Use::Client);
        let server = secure.authority.issue("server", &["127.0.0.1"], Use::Server);
        for own in [&strange, &late, &server] {
            let error = health(address, secure.files(Some(own))).await.unwrap_err();
            assert!(error.contains(&format!("`{}`", own.certificate.display())), "{error}");
        }
        // Without TLS.
        let mut plain = Wire::to(address).await;
        plain.send("GET /health HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let said = plain.ended().await;
        assert!(!said.starts_with(b"HTTP"), "{said:?}");
        assert_eq!(secure.setup.backend.seen.borrow().admitted, 0);
    });
}

#[test]
fn a_new_certificate_is_shown_to_the_next_client() {
    run(async {
        let mut secure = Secure::new().await;
        let address = secure.setup.address;
        let mut first = secure.client().await;
        secure.authority.issue_expired("node", &["127.0.0.1"], Use::Server);
        let error = health(address, secure.files(Some(&secure.router))).await.unwrap_err();
        assert!(error.contains("its certificate has expired"), "{error}");
        secure.authority.issue("node", &["127.0.0.1"], Use::Server);
        health(address, secure.files(Some(&secure.router))).await.unwrap();
        // One that is there stays.
        first.write_all(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        assert!(head(&mut first).await.starts_with("HTTP/1.1 200"));
    });
}

/// Sends everything to a node, as a router.
struct Router {
    inner: Arc<FakeBackend>,
    url: String,
    tls: Option<ClientTls>,
}

impl Backend for Router {
    fn route(&self, name: &str, affinity: Affinity) -> Option<Route> {
        self.inner.route(name, affinity).map(|route| Route {
            url: self.url.clone(),
            served_as: name.to_owned(),
            ..route
        })
    }

    fn route_of_model(&self, name: &str, affinity: Affinity) -> Option<Route> {
        self.route(name, affinity)
    }

    fn listed(&self) -> Vec<Listed> {
        self.inner.listed()
    }

    fn admit(
        &self,
        _: ModelNumber,
        _: i32,
    ) -> Pin<Box<dyn Future<Output = Result<Admission, Refused>> + Send + '_>> {
        Box::pin(async { Ok(Admission::new(CancellationToken::new(), Box::new(()))) })
    }

    fn suspect(&self, _: ModelNumber) {}

    fn requests(&self) -> Arc<Requests> {
        Arc::default()
    }

    fn front(&self) -> Arc<Front> {
        // It answers to any name.
        Arc::new(Front { listen: ([0, 0, 0, 0], 8080).into(), ..front_of("") })
    }

    fn upstream_tls(&self) -> Option<ClientTls> {
        self.tls.clone()
    }
}

impl Router {
    async fn start(secure: &Secure, tls: Option<ClientFiles>) -> SocketAddr {
        let url = format!("https://{}", secure.setup.address);
        let inner = Arc::clone(&secure.setup.backend);
        let router: Arc<dyn Backend> =
            Arc::new(Self { inner, url, tls: tls.map(|tls| ClientTls::new(tls).unwrap()) });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(proxy::serve(listener, router, CancellationToken::new(), Timeouts::default()));
        address
    }
}

#[test]
fn a_router_reaches_a_node_by_its_certificate() {
    run(async {
        let secure = Secure::new().await;
        let router = Router::start(&secure, Some(secure.files(Some(&secure.router)))).await;
        let mut client = Wire::to(router).await;
        client.send(post(ASK)).await;
        secure.setup.answered(last_answer("{}")).await;
        assert_eq!(client.message().await.0.status(), 200);
        for files in [None, Some(secure.files(None))] {
            let router = Router::start(&secure, files).await;
            let mut client = Wire::to(router).await;
            client.send(post(ASK)).await;
            let (head, body) = client.message().await;
            assert!([502, 503].contains(&head.status()), "{head:?} {}", String::from_utf8_lossy(&body));
        }
    });
}
