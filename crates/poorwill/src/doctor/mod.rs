//! Examines this computer: its memory and GPUs, and what an engine may use.
//!
//! [`examine`] changes nothing. It briefly creates a context on each GPU, since only there the driver reports
//! usable memory, and measures the link. An unknown fact is `None`, with a warning.
//!
//! ```
//! use poorwill::doctor::{Plan, examine};
//!
//! let plan = Plan::default().on("host:8GiB".parse::<poorwill::DeviceSpec>()?).budgeted("0.5".parse()?);
//! let report = examine(&plan)?;
//! assert_eq!(report.devices[0].memory.budget_bytes, Some(4 << 30));
//! report.warnings.iter().for_each(|warning| println!("{warning}"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod engine;
mod gpu;
mod hibernation;
mod host;

use std::time::Duration;

use poorwill_core::budget::{Budget, Cap, SourceName};
use poorwill_core::{ByteSize, Tag};
use serde::Serialize;

pub use self::engine::EngineAdvice;
pub use self::gpu::{GpuReport, LinkReport};
pub use self::hibernation::HibernationReport;
pub use self::host::HostReport;
use crate::budget::{Caps, Slice};
use crate::device::DeviceSpec;
use crate::open::Device;

/// What to examine. By default every device, with all of its memory.
///
/// ```
/// use poorwill::doctor::{Plan, examine};
/// use poorwill::{DeviceSpec, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device: DeviceSpec = "host:8GiB".parse()?;
/// let plan = Plan::default().on(device).claiming([(Tag::weights(), 9 << 30)]);
/// assert!(examine(&plan)?.refused().is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// This device and the host device; `None` for all.
    pub device: Option<DeviceSpec>,
    /// The user's caps.
    pub caps: Caps,
    /// An engine's claims in bytes, before its key-value cache. Applies to the host device only when it is
    /// named or alone.
    pub claims: Vec<(Tag, u64)>,
    /// Time for GPUs. After it no further GPU is opened, and in its last 2 s none is measured.
    pub timeout: Duration,
}

impl Default for Plan {
    fn default() -> Self {
        Self { device: None, caps: Caps::default(), claims: Vec::new(), timeout: Duration::from_secs(7) }
    }
}

impl Plan {
    /// Sets [`Self::device`].
    #[must_use]
    pub fn on(mut self, device: impl Into<Option<DeviceSpec>>) -> Self {
        self.device = device.into();
        self
    }

    /// Sets [`Self::caps`].
    #[must_use]
    pub fn budgeted(mut self, caps: Caps) -> Self {
        self.caps = caps;
        self
    }

    /// Sets [`Self::claims`].
    #[must_use]
    pub fn claiming(mut self, claims: impl Into<Vec<(Tag, u64)>>) -> Self {
        self.claims = claims.into();
        self
    }

    /// Sets [`Self::timeout`].
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

/// The named device does not exist here.
///
/// ```
/// use poorwill::DeviceSpec;
/// use poorwill::doctor::{Plan, examine};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device: DeviceSpec = "cuda:99".parse()?;
/// println!("{}", examine(&Plan::default().on(device)).unwrap_err()); // And why.
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no {device} here: {}", reasons.join("; "))]
#[non_exhaustive]
pub struct NoSuchDevice {
    /// The device.
    pub device: DeviceSpec,
    /// What was found instead.
    pub reasons: Vec<String>,
}

/// The findings.
///
/// ```
/// use poorwill::DeviceSpec;
/// use poorwill::doctor::{Plan, examine};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let report = examine(&Plan::default().on("host:8GiB".parse::<DeviceSpec>()?))?;
/// assert_eq!((report.devices.len(), report.refused()), (1, None));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DoctorReport {
    /// The computer.
    pub host: HostReport,
    /// Values for `--device`: GPUs in the driver's order, then the host device.
    pub devices: Vec<DeviceReport>,
    /// Whether processes can be taken off their GPUs. `None` if only the host device was examined.
    pub hibernation: Option<HibernationReport>,
    /// Problems and unknown facts.
    pub warnings: Vec<String>,
}

impl DoctorReport {
    /// The first refused claim, and its device.
    #[must_use]
    pub fn refused(&self) -> Option<(&str, &str)> {
        self.devices.iter().find_map(|device| Some((device.id.as_str(), device.engine.refused.as_deref()?)))
    }
}

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

/// Examines this computer; refused claims are in the report.
///
/// # Errors
/// When the named device does not exist here.
pub fn examine(plan: &Plan) -> Result<DoctorReport, NoSuchDevice> {
    let host = HostReport::examine();
    let mut warnings = host.warnings();
    let mut gpu_warnings = Vec::new();
    let mut devices = match &plan.device {
        Some(DeviceSpec::Host { .. }) => Vec::new(),
        _ => gpu::examine(plan, &mut gpu_warnings),
    };
    let spec = match &plan.device {
        Some(spec @ DeviceSpec::Host { .. }) => spec.clone(),
        _ => DeviceSpec::host(),
    };
    if let Some(device @ DeviceSpec::Cuda { .. }) = &plan.device
        && devices.is_empty()
    {
        return Err(NoSuchDevice { device: device.clone(), reasons: gpu_warnings });
    }
    warnings.extend(gpu_warnings);
    let claims = if devices.is_empty() { &plan.claims[..] } else { &[] };
    devices.push(host_device(&spec, plan.caps.of(&spec), claims, &mut warnings));
    for named in plan.caps.devices().filter(|named| devices.iter().all(|device| device.id != **named)) {
        warnings.push(format!("the budget names {named}, which was not examined"));
    }
    let only_host = matches!(plan.device, Some(DeviceSpec::Host { .. }));
    let hibernation = (!only_host).then(HibernationReport::examine);
    Ok(DoctorReport { host, devices, hibernation, warnings })
}

fn host_device(
    spec: &DeviceSpec,
    cap: Option<Cap>,
    claims: &[(Tag, u64)],
    warnings: &mut Vec<String>,
) -> DeviceReport {
    let (name, granule_bytes, memory) = match Device::open(spec) {
        Ok(device) => {
            let info = device.driver().info().clone();
            (info.name, Some(info.granule_bytes), device.budget(cap))
        }
        Err(error) => {
            warnings.push(poorwill_core::chain(&error));
            ("host device".into(), None, Budget::decide(&[], None, cap))
        }
    };
    DeviceReport {
        id: spec.id(),
        name,
        granule_bytes,
        engine: EngineAdvice::of(&memory, None, claims),
        memory,
        slice: None,
        shared_memory_per_block_bytes: None,
        gpu: None,
    }
}

/// The most that a context takes, as measured so far.
const CONTEXT_BYTES_MAX: u64 = 1 << 30;

fn warnings_of(id: &str, memory: &Budget, slice: Option<Slice>) -> Vec<String> {
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
    let is_total = |name: SourceName| !name.is_about_free() && name != SourceName::User;
    let totals = memory.sources.iter().filter(|source| is_total(source.name) && !source.is_odd);
    let card_bytes = totals.filter_map(|source| source.bytes).max().unwrap_or(total_bytes);
    let differs = card_bytes - total_bytes > total_bytes / 50;
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
