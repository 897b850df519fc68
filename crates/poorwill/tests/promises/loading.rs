//! Checkpoints in host memory: every byte of every type, on any file system, and nothing left of failed
//! loads. On the host device, the CUDA driver over the fake library, and a GPU.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use poorwill::Device;
use poorwill::chain;
use poorwill::checkpoint::{Checkpoint, CheckpointError};
use poorwill::offload::{
    BufferPin, DISABLE_PIN, HostCheckpoint, LoadError, LoadOptions, LoadProgress, ReadMethod, Switches, View,
};
use poorwill_bench::load::{self, PassKind};
use poorwill_bench::synthetic::SyntheticMoe;
use poorwill_driver::{CudaDevice, HostConfig, HostDevice, HostMemoryConfig};
use poorwill_testkit::device::{DeviceKind, cuda_config};
use poorwill_testkit::pattern;
use poorwill_testkit::watchdog::watched;

const MIB: u64 = 1 << 20;

// Devices

pub(crate) fn limited(limit_bytes: Option<u64>) -> Device {
    let host_memory = HostMemoryConfig::default().limited_to(limit_bytes);
    match DeviceKind::of_this_run() {
        DeviceKind::Host => {
            let config = HostConfig::with_capacity(64 * MIB).backing_up_in(host_memory);
            Device::from_host(Arc::new(HostDevice::open(&config).unwrap()))
        }
        DeviceKind::Fake | DeviceKind::Cuda(_) => {
            let config = cuda_config().backing_up_in(host_memory);
            Device::from_cuda(Arc::new(CudaDevice::open(&config).unwrap()))
        }
    }
}

fn open() -> Device {
    limited(None)
}

fn is_gpu() -> bool {
    DeviceKind::of_this_run() != DeviceKind::Host
}

fn held(device: &Device) -> (u64, u64) {
    let memory = device.driver().host_memory();
    (memory.used_bytes, memory.held_bytes)
}

// Files

