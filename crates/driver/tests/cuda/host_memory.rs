//! Host memory of devices: made for many buffers at once, page-locked or not, within limits that kill.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use poorwill_core::{
    CopyPart, DeviceRange, Driver, DriverErrorKind, HostBuffer, HostMemoryInfo, Pending, StreamId,
};
use poorwill_driver::{CudaDevice, HostConfig, HostDevice, HostMemoryConfig, Pin};
use poorwill_testkit::child;
use poorwill_testkit::device::cuda_config;
use poorwill_testkit::latch::{self, Latch};
use poorwill_testkit::pattern;

use crate::turn;

const MIB: u64 = 1 << 20;

fn open(host_memory: HostMemoryConfig) -> CudaDevice {
    CudaDevice::open(&cuda_config().backing_up_in(host_memory)).unwrap()
}

fn pageable() -> HostMemoryConfig {
    HostMemoryConfig::default().pinning(Pin::Never)
}

fn host(limit_bytes: Option<u64>) -> HostDevice {
    let host_memory = HostMemoryConfig::default().limited_to(limit_bytes);
    HostDevice::open(&HostConfig::of_pages(64).backing_up_in(host_memory)).unwrap()
}

fn wait(pending: Vec<Pending<HostBuffer>>) -> Vec<HostBuffer> {
    pending.into_iter().map(|one| one.wait().unwrap()).collect()
}

fn mapped(device: &dyn Driver, bytes: u64) -> DeviceRange {
    let range = device.reserve(bytes.next_multiple_of(device.info().granule_bytes)).unwrap();
    let backing = device.create(range.bytes).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    range
}

/// On every kind of device.
fn on_all(check: impl Fn(&dyn Driver)) {
    check(&host(None));
    check(&open(HostMemoryConfig::default()));
    check(&open(pageable()));
}

#[test]
fn a_batch_is_exact_and_comes_in_its_order() {
    let _turn = turn();
    on_all(|device| {
        let sizes = [2 * MIB, 1, 40 * MIB, 4097, 33 * MIB, 2 * MIB, 70 * MIB, 12_345];
        let total: u64 = sizes.iter().sum();
        let mut buffers = wait(device.host_alloc_all(&sizes).unwrap());
        for ((seed, buffer), bytes) in (0..).zip(&mut buffers).zip(sizes) {
            assert_eq!(buffer.len() as u64, bytes);
            let pattern = pattern::bytes(seed, buffer.len());
            buffer.copy_from_slice(&pattern);
        }
        for (seed, buffer) in (0..).zip(&buffers) {
            assert!(buffer[..] == pattern::bytes(seed, buffer.len()), "{seed}");
        }
        let info = device.host_memory();
        assert_eq!(info.used_bytes, total);
        assert!((total..total + MIB).contains(&info.held_bytes), "{info:?}");
        drop(buffers);
        let unused =
            HostMemoryInfo::new(info.held_bytes, 0).pinning(info.pinned_bytes).limited_to(info.limit_bytes);
        assert_eq!(device.host_memory(), unused, "kept");
        drop(device.host_alloc_all(&sizes).unwrap());
        assert_eq!(device.host_memory(), unused, "and used again");
        device.host_trim().unwrap();
        assert_eq!(device.host_memory(), HostMemoryInfo::default());
        let invalid = device.host_alloc_all(&[1, 0]).unwrap_err();
        assert!(matches!(invalid.kind, DriverErrorKind::InvalidArgument { .. }), "{invalid}");
        assert!(device.host_alloc_all(&[]).unwrap().is_empty());
    });
}

#[test]
fn a_limit_is_kept() {
    let _turn = turn();
    let limit_bytes = Some(8 * MIB);
    let devices: [Box<dyn Driver>; 2] =
        [Box::new(host(limit_bytes)), Box::new(open(HostMemoryConfig::default().limited_to(limit_bytes)))];
    for device in devices {
        let kept = device.host_alloc(6 * MIB).unwrap();
        let refused = device.host_alloc_all(&[MIB, MIB, 4096]).unwrap_err();
        let DriverErrorKind::OutOfHostMemory { asked_bytes, reason } = refused.kind else {
            panic!("{refused}");
        };
        assert_eq!(asked_bytes, 2 * MIB + 4096);
        assert!(reason.contains("8 MiB") && reason.contains("6 MiB"), "{reason}");
        assert_eq!(device.host_memory().limit_bytes, limit_bytes);
        drop(kept);
        assert_eq!(
            wait(device.host_alloc_all(&[4 * MIB, 4 * MIB]).unwrap()).len(),
            2,
            "unused memory gives way"
        );
    }
}

