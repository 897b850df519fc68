//! The meters of real drivers, over trees of files as the kernel's documentation describes them.
#![cfg(target_os = "linux")]

use std::cell::Cell;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, symlink};
use std::process::Command;
use std::sync::Arc;

use futures_util::FutureExt as _;
use poorwill::gpus::unified_memory;
use poorwill_rotate::measure::{Declared, DeviceDriver, Devices, Gpu, GpuMemory, Meter as _};
use poorwill_testkit::watchdog;
use rustix::fs::OFlags;
use tokio::runtime::Builder;

use super::measure::{is_played, measured, played};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Headers of `gpu_metrics`: the size, and the format of a card and of an APU.
const OF_CARD: &[u8] = &[120, 0, 1, 3, 0, 0];
const OF_APU: &[u8] = &[128, 0, 2, 4, 0, 0];

/// A recorded `/proc` and `/sys`.
struct Tree {
    folder: tempfile::TempDir,
}

impl Tree {
    /// Of a computer with this memory.
    fn new(total_bytes: u64, available_bytes: u64) -> Self {
        let tree = Self { folder: tempfile::tempdir().unwrap() };
        tree.computer(total_bytes, available_bytes);
        tree
    }

    fn computer(&self, total_bytes: u64, available_bytes: u64) {
        let (total, available) = (total_bytes >> 10, available_bytes >> 10);
        let text = format!("MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n");
        self.put("proc/meminfo", text);
    }

    fn put(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.folder.path().join(path)).unwrap();
    }

    fn card(&self, number: u32, driver: &str, pci_address: &str) -> String {
        let card = format!("sys/class/drm/card{number}");
        let device =
            format!("DRIVER={driver}\nPCI_CLASS=30000\nPCI_ID=1002:744C\nPCI_SLOT_NAME={pci_address}\n");
        self.put(&format!("{card}/device/uevent"), device);
        self.put(&format!("{card}-DP-1/status"), "connected\n");
        card
    }

    fn amd(&self, number: u32, pci_address: &str, parts: &[(&str, u64, u64)]) -> String {
        let device = format!("{}/device", self.card(number, "amdgpu", pci_address));
        for (name, total_bytes, used_bytes) in parts {
            self.put(&format!("{device}/mem_info_{name}_total"), format!("{total_bytes}\n"));
            self.put(&format!("{device}/mem_info_{name}_used"), format!("{used_bytes}\n"));
        }
        device
    }

    /// A descriptor of a GPU's client.
    fn client(&self, pid: u32, descriptor: u32, pci_address: &str, id: u32, memory: &str) {
        let process = format!("proc/{pid}");
        self.put(
            &format!("{process}/fdinfo/{descriptor}"),
            format!(
                "pos:\t0\nflags:\t0100002\nmnt_id:\t26\nino:\t685\ndrm-driver:\txe\ndrm-client-id:\t{id}\n\
                 drm-pdev:\t{pci_address}\ndrm-total-system:\t0\n{memory}drm-total-cycles-rcs:\t7655183225\n"
            ),
        );
        let folder = self.folder.path().join(process).join("fd");
        fs::create_dir_all(&folder).unwrap();
        symlink("/dev/dri/renderD128", folder.join(descriptor.to_string())).unwrap();
    }

    fn meter(&self, driver: DeviceDriver) -> Devices {
        Devices::by(driver).below(self.folder.path())
    }

    fn memory(&self, driver: DeviceDriver, gpu: usize) -> GpuMemory {
        measured(&self.meter(driver), &[gpu]).unwrap_or_else(|error| panic!("{error}"))[0]
    }

    #[track_caller]
    fn refused(&self, driver: DeviceDriver, gpu: usize, words: &[&str]) {
        let error = measured(&self.meter(driver), &[gpu]).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.gpu, Gpu(gpu));
        for words in words {
            assert!(text.contains(words), "`{words}` is not in: {text}");
        }
    }
}

fn memory(free_bytes: u64, total_bytes: u64) -> GpuMemory {
    GpuMemory::new(free_bytes, total_bytes)
}

const INTEL: DeviceDriver = DeviceDriver::Intel { total_bytes: None };

