//! The order of work in a pass.

use std::num::NonZeroUsize;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use poorwill::offload::{Prefetcher, Slots};
use poorwill::{Arena, Digest, Driver, HostBuffer, Pending, PoolError, Tag, chain};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::watchdog::{TEST_TIMEOUT, watched};

use super::careless::{Careless, Fault, Held};
use super::{arena, layer};

/// How long a forbidden event is awaited. A shorter time detects less, and never fails a correct pass.
const A_WHILE: Duration = Duration::from_millis(150);

fn slots(arena: &Arena, count: usize, granules: u64) -> Slots {
    let bytes = granules * arena.driver().info().granule_bytes;
    Slots::new(Tag::weights(), NonZeroUsize::new(count).unwrap(), bytes)
}

/// Computes each layer several times in one pass. Returns the layers with wrong digests.
fn wrong_layers(
    prefetcher: &mut Prefetcher<'_>,
    arena: &Arena,
    layers: &[(Arc<HostBuffer>, Vec<Digest>)],
) -> Vec<usize> {
    let memory: Vec<_> = layers.iter().map(|(memory, _)| Arc::clone(memory)).collect();
    let mut pending = Vec::new();
    prefetcher
        .forward(&memory, &mut |turn| {
            pending.push((turn.layer, arena.driver().digest(turn.stream, &[turn.range; 3])?));
            Ok(())
        })
        .unwrap();
    assert_eq!(pending.len(), layers.len(), "each layer is computed once");
    let is_wrong = |(layer, digests): (usize, Pending<Vec<Digest>>)| {
        (digests.wait().unwrap() != layers[layer].1.repeat(3)).then_some(layer)
    };
    pending.into_iter().filter_map(is_wrong).collect()
}

#[test]
fn each_layer_is_computed_of_its_own_bytes_at_addresses_that_stay() {
    let device = TestDevice::open(64);
    let arena = arena(device.driver());
    for (slot_count, layer_count) in [(1, 4), (2, 1), (2, 7), (3, 3), (3, 9), (4, 2), (8, 20)] {
        let layers: Vec<_> =
            (0..layer_count).map(|number| layer(&*device, number, 1 + number as u64 % 3)).collect();
        let mut prefetcher = Prefetcher::new(&arena, &slots(&arena, slot_count, 3)).unwrap();
        let before = prefetcher.slots().to_vec();
        assert_eq!(before.len(), slot_count);
        for _ in 0..3 {
            assert_eq!(wrong_layers(&mut prefetcher, &arena, &layers), [0; 0], "{slot_count} {layer_count}");
        }
        assert_eq!(prefetcher.slots(), before);
        prefetcher.close().unwrap();
        arena.trim().unwrap();
        assert_eq!(arena.stats().unwrap().live_bytes, 0);
        assert_eq!(device.memory_info().unwrap().free_bytes, device.info().total_bytes);
    }
    let mut none = Prefetcher::new(&arena, &slots(&arena, 2, 1)).unwrap();
    none.forward(&[], &mut |_| panic!("there is no layer")).unwrap();
}

#[test]
fn prefetchers_that_are_gone_are_forgotten() {
    let device = TestDevice::open(16);
    let arena = arena(device.driver());
    for _ in 0..device.kind().cases(400) {
        Prefetcher::new(&arena, &slots(&arena, 2, 1)).unwrap();
        let remembered = arena.pool().remembered().unwrap();
        assert!(remembered.stream_lists < 150 && remembered.clocks < 150, "{remembered:?}");
    }
}

#[test]
fn layers_that_do_not_fit_are_refused_before_anything_is_queued() {
    let device = TestDevice::open(16);
    let arena = arena(device.driver());
    let mut prefetcher = Prefetcher::new(&arena, &slots(&arena, 2, 2)).unwrap();
    let small = layer(&*device, 0, 1).0;
    for wrong in [layer(&*device, 1, 3).0, Arc::new(Vec::new().into())] {
        let layers = [Arc::clone(&small), wrong];
        let refused = prefetcher.forward(&layers, &mut |_| panic!("nothing is queued")).unwrap_err();
        assert!(matches!(refused, PoolError::Driver { op: "copy a layer", .. }), "{refused}");
        assert!(chain(&refused).contains("layer 1 has"), "{refused}");
    }
    assert_eq!(wrong_layers(&mut prefetcher, &arena, &[layer(&*device, 0, 2)]), [0; 0]);
}

#[test]
fn what_computing_is_refused_ends_the_pass_and_not_the_prefetcher() {
    let device = TestDevice::open(16);
    let arena = arena(device.driver());
    let mut prefetcher = Prefetcher::new(&arena, &slots(&arena, 2, 2)).unwrap();
    let layers: Vec<_> = (0..5).map(|number| layer(&*device, number, 2)).collect();
    let memory: Vec<_> = layers.iter().map(|(memory, _)| Arc::clone(memory)).collect();
    for refused in 0..5 {
        let outcome = prefetcher.forward(&memory, &mut |turn| {
            let bytes = if turn.layer == refused { 1 } else { turn.range.bytes };
            let range = turn.range.slice(0, bytes).unwrap();
            arena.driver().digest(turn.stream, &[range]).map(drop)
        });
        assert!(matches!(outcome, Err(PoolError::Driver { op: "compute a layer", .. })), "{outcome:?}");
        assert_eq!(wrong_layers(&mut prefetcher, &arena, &layers), [0; 0]);
    }
}

