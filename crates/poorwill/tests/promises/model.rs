//! A model in an arena: loaded, asleep, awake, compared with its files, and refused.
//!
//! No failure leaves a block, a mapped byte, a host buffer or a stream. The next attempt on the same arena
//! succeeds.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use super::loading::limited;
use poorwill::checkpoint::{Checkpoint, CheckpointError, Tensor};
use poorwill::model::{Model, ModelError};
use poorwill::{
    AllocRequest, Arena, CopyPart, DeviceRange, Driver, DriverErrorKind, HostBuffer, Level, Op, PoolConfig,
    PoolError, SleepRequest, StreamId, Tag, WakeRequest, chain,
};
use poorwill_bench::synthetic::SyntheticMoe;
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use safetensors::tensor::TensorView;

const MIB: u64 = 1 << 20;

/// What [`Model`] copies at a time; some tensors are larger.
const PIECE_BYTES: usize = 4 << 20;

// Checkpoints

/// An open checkpoint and the folder that it lies in.
struct Files {
    folder: tempfile::TempDir,
    checkpoint: Checkpoint,
}

impl Files {
    /// A mixture of experts in three shards, a few hundred tensors.
    fn moe() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = SyntheticMoe {
            layers: 2,
            experts: 16,
            hidden: 128,
            moe_intermediate: 96,
            vocab: 600,
            shards: 3,
            seed: 5,
        };
        model.write(folder.path(), |_| {}).unwrap();
        let checkpoint = Checkpoint::open(&[folder.path().to_owned()]).unwrap();
        Self { folder, checkpoint }
    }

    /// One file of byte tensors with these shapes, each holding a pattern of its own.
    fn of(shapes: &[(&str, &[usize])]) -> Self {
        let payloads: Vec<Vec<u8>> = (1..)
            .zip(shapes)
            .map(|(seed, (_, shape))| pattern::bytes(seed, shape.iter().product()))
            .collect();
        let views = shapes.iter().zip(&payloads).map(|((name, shape), payload)| {
            (*name, TensorView::new(safetensors::Dtype::U8, shape.to_vec(), payload).unwrap())
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        let checkpoint = Checkpoint::open(&[path]).unwrap();
        Self { folder, checkpoint }
    }

    /// A small tensor, one of three ranges, and another small one.
    fn several_pieces() -> Self {
        Self::of(&[("first", &[1000]), ("large", &[2 * PIECE_BYTES + 4567]), ("last", &[3, 5])])
    }

    fn tensor(&self, name: &str) -> &Tensor {
        self.checkpoint.tensors().iter().find(|tensor| tensor.name == name).unwrap()
    }

    fn path_of(&self, tensor: &Tensor) -> PathBuf {
        self.checkpoint.files()[tensor.file].path.clone()
    }

    /// Changes one byte of a tensor in its file.
    fn flip(&self, tensor: &Tensor, offset: u64) {
        let file = OpenOptions::new().read(true).write(true).open(self.path_of(tensor)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, tensor.offset + offset).unwrap();
        file.write_all_at(&[!byte[0]], tensor.offset + offset).unwrap();
    }

    /// Cuts the file of a tensor `offset` bytes after the tensor's begin.
    fn truncate_in(&self, tensor: &Tensor, offset: u64) {
        let file = OpenOptions::new().write(true).open(self.path_of(tensor)).unwrap();
        file.set_len(tensor.offset + offset).unwrap();
    }
}

// Arenas

/// An arena over a small device with figures of its own.
struct Host {
    device: TestDevice,
    arena: Arena,
}

impl Host {
    fn new() -> Self {
        Self::limited(None)
    }

    fn limited(limit_bytes: Option<u64>) -> Self {
        let device = TestDevice::with_capacity(64 * MIB);
        let arena = arena_over(device.driver(), limit_bytes);
        Self { device, arena }
    }

    fn load<'a>(&'a self, files: &'a Files) -> Result<Model<'a>, ModelError> {
        Model::load(&self.arena, &files.checkpoint, &Tag::weights(), &|_| {})
    }

    /// No block is live, and after a trim neither pool nor device holds memory.
    fn assert_empty(&self) {
        assert_eq!(self.arena.stats().unwrap().live_blocks, 0);
        self.arena.trim().unwrap();
        let stats = self.arena.stats().unwrap();
        let held = [stats.live_bytes, stats.mapped_bytes, stats.deferred_release_bytes, stats.reserved_bytes];
        assert_eq!((held, stats.backup_bytes, stats.segments), ([0; 4], 0, 0));
        assert_eq!(self.device.memory_info().unwrap().process.unwrap().used_bytes, 0);
        assert_eq!(self.device.resident_bytes(), 0);
        self.device.expect_no_host_bytes("no host memory is left behind");
    }

    /// Changes one byte on the device without the pool's knowledge, in the only block of `block_bytes`.
    fn flip(&self, block_bytes: u64, offset: u64) {
        let snapshot = self.arena.snapshot().unwrap();
        let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        let found: Vec<_> = blocks.filter(|block| block.requested_bytes == Some(block_bytes)).collect();
        let [block] = found[..] else { panic!("{} blocks of {block_bytes} bytes", found.len()) };
        let parts = [CopyPart { device: DeviceRange::new(block.addr + offset, 1), host_offset: 0 }];
        let there = HostBuffer::from(vec![0]);
        let there = self.device.copy_to_host(StreamId::DEFAULT, there, &parts).unwrap().wait().unwrap();
        let other = Arc::new(HostBuffer::from(vec![!there[0]]));
        self.device.copy_to_device(StreamId::DEFAULT, other, &parts).unwrap().wait().unwrap();
    }
}

fn arena_over(driver: Arc<dyn Driver>, limit_bytes: Option<u64>) -> Arena {
    Arena::over(driver, PoolConfig::default().limited_to(limit_bytes)).unwrap()
}

fn verify(model: &Model<'_>) -> Result<(), ModelError> {
    model.verify(&|_| {})
}

/// One reader per available buffer; without a buffer, an error that leaves nothing allocated.
#[test]
fn little_host_memory_is_enough() {
    let files = Files::of(&[("a", &[3 << 20]), ("b", &[9 << 20]), ("c", &[7 << 20]), ("d", &[100])]);
    // A comparison takes two buffers of somewhat more than 4 MiB for each reader.
    for (limit, (loads, verifies)) in
        [(3, (false, false)), (5, (true, false)), (9, (true, true)), (23, (true, true))]
    {
        let arena = arena_over(limited(Some(limit * MIB)).driver(), None);
        let loaded = Model::load(&arena, &files.checkpoint, &Tag::weights(), &|_| {});
        assert_eq!(loaded.is_ok(), loads, "{limit} MiB");
        if let Ok(mut model) = loaded {
            assert_eq!(verify(&model).is_ok(), verifies, "{limit} MiB");
            model.free().unwrap();
        }
        arena.trim().unwrap();
        assert_eq!(arena.stats().unwrap().live_blocks, 0);
    }
}

/// The tensor and offset at which device and file differ, with the path and size that belong to it.
fn mismatch(files: &Files, model: &Model<'_>) -> (String, u64) {
    let error = verify(model).unwrap_err();
    let shown = chain(&error);
    match error {
        ModelError::Mismatch { path, tensor, offset, bytes } => {
            let held = files.tensor(&tensor);
            assert_eq!((&path, bytes), (&files.path_of(held), held.bytes));
            assert!(shown.contains(&format!("\"{tensor}\"")), "{shown}");
            assert!(shown.contains(&path.display().to_string()), "{shown}");
            assert!(shown.contains(&format!("byte {offset} of {bytes}")), "{shown}");
            (tensor, offset)
        }
        other => panic!("{other:?}"),
    }
}

// Loading

#[test]
fn a_model_is_loaded_and_freed() {
    let (files, host) = (Files::moe(), Host::new());
    let mut model = host.load(&files).unwrap();
    verify(&model).unwrap();
    let stats = host.arena.stats().unwrap();
    assert_eq!(stats.live_blocks, files.checkpoint.tensors().len());
    assert!(stats.live_bytes >= files.checkpoint.bytes() && stats.mapped_bytes >= stats.live_bytes);
    model.free().unwrap();
    model.free().unwrap();
    verify(&model).unwrap(); // Nothing is there to differ.
    host.assert_empty();
}

#[test]
fn the_streams_of_a_load_are_forgotten() {
    let (files, host) = (Files::several_pieces(), Host::new());
    for _ in 0..host.device.kind().cases(30) {
        let mut model = host.load(&files).unwrap();
        model.free().unwrap();
        host.assert_empty();
        let remembered = host.arena.pool().remembered().unwrap();
        assert!(remembered.stream_lists <= 2 && remembered.clocks <= 2, "{remembered:?}");
    }
}

#[test]
fn progress_adds_up_to_the_checkpoint() {
    let host = Host::new();
    for files in [Files::moe(), Files::several_pieces(), Files::of(&[("nothing", &[0])])] {
        let sum = AtomicU64::new(0);
        let add = |bytes| {
            sum.fetch_add(bytes, Ordering::Relaxed);
        };
        let total = |step: &str| {
            assert_eq!(sum.swap(0, Ordering::Relaxed), files.checkpoint.bytes(), "{step}");
        };
        let mut model = Model::load(&host.arena, &files.checkpoint, &Tag::weights(), &add).unwrap();
        total("load");
        model.verify(&add).unwrap();
        total("verify");
        model.read_in(&add).unwrap();
        total("read in");
        model.free().unwrap();
    }
}

#[test]
fn tensors_without_bytes_and_scalars() {
    let files = Files::of(&[("scalar", &[]), ("none", &[0]), ("no rows", &[0, 7]), ("one", &[1, 1, 1])]);
    let host = Host::new();
    let mut model = host.load(&files).unwrap();
    verify(&model).unwrap();
    assert_eq!(host.arena.stats().unwrap().live_blocks, 2);
    sleep_and_wake(&host, Level::One);
    verify(&model).unwrap();
    files.flip(files.tensor("scalar"), 0);
    assert_eq!(mismatch(&files, &model), ("scalar".to_owned(), 0));
    model.read_in(&|_| {}).unwrap();
    verify(&model).unwrap();
    model.free().unwrap();
    host.assert_empty();
}

#[test]
fn a_checkpoint_without_tensors_is_a_model() {
    let (files, host) = (Files::of(&[]), Host::new());
    let model = host.load(&files).unwrap();
    assert!(sleep_and_wake(&host, Level::Two).is_empty());
    verify(&model).unwrap();
    host.assert_empty();
}

#[test]
fn models_share_an_arena() {
    let (first, second, host) = (Files::moe(), Files::several_pieces(), Host::new());
    let lora = Tag::new("lora").unwrap();
    let mut model = host.load(&first).unwrap();
    let mut again = host.load(&first).unwrap();
    let mut other = Model::load(&host.arena, &second.checkpoint, &lora, &|_| {}).unwrap();
    assert_eq!(sleep_and_wake(&host, Level::Two), [Tag::weights()]);
    verify(&other).unwrap();
    model.read_in(&|_| {}).unwrap();
    again.read_in(&|_| {}).unwrap();
    host.arena.mark_restored(&[Tag::weights()]).unwrap();
    for each in [&mut again, &mut other, &mut model] {
        verify(each).unwrap();
        each.free().unwrap();
    }
    host.assert_empty();
}

#[test]
fn a_dropped_model_stays_until_the_arena_closes() {
    let (files, host) = (Files::moe(), Host::new());
    let model = host.load(&files).unwrap();
    let live_blocks = host.arena.stats().unwrap().live_blocks;
    drop(model);
    assert_eq!(host.arena.stats().unwrap().live_blocks, live_blocks);
    host.arena.close().unwrap();
    assert_eq!(host.device.memory_info().unwrap().process.unwrap().used_bytes, 0);
    assert_eq!(host.device.host_bytes(), 0);
}

#[test]
fn a_closed_arena_names_the_tensor_it_refuses() {
    let (files, host) = (Files::several_pieces(), Host::new());
    let mut model = host.load(&files).unwrap();
    host.arena.close().unwrap();
    let closed = |error: ModelError| match error {
        ModelError::Pool { tensor, source } => {
            assert!(matches!(*source, PoolError::Closed) && files.tensor(&tensor).bytes > 0);
        }
        other => panic!("{other:?}"),
    };
    closed(verify(&model).unwrap_err());
    closed(model.read_in(&|_| {}).unwrap_err());
    closed(model.free().unwrap_err());
    let refused = host.load(&files).unwrap_err();
    assert!(matches!(refused, ModelError::Alloc { source, .. } if matches!(*source, PoolError::Closed)));
}

// Sleep and wake

/// Sleeps and wakes everything; the tags that are undefined now.
fn sleep_and_wake(host: &Host, level: Level) -> Vec<Tag> {
    let sleep = host.arena.sleep(&SleepRequest::all(level)).unwrap();
    assert_eq!(sleep.released_bytes, sleep.planned_release_bytes);
    assert_eq!(host.device.memory_info().unwrap().process.unwrap().used_bytes, 0);
    host.arena.wake(&WakeRequest::all()).unwrap().undefined_tags
}

#[test]
fn a_level_1_cycle_brings_every_byte_back() {
    let host = Host::new();
    for files in [Files::moe(), Files::several_pieces()] {
        let mut model = host.load(&files).unwrap();
        let before = host.arena.snapshot().unwrap();
        for _ in 0..3 {
            assert!(sleep_and_wake(&host, Level::One).is_empty());
            verify(&model).unwrap();
            assert_eq!(host.arena.snapshot().unwrap(), before);
        }
        // Later sleeps copy nothing, because nothing has changed.
        let sleep = host.arena.sleep(&SleepRequest::all(Level::One)).unwrap();
        assert!(sleep.copied_bytes == 0 && sleep.unchanged_bytes >= files.checkpoint.bytes());
        model.free().unwrap(); // Asleep.
        host.arena.wake(&WakeRequest::all()).unwrap();
        host.assert_empty();
    }
}

#[test]
fn after_a_level_2_cycle_the_files_are_read_again() {
    let (files, host) = (Files::several_pieces(), Host::new());
    let mut model = host.load(&files).unwrap();
    let before = host.arena.snapshot().unwrap();
    for _ in 0..2 {
        assert_eq!(sleep_and_wake(&host, Level::Two), [Tag::weights()]);
        let undefined = |error| match error {
            ModelError::Pool { source, .. } => assert!(matches!(*source, PoolError::Undefined { .. })),
            other => panic!("{other:?}"),
        };
        undefined(verify(&model).unwrap_err());
        model.read_in(&|_| {}).unwrap();
        undefined(verify(&model).unwrap_err());
        assert_eq!(host.arena.mark_restored(&[Tag::weights()]).unwrap(), [Tag::weights()]);
        verify(&model).unwrap();
        assert_eq!(host.arena.snapshot().unwrap(), before);
    }
    model.free().unwrap();
    host.assert_empty();
}

#[test]
fn restoring_what_was_not_read_in_is_found() {
    let (files, host) = (Files::several_pieces(), Host::new());
    let model = host.load(&files).unwrap();
    sleep_and_wake(&host, Level::Two);
    host.arena.mark_restored(&[Tag::weights()]).unwrap();
    assert!(matches!(verify(&model), Err(ModelError::Mismatch { .. })));
}

#[test]
fn a_sleeping_model_cannot_be_read_or_compared() {
    let (files, host) = (Files::several_pieces(), Host::new());
    let mut model = host.load(&files).unwrap();
    for level in [Level::One, Level::Two] {
        host.arena.sleep(&SleepRequest::all(level)).unwrap();
        for error in [verify(&model).unwrap_err(), model.read_in(&|_| {}).unwrap_err()] {
            let shown = chain(&error);
            assert!(shown.contains("tensor \"") && shown.contains("wake it first"), "{shown}");
            assert!(
                matches!(error, ModelError::Pool { source, .. } if matches!(*source, PoolError::Asleep { .. }))
            );
        }
        host.arena.wake(&WakeRequest::all()).unwrap();
    }
    model.free().unwrap();
    host.assert_empty();
}

#[test]
fn nothing_is_loaded_into_a_sleeping_tag() {
    let (files, host) = (Files::several_pieces(), Host::new());
    let block = host.arena.alloc(&AllocRequest::new(100, Tag::weights())).unwrap();
    host.arena.sleep(&SleepRequest::all(Level::One)).unwrap();
    let refused = host.load(&files).unwrap_err();
    assert!(
        matches!(refused, ModelError::Alloc { source, .. } if matches!(*source, PoolError::Asleep { .. }))
    );
    assert_eq!(host.arena.stats().unwrap().live_blocks, 1);
    host.arena.wake(&WakeRequest::all()).unwrap();
    verify(&host.load(&files).unwrap()).unwrap();
    host.arena.free(block.id).unwrap();
}

// What differs is found

#[test]
fn a_file_that_changes_after_loading_is_found() {
    let (files, host) = (Files::several_pieces(), Host::new());
    let model = host.load(&files).unwrap();
    let large = files.tensor("large");
    let piece = PIECE_BYTES as u64;
    for offset in [0, 77, piece - 1, piece, 2 * piece + 1, large.bytes - 1] {
        files.flip(large, offset);
        assert_eq!(mismatch(&files, &model), ("large".to_owned(), offset));
        files.flip(large, offset);
        verify(&model).unwrap();
    }
    for (name, offset) in [("first", 999), ("last", 14)] {
        files.flip(files.tensor(name), offset);
        assert_eq!(mismatch(&files, &model), (name.to_owned(), offset));
        files.flip(files.tensor(name), offset);
    }
}

#[test]
fn device_bytes_that_change_behind_the_model_are_found() {
    let (files, host) = (Files::several_pieces(), Host::new());
    let model = host.load(&files).unwrap();
    for (name, offset) in [("first", 0), ("large", PIECE_BYTES as u64), ("last", 14), ("large", 5)] {
        let bytes = files.tensor(name).bytes;
        host.flip(bytes, offset);
        assert_eq!(mismatch(&files, &model), (name.to_owned(), offset));
        // A sleep keeps what is on the device, right or wrong.
        sleep_and_wake(&host, Level::One);
        assert_eq!(mismatch(&files, &model), (name.to_owned(), offset));
        host.flip(bytes, offset);
        verify(&model).unwrap();
    }
}

#[test]
fn a_file_replaced_after_loading_is_still_the_old_one() {
    let (files, host) = (Files::several_pieces(), Host::new());
    let model = host.load(&files).unwrap();
    for entry in fs::read_dir(files.folder.path()).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    sleep_and_wake(&host, Level::Two);
    model.read_in(&|_| {}).unwrap();
    host.arena.mark_restored(&[Tag::weights()]).unwrap();
    verify(&model).unwrap();
}

// Refusals

#[test]
fn a_limit_below_one_tensor_names_it() {
    let files = Files::several_pieces();
    let large = files.tensor("large");
    let host = Host::limited(Some(4 * MIB));
    let error = host.load(&files).unwrap_err();
    let shown = chain(&error);
    for part in
        ["model.safetensors", "\"large\"", &large.bytes.to_string(), "limit of 4 MiB", "raise the limit"]
    {
        assert!(shown.contains(part), "{part} is not in: {shown}");
    }
    match error {
        ModelError::Alloc { path, tensor, bytes, source } => {
            assert_eq!((path, tensor.as_str(), bytes), (files.path_of(large), "large", large.bytes));
            assert!(matches!(*source, PoolError::OverLimit { usage, .. } if usage.limit_bytes == 4 * MIB));
        }
        other => panic!("{other:?}"),
    }
    host.assert_empty();
}

#[test]
fn a_model_that_does_not_fit_is_refused_before_a_byte_is_read() {
    let files = Files::several_pieces();
    for tensor in files.checkpoint.tensors() {
        File::create(files.path_of(tensor)).unwrap();
    }
    let host = Host::limited(Some(4 * MIB));
    let refused = Model::load(&host.arena, &files.checkpoint, &Tag::weights(), &|_| panic!("read"));
    assert!(matches!(refused, Err(ModelError::Alloc { .. })));
    host.assert_empty();
}

#[test]
fn a_device_that_another_arena_fills_is_full() {
    let (files, host) = (Files::several_pieces(), Host::new());
    let neighbour = arena_over(host.device.driver(), None);
    let taken = neighbour.alloc(&AllocRequest::new(60 * MIB, Tag::runtime())).unwrap();
    let error = host.load(&files).unwrap_err();
    let shown = chain(&error);
    assert!(shown.contains("\"large\"") && shown.contains("60 MiB are held by others"), "{shown}");
    match error {
        ModelError::Alloc { source, .. } => assert!(matches!(*source, PoolError::DeviceFull { .. })),
        other => panic!("{other:?}"),
    }
    neighbour.free(taken.id).unwrap();
    neighbour.trim().unwrap();
    host.assert_empty();
    verify(&host.load(&files).unwrap()).unwrap();
}

#[test]
fn a_file_truncated_after_opening_is_an_error() {
    for name in ["first", "large", "last"] {
        let (files, host) = (Files::several_pieces(), Host::new());
        let tensor = files.tensor(name);
        files.truncate_in(tensor, tensor.bytes - 1);
        let error = host.load(&files).unwrap_err();
        let shown = chain(&error);
        assert!(shown.contains("model.safetensors") && shown.contains("truncated"), "{shown}");
        match error {
            ModelError::Checkpoint(CheckpointError::ShortRead {
                path,
                tensor,
                wanted_bytes,
                got_bytes,
                ..
            }) => {
                assert_eq!(path, files.path_of(files.tensor(&tensor)));
                assert!(got_bytes < wanted_bytes);
            }
            other => panic!("{other:?}"),
        }
        host.assert_empty();
    }
}

#[test]
fn a_file_truncated_during_a_level_2_sleep_leaves_the_blocks() {
    let (files, host) = (Files::several_pieces(), Host::new());
    let mut model = host.load(&files).unwrap();
    let path = files.path_of(files.tensor("large"));
    let whole = fs::read(&path).unwrap();
    sleep_and_wake(&host, Level::Two);
    files.truncate_in(files.tensor("large"), 10);
    let short = |error: ModelError| match error {
        ModelError::Checkpoint(CheckpointError::ShortRead { .. }) => {}
        other => panic!("{other:?}"),
    };
    short(model.read_in(&|_| {}).unwrap_err());
    assert_eq!(host.arena.stats().unwrap().live_blocks, 3);
    // The same file, whole again.
    OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&whole, 0).unwrap();
    model.read_in(&|_| {}).unwrap();
    host.arena.mark_restored(&[Tag::weights()]).unwrap();
    verify(&model).unwrap();
    files.truncate_in(files.tensor("large"), 10);
    short(verify(&model).unwrap_err());
    model.free().unwrap();
    host.assert_empty();
}