#[test]
fn cards_of_amdgpu_are_in_the_order_of_their_addresses() {
    let tree = Tree::new(64 * GIB, 50 * GIB);
    let gtt = ("gtt", 32 * GIB, GIB);
    let late = tree.amd(0, "0000:c3:00.0", &[("vram", 24 * GIB, 5 * GIB), gtt]);
    tree.put(&format!("{late}/gpu_metrics"), OF_CARD);
    // Without metrics, as a virtual function.
    tree.amd(1, "0000:03:00.0", &[("vram", 16 * GIB, 0), gtt]);
    tree.card(2, "xe", "0000:01:00.0");
    tree.put("sys/class/drm/version", "drm 1.1.0\n");
    let meter = tree.meter(DeviceDriver::Amdgpu);
    assert_eq!(measured(&meter, &[1, 0]), Ok(vec![memory(19 * GIB, 24 * GIB), memory(16 * GIB, 16 * GIB)]));
    tree.put(&format!("{late}/mem_info_vram_used"), format!("{}\n", 6 * GIB));
    assert_eq!(measured(&meter, &[1]), Ok(vec![memory(18 * GIB, 24 * GIB)]), "it is measured each time");
    tree.refused(DeviceDriver::Amdgpu, 2, &["cannot measure GPU 2", "amdgpu has 2 GPUs", "none at 2"]);
}

#[test]
fn an_apu_has_its_part_and_what_the_computer_gives_it() {
    let tree = Tree::new(128 * GIB, 100 * GIB);
    let device = tree.amd(1, "0000:c5:00.0", &[("vram", GIB / 2, GIB / 4), ("gtt", 110 * GIB, 10 * GIB)]);
    tree.put(&format!("{device}/gpu_metrics"), OF_APU);
    // 96 GiB are available besides the reserve of 4 GiB.
    let apu = |available: u64| {
        tree.computer(128 * GIB, available);
        tree.memory(DeviceDriver::Amdgpu, 0)
    };
    let total_bytes = 110 * GIB + GIB / 2;
    assert_eq!(apu(100 * GIB), memory(96 * GIB + GIB / 4, total_bytes));
    assert_eq!(apu(120 * GIB), memory(100 * GIB + GIB / 4, total_bytes), "not more than is left of its part");
    assert_eq!(apu(GIB), memory(GIB / 4, total_bytes));
    tree.remove(&format!("{device}/mem_info_gtt_total"));
    tree.refused(DeviceDriver::Amdgpu, 0, &["mem_info_gtt_total is not there", "measure = \"declared\""]);
}

#[test]
fn a_file_of_amdgpu_that_is_missing_or_odd_is_named() {
    let tree = Tree::new(64 * GIB, 50 * GIB);
    let device = tree.amd(0, "0000:03:00.0", &[("vram", 16 * GIB, GIB)]);
    let used = format!("{device}/mem_info_vram_used");
    let file = tree.folder.path().join(&used).display().to_string();
    tree.put(&used, "much\n");
    tree.refused(DeviceDriver::Amdgpu, 0, &[&file, "`much`, which is no number", "update the kernel"]);
    tree.put(&used, format!("{}\n", 17 * GIB));
    tree.refused(DeviceDriver::Amdgpu, 0, &["17 GiB of 16 GiB are used"]);
    tree.remove(&used);
    tree.refused(DeviceDriver::Amdgpu, 0, &[&file, "is not there", "[memory] measure = \"declared\""]);
    fs::create_dir(tree.folder.path().join(&used)).unwrap();
    tree.refused(DeviceDriver::Amdgpu, 0, &["cannot read", &file]);
}

