//! The sources of a GPU's memory figures, and its slicing.

use poorwill_core::budget::{Figure, Reading, SourceName};
use poorwill_driver::CudaDevice;
use poorwill_driver::cuda::{CudaMemory, GpuInfo};
use poorwill_driver::nvml::{Handle, Nvml};
use poorwill_driver::system::slices::{EnvLimit, GpuName, Lookup, hami_limit, mig_hints, mps_limit};
use poorwill_driver::system::{GroupDeviceMemory, System};

use super::slice::Slice;

pub(super) fn facts_of(device: &CudaDevice) -> Vec<Reading> {
    let reported = device.reported_memory().map_err(|error| error.kind.to_string());
    GpuMemoryFacts::here(device.gpu(), &reported, &Nvml::load()).facts
}

#[derive(Debug)]
pub(crate) struct GpuMemoryFacts {
    pub(crate) facts: Vec<Reading>,
    /// With several slices, the one nearest to this process.
    pub(crate) slice: Option<Slice>,
    /// Environment limits that cannot be read.
    pub(crate) problems: Vec<String>,
}

struct FactSources<'a> {
    nvml: &'a Result<Nvml, String>,
    system: &'a System,
    variables: Lookup<'a>,
}

impl GpuMemoryFacts {
    /// `reported` is the driver's answer in a context, or its error.
    pub(crate) fn here(
        gpu: &GpuInfo,
        reported: &Result<CudaMemory, String>,
        nvml: &Result<Nvml, String>,
    ) -> Self {
        let variables = |name: &str| std::env::var_os(name);
        Self::of(gpu, reported, &FactSources { nvml, system: &System::here(), variables: &variables })
    }

