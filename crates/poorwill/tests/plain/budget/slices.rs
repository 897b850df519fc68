//! Parts of GPUs: by HAMi, as a MIG instance, by MPS, and of the computer's own memory.

use poorwill::budget::{Budget, SourceName, claim_in_use, system_reserve_bytes};
use poorwill::{Arena, Config, Device};

use super::scene::{
    GIB, GRANULE, MIB, Scene, assert_allocatable, assert_noted, assert_plain, budget, cap, figures, gpu,
    in_scene, is_full, open, source_of, take,
};

use SourceName::{
    CudaFree, CudaTotal, DeviceProperties, MemoryLimit, MpsLimit, NvmlFree, NvmlTotal, SystemAvailable,
    SystemTotal,
};

/// HAMi's slice of 23 GiB of a 24 GiB card, with this much in use.
fn hami(used: &str) -> Scene {
    Scene::with("24GiB").playing(&format!("0:hami=23GiB,0:used={used}"))
}

#[test]
fn hami_below_its_limit() {
    let scene = hami("3GiB").variable("CUDA_DEVICE_MEMORY_LIMIT_0", "23g").known_as("GPU", ":total=24GiB");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(CudaTotal), Some(23 * GIB), Some(20 * GIB)));
    assert_plain(&budget, CudaTotal, 23 * GIB);
    assert_plain(&budget, CudaFree, 20 * GIB);
    assert_noted(&budget, DeviceProperties, Some(0), "0 is no total: not counted");
    assert_noted(&budget, MemoryLimit, Some(23 * GIB), "CUDA_DEVICE_MEMORY_LIMIT_0");
    assert_noted(&budget, MemoryLimit, Some(23 * GIB), "not preloaded here");
    assert_plain(&budget, NvmlTotal, 24 * GIB);
    assert_noted(&budget, NvmlFree, Some(24 * GIB), "more than the total of 23 GiB");
    let arena = Arena::open(Config::on(gpu())).unwrap();
    assert_eq!(arena.limit_bytes(), 23 * GIB);
    assert_allocatable(&arena, 20 * GIB);
    // A full slice has no odd figures: its limit is reached, not passed.
    assert_eq!(open().budget(None).headroom_bytes, Some(0));
}

#[test]
fn hami_above_its_limit() {
    // A negative value in HAMi's NVML figures wraps around at 64 bits.
    let scene = hami("23.5GiB")
        .variable("CUDA_DEVICE_MEMORY_LIMIT", "23552m")
        .known_as("GPU", ":total=23GiB:used=23.5GiB");
    if !in_scene(&scene) {
        return;
    }
    let device = open();
    assert_eq!(device.driver().info().total_bytes, 23 * GIB);
    assert_eq!(device.driver().memory_info().unwrap().free_bytes, 0);
    let budget = device.budget(None);
    assert_eq!((budget.budget_bytes, budget.headroom_bytes), (Some(23 * GIB), Some(0)));
    assert_noted(&budget, CudaTotal, None, "CUDA_ERROR_INVALID_VALUE");
    assert_noted(&budget, CudaFree, None, "more is in use than the limit allows, so nothing is free");
    assert_noted(&budget, DeviceProperties, Some(0), "0 is no total");
    let below_zero = 0u64.wrapping_sub(GIB / 2);
    assert_noted(&budget, NvmlFree, Some(below_zero), "went below zero: more is in use than the limit");
    for name in [CudaFree, DeviceProperties, NvmlFree] {
        assert!(source_of(&budget, name).is_odd, "{name}");
    }
    assert_noted(&budget, MemoryLimit, Some(23 * GIB), "CUDA_DEVICE_MEMORY_LIMIT;");
    let arena = Arena::open(Config::on(gpu())).unwrap();
    assert!(is_full(&take(&arena, 1).unwrap_err()));
}

#[test]
fn hami_above_its_limit_for_a_while() {
    // The first queries of this process fail as over the limit, until other processes free memory.
    let scene = hami("1GiB")
        .variable("CUDA_DEVICE_MEMORY_LIMIT_0", "23g")
        .variable("POORWILL_FAKE_CUDA_FAIL", "cuMemGetInfo_v2:1:2:1");
    if !in_scene(&scene) {
        return;
    }
    let device = open();
    let before = device.budget(None);
    assert_eq!(figures(&before), (Some(MemoryLimit), Some(23 * GIB), Some(0)));
    let after = device.budget(None);
    assert_eq!(figures(&after), (Some(CudaTotal), Some(23 * GIB), Some(22 * GIB)));
    let (_, envelope) = device.envelope(Some(cap("8GiB"))).unwrap();
    let arena = Arena::open_within(&device, &envelope, poorwill::PoolConfig::default()).unwrap();
    assert_allocatable(&arena, 8 * GIB);
    drop(arena);
    assert_allocatable(&Arena::open(Config::on(gpu())).unwrap(), 22 * GIB);
}

