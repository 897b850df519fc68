//! Mirrors: equal to what a single writer knows, and never going back.

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;
use poorwill_fleet::etcd::{Entry, Etcd, LeaseId, Txn};
use poorwill_fleet::mirror::{Contents, Mirror};
use poorwill_testkit::effort::{Effort, seed_of_this_run};
use poorwill_testkit::proxy::Proxy;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::Servers;
use super::support::{LONG_TTL, compact, delete, eventually, hasty, put, steady, until};

/// Values by their keys, with the revisions that wrote them.
type Model = BTreeMap<String, (String, u64)>;

/// What was there at which revision, as its only writer knows it.
#[derive(Debug)]
struct Past(BTreeMap<u64, Model>);

impl Past {
    fn at(&self, revision: u64) -> &Model {
        self.0.range(..=revision).next_back().expect("from the first revision on").1
    }

    /// What is wrong with what was seen of a mirror.
    fn problems(&self, seen: &[(u64, Model)]) -> Vec<String> {
        let mut problems = Vec::new();
        for (revision, model) in seen {
            if model != self.at(*revision) {
                problems.push(format!("at {revision}: {model:?}, and it was {:?}", self.at(*revision)));
            }
        }
        if !seen.is_sorted_by_key(|(revision, _)| *revision) {
            problems.push("its revision goes back".to_owned());
        }
        problems
    }
}

fn model(contents: &Contents) -> Model {
    let one = |(key, entry): (&String, &Entry)| {
        (key.clone(), (String::from_utf8(entry.value.to_vec()).unwrap(), entry.mod_revision))
    };
    contents.entries().iter().map(one).collect()
}

/// Notes all that a mirror shows.
pub(crate) fn observed(mirror: &Mirror) -> tokio::task::JoinHandle<Vec<(u64, Model)>> {
    let mut contents = mirror.contents();
    tokio::spawn(async move {
        let mut seen = Vec::new();
        while contents.changed().await.is_ok() {
            let contents = contents.borrow_and_update();
            seen.push((contents.revision(), model(&contents)));
        }
        seen
    })
}

pub(crate) async fn reaches(contents: &mut watch::Receiver<Contents>, revision: u64) -> Contents {
    until(contents, "the mirror follows", |contents| contents.revision() >= revision).await
}

/// A client that writes at random, and what it knows of it.
struct Writer {
    etcd: Etcd,
    prefix: String,
    rng: Rng,
    model: Model,
    leased: Vec<(LeaseId, Vec<String>)>,
    past: Past,
}

impl Writer {
    async fn write(&mut self) {
        let key = |rng: &mut Rng, prefix: &str| format!("{prefix}{}", rng.u8(..12));
        match self.rng.u8(..10) {
            0..5 => {
                // Several at one revision.
                let mut txn = Txn::new();
                let mut keys = Vec::new();
                for _ in 0..self.rng.usize(1..4) {
                    let key = key(&mut self.rng, &self.prefix);
                    if !keys.contains(&key) {
                        txn = txn.put(&key, "v", None);
                        keys.push(key);
                    }
                }
                let revision = self.etcd.commit(&txn).await.unwrap().revision;
                self.put(&keys, revision);
            }
            5..7 => {
                let key = key(&mut self.rng, &self.prefix);
                let revision = delete(&self.etcd, &key).await.revision;
                self.model.remove(&key);
                self.note(revision);
            }
            7 => {
                let lease = self.etcd.grant(LONG_TTL).await.unwrap();
                let keys = [key(&mut self.rng, &self.prefix)];
                let revision = put(&self.etcd, &keys[0], "v", Some(lease)).await.revision;
                self.put(&keys, revision);
                self.leased.push((lease, keys.to_vec()));
            }
            8 if !self.leased.is_empty() => {
                let (lease, _) = self.leased.swap_remove(self.rng.usize(..self.leased.len()));
                // One writer: what goes with it is the next revision.
                let before = put(&self.etcd, "/elsewhere", "", None).await.revision;
                let (entries, _) = self.etcd.read(&self.prefix).await.unwrap();
                self.etcd.revoke(lease).await.unwrap();
                let (left, _) = self.etcd.read(&self.prefix).await.unwrap();
                self.model.retain(|key, _| left.iter().any(|entry| entry.key == *key));
                if left.len() < entries.len() {
                    self.note(before + 1);
                }
            }
            _ => drop(put(&self.etcd, "/elsewhere", "", None).await),
        }
    }

