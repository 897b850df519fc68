//! Sources that disagree, report wrong figures, or report nothing: the smallest plausible figure counts, and
//! the report keeps all of them.

use poorwill::budget::SourceName;
use poorwill::{Arena, Config, Device, OpenError, chain};

use super::scene::{
    GIB, Scene, assert_allocatable, assert_noted, assert_plain, budget, cap, figures, gpu, in_scene, open,
};

use SourceName::{
    CgroupDmem, CgroupDmemFree, CudaFree, CudaTotal, DeviceProperties, MemoryLimit, MpsLimit, NvmlFree,
    NvmlTotal,
};

#[test]
fn nvml_tells_more_than_cuda() {
    let scene = Scene::with("20GiB").known_as("GPU", ":total=24GiB:used=1GiB");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(CudaTotal), Some(20 * GIB), Some(20 * GIB)));
    assert_plain(&budget, NvmlTotal, 24 * GIB);
    assert_noted(&budget, NvmlFree, Some(23 * GIB), "more than the total of 20 GiB");
}

#[test]
fn nvml_tells_less_than_cuda() {
    let scene = Scene::with("24GiB").known_as("GPU", ":total=20GiB:used=1GiB");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(NvmlTotal), Some(20 * GIB), Some(19 * GIB)));
    assert_plain(&budget, CudaTotal, 24 * GIB);
    assert_allocatable(&Arena::open(Config::on(gpu())).unwrap(), 20 * GIB);
}

#[test]
fn a_driver_figure_below_the_rest_counts() {
    // A layer in front of the driver reports 8 GiB but grants 24. The budget still holds.
    let scene = Scene::with("24GiB").playing("0:info_total=8GiB,0:info_free=8GiB");
    if !in_scene(&scene) {
        return;
    }
    assert_eq!(figures(&budget()), (Some(CudaTotal), Some(8 * GIB), Some(8 * GIB)));
    assert_allocatable(&Arena::open(Config::on(gpu())).unwrap(), 8 * GIB);
    assert_allocatable(&Arena::open(Config::on(gpu()).within(Some(cap("0.25")))).unwrap(), 2 * GIB);
}

#[test]
fn a_total_of_zero_is_none() {
    let scene = Scene::with("24GiB").playing("0:info_total=0");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(DeviceProperties), Some(24 * GIB), Some(24 * GIB)));
    assert_noted(&budget, CudaTotal, Some(0), "0 is no total");
    assert_allocatable(&Arena::open(Config::on(gpu()).within(Some(cap("4GiB")))).unwrap(), 4 * GIB);
    assert_allocatable(&Arena::open(Config::on(gpu())).unwrap(), 24 * GIB);
}

#[test]
fn a_total_that_no_device_has_is_none() {
    let scene = Scene::with("24GiB")
        .playing(&format!("0:info_total={},0:total={}", u64::MAX, 1u64 << 50))
        .known_as("GPU", ":total=24GiB");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(NvmlTotal), Some(24 * GIB), Some(24 * GIB)));
    assert_noted(&budget, CudaTotal, Some(u64::MAX), "not available");
    assert_noted(&budget, DeviceProperties, Some(1 << 50), "no device has that much");
    assert_allocatable(&Arena::open(Config::on(gpu())).unwrap(), 24 * GIB);
}

#[test]
fn a_total_that_is_too_large_loses() {
    let scene =
        Scene::with("24GiB").playing("0:info_total=1TiB,0:total=999GiB").known_as("GPU", ":total=24GiB");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(NvmlTotal), Some(24 * GIB), Some(24 * GIB)));
    assert_plain(&budget, CudaTotal, 1024 * GIB);
    assert_plain(&budget, DeviceProperties, 999 * GIB);
}

#[test]
fn free_figures_beyond_the_total() {
    let scene = Scene::with("24GiB")
        .playing("0:used=4GiB,0:info_free=25GiB")
        .known_as("GPU", ":total=24GiB:used=4GiB");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(CudaTotal), Some(24 * GIB), Some(20 * GIB)));
    assert_noted(&budget, CudaFree, Some(25 * GIB), "more than the total of 24 GiB, which counts");
    assert_plain(&budget, NvmlFree, 20 * GIB);
}

