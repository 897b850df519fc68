//! What is found of a device, and what is odd about it.

use poorwill_core::ByteSize;
use poorwill_core::budget::{Budget, SourceName};
use serde::Serialize;

use super::engine::EngineAdvice;
use crate::budget::Slice;

/// A device.
///
/// ```
/// use poorwill::DeviceSpec;
/// use poorwill::doctor::{Plan, examine};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let report = examine(&Plan::default().on("host:8GiB".parse::<DeviceSpec>()?))?;
/// let device = &report.devices[0];
/// assert_eq!((device.id.as_str(), device.memory.total_bytes), ("host", Some(8 << 30)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DeviceReport {
    /// Its name on the command line.
    pub id: String,
    /// Its name for people.
    pub name: String,
    /// Smallest mappable unit, in bytes; 0 without virtual memory management, `None` if the device does not
    /// open.
    pub granule_bytes: Option<u64>,
    /// Memory figures by source, and the budget.
    #[serde(flatten)]
    pub memory: Budget,
    /// What the broker calls the device.
    pub memory_name: Option<String>,
    /// What limits this process to a part of the device.
    pub slice: Option<Slice>,
    /// Shared memory that a thread block may opt in to; `None` for the host device.
    pub shared_memory_per_block_bytes: Option<u64>,
    /// What to give an engine.
    pub engine: EngineAdvice,
    /// Facts about a GPU; in JSON beside the other fields.
    #[serde(flatten)]
    pub gpu: Option<GpuReport>,
}

/// Facts about a GPU; `None` where unknown.
///
/// ```
/// use poorwill::doctor::{Plan, examine};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// for gpu in examine(&Plan::default())?.devices.into_iter().filter_map(|device| device.gpu) {
///     println!("{}: compute capability {}", gpu.uuid, gpu.compute_capability);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct GpuReport {
    /// As in `9.0`.
    pub compute_capability: String,
    /// As in `580.159.04`.
    pub driver_version: Option<String>,
    /// Newest CUDA version that the driver supports, as in `13.0`.
    pub cuda_version: String,
    /// As in `nvidia-smi`, without the prefix before the first hyphen.
    pub uuid: String,
    /// As `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// Whether it shares the computer's memory.
    pub integrated: bool,
    /// The nearest NUMA node.
    pub numa_node: Option<u32>,
    /// Its link.
    pub link: LinkReport,
    /// Links of other GPUs that could carry its wakes, too ([`Links`](crate::Links)).
    pub links: Vec<OtherLinkReport>,
    /// Host memory page-locked for it per second, by one thread.
    pub pin_bytes_per_s: Option<f64>,
    /// Size of the measured sample.
    pub measured_bytes: Option<u64>,
}

/// A GPU's link: present, possible and measured.
///
/// ```
/// use poorwill::doctor::{Plan, examine};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// for gpu in examine(&Plan::default())?.devices.into_iter().filter_map(|device| device.gpu) {
///     println!("{:?} lanes of at most {:?}", gpu.link.width, gpu.link.width_max);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LinkReport {
    /// Link width in use.
    pub width: Option<u32>,
    /// Largest width of both ends.
    pub width_max: Option<u32>,
    /// PCI Express generation, read right after copies: an idle link slows down.
    pub generation: Option<u32>,
    /// Newest generation that both ends support.
    pub generation_max: Option<u32>,
    /// Bytes per second from page-locked memory to the device.
    pub to_device_bytes_per_s: Option<f64>,
    /// Bytes per second from the device to page-locked memory.
    pub to_host_bytes_per_s: Option<f64>,
}

/// Another GPU's link beside the own.
///
/// ```
/// use poorwill::doctor::{Plan, examine};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// for gpu in examine(&Plan::default())?.devices.into_iter().filter_map(|device| device.gpu) {
///     println!("{} other links", gpu.links.len());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct OtherLinkReport {
    /// That GPU, as `cuda:1`.
    pub id: String,
    /// Bytes per second to the device over both links at once. Where it is not far above what the own link carries, both
    /// share a port of the computer.
    pub together_bytes_per_s: Option<f64>,
    /// Bytes per second to the device from that GPU's memory, in which copies of what sleeps can be kept.
    pub memory_bytes_per_s: Option<f64>,
    /// Why one of these was not measured.
    pub because: Option<String>,
}

