//! Holds: while other software has the physical memory of a tag registered, none of it leaves its address.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use fastrand::Rng;
use poorwill_core::{
    AllocRequest, Block, DeviceRange, Level, Op, Pool, PoolConfig, PoolError, SleepRequest, Tag, TagState,
    WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::latch::Latch;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::tenant::Tenant;
use poorwill_testkit::watchdog::{eventually, watched};

const NIXL: &str = "NIXL";

/// A pool, and every range that was unmapped.
struct World {
    device: TestDevice,
    pool: Arc<Pool>,
    unmapped: Arc<Mutex<Vec<DeviceRange>>>,
    /// Whether the driver refuses to unmap.
    refuses: Arc<AtomicBool>,
    granule: u64,
}

impl World {
    fn open(limit_granules: Option<u64>) -> Self {
        let device = TestDevice::open(256);
        let unmapped: Arc<Mutex<Vec<DeviceRange>>> = Arc::default();
        let refuses: Arc<AtomicBool> = Arc::default();
        let (seen, refused) = (Arc::clone(&unmapped), Arc::clone(&refuses));
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            if call.op == Op::Unmap && refused.load(Ordering::Relaxed) {
                return Verdict::device_failure(call);
            }
            seen.lock().unwrap().extend(call.unmaps);
            Verdict::Pass
        });
        let granule = device.info().granule_bytes;
        let config = PoolConfig::default()
            .limited_to(limit_granules.map(|granules| granules * granule))
            .in_chunks_of(4)
            .in_spans_of(8)
            .in_segments_of(8);
        Self {
            pool: Arc::new(Pool::new(Arc::new(driver), config).unwrap()),
            device,
            unmapped,
            refuses,
            granule,
        }
    }

    fn alloc(&self, granules: u64, tag: &Tag) -> Result<Block, PoolError> {
        self.pool.alloc(&AllocRequest::new(granules * self.granule, tag.clone()))
    }

    /// What was unmapped of a tag's segments since the last call.
    fn unmapped_of(&self, tag: &Tag) -> Vec<DeviceRange> {
        let segments = self.pool.snapshot().unwrap().segments;
        let of_tag: Vec<DeviceRange> = segments
            .iter()
            .filter(|segment| segment.tag == *tag)
            .map(|segment| DeviceRange::new(segment.addr, segment.bytes))
            .collect();
        let mut unmapped = std::mem::take(&mut *self.unmapped.lock().unwrap());
        unmapped.retain(|range| of_tag.iter().any(|segment| segment.overlaps(range)));
        unmapped
    }

    fn mapped_bytes(&self, tag: &Tag) -> u64 {
        let stats = self.pool.stats().unwrap();
        stats.tags.iter().find(|stats| stats.tag == *tag).map_or(0, |stats| stats.mapped_bytes)
    }
}

fn of(tags: &[Tag]) -> SleepRequest {
    SleepRequest::of(tags, Level::One)
}

#[test]
fn what_is_held_does_not_fall_asleep() {
    let world = World::open(None);
    let mut tenant = Tenant::new(&world.pool, 1);
    let (weights, runtime) = (Tag::weights(), Tag::runtime());
    tenant.load(10 * world.granule, &weights);
    tenant.load(3 * world.granule, &runtime);
    let ucx = world.pool.hold(&weights, "UCX").unwrap();
    let holds = [NIXL; 2].map(|holder| world.pool.hold(&weights, holder).unwrap());
    let refusals = || {
        [
            world.pool.sleep(&SleepRequest::all(Level::One)),
            world.pool.sleep(&SleepRequest::all(Level::Two)),
            world.pool.sleep(&of(&[runtime.clone(), weights.clone()])),
            world.pool.discard(std::slice::from_ref(&weights)),
        ]
    };
    for refused in refusals() {
        let refused = refused.unwrap_err();
        let PoolError::Held { tag, holders, .. } = &refused else { panic!("{refused}") };
        assert_eq!((tag, holders.as_str()), (&weights, "NIXL, UCX"));
        for words in ["`weights` is held by NIXL, UCX", "deregistered", "end the hold"] {
            assert!(refused.to_string().contains(words), "{refused}");
        }
    }
    assert_eq!(world.device.host_bytes(), 0, "nothing was backed up");
    assert!(world.unmapped.lock().unwrap().is_empty());
    assert_eq!(world.pool.tag_state(&runtime).unwrap(), TagState::Awake);
    tenant.verify();
    // Calls that only copy may go on, and so may other tags.
    world.pool.prepare_sleep(&of(std::slice::from_ref(&weights))).unwrap().wait().unwrap();
    world.pool.sleep(&of(std::slice::from_ref(&runtime))).unwrap();
    world.pool.wake(&WakeRequest::all()).unwrap();
    // Each hold counts.
    drop(ucx);
    for hold in holds {
        for refused in refusals() {
            assert!(
                matches!(&refused, Err(PoolError::Held { holders, .. }) if holders == NIXL),
                "{refused:?}"
            );
        }
        assert_eq!((hold.tag(), hold.holder()), (&weights, NIXL));
        drop(hold);
    }
    assert!(world.pool.held().unwrap().is_empty());
    world.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    world.pool.wake(&WakeRequest::all()).unwrap();
    tenant.verify();
}

