//! Which state an etcd has: a cluster, and a revision of it.
//!
//! etcd's data can be lost: its folders are emptied, or a snapshot is restored. Its cluster id tells that only where the
//! peers' URLs or `--initial-cluster-token` changed too: the id is made of these. With the same flags, the id is the same.
//!
//! The revision tells it as well. The reads of this client are linearizable, which is etcd's default. The member that is
//! asked learns from a majority how far they are, and catches up before it answers. So a later read has at least the
//! revision of whatever was seen before, from whichever member. A smaller one means that the data was lost, and one read
//! is enough to know it.

use super::wire::Header;

/// A state of an etcd, as a majority of its members had it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Version {
    /// The id of the cluster; 0 if it is not known.
    pub cluster: u64,
    /// The revision.
    pub revision: u64,
}

impl Version {
    /// Whether `later`, which was asked for after this version was seen, is of an etcd that has lost its data since.
    #[must_use]
    pub fn is_lost_by(self, later: Self) -> bool {
        self.cluster != later.cluster || later.revision < self.revision
    }
}

impl From<Header> for Version {
    fn from(header: Header) -> Self {
        let Header { cluster_id: cluster, revision } = header;
        Self { cluster, revision }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // As etcd's own log writes the id.
        write!(f, "revision {} of cluster {:x}", self.revision, self.cluster)
    }
}

#[test]
fn a_version_is_lost_by_another_cluster_and_by_a_smaller_revision() {
    let version = |cluster, revision| Version { cluster, revision };
    let seen = version(0xab, 7);
    assert!(!seen.is_lost_by(seen));
    assert!(!seen.is_lost_by(version(0xab, 8)));
    assert!(seen.is_lost_by(version(0xab, 6)));
    assert!(seen.is_lost_by(version(0xcd, 8)));
    assert_eq!(seen.to_string(), "revision 7 of cluster ab");
}
