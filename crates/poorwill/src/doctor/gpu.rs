//! Examines GPUs: memory figures by source, and link speeds.

#[cfg(not(target_os = "linux"))]
use super::device::DeviceReport;
#[cfg(not(target_os = "linux"))]
use super::plan::Plan;

#[cfg(not(target_os = "linux"))]
pub(super) fn examine(_: &Plan, warnings: &mut Vec<String>) -> Vec<DeviceReport> {
    warnings.push("no NVIDIA GPU can be used: poorwill drives them on Linux only".into());
    Vec::new()
}

#[cfg(target_os = "linux")]
pub(super) use linux::examine;

#[cfg(target_os = "linux")]
mod linux {
    use std::time::{Duration, Instant};

    use poorwill_core::budget::{Budget, SourceName};
    use poorwill_core::peer::PeerMemory;
    use poorwill_core::{ByteSize, Driver};
    use poorwill_driver::cuda::{self, GpuInfo};
    use poorwill_driver::link::{self, LinkSpeed};
    use poorwill_driver::nvml::Nvml;
    use poorwill_driver::system::{PciAddress, PciLink, System};
    use poorwill_driver::{CudaConfig, CudaDevice};

    use super::super::device::{DeviceReport, GpuReport, LinkReport, OtherLinkReport, warnings_of};
    use super::super::engine::EngineAdvice;
    use super::super::plan::Plan;
    use crate::budget::GpuMemoryFacts;
    use crate::device::DeviceSpec;

    const SAMPLE_BYTES: u64 = 128 << 20;

    /// Memory that device and computer must have left, so that measuring disturbs no other work.
    const HEADROOM_BYTES_MIN: u64 = 8 * SAMPLE_BYTES;

    /// Within this time of the timeout, GPUs are opened and not measured.
    const OPEN_ONLY: Duration = Duration::from_secs(2);

    pub(in super::super) fn examine(plan: &Plan, warnings: &mut Vec<String>) -> Vec<DeviceReport> {
        let gpus = match cuda::gpus(None) {
            Ok(gpus) => gpus,
            Err(error) => {
                warnings.push(format!("no NVIDIA GPU can be used: {}", error.kind));
                return Vec::new();
            }
        };
        let count = gpus.len();
        let mut usable = Vec::new();
        for (ordinal, gpu) in gpus.into_iter().enumerate() {
            let is_wanted = plan.device.as_ref().is_none_or(|spec| spec.id() == format!("cuda:{ordinal}"));
            match gpu {
                _ if !is_wanted => {}
                Ok(gpu) => usable.push(gpu),
                Err(error) => warnings.push(format!("cuda:{ordinal} cannot be used: {}", error.kind)),
            }
        }
        if let Some(DeviceSpec::Cuda { ordinal }) = plan.device
            && usize::try_from(ordinal).is_ok_and(|ordinal| ordinal >= count)
        {
            warnings.push(format!("the driver shows this process {count}, counted from cuda:0"));
        }
        let nvml = Nvml::load();
        if let (Err(reason), false) = (&nvml, usable.is_empty()) {
            warnings.push(format!("NVML is not available: {reason}"));
        }
        let examination = Examination { plan, nvml, system: System::here(), started: Instant::now() };
        usable.into_iter().map(|gpu| examination.report(&gpu, warnings)).collect()
    }

