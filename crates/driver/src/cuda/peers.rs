//! Which other GPUs may access a GPU's memory.
//!
//! A mapping is accessible to the GPUs named when it is opened; `cuCtxEnablePeerAccess` does not matter.
//! Another GPU that accesses it loses its context. Naming a GPU needs no context on it.

use std::ffi::c_int;

use poorwill_core::DriverErrorKind;

use super::ffi::{AccessDesc, Api, CuDevice, Location};
use super::gpu::{count, handle, has_virtual_memory};
use crate::ledger::{Result, invalid};

/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: c_int = 3;

/// GPUs that may also access a GPU's memory, by the driver's numbers. Each makes opening mappings slower.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Peers {
    /// Every GPU that the driver shows this process and that can reach the memory.
    #[default]
    Reachable,
    /// None: for processes that use one GPU.
    None,
    /// These, which must be able to reach it.
    Only(Vec<u32>),
}

/// Who may use a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// The GPU and its peers.
    All,
    Own,
}

#[derive(Debug)]
pub(super) struct Access {
    own: u32,
    peers: Vec<u32>,
    descs: Vec<AccessDesc>,
}

impl Access {
    pub(super) fn of(api: &'static Api, own: u32, device: CuDevice, requested: &Peers) -> Result<Self> {
        let peers = match requested {
            Peers::None => Vec::new(),
            Peers::Only(peers) => chosen(api, own, device, peers)?,
            Peers::Reachable => reachable(api, own, device)?,
        };
        let devices = peers.iter().map(|peer| handle(api, *peer)).collect::<Result<Vec<CuDevice>>>()?;
        let desc = |id| AccessDesc { location: Location { kind: 1, id }, flags: READ_WRITE };
        let descs = [device].into_iter().chain(devices).map(desc).collect();
        Ok(Self { own, peers, descs })
    }

    pub(super) fn peers(&self) -> &[u32] {
        &self.peers
    }

    pub(super) fn descs(&self, reach: Reach) -> &[AccessDesc] {
        match reach {
            Reach::All => &self.descs,
            Reach::Own => self.descs.get(..1).unwrap_or_default(),
        }
    }

    /// A peer may be the cause.
    pub(super) fn refused(&self, error: DriverErrorKind) -> DriverErrorKind {
        match error {
            DriverErrorKind::Device { code, name, text } if !self.peers.is_empty() => {
                let (own, peers) = (self.own, self.peers.len());
                let others = listed(&self.peers);
                let text = format!(
                    "{text}; memory of cuda:{own} was to be opened for {peers} other GPUs ({others}), too: open the \
                     device without them (`peers`), if only cuda:{own} uses its memory"
                );
                DriverErrorKind::Device { code, name, text }
            }
            other => other,
        }
    }
}

/// Without virtual memory management, or on errors, a GPU cannot reach the memory.
fn reachable(api: &'static Api, own: u32, device: CuDevice) -> Result<Vec<u32>> {
    let others = (0..count(api)?).filter(|peer| *peer != own);
    Ok(others.filter(|peer| handle(api, *peer).is_ok_and(|peer| can_reach(api, peer, device))).collect())
}

fn chosen(api: &'static Api, own: u32, device: CuDevice, peers: &[u32]) -> Result<Vec<u32>> {
    let mut peers: Vec<u32> = peers.iter().copied().filter(|peer| *peer != own).collect();
    peers.sort_unstable();
    peers.dedup();
    let count = count(api)?;
    for peer in &peers {
        if *peer >= count {
            return Err(invalid(format!(
                "cuda:{peer} cannot be a peer of cuda:{own}: the driver shows this process {count} GPUs, from cuda:0 on"
            )));
        }
        if !can_reach(api, handle(api, *peer)?, device) {
            return Err(invalid(format!(
                "cuda:{peer} cannot be a peer of cuda:{own}: it does not reach its memory (cuDeviceCanAccessPeer); \
                 leave it out, and copies between the two pass through the host"
            )));
        }
    }
    Ok(peers)
}

pub(super) fn can_reach(api: &'static Api, peer: CuDevice, device: CuDevice) -> bool {
    // SAFETY: C2.
    let can = api.get(|can: *mut c_int| unsafe { (api.device_can_access_peer)(can, peer, device) });
    can.is_ok_and(|can| can != 0) && has_virtual_memory(api, peer)
}

fn listed(peers: &[u32]) -> String {
    peers.iter().map(|peer| format!("cuda:{peer}")).collect::<Vec<_>>().join(", ")
}
