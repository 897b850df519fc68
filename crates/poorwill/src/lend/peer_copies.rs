//! Devices in whose idle memory copies of sleeping tags are kept.

use std::collections::BTreeSet;
use std::sync::Arc;

use poorwill_core::peer::{Peer, PeerMemory};
use poorwill_core::{DriverError, DriverErrorKind, Op};
use poorwill_driver::host::HostPeer;

use super::lender::Lender;
use super::lending::Lending;
use crate::device::DeviceSpec;
use crate::open::{Device, OpenError};

/// Other devices in whose idle memory sleeps keep copies of what they back up. Wakes read those some seven times as fast as
/// host memory.
///
/// The broker of those devices holds the copies, and gives them up first as soon as a process asks it for memory there. While
/// a sleep or a wake has them at hand, it is asked. They leave about an eighth of each device free. What runs there should
/// lend, or be started by a rotation: others see the memory as in use.
///
/// ```
/// use poorwill::lend::{Lending, PeerCopies};
/// use poorwill::{Arena, Config};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = Config::on("host:64MiB".parse()?);
/// let arena = Arena::open(config.lending_by(Lending::default()).copying_to(PeerCopies::Reachable))?;
/// # drop(arena);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PeerCopies {
    /// None.
    #[default]
    None,
    /// All GPUs that this process sees and whose memory the device reaches, also over PCI Express. There a copy may be no
    /// faster than host memory; `poorwill doctor` measures it. A host device reaches none.
    Reachable,
    /// These, whose memory the device must reach. A host device reaches those that have a folder.
    On(Vec<DeviceSpec>),
}

/// The devices, with a line to their brokers.
pub(crate) fn peers_of(
    device: &Device,
    copies: &PeerCopies,
    lending: &Lending,
) -> Result<Vec<Peer>, OpenError> {
    let failed = |source| OpenError::Device { device: device.spec().clone(), source };
    let mut memories: Vec<Arc<dyn PeerMemory>> = match copies {
        PeerCopies::None => Vec::new(),
        PeerCopies::Reachable => device.cuda().map_or_else(Vec::new, |cuda| {
            cuda.peer_memories().into_iter().map(|peer| Arc::new(peer) as Arc<dyn PeerMemory>).collect()
        }),
        PeerCopies::On(specs) => {
            let memory = |spec: &DeviceSpec| memory_of(device, spec).map_err(failed);
            let others = specs.iter().filter(|spec| *spec != device.spec());
            others.map(memory).collect::<Result<_, _>>()?
        }
    };
    // One device may have two names.
    let mut names: BTreeSet<String> = device.driver().info().memory_name.iter().cloned().collect();
    memories.retain(|memory| names.insert(memory.memory_name().to_owned()));
    let peer = |memory: Arc<dyn PeerMemory>| {
        let broker = Arc::new(Lender::new(lending.clone(), memory.memory_name().to_owned()));
        Peer { memory, broker }
    };
    Ok(memories.into_iter().map(peer).collect())
}

fn memory_of(device: &Device, spec: &DeviceSpec) -> Result<Arc<dyn PeerMemory>, DriverError> {
    match (device.cuda(), spec) {
        (Some(cuda), DeviceSpec::Cuda { ordinal }) => Ok(Arc::new(cuda.peer_memory(*ordinal)?)),
        (None, DeviceSpec::Host { capacity_bytes, shared_in: Some(folder) }) => {
            Ok(Arc::new(HostPeer::open(*capacity_bytes, folder)?))
        }
        _ => {
            let reason = format!("{spec} has no memory that {} reaches", device.spec());
            Err(DriverError::new(Op::Open, DriverErrorKind::InvalidArgument { reason }))
        }
    }
}
