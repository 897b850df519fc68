//! What this computer has for poorwill to work with, and what about it will get in the way.
//!
//! [`examine`] asks and changes nothing: it takes no memory of a GPU as long as NVML tells what is free there.
//! What it cannot find out is `None`, with a warning that says why; it never fails.
//!
//! ```
//! let report = poorwill::doctor::examine();
//! let devices: Vec<&str> = report.devices.iter().map(|device| device.id()).collect();
//! assert_eq!(devices.last(), Some(&"host"));
//! ```

mod gpu;
mod host;

use serde::Serialize;

pub use gpu::{FreeSource, GpuReport};
pub use host::HostReport;

use crate::arena::{Arena, Config};
use crate::device::{DeviceSpec, HOST_CAPACITY_BYTES_DEFAULT};

/// What was found. One shape in Rust and JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// The computer.
    pub host: HostReport,
    /// What `--device` can name: GPUs in the driver's order, and last the host device.
    pub devices: Vec<DeviceReport>,
    /// What will get in the way, and what could not be found out; a sentence or two each.
    pub warnings: Vec<String>,
}

/// A device. In JSON, the fields of whichever it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum DeviceReport {
    /// An NVIDIA GPU.
    Gpu(GpuReport),
    /// The host device.
    Host(HostDeviceReport),
}

impl DeviceReport {
    /// How the command line names it.
    #[must_use]
    pub fn id(&self) -> &str {
        match self {
            Self::Gpu(gpu) => &gpu.id,
            Self::Host(host) => &host.id,
        }
    }
}

/// The host device of the default size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostDeviceReport {
    /// How the command line names it.
    pub id: String,
    /// Name for people.
    pub name: String,
    /// Smallest unit that can be mapped, in bytes. None where the device does not open.
    pub granule_bytes: Option<u64>,
    /// Its capacity, in bytes.
    pub total_bytes: u64,
    /// Of which free, in bytes. Only what is written takes memory of the computer.
    pub free_bytes: Option<u64>,
}

/// Looks at this computer.
#[must_use]
pub fn examine() -> DoctorReport {
    let host = HostReport::examine();
    let mut warnings = host.warnings();
    let mut devices: Vec<DeviceReport> =
        gpu::examine(&mut warnings).into_iter().map(DeviceReport::Gpu).collect();
    devices.push(DeviceReport::Host(host_device(&mut warnings)));
    DoctorReport { host, devices, warnings }
}

fn host_device(warnings: &mut Vec<String>) -> HostDeviceReport {
    let device = DeviceSpec::Host { capacity_bytes: HOST_CAPACITY_BYTES_DEFAULT };
    let mut report = HostDeviceReport {
        id: "host".into(),
        name: "host device".into(),
        granule_bytes: None,
        total_bytes: HOST_CAPACITY_BYTES_DEFAULT,
        free_bytes: None,
    };
    match Arena::open(Config::on(device)) {
        Ok(arena) => {
            let info = arena.driver().info();
            report.name.clone_from(&info.name);
            report.granule_bytes = Some(info.granule_bytes);
            report.total_bytes = info.total_bytes;
            report.free_bytes = arena.driver().memory_info().ok().map(|memory| memory.free_bytes);
        }
        Err(error) => warnings.push(error.to_string()),
    }
    report
}
