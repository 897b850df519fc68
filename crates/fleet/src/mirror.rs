//! A copy of all entries of a fleet, which follows etcd.
//!
//! Promises:
//!
//! - It is what etcd had at one revision. That goes back only when etcd has lost its data, which is then taken over: a log
//!   line says so. [`Version`] says how it is known.
//! - It follows within two of [`LOOK_EVERY`] and a few calls. Its member may be cut off from the others, forget what it
//!   was to say, or break the connection.
//! - While etcd cannot be reached, it stays as it was, and [`Contents::is_current`] says so.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use crate::clock::Moment;
use crate::etcd::{Entry, Etcd, EtcdError, Event, Version, Watched};

/// How often it is made sure that a majority of etcd's members can be reached.
pub const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How long what was made sure of is good for.
const CURRENT_MAX: Duration = Duration::from_secs(8);
/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(200);

/// The entries below a prefix.
#[derive(Debug, Clone, Default)]
pub struct Contents {
    entries: BTreeMap<String, Entry>,
    version: Version,
    seen_at: Moment,
}

impl Contents {
    /// All of them, by their keys.
    #[must_use]
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// The revision of etcd that they have; 0 before they were read.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.version.revision
    }

    /// The version of etcd that they have. It is [lost](Version::is_lost_by) where etcd has lost its data.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Whether etcd was reached a short time ago.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.revision() > 0 && Moment::now() < self.seen_at.after(CURRENT_MAX)
    }

    fn take_in(&mut self, changes: Vec<Event>) {
        for change in changes {
            self.version.revision = self.version.revision.max(change.revision());
            match change {
                Event::Put(entry) => {
                    self.entries.insert(entry.key.clone(), entry);
                }
                Event::Removed { key, .. } => {
                    self.entries.remove(&key);
                }
            }
        }
    }
}

/// The copy. Dropping it ends it.
#[derive(Debug)]
pub struct Mirror {
    contents: watch::Receiver<Contents>,
    task: tokio::task::JoinHandle<()>,
}

impl Mirror {
    /// Of all entries with this prefix, from now on.
    #[must_use]
    pub fn start(etcd: Etcd, prefix: &str) -> Self {
        let (sender, contents) = watch::channel(Contents::default());
        let follower = Follower { etcd, prefix: Arc::from(prefix), contents: sender };
        Self { contents, task: tokio::spawn(async move { follower.follow().await }) }
    }

    /// The entries, and each change of them.
    #[must_use]
    pub fn contents(&self) -> watch::Receiver<Contents> {
        self.contents.clone()
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Follower {
    etcd: Etcd,
    prefix: Arc<str>,
    contents: watch::Sender<Contents>,
}

impl Follower {
    async fn follow(&self) {
        let mut was_logged = false;
        loop {
            if let Err(error) = self.follow_one(&mut was_logged).await {
                self.etcd.avoid_member();
                if !std::mem::replace(&mut was_logged, true) {
                    tracing::warn!(%error, prefix = &*self.prefix, "cannot watch etcd; retrying");
                }
            }
            sleep(AGAIN).await;
        }
    }

    /// Reads all, and follows until something is in the way.
    async fn follow_one(&self, was_logged: &mut bool) -> Result<(), EtcdError> {
        let asked_at = Moment::now();
        let (entries, version) = self.etcd.read_version(&self.prefix).await?;
        let mut watch = self.etcd.watch(&self.prefix, version.revision + 1).await?;
        let had = self.contents.borrow().version;
        if had.revision > 0 && had.is_lost_by(version) {
            tracing::warn!(%had, has = %version, prefix = &*self.prefix, "etcd has lost its data; taking over what it has");
        }
        self.contents.send_modify(|contents| {
            contents.entries = entries.into_iter().map(|entry| (entry.key.clone(), entry)).collect();
            (contents.version, contents.seen_at) = (version, asked_at);
        });
        if std::mem::take(was_logged) {
            tracing::info!(%version, "watching etcd again");
        }
        let looks = self.looks();
        tokio::pin!(looks);
        loop {
            tokio::select! {
                biased;
                watched = watch.next() => match watched? {
                    Watched::Changes(changes) if changes.is_empty() => {}
                    Watched::Changes(changes) => {
                        self.contents.send_modify(|contents| contents.take_in(changes));
                    }
                    Watched::Ended => return Ok(()),
                },
                looked = &mut looks => return looked,
            }
        }
    }

    /// Looks whether a majority is reached and the watch tells what that knows, until it is not so. Without an error, etcd
    /// has lost its data.
    async fn looks(&self) -> Result<(), EtcdError> {
        // A version that is not the last one, and the one that etcd had then.
        let mut behind: Option<(Version, Version)> = None;
        loop {
            sleep(LOOK_EVERY).await;
            let asked_at = Moment::now();
            let (version, count) = {
                let contents = self.contents.borrow();
                (contents.version, contents.entries.len())
            };
            if let Some((Version { revision, .. }, has)) = behind.filter(|(was, _)| *was == version) {
                return Err(EtcdError::Silent {
                    prefix: self.prefix.to_string(),
                    revision,
                    has: has.revision,
                });
            }
            let changed = self.etcd.changed_behind(&self.prefix, count, version).await?;
            if changed.is_some_and(|has| version.is_lost_by(has)) {
                return Ok(());
            }
            behind = changed.map(|has| (version, has));
            self.contents.send_if_modified(|contents| {
                contents.seen_at = asked_at;
                false
            });
        }
    }
}

#[test]
fn changes_are_taken_in_in_their_order() {
    let entry = |key: &str, mod_revision| Entry {
        key: key.to_owned(),
        value: bytes::Bytes::new(),
        create_revision: 1,
        mod_revision,
        lease: 0,
    };
    let mut contents = Contents::default();
    assert!(!contents.is_current());
    let removed = |key: &str, revision| Event::Removed { key: key.to_owned(), revision };
    contents.take_in(vec![Event::Put(entry("a", 3)), Event::Put(entry("b", 3)), removed("a", 4)]);
    assert_eq!(contents.entries().keys().collect::<Vec<_>>(), ["b"]);
    assert_eq!(contents.revision(), 4);
    contents.take_in(vec![removed("c", 5)]);
    assert_eq!(contents.revision(), 5);
}