/// The most that a context takes, as measured so far.
const CONTEXT_BYTES_MAX: u64 = 1 << 30;

pub(super) fn warnings_of(id: &str, memory: &Budget, slice: Option<Slice>) -> Vec<String> {
    let mut warnings = Vec::new();
    for source in memory.sources.iter().filter(|source| source.is_odd) {
        let figure = source.bytes.map_or_else(String::new, |bytes| format!(" says {bytes} bytes"));
        let note = source.note.as_deref().unwrap_or_default();
        warnings.push(format!("{} of {id}{figure}: {note}", source.name));
    }
    let Some(total_bytes) = memory.total_bytes else {
        warnings.push(format!("how much memory {id} has is not known; give engines a size in bytes"));
        return warnings;
    };
    // The computer's total is no figure of the device.
    let is_total = |name: SourceName| {
        !name.is_about_free() && ![SourceName::User, SourceName::SystemTotal].contains(&name)
    };
    let totals = memory.sources.iter().filter(|source| is_total(source.name) && !source.is_odd);
    let card_bytes = totals.filter_map(|source| source.bytes).max().unwrap_or(total_bytes);
    let is_reserved = memory.total_from == Some(SourceName::SystemTotal);
    let differs = !is_reserved && card_bytes.saturating_sub(total_bytes) > total_bytes / 50;
    match slice {
        Some(slice) => warnings.push(format!(
            "{id} is cut by {}: this process has {} of it; an engine set to use more fails",
            slice.as_str(),
            ByteSize(total_bytes)
        )),
        None if differs => {
            warnings.push(format!(
                "the sources disagree about the memory of {id}: from {} to {}; the smaller figure counts",
                ByteSize(total_bytes),
                ByteSize(card_bytes)
            ));
        }
        None => {}
    }
    let in_use_bytes =
        memory.budget_bytes.zip(memory.headroom_bytes).map(|(budget, headroom)| budget - headroom);
    let others_bytes = in_use_bytes.unwrap_or(0).saturating_sub(memory.process_used_bytes.unwrap_or(0));
    // If this process's use is unknown, it includes its context.
    let least_bytes = if memory.process_used_bytes.is_some() { 0 } else { CONTEXT_BYTES_MAX };
    if others_bytes > least_bytes.max(total_bytes / 50) {
        warnings.push(format!("others use {} of what {id} may give", ByteSize(others_bytes)));
    }
    if memory.headroom_bytes.is_none() {
        warnings.push(format!("how much of {id} is free is not known"));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use poorwill_core::budget::{Figure, Reading};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn warned(facts: &[Reading], used_bytes: Option<u64>, slice: Option<Slice>) -> String {
        warnings_of("cuda:0", &Budget::decide(facts, used_bytes, None), slice).join("\n")
    }

    #[test]
    fn warnings_cover_what_people_should_know() {
        let card =
            [Reading::bytes(SourceName::CudaTotal, 24 * GIB), Reading::bytes(SourceName::CudaFree, 24 * GIB)];
        assert_eq!(warned(&card, Some(0), None), "");
        let with = |fact| [&card[..], &[fact]].concat();
        for (facts, words) in [
            (vec![], "not known"),
            (card[..1].to_vec(), "how much of cuda:0 is free is not known"),
            (
                with(Reading::bytes(SourceName::NvmlTotal, 30 * GIB)),
                "disagree about the memory of cuda:0: from 24 GiB to 30",
            ),
            (
                with(Reading::bytes(SourceName::DeviceProperties, 0)),
                "device_properties of cuda:0 says 0 bytes: 0 is no total",
            ),
            (
                with(Reading::bytes(SourceName::NvmlFree, 20 * GIB)),
                "others use 4 GiB of what cuda:0 may give",
            ),
            (
                with(Reading::new(SourceName::CudaFree, Figure::OverLimit("E".into()))),
                "cuda_free of cuda:0: E: more is in use",
            ),
        ] {
            let warnings = warned(&facts, Some(0), None);
            assert!(warnings.contains(words), "{words}: {warnings}");
        }
        assert!(
            warned(&card, Some(0), Some(Slice::Hami))
                .contains("cuda:0 is cut by hami: this process has 24 GiB")
        );
    }
}