#[test]
fn buffers_outlive_their_device() {
    let _turn = turn();
    on_devices_that_end(|device| {
        let mut pending = device.host_alloc_all(&[MIB, 3 * MIB, 80 * MIB]).unwrap();
        let last = pending.pop().unwrap();
        let mut buffers = wait(pending);
        buffers[1].fill(7);
        drop(device);
        assert!(buffers[1].iter().all(|byte| *byte == 7));
        // It was made, or it says why not; no call waits for ever.
        match last.wait() {
            Ok(buffer) => assert_eq!(buffer.len() as u64, 80 * MIB),
            Err(error) => assert!(error.to_string().contains("closed"), "{error}"),
        }
    });
}

fn on_devices_that_end(check: impl Fn(Box<dyn Driver>)) {
    check(Box::new(host(None)));
    check(Box::new(open(HostMemoryConfig::default())));
}

#[test]
fn page_locked_memory_is_known_by_its_address() {
    let _turn = turn();
    let device = open(HostMemoryConfig::default());
    let buffers = wait(device.host_alloc_all(&[5000, 3 * MIB, 65 * MIB]).unwrap());
    for buffer in &buffers {
        let at = device.pinned_at(buffer).unwrap();
        assert_eq!(device.pinned_at(&buffer[100..200]), Some(at + 100), "any part of it");
    }
    assert_eq!(device.pinned_at(&vec![0; 5000]), None);
    let info = device.host_memory();
    assert_eq!((info.pinned_bytes, device.host_memory_details().pageable_because), (info.held_bytes, None));
    let device = open(pageable());
    let buffer = device.host_alloc(5000).unwrap();
    assert_eq!((device.pinned_at(&buffer), device.host_memory().pinned_bytes), (None, 0));
    assert!(device.host_memory_details().pageable_because.is_some());
}

/// Through the staging buffer, which is smaller than the largest of these, at any offset.
#[test]
fn pageable_memory_is_copied_in_the_streams_turn() {
    let _turn = turn();
    let device = open(pageable());
    let range = mapped(&device, 80 * MIB);
    let stream = device.stream_create().unwrap();
    for (seed, bytes, device_offset, host_offset) in [
        (1, 1, 0, 0),
        (2, 4097, 511, 77),
        (3, 3 * MIB + 5, 1, 4096),
        (4, 32 * MIB, 0, 0),
        (5, 32 * MIB + 1, 3, 1),
        (6, 79 * MIB + 123, 12_345, 67),
    ] {
        let len = usize::try_from(bytes).unwrap();
        let start = usize::try_from(host_offset).unwrap();
        let at = DeviceRange::new(range.addr + device_offset, bytes);
        let parts = [CopyPart { device: at, host_offset }];
        let mut source = device.host_alloc(host_offset + bytes).unwrap();
        let pattern = pattern::bytes(seed, len);
        source[start..].copy_from_slice(&pattern);
        let mut into = device.host_alloc(host_offset + bytes + 9).unwrap();
        into.fill(0xEE);
        // No call waits: the stream is blocked while all of it is queued.
        let latch = Arc::new(Latch::default());
        latch::hold(&device, stream, &latch);
        let there = device.copy_to_device(stream, Arc::new(source), &parts).unwrap();
        let back = device.copy_to_host(stream, into, &parts).unwrap();
        latch.open();
        there.wait().unwrap();
        let back = back.wait().unwrap();
        assert!(back[start..start + len] == pattern[..], "{bytes} bytes");
        let untouched = back[..start].iter().chain(&back[start + len..]);
        assert!(untouched.copied().all(|byte| byte == 0xEE));
    }
    // Several parts, and no waiter.
    let half = 20 * MIB;
    let parts = [0, 1].map(|nth| CopyPart {
        device: DeviceRange::new(range.addr + nth * half, half),
        host_offset: (1 - nth) * half,
    });
    let mut source = device.host_alloc(2 * half).unwrap();
    let pattern = pattern::bytes(9, source.len());
    source.copy_from_slice(&pattern);
    drop(device.copy_to_device(stream, Arc::new(source), &parts).unwrap());
    let into = device.host_alloc(2 * half).unwrap();
    assert!(device.copy_to_host(stream, into, &parts).unwrap().wait().unwrap()[..] == pattern);
    assert_eq!(device.host_memory().pinned_bytes, 0);
    device.synchronize().unwrap();
}

