//! Several stores: the first one that can be reached counts.

use std::net::{Ipv4Addr, SocketAddr};

use poorwill_fleet::etcd::{Access, Etcd, Limits};
use poorwill_fleet::store::{StoreLimits, StoreService, precedence};
use poorwill_net::listener::bind;
use poorwill_testkit::etcd::Port;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use super::servers::exchange;
use super::support::{eventually, put};

/// One of a list, until it is aborted.
async fn start(port: u16, list: &Access) -> AbortHandle {
    let (listener, _) = bind("store", SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await.unwrap();
    let service = StoreService::new(precedence::random_id().unwrap(), None, StoreLimits::default());
    let list = list.clone();
    let serving = async move {
        tokio::select! {
            served = service.serve(listener, None, CancellationToken::new()) => served.unwrap(),
            followed = precedence::follow(&service, &list) => followed.unwrap(),
        }
    };
    tokio::spawn(serving).abort_handle()
}

fn access(ports: &[u16]) -> Access {
    let urls: Vec<String> = ports.iter().map(|port| format!("http://127.0.0.1:{port}")).collect();
    Access::new(&urls, None, None).unwrap()
}

async fn range(port: u16) -> (u16, String) {
    let range = move || exchange(port, "/v3/kv/range", r#"{"key": "L2E="}"#);
    tokio::task::spawn_blocking(range).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_one_that_can_be_reached_counts() {
    let all = [Port::free(), Port::free(), Port::free()];
    let [first, second, third] = [0, 1, 2].map(|nth: usize| all[nth].number());
    let list = access(&[first, second, third]);
    let clients = Etcd::open(&list, Limits::default()).unwrap();
    let running = start(first, &list).await;
    let (_second, _third) = (start(second, &list).await, start(third, &list).await);
    eventually("the first serves", async || range(first).await.0 == 200).await;
    let keeps = format!("unavailable: http://127.0.0.1:{first} keeps this fleet's records");
    for other in [second, third] {
        eventually("it says which one counts", async || range(other).await.1.contains(&keeps)).await;
        assert_eq!(range(other).await.0, 503);
    }
    put(&clients, "/a", "", None).await;
    let before = clients.read_version("/").await.unwrap().1;

    running.abort();
    eventually("the second serves", async || range(second).await.0 == 200).await;
    let (entries, after) = clients.read_version("/").await.unwrap();
    assert!(entries.is_empty() && before.is_lost_by(after), "{before} {after}");
    eventually("the third refuses", async || range(third).await.0 == 503).await;
    let mut watch = clients.watch("/", 0).await.unwrap();

    let _running = start(first, &list).await;
    eventually("the second refuses", async || range(second).await.0 == 503).await;
    // It ends what has begun.
    while matches!(watch.next().await, Ok(poorwill_fleet::etcd::Watched::Changes(_))) {}
    let has = clients.read_version("/").await.unwrap().1;
    assert!(before.is_lost_by(has) && after.is_lost_by(has), "{before} {after} {has}");
}

/// As behind an address that it cannot reach itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_is_not_in_the_list_serves_while_no_other_does() {
    let all = [Port::free(), Port::free(), Port::free()];
    let [listed, other, own] = [0, 1, 2].map(|nth: usize| all[nth].number());
    let list = access(&[listed, other]);
    let _own = start(own, &list).await;
    eventually("it serves", async || range(own).await.0 == 200).await;
    let _listed = start(listed, &list).await;
    eventually("it refuses", async || range(own).await.0 == 503).await;
    assert_eq!(range(listed).await.0, 200);
}
