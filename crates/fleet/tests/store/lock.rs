//! A store with a password, and with TLS.

use poorwill_fleet::etcd::{Access, Etcd, Limits, Txn, User, Watched};
use poorwill_net::tls::{ClientFiles, Identity, ServerFiles, ServerTls};
use poorwill_testkit::certificates::{Authority, Use};
use serde_json::json;
use tempfile::TempDir;

use super::Servers;
use super::servers::{Settings, exchange};
use super::support::{changes, eventually, names, put};

fn client(servers: &Servers, user: Option<User>) -> Etcd {
    Etcd::open(&Access::new(&servers.urls(), None, user).unwrap(), Limits::default()).unwrap()
}

fn user(name: &str, password: &str) -> User {
    User::new(name, password).unwrap()
}

#[tokio::test]
async fn only_those_with_the_password_are_served() {
    let mut servers = Servers::with(Settings { user: Some(user("store", "right")), ..Settings::default() });
    let etcd = client(&servers, Some(user("poor", "right")));
    put(&etcd, "/a", "", None).await;
    let mut watch = etcd.watch("/", 1).await.unwrap();
    assert_eq!(changes(&mut watch).await.len(), 1);
    let error = client(&servers, None).read("/").await.unwrap_err().to_string();
    assert!(error.contains("user name is empty"), "{error}");
    let error = client(&servers, Some(user("poor", "wrong"))).read("/").await.unwrap_err().to_string();
    assert!(error.contains("authentication failed"), "{error}");
    let authenticate = |password| {
        exchange(
            servers.port(0),
            "/v3/auth/authenticate",
            &json!({ "name": "a", "password": password }).to_string(),
        )
    };
    assert_eq!((authenticate("right").0, authenticate("wrong").0), (200, 400));
    let large = authenticate(&"right".repeat(1000));
    assert!(large.0 == 400 && large.1.contains("request is too large"), "{large:?}");
    assert_eq!(exchange(servers.port(0), "/v3/watch", "{}").0, 400);
    // Another process has another token, and its clients get it.
    servers.restart(0);
    assert!(matches!(watch.next().await, Err(_) | Ok(Watched::Ended)));
    eventually("it is written", async || etcd.commit(&Txn::new().put("/b", "", None)).await.is_ok()).await;
    assert_eq!(names(&etcd, "/").await, ["/b"]);
}

#[tokio::test]
async fn a_client_with_a_user_is_served_where_there_is_no_password() {
    let servers = Servers::one().unwrap();
    put(&client(&servers, Some(user("poor", "any"))), "/a", "", None).await;
}

#[tokio::test]
async fn a_store_with_a_certificate_speaks_tls() {
    let folder = TempDir::new().unwrap();
    let mut authority = Authority::new(folder.path(), "ca");
    let own = authority.issue("own", &["127.0.0.1"], Use::Server);
    let identity = Identity { certificate: own.certificate, key: own.key };
    let tls = ServerTls::new(ServerFiles { identity, clients_ca: None }).unwrap();
    let servers = Servers::with(Settings { tls: Some(tls), ..Settings::default() });
    let files = ClientFiles { ca: authority.ca.clone(), identity: None };
    let access = Access::new(&servers.urls(), Some(files), None).unwrap();
    let etcd = Etcd::open(&access, Limits::default()).unwrap();
    put(&etcd, "/a", "", None).await;
    assert_eq!(changes(&mut etcd.watch("/", 1).await.unwrap()).await.len(), 1);
}
