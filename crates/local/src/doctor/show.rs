//! Report of the doctor: the computer, its devices, and warnings.

use comfy_table::CellAlignment;
use poorwill::doctor::{
    DeviceReport, DoctorReport, EngineAdvice, GpuReport, HibernationReport, HostReport, OtherLinkReport,
};

use crate::text::{lines, rate_of, size, table};

/// One table for the computer, two for each device.
pub(crate) fn doctor(report: &DoctorReport) -> String {
    let devices: String = report.devices.iter().map(device).collect();
    let warnings: String =
        report.warnings.iter().map(|warning| lines(&format!("Note: {warning}."))).collect();
    format!("{}\n{devices}{warnings}", computer(&report.host, report.hibernation.as_ref()))
}

fn computer(host: &HostReport, hibernation: Option<&HibernationReport>) -> String {
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "–".into());
    let number = |value: Option<u64>| value.map_or_else(|| "–".into(), |value| value.to_string());
    let group = match (host.cgroup_memory_limit_bytes, host.cgroup_memory_remaining_bytes) {
        (None, _) => String::new(),
        (Some(bytes), None) => format!("; {} for this process", size(bytes)),
        (Some(bytes), Some(left)) => format!("; {} for this process, {} of it left", size(bytes), size(left)),
    };
    let locked = host
        .memlock_bytes
        .map_or_else(|| "no limit known".into(), |bytes| format!("at most {}", size(bytes)));
    let mut table = table(["computer", ""]);
    for (what, value) in [
        ("system", format!("{} {}, {}", host.os, text(&host.kernel), host.architecture)),
        ("processors", host.cpus.map_or_else(|| "–".into(), |cpus| cpus.to_string())),
        (
            "memory",
            format!(
                "{} available of {}{group}",
                known(host.memory_available_bytes),
                known(host.memory_total_bytes)
            ),
        ),
        ("NUMA nodes", nodes(host)),
        (
            "pages",
            format!(
                "{}, huge ones: {}, reserved: {}",
                size(host.page_bytes),
                text(&host.transparent_huge_pages),
                known(host.reserved_huge_pages_bytes)
            ),
        ),
        ("locked memory", format!("{locked} (of mlock; what NVIDIA's driver pins does not count)")),
        ("mappings", number(host.max_map_count)),
        ("poorwill", host.poorwill_version.clone()),
    ] {
        table.add_row([what, &value]);
    }
    if let Some(hibernation) = hibernation {
        table.add_row(["hibernation", &hibernates(hibernation)]);
    }
    table.to_string()
}

fn hibernates(hibernation: &HibernationReport) -> String {
    let limits = hibernation.limits.join("; ");
    match (&hibernation.reasons[..], limits.is_empty()) {
        ([], true) => "processes can be taken off their GPUs".to_owned(),
        ([], false) => limits,
        (reasons, _) => format!("not here: {}", reasons.join("; ")),
    }
}

fn nodes(host: &HostReport) -> String {
    let nodes = host.numa_nodes.map_or_else(|| "–".into(), |nodes| nodes.to_string());
    match &host.numa_nodes_without_cpus[..] {
        [] => nodes,
        gpus => {
            let gpus: Vec<String> = gpus.iter().map(u32::to_string).collect();
            format!("{nodes}, and memory without processors as {}", gpus.join(", "))
        }
    }
}

/// The sources of its memory, then what follows from them.
fn device(device: &DeviceReport) -> String {
    let mut sources = table([device.id.as_str(), "reports", "remark"]);
    for source in &device.memory.sources {
        let wins = (device.memory.winner == Some(source.name)).then_some("applies");
        let remark: Vec<&str> = wins.into_iter().chain(source.note.as_deref()).collect();
        sources.add_row([source.name.as_str(), &known(source.bytes), &remark.join("; ")]);
    }
    if let Some(column) = sources.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut rows = vec![("what it is", what(device))];
    rows.extend(device.gpu.as_ref().map(|gpu| ("link", link(gpu))));
    let others = device.gpu.as_ref().map_or_else(String::new, |gpu| links(&gpu.links));
    rows.extend((!others.is_empty()).then_some(("with other links", others)));
    rows.push(("budget", budget(device)));
    // An engine on the host device is unusual.
    if device.gpu.is_some() || !device.engine.claims.is_empty() || device.engine.refused.is_some() {
        rows.push(("for an engine", engine(&device.engine)));
    }
    let mut table = table([device.id.as_str(), ""]);
    for (name, value) in &rows {
        table.add_row([*name, value]);
    }
    format!("{sources}\n{table}\n")
}