    struct Examination<'a> {
        plan: &'a Plan,
        nvml: Result<Nvml, String>,
        system: System,
        started: Instant,
    }

    impl Examination<'_> {
        fn open(&self, ordinal: u32) -> Result<CudaDevice, String> {
            if self.started.elapsed() > self.plan.timeout {
                return Err("other GPUs took too long; name it with --device".to_owned());
            }
            let config = CudaConfig::gpu(ordinal).linking_over(cuda::Links::Reachable);
            CudaDevice::open(&config).map_err(|error| error.kind.to_string())
        }

        fn report(&self, gpu: &GpuInfo, warnings: &mut Vec<String>) -> DeviceReport {
            let spec = DeviceSpec::Cuda { ordinal: gpu.ordinal };
            let (id, cap) = (spec.id(), self.plan.caps.of(&spec));
            let opened = self.open(gpu.ordinal);
            let device = opened.as_ref().map_err(Clone::clone);
            let reported = device
                .clone()
                .and_then(|device| device.reported_memory().map_err(|error| error.kind.to_string()));
            let used_bytes = device.as_ref().ok().and_then(|device| device.process_used_bytes());
            let GpuMemoryFacts { facts, slice, problems } = GpuMemoryFacts::here(gpu, &reported, &self.nvml);
            let memory = Budget::decide(&facts, used_bytes, cap);
            if let Err(reason) = &device {
                warnings.push(format!("{id} cannot be used: {reason}"));
            }
            warnings.extend(problems);
            warnings.extend(warnings_of(&id, &memory, slice).into_iter().chain(shared_memory(gpu, &id)));

            let links = device.as_ref().map_or_else(|_| Vec::new(), |device| self.links(device, &memory));
            let measured = device.and_then(|device| self.measure(device, &memory));
            let address = gpu.pci_bus_id.parse::<PciAddress>().ok();
            let link = address.map(|address| self.system.pci_link(address)).unwrap_or_default();
            let link = self.nvml.as_ref().map_or(link, |nvml| link.or(nvml.pci_link(&gpu.uuid)));
            warnings.extend(slow_link(&id, link));
            if let (Err(reason), Ok(_)) = (&measured, &opened) {
                warnings.push(format!("the link of {id} was not measured: {reason}"));
            }
            let measured = measured.ok();
            let engine_total_bytes = memory.source(SourceName::CudaTotal).and_then(|source| source.bytes);
            DeviceReport {
                id,
                name: gpu.name.clone(),
                granule_bytes: Some(gpu.granule_bytes),
                memory_name: opened.as_ref().ok().and_then(|device| device.info().memory_name.clone()),
                slice,
                shared_memory_per_block_bytes: Some(gpu.shared_memory_per_block_bytes),
                engine: EngineAdvice::of(&memory, engine_total_bytes, &self.plan.claims),
                memory,
                gpu: Some(GpuReport {
                    compute_capability: version(gpu.compute_capability),
                    driver_version: self.nvml.as_ref().ok().and_then(Nvml::driver_version),
                    cuda_version: version(gpu.cuda_version),
                    uuid: gpu.uuid.clone(),
                    pci_bus_id: gpu.pci_bus_id.clone(),
                    integrated: gpu.integrated,
                    numa_node: address.and_then(|address| self.system.numa_node(address)),
                    link: LinkReport {
                        width: link.width,
                        width_max: link.width_max,
                        generation: link.generation,
                        generation_max: link.generation_max,
                        to_device_bytes_per_s: measured.map(|speed| speed.to_device_bytes_per_s),
                        to_host_bytes_per_s: measured.map(|speed| speed.to_host_bytes_per_s),
                    },
                    links,
                    pin_bytes_per_s: measured.map(|speed| speed.pin_bytes_per_s),
                    measured_bytes: measured.map(|_| SAMPLE_BYTES),
                }),
            }
        }

        fn links(&self, device: &CudaDevice, memory: &Budget) -> Vec<OtherLinkReport> {
            let report = |(nth, number): (usize, u32)| {
                let measured = self.check_headroom(memory).and_then(|()| {
                    link::measure_with(device, nth, SAMPLE_BYTES).map_err(|error| error.kind.to_string())
                });
                let of_memory = self.check_headroom(memory).and_then(|()| {
                    let peer = device.peer_memory(number).map_err(|error| error.kind.to_string())?;
                    // Where nothing says it, trying shows it.
                    if let Some(idle_bytes) = peer.idle_bytes().ok().filter(|bytes| *bytes < SAMPLE_BYTES) {
                        return Err(format!("it has {} to spare", ByteSize(idle_bytes)));
                    }
                    link::measure_memory(device, &peer, SAMPLE_BYTES).map_err(|error| error.kind.to_string())
                });
                let because = measured.as_ref().err().or(of_memory.as_ref().err()).cloned();
                OtherLinkReport {
                    id: format!("cuda:{number}"),
                    together_bytes_per_s: measured.ok(),
                    memory_bytes_per_s: of_memory.ok(),
                    because,
                }
            };
            device.links().enumerate().map(report).collect()
        }

        fn measure(&self, device: &CudaDevice, memory: &Budget) -> Result<LinkSpeed, String> {
            self.check_headroom(memory)?;
            link::measure(device, SAMPLE_BYTES).map_err(|error| error.to_string())
        }

        fn check_headroom(&self, memory: &Budget) -> Result<(), String> {
            if self.started.elapsed() > self.plan.timeout.saturating_sub(OPEN_ONLY) {
                return Err("other GPUs took too long; name it with --device".into());
            }
            let host = self.system.memory().available_bytes;
            let group = self.system.cgroup_memory().available_bytes;
            for (what, left) in
                [("it", memory.headroom_bytes), ("the computer", host), ("the control group", group)]
            {
                if let Some(left) = left.filter(|left| *left < HEADROOM_BYTES_MIN) {
                    return Err(format!("{what} has {} left", ByteSize(left)));
                }
            }
            Ok(())
        }
    }

    fn shared_memory(gpu: &GpuInfo, id: &str) -> Option<String> {
        gpu.integrated.then(|| {
            format!(
                "{id} shares the computer's memory: a sleep at level 1 gives back nothing of what it backs up, unless \
                 backups go to a disk (POORWILL_DISK); level 2 keeps none"
            )
        })
    }

    fn slow_link(id: &str, link: PciLink) -> Option<String> {
        let narrow = link.width.zip(link.width_max).filter(|(now, max)| now < max);
        let slow = link.generation.zip(link.generation_max).filter(|(now, max)| now < max);
        let width = narrow.map(|(now, max)| format!("{now} of {max} lanes"));
        let speed = slow.map(|(now, max)| format!("generation {now} of {max}"));
        let what: Vec<String> = width.into_iter().chain(speed).collect();
        (!what.is_empty())
            .then(|| format!("the link of {id} runs with {}; this slows down wakes", what.join(" and ")))
    }

    fn version((major, minor): (u32, u32)) -> String {
        format!("{major}.{minor}")
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_link_below_its_best_is_a_warning() {
            let link = |width, generation| PciLink {
                width: Some(width),
                width_max: Some(16),
                generation: Some(generation),
                generation_max: Some(5),
            };
            assert_eq!(slow_link("cuda:0", link(16, 5)), None);
            assert_eq!(slow_link("cuda:0", PciLink::default()), None);
            let warning = slow_link("cuda:0", link(8, 4)).unwrap();
            assert!(warning.contains("8 of 16 lanes and generation 4 of 5"), "{warning}");
            assert!(slow_link("cuda:0", link(16, 1)).unwrap().contains("with generation 1 of 5;"));
        }
    }
}