    fn of(gpu: &GpuInfo, reported: &Result<CudaMemory, String>, sources: &FactSources<'_>) -> Self {
        let FactSources { nvml, system, variables } = *sources;
        let mut facts = driver_facts(gpu, reported);
        let (nvml_facts, is_instance) = nvml_facts(gpu, nvml);
        facts.extend(nvml_facts);

        let hami = hami_limit(variables, gpu.ordinal);
        let is_enforced = system.has_hami(variables);
        facts.push(match &hami {
            None => Reading::none(SourceName::MemoryLimit, "CUDA_DEVICE_MEMORY_LIMIT is not set"),
            Some(limit) if is_enforced => limit_fact(SourceName::MemoryLimit, limit),
            Some(limit) => limit_fact(SourceName::MemoryLimit, limit)
                .with_note(format!("{}; HAMi's library is not preloaded here", limit.variable)),
        });
        let mps = mps_limit(variables, GpuName { ordinal: gpu.ordinal, uuid: &gpu.uuid });
        facts.push(match &mps {
            None => Reading::none(SourceName::MpsLimit, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT is not set for it"),
            Some(limit) => limit_fact(SourceName::MpsLimit, limit),
        });
        let cgroup =
            gpu.pci_bus_id.parse().map(|address| system.cgroup_device_memory(address)).unwrap_or_default();
        facts.extend(cgroup_facts(cgroup));

        let is_limit = |limit: &Option<EnvLimit>| limit.as_ref().is_some_and(|limit| limit.bytes != Ok(None));
        let slice = if is_limit(&hami) || is_enforced {
            Some(Slice::Hami)
        } else if is_limit(&mps) {
            Some(Slice::Mps)
        } else if is_instance || is_named_instance(gpu) || !mig_hints(variables).is_empty() {
            Some(Slice::Mig)
        } else if cgroup.limit_bytes.is_some() {
            Some(Slice::Dmem)
        } else {
            None
        };
        let may_be_cut = slice.is_some() || system.has_mps(variables);
        facts.extend(system_facts(gpu, reported, may_be_cut, system));
        let unreadable = hami.iter().chain(&mps).filter_map(|limit| {
            let reason = limit.bytes.as_ref().err()?;
            Some(format!("{} is set and cannot be read: {reason}", limit.variable))
        });
        let unknown = (mps.is_none() && system.has_mps(variables)).then(|| {
            "an MPS daemon seems to serve this process; a limit that only the daemon knows cannot be read"
                .into()
        });
        Self { facts, slice, problems: unreadable.chain(unknown).collect() }
    }
}

fn driver_facts(gpu: &GpuInfo, reported: &Result<CudaMemory, String>) -> Vec<Reading> {
    let (total, free) = match reported {
        Ok(CudaMemory::Known { free_bytes, total_bytes }) => {
            (Figure::Bytes(*total_bytes), Figure::Bytes(*free_bytes))
        }
        Ok(CudaMemory::OverLimit { words }) => {
            (Figure::None(words.clone()), Figure::OverLimit(words.clone()))
        }
        Err(reason) => (Figure::None(reason.clone()), Figure::None(reason.clone())),
    };
    vec![
        Reading::new(SourceName::CudaTotal, total),
        Reading::new(SourceName::CudaFree, free),
        Reading::bytes(SourceName::DeviceProperties, gpu.total_bytes),
    ]
}

/// NVML's figures, and whether NVML knows the GPU as a MIG instance.
fn nvml_facts(gpu: &GpuInfo, nvml: &Result<Nvml, String>) -> (Vec<Reading>, bool) {
    let none = |reason: &str| {
        [SourceName::NvmlTotal, SourceName::NvmlFree].map(|name| Reading::none(name, reason)).to_vec()
    };
    let known = match nvml.as_ref().map_err(Clone::clone).and_then(|nvml| nvml.known_memory(&gpu.uuid)) {
        Err(reason) => return (none(&reason), false),
        Ok(None) => return (none("NVML knows no device of this UUID"), false),
        Ok(Some(known)) => known,
    };
    let is_instance = known.handle == Handle::MigInstance;
    let facts = match &known.memory {
        _ if known.is_mig_parent() || (known.handle == Handle::Gpu && is_named_instance(gpu)) => {
            none("NVML's figures are those of the whole card, which is divided")
        }
        Err(reason) => none(reason),
        Ok(memory) => vec![
            Reading::bytes(SourceName::NvmlTotal, memory.total_bytes),
            Reading::bytes(SourceName::NvmlFree, memory.free_bytes),
        ],
    };
    (facts, is_instance)
}

fn limit_fact(name: SourceName, limit: &EnvLimit) -> Reading {
    let EnvLimit { variable, text, bytes } = limit;
    match bytes {
        Ok(Some(bytes)) => Reading::bytes(name, *bytes).with_note(variable.clone()),
        Ok(None) => Reading::none(name, format!("{variable} is `{text}`, which is no limit")),
        Err(reason) => Reading::none(name, format!("{variable} cannot be read: {reason}")),
    }
}

fn cgroup_facts(cgroup: GroupDeviceMemory) -> [Reading; 2] {
    let fact = |name, bytes: Option<u64>| match bytes {
        Some(bytes) => Reading::bytes(name, bytes),
        None => Reading::none(name, "no control group limits it"),
    };
    [
        fact(SourceName::CgroupDmem, cgroup.limit_bytes),
        fact(SourceName::CgroupDmemFree, cgroup.remaining_bytes),
    ]
}

/// Only for a GPU without memory of its own. Its slice has an unknown part of system memory; the driver's
/// free memory is then the limit.
fn system_facts(
    gpu: &GpuInfo,
    reported: &Result<CudaMemory, String>,
    may_be_cut: bool,
    system: &System,
) -> Vec<Reading> {
    if !gpu.integrated {
        return Vec::new();
    }
    let is_whole = match reported {
        Ok(CudaMemory::Known { total_bytes, .. }) => *total_bytes >= gpu.total_bytes,
        _ => false,
    };
    let figures = [
        (SourceName::SystemTotal, system.memory().total_bytes),
        (SourceName::SystemAvailable, system.available_bytes()),
    ];
    let fact = |(name, bytes)| match bytes {
        _ if may_be_cut || !is_whole => Reading::none(name, "this process may have a part of the GPU only"),
        Some(bytes) => Reading::bytes(name, bytes),
        None => Reading::none(name, "the system does not report it"),
    };
    figures.map(fact).to_vec()
}

fn is_named_instance(gpu: &GpuInfo) -> bool {
    gpu.name.contains(" MIG ")
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::ffi::OsString;
    use std::fs;

    use fastrand::Rng;
    use poorwill_core::budget::Budget;
    use poorwill_testkit::effort::Effort;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn false_figure(draw: &mut Rng) -> u64 {
        match draw.u8(..5) {
            0 => 0,
            1 => u64::MAX - draw.u64(..64 * GIB),
            2 => 1 << 60,
            _ => draw.u64(..200 * GIB),
        }
    }

    fn gpu(total_bytes: u64, integrated: bool) -> GpuInfo {
        GpuInfo {
            ordinal: 0,
            name: "NVIDIA Thing".into(),
            compute_capability: (9, 0),
            cuda_version: (13, 0),
            uuid: "00112233-4455-6677-8899-aabbccddeeff".into(),
            pci_bus_id: "0000:4E:00.0".into(),
            granule_bytes: 2 << 20,
            total_bytes,
            shared_memory_per_block_bytes: 227 << 10,
            integrated,
        }
    }

    #[test]
    fn one_true_source_is_enough() {
        let nvml = Err("there is none here".to_owned());
        let mut draw = Rng::with_seed(5);
        // Repeated writes would wait for a disk.
        let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("proc/self/cgroup", "0::/\n");
        put("sys/fs/cgroup/cgroup.controllers", "dmem\n");
        for _ in 0..Effort::of_this_run().cases(2000) {
            let true_bytes = GIB + draw.u64(..80 * GIB);
            let free_bytes = draw.u64(..true_bytes + 1);
            let truthful = draw.u64(..5);
            let figure = |source: u64, draw: &mut Rng| {
                if source == truthful { true_bytes } else { false_figure(draw) }
            };

            let cuda_total = figure(0, &mut draw);
            let memory = match draw.u64(..4) {
                0 if truthful != 0 => Ok(CudaMemory::OverLimit { words: "invalid".into() }),
                1 if truthful != 0 => Err("the device is gone".to_owned()),
                _ => Ok(CudaMemory::Known { free_bytes, total_bytes: cuda_total }),
            };
            let integrated = draw.u8(..4) == 0;
            let gpu = gpu(figure(1, &mut draw), integrated);
            let mut variables: HashMap<&str, String> = HashMap::new();
            if truthful == 2 || draw.bool() {
                // For HAMi, 0 is no limit, and any 64-bit number is valid.
                let name =
                    if draw.bool() { "CUDA_DEVICE_MEMORY_LIMIT_0" } else { "CUDA_DEVICE_MEMORY_LIMIT" };
                variables.insert(name, figure(2, &mut draw).to_string());
            }
            if truthful == 3 || draw.u8(..3) == 0 {
                // MPS counts whole MiB; users round down.
                let mib = figure(3, &mut draw) >> 20;
                variables.insert("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={mib}M"));
            }
            if truthful == 4 || draw.u8(..3) == 0 {
                let limit = figure(4, &mut draw);
                put("sys/fs/cgroup/dmem.max", &format!("drm/0000:4e:00.0/vram0 {limit}\n"));
            } else {
                put("sys/fs/cgroup/dmem.max", "");
            }
            let (computer, available) = (false_figure(&mut draw) >> 10, false_figure(&mut draw) >> 10);
            put("proc/meminfo", &format!("MemTotal: {computer} kB\nMemAvailable: {available} kB\n"));

            let lookup = |name: &str| variables.get(name).map(OsString::from);
            let sources = FactSources { nvml: &nvml, system: &System::at(root.path()), variables: &lookup };
            let found = GpuMemoryFacts::of(&gpu, &memory, &sources);
            let share = 1 + draw.u64(..100);
            let cap = draw.bool().then(|| format!("{share}%").parse().unwrap());
            let budget = Budget::decide(&found.facts, Some(draw.u64(..2 * GIB)), cap);
            let bytes = budget.budget_bytes.unwrap();
            assert!(bytes <= true_bytes, "{true_bytes} by {truthful}: {budget:?}");
            assert!(budget.headroom_bytes.is_none_or(|headroom| headroom <= bytes), "{budget:?}");
            if matches!(memory, Ok(CudaMemory::OverLimit { .. })) {
                assert_eq!(budget.headroom_bytes, Some(0), "{budget:?}");
            }
            if let (Ok(CudaMemory::Known { .. }), false) = (&memory, integrated) {
                assert!(budget.headroom_bytes.unwrap() <= free_bytes, "{budget:?}");
            }
        }
    }
}
