//! A GPU without memory of its own, as in a DGX Spark: a reserve for the system, and sleeps that report what they
//! really give back.

use poorwill::budget::{SourceName, system_reserve_bytes};
use poorwill::disk::DiskConfig;
use poorwill::gpus::{Gpus, unified_memory};
use poorwill::{AllocRequest, Arena, Config, HostMemoryUse, Level, SleepRequest, Tag, WakeRequest};

use super::scene::{GIB, MIB, Scene, budget, gpu, in_scene, plan_with_time, source_of};

const CACHE: u64 = 16 * MIB;

/// NVML has no memory figures of it.
fn spark() -> Scene {
    Scene::with("1TiB")
        .playing("0:integrated=1,0:capability=12.1,0:info_free=2836MiB")
        .known_as("GPU", ":name=NVIDIA GB10:capability=12.1")
}

fn loaded(config: Config, weights_bytes: u64) -> Arena {
    let arena = Arena::open(config).unwrap();
    for (bytes, tag) in [(weights_bytes, Tag::weights()), (CACHE, Tag::kv_cache())] {
        let block = arena.alloc(&AllocRequest::new(bytes, tag)).unwrap();
        arena.write_all(block.id, 0, &vec![0x5a; usize::try_from(bytes).unwrap()]).unwrap();
    }
    arena
}

#[test]
fn the_system_keeps_its_reserve_in_budgets_doctor_and_meters() {
    if !in_scene(&spark()) {
        return;
    }
    let budget = budget();
    let computer_bytes = source_of(&budget, SourceName::SystemTotal).bytes.unwrap();
    let available_bytes = source_of(&budget, SourceName::SystemAvailable).bytes.unwrap();
    let reserve_bytes = system_reserve_bytes(computer_bytes);
    assert_eq!(budget.winner, Some(SourceName::SystemTotal));
    assert_eq!(budget.total_bytes, Some(computer_bytes - reserve_bytes));
    let free_bytes = available_bytes.max(2836 * MIB).saturating_sub(reserve_bytes);
    assert_eq!(budget.headroom_bytes, Some(free_bytes.min(computer_bytes - reserve_bytes)));

    let report = poorwill::doctor::examine(&plan_with_time()).unwrap();
    let device = &report.devices[0];
    assert_eq!(device.memory.total_bytes, budget.total_bytes);
    assert!(device.engine.memory_bytes.unwrap() <= available_bytes.max(2836 * MIB) - reserve_bytes + GIB);
    let words = "cuda:0 shares the computer's memory: a sleep at level 1 gives back nothing";
    assert!(report.warnings.iter().any(|warning| warning.contains(words)), "{:?}", report.warnings);
    assert!(!report.warnings.iter().any(|warning| warning.contains("disagree")), "{:?}", report.warnings);

    let measured = Gpus::open().unwrap().memory(0).unwrap();
    assert_eq!(measured.total_bytes, computer_bytes - reserve_bytes);
    assert_eq!(measured.total_bytes, unified_memory("/".as_ref()).unwrap().total_bytes);
}

#[test]
fn a_sleep_reports_what_the_computer_got_back() {
    if !in_scene(&spark()) {
        return;
    }
    let weights_bytes = 64 * MIB;
    let arena = loaded(Config::on(gpu()).limited_to(GIB), weights_bytes);
    assert!(arena.driver().info().shares_host_memory);
    for _ in 0..2 {
        let sleep = arena.sleep(&SleepRequest::all(Level::One)).unwrap();
        // A wake may have left it a little more.
        assert!(sleep.planned_release_bytes >= weights_bytes + CACHE, "{sleep:?}");
        assert!(sleep.shared_backup_bytes >= weights_bytes, "{sleep:?}");
        let net_bytes = sleep.planned_release_bytes.saturating_sub(sleep.shared_backup_bytes);
        assert_eq!(sleep.released_bytes, net_bytes, "{sleep:?}");
        arena.wake(&WakeRequest::all()).unwrap();
        assert_eq!(arena.stats().unwrap().backup_bytes, 0, "they are not kept");
        assert_eq!(arena.driver().host_memory().held_bytes, 0);
    }
    let sleep = arena.sleep(&SleepRequest::all(Level::Two)).unwrap();
    assert_eq!((sleep.released_bytes, sleep.shared_backup_bytes), (sleep.planned_release_bytes, 0));
    assert!(sleep.released_bytes >= weights_bytes + CACHE, "{sleep:?}");
}

#[test]
fn backups_on_a_disk_give_memory_back() {
    if !in_scene(&spark()) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let on_disk = || Config::on(gpu()).limited_to(GIB).spilling_to(DiskConfig::in_folder(folder.path()));
    let arena = Arena::open(on_disk()).unwrap();
    assert_eq!(
        arena.driver().host_memory().limit_bytes,
        Some(GIB),
        "by default no more is held beside a disk"
    );
    drop(arena);
    let (weights_bytes, held_max_bytes) = (256 * MIB, 160 * MIB);
    let backups = HostMemoryUse::default().limited_to(held_max_bytes);
    let arena = loaded(on_disk().backing_up_in(backups), weights_bytes);
    let sleep = arena.sleep(&SleepRequest::all(Level::One)).unwrap();
    assert!(sleep.shared_backup_bytes <= held_max_bytes, "{sleep:?}");
    assert!(sleep.released_bytes >= weights_bytes + CACHE - held_max_bytes, "{sleep:?}");
    assert!(arena.stats().unwrap().backup_disk_bytes > 0);
    arena.wake(&WakeRequest::all()).unwrap();
    assert_eq!(arena.stats().unwrap().backup_disk_bytes, 0);
}