fn what(device: &DeviceReport) -> String {
    let mut what = vec![match &device.gpu {
        None => device.name.clone(),
        Some(gpu) => format!("{} at {}", device.name, gpu.pci_bus_id),
    }];
    if let Some(slice) = device.slice {
        what.push(format!("sliced by {}", slice.as_str()));
    }
    if let Some(gpu) = &device.gpu {
        what.push(format!("compute capability {}", gpu.compute_capability));
        let driver =
            gpu.driver_version.as_ref().map_or_else(String::new, |version| format!("driver {version}, "));
        what.push(format!("{driver}CUDA {}", gpu.cuda_version));
        what.extend(gpu.integrated.then(|| "shares the computer's memory".into()));
        what.extend(gpu.numa_node.map(|node| format!("NUMA node {node}")));
    }
    what.push(format!("granule {}", known(device.granule_bytes)));
    what.extend(
        device.shared_memory_per_block_bytes.map(|bytes| format!("{} shared memory a block", size(bytes))),
    );
    what.join("; ")
}

fn link(gpu: &GpuReport) -> String {
    let link = &gpu.link;
    let of = |now: Option<u32>, best: Option<u32>| match (now, best) {
        (None, _) => "–".to_owned(),
        (Some(now), Some(best)) if now != best => format!("{now} of {best}"),
        (Some(now), _) => now.to_string(),
    };
    let (width, generation) = (of(link.width, link.width_max), of(link.generation, link.generation_max));
    let mut what = match (link.width, link.generation) {
        (None, None) => Vec::new(),
        _ => vec![format!("{width} lanes of generation {generation}")],
    };
    let speeds = [(link.to_device_bytes_per_s, "to it"), (link.to_host_bytes_per_s, "from it")];
    what.extend(
        speeds.into_iter().filter_map(|(rate, direction)| Some(format!("{} {direction}", rate_of(rate?)))),
    );
    what.extend(gpu.pin_bytes_per_s.map(|rate| format!("pinning {}", rate_of(rate))));
    if what.is_empty() { "not known".into() } else { what.join("; ") }
}

/// Both at once, by GPU.
fn links(others: &[OtherLinkReport]) -> String {
    let other = |other: &OtherLinkReport| {
        let link = match (other.together_bytes_per_s, &other.because) {
            (Some(rate), _) => format!("{} with that of {}", rate_of(rate), other.id),
            (None, because) => {
                format!("not measured with that of {}: {}", other.id, because.as_deref().unwrap_or("–"))
            }
        };
        let memory = match (other.memory_bytes_per_s, other.together_bytes_per_s.zip(other.because.as_ref()))
        {
            (Some(rate), _) => format!(", {} from its memory", rate_of(rate)),
            (None, Some((_, because))) => format!(", not measured from its memory: {because}"),
            (None, None) => String::new(),
        };
        link + &memory
    };
    others.iter().map(other).collect::<Vec<_>>().join("; ")
}

fn budget(device: &DeviceReport) -> String {
    let memory = &device.memory;
    let from = memory.winner.map_or_else(String::new, |winner| format!(", from {winner}"));
    let used = memory.process_used_bytes.filter(|bytes| *bytes > 0);
    let used = used.map_or_else(String::new, |bytes| format!("; {} used by this process", size(bytes)));
    let lent = memory.reclaimable_bytes.filter(|bytes| *bytes > 0);
    let lent =
        lent.map_or_else(String::new, |bytes| format!("; {} reclaimable from the broker", size(bytes)));
    format!(
        "{}{from}; {} available now{lent}{used}",
        known(memory.budget_bytes),
        known(memory.headroom_bytes)
    )
}

fn engine(engine: &EngineAdvice) -> String {
    let mut what = Vec::new();
    if let Some(share) = engine.gpu_memory_utilization {
        what.push(format!("--gpu-memory-utilization {share}"));
    }
    let claims: Vec<String> =
        engine.claims.iter().map(|claimed| format!("{} {}", claimed.name, size(claimed.bytes))).collect();
    let claims = if claims.is_empty() { String::new() } else { format!(" beside {}", claims.join(", ")) };
    match (&engine.refused, engine.kv_cache_bytes) {
        (Some(refused), _) => what.push(format!("REFUSED: {refused}")),
        (None, Some(bytes)) if engine.claims.iter().all(|claimed| claimed.name.as_str() == "in_use") => {
            what.push(format!(
                "{} for weights, activations, graphs and key-value cache{claims}",
                size(bytes)
            ));
        }
        (None, Some(bytes)) => what.push(format!("key-value cache {}{claims}", size(bytes))),
        (None, None) => what.push("not known".into()),
    }
    what.join("; ")
}

fn known(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "–".into(), size)
}