    fn put(&mut self, keys: &[String], revision: u64) {
        for key in keys {
            self.model.insert(key.clone(), ("v".to_owned(), revision));
        }
        self.note(revision);
    }

    fn note(&mut self, revision: u64) {
        self.past.0.insert(revision, self.model.clone());
    }
}

/// Writes at random while the mirror's connection breaks and etcd forgets, and compares all that the mirror showed.
async fn follows(servers: &Servers, seed: u64) {
    let proxy = Proxy::to(servers.port(0));
    let prefix = "/random/".to_owned();
    let etcd = steady(&servers.urls());
    let mirror = Mirror::start(hasty(&[proxy.url()]), &prefix);
    let observing = observed(&mirror);
    let past = Past(BTreeMap::from([(0, Model::new())]));
    let rng = Rng::with_seed(seed);
    let mut writer = Writer { etcd: etcd.clone(), prefix, rng, model: Model::new(), leased: vec![], past };
    for _ in 0..60 {
        match writer.rng.u8(..24) {
            0 => proxy.cut_once(),
            1 => {
                // Older versions of etcd (its issue 18089) lose a removal at the very revision that they compact to.
                let revision = put(&etcd, "/elsewhere", "", None).await.revision;
                compact(servers, revision);
            }
            2 => proxy.hold_those_with(&["/v3/watch"]),
            3 => proxy.hold(),
            4..8 => proxy.go_on(),
            8..12 => sleep(Duration::from_millis(writer.rng.u64(..50))).await,
            _ => writer.write().await,
        }
    }
    proxy.go_on();
    let last = put(&etcd, &format!("{}last", writer.prefix), "v", None).await.revision;
    writer.put(&["/random/last".to_owned()], last);
    let contents = reaches(&mut mirror.contents(), last).await;
    assert_eq!((contents.revision(), &model(&contents)), (last, &writer.model));
    drop(mirror);
    let seen = observing.await.unwrap();
    let problems = writer.past.problems(&seen);
    assert!(problems.is_empty(), "seed {seed}:\n{}", problems.join("\n"));
    assert!(!seen.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_what_etcd_had_at_one_revision() {
    if Servers::one().is_none() {
        return;
    }
    let first = seed_of_this_run().unwrap_or_else(|| fastrand::u64(..));
    println!("POORWILL_SEED={first}");
    let cases = u64::from(Effort::of_this_run().cases(30));
    let mut running = JoinSet::new();
    for case in 0..cases {
        running.spawn(async move {
            // Its writer is the only one of its etcd.
            let servers = tokio::task::spawn_blocking(|| Servers::one().unwrap()).await.unwrap();
            follows(&servers, first.wrapping_add(case)).await;
        });
        if running.len() >= 3 {
            running.join_next().await.unwrap().unwrap();
        }
    }
    while let Some(done) = running.join_next().await {
        done.unwrap();
    }
}

#[test]
fn a_mirror_that_lacks_something_is_noticed() {
    let one: Model = BTreeMap::from([("a".to_owned(), ("v".to_owned(), 2))]);
    let two: Model = BTreeMap::from([("a".to_owned(), ("v".to_owned(), 4))]);
    let past =
        Past(BTreeMap::from([(0, Model::new()), (2, one.clone()), (4, two.clone()), (7, Model::new())]));
    let right = [(1, Model::new()), (2, one.clone()), (3, one.clone()), (4, two.clone()), (9, Model::new())];
    assert_eq!(past.problems(&right), Vec::<String>::new());
    assert_eq!(past.problems(&[(4, one.clone())]).len(), 1);
    assert_eq!(past.problems(&[(7, two.clone())]).len(), 1);
    assert_eq!(past.problems(&[(2, Model::new())]).len(), 1);
    assert_eq!(past.problems(&[(4, two), (2, one)]).len(), 1);
}

/// While its etcd is silent it stays as it was, and says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_not_current_while_etcd_is_silent() {
    let Some(servers) = Servers::one() else { return };
    let (etcd, proxy) = (steady(&servers.urls()), Proxy::to(servers.port(0)));
    let mirror = Mirror::start(hasty(&[proxy.url()]), "/m/");
    let mut contents = mirror.contents();
    assert!(!contents.borrow().is_current());
    let first = put(&etcd, "/m/a", "", None).await.revision;
    reaches(&mut contents, first).await;
    eventually("it is current", async || contents.borrow().is_current()).await;
    proxy.hold();
    eventually("it is not current", async || !contents.borrow().is_current()).await;
    // All that it could have been reported is forgotten.
    delete(&etcd, "/m/a").await;
    let last = put(&etcd, "/m/b", "", None).await.revision;
    compact(&servers, last);
    assert_eq!(contents.borrow().revision(), first);
    assert!(contents.borrow().entries().contains_key("/m/a"));
    proxy.cut_once();
    let now = reaches(&mut contents, last).await;
    assert_eq!(now.entries().keys().collect::<Vec<_>>(), ["/m/b"]);
    eventually("it is current", async || contents.borrow().is_current()).await;
}

/// The call that looks is answered, and the watch tells nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_is_silent_is_noticed() {
    let Some(servers) = Servers::one() else { return };
    let (etcd, proxy) = (steady(&servers.urls()), Proxy::to(servers.port(0)));
    let mirror = Mirror::start(hasty(&[proxy.url()]), "/m/");
    let mut contents = mirror.contents();
    let first = put(&etcd, "/m/a", "", None).await.revision;
    reaches(&mut contents, first).await;
    proxy.hold_open_ones_with("/v3/watch");
    let last = delete(&etcd, "/m/a").await.revision;
    let now = until(&mut contents, "it follows", |contents| contents.entries().is_empty()).await;
    assert!(now.revision() >= last);
}