/// A pass of six layers through two slots, with one stream held. Waits a while for the forbidden event.
/// Returns whether it happened, and the wrong layers.
fn held_pass(fault: Fault, held: Held) -> (bool, Vec<usize>) {
    const LAYERS: usize = 6;
    let device = TestDevice::open(32);
    let careless = Careless::new(device.driver(), fault, held);
    let arena = arena(Arc::clone(&careless) as Arc<dyn Driver>);
    let layers: Vec<_> = (0..LAYERS).map(|number| layer(&*device, number, 2)).collect();
    let memory: Vec<_> = layers.iter().map(|(memory, _)| Arc::clone(memory)).collect();
    let mut prefetcher = Prefetcher::new(&arena, &slots(&arena, 2, 2)).unwrap();
    // The previous contents are no layer.
    for slot in prefetcher.slots() {
        device.zero(poorwill::StreamId::DEFAULT, slot.range).unwrap().wait().unwrap();
    }
    let timeout = if fault == Fault::None { A_WHILE } else { TEST_TIMEOUT / 2 };
    let (notify, queued) = mpsc::channel::<Vec<Pending<Vec<Digest>>>>();
    let (answer, answered) = mpsc::channel();
    let watching = Arc::clone(&careless);
    let watcher = thread::spawn(move || {
        // All of the pass is queued.
        let pending = queued.recv().unwrap();
        let (ended, end) = mpsc::channel();
        let watched = Arc::clone(&watching);
        let waiter = thread::spawn(move || {
            let mut digests = Vec::new();
            for (layer, pending) in pending.into_iter().enumerate() {
                digests.push(pending.wait().unwrap());
                if held == Held::BeforeCopy(layer) {
                    let _ = ended.send(());
                }
                if matches!(held, Held::BeforeDigest(held) if layer + 1 == held) {
                    // The slot's next copy.
                    while !watched.has_copied(layer + 3) {
                        thread::sleep(Duration::from_micros(200));
                    }
                    let _ = ended.send(());
                }
            }
            digests
        });
        let has_happened = end.recv_timeout(timeout).is_ok();
        watching.latch.open();
        let _ = answer.send((has_happened, waiter.join().unwrap()));
    });
    let mut pending = Vec::new();
    prefetcher
        .forward(&memory, &mut |turn| {
            pending.push(careless.digest(turn.stream, &[turn.range])?);
            if turn.layer + 1 == LAYERS {
                notify.send(std::mem::take(&mut pending)).unwrap();
            }
            Ok(())
        })
        .unwrap();
    let (has_happened, digests) = answered.recv().unwrap();
    watcher.join().unwrap();
    prefetcher.close().unwrap();
    let wrong = (0..LAYERS).filter(|layer| digests[*layer] != layers[*layer].1).collect();
    (has_happened, wrong)
}

#[test]
fn copies_are_queued_as_soon_as_what_they_wait_for() {
    let device = TestDevice::open(64);
    for (slot_count, layer_count) in [(1, 4), (2, 7), (3, 9), (4, 2)] {
        let careless = Careless::new(device.driver(), Fault::None, Held::Nothing);
        let arena = arena(Arc::clone(&careless) as Arc<dyn Driver>);
        let layers: Vec<_> = (0..layer_count).map(|number| layer(&*device, number, 2)).collect();
        let memory: Vec<_> = layers.iter().map(|(memory, _)| Arc::clone(memory)).collect();
        let mut prefetcher = Prefetcher::new(&arena, &slots(&arena, slot_count, 2)).unwrap();
        let mut queued = Vec::new();
        let count = |_| {
            queued.push(careless.copies());
            Ok(())
        };
        prefetcher.forward(&memory, &mut { count }).unwrap();
        // When a layer is computed, all copies are queued except those that wait for it or for later ones.
        let expected: Vec<_> = (0..layer_count).map(|layer| layer_count.min(layer + slot_count)).collect();
        assert_eq!(queued, expected, "{slot_count} {layer_count}");
    }
}

#[test]
fn computing_waits_for_the_copy_and_would_be_wrong_if_it_did_not() {
    watched(|| {
        for layer in [0, 1, 3] {
            let held = Held::BeforeCopy(layer);
            assert_eq!(held_pass(Fault::None, held), (false, vec![]), "{layer}");
            assert_eq!(held_pass(Fault::DigestAtOnce(layer), held), (true, vec![layer]), "{layer}");
        }
    });
}

#[test]
fn a_slot_is_not_overwritten_while_it_is_computed_and_would_be_without_a_wait() {
    watched(|| {
        for layer in [1, 2, 3] {
            let held = Held::BeforeDigest(layer);
            assert_eq!(held_pass(Fault::None, held), (false, vec![]), "{layer}");
            assert_eq!(held_pass(Fault::CopyAtOnce(layer + 2), held), (true, vec![layer]), "{layer}");
        }
    });
}
