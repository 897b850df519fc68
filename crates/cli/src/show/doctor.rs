//! What the doctor found: the computer, its devices, and below them what gets in the way.

use comfy_table::CellAlignment;
use poorwill::doctor::{DeviceReport, DoctorReport, FreeSource, GpuReport, HostReport};

use super::{size, table};

/// The report as two tables.
pub(crate) fn doctor(report: &DoctorReport) -> String {
    let mut devices = table(["device", "free", "of", "granule", "what it is"]);
    for device in &report.devices {
        let (free_bytes, total_bytes, granule_bytes, what) = match device {
            DeviceReport::Gpu(gpu) => (gpu.free_bytes, gpu.total_bytes, Some(gpu.granule_bytes), about(gpu)),
            DeviceReport::Host(host) => {
                (host.free_bytes, host.total_bytes, host.granule_bytes, host.name.clone())
            }
            _ => continue,
        };
        let (free, total, granule) = (known(free_bytes), size(total_bytes), known(granule_bytes));
        devices.add_row([device.id(), &free, &total, &granule, &what]);
    }
    for column in devices.column_iter_mut().skip(1).take(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let warnings: String = report.warnings.iter().map(|warning| format!("Note: {warning}.\n")).collect();
    format!("{}\n{devices}\n{warnings}", computer(&report.host))
}

fn computer(host: &HostReport) -> String {
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "–".into());
    let number = |value: Option<u64>| value.map_or_else(|| "–".into(), |value| value.to_string());
    let limit = match host.cgroup_memory_limit_bytes {
        None => String::new(),
        Some(bytes) => {
            let left = host.cgroup_memory_remaining_bytes;
            let left = left.map_or_else(String::new, |left| format!(", {} of it left", size(left)));
            format!("; {} for this process{left}", size(bytes))
        }
    };
    let locked = host.memlock_bytes.map_or_else(|| "no limit".into(), size);
    let reserved = match host.reserved_huge_pages_bytes {
        None | Some(0) => String::new(),
        Some(bytes) => format!(", {} of them reserved", size(bytes)),
    };
    let mut nodes = host.numa_nodes.map_or_else(|| "–".into(), |nodes| nodes.to_string());
    if !host.numa_nodes_without_cpus.is_empty() {
        nodes += &format!(", {} of memory alone", host.numa_nodes_without_cpus.len());
    }
    let mut table = table(["computer", ""]);
    for (what, value) in [
        ("system", format!("{} {}, {}", host.os, text(&host.kernel), host.architecture)),
        ("processors", host.cpus.map_or_else(|| "–".into(), |cpus| cpus.to_string())),
        (
            "memory",
            format!(
                "{} available of {}{limit}",
                known(host.memory_available_bytes),
                known(host.memory_total_bytes)
            ),
        ),
        ("locked memory", locked),
        (
            "pages",
            format!("{}, huge ones: {}{reserved}", size(host.page_bytes), text(&host.transparent_huge_pages)),
        ),
        ("NUMA nodes", nodes),
        ("mappings", number(host.max_map_count)),
        ("poorwill", host.poorwill_version.clone()),
    ] {
        table.add_row([what, &value]);
    }
    table.to_string()
}

fn about(gpu: &GpuReport) -> String {
    let mut what = vec![format!("{} at {}", gpu.name, gpu.pci_bus_id)];
    what.push(format!("compute capability {}", gpu.compute_capability));
    let driver =
        gpu.driver_version.as_ref().map_or_else(String::new, |version| format!("driver {version}, "));
    what.push(format!("{driver}CUDA {}", gpu.cuda_version));
    if gpu.integrated {
        what.push("shares the computer's memory".into());
    }
    if gpu.free_source == Some(FreeSource::Cuda) {
        what.push("free memory as of a context of our own".into());
    }
    what.join("; ")
}

fn known(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "–".into(), size)
}
