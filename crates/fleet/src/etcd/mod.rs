//! A client of etcd, over the JSON gateway that each of its members has beside gRPC.
//!
//! Promises:
//!
//! - A call goes to one member after the other until one answers. While one is silent, the next is asked as well, and the
//!   first good answer counts. [`Limits`] say how long that takes.
//! - A transaction goes to the next member only when one failed, or was silent for a whole call. So a late one seldom
//!   overtakes a newer one.
//! - A call that fails may have been carried out. Callers compare revisions, or write what may be written twice.
//! - Where etcd has users, a token that has expired is renewed, and the call repeated. No error and no log has the password.
//! - What is no etcd, and what is too old for the gateway, is refused with a sentence.
//!
//! The gateway is described in etcd's documentation under "gRPC gateway"; it needs no code made from protocol buffers.

mod access;
mod client;
mod election;
mod entry;
mod error;
mod hints;
mod http;
mod keys;
mod lease;
mod members;
mod tokens;
mod user;
mod version;
mod watch;
pub(crate) mod wire;

pub use self::access::Access;
pub use self::client::Etcd;
pub use self::election::Candidacy;
pub use self::entry::Entry;
pub use self::error::EtcdError;
pub use self::keys::{Txn, TxnAnswer};
pub use self::lease::LeaseId;
pub use self::members::Limits;
pub use self::user::User;
pub use self::version::Version;
pub use self::watch::{Event, Watch, Watched};
