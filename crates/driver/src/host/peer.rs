//! Memory of another host device, which this one can map.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use poorwill_core::driver::Result;
use poorwill_core::peer::PeerMemory;
use poorwill_core::{DriverError, DriverErrorKind, Op};

use super::shared::InUse;
use super::stream::system;
use crate::peer_memory::idle_of;

/// Memory of the host device in a folder ([`HostConfig::shared_in`](super::HostConfig::shared_in)).
#[derive(Debug)]
pub struct HostPeer {
    name: String,
    capacity_bytes: u64,
    in_use: Mutex<InUse>,
}

impl HostPeer {
    /// That of a device of this capacity.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn open(capacity_bytes: u64, folder: &Path) -> Result<Self> {
        let opened = InUse::open(capacity_bytes, Some(folder));
        let in_use = opened.map_err(|error| failed(Op::Open, "open another device's memory", &error))?;
        Ok(Self { name: in_use.name(), capacity_bytes, in_use: Mutex::new(in_use) })
    }
}

impl PeerMemory for HostPeer {
    fn memory_name(&self) -> &str {
        &self.name
    }

    fn idle_bytes(&self) -> Result<u64> {
        let free = self.in_use.lock().unwrap_or_else(PoisonError::into_inner).free_bytes();
        let free = free.map_err(|error| failed(Op::MemoryInfo, "look for free memory", &error))?;
        Ok(idle_of(free, self.capacity_bytes))
    }

    fn create(&self, bytes: u64) -> Result<OwnedFd> {
        let failed = |error| failed(Op::Create, "make memory of another device", &error);
        let made = self.in_use.lock().unwrap_or_else(PoisonError::into_inner).create(bytes);
        let file = made.map_err(failed)?.map_err(|free_bytes| {
            DriverError::new(Op::Create, DriverErrorKind::OutOfMemory { asked_bytes: bytes, free_bytes })
        })?;
        file.export().map_err(failed)
    }
}

fn failed(op: Op, what: &str, error: &io::Error) -> DriverError {
    DriverError::new(op, system(what, error))
}
