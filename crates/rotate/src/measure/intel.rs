//! Intel's cards, by the drivers i915 and xe. Positions are in the order of PCI addresses.
//!
//! Neither driver reports a card's free memory to users. What is used is the sum over the processes that can be read
//! ([`fdinfo`](super::fdinfo)). The total is in sysfs with some versions; with others it has to be configured.

use super::fdinfo;
use super::files::{DrmCard, Files, names, number};
use super::{DeviceMemory, GpuMemory};
use poorwill_rotation_policy::Gpu;

pub(super) const DRIVERS: &[&str] = &["xe", "i915"];

/// The cards' own memory: of xe, and of i915.
const REGIONS: [&str; 2] = ["vram", "local"];

#[derive(Debug)]
pub(super) struct Intel {
    pub(super) files: Files,
    /// Of each card, as configured.
    pub(super) total_bytes: Option<u64>,
}

impl DeviceMemory for Intel {
    fn memory(&mut self, gpu: Gpu) -> Result<GpuMemory, String> {
        let cards = self.files.cards(DRIVERS)?;
        let Some(card) = cards.get(gpu.0) else {
            let count = cards.len();
            return Err(format!(
                "Intel's drivers have {count} GPUs, counted from 0 by PCI address, and none at {}; change `gpus`, or \
                 `measure`",
                gpu.0
            ));
        };
        let total_bytes = match self.total_bytes {
            Some(bytes) => bytes,
            None => total_bytes(card)?,
        };
        let used_bytes = self.used_bytes(card)?;
        Ok(GpuMemory::new(total_bytes.saturating_sub(used_bytes), total_bytes))
    }
}

impl Intel {
    fn used_bytes(&self, card: &DrmCard) -> Result<u64, String> {
        let address = &card.pci_address;
        let mut used_bytes = 0_u64;
        for client in fdinfo::clients(&self.files, address)? {
            let held_bytes = client.held_bytes(&REGIONS).ok_or_else(|| {
                format!(
                    "/proc/PID/fdinfo has no drm-resident-vram0 or drm-resident-local0 for {address}: update the \
                     kernel, or say measure = \"unified\" for a GPU without memory of its own, or measure = \
                     \"declared\""
                )
            })?;
            used_bytes = used_bytes.saturating_add(held_bytes);
        }
        Ok(used_bytes)
    }
}

/// Each tile has its own, and older drivers report the sum.
fn total_bytes(card: &DrmCard) -> Result<u64, String> {
    let device = card.folder.join("device");
    let mut sum = None;
    for name in names(&device)?.iter().filter(|name| name.starts_with("tile")) {
        if let Some(bytes) = number(&device.join(name).join("physical_vram_size_bytes"))? {
            sum = Some(sum.unwrap_or(0_u64).saturating_add(bytes));
        }
    }
    if let Some(bytes) = sum {
        return Ok(bytes);
    }
    let file = card.folder.join("lmem_total_bytes");
    number(&file)?.ok_or_else(|| {
        format!(
            "neither {} nor {} is there, so the size of the card is unknown: say [memory] measure = \"intel\" with \
             gpu = \"16GiB\", or measure = \"unified\" for a GPU without memory of its own",
            device.join("tile0/physical_vram_size_bytes").display(),
            file.display()
        )
    })
}
