//! How the CUDA driver handles GPUs that are slices, report wrong figures, or are of another kind: the memory and
//! properties that it reports.
//!
//! Over the fake libcuda only, which reads its settings once: each test runs in a separate process.

use poorwill_core::driver::Result;
use poorwill_core::{AllocRequest, Driver, MemoryInfo, Pool, PoolConfig, PoolError, Tag};
use poorwill_driver::cuda::{self, CudaMemory, GpuInfo, Peers};
use poorwill_driver::{CudaConfig, CudaDevice};
use poorwill_testkit::child;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

const PLAY: &str = "POORWILL_FAKE_CUDA_SIMULATE";
const FAIL: &str = "POORWILL_FAKE_CUDA_FAIL";

/// Whether the caller is the child with these variables; otherwise one has run, and passed.
fn runs_with(variables: &[(&str, &str)]) -> bool {
    let is_child = child::role().is_some();
    if !is_child {
        drop(play("alone", variables));
    }
    is_child
}

/// What a child prints that plays the calling test in this environment, and does well.
fn play(role: &str, variables: &[(&str, &str)]) -> String {
    let variables = [&[("POORWILL_FAKE_CUDA_DEVICES", "24GiB,24GiB")], variables].concat();
    child::output_of(child::without_settings(child::command(role, &variables)))
}

fn open() -> Result<CudaDevice> {
    CudaDevice::open(&CudaConfig::default().through(Some(poorwill_fake_libcuda::path())))
}

fn gpu(ordinal: u32) -> Result<GpuInfo> {
    cuda::gpu(Some(&poorwill_fake_libcuda::path()), ordinal)
}

/// Total and free, as everybody sees them.
fn memory(device: &CudaDevice) -> (u64, u64) {
    let MemoryInfo { total_bytes, free_bytes, process, .. } = device.memory_info().unwrap();
    assert_eq!(process, None, "NVML is not asked about a library that was named");
    (total_bytes, free_bytes)
}

#[test]
fn over_its_limit_a_slice_has_nothing_free() {
    let variables = [(PLAY, "0:hami=23GiB,0:used=24GiB"), ("CUDA_DEVICE_MEMORY_LIMIT_0", "23g")];
    if !runs_with(&variables) {
        return;
    }
    let device = open().unwrap();
    let reported = device.reported_memory().unwrap();
    assert!(
        matches!(&reported, CudaMemory::OverLimit { words } if words.contains("INVALID_VALUE")),
        "{reported:?}"
    );
    assert_eq!((device.info().total_bytes, memory(&device)), (23 * GIB, (23 * GIB, 0)));
    assert_eq!(device.gpu().total_bytes, 0, "as the driver says it");
    assert!(device.create(device.info().granule_bytes).unwrap_err().is_out_of_memory());
}

#[test]
fn over_an_unreported_limit_it_opens_with_nothing() {
    let variables = [(PLAY, "0:hami=23GiB,0:used=24GiB"), ("CUDA_DEVICE_MEMORY_LIMIT_1", "23g")];
    if !runs_with(&variables) {
        return;
    }
    let device = open().unwrap();
    assert!(matches!(device.reported_memory().unwrap(), CudaMemory::OverLimit { .. }));
    assert_eq!((device.info().total_bytes, memory(&device)), (0, (0, 0)));
    assert!(device.create(device.info().granule_bytes).unwrap_err().is_out_of_memory());
}

#[test]
fn figures_are_reported_as_they_are() {
    if !runs_with(&[(PLAY, "0:info_total=8GiB,0:info_free=9GiB,0:total=7GiB")]) {
        return;
    }
    let device = open().unwrap();
    let reported = CudaMemory::Known { free_bytes: 9 * GIB, total_bytes: 8 * GIB };
    assert_eq!((device.reported_memory().unwrap(), device.gpu().total_bytes), (reported, 7 * GIB));
}

#[test]
fn a_total_of_zero_is_looked_up_elsewhere() {
    if !runs_with(&[(PLAY, "0:info_total=0,0:used=1GiB")]) {
        return;
    }
    let device = open().unwrap();
    let reported = CudaMemory::Known { free_bytes: 23 * GIB, total_bytes: 0 };
    assert_eq!(device.reported_memory().unwrap(), reported);
    assert_eq!((device.info().total_bytes, memory(&device)), (24 * GIB, (24 * GIB, 23 * GIB)));
}

