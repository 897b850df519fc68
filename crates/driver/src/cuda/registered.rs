//! Which memory of the host is page-locked, and where the GPU finds it.
//!
//! Buffers may be wrapped in others of any kind, so what a buffer's bytes are is asked by their address.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::context::Context;
use super::ffi::CuDeviceptr;

/// Pieces that are registered with the driver, by their first address.
#[derive(Debug, Default)]
pub(super) struct Registered(Mutex<BTreeMap<usize, Piece>>);

#[derive(Debug, Clone, Copy)]
struct Piece {
    len: usize,
    /// Its first byte, for kernels.
    device: CuDeviceptr,
}

impl Registered {
    fn pieces(&self) -> MutexGuard<'_, BTreeMap<usize, Piece>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A piece was registered, as mapped for the device. The caller has entered the context. Where the driver has no
    /// address for kernels, the piece is good for copies only, and not known here.
    pub(super) fn add(&self, context: &Context, start: *mut u8, len: usize) {
        let api = context.api;
        // SAFETY: C2; the memory was registered.
        let device = api.get(|device| unsafe { (api.mem_host_get_device_pointer)(device, start.cast(), 0) });
        if let Ok(device) = device {
            self.pieces().insert(start.addr(), Piece { len, device });
        }
    }

    /// A piece is registered no longer.
    pub(super) fn remove(&self, start: *const u8) {
        self.pieces().remove(&start.addr());
    }

    /// Where the GPU finds these bytes, if they lie in one piece.
    pub(super) fn at(&self, addr: usize, bytes: usize) -> Option<CuDeviceptr> {
        let pieces = self.pieces();
        let (start, piece) = pieces.range(..=addr).next_back()?;
        let offset = addr - start;
        (offset <= piece.len && bytes <= piece.len - offset).then_some(piece.device + offset as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_found_within_one_piece() {
        let registered = Registered::default();
        registered.pieces().insert(0x1000, Piece { len: 0x1000, device: 0x7000_1000 });
        registered.pieces().insert(0x2000, Piece { len: 0x800, device: 0x9000_0000 });
        for (addr, bytes, found) in [
            (0x1000, 0x1000, Some(0x7000_1000)),
            (0x1FFF, 1, Some(0x7000_1FFF)),
            (0x1FFF, 2, None),
            (0x2000, 0x800, Some(0x9000_0000)),
            (0x2800, 1, None),
            (0xFFF, 1, None),
            (0x2100, usize::MAX, None),
        ] {
            assert_eq!(registered.at(addr, bytes), found, "{addr:#x}, {bytes}");
        }
        registered.remove(std::ptr::without_provenance(0x1000));
        assert_eq!(registered.at(0x1800, 8), None);
    }
}
