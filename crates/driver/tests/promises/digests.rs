//! Digests of granules and of saved bytes equal `Digest::of`, whatever the bytes: on the device of this run, with
//! granules as on GPUs.

use std::sync::Arc;

use poorwill_core::digest::LEAF_BYTES;
use poorwill_core::{BackingId, CopyPart, DeviceRange, Digest, StreamId};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::{latch, pattern};

const GRANULE: usize = 2 << 20;

/// A reservation with one open mapping over all of it.
struct Mapped {
    device: TestDevice,
    range: DeviceRange,
    backing: BackingId,
}

impl Mapped {
    fn new(granules: u64) -> Self {
        let device = TestDevice::with_capacity(granules * GRANULE as u64);
        assert_eq!(device.info().granule_bytes, GRANULE as u64);
        let range = device.reserve(granules * GRANULE as u64).unwrap();
        let backing = device.create(range.bytes).unwrap();
        device.map(range, backing).unwrap();
        device.set_access(range).unwrap();
        Self { device, range, backing }
    }

    fn granule(&self, nth: usize) -> DeviceRange {
        DeviceRange::new(self.range.addr + (nth * GRANULE) as u64, GRANULE as u64)
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let device = DeviceRange::new(self.range.addr + at, bytes.len() as u64);
        let parts = [CopyPart { device, host_offset: 0 }];
        let source = latch::source(&*self.device, bytes);
        self.device.copy_to_device(StreamId::DEFAULT, source, &parts).unwrap().wait().unwrap();
    }

    fn digests(&self, ranges: &[DeviceRange]) -> Vec<Digest> {
        self.device.digest(StreamId::DEFAULT, ranges).unwrap().wait().unwrap()
    }

    fn end(self) {
        self.device.synchronize().unwrap();
        self.device.unmap(self.range).unwrap();
        self.device.release(self.backing).unwrap();
        self.device.unreserve(self.range).unwrap();
    }
}

/// Bytes on which a hash might slip: carries, zeros, repetition, and things that are only swapped.
fn adversarial() -> Vec<Vec<u8>> {
    let random = pattern::bytes(41, GRANULE);
    let mut leaves_swapped = random.clone();
    let (first, second) = leaves_swapped[..2 * LEAF_BYTES].split_at_mut(LEAF_BYTES);
    first.swap_with_slice(second);
    let mut words_swapped = random.clone();
    (0..8).for_each(|byte| words_swapped.swap(64 + byte, 72 + byte));
    let mut neighbours_swapped = random.clone();
    (0..GRANULE).step_by(16).for_each(|at| neighbours_swapped[at..at + 16].rotate_left(8));
    let leaf = pattern::bytes(42, LEAF_BYTES);
    vec![
        vec![0; GRANULE],
        vec![0xFF; GRANULE],
        [0xFF; 4].into_iter().chain([0; 4]).collect::<Vec<u8>>().repeat(GRANULE / 8),
        0x8000_0000_0000_0001_u64.to_le_bytes().repeat(GRANULE / 8),
        leaf.repeat(GRANULE / LEAF_BYTES),
        pattern::bytes(43, 1024).repeat(GRANULE / 1024),
        (0..GRANULE as u64 / 8).flat_map(u64::to_le_bytes).collect(),
        random,
        leaves_swapped,
        words_swapped,
        neighbours_swapped,
    ]
}