/// A child that plays a machine on which nothing can be page-locked.
#[test]
fn where_nothing_can_be_page_locked_copies_still_work() {
    if poorwill_testkit::device::skipped_unless(
        |kind| !kind.to_string().starts_with("cuda"),
        "the fake plays it",
    ) {
        return;
    }
    let Some(role) = child::role() else {
        let refused = ("POORWILL_FAKE_CUDA_FAIL", "cuMemHostRegister_v2:1:1000000:801");
        let integrated = ("POORWILL_FAKE_CUDA_SIMULATE", "0:integrated=1");
        for (role, variable) in [("refused", refused), ("integrated", integrated)] {
            child::expect_success(child::command(role, &[variable]));
        }
        return;
    };
    let device = open(HostMemoryConfig::default());
    let bytes = 3 * MIB + 17;
    let range = mapped(&device, bytes);
    let parts = [CopyPart { device: DeviceRange::new(range.addr, bytes), host_offset: 0 }];
    let mut buffers = wait(device.host_alloc_all(&[bytes, bytes]).unwrap());
    let (into, mut source) = (buffers.pop().unwrap(), buffers.pop().unwrap());
    let pattern = pattern::bytes(3, source.len());
    source.copy_from_slice(&pattern);
    device.copy_to_device(StreamId::DEFAULT, Arc::new(source), &parts).unwrap().wait().unwrap();
    let back = device.copy_to_host(StreamId::DEFAULT, into, &parts).unwrap().wait().unwrap();
    assert!(back[..] == pattern);
    let info = device.host_memory();
    assert_eq!((info.pinned_bytes, info.used_bytes), (0, bytes));
    let because = device.host_memory_details().pageable_because.unwrap();
    let expected = if role == "refused" { "NOT_SUPPORTED" } else { "memory of its own" };
    assert!(because.contains(expected), "{because}");
    assert_eq!(
        device.digest(StreamId::DEFAULT, &[range]).unwrap().wait().unwrap().len() as u64,
        range.bytes / device.info().granule_bytes
    );
}

/// A control group below that of this process, of a kind that kills.
struct Group(PathBuf);

impl Group {
    fn make(limit_bytes: u64) -> io::Result<Self> {
        let membership = fs::read_to_string("/proc/self/cgroup")?;
        let group = |controllers: &str| {
            membership.lines().find_map(|line| {
                let (_, rest) = line.split_once(':')?;
                let (of, group) = rest.split_once(':')?;
                (of == controllers).then(|| group.trim_start_matches('/').to_owned())
            })
        };
        let missing = || io::Error::new(io::ErrorKind::NotFound, "no control group for memory");
        let name = format!("poorwill-test-{}", std::process::id());
        let (folder, limit) = match group("memory") {
            Some(group) => {
                (Path::new("/sys/fs/cgroup/memory").join(group).join(name), "memory.limit_in_bytes")
            }
            None => {
                (Path::new("/sys/fs/cgroup").join(group("").ok_or_else(missing)?).join(name), "memory.max")
            }
        };
        fs::create_dir(&folder)?;
        let made = Self(folder);
        fs::write(made.0.join(limit), limit_bytes.to_string())?;
        Ok(made)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_control_group_is_not_overrun() {
    if let Some(group) = child::role() {
        // From here on the group counts what is touched, and kills.
        if let Err(error) = fs::write(Path::new(&group).join("cgroup.procs"), std::process::id().to_string())
        {
            println!("not entered: {error}");
            return;
        }
        let device = host(None);
        let refused = device.host_alloc_all(&[200 * MIB, 200 * MIB]).unwrap_err();
        assert!(refused.to_string().contains("control group"), "{refused}");
        let mut kept = Vec::new();
        let refused = loop {
            match device.host_alloc(if kept.len() % 2 == 0 { 16 * MIB } else { MIB }) {
                Ok(mut buffer) => {
                    buffer.fill(1);
                    kept.push(buffer);
                }
                Err(error) => break error,
            }
        };
        assert!(refused.to_string().contains("control group"), "{refused}");
        let held = device.host_memory().held_bytes;
        assert!((150 * MIB..256 * MIB).contains(&held), "{held}");
        kept.clear();
        device.host_trim().unwrap();
        let all = wait(device.host_alloc_all(&[100 * MIB, 50 * MIB]).unwrap());
        println!("{} buffers", all.len());
        return;
    }
    let skip = |why: String| {
        use io::Write;
        let _ = writeln!(io::stderr(), "a_control_group_is_not_overrun: skipped: {why}");
    };
    let group = match Group::make(256 * MIB) {
        Ok(group) => group,
        Err(error) => return skip(format!("no control group can be made here: {error}")),
    };
    if fs::read_to_string(group.0.join("cgroup.procs")).is_err() || !group.0.join("memory.stat").exists() {
        return skip("the control group does not count memory".into());
    }
    let output = child::command(group.0.to_str().unwrap(), &[]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if let Some((_, why)) = said.split_once("not entered: ") {
        return skip(format!("no process may enter a control group here: {why}"));
    }
    assert!(output.status.success() && said.contains("2 buffers"), "{}: {said}\n{errors}", output.status);
}
