//! TLS to a real etcd that asks clients for certificates, and to servers that are wrong.

use std::fs;
use std::future::Future;
use std::path::Path;
use std::time::{Duration, Instant};

use poorwill_fleet::etcd::{Access, Etcd, EtcdError, Limits};
use poorwill_fleet::session::Session;
use poorwill_net::tls::{ClientFiles, ClientTls, FileKind, Identity, ServerFiles, ServerTls};
use poorwill_testkit::certificates::{Authority, Files, Use};
use poorwill_testkit::etcd::Servers;
use poorwill_testkit::watchdog::TEST_TIMEOUT;
use tempfile::TempDir;

/// Longer than a call takes on a machine that does other things, so that only what is said fails one.
const LONG: Duration = Duration::from_secs(60);
const PERSISTENT: Limits = Limits { connect: LONG, call: LONG, hedge: LONG };

const HERE: &[&str] = &["127.0.0.1"];

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(TEST_TIMEOUT, test).await.expect("the test hangs") });
}

fn of(files: &Files) -> Identity {
    Identity { certificate: files.certificate.clone(), key: files.key.clone() }
}

fn client(ca: &Path, own: Option<&Files>) -> ClientFiles {
    ClientFiles { ca: ca.to_path_buf(), identity: own.map(of) }
}

/// An etcd with this certificate. With a CA, it asks clients for certificates.
fn etcd(own: &Files, clients_ca: Option<&Path>) -> Option<Servers> {
    let flag = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let mut flags = vec![flag("cert-file", &own.certificate), flag("key-file", &own.key)];
    // Either of these has it ask.
    flags.extend(clients_ca.map(|ca| flag("trusted-ca-file", ca)));
    flags.extend(clients_ca.map(|_| "--client-cert-auth".to_owned()));
    Servers::start(1, &flags.iter().map(String::as_str).collect::<Vec<_>>())
}

fn connected(servers: &Servers, files: &ClientFiles) -> Etcd {
    opened(&servers.urls(), Some(files)).unwrap()
}

fn opened(urls: &[String], files: Option<&ClientFiles>) -> Result<Etcd, EtcdError> {
    Etcd::open(&Access::new(urls, files.cloned(), None)?, PERSISTENT)
}