/// Folders in memory, if the system has one, and mostly on a disk.
fn places() -> Vec<tempfile::TempDir> {
    let mut places =
        vec![tempfile::tempdir().unwrap(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()];
    places.extend(tempfile::tempdir_in("/dev/shm"));
    places
}

/// A tensor as it is to be written: its name, type, shape and size.
struct Spec {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    bytes: usize,
}

fn spec(name: impl Into<String>, dtype: &'static str, shape: &[u64], bits: u64) -> Spec {
    let bytes = usize::try_from(shape.iter().product::<u64>() * bits / 8).unwrap();
    Spec { name: name.into(), dtype, shape: shape.to_vec(), bytes }
}

/// A file of these tensors, whose bytes begin at an odd offset, and their contents.
fn write(path: &Path, specs: &[Spec], pad: usize) -> BTreeMap<String, Vec<u8>> {
    let (mut entries, mut payload, mut contents) = (Vec::new(), Vec::new(), BTreeMap::new());
    for Spec { name, dtype, shape, bytes } in specs {
        let begin = payload.len();
        let seed = name.bytes().fold(7u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let bytes = pattern::bytes(seed, *bytes);
        payload.extend_from_slice(&bytes);
        let end = payload.len();
        let name_json = serde_json::to_string(name).unwrap();
        entries.push(format!(
            r#"{name_json}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#
        ));
        contents.insert(name.clone(), bytes);
    }
    let header = format!("{{{}}}{}", entries.join(","), " ".repeat(pad));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&payload);
    fs::write(path, file).unwrap();
    contents
}

const DTYPES: [(&str, u64); 22] = [
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("C64", 64),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
];

/// Tensors of every type, odd sizes, an empty one, and one of several ranges.
fn all_kinds(prefix: &str) -> Vec<Spec> {
    let mut specs = vec![spec(format!("{prefix}large"), "U8", &[9 * MIB + 12_345], 8)];
    for (nth, (dtype, bits)) in (1u64..).zip(DTYPES) {
        specs.push(spec(format!("{prefix}{dtype}"), dtype, &[nth, 8, 37], bits));
        specs.push(spec(format!("{prefix}{dtype} scalar-like"), dtype, &[8], bits));
    }
    specs.push(spec(format!("{prefix}empty"), "F32", &[3, 0, 5], 32));
    specs.push(spec(format!("{prefix}byte"), "U8", &[], 8));
    specs.push(spec(format!("{prefix}last"), "BF16", &[700, 333], 16));
    specs
}

// Loads

fn checkpoint(path: &Path) -> Checkpoint {
    Checkpoint::open(&[path.to_owned()]).unwrap()
}

fn options(readers: usize) -> LoadOptions {
    LoadOptions::default().reading_with(NonZeroUsize::new(readers))
}

fn load(
    device: &Device,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
) -> Result<HostCheckpoint, LoadError> {
    HostCheckpoint::load(device, checkpoint, options, &mut |_| ControlFlow::Continue(()))
}

fn assert_same(loaded: &HostCheckpoint, contents: &BTreeMap<String, Vec<u8>>) {
    assert_eq!(loaded.tensors().len(), contents.len());
    for (name, bytes) in contents {
        let tensor = loaded.tensor(name).unwrap();
        assert!(*loaded.bytes_of(tensor) == bytes[..], "{name}");
        assert_eq!((tensor.bytes, tensor.location.is_some()), (bytes.len() as u64, !bytes.is_empty()));
    }
}

#[test]
fn every_byte_of_every_type_wherever_the_files_are() {
    for place in places() {
        // Payloads begin at odd bytes, at a device's alignment, and in between.
        for (pad, readers) in [(0, 1), (1, 2), (3, 16), (8, 5), (1500, 3)] {
            let path = place.path().join(format!("{pad}.safetensors"));
            let contents = write(&path, &all_kinds(""), pad);
            let (device, checkpoint) = (open(), checkpoint(&path));
            let loaded = load(&device, &checkpoint, &options(readers)).unwrap();
            assert_same(&loaded, &contents);
            let report = loaded.report();
            assert_eq!(report.readers, readers);
            assert_eq!((report.bytes, report.files[0].bytes), (checkpoint.bytes(), checkpoint.bytes()));
            let copied_bytes = report.direct_bytes + report.staged_bytes;
            assert_eq!(copied_bytes + report.buffered_bytes, report.bytes);
            // The file's report is true of its bytes.
            match report.files[0].how {
                ReadMethod::Direct => {
                    assert_eq!((copied_bytes, &report.files[0].because), (report.bytes, &None));
                }
                ReadMethod::Buffered => {
                    assert!(report.buffered_bytes > 0 && report.files[0].because.is_some());
                }
                how => panic!("{how:?}"),
            }
            let is_in_memory = place.path().starts_with("/dev/shm");
            assert!(!is_in_memory || report.files[0].how == ReadMethod::Buffered);
            assert_eq!(report.pinned, is_gpu());
        }
    }
}

#[test]
fn what_is_taken_is_what_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    write(&path, &all_kinds(""), 5);
    let (device, checkpoint) = (open(), checkpoint(&path));
    for pin in [BufferPin::Auto, BufferPin::Never] {
        let loaded = load(&device, &checkpoint, &options(4).pinning(pin)).unwrap();
        let report = loaded.report();
        assert_eq!(loaded.buffers().iter().map(|buffer| buffer.bytes()).sum::<u64>(), report.host_bytes);
        assert_eq!(report.buffers, loaded.buffers().len());
        let page = 1 << 16;
        let (used, held_bytes) = held(&device);
        assert_eq!(used, report.host_bytes);
        assert!(held_bytes <= used + page * report.buffers as u64, "{held_bytes} for {used}");
        // Alignment takes a thousandth or a page.
        assert!(report.host_bytes <= report.bytes + (report.bytes / 1000).max(4096));
        for tensor in loaded.tensors().iter().filter_map(|tensor| tensor.location) {
            assert!(tensor.offset.is_multiple_of(report.alignment_bytes.unwrap_or(1)));
        }
        drop(loaded);
        assert_eq!(held(&device).0, 0);
        device.driver().host_trim().unwrap();
        assert_eq!(held(&device), (0, 0));
    }
}