#[test]
fn memory_info_that_fails_keeps_the_device_closed() {
    let scene = Scene::with("24GiB").playing("0:info_code=801").known_as("GPU", ":total=24GiB");
    if !in_scene(&scene) {
        return;
    }
    let Err(error @ OpenError::Device { .. }) = Device::open(&gpu()) else { panic!("opened") };
    let words = chain(&error);
    assert!(words.contains("cuda:0") && words.contains("CUDA_ERROR_NOT_SUPPORTED (801)"), "{words}");
}

#[test]
fn memory_info_that_fails_later_leaves_it_to_the_others() {
    let scene = Scene::with("24GiB")
        .variable("POORWILL_FAKE_CUDA_FAIL", "cuMemGetInfo_v2:2:999:801")
        .known_as("GPU", ":total=23GiB:used=2GiB");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(NvmlTotal), Some(23 * GIB), Some(21 * GIB)));
    for name in [CudaTotal, CudaFree] {
        assert_noted(&budget, name, None, "CUDA_ERROR_NOT_SUPPORTED");
    }
}

#[test]
fn without_nvml_everyone_says_why() {
    let scene = Scene::with("24GiB").without_nvml();
    if !in_scene(&scene) {
        return;
    }
    let device = open();
    let budget = device.budget(None);
    assert_eq!(figures(&budget), (Some(CudaTotal), Some(24 * GIB), Some(24 * GIB)));
    assert_eq!((device.process_used_bytes(), budget.process_used_bytes), (None, None));
    for (name, words) in [
        (NvmlTotal, "libnvidia-ml.so.1"),
        (NvmlFree, "libnvidia-ml.so.1"),
        (MemoryLimit, "CUDA_DEVICE_MEMORY_LIMIT is not set"),
        (MpsLimit, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT is not set"),
        (CgroupDmem, "no control group limits it"),
        (CgroupDmemFree, "no control group limits it"),
    ] {
        assert_noted(&budget, name, None, words);
    }
}

#[test]
fn an_nvml_of_other_gpus_says_so() {
    let scene = Scene::with("24GiB");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_noted(&budget, NvmlTotal, None, "NVML knows no device of this UUID");
    assert_eq!(budget.process_used_bytes, None);
}

#[test]
fn without_a_driver_nothing_opens() {
    let scene = Scene::with("24GiB").without_cuda().known_as("GPU", ":total=24GiB");
    if !in_scene(&scene) {
        return;
    }
    for result in [Device::open(&gpu()).map(drop), Arena::open(Config::on(gpu())).map(drop)] {
        let Err(error @ OpenError::Device { .. }) = result else { panic!("opened") };
        let words = chain(&error);
        assert!(words.contains("cuda:0") && words.contains("libcuda.so.1"), "{words}");
    }
    assert!(poorwill::shared_memory_per_block_bytes(0).is_err());
}

#[test]
fn without_any_total_the_user_must_give_bytes() {
    let scene = Scene::with("24GiB").playing("0:total=0,0:info_total=0").without_nvml();
    if !in_scene(&scene) {
        return;
    }
    for share in [None, Some(cap("0.92"))] {
        let Err(OpenError::Budget(error)) = Arena::open(Config::on(gpu()).within(share)) else {
            panic!("opened")
        };
        let words = chain(&error);
        for word in ["cuda:0", "device_properties: 0 is no total", "--budget 20GiB"] {
            assert!(words.contains(word), "`{word}`: {words}");
        }
    }
    let budget = open().budget(Some(cap("20GiB")));
    assert_eq!((budget.winner, budget.budget_bytes), (Some(SourceName::User), Some(20 * GIB)));
    assert_allocatable(&Arena::open(Config::on(gpu()).within(Some(cap("20GiB")))).unwrap(), 20 * GIB);
}