/// Waits until it serves.
async fn serving(etcd: &Etcd) {
    let started = Instant::now();
    while let Err(error) = etcd.read("a/").await {
        assert!(started.elapsed() < TEST_TIMEOUT / 2, "{error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Why a client with these files gets nothing.
async fn failure(servers: &Servers, files: &ClientFiles) -> String {
    let error = connected(servers, files).read("a/").await.unwrap_err().to_string();
    assert!(error.contains(&servers.urls()[0]), "{error}");
    error
}

#[test]
fn an_etcd_that_asks_for_certificates_serves_who_has_one() {
    let folder = TempDir::new().unwrap();
    let mut authority = Authority::new(folder.path(), "ca");
    let own = authority.issue("server", HERE, Use::Both);
    let node = authority.issue("node", &[], Use::Client);
    let Some(servers) = etcd(&own, Some(&authority.ca)) else { return };
    run(async move {
        let etcd = connected(&servers, &client(&authority.ca, Some(&node)));
        serving(&etcd).await;
        let session = Session::start(etcd.clone(), Duration::from_secs(60));
        session.lease().wait_for(Option::is_some).await.unwrap();
        session.end().await;

        let none = failure(&servers, &client(&authority.ca, None)).await;
        assert!(none.contains("this process has none configured"), "{none}");
        let mut other = Authority::new(folder.path(), "other");
        let strange = other.issue("strange", &[], Use::Client);
        let late = authority.issue_expired("late", &[], Use::Client);
        for own in [&strange, &late] {
            let refused = failure(&servers, &client(&authority.ca, Some(own))).await;
            let named = format!("this process's certificate, `{}`", own.certificate.display());
            assert!(refused.contains(&named), "{refused}");
        }
        let unknown = failure(&servers, &client(&other.ca, Some(&node))).await;
        assert!(unknown.contains(&format!("of no CA in `{}`", other.ca.display())), "{unknown}");
    });
}

#[test]
fn an_etcd_is_known_by_its_own_certificate() {
    let folder = TempDir::new().unwrap();
    let mut authority = Authority::new(folder.path(), "ca");
    let files = client(&authority.ca, None);
    let good = authority.issue("good", HERE, Use::Server);
    let Some(servers) = etcd(&good, None) else { return };
    let named = authority.issue("named", &["etcd.example"], Use::Server);
    let expired = authority.issue_expired("expired", HERE, Use::Server);
    let (named, expired) = (etcd(&named, None).unwrap(), etcd(&expired, None).unwrap());
    run(async move {
        serving(&connected(&servers, &files)).await;
        let plain = servers.urls()[0].replace("https", "http");
        Etcd::new(&[plain], PERSISTENT).unwrap().read("a/").await.unwrap_err();
        let error = failure(&named, &files).await;
        assert!(error.contains("another name") && error.contains("etcd.example"), "{error}");
        let error = failure(&expired, &files).await;
        assert!(error.contains("its certificate has expired"), "{error}");
    });
}

/// The gateway is a client of its own server, and shows the server's certificate.
#[test]
fn a_gateway_needs_a_certificate_that_is_a_clients_too() {
    let folder = TempDir::new().unwrap();
    let mut authority = Authority::new(folder.path(), "ca");
    let own = authority.issue("server", HERE, Use::Server);
    let node = authority.issue("node", &[], Use::Client);
    let Some(servers) = etcd(&own, Some(&authority.ca)) else { return };
    run(async move {
        let error = failure(&servers, &client(&authority.ca, Some(&node))).await;
        assert!(error.contains("serverAuth and clientAuth"), "{error}");
    });
}

#[test]
fn a_server_that_speaks_no_tls_is_said() {
    run(async {
        let folder = TempDir::new().unwrap();
        let authority = Authority::new(folder.path(), "ca");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let answering = async {
            use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 1024]).await.unwrap();
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
            std::future::pending::<()>().await;
        };
        let etcd = opened(&[url], Some(&client(&authority.ca, None))).unwrap();
        let error = tokio::select! {
            () = answering => unreachable!("it waits"),
            read = etcd.read("a/") => read.unwrap_err().to_string(),
        };
        assert!(error.contains("it does not speak TLS"), "{error}");
    });
}

#[test]
fn endpoints_and_files_fit_together() {
    let folder = TempDir::new().unwrap();
    let authority = Authority::new(folder.path(), "ca");
    let files = client(&authority.ca, None);
    let made = |url: &str, tls| opened(&[url.to_owned()], tls).map(drop);
    made("https://etcd:2379/", Some(&files)).unwrap();
    made("http://etcd:2379", None).unwrap();
    let error = made("https://etcd:2379", None).unwrap_err().to_string();
    assert!(error.contains("`https://etcd:2379`") && error.contains("name the CA"), "{error}");
    let error = made("http://etcd:2379", Some(&files)).unwrap_err().to_string();
    assert!(error.contains("say https://"), "{error}");
    for url in ["etcd:2379", "ftp://etcd:2379", "https://etcd:2379/v3"] {
        let error = made(url, Some(&files)).unwrap_err().to_string();
        assert!(error.contains("a host and a port"), "{error}");
    }
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let folder = TempDir::new().unwrap();
    let mut authority = Authority::new(folder.path(), "ca");
    let (one, other) = (authority.issue("one", &[], Use::Both), authority.issue("other", &[], Use::Both));
    let text = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let whole = fs::read_to_string(&authority.ca).unwrap();
    let half = text("half.pem", &whole[..whole.len() / 2]);
    let locked = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    let locked = text("locked.pem", locked);
    let garbage = text("garbage.pem", "garbage");
    let letters = text("letters.pem", "-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n");
    let no_x509 = text("x509.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    let missing = folder.path().join("missing.pem");
    let with = |certificate: &Path, key: &Path| Files { certificate: certificate.into(), key: key.into() };
    let of_ca = |path: &Path| (client(path, None), FileKind::Ca, path.to_path_buf());
    let of_certificate = |path: &Path| {
        (client(&authority.ca, Some(&with(path, &one.key))), FileKind::Certificate, path.to_path_buf())
    };
    let of_key = |path: &Path| {
        (client(&authority.ca, Some(&with(&one.certificate, path))), FileKind::Key, path.to_path_buf())
    };
    for ((files, kind, path), words) in [
        (of_ca(&missing), "No such file"),
        (of_ca(&garbage), "it has no certificate"),
        (of_ca(&half), "an END line is missing"),
        (of_ca(&letters), "other text than base64"),
        (of_ca(&no_x509), "cannot be used"),
        (of_certificate(&garbage), "it has no certificate"),
        (of_certificate(&no_x509), "cannot be used"),
        (of_certificate(&one.key), "it has no certificate"),
        (of_key(&missing), "No such file"),
        (of_key(&garbage), "it has no key"),
        (of_key(&one.certificate), "it has no key"),
        (of_key(&locked), "passphrase"),
        (of_key(&other.key), "it is not the key of the certificate in"),
    ] {
        let error = ClientTls::new(files.clone()).unwrap_err();
        assert_eq!((error.kind, &error.path), (kind, &path), "{error}");
        assert!(error.to_string().contains(words), "{error}: not {words:?}");
        assert!(error.to_string().starts_with(&format!("`{}`: ", path.display())), "{error}");
        if let Some(identity) = files.identity {
            let server = ServerFiles { identity, clients_ca: None };
            assert_eq!(ServerTls::new(server).unwrap_err(), error);
        }
    }
}

#[test]
fn changed_files_are_read_again() {
    let folder = TempDir::new().unwrap();
    let mut authority = Authority::new(folder.path(), "ca");
    let own = authority.issue("own", &[], Use::Both);
    let tls = ClientTls::new(client(&authority.ca, Some(&own))).unwrap();
    let first = tls.config();
    assert!(std::sync::Arc::ptr_eq(&first, &tls.config()));
    // By a rename, so that it is another file.
    let renewed = authority.issue("renewed", &[], Use::Both);
    fs::rename(&renewed.certificate, &own.certificate).unwrap();
    // The key is not the certificate's yet.
    assert!(std::sync::Arc::ptr_eq(&first, &tls.config()));
    fs::rename(&renewed.key, &own.key).unwrap();
    let second = tls.config();
    assert!(!std::sync::Arc::ptr_eq(&first, &second));
    assert!(std::sync::Arc::ptr_eq(&second, &tls.config()));
    fs::remove_file(&own.key).unwrap();
    assert!(std::sync::Arc::ptr_eq(&second, &tls.config()));
}