#[test]
fn digests_are_those_of_the_bytes_whatever_they_are() {
    let granules = adversarial();
    let mapped = Mapped::new(granules.len() as u64);
    mapped.write(0, &granules.concat());
    let expected: Vec<Digest> = granules.iter().map(|granule| Digest::of(granule)).collect();
    assert_eq!(mapped.digests(&[mapped.range]), expected);
    // As one part, and one by one and backwards.
    let whole = vec![CopyPart { device: mapped.range, host_offset: 0 }];
    let backwards = (0..granules.len()).rev().map(|nth| CopyPart {
        device: mapped.granule(nth),
        host_offset: mapped.granule(granules.len() - 1 - nth).addr - mapped.range.addr,
    });
    for (parts, is_backwards) in [(whole, false), (backwards.collect(), true)] {
        let buffer = mapped.device.host_alloc(mapped.range.bytes).unwrap();
        let save = mapped.device.save(StreamId::DEFAULT, buffer, &parts).unwrap();
        let (stored, mut digests) = save.wait().unwrap();
        let mut found: Vec<&[u8]> = stored.chunks(GRANULE).collect();
        if is_backwards {
            found.reverse();
            digests.reverse();
        }
        assert!(found.iter().zip(&granules).all(|(found, granule)| *found == granule));
        assert_eq!(digests, expected);
    }
    mapped.end();
}

#[test]
fn a_bit_shows_wherever_a_leaf_begins_or_ends() {
    let mapped = Mapped::new(1);
    let mut bytes = pattern::bytes(51, GRANULE);
    mapped.write(0, &bytes);
    let mut seen = std::collections::HashSet::from([Digest::of(&bytes)]);
    let leaves = GRANULE / LEAF_BYTES;
    for leaf in (0..leaves).step_by(9).chain([leaves - 1]) {
        for (at, bit) in [(leaf * LEAF_BYTES, 1), ((leaf + 1) * LEAF_BYTES - 1, 0x80)] {
            bytes[at] ^= bit;
            mapped.write(at as u64, &bytes[at..=at]);
            let digest = Digest::of(&bytes);
            assert_eq!(mapped.digests(&[mapped.range]), [digest], "byte {at}");
            assert!(seen.insert(digest));
        }
    }
    mapped.end();
}

#[test]
fn many_granules_are_digested_in_one_call() {
    let granules = 8;
    let mapped = Mapped::new(granules);
    let bytes = pattern::bytes(61, GRANULE * usize::try_from(granules).unwrap());
    mapped.write(0, &bytes);
    let of_each: Vec<Digest> = bytes.chunks(GRANULE).map(Digest::of).collect();
    // All of them many times over, and single ones between.
    let mut ranges = Vec::new();
    let mut expected = Vec::new();
    for round in 0..120 {
        ranges.extend([mapped.range, mapped.granule(round % 8)]);
        expected.extend(of_each.iter().copied().chain([of_each[round % 8]]));
    }
    assert_eq!(expected.len(), 1080);
    assert_eq!(mapped.digests(&ranges), expected);
    mapped.end();
}

#[test]
fn digests_in_flight_on_many_streams_do_not_mix() {
    let mapped = Mapped::new(16);
    let bytes = pattern::bytes(71, 16 * GRANULE);
    mapped.write(0, &bytes);
    let of_each: Vec<Digest> = bytes.chunks(GRANULE).map(Digest::of).collect();
    let device = mapped.device.driver();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (device, mapped, of_each) = (Arc::clone(&device), &mapped, &of_each);
            scope.spawn(move || {
                let stream = device.stream_create().unwrap();
                let mut digests = Vec::new();
                for round in 0..12 {
                    let nth = (5 * thread + round) % 16;
                    let range = mapped.granule(nth);
                    let buffer = device.host_alloc(GRANULE as u64).unwrap();
                    let parts = [CopyPart { device: range, host_offset: 0 }];
                    let save = device.save(stream, buffer, &parts).unwrap();
                    digests.push((nth, device.digest(stream, &[range]).unwrap(), save));
                }
                for (nth, digest, save) in digests {
                    assert_eq!(digest.wait().unwrap(), of_each[nth..=nth]);
                    assert_eq!(save.wait().unwrap().1, of_each[nth..=nth]);
                }
                device.stream_destroy(stream).unwrap();
            });
        }
    });
    mapped.end();
}

/// On a GPU by a kernel: otherwise these tests are about another way.
#[test]
fn digests_cost_less_than_copies() {
    assert!(TestDevice::with_capacity(GRANULE as u64).info().fast_digests);
}
