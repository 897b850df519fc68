//! An etcd that has users.

use poorwill_fleet::controller::Settings;
use poorwill_fleet::etcd::{Access, Etcd, EtcdError, Limits, Txn, User};
use poorwill_fleet::keys;
use poorwill_fleet::mirror::Mirror;
use poorwill_fleet::session::Session;
use poorwill_testkit::etcd::Servers;
use poorwill_testkit::watchdog::TEST_TIMEOUT;
use serde_json::json;

use super::fleet::{Fleet, leads};
use super::support::{LONG_TTL, TTL, put, until};

const PASSWORD: &str = "kept-secret";
const STEADY: Limits = Limits { connect: TEST_TIMEOUT, call: TEST_TIMEOUT, hedge: TEST_TIMEOUT };

/// Passwords are hashed fast here.
fn servers() -> Option<Servers> {
    Servers::start(1, &["--bcrypt-cost=4"])
}

fn client(servers: &Servers, password: &str) -> Etcd {
    let user =
        User::configured(Some("poor".to_owned()), Some(password.to_owned()), &|text| Ok(text.to_owned()));
    let access = Access::new(&servers.urls(), None, user.unwrap()).unwrap();
    let etcd = Etcd::open(&access, STEADY).unwrap();
    assert!(!format!("{access:?} {etcd:?}").contains(password));
    etcd
}

/// All tokens of a user end with a change of its password, also to the same one.
fn end_tokens(servers: &Servers) {
    let change = json!({ "name": "poor", "password": PASSWORD }).to_string();
    let answer = servers.post_as_root(PASSWORD, "/v3/auth/user/changepw", &change);
    assert!(!answer.contains("error"), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_of_one_prefix_runs_a_fleet() {
    let Some(servers) = servers() else { return };
    servers.enable_users(PASSWORD);
    let etcd = client(&servers, PASSWORD);
    let fleet = Fleet::new(etcd.clone());
    let mirror = Mirror::start(etcd.clone(), &keys::prefix(&fleet.name));
    let mut contents = mirror.contents();
    let session = Session::start(etcd.clone(), TTL);
    until(&mut session.lease(), "a lease is granted", Option::is_some).await;
    fleet.node("n1", &["one", "two"]).await;
    let settings = Settings { lease_ttl: LONG_TTL, ..fleet.settings("a") };
    let controller = poorwill_fleet::controller::Controller::start(etcd.clone(), settings);
    leads(&controller).await;
    for _ in 0..3 {
        assert_eq!(fleet.settled().await.len(), 2);
        let (_, revision) = etcd.read(&keys::prefix(&fleet.name)).await.unwrap();
        until(&mut contents, "the mirror follows", |contents| contents.revision() >= revision).await;
        end_tokens(&servers);
        fleet.pin("one", 1).await;
    }
    controller.end().await;
    session.end().await;

    let elsewhere = etcd.commit(&Txn::new().put("/other", "", None)).await.unwrap_err().to_string();
    assert!(elsewhere.contains("permission denied") && elsewhere.contains("/poorwill/"), "{elsewhere}");
    etcd.read("/").await.unwrap_err();
    let mut watch = etcd.watch("/other", 1).await.unwrap();
    let refused = watch.next().await.unwrap_err().to_string();
    assert!(refused.starts_with("etcd ended the watch: ") && refused.contains("permission"), "{refused}");
}

#[tokio::test]
async fn a_wrong_password_and_none_are_one_sentence() {
    let Some(servers) = servers() else { return };
    servers.enable_users(PASSWORD);
    // The second time, etcd is not asked.
    let wrong = client(&servers, "wrong-password");
    for _ in 0..2 {
        let error = wrong.read("/poorwill/").await.unwrap_err();
        assert!(matches!(error, EtcdError::Refused { .. }), "{error:?}");
        assert_eq!(
            error.to_string(),
            "etcd refuses /v3/auth/authenticate: etcdserver: authentication failed, invalid user ID or password; look at \
             etcd_user and etcd_password (code 3)"
        );
        assert!(!format!("{error:?}").contains("wrong-password"));
    }
    let none = Etcd::new(&servers.urls(), STEADY).unwrap().read("/poorwill/").await.unwrap_err().to_string();
    assert!(none.contains("user name is empty; etcd has users: name one by etcd_user"), "{none}");
}

/// Nodes may have a user before etcd does, so that they need no common restart.
#[tokio::test]
async fn users_may_come_and_go() {
    let Some(servers) = servers() else { return };
    let etcd = client(&servers, PASSWORD);
    put(&etcd, "/poorwill/a", "without users", None).await;
    servers.enable_users(PASSWORD);
    put(&etcd, "/poorwill/a", "with users", None).await;
    etcd.watch("/poorwill/", 1).await.unwrap().next().await.unwrap();
    let answer = servers.post_as_root(PASSWORD, "/v3/auth/disable", "{}");
    assert!(!answer.contains("error"), "{answer}");
    put(&etcd, "/other", "without users", None).await;
}

#[test]
fn a_user_in_a_url_is_refused_and_not_repeated() {
    for url in
        ["http://poor:kept-secret@10.0.0.1:2379", "https://kept-secret@10.0.0.1", "kept-secret@10.0.0.1"]
    {
        let error = Etcd::new(&[url.to_owned()], STEADY).unwrap_err();
        assert!(error.to_string().contains("name that by etcd_user and etcd_password"), "{error}");
        assert!(!format!("{error} {error:?}").contains("kept-secret"), "{error}");
    }
}