#[test]
fn without_a_reported_total_a_pool_takes_what_it_gets() {
    let play = "0:info_total=0,0:total=0,0:used=24572MiB";
    if !runs_with(&[(PLAY, play)]) {
        return;
    }
    let fills = |limit_bytes, bytes| {
        let device = std::sync::Arc::new(open().unwrap());
        assert_eq!(device.info().total_bytes, 0);
        let pool = Pool::new(device, PoolConfig::default().limited_to(limit_bytes)).unwrap();
        pool.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap();
        pool.alloc(&AllocRequest::new(1, Tag::weights())).unwrap_err()
    };
    assert!(matches!(fills(None, 4 * MIB), PoolError::DeviceFull { .. }));
    assert!(matches!(fills(Some(2 * MIB), 2 * MIB), PoolError::OverLimit { .. }));
}

#[test]
fn memory_that_cannot_be_asked_for_is_an_error() {
    if !runs_with(&[(FAIL, "cuMemGetInfo_v2:2:2:999")]) {
        return;
    }
    let device = open().unwrap();
    assert!(device.memory_info().unwrap_err().to_string().contains("CUDA_ERROR_UNKNOWN (999)"));
    assert!(device.reported_memory().is_err());
    assert_eq!(memory(&device), (24 * GIB, 24 * GIB));
}

#[test]
fn shared_memory_goes_by_the_generation() {
    // With what each is known to have: an H100, a card of the 30 series, an older one, and one that says what it likes.
    let plays = [
        ("0:capability=9.0,1:capability=8.6", [227, 99]),
        ("0:capability=7.5,1:shared=100KiB", [64, 100]),
        ("1:integrated=1,1:capability=12.0", [163, 99]),
    ];
    if let Some(nth) = child::role() {
        let (play, kib) = plays[nth.parse::<usize>().unwrap()];
        for (ordinal, kib) in (0..).zip(kib) {
            let gpu = gpu(ordinal).unwrap();
            assert_eq!(gpu.shared_memory_per_block_bytes, kib << 10, "cuda:{ordinal}");
            assert_eq!(gpu.integrated, play.contains(&format!("{ordinal}:integrated=1")));
        }
        assert!(gpu(2).is_err());
        return;
    }
    for (nth, (play_text, _)) in plays.iter().enumerate() {
        play(&nth.to_string(), &[(PLAY, play_text)]);
    }
}

#[test]
fn a_driver_without_opting_in_tells_what_every_block_has() {
    if child::role().is_some() {
        // Which of its questions failed is the parent's choice: only that for opting in has another answer.
        match gpu(0) {
            Ok(gpu) => println!("has {} KiB", gpu.shared_memory_per_block_bytes >> 10),
            Err(error) => assert!(error.to_string().contains("does not say what it is"), "{error}"),
        }
        return;
    }
    let answer = |nth: u32| {
        let said = play("asker", &[(FAIL, &format!("cuDeviceGetAttribute:{nth}:1:1"))]);
        ["has 163 KiB", "has 48 KiB"].into_iter().find(|words| said.contains(words))
    };
    let answers: Vec<_> = (1..=9).map(answer).collect();
    assert_eq!(answers.iter().filter(|answer| **answer == Some("has 48 KiB")).count(), 1, "{answers:?}");
    assert_eq!(answers.last(), Some(&Some("has 163 KiB")), "it asks for less: {answers:?}");
}

#[test]
fn a_gpu_that_does_not_reach_the_memory_is_no_peer() {
    if !runs_with(&[(PLAY, "1:reaches=none")]) {
        return;
    }
    assert_eq!(open().unwrap().peers(), [0u32; 0]);
    let library = Some(poorwill_fake_libcuda::path());
    let chosen = CudaConfig::default().through(library).open_to(Peers::Only(vec![1]));
    let words = CudaDevice::open(&chosen).unwrap_err().to_string();
    assert!(words.contains("cuda:1 cannot be a peer of cuda:0: it does not reach"), "{words}");
    let other = CudaDevice::open(&chosen.numbered(1).open_to(Peers::Only(vec![0]))).unwrap();
    assert_eq!(other.peers(), [0], "the other way round it does");
}

#[test]
fn memory_that_cannot_be_opened_for_peers_says_what_to_set() {
    // Not supported, whatever the driver has said before.
    if !runs_with(&[(FAIL, "cuMemSetAccess:1:1:801")]) {
        return;
    }
    let device = open().unwrap();
    let range = device.reserve(device.info().granule_bytes).unwrap();
    device.map(range, device.create(range.bytes).unwrap()).unwrap();
    let words = device.set_access(range).unwrap_err().to_string();
    assert!(words.contains("NOT_SUPPORTED") && words.contains("(cuda:1), too"), "{words}");
    assert!(words.contains("open the device without them (`peers`)"), "{words}");
    device.set_access(range).unwrap();
}