#[test]
fn shards_and_an_index() {
    for place in places() {
        let model = SyntheticMoe {
            layers: 2,
            experts: 8,
            hidden: 128,
            moe_intermediate: 96,
            vocab: 600,
            shards: 5,
            seed: 5,
        };
        model.write(place.path(), |_| {}).unwrap();
        // A tensor that the index takes from elsewhere, and one it does not name.
        let device = open();
        let checkpoint = checkpoint(place.path());
        let loaded = load(&device, &checkpoint, &LoadOptions::default()).unwrap();
        assert_eq!((loaded.report().files.len(), loaded.report().bytes), (5, model.total_bytes()));
        for (tensor, host) in checkpoint.tensors().iter().zip(loaded.tensors()) {
            let mut bytes = vec![0; usize::try_from(tensor.bytes).unwrap()];
            checkpoint.read_exact_at(tensor, 0, &mut bytes).unwrap();
            assert_eq!((&tensor.name, &tensor.shape, tensor.dtype), (&host.name, &host.shape, host.dtype));
            assert!(*loaded.bytes_of(host) == bytes[..], "{}", tensor.name);
        }
    }
}

#[test]
fn a_shard_that_the_index_takes_only_a_part_of() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let both = |which: &str, more: u64| {
        let sizes = [("a", 50_000), ("b", 70_000), (which, 300)];
        sizes.map(|(name, bytes)| spec(name, "U8", &[bytes + more], 8))
    };
    let first = write(&path("1.safetensors"), &both("c", 0), 0);
    let second = write(&path("2.safetensors"), &both("d", 777), 1);
    let index = serde_json::json!({"weight_map": {
        "a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors", "d": "2.safetensors"
    }});
    fs::write(path("model.safetensors.index.json"), index.to_string()).unwrap();
    let contents = [("a", &first), ("b", &second), ("c", &first), ("d", &second)];
    let contents = contents.map(|(name, file)| (name.to_owned(), file[name].clone()));
    let loaded = load(&open(), &checkpoint(folder.path()), &options(3)).unwrap();
    assert_same(&loaded, &contents.into_iter().collect());
}

#[test]
fn names_that_two_files_have_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = ["1", "2"].map(|name| folder.path().join(format!("{name}.safetensors"))).into();
    for path in &paths {
        write(path, &[spec("same", "U8", &[100], 8)], 0);
    }
    let device = open();
    let error = load(&device, &Checkpoint::open(&paths).unwrap(), &options(1)).unwrap_err();
    let LoadError::Checkpoint(CheckpointError::DuplicateTensor { first, second, .. }) = error else {
        panic!("{error:?}");
    };
    assert_eq!((vec![first, second], held(&device)), (paths, (0, 0)));
}

#[test]
fn nothing_to_load_takes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for specs in [vec![], vec![spec("empty", "F32", &[0, 7], 32)]] {
        let path = folder.path().join("x.safetensors");
        let contents = write(&path, &specs, 0);
        let device = open();
        let loaded = load(&device, &checkpoint(&path), &options(3)).unwrap();
        assert_same(&loaded, &contents);
        assert_eq!((loaded.buffers().len(), held(&device)), (0, (0, 0)));
        assert_eq!(loaded.report().files[0].how, ReadMethod::Unread);
    }
}

#[test]
fn a_limit_that_is_too_small_is_refused_before_anything_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let contents = write(&path, &all_kinds(""), 0);
    let checkpoint = checkpoint(&path);
    // A read would find the file empty.
    let emptied = folder.path().join("kept.safetensors");
    fs::copy(&path, &emptied).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(10).unwrap();
    let device = limited(Some(8 * MIB));
    for _ in 0..3 {
        let error = load(&device, &checkpoint, &options(3)).unwrap_err();
        assert!(matches!(error, LoadError::Memory { buffers: 1, .. }), "{error}");
        let words = chain(&error);
        for word in ["8 MiB", "held before", "raise the limit"] {
            assert!(words.contains(word), "{word}: {words}");
        }
        assert_eq!(held(&device), (0, 0));
    }
    let whole = self::checkpoint(&emptied);
    let needed = load(&open(), &whole, &options(3)).unwrap().report().host_bytes;
    let device = limited(Some(needed.next_multiple_of(1 << 16)));
    assert_same(&load(&device, &whole, &options(3)).unwrap(), &contents);
}