#[test]
fn what_has_no_memory_cannot_be_held() {
    let world = World::open(None);
    let weights = Tag::weights();
    world.alloc(2, &weights).unwrap();
    world.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    let refused = world.pool.hold(&weights, NIXL).unwrap_err();
    assert!(matches!(&refused, PoolError::Asleep { tag, .. } if *tag == weights), "{refused}");
    let unknown = world.pool.hold(&Tag::new("nobody").unwrap(), NIXL).unwrap_err();
    assert!(matches!(unknown, PoolError::UnknownTag { .. }), "{unknown}");
    assert!(world.pool.held().unwrap().is_empty(), "a refused hold holds nothing");
    world.pool.wake(&WakeRequest::all()).unwrap();
    drop(world.pool.hold(&weights, NIXL).unwrap());
    world.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
}

/// Freed memory of a held tag serves only that tag, at its addresses.
#[test]
fn what_is_freed_in_a_held_tag_stays_where_it_is() {
    let world = World::open(Some(40));
    let kv = Tag::kv_cache();
    // Spans, chunks, granules, and parts of one.
    let sizes = [20, 4, 2, 1];
    let blocks: Vec<Block> = sizes.iter().map(|granules| world.alloc(*granules, &kv).unwrap()).collect();
    let small = world.pool.alloc(&AllocRequest::new(700, kv.clone())).unwrap();
    let mapped_bytes = world.mapped_bytes(&kv);
    let hold = world.pool.hold(&kv, NIXL).unwrap();
    let cut = DeviceRange::new(blocks[0].range.addr + 4 * world.granule, 9 * world.granule);
    let rest = world.pool.free_part(blocks[0].id, cut).unwrap();
    blocks[1..].iter().map(|block| block.id).chain([small.id]).for_each(|id| world.pool.free(id).unwrap());
    world.pool.trim().unwrap();
    // Another tag may use what is left under the limit, and no more.
    let others = world.alloc(8, &Tag::weights()).unwrap();
    let refused = world.alloc(20, &Tag::weights()).unwrap_err();
    let PoolError::OverLimit { usage, .. } = &refused else { panic!("{refused}") };
    assert!(usage.reclaimable_bytes >= 7 * world.granule, "{refused}");
    assert!(refused.to_string().contains("end the hold"), "{refused}");
    rest.iter().for_each(|block| world.pool.free(block.id).unwrap());
    world.pool.trim().unwrap();
    assert_eq!(world.mapped_bytes(&kv), mapped_bytes);
    let held = world.pool.held().unwrap();
    assert_eq!((held.len(), &held[0].tag, held[0].holders.as_slice()), (1, &kv, &[NIXL.to_owned()][..]));
    assert_eq!(held[0].reclaimable_bytes, mapped_bytes, "all of it, and trim gives none of it");
    // Blocks of the tag find it where it is, also blocks that would cut a larger chunk.
    let held_bytes = world.pool.stats().unwrap().mapped_bytes;
    for granules in [20, 4, 2, 1] {
        let block = world.alloc(granules, &kv).unwrap();
        let held_before = |addr: u64| {
            blocks.iter().chain([&small]).any(|old| old.range.addr <= addr && addr < old.range.end())
        };
        let mut granules_of_it = (0..granules).map(|nth| block.range.addr + nth * world.granule);
        assert!(granules_of_it.all(held_before), "{granules}: {block:?}");
        world.pool.free(block.id).unwrap();
    }
    assert_eq!(world.pool.stats().unwrap().mapped_bytes, held_bytes, "for which nothing was created");
    // A chunk that it would cut stays whole, so the block lies elsewhere.
    world.pool.free(others.id).unwrap();
    world.alloc(6, &kv).unwrap();
    assert_eq!(world.unmapped_of(&kv), []);
    drop(hold);
    world.alloc(30, &Tag::weights()).unwrap();
    world.pool.trim().unwrap();
    assert!(world.mapped_bytes(&kv) < mapped_bytes, "it is as any other now");
}

