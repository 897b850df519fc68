//! Loads from failing storage into host memory and onto a device: any read, any failure, and nothing stays
//! allocated.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use poorwill_core::{Level, PoolConfig, SleepRequest, Tag, WakeRequest};
use poorwill_driver::{CudaDevice, HostConfig, HostDevice};
use poorwill_testkit::device::{DeviceKind, cuda_config};
use poorwill_testkit::pattern;
use poorwill_testkit::watchdog::watched;
use safetensors::tensor::TensorView;

use super::storage::Alignment;
use super::{Files, PageCache, Storage, run};
use crate::arena::Arena;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::model::{Model, ModelError};
use crate::offload::{HostCheckpoint, LoadError, LoadOptions};
use crate::open::Device;

const MIB: u64 = 1 << 20;

fn device() -> Device {
    match DeviceKind::of_this_run() {
        DeviceKind::Host => {
            Device::from_host(Arc::new(HostDevice::open(&HostConfig::with_capacity(64 * MIB)).unwrap()))
        }
        DeviceKind::Fake | DeviceKind::Cuda(_) => {
            Device::from_cuda(Arc::new(CudaDevice::open(&cuda_config()).unwrap()))
        }
    }
}

/// Odd sizes in two files, and their bytes by tensor.
fn checkpoint() -> (tempfile::TempDir, Checkpoint, HashMap<String, Vec<u8>>) {
    let (folder, mut contents) = (tempfile::tempdir().unwrap(), HashMap::new());
    let sizes = [("a", [700_001usize, 3, 0, 1_300_000]), ("b", [64, 900_000, 5000, 1])];
    for (seed, (file, sizes)) in (1u64..).zip(sizes) {
        let payloads = sizes
            .iter()
            .enumerate()
            .map(|(nth, bytes)| (format!("{file}.{nth}"), pattern::bytes(seed * 100 + nth as u64, *bytes)));
        let payloads: Vec<(String, Vec<u8>)> = payloads.collect();
        let views = payloads.iter().map(|(name, payload)| {
            (name.clone(), TensorView::new(safetensors::Dtype::U8, vec![payload.len()], payload).unwrap())
        });
        let path = folder.path().join(format!("{file}.safetensors"));
        fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
        contents.extend(payloads);
    }
    let checkpoint = Checkpoint::open(&[folder.path().to_owned()]).unwrap();
    (folder, checkpoint, contents)
}

/// The outcome of a read; `None` for the file's bytes.
type Verdict<'v> = dyn Fn(u64, bool, &mut [u8], u64) -> Option<io::Result<usize>> + Sync + 'v;

struct Scripted<'a> {
    checkpoint: &'a Checkpoint,
    direct: Option<Alignment>,
    is_cached: bool,
    reads: AtomicU64,
    verdict: &'a Verdict<'a>,
    given_up: Vec<AtomicBool>,
    dropped: Mutex<Vec<(usize, u64, u64)>>,
}

impl<'a> Scripted<'a> {
    fn new(checkpoint: &'a Checkpoint, direct: Option<Alignment>, verdict: &'a Verdict<'a>) -> Self {
        let given_up = checkpoint.files().iter().map(|_| AtomicBool::new(false)).collect();
        let (reads, dropped) = Default::default();
        Self { checkpoint, direct, is_cached: false, reads, verdict, given_up, dropped }
    }
}

impl Storage for Scripted<'_> {
    fn direct(&self, file: usize) -> Option<Alignment> {
        self.direct.filter(|_| !self.given_up[file].load(Ordering::Relaxed))
    }

    fn read(&self, file: usize, direct: bool, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        if direct {
            // A device refuses misalignment; this error code is one that is not retried.
            let Alignment { offset_bytes, memory_bytes } = self.direct.ok_or(io::ErrorKind::Other)?;
            let is_aligned = offset.is_multiple_of(offset_bytes)
                && (buf.len() as u64).is_multiple_of(offset_bytes)
                && (buf.as_ptr().addr() as u64).is_multiple_of(memory_bytes);
            if !is_aligned {
                return Err(io::Error::other("not as the device asks for"));
            }
        }
        let nth = self.reads.fetch_add(1, Ordering::Relaxed);
        if let Some(outcome) = (self.verdict)(nth, direct, buf, offset) {
            return outcome;
        }
        std::os::unix::fs::FileExt::read_at(self.checkpoint.files()[file].file(), buf, offset)
    }

    fn read_cached(&self, file: usize, buf: &mut [u8], offset: u64) -> bool {
        self.is_cached && self.read(file, false, buf, offset).is_ok_and(|bytes| bytes == buf.len())
    }

    fn disable_direct(&self, file: usize, _: String) {
        self.given_up[file].store(true, Ordering::Relaxed);
    }

    fn drop_cached(&self, file: usize, offset: u64, bytes: u64) {
        self.dropped.lock().unwrap().push((file, offset, bytes));
    }
}