#[test]
fn a_file_that_was_truncated_is_an_error_that_names_it() {
    for place in places() {
        let path = place.path().join("x.safetensors");
        let specs = [spec("first", "U8", &[3 * MIB + 1], 8), spec("second", "U8", &[5 * MIB], 8)];
        for cut in [1, 4096, 2 * MIB, 5 * MIB, 6 * MIB] {
            write(&path, &specs, 0);
            let checkpoint = checkpoint(&path);
            let whole = checkpoint.files()[0].bytes;
            OpenOptions::new().write(true).open(&path).unwrap().set_len(whole - cut).unwrap();
            let device = open();
            let error = load(&device, &checkpoint, &options(3)).unwrap_err();
            let words = chain(&error);
            let LoadError::Checkpoint(CheckpointError::ShortRead { wanted_bytes, got_bytes, offset, .. }) =
                error
            else {
                panic!("{error:?}");
            };
            assert!(got_bytes < wanted_bytes && offset + wanted_bytes > whole - cut, "{words}");
            let tensor = if offset < checkpoint.tensors()[1].offset { "\"first\"" } else { "\"second\"" };
            assert!(words.contains("x.safetensors") && words.contains(tensor), "{words}");
            assert_eq!(held(&device), (0, 0));
        }
    }
}

#[test]
fn a_file_that_was_replaced_or_deleted_is_still_the_old_one() {
    for place in places() {
        let path = place.path().join("x.safetensors");
        let contents = write(&path, &all_kinds(""), 0);
        let checkpoint = checkpoint(&path);
        fs::remove_file(&path).unwrap();
        write(&path, &all_kinds("other "), 0);
        assert_same(&load(&open(), &checkpoint, &options(2)).unwrap(), &contents);
    }
}

#[test]
fn hostile_paths_are_paths_like_others() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("a \u{1b}[2J\n'\" ..").join("..").join("%s");
    fs::create_dir_all(folder.path().join("a \u{1b}[2J\n'\" ..")).unwrap();
    fs::create_dir_all(&below).unwrap();
    let real = below.join("x.safetensors");
    let contents = write(&real, &all_kinds("\u{202e}\n"), 0);
    let link = folder.path().join("link.safetensors");
    symlink(&real, &link).unwrap();
    for path in [&real, &link, &below] {
        assert_same(&load(&open(), &checkpoint(path), &options(2)).unwrap(), &contents);
    }
    let checkpoint = checkpoint(&real);
    OpenOptions::new().write(true).open(&real).unwrap().set_len(100_000).unwrap();
    let words = chain(&load(&open(), &checkpoint, &options(2)).unwrap_err());
    assert!(words.chars().all(|c| !c.is_control() && c != '\u{202e}'), "{words}");
}

#[test]
fn a_stopped_load_leaves_nothing_and_the_next_one_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let contents = write(&path, &all_kinds(""), 0);
    let (device, checkpoint) = (open(), checkpoint(&path));
    let mut asked = 0;
    let stopped = HostCheckpoint::load(&device, &checkpoint, &options(2), &mut |progress: LoadProgress| {
        asked += 1;
        assert_eq!(progress.bytes, checkpoint.bytes());
        ControlFlow::Break(())
    });
    let error = stopped.unwrap_err();
    assert!(matches!(error, LoadError::Stopped { .. }) && error.to_string().contains("stopped"), "{error}");
    assert!(asked >= 1);
    assert_eq!(held(&device), (0, 0));
    assert_same(&load(&device, &checkpoint, &options(2)).unwrap(), &contents);
}

