//! A device of several processes: its capacity is theirs together, and memory lives while any of them has it.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::Stdio;

use poorwill_core::{Driver, DriverErrorKind};
use poorwill_driver::{HostConfig, HostDevice};
use poorwill_testkit::child::{self, OwnedChild};
use tempfile::TempDir;

const GRANULES: u64 = 96;
const FOLDER: &str = "POORWILL_TEST_FOLDER";

fn open(folder: &Path) -> HostDevice {
    HostDevice::open(&HostConfig::of_pages(GRANULES).shared_in(folder)).unwrap()
}

fn free_granules(device: &HostDevice) -> u64 {
    device.memory_info().unwrap().free_bytes / device.info().granule_bytes
}

/// Memory of all kinds, and a line when it is there. It goes with the process.
fn hold() {
    let device = open(Path::new(&std::env::var_os(FOLDER).unwrap()));
    let granule = device.info().granule_bytes;
    device.create(3 * granule).unwrap();
    let shared = device.create_shared(5 * granule).unwrap();
    let _descriptor = device.export(shared).unwrap();
    device.release(shared).unwrap();
    let range = device.reserve(7 * granule).unwrap();
    let mapped = device.create_shared(7 * granule).unwrap();
    device.map(range, mapped).unwrap();
    device.release(mapped).unwrap();
    println!("holding");
    std::io::stdin().read_exact(&mut [0]).unwrap();
}

#[test]
fn a_killed_process_leaves_nothing_in_use() {
    if child::role().is_some() {
        return hold();
    }
    let folder = TempDir::new().unwrap();
    let device = open(folder.path());
    let mut command = child::command("holder", &[(FOLDER, folder.path().to_str().unwrap())]);
    let mut holder = OwnedChild::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
    let mut said = Vec::new();
    while !said.ends_with(b"holding\n") {
        let mut byte = [0];
        holder.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
        said.push(byte[0]);
    }
    assert_eq!(free_granules(&device), GRANULES - 3 - 5 - 7);
    let granule = device.info().granule_bytes;
    let full = device.create((GRANULES - 14) * granule).unwrap_err().kind;
    let DriverErrorKind::OutOfMemory { free_bytes, .. } = full else { panic!("{full:?}") };
    assert_eq!(free_bytes, (GRANULES - 15) * granule);
    // What was sent to another process is the other's, too.
    let sent = format!("/proc/{}/fd", holder.id());
    let mut kept = Vec::new();
    for descriptor in std::fs::read_dir(sent).unwrap() {
        let path = descriptor.unwrap().path();
        let named = std::fs::read_link(&path).unwrap();
        kept.extend(named.starts_with(folder.path()).then_some(named));
    }
    assert!(kept.len() >= 3, "{kept:?}");
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert_eq!(free_granules(&device), GRANULES, "all of it is gone with its process");
    device.create(GRANULES * granule).unwrap();
}

#[test]
fn memory_outlives_the_device_that_made_it() {
    let folder = TempDir::new().unwrap();
    let (maker, taker) = (open(folder.path()), open(folder.path()));
    let bytes = 4 * maker.info().granule_bytes;
    let range = maker.reserve(bytes).unwrap();
    let backing = maker.create_shared(bytes).unwrap();
    maker.map(range, backing).unwrap();
    maker.set_access(range).unwrap();
    maker.zero(poorwill_core::StreamId::DEFAULT, range).unwrap().wait().unwrap();
    let written = maker.digest(poorwill_core::StreamId::DEFAULT, &[range]).unwrap().wait().unwrap();
    let descriptor = maker.export(backing).unwrap();
    drop(maker);
    assert_eq!(free_granules(&taker), GRANULES - 4, "its descriptor keeps it");
    let taken = taker.import(descriptor.as_fd(), bytes).unwrap();
    drop(descriptor);
    let range = taker.reserve(bytes).unwrap();
    taker.map(range, taken).unwrap();
    taker.set_access(range).unwrap();
    assert_eq!(taker.digest(poorwill_core::StreamId::DEFAULT, &[range]).unwrap().wait().unwrap(), written);
    assert_eq!(taker.memory_info().unwrap().process.unwrap().used_bytes, bytes);
    taker.release(taken).unwrap();
    assert_eq!(free_granules(&taker), GRANULES - 4, "its mapping keeps it");
    taker.unmap(range).unwrap();
    assert_eq!(free_granules(&taker), GRANULES);
}

#[test]
fn processes_have_one_capacity() {
    let folder = TempDir::new().unwrap();
    let devices = [open(folder.path()), open(folder.path())];
    let granule = devices[0].info().granule_bytes;
    let shared = devices[0].create_shared(40 * granule).unwrap();
    let plain = devices[1].create(50 * granule).unwrap();
    for device in &devices {
        assert_eq!(free_granules(device), 6);
        for refused in [device.create(7 * granule), device.create_shared(7 * granule)] {
            let kind = refused.unwrap_err().kind;
            assert!(matches!(kind, DriverErrorKind::OutOfMemory { .. }), "{kind:?}");
        }
    }
    // A descriptor that is closed without a backing, and one of a released backing.
    drop(devices[0].export(shared).unwrap());
    let kept = devices[0].export(shared).unwrap();
    devices[0].release(shared).unwrap();
    assert_eq!(free_granules(&devices[1]), 6);
    drop(kept);
    assert_eq!(free_granules(&devices[1]), 46);
    devices[1].release(plain).unwrap();
    assert_eq!(devices.map(|device| free_granules(&device)), [GRANULES; 2]);
}

#[test]
fn a_folder_that_cannot_be_had_is_an_error() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().write_all(b"no folder").unwrap();
    let refused = HostDevice::open(&HostConfig::of_pages(GRANULES).shared_in(file.path())).unwrap_err();
    assert!(refused.to_string().contains("device memory"), "{refused}");
    assert!(file.as_file().as_fd().as_raw_fd() > 2);
}