/// None, NVMe, disks, and large sectors.
const ALIGNMENTS: [Option<Alignment>; 4] = [
    None,
    Some(Alignment { offset_bytes: 512, memory_bytes: 4 }),
    Some(Alignment { offset_bytes: 512, memory_bytes: 512 }),
    Some(Alignment { offset_bytes: 8192, memory_bytes: 8192 }),
];

fn load(device: &Device, storage: &Scripted<'_>, readers: usize) -> Result<HostCheckpoint, LoadError> {
    let options = LoadOptions::default().reading_with(NonZeroUsize::new(readers));
    let go_on = &mut |_| ControlFlow::Continue(());
    HostCheckpoint::load_from(device, storage.checkpoint, storage, &options, go_on)
}

fn assert_same(loaded: &HostCheckpoint, contents: &HashMap<String, Vec<u8>>) {
    assert_eq!(loaded.tensors().len(), contents.len());
    for tensor in loaded.tensors() {
        assert!(*loaded.bytes_of(tensor) == contents[&tensor.name][..], "{}", tensor.name);
    }
}

/// Reads the checkpoint again after a level 2 cycle, and compares.
fn load_on_device(device: &Device, checkpoint: &Checkpoint, storage: &dyn Storage) -> Result<(), ModelError> {
    let arena = Arena::over(device.driver(), PoolConfig::default()).unwrap();
    let mut model = Model::load(&arena, checkpoint, &Tag::weights(), &|_| {})?;
    arena.sleep(&SleepRequest::all(Level::Two)).unwrap();
    arena.wake(&WakeRequest::all()).unwrap();
    let read = model.read_in_from(storage, &|_| {});
    arena.mark_restored(&[Tag::weights()]).unwrap();
    let same = read.and_then(|()| model.verify(&|_| {}));
    model.free()?;
    drop(arena);
    device.driver().host_trim().unwrap();
    assert_nothing_held(device);
    same
}

fn assert_nothing_held(device: &Device) {
    let memory = device.driver().host_memory();
    assert_eq!((memory.used_bytes, memory.held_bytes), (0, 0));
}

#[test]
fn bytes_arrive_whatever_the_device_asks_for() {
    let (_folder, checkpoint, contents) = checkpoint();
    for direct in ALIGNMENTS {
        for readers in [1, 2, 7] {
            let device = device();
            let storage = Scripted::new(&checkpoint, direct, &|_, _, _, _| None);
            let loaded = load(&device, &storage, readers).unwrap();
            assert_same(&loaded, &contents);
            let report = loaded.report();
            let read = [report.direct_bytes, report.staged_bytes, report.buffered_bytes];
            assert_eq!(read.iter().sum::<u64>(), report.bytes);
            assert_eq!(read[2] == report.bytes, direct.is_none(), "{read:?}");
            let is_in_place = direct.is_some_and(|aligned| aligned.memory_bytes == 4);
            assert!(!is_in_place || read[0] > 0, "{read:?}");
            assert!(report.staging_bytes > 0 || direct.is_none());
            let dropped: u64 = storage.dropped.lock().unwrap().iter().map(|(_, _, bytes)| bytes).sum();
            assert!(direct.is_some() || dropped == report.bytes, "{dropped}");
        }
        let storage = Scripted::new(&checkpoint, direct, &|_, _, _, _| None);
        load_on_device(&device(), &checkpoint, &storage).unwrap();
    }
}