#[test]
fn a_panicking_observer_leaves_no_thread_waiting() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let contents = write(&path, &all_kinds(""), 0);
        let (device, checkpoint) = (open(), checkpoint(&path));
        let watcher = &mut |_: LoadProgress| -> ControlFlow<()> { panic!("the observer has had enough") };
        let load = AssertUnwindSafe(|| HostCheckpoint::load(&device, &checkpoint, &options(2), watcher));
        let panicked = catch_unwind(load).unwrap_err();
        assert_eq!(panicked.downcast_ref::<&str>(), Some(&"the observer has had enough"));
        assert_eq!(held(&device).0, 0);
        assert_same(&self::load(&device, &checkpoint, &options(2)).unwrap(), &contents);
    });
}

#[test]
fn views_keep_their_buffers_and_the_last_gives_them_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let contents = write(&path, &all_kinds(""), 0);
    let device = open();
    let loaded = load(&device, &checkpoint(&path), &options(2)).unwrap();
    let view = View::of(&loaded.buffers()[0], Switches::default()).unwrap();
    assert_eq!(view.bytes(), loaded.report().host_bytes);
    let bytes = loaded.bytes_of(loaded.tensor("last").unwrap());
    // A tensor of another checkpoint has no bytes here.
    let other = folder.path().join("other.safetensors");
    write(&other, &[spec("last", "U8", &[5], 8)], 0);
    let other = load(&device, &checkpoint(&other), &options(1)).unwrap();
    assert!(loaded.bytes_of(&other.tensors()[0]).is_empty());
    drop((loaded, other));
    assert!(held(&device).0 > 0);
    drop(view);
    assert!(*bytes == contents["last"][..]);
    drop(bytes);
    assert_eq!(held(&device).0, 0);
}

#[test]
fn switches_win() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let contents = write(&path, &all_kinds(""), 0);
    let switches = Switches::default().without_pins(DISABLE_PIN[0]);
    for pin in [BufferPin::Auto, BufferPin::Always] {
        let options = options(2).pinning(pin).switching(switches);
        let loaded = load(&open(), &checkpoint(&path), &options).unwrap();
        assert_same(&loaded, &contents);
        let because = loaded.report().pageable_because.clone();
        assert_eq!((loaded.report().pinned, because), (false, Some(format!("{}=1 is set", DISABLE_PIN[0]))));
    }
}

#[test]
fn threads_load_side_by_side() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let contents = write(&path, &all_kinds(""), 0);
    let (device, checkpoint) = (open(), checkpoint(&path));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_same(&load(&device, &checkpoint, &options(3)).unwrap(), &contents));
        }
    });
    assert_eq!(held(&device).0, 0);
}

#[test]
fn measuring_takes_turns_and_verifies() {
    for place in places() {
        let path = place.path().join("x.safetensors");
        write(&path, &all_kinds(""), 3);
        let (device, checkpoint) = (open(), checkpoint(&path));
        let mut stages = Vec::new();
        let plan = load::LoadPlan { options: options(2), rounds: NonZeroU32::new(3).unwrap() };
        let report = load::run(&device, &checkpoint, &plan, &mut |stage| stages.push(stage)).unwrap();
        assert!(report.verified && report.mismatch.is_none());
        let kinds: Vec<PassKind> = report.passes.iter().map(|pass| pass.kind).collect();
        let loads = kinds.iter().filter(|kind| **kind == PassKind::Load).count();
        assert_eq!((loads, stages.len()), (3, 7));
        if report.load.files[0].how == ReadMethod::Direct {
            let (direct, load) = (PassKind::Direct, PassKind::Load);
            assert_eq!(kinds, [direct, load, load, direct, direct, load]);
            let readers: Vec<usize> = report.passes.iter().map(|pass| pass.readers).collect();
            assert_eq!(readers, [2, 2, 2, 4, 1, 2]);
            assert!(report.ratio.is_some());
        } else {
            assert_eq!((report.direct_gib_per_s, report.ratio), (None, None));
        }
        assert!(report.peak_resident_bytes.is_some() && report.peak_bytes.is_some());
        assert_eq!(held(&device).0, 0);
    }
}
