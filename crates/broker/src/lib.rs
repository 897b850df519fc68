//! Where sleeping pools of several processes lend their GPU memory.
//!
//! Memory stays on a device while a descriptor of it exists. A pool that sleeps lends its descriptors to a [`Broker`],
//! which is a process without a GPU context. At its wake it takes back what is still there. Who lacks memory asks the broker: it
//! closes descriptors, so that the driver frees the memory. A broker never holds the only copy of bytes, so its death
//! costs time and nothing else.
//!
//! A broker knows nothing of GPUs: a device is a word, memory a descriptor with a number of bytes.
#![forbid(unsafe_code)]

mod client;
mod ledger;
mod limit;
mod packets;
mod protocol;
mod server;
mod socket_path;

pub use client::{Client, ClientError, Hello, LentChunk};
pub use limit::raise_descriptor_limit;
pub use protocol::{Ask, Asked, BrokerStatus, BrokerTotals, LenderStatus, VERSION};
pub use server::{Broker, BrokerEnd, BrokerError, BrokerOptions, BrokerStop};
pub use socket_path::{FolderError, default_path};