#[test]
fn hami_above_an_unknown_limit() {
    let scene = hami("23.5GiB").known_as("GPU", ":total=24GiB");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    // NVML reports the card alone, and yet nothing is free.
    assert_eq!(figures(&budget), (Some(NvmlTotal), Some(24 * GIB), Some(0)));
    assert_noted(&budget, CudaFree, None, "more is in use than the limit allows");
    let arena = Arena::open(Config::on(gpu())).unwrap();
    assert_allocatable(&arena, 0);
}

#[test]
fn a_limit_of_hamis_without_hami() {
    // The variable limits cooperating programs; nothing enforces it here.
    let scene = Scene::with("24GiB,24GiB")
        .variable("CUDA_DEVICE_MEMORY_LIMIT", "10g")
        .variable("CUDA_DEVICE_MEMORY_LIMIT_1", "4096m");
    if !in_scene(&scene) {
        return;
    }
    for (device, limit) in [("cuda:0", 10 * GIB), ("cuda:1", 4 * GIB)] {
        let budget = Device::open(&device.parse().unwrap()).unwrap().budget(None);
        assert_eq!(figures(&budget), (Some(MemoryLimit), Some(limit), Some(limit)), "{device}");
        assert_plain(&budget, DeviceProperties, 24 * GIB);
        let arena = Arena::open(Config::on(device.parse().unwrap())).unwrap();
        assert_allocatable(&arena, limit);
    }
}

#[test]
fn an_unreadable_limit_is_reported() {
    let scene = Scene::with("24GiB")
        .variable("CUDA_DEVICE_MEMORY_LIMIT_0", "10GiB")
        .variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=much");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(CudaTotal), Some(24 * GIB), Some(24 * GIB)));
    assert_noted(&budget, MemoryLimit, None, "CUDA_DEVICE_MEMORY_LIMIT_0 cannot be read: `10GiB`");
    assert_noted(&budget, MpsLimit, None, "cannot be read: `much`");
}

#[test]
fn an_instance_that_nvml_tells_about() {
    let scene = Scene::with("12GiB")
        .playing("0:mig=1g.12gb,0:used=1GiB")
        .known_as("MIG", ":total=11.5GiB:used=1.5GiB");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(NvmlTotal), Some(23 * GIB / 2), Some(10 * GIB)));
    assert_plain(&budget, NvmlFree, 10 * GIB);
    assert_plain(&budget, CudaTotal, 12 * GIB);
}

#[test]
fn an_instance_that_nvml_may_not_query() {
    let scene = Scene::with("12GiB")
        .playing("0:mig=1g.12gb,0:used=1GiB")
        .known_as("MIG", ":total=80GiB:used=79.5GiB:memory_error=4");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(CudaTotal), Some(12 * GIB), Some(11 * GIB)));
    for name in [NvmlTotal, NvmlFree] {
        assert_noted(&budget, name, None, "permission");
        assert!(!source_of(&budget, name).is_odd, "a refusal is no figure that cannot be");
    }
    assert_allocatable(&Arena::open(Config::on(gpu())).unwrap(), 11 * GIB);
}

/// An instance that NVML knows only by its card's UUID.
fn under_its_card(mode: &str) -> Scene {
    // Smaller than the instance in both figures, so that they would show.
    let settings = format!(":total=10GiB:used=9GiB{mode}");
    Scene::with("12GiB").playing("0:mig=1g.12gb").known_as("GPU", &settings)
}

#[test]
fn figures_of_a_divided_card_do_not_count() {
    if !in_scene(&under_its_card(":mig_mode=1")) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(CudaTotal), Some(12 * GIB), Some(12 * GIB)));
    for name in [NvmlTotal, NvmlFree] {
        assert_noted(&budget, name, None, "the whole card, which is divided");
    }
}

#[test]
fn an_instance_does_not_believe_its_card_whatever_its_mode() {
    if !in_scene(&under_its_card(":mig_mode=0")) {
        return;
    }
    let budget = budget();
    assert_eq!(figures(&budget), (Some(CudaTotal), Some(12 * GIB), Some(12 * GIB)));
    assert_noted(&budget, NvmlFree, None, "the whole card, which is divided");
}

/// A client of MPS with 10 GiB of 24, of which a neighbour uses some.
fn mps(used: &str) -> Scene {
    Scene::with("24GiB").playing(&format!("0:mps=10GiB,0:used={used}")).known_as("GPU", ":total=24GiB")
}