#[test]
fn a_device_takes_what_is_cached_from_there_and_a_host_that_holds_it_does_not() {
    let (_folder, checkpoint, contents) = checkpoint();
    let uncached = |nth: u64, direct: bool, _: &mut [u8], _: u64| {
        (!direct && nth.is_multiple_of(2)).then(|| Err(io::Error::from(io::ErrorKind::WouldBlock)))
    };
    let cached = |_: u64, direct: bool, _: &mut [u8], _: u64| direct.then(|| panic!("it is cached"));
    let verdicts: [&Verdict<'_>; 2] = [&cached, &uncached];
    for verdict in verdicts {
        let storage = Scripted { is_cached: true, ..Scripted::new(&checkpoint, ALIGNMENTS[2], verdict) };
        load_on_device(&device(), &checkpoint, &storage).unwrap();
    }
    for page_cache in [PageCache::Used, PageCache::Emptied] {
        let (files, tensor) = (Files::of(&checkpoint, page_cache), &checkpoint.tensors()[0]);
        let mut bytes = vec![0; contents[&tensor.name].len()];
        if files.read_cached(tensor.file, &mut bytes, tensor.offset) {
            assert!(page_cache == PageCache::Used && bytes == contents[&tensor.name]);
        }
        load_on_device(&device(), &checkpoint, &files).unwrap();
    }
}

#[test]
fn reads_may_be_short_and_interrupted() {
    let (_folder, checkpoint, contents) = checkpoint();
    for direct in ALIGNMENTS {
        for unit in [1000, 512, 4096] {
            let device = device();
            let verdict = |nth: u64, _: bool, _: &mut [u8], _: u64| {
                nth.is_multiple_of(2).then(|| Err(io::Error::from(io::ErrorKind::Interrupted)))
            };
            let short = Short { inner: Scripted::new(&checkpoint, direct, &verdict), most: unit };
            let options = LoadOptions::default().reading_with(NonZeroUsize::new(3));
            let go_on = &mut |_| ControlFlow::Continue(());
            let loaded = HostCheckpoint::load_from(&device, &checkpoint, &short, &options, go_on).unwrap();
            assert_same(&loaded, &contents);
        }
    }
}

struct Short<'a> {
    inner: Scripted<'a>,
    most: usize,
}

impl Storage for Short<'_> {
    fn direct(&self, file: usize) -> Option<Alignment> {
        self.inner.direct(file)
    }
    fn read(&self, file: usize, direct: bool, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let got = self.inner.read(file, direct, buf, offset)?;
        Ok(got.min(self.most))
    }
    fn read_cached(&self, file: usize, buf: &mut [u8], offset: u64) -> bool {
        self.inner.read_cached(file, buf, offset)
    }
    fn disable_direct(&self, file: usize, because: String) {
        self.inner.disable_direct(file, because);
    }
    fn drop_cached(&self, file: usize, offset: u64, bytes: u64) {
        self.inner.drop_cached(file, offset, bytes);
    }
}

#[test]
fn whichever_read_fails_the_error_names_it_and_nothing_stays() {
    let (_folder, checkpoint, contents) = checkpoint();
    for direct in ALIGNMENTS {
        let device = device();
        let counted = Scripted::new(&checkpoint, direct, &|_, _, _, _| None);
        drop(load(&device, &counted, 1).unwrap());
        device.driver().host_trim().unwrap();
        let mut failed_on_device = 0;
        for nth in 0..counted.reads.load(Ordering::Relaxed) {
            let failing = |this: u64, _: bool, _: &mut [u8], _: u64| {
                (this == nth).then(|| Err(io::Error::from_raw_os_error(5)))
            };
            for readers in [1, 4] {
                let error =
                    load(&device, &Scripted::new(&checkpoint, direct, &failing), readers).unwrap_err();
                let LoadError::Checkpoint(CheckpointError::Read {
                    path, tensor, offset, wanted_bytes, ..
                }) = &error
                else {
                    panic!("{error:?}");
                };
                let found = checkpoint.tensors().iter().find(|found| found.name == *tensor).unwrap();
                assert_eq!(*path, checkpoint.files()[found.file].path);
                assert!(*offset >= found.offset && offset + wanted_bytes <= found.offset + found.bytes);
                assert!(*wanted_bytes > 0);
                assert_nothing_held(&device);
            }
            let error = load_on_device(&device, &checkpoint, &Scripted::new(&checkpoint, direct, &failing));
            assert!(
                matches!(error, Ok(_) | Err(ModelError::Checkpoint(CheckpointError::Read { .. }))),
                "{error:?}"
            );
            failed_on_device += u64::from(error.is_err());
        }
        assert!(failed_on_device > 0);
        assert_same(&load(&device, &counted, 2).unwrap(), &contents);
    }
}

