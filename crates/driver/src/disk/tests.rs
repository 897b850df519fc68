//! Every way of transferring brings the same bytes back, or an error.

use poorwill_testkit::watchdog::eventually;

use std::sync::Arc;

use poorwill_core::backup::{Disk, OnDisk};
use poorwill_core::{DriverErrorKind, HostBuffer, Op};

use super::*;

#[allow(clippy::unwrap_used)] // Helpers are test code, too.
fn all_disks() -> Vec<FileDisk> {
    let folder = std::env::temp_dir();
    let configs = [
        DiskConfig::in_folder(&folder),
        DiskConfig::in_folder(&folder).directly(false),
        DiskConfig::in_folder(&folder).by(DiskIo::Threads),
        DiskConfig::in_folder(&folder).by(DiskIo::Threads).directly(false),
        DiskConfig::in_folder("/dev/shm"),
    ];
    configs.iter().map(|config| FileDisk::open(&config.clone().limited_to(64 << 20)).unwrap()).collect()
}

/// Aligned as direct transfers want it, and as none does.
fn buffer(bytes: &[u8], is_aligned: bool) -> HostBuffer {
    #[derive(Debug)]
    struct Shifted(Vec<u8>, std::ops::Range<usize>);
    impl poorwill_core::HostMemory for Shifted {
        fn as_slice(&self) -> &[u8] {
            &self.0[self.1.clone()]
        }
        fn as_mut_slice(&mut self) -> &mut [u8] {
            &mut self.0[self.1.clone()]
        }
    }
    let memory = vec![0; bytes.len() + 8192];
    let aligned = memory.as_ptr().addr().next_multiple_of(4096) - memory.as_ptr().addr();
    let start = aligned + usize::from(!is_aligned);
    let mut buffer = HostBuffer::new(Shifted(memory, start..start + bytes.len()));
    buffer.copy_from_slice(bytes);
    buffer
}

/// The threads of a disk release space later.
fn expect_used_bytes(disk: &FileDisk, bytes: u64) {
    eventually("the space of what is dropped comes back", || disk.info().used_bytes == bytes);
}

#[test]
fn all_bytes_come_back_from_any_size_and_offset() {
    for disk in all_disks() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut stored: Vec<(Vec<u8>, Arc<dyn OnDisk>)> = Vec::new();
        for _ in 0..12 {
            let pending: Vec<_> = (0..4)
                .map(|_| {
                    let len = match random.u32(..4) {
                        0 => random.usize(1..100),
                        1 => 4096 * random.usize(1..40),
                        2 => (1 << 20) + 512 * random.usize(..3),
                        _ => random.usize(..3 << 20),
                    };
                    let mut bytes = vec![0; len];
                    random.fill(&mut bytes);
                    let written = disk.write(Arc::new(buffer(&bytes, random.bool())));
                    (bytes, written)
                })
                .collect();
            stored.extend(pending.into_iter().map(|(bytes, written)| (bytes, written.wait().unwrap())));
            while stored.len() > 6 {
                stored.swap_remove(random.usize(..stored.len()));
            }
            let reads: Vec<_> = stored
                .iter()
                .map(|(bytes, there)| {
                    let from = if random.bool() { 0 } else { random.usize(..=bytes.len()) };
                    let into = buffer(&vec![0; bytes.len() - from], random.bool());
                    (&bytes[from..], there.read(from as u64, into))
                })
                .collect();
            for (wanted, read) in reads {
                assert!(*read.wait().unwrap() == *wanted, "{:?}", disk.info());
            }
            for (bytes, there) in &stored {
                assert_eq!(there.bytes(), bytes.len() as u64);
                assert!(there.read(1, buffer(bytes, true)).wait().is_err(), "it leaves the stored bytes");
            }
        }
        drop(stored);
        expect_used_bytes(&disk, 0);
    }
}

#[test]
fn what_is_reported_is_what_is_done() {
    let [ring, cached, threads, _, memory] = &all_disks()[..] else { panic!("another number of all_disks") };
    assert_eq!((threads.info().io, threads.info().io_because.is_some()), ("threads", true));
    // A kernel may have no ring; then it says why.
    assert_eq!(ring.info().io == "io_uring", ring.info().io_because.is_none());
    assert!(!cached.info().is_direct && cached.info().direct_because.is_some());
    assert!(!memory.info().is_direct, "{:?}", memory.info());
}

#[test]
fn a_limit_is_kept_and_what_does_not_fit_changes_nothing() {
    for disk in all_disks() {
        let kept = disk.write(Arc::new(buffer(&vec![7; 60 << 20], true))).wait().unwrap();
        let refused = disk.write(Arc::new(buffer(&vec![8; 5 << 20], true))).wait().unwrap_err();
        assert!(
            matches!(refused.kind, DriverErrorKind::OutOfDisk { asked_bytes, .. } if asked_bytes == 5 << 20)
        );
        assert!(refused.to_string().contains("limit of 64 MiB"), "{refused}");
        assert_eq!(disk.info().used_bytes, 60 << 20);
        assert!(kept.read(0, buffer(&vec![0; 60 << 20], true)).wait().unwrap().iter().all(|byte| *byte == 7));
        drop(kept);
        expect_used_bytes(&disk, 0);
    }
}