#[test]
fn what_intels_cards_hold_is_the_sum_of_their_clients() {
    let tree = Tree::new(64 * GIB, 50 * GIB);
    let card = tree.card(1, "xe", "0000:03:00.0");
    tree.put(&format!("{card}/device/tile0/physical_vram_size_bytes"), format!("{}\n", 8 * GIB));
    tree.put(&format!("{card}/device/tile1/physical_vram_size_bytes"), format!("{}\n", 4 * GIB));
    assert_eq!(tree.memory(INTEL, 0), memory(12 * GIB, 12 * GIB), "no process uses it");
    let held = |mib: u64| format!("drm-total-vram0:\t9216 MiB\ndrm-resident-vram0:\t{mib} MiB\n");
    tree.client(7, 3, "0000:03:00.0", 1, &held(100));
    // The same client by another descriptor, and in another process.
    tree.client(7, 4, "0000:03:00.0", 1, &held(100));
    tree.client(8, 3, "0000:03:00.0", 1, &held(100));
    tree.client(8, 5, "0000:03:00.0", 2, &(held(20) + "drm-resident-vram1:\t1024 KiB\n"));
    // Another card's.
    tree.client(8, 6, "0000:04:00.0", 3, &held(5000));
    tree.put("proc/9/fdinfo/0", "pos:\t0\n");
    tree.put("proc/self/fdinfo/3", "pos:\t0\n");
    assert_eq!(tree.memory(INTEL, 0), memory(12 * GIB - 121 * MIB, 12 * GIB));
    tree.client(9, 4, "0000:03:00.0", 4, "drm-total-system0:\t1 MiB\n");
    tree.refused(INTEL, 0, &["drm-resident-vram0", "0000:03:00.0", "\"unified\"", "\"declared\""]);
}

#[test]
fn the_size_of_a_card_of_intels_is_reported_or_configured() {
    let tree = Tree::new(64 * GIB, 50 * GIB);
    let card = tree.card(0, "i915", "0000:03:00.0");
    tree.client(7, 3, "0000:03:00.0", 1, "drm-resident-local0:\t1024 MiB\n");
    tree.refused(
        INTEL,
        0,
        &["physical_vram_size_bytes", "lmem_total_bytes", "gpu = \"16GiB\"", "\"unified\""],
    );
    let configured = DeviceDriver::Intel { total_bytes: Some(16 * GIB) };
    assert_eq!(tree.memory(configured, 0), memory(15 * GIB, 16 * GIB));
    tree.put(&format!("{card}/lmem_total_bytes"), format!("{}\n", 6 * GIB));
    assert_eq!(tree.memory(INTEL, 0), memory(5 * GIB, 6 * GIB));
    tree.refused(INTEL, 1, &["Intel's drivers have 1 GPUs", "none at 1"]);
}

#[test]
fn unified_memory_is_the_computers_less_a_reserve() {
    let tree = Tree::new(121 * GIB, 21 * GIB);
    let unified = |total: u64, available: u64| {
        tree.computer(total, available);
        tree.memory(DeviceDriver::Unified, 0)
    };
    assert_eq!(unified(121 * GIB, 21 * GIB), memory(17 * GIB, 117 * GIB));
    assert_eq!(unified(121 * GIB, 3 * GIB), memory(0, 117 * GIB));
    assert_eq!(unified(8 * GIB, 5 * GIB), memory(4 * GIB, 7 * GIB));
    tree.refused(DeviceDriver::Unified, 1, &["the computer has one memory", "gpus = [0]"]);
    tree.put("proc/meminfo", "MemTotal: 5 kB\n");
    tree.refused(DeviceDriver::Unified, 0, &["proc/meminfo", "MemAvailable"]);
}

/// A pipe without a writer stands for a driver that does not answer.
#[test]
fn a_driver_that_hangs_keeps_one_thread_and_no_more() {
    watchdog::watched(|| {
        let tree = Tree::new(121 * GIB, 21 * GIB);
        let (meter, path) = (tree.meter(DeviceDriver::Unified), tree.folder.path().join("proc/meminfo"));
        let good = path.with_extension("good");
        fs::rename(&path, &good).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let runtime = Builder::new_multi_thread().worker_threads(1).max_blocking_threads(2).build().unwrap();
        let asking = meter.clone();
        let hung = runtime.spawn(async move { asking.measure(&[Gpu(0)]).await });
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap();
        let writer = Cell::new(None);
        watchdog::eventually("the driver is asked", || {
            let opened = OpenOptions::new().write(true).custom_flags(flags).open(&path);
            opened.map(|file| writer.set(Some(file))).is_ok()
        });
        let entered = runtime.enter();
        for _ in 0..3 {
            assert_eq!(meter.measure(&[Gpu(0)]).now_or_never(), None);
            assert_eq!(meter.remark(Gpu(0)).now_or_never(), None);
            assert_eq!(meter.held(&[Gpu(0)], vec![1]).now_or_never(), Some(None), "it waits for nothing");
        }
        drop(entered);
        // The other thread is free for others.
        assert_eq!(runtime.block_on(runtime.spawn_blocking(|| 7)).unwrap(), 7);
        let text = fs::read(&good).unwrap();
        fs::rename(&good, &path).unwrap();
        writer.take().unwrap().write_all(&text).unwrap();
        let memory = Ok(vec![memory(17 * GIB, 117 * GIB)]);
        assert_eq!(runtime.block_on(hung).unwrap(), memory);
        assert_eq!(runtime.block_on(meter.measure(&[Gpu(0)])), memory);
    });
}