#[test]
fn hostile_tensor_names_stay_off_the_terminal() {
    let long = "x".repeat(1 << 20);
    let host = Host::limited(Some(2 * MIB));
    for name in ["\u{1b}]0;owned\u{7}\u{1b}[2J\r\u{202e}", long.as_str()] {
        let files = Files::of(&[(name, &[3 << 20])]);
        let error = host.load(&files).unwrap_err();
        assert!(matches!(&error, ModelError::Alloc { tensor, .. } if tensor == name));
        let shown = chain(&error);
        assert!(shown.chars().all(|c| !c.is_control() && c != '\u{202e}'), "{shown:?}");
        assert!(shown.len() < 1000, "{shown}");
    }
}

// A device that fails

/// The counters of a faulty driver.
#[derive(Default)]
struct Faults {
    /// The next call to fail, counted down by every call; off where negative.
    countdown: AtomicI64,
    /// How many calls in a row fail.
    burst: i64,
    /// Streams created and not destroyed, of which the pool keeps some.
    streams: AtomicI64,
    /// Streams that failed to be created; the other readers do the work.
    refused: AtomicI64,
    /// Streams that failed to be destroyed.
    stranded: AtomicI64,
}

impl Faults {
    fn fails(&self, op: Op) -> bool {
        let turn = self.countdown.fetch_sub(1, Ordering::Relaxed);
        let fails = (1 - self.burst..=0).contains(&turn);
        match op {
            Op::StreamCreate if !fails => self.streams.fetch_add(1, Ordering::Relaxed),
            Op::StreamCreate => self.refused.fetch_add(1, Ordering::Relaxed),
            Op::StreamDestroy if !fails => self.streams.fetch_sub(1, Ordering::Relaxed),
            // As many readers work as have their resources.
            Op::HostAlloc if fails => self.refused.fetch_add(1, Ordering::Relaxed),
            Op::StreamDestroy => self.stranded.fetch_add(1, Ordering::Relaxed),
            _ => 0,
        };
        fails
    }

