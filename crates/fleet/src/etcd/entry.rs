//! A key of etcd.

use bytes::Bytes;

/// A key with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Bytes,
    /// When it was created.
    pub create_revision: u64,
    /// When it was written last.
    pub mod_revision: u64,
    /// Under which lease; 0 for none.
    pub lease: i64,
}