#[test]
fn a_truncated_file_is_an_error_and_not_zeros() {
    for disk in all_disks() {
        let there = disk.write(Arc::new(buffer(&vec![7; 3 << 20], true))).wait().unwrap();
        disk.shared.file.truncate_for_test(2 << 20);
        let torn = there.read(0, buffer(&vec![0; 3 << 20], true)).wait().unwrap_err();
        assert!(torn.op == Op::DiskRead && torn.to_string().contains("ends after"), "{torn}");
        let whole = there.read(0, buffer(&vec![0; 1 << 20], true)).wait().unwrap();
        assert!(whole.iter().all(|byte| *byte == 7));
    }
}

#[test]
fn space_goes_back_to_the_file_system() {
    for disk in all_disks() {
        let stored: Vec<_> = (0..4).map(|_| disk.write(Arc::new(buffer(&vec![7; 4 << 20], true)))).collect();
        let mut stored: Vec<_> = stored.into_iter().map(|written| written.wait().unwrap()).collect();
        assert!(disk.shared.file.allocated_bytes_for_test() >= 16 << 20);
        // The first and second leave holes, the last shortens the file.
        stored.drain(..2);
        stored.pop();
        expect_used_bytes(&disk, 4 << 20);
        assert!(disk.shared.file.allocated_bytes_for_test() <= 5 << 20);
    }
}

#[test]
fn a_write_of_no_bytes_leaves_its_neighbours_alone() {
    for disk in all_disks() {
        let before = disk.write(Arc::new(buffer(&[6; 4096], true))).wait().unwrap();
        let empty = disk.write(Arc::new(buffer(&[], true))).wait().unwrap();
        let behind = disk.write(Arc::new(buffer(&[7; 8192], true))).wait().unwrap();
        assert_eq!(empty.bytes(), 0);
        assert!(empty.read(0, buffer(&[], true)).wait().unwrap().is_empty());
        assert!(empty.read(0, buffer(&[0], true)).wait().is_err(), "it leaves the stored bytes");
        drop(empty);
        disk.shared.file.give_back_leaving();
        for (there, wanted) in [(&before, [6; 4096].to_vec()), (&behind, [7; 8192].to_vec())] {
            let read = there.read(0, buffer(&vec![0; wanted.len()], true)).wait().unwrap();
            assert!(*read == *wanted, "{:?}", disk.info());
        }
        drop((before, behind));
        expect_used_bytes(&disk, 0);
    }
}

#[test]
fn a_folder_that_cannot_be_used_is_named() {
    let refused = FileDisk::open(&DiskConfig::in_folder("/nonexistent/folder")).unwrap_err().to_string();
    assert!(refused.contains("open a disk") && refused.contains("/nonexistent/folder"), "{refused}");
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(FileDisk::open(&DiskConfig::in_folder(file.path())).is_err());
}

#[test]
fn what_is_on_a_disk_outlives_its_handle() {
    for disk in all_disks() {
        let there = disk.write(Arc::new(buffer(&[9; 5000], true))).wait().unwrap();
        let read = there.read(0, buffer(&[0; 5000], false));
        drop(disk);
        assert_eq!(*read.wait().unwrap(), [9; 5000]);
    }
}

#[test]
fn the_space_of_what_was_dropped_can_be_taken_at_once() {
    for disk in all_disks() {
        let bytes = Arc::new(buffer(&vec![7; 33 << 20], true));
        for nth in 0..20 {
            let there = disk.write(Arc::clone(&bytes)).wait();
            drop(there.unwrap_or_else(|refused| panic!("{refused}, after {nth}: {:?}", disk.info())));
        }
        expect_used_bytes(&disk, 0);
    }
}

/// A write that is not awaited must not reach what takes its place.
#[test]
fn a_transfer_keeps_its_space_to_its_end() {
    for disk in all_disks() {
        for nth in 0..8 {
            drop(disk.write(Arc::new(buffer(&vec![100; 16 << 20], true))));
            let there = disk.write(Arc::new(buffer(&vec![nth; 16 << 20], true))).wait().unwrap();
            let read = there.read(0, buffer(&vec![100; 16 << 20], true));
            drop(there);
            let next = disk.write(Arc::new(buffer(&vec![101; 16 << 20], true)));
            assert!(read.wait().unwrap().iter().all(|byte| *byte == nth), "{nth}: {:?}", disk.info());
            assert!(next.wait().is_ok());
        }
        expect_used_bytes(&disk, 0);
    }
}