#[test]
fn a_file_that_refuses_direct_reads_is_read_all_the_same() {
    let (_folder, checkpoint, contents) = checkpoint();
    for errno in [22, 95] {
        for refused_from in [0, 1, 4] {
            let device = device();
            let refusing = |nth: u64, direct: bool, _: &mut [u8], _: u64| {
                (direct && nth >= refused_from).then(|| Err(io::Error::from_raw_os_error(errno)))
            };
            let storage = Scripted::new(&checkpoint, ALIGNMENTS[2], &refusing);
            let loaded = load(&device, &storage, 2).unwrap();
            assert_same(&loaded, &contents);
            let report = loaded.report();
            assert!(report.buffered_bytes > 0 && report.direct_bytes == 0);
        }
    }
}

#[test]
fn a_file_that_ends_early_is_an_error_wherever_it_does() {
    let (_folder, checkpoint, _) = checkpoint();
    let last = checkpoint.files()[1].bytes;
    for direct in ALIGNMENTS {
        let device = device();
        for end in [0, 100, 4096, 300_000, last - 1] {
            let ending = |_: u64, _: bool, buf: &mut [u8], offset: u64| {
                let left = end.saturating_sub(offset);
                (offset + buf.len() as u64 > end).then(|| Ok(usize::try_from(left).unwrap()))
            };
            let error = load(&device, &Scripted::new(&checkpoint, direct, &ending), 3).unwrap_err();
            let LoadError::Checkpoint(CheckpointError::ShortRead { wanted_bytes, got_bytes, .. }) = &error
            else {
                panic!("{error:?}");
            };
            assert!(got_bytes < wanted_bytes, "{error}");
            assert_nothing_held(&device);
            let error = load_on_device(&device, &checkpoint, &Scripted::new(&checkpoint, direct, &ending))
                .unwrap_err();
            let ModelError::Checkpoint(CheckpointError::ShortRead { wanted_bytes, got_bytes, .. }) = &error
            else {
                panic!("{error:?}");
            };
            assert!(got_bytes < wanted_bytes, "{error}");
        }
    }
}

#[test]
fn whenever_it_is_stopped_nothing_stays() {
    let (_folder, checkpoint, _) = checkpoint();
    for stopped_at in [0, 1, 2] {
        let device = device();
        let asked = AtomicU64::new(0);
        let slow = |nth: u64, _: bool, _: &mut [u8], _: u64| {
            while asked.load(Ordering::Relaxed) <= nth {
                thread::sleep(std::time::Duration::from_millis(1));
            }
            None
        };
        let storage = Scripted::new(&checkpoint, None, &slow);
        let options = LoadOptions::default().reading_with(NonZeroUsize::new(1));
        let stopped = HostCheckpoint::load_from(&device, &checkpoint, &storage, &options, &mut |progress| {
            assert!(progress.read_bytes <= progress.bytes && progress.bytes == checkpoint.bytes());
            let goes_on = asked.fetch_add(1, Ordering::Relaxed) < stopped_at;
            if goes_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        let error = stopped.unwrap_err();
        assert!(matches!(error, LoadError::Stopped { read_bytes, bytes } if read_bytes < bytes), "{error}");
        assert!(storage.reads.load(Ordering::Relaxed) <= 8, "it does not go on");
        assert_nothing_held(&device);
    }
}

#[test]
fn a_panicking_reader_ends_the_load_and_no_thread_waits() {
    watched(|| {
        let read = |task: u64, _: &mut ()| -> Result<u64, LoadError> {
            assert!(task < 5, "this one cannot be read");
            Ok(task)
        };
        let batches = [Ok((0..100).collect()), Ok((100..200).collect())];
        let go_on = &mut |_| ControlFlow::Continue(());
        let reading = AssertUnwindSafe(|| run(&mut vec![(); 3], batches, read, go_on));
        assert!(catch_unwind(reading).is_err());
    });
}