    fn rest(&self) {
        self.countdown.store(i64::MIN / 2, Ordering::Relaxed);
    }
}

/// A host whose device fails the calls `first .. first + burst` after [`Faults::countdown`] is set.
fn faulty(burst: i64) -> (Host, Arc<Faults>) {
    let faults = Arc::new(Faults { burst, ..Faults::default() });
    faults.rest();
    let device = TestDevice::with_capacity(64 * MIB);
    let script = Arc::clone(&faults);
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        if script.fails(call.op) { Verdict::device_failure(call) } else { Verdict::Pass }
    });
    let arena = arena_over(Arc::new(driver), None);
    (Host { device, arena }, faults)
}

#[test]
fn whichever_driver_call_fails_nothing_is_left_and_a_retry_succeeds() {
    let files = Files::of(&[("a", &[PIECE_BYTES + 1]), ("b", &[700]), ("c", &[0]), ("d", &[3000])]);
    for burst in [1, 2, 4] {
        let mut failures = 0;
        loop {
            let (host, faults) = faulty(burst);
            let streams = faults.streams.load(Ordering::Relaxed);
            faults.countdown.store(failures, Ordering::Relaxed);
            let loaded = host.load(&files);
            let reached = faults.countdown.load(Ordering::Relaxed) < 0;
            faults.rest();
            let error = match loaded {
                Ok(model) if !reached => break verify(&model).unwrap(),
                Ok(mut model) => {
                    let refused = faults.refused.load(Ordering::Relaxed);
                    assert!(refused > 0, "call {failures} failed, and the model was loaded");
                    verify(&model).unwrap();
                    model.free().unwrap();
                    host.assert_empty();
                    failures += 1;
                    continue;
                }
                Err(error) => error,
            };
            assert!(chain(&error).contains("made to fail by the test"), "{error}");
            let stranded = faults.stranded.load(Ordering::Relaxed);
            assert_eq!(
                faults.streams.load(Ordering::Relaxed) - streams,
                stranded,
                "call {failures}: {error}"
            );
            host.assert_empty();

            let mut model = host.load(&files).unwrap();
            verify(&model).unwrap();
            model.free().unwrap();
            host.assert_empty();
            failures += 1;
        }
        assert!(failures > 15, "only {failures} calls were made");
    }
}

#[test]
fn a_host_without_memory_for_a_piece_is_an_error() {
    let files = Files::several_pieces();
    let device = TestDevice::with_capacity(64 * MIB);
    let driver = ScriptedDriver::new(device.driver(), |call| match call.op {
        Op::HostAlloc => Verdict::Fail(DriverErrorKind::OutOfHostMemory {
            asked_bytes: PIECE_BYTES as u64,
            reason: "none is left".into(),
        }),
        _ => Verdict::Pass,
    });
    let host = Host { arena: arena_over(Arc::new(driver), None), device };
    let error = host.load(&files).unwrap_err();
    assert!(chain(&error).contains("no 4 MiB of host memory"), "{error}");
    assert!(matches!(error, ModelError::Copy { source, .. } if source.op == Op::HostAlloc));
    host.assert_empty();
}