#[test]
fn the_driver_that_is_there_is_picked() {
    if !is_played() {
        return played("meters::the_driver_that_is_there_is_picked", None);
    }
    let any = DeviceDriver::Any;
    let tree = Tree::new(64 * GIB, 50 * GIB);
    tree.refused(any, 0, &["libnvidia-ml.so.1", "no card of amdgpu, i915 or xe", "measure = \"declared\""]);
    let card = tree.card(1, "xe", "0000:03:00.0");
    tree.put(&format!("{card}/device/tile0/physical_vram_size_bytes"), format!("{}\n", 8 * GIB));
    let meter = tree.meter(any);
    assert_eq!(measured(&meter, &[0]), Ok(vec![memory(8 * GIB, 8 * GIB)]));
    tree.amd(0, "0000:09:00.0", &[("vram", 16 * GIB, GIB)]);
    assert_eq!(measured(&meter, &[0]), Ok(vec![memory(8 * GIB, 8 * GIB)]), "it stays with what it found");
    assert_eq!(tree.memory(any, 0), memory(15 * GIB, 16 * GIB));
    // A sound device of NVIDIA's is no GPU. A card whose driver does not load is not replaced by another.
    tree.put("sys/bus/pci/devices/0000:01:00.1/vendor", "0x10de\n");
    tree.put("sys/bus/pci/devices/0000:01:00.1/class", "0x040300\n");
    assert_eq!(tree.memory(any, 0), memory(15 * GIB, 16 * GIB));
    tree.put("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
    tree.put("sys/bus/pci/devices/0000:01:00.0/class", "0x030000\n");
    tree.refused(any, 0, &["libnvidia-ml.so.1", "install NVIDIA's driver"]);
    assert_eq!(tree.memory(DeviceDriver::Amdgpu, 0), memory(15 * GIB, 16 * GIB), "by name it is");
}

#[test]
fn a_gpu_without_figures_of_its_own_has_the_computers() {
    if !is_played() {
        let device = "GPU-706f6f72-7769-6c6c-4000-800000000000:name=NVIDIA GB10:capability=12.1";
        return played("meters::a_gpu_without_figures_of_its_own_has_the_computers", Some(device));
    }
    for driver in [DeviceDriver::Any, DeviceDriver::Nvml, DeviceDriver::Unified] {
        let found = measured(&Devices::by(driver), &[0]).unwrap()[0];
        let computer = unified_memory("/".as_ref()).unwrap();
        assert_eq!(found.total_bytes, computer.total_bytes, "{driver:?}");
        assert!(found.free_bytes > 0 && found.free_bytes <= found.total_bytes, "{driver:?} {found:?}");
    }
    // Unless the configuration says so.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let remark = |driver, gpu| runtime.block_on(Devices::by(driver).remark(Gpu(gpu)));
    let words = "GPU 0 has no memory of its own by NVML, so the computer's memory is counted";
    assert!(remark(DeviceDriver::Any, 0).is_some_and(|remark| remark.contains(words)));
    assert_eq!((remark(DeviceDriver::Unified, 0), remark(DeviceDriver::Any, 1)), (None, None));
    let error = measured(&Devices::by(DeviceDriver::Nvml), &[1]).unwrap_err();
    assert!(error.to_string().contains("NVML shows 1 GPUs"), "{error}");
}

#[test]
fn what_is_declared_is_not_measured() {
    let meter = Declared::new(24 * GIB, Arc::new(|gpu| if gpu == Gpu(0) { 5 * GIB } else { 30 * GIB }));
    assert_eq!(measured(&meter, &[1, 0]), Ok(vec![memory(0, 24 * GIB), memory(19 * GIB, 24 * GIB)]));
    assert!(!meter.is_measured() && Devices::default().is_measured());
}
