//! A client of etcd, over the JSON gateway that each of its members has beside gRPC.
//!
//! Promises:
//!
//! - A call goes to one member after the other until one answers, and each has so long for it as [`Limits`] say.
//! - A call that fails may have been carried out. Callers compare revisions, or write what may be written twice.
//! - What is no etcd, and what is too old for the gateway, is refused with a sentence.
//!
//! The gateway is described in etcd's documentation under "gRPC gateway"; it needs no code made from protocol buffers.

mod election;
mod entry;
mod error;
mod keys;
mod lease;
mod transport;
mod watch;
mod wire;

pub use self::election::Candidacy;
pub use self::entry::Entry;
pub use self::error::EtcdError;
pub use self::keys::{Txn, TxnAnswer};
pub use self::lease::LeaseId;
pub use self::transport::{Etcd, Limits};
pub use self::watch::{Event, Watch, Watched};