fn assert_client(budget: &Budget, free_bytes: u64) {
    assert_eq!(figures(budget), (Some(MpsLimit), Some(10 * GIB), Some(free_bytes)));
    assert_plain(budget, CudaTotal, 24 * GIB);
    assert_noted(budget, MpsLimit, Some(10 * GIB), "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    assert_eq!(source_of(budget, CudaFree).bytes, Some(free_bytes));
    assert_allocatable(&Arena::open(Config::on(gpu())).unwrap(), free_bytes);
}

#[test]
fn a_client_of_mps_with_headroom() {
    let scene = mps("4GiB").variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "1=1G,0=10G");
    if in_scene(&scene) {
        assert_client(&budget(), 10 * GIB);
    }
}

#[test]
fn a_client_of_mps_between_neighbours() {
    let uuid = poorwill_fake_libcuda::uuid_text(0);
    let limits = format!("GPU-{}=10240M", &uuid[..12]);
    let scene = mps("18GiB").variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", &limits);
    if in_scene(&scene) {
        assert_client(&budget(), 6 * GIB);
    }
}

#[test]
fn a_client_of_mps_that_has_some_already() {
    let scene = mps("0").variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=10G");
    if !in_scene(&scene) {
        return;
    }
    let arena = Arena::open(Config::on(gpu())).unwrap();
    take(&arena, 3 * GIB).unwrap();
    let left = 10 * GIB - arena.stats().unwrap().mapped_bytes;
    assert_eq!(figures(&open().budget(None)), (Some(MpsLimit), Some(10 * GIB), Some(left)));
    assert_allocatable(&arena, 7 * GIB);
}

#[test]
fn shared_memory_of_the_computer_counts_as_free() {
    // As on an integrated GPU: page cache is not free to CUDA, but available.
    let scene =
        Scene::with("64MiB,1TiB").playing("0:integrated=1,0:info_free=4MiB,1:integrated=1,1:info_free=6MiB");
    if !in_scene(&scene) {
        return;
    }
    let small = budget();
    assert_eq!(figures(&small), (Some(CudaTotal), Some(64 * MIB), Some(64 * MIB)), "never above the total");
    assert_allocatable(&Arena::open(Config::on(gpu())).unwrap(), 64 * MIB);

    let large = Device::open(&"cuda:1".parse().unwrap()).unwrap().budget(None);
    let [available, computer] =
        [SystemAvailable, SystemTotal].map(|name| source_of(&large, name).bytes.unwrap());
    let total = computer - system_reserve_bytes(computer);
    let headroom = available.saturating_sub(system_reserve_bytes(computer));
    assert_eq!(figures(&large), (Some(SystemTotal), Some(total), Some(headroom)));
    assert_eq!(large.total_bytes, Some(total));
}

#[test]
fn memory_of_its_own_is_not_the_computers() {
    let scene = Scene::with("64MiB").playing("0:info_free=4MiB");
    if !in_scene(&scene) {
        return;
    }
    let budget = budget();
    assert_eq!(budget.source(SystemAvailable), None);
    assert_eq!(budget.headroom_bytes, Some(4 * MIB));
}

#[test]
fn what_this_process_has_is_taken_off_the_budget_once() {
    // A context of half a GiB, which is in CUDA's figures as it is in NVML's.
    let scene = Scene::with("24GiB")
        .playing("0:used=512MiB")
        .known_as("GPU", ":total=24GiB:used=512MiB:process=self/512MiB:process=1/9GiB");
    if !in_scene(&scene) {
        return;
    }
    let device = open();
    assert_eq!(device.process_used_bytes(), Some(GIB / 2));
    for (cap_text, budget_bytes, headroom_bytes) in [
        ("", 24 * GIB, 47 * GIB / 2),
        ("1.0", 24 * GIB, 47 * GIB / 2),
        ("0.5", 12 * GIB, 23 * GIB / 2),
        ("2GiB", 2 * GIB, 3 * GIB / 2),
        ("512MiB", GIB / 2, 0),
        ("2MiB", GRANULE, 0),
    ] {
        let budget = device.budget((!cap_text.is_empty()).then(|| cap(cap_text)));
        assert_eq!(budget.process_used_bytes, Some(GIB / 2));
        let found = (budget.budget_bytes, budget.headroom_bytes);
        assert_eq!(found, (Some(budget_bytes), Some(headroom_bytes)), "{cap_text}");
        // What an engine may claim is the headroom.
        let (budget, envelope) = poorwill::budget::envelope("cuda:0", budget).unwrap();
        let in_use = claim_in_use(&budget, &envelope);
        assert_eq!(envelope.unclaimed_bytes(), headroom_bytes, "{cap_text}");
        drop(in_use);
    }
}
