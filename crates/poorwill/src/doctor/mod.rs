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

mod device;
mod engine;
mod gpu;
mod hibernation;
mod host;
mod plan;

use poorwill_core::Tag;
use poorwill_core::budget::{Budget, Cap};
use serde::Serialize;

pub use self::device::{DeviceReport, GpuReport, LinkReport, OtherLinkReport};
pub use self::engine::EngineAdvice;
pub use self::hibernation::HibernationReport;
pub use self::host::HostReport;
pub use self::plan::Plan;
use crate::budget::Caps;
use crate::device::DeviceSpec;
#[cfg(target_os = "linux")]
use crate::lend::Lending;
use crate::open::Device;

/// The named device does not exist here, or one that the budget names.
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

/// Examines this computer; refused claims are in the report.
///
/// # Errors
/// When the named device does not exist here, or when all are examined and the budget names another.
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
    if plan.device.is_none()
        && let Some(device) = unknown(&plan.caps, &devices)
    {
        let named = format!("the budget names it, and the GPUs are {}", ids(&devices));
        return Err(NoSuchDevice { device, reasons: [vec![named], gpu_warnings].concat() });
    }
    warnings.extend(gpu_warnings);
    let claims = if devices.is_empty() { &plan.claims[..] } else { &[] };
    devices.push(host_device(&spec, plan.caps.of(&spec), claims, &mut warnings));
    #[cfg(target_os = "linux")]
    note_lent(plan, &mut devices, &mut warnings);
    for named in plan.caps.devices().filter(|named| devices.iter().all(|device| device.id != **named)) {
        warnings.push(format!("the budget names {named}, which was not examined"));
    }
    let only_host = matches!(plan.device, Some(DeviceSpec::Host { .. }));
    let hibernation = (!only_host).then(HibernationReport::examine);
    Ok(DoctorReport { host, devices, hibernation, warnings })
}

/// What the broker has of these devices.
#[cfg(target_os = "linux")]
fn note_lent(plan: &Plan, devices: &mut [DeviceReport], warnings: &mut Vec<String>) {
    let mut lending = Lending::default();
    lending.socket.clone_from(&plan.broker);
    match lending.status() {
        Ok(None) => {}
        Ok(Some(status)) => {
            for device in devices {
                let bytes = device.memory_name.as_ref().map(|name| status.reclaimable_bytes(name));
                device.memory.reclaimable_bytes = bytes;
            }
        }
        Err(error) => warnings.push(error.to_string()),
    }
}

/// A GPU that a budget names, and that is not among these.
fn unknown(caps: &Caps, gpus: &[DeviceReport]) -> Option<DeviceSpec> {
    let mut named = caps.devices().filter_map(|named| named.parse::<DeviceSpec>().ok());
    named
        .find(|named| matches!(named, DeviceSpec::Cuda { .. }) && gpus.iter().all(|gpu| gpu.id != named.id()))
}

fn ids(gpus: &[DeviceReport]) -> String {
    let ids: Vec<&str> = gpus.iter().map(|gpu| gpu.id.as_str()).collect();
    if ids.is_empty() { "none".to_owned() } else { ids.join(", ") }
}

fn host_device(
    spec: &DeviceSpec,
    cap: Option<Cap>,
    claims: &[(Tag, u64)],
    warnings: &mut Vec<String>,
) -> DeviceReport {
    let (name, granule_bytes, memory, memory_name) = match Device::open(spec) {
        Ok(device) => {
            let info = device.driver().info().clone();
            (info.name, Some(info.granule_bytes), device.budget(cap), info.memory_name)
        }
        Err(error) => {
            warnings.push(poorwill_core::chain(&error));
            ("host device".into(), None, Budget::decide(&[], None, cap), None)
        }
    };
    let is_shared = matches!(spec, DeviceSpec::Host { shared_in: Some(_), .. });
    DeviceReport {
        id: spec.id(),
        name,
        granule_bytes,
        engine: EngineAdvice::of(&memory, None, claims),
        memory,
        memory_name: memory_name.filter(|_| is_shared),
        slice: None,
        shared_memory_per_block_bytes: None,
        gpu: None,
    }
}
