//! AMD's GPUs, by the files of the driver amdgpu in sysfs. Positions are in the order of PCI addresses.
//!
//! An APU has a small part of the computer's memory as its own (VRAM), and takes more from the rest (GTT). Engines use
//! both, so its memory is their sum. Of the second part it can have no more than the system has available, less the
//! reserve of [unified memory](super::unified).

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use poorwill::ByteSize;
use poorwill::gpus;

use super::files::{DrmCard, Files, required};
use super::{DeviceMemory, GpuMemory};
use poorwill_rotation_policy::Gpu;

pub(super) const DRIVERS: &[&str] = &["amdgpu"];

const HELP: &str = "update the kernel, or declare its memory: [memory] measure = \"declared\"";

/// The format of `gpu_metrics`, in the third byte of its header: 1 is of cards, and these are of APUs.
const APU_FORMATS: [u8; 2] = [2, 3];

#[derive(Debug)]
pub(super) struct Amdgpu(pub(super) Files);

impl DeviceMemory for Amdgpu {
    fn memory(&mut self, gpu: Gpu) -> Result<GpuMemory, String> {
        let cards = self.0.cards(DRIVERS)?;
        let Some(card) = cards.get(gpu.0) else {
            let count = cards.len();
            return Err(format!(
                "amdgpu has {count} GPUs, counted from 0 by PCI address, and none at {}; change `gpus`, or `measure`",
                gpu.0
            ));
        };
        self.memory_of(card).map_err(|reason| format!("{reason}; {HELP}"))
    }
}

impl Amdgpu {
    fn memory_of(&self, card: &DrmCard) -> Result<GpuMemory, String> {
        let device = card.folder.join("device");
        let vram = part(&device, "vram")?;
        if !is_apu(&device.join("gpu_metrics")) {
            return Ok(vram);
        }
        let gtt = part(&device, "gtt")?;
        let computer = gpus::unified_memory(self.0.root()).map_err(|error| error.to_string())?;
        Ok(GpuMemory::new(
            vram.free_bytes.saturating_add(gtt.free_bytes.min(computer.free_bytes)),
            vram.total_bytes.saturating_add(gtt.total_bytes.min(computer.total_bytes)),
        ))
    }
}

fn part(device: &Path, name: &str) -> Result<GpuMemory, String> {
    let figure = |what: &str| required(&device.join(format!("mem_info_{name}_{what}")));
    let (total_bytes, used_bytes) = (figure("total")?, figure("used")?);
    let free_bytes = total_bytes.checked_sub(used_bytes).ok_or_else(|| {
        let (total, used) = (ByteSize(total_bytes), ByteSize(used_bytes));
        format!("{}: {used} of {total} are used in mem_info_{name}_used", device.display())
    })?;
    Ok(GpuMemory::new(free_bytes, total_bytes))
}

/// An APU has metrics. A card may have none, or refuse them: as a virtual function, or while it is suspended.
fn is_apu(metrics: &Path) -> bool {
    let mut header = [0; 3];
    let read = File::open(metrics).and_then(|mut file| file.read_exact(&mut header));
    read.is_ok() && APU_FORMATS.contains(&header[2])
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_readable_metrics_make_an_apu() {
        let folder = tempfile::tempdir().unwrap();
        let metrics = folder.path().join("gpu_metrics");
        assert!(!is_apu(&metrics), "without the file");
        let headers: [(&[u8], bool); 5] = [
            (&[], false),
            (&[128, 0], false),
            (&[120, 0, 1, 3], false),
            (&[128, 0, 2, 4], true),
            (&[128, 0, 3], true),
        ];
        for (header, expected) in headers {
            fs::write(&metrics, header).unwrap();
            assert_eq!(is_apu(&metrics), expected, "{header:?}");
        }
        // A folder opens, and its read fails.
        fs::remove_file(&metrics).unwrap();
        fs::create_dir(&metrics).unwrap();
        assert!(!is_apu(&metrics), "it cannot be read");
    }
}