/// Also memory that the driver has refused to unmap before, and that is tried again.
#[test]
fn memory_that_fails_to_unmap_in_a_held_tag_stays_there() {
    let world = World::open(None);
    let kv = Tag::kv_cache();
    let block = world.alloc(8, &kv).unwrap();
    world.alloc(1, &kv).unwrap();
    world.pool.free(block.id).unwrap();
    world.refuses.store(true, Ordering::Relaxed);
    world.pool.trim().unwrap_err();
    world.refuses.store(false, Ordering::Relaxed);
    let hold = world.pool.hold(&kv, NIXL).unwrap();
    world.pool.trim().unwrap();
    assert_eq!(world.unmapped_of(&kv), []);
    drop(hold);
    assert_eq!(world.pool.trim().unwrap(), 8 * world.granule);
}

/// Whatever happens to a pool, nothing that is mapped in a held tag is unmapped.
#[test]
fn nothing_is_unmapped_in_a_held_tag_by_chance() {
    let cases = u64::from(DeviceKind::of_this_run().cases(40));
    for seed in 0..cases {
        let world = World::open(Some(48));
        let tags = [Tag::weights(), Tag::kv_cache(), Tag::runtime()];
        let mut random = Rng::with_seed(seed);
        let mut live: Vec<Block> = Vec::new();
        let mut hold = None;
        for step in 0..150 {
            let tag = &tags[random.usize(..tags.len())];
            let held = hold.as_ref().map(|hold: &poorwill_core::Hold| hold.tag().clone());
            match random.u32(..12) {
                0..5 => {
                    let bytes = match random.bool() {
                        true => random.u64(1..12) * world.granule,
                        false => random.u64(1..4 * world.granule),
                    };
                    let mut request = AllocRequest::new(bytes, tag.clone());
                    request.is_freed_in_parts = random.bool();
                    live.extend(world.pool.alloc(&request));
                }
                5..8 if !live.is_empty() => {
                    let block = live.swap_remove(random.usize(..live.len()));
                    let unit = block.range.bytes / 512;
                    let (from, to) = (random.u64(..unit), random.u64(1..=unit));
                    if from < to {
                        let part = DeviceRange::new(block.range.addr + from * 512, (to - from) * 512);
                        live.extend(world.pool.free_part(block.id, part).unwrap());
                    } else {
                        world.pool.free(block.id).unwrap();
                    }
                }
                8 => drop(world.pool.trim().unwrap()),
                9 => {
                    let slept = world.pool.sleep(&of(std::slice::from_ref(tag)));
                    assert_eq!(slept.is_err(), held.as_ref() == Some(tag), "{slept:?}");
                    // There may be no memory left.
                    let _ = world.pool.wake(&WakeRequest::of([tag.clone()]));
                }
                10 if hold.is_none() => {
                    hold = world.pool.hold(tag, NIXL).ok();
                    world.unmapped.lock().unwrap().clear();
                }
                11 => hold = None,
                _ => {}
            }
            if let Some(hold) = &hold {
                assert_eq!(world.unmapped_of(hold.tag()), [], "seed {seed}, step {step}");
            }
        }
    }
}