/// etcd was emptied and started again with the same flags, so that its cluster has the same id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_etcd_has_is_taken_over_behind_a_loss() {
    let Some(mut servers) = Servers::one() else { return };
    let etcd = steady(&servers.urls());
    let mirror = Mirror::start(hasty(&servers.urls()), "/m/");
    let mut contents = mirror.contents();
    assert_eq!((contents.borrow().revision(), contents.borrow().version().cluster), (0, 0));
    for _ in 0..50 {
        put(&etcd, "/m/a", "", None).await;
    }
    let last = put(&etcd, "/m/b", "", None).await.revision;
    let before = reaches(&mut contents, last).await;
    servers.lose_all();
    // As many as before.
    let etcd = steady(&servers.urls());
    put(&etcd, "/m/c", "", None).await;
    let now = put(&etcd, "/m/d", "", None).await.revision;
    assert!(now < last);
    let are_new = |contents: &Contents| contents.entries().keys().eq(["/m/c", "/m/d"]);
    let seen = until(&mut contents, "it is taken over", are_new).await;
    let is_same_cluster = seen.version().cluster == before.version().cluster;
    assert_eq!((seen.revision(), is_same_cluster), (now, super::KEEPS_ITS_ID));
    let next = put(&etcd, "/m/e", "", None).await.revision;
    let seen = until(&mut contents, "it follows", |contents| contents.entries().len() == 3).await;
    assert_eq!(seen.revision(), next);
    eventually("it is current", async || contents.borrow().is_current()).await;
}

/// Only the id tells it, since the other cluster has a greater revision.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_cluster_is_taken_over() {
    let Some(mut servers) = Servers::one() else { return };
    let Some(others) = Servers::one() else { return };
    let (etcd, other) = (steady(&servers.urls()), steady(&others.urls()));
    let first = put(&etcd, "/m/a", "", None).await.revision;
    let mut last = 0;
    while last <= first {
        last = put(&other, "/m/b", "", None).await.revision;
    }
    let mirror = Mirror::start(hasty(&[servers.urls(), others.urls()].concat()), "/m/");
    let mut contents = mirror.contents();
    let before = reaches(&mut contents, first).await;
    assert_eq!(before.entries().keys().collect::<Vec<_>>(), ["/m/a"]);
    servers.kill(0);
    let seen =
        until(&mut contents, "it is taken over", |seen| seen.version().cluster != before.version().cluster)
            .await;
    assert_eq!(seen.revision(), last);
    assert_eq!(seen.entries().keys().collect::<Vec<_>>(), ["/m/b"]);
    assert!(before.version().cluster > 0 && seen.version().cluster > 0);
}