/// The pool returns to its mark as soon as it can, without a call.
#[test]
fn what_a_hold_has_kept_leaves_in_the_background() {
    let world = World::open(None);
    world.pool.set_cached_max_bytes(Some(0)).unwrap();
    let kv = Tag::kv_cache();
    let block = world.alloc(8, &kv).unwrap();
    let hold = world.pool.hold(&kv, NIXL).unwrap();
    world.pool.free(block.id).unwrap();
    world.pool.trim().unwrap();
    assert_eq!(world.mapped_bytes(&kv), 8 * world.granule);
    drop(hold);
    eventually("it leaves", || world.pool.stats().unwrap().mapped_bytes == 0);
}

#[test]
fn a_pool_with_a_hold_is_not_closed() {
    let world = World::open(None);
    let mut tenant = Tenant::new(&world.pool, 1);
    tenant.load(5 * world.granule, &Tag::weights());
    let hold = world.pool.hold(&Tag::weights(), NIXL).unwrap();
    let refused = world.pool.close().unwrap_err();
    assert!(matches!(&refused, PoolError::Held { .. }), "{refused}");
    assert!(refused.to_string().contains("cannot close the pool"), "{refused}");
    tenant.load(2 * world.granule, &Tag::runtime());
    tenant.verify();
    drop(hold);
    world.pool.close().unwrap();
    assert_eq!(world.device.resident_bytes(), 0);
}

/// Dropping cannot be refused: the memory stays until the last registration ends.
#[test]
fn a_hold_outlives_its_pool() {
    for first_ends_last in [false, true] {
        let World { device, pool, unmapped, granule, .. } = World::open(None);
        let bytes = 5 * granule;
        pool.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap();
        pool.alloc(&AllocRequest::new(bytes, Tag::runtime())).unwrap();
        let mut holds = [Tag::weights(), Tag::runtime()].map(|tag| Some(pool.hold(&tag, NIXL).unwrap()));
        Arc::into_inner(pool).unwrap();
        let free_bytes = || device.memory_info().unwrap().free_bytes;
        let total_bytes = device.info().total_bytes;
        holds[usize::from(first_ends_last)] = None;
        assert!(unmapped.lock().unwrap().is_empty());
        assert_eq!(free_bytes(), total_bytes - 2 * bytes);
        let last = holds[usize::from(!first_ends_last)].take();
        // On another thread, that of the hold.
        thread::spawn(move || drop(last)).join().unwrap();
        assert_eq!(free_bytes(), total_bytes);
    }
}

/// It is awake when it is held, whatever was under way.
#[test]
fn a_hold_waits_for_a_sleep_under_way() {
    watched(|| {
        let device = TestDevice::open(64);
        let (reached_sender, reached) = mpsc::channel();
        let (reached_sender, latch) = (Mutex::new(reached_sender), Arc::new(Latch::default()));
        let pass = Arc::clone(&latch);
        let driver = ScriptedDriver::new(device.driver(), move |call| {
            if matches!(call.op, Op::Save | Op::CopyToHost) && !call.waiting {
                let _ = reached_sender.lock().unwrap().send(());
                pass.pass();
            }
            Verdict::Pass
        });
        let pool = Arc::new(Pool::new(Arc::new(driver), PoolConfig::default()).unwrap());
        let mut tenant = Tenant::new(&pool, 1);
        tenant.load(3 * tenant.granule(), &Tag::weights());
        let sleeper = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.sleep(&SleepRequest::all(Level::One)).map(drop))
        };
        reached.recv().unwrap();
        let (entered, entry) = mpsc::channel();
        let holder = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                entered.send(()).unwrap();
                pool.hold(&Tag::weights(), NIXL).map(drop)
            })
        };
        entry.recv().unwrap();
        latch.open();
        sleeper.join().unwrap().unwrap();
        let refused = holder.join().unwrap().unwrap_err();
        assert!(matches!(refused, PoolError::Asleep { .. }), "{refused}");
        pool.wake(&WakeRequest::all()).unwrap();
        tenant.verify();
    });
}
