//! Rules about `encoded_bytes`, `encode` and `decode`.

use std::sync::Arc;

use poorwill_core::driver::{Encoded, Scratch};
use poorwill_core::{
    CodePart, CopyPart, DeviceRange, Digest, Driver, DriverErrorKind, HostBuffer, StreamId, codec,
};

use super::{Mapped, assert_invalid, assert_not_mapped, assert_unknown, granule, kind, read, write};
use crate::{granules, latch};

/// Contents of granules, and their codes.
struct Contents(Vec<Vec<u8>>);

impl Contents {
    /// `None` where the device's granules have no code, which the driver must say.
    fn of(driver: &dyn Driver, seed: u64, count: u64) -> Option<Self> {
        let granule_bytes = granule(driver);
        if !codec::supports(granule_bytes) {
            let mapped = Mapped::new(driver, 1);
            let refused = kind(driver.encoded_bytes(StreamId::DEFAULT, &[mapped.range]));
            assert!(matches!(refused, DriverErrorKind::Unsupported { .. }), "{refused:?}");
            mapped.end();
            return None;
        }
        let blocks = usize::try_from(granule_bytes).unwrap() / codec::BLOCK_BYTES;
        let content = |nth| match nth % 4 {
            0 => granules::weights(seed + nth, blocks),
            1 => granules::mixed(seed + nth, blocks),
            2 => vec![0; blocks * codec::BLOCK_BYTES],
            _ => crate::pattern::bytes(seed + nth, blocks * codec::BLOCK_BYTES),
        };
        Some(Self((0..count).map(content).collect()))
    }

    fn write(&self, mapped: &Mapped<'_>) {
        write(mapped.driver, mapped.range, self.0.concat());
    }

    fn codes(&self) -> Vec<Vec<u8>> {
        let code = |granule: &Vec<u8>| {
            let mut slot = vec![0; codec::code_bytes_max(granule.len())];
            let bytes = codec::encode(granule, &mut slot).unwrap();
            slot.truncate(bytes);
            slot
        };
        self.0.iter().map(code).collect()
    }

    fn digests(&self) -> Vec<Digest> {
        self.0.iter().map(|granule| Digest::of(granule)).collect()
    }
}

fn nth_granule(mapped: &Mapped<'_>, nth: usize) -> u64 {
    mapped.range.addr + nth as u64 * granule(mapped.driver)
}

/// Slots for `sizes` of the granules in this order, with gaps, and bytes that hold them.
fn slots(mapped: &Mapped<'_>, order: &[usize], sizes: &[usize]) -> (Vec<CodePart>, usize) {
    let mut end = 32;
    let slot = |(nth, size): (&usize, &usize)| {
        let part = CodePart {
            granule: nth_granule(mapped, *nth),
            host_offset: end as u64,
            slot_bytes: *size as u64,
        };
        end = (end + size).next_multiple_of(16) + 48;
        part
    };
    let parts = order.iter().zip(sizes).map(slot).collect();
    (parts, end)
}

/// \[codes\]: sizes, codes and digests are those of `poorwill_core::codec`; in any memory, in any order.
pub fn codes_are_those_of_the_codec(driver: &dyn Driver) {
    let Some(contents) = Contents::of(driver, 31, 5) else { return };
    let mapped = Mapped::new(driver, 5);
    contents.write(&mapped);
    let (codes, digests) = (contents.codes(), contents.digests());
    let sizes: Vec<usize> = codes.iter().map(Vec::len).collect();
    let stream = driver.stream_create().unwrap();
    let g = granule(driver);
    let ranges = [(0, 2), (4, 1), (2, 2), (0, 0)];
    let ranges = ranges.map(|(first, count)| DeviceRange::new(mapped.range.addr + first * g, count * g));
    let measured = driver.encoded_bytes(stream, &ranges).unwrap().wait().unwrap();
    assert_eq!(measured, [0, 1, 4, 2, 3].map(|nth: usize| sizes[nth] as u64));

    let order = [3, 0, 2, 4, 1];
    for spare in [0, 16, 4096] {
        let wanted: Vec<usize> = order.iter().map(|nth| sizes[*nth] + spare).collect();
        let (parts, len) = slots(&mapped, &order, &wanted);
        let pinned = driver.host_alloc(len as u64).unwrap();
        for mut buffer in [pinned, vec![0; len].into()] {
            buffer.fill(0xEE);
            let (stored, encoded) = driver.encode(stream, buffer, &parts).unwrap().wait().unwrap();
            let mut expected = vec![0xEE; len];
            for (part, nth) in parts.iter().zip(order) {
                let at = usize::try_from(part.host_offset).unwrap();
                expected[at..at + sizes[nth]].copy_from_slice(&codes[nth]);
            }
            assert!(*stored == *expected, "with {spare} bytes to spare");
            let of = |nth: usize| Some(Encoded { bytes: sizes[nth] as u64, digest: digests[nth] });
            assert_eq!(encoded, order.map(of));
        }
    }
    driver.stream_destroy(stream).unwrap();
    mapped.end();
}

/// \[codes\]: a code that does not fit is not stored, and its neighbours are.
pub fn codes_that_do_not_fit_are_left_out(driver: &dyn Driver) {
    let Some(contents) = Contents::of(driver, 41, 4) else { return };
    let mapped = Mapped::new(driver, 4);
    contents.write(&mapped);
    let (codes, digests) = (contents.codes(), contents.digests());
    // Noise between weights and zeros.
    let order = [0, 3, 2];
    for short in [codes[3].len() - 16, 128, 0] {
        let (parts, len) = slots(&mapped, &order, &[codes[0].len(), short, codes[2].len()]);
        let mut buffer = driver.host_alloc(len as u64).unwrap();
        buffer.fill(0xEE);
        let (stored, encoded) = driver.encode(StreamId::DEFAULT, buffer, &parts).unwrap().wait().unwrap();
        let of = |nth: usize| Some(Encoded { bytes: codes[nth].len() as u64, digest: digests[nth] });
        assert_eq!(encoded, [of(0), None, of(2)], "{short} bytes");
        for nth in [0, 2] {
            let at = usize::try_from(parts[nth].host_offset).unwrap(); // The same place in `order`.
            assert!(stored[at..at + codes[nth].len()] == codes[nth]);
        }
    }
    mapped.end();
}

/// \[codes\]: decoding brings every byte back, from any memory, on any stream, with scratch memory and without.
pub fn decoding_brings_every_byte_back(driver: &dyn Driver) {
    let Some(contents) = Contents::of(driver, 51, 5) else { return };
    let (mapped, scratch) = (Mapped::new(driver, 5), Mapped::new(driver, 6));
    let (codes, digests) = (contents.codes(), contents.digests());
    let order = [4, 1, 3, 0, 2];
    let sizes: Vec<usize> = order.iter().map(|nth| codes[*nth].len()).collect();
    let (parts, len) = slots(&mapped, &order, &sizes);
    let mut bytes = vec![0xEE; len];
    for (part, nth) in parts.iter().zip(order) {
        bytes[usize::try_from(part.host_offset).unwrap()..][..codes[nth].len()].copy_from_slice(&codes[nth]);
    }
    let sources: [Arc<HostBuffer>; 2] = [latch::source(driver, &bytes), Arc::new(bytes.into())];
    let copies = driver.stream_create().unwrap();
    let links: Vec<StreamId> =
        (0..driver.info().links).map(|link| driver.stream_create_over_link(link).unwrap()).collect();
    let small = DeviceRange::new(scratch.range.addr, granule(driver));
    let streams = [driver.stream_create().unwrap(), driver.stream_create_kernel_copies().unwrap()];
    for stream in streams {
        let of = |range, copies| Some(Scratch { range, copies });
        let link = links.first().and_then(|link| of(scratch.range, *link));
        for via in [None, of(scratch.range, copies), of(small, copies), of(scratch.range, stream), link] {
            for source in &sources {
                driver.zero(stream, mapped.range).unwrap().wait().unwrap();
                let decoded = driver.decode(stream, Arc::clone(source), &parts, via).unwrap();
                assert_eq!(decoded.wait().unwrap(), order.map(|nth| digests[nth]));
                assert_eq!(Arc::strong_count(source), 1, "the buffer is free after the wait");
                assert!(read(driver, mapped.range) == contents.0.concat(), "{via:?}");
            }
        }
    }
    assert_eq!(driver.decode(streams[0], Arc::clone(&sources[0]), &[], None).unwrap().wait().unwrap(), []);
    streams
        .into_iter()
        .chain([copies])
        .chain(links)
        .for_each(|stream| driver.stream_destroy(stream).unwrap());
    mapped.end();
    scratch.end();
}

/// \[codes\]: any bytes decode, as on the host, and the digest is of what was written.
pub fn spoiled_codes_decode_to_something(driver: &dyn Driver) {
    let Some(contents) = Contents::of(driver, 61, 2) else { return };
    let mapped = Mapped::new(driver, 2);
    let code = &contents.codes()[1];
    let len = usize::try_from(granule(driver)).unwrap();
    for (at, bits) in
        [(0, 0xFF), (3, 0x03), (6, 0xFF), (128, 0x10), (code.len() / 2, 0x80), (code.len() - 1, 0x40)]
    {
        let mut spoiled = code.clone();
        spoiled[at] ^= bits;
        let mut expected = vec![0; len];
        codec::decode(&spoiled, &mut expected);
        let part =
            CodePart { granule: nth_granule(&mapped, 0), host_offset: 0, slot_bytes: code.len() as u64 };
        let source = latch::source(driver, &spoiled);
        let digests = driver.decode(StreamId::DEFAULT, source, &[part], None).unwrap().wait().unwrap();
        assert_eq!(digests, [Digest::of(&expected)], "bits {bits:#x} of byte {at}");
        assert!(read(driver, DeviceRange::new(mapped.range.addr, granule(driver))) == expected);
    }
    mapped.end();
}

/// \[codes\], \[order\]: codes are made and decoded in the order of their stream.
pub fn codes_keep_the_order_of_their_stream(driver: &dyn Driver) {
    let Some(contents) = Contents::of(driver, 71, 4) else { return };
    let mapped = Mapped::new(driver, 1);
    let scratch = Mapped::new(driver, 2);
    let [stream, copies] = [(); 2].map(|()| driver.stream_create().unwrap());
    let via = Some(Scratch { range: scratch.range, copies });
    let whole = [CopyPart { device: mapped.range, host_offset: 0 }];
    let (codes, digests) = (contents.codes(), contents.digests());
    let slot = CodePart {
        granule: mapped.range.addr,
        host_offset: 0,
        slot_bytes: codec::code_bytes_max(contents.0[0].len()) as u64,
    };
    let mut pending = Vec::new();
    for (content, code) in contents.0.iter().zip(&codes) {
        drop(driver.copy_to_device(stream, latch::source(driver, content), &whole).unwrap());
        let buffer = driver.host_alloc(slot.slot_bytes).unwrap();
        let encoded = driver.encode(stream, buffer, &[slot]).unwrap();
        drop(driver.zero(stream, mapped.range).unwrap());
        let part = CodePart { slot_bytes: code.len() as u64, ..slot };
        let decoded = driver.decode(stream, latch::source(driver, code), &[part], via).unwrap();
        let found = driver.digest(stream, &[mapped.range]).unwrap();
        pending.push((encoded, decoded, found));
    }
    for (nth, (encoded, decoded, found)) in pending.into_iter().enumerate() {
        let (stored, encoded) = encoded.wait().unwrap();
        assert_eq!(encoded, [Some(Encoded { bytes: codes[nth].len() as u64, digest: digests[nth] })]);
        assert!(stored[..codes[nth].len()] == codes[nth]);
        assert_eq!(
            (decoded.wait().unwrap(), found.wait().unwrap()),
            (vec![digests[nth]], vec![digests[nth]])
        );
    }
    [stream, copies].into_iter().for_each(|stream| driver.stream_destroy(stream).unwrap());
    mapped.end();
    scratch.end();
}

/// \[codes\], \[validate\], \[ranges\]
pub fn codes_check_their_ranges(driver: &dyn Driver) {
    let Some(contents) = Contents::of(driver, 81, 2) else { return };
    let g = granule(driver);
    let (mapped, gone) = (Mapped::new(driver, 2), Mapped::new(driver, 1));
    contents.write(&mapped);
    driver.unmap(gone.range).unwrap();
    let part = |granule, host_offset, slot_bytes| CodePart { granule, host_offset, slot_bytes };
    let inside = part(mapped.range.addr, 0, g);
    let destroyed = driver.stream_create().unwrap();
    driver.stream_destroy(destroyed).unwrap();
    let buffer = || driver.host_alloc(2 * g).unwrap();
    let encode = |stream, parts: &[CodePart]| driver.encode(stream, buffer(), parts);
    let decode =
        |stream, parts: &[CodePart], scratch| driver.decode(stream, Arc::new(buffer()), parts, scratch);
    let at = StreamId::DEFAULT;
    for wrong in [
        &[part(mapped.range.addr + 16, 0, g)][..],
        &[part(mapped.range.addr, 8, g)],
        &[part(mapped.range.addr, g + 16, g)],
        &[part(mapped.range.addr, u64::MAX - 15, 32)],
        &[inside, part(mapped.range.addr + g, g - 16, 32)],
    ] {
        assert_invalid(encode(at, wrong));
        assert_invalid(decode(at, wrong, None));
    }
    for unmapped in [gone.range.addr, mapped.range.end()] {
        assert_not_mapped(encode(at, &[part(unmapped, 0, g)]));
        assert_not_mapped(decode(at, &[part(unmapped, 0, g)], None));
    }
    let via = |range, copies| Some(Scratch { range, copies });
    if driver.info().fast_codec {
        assert_not_mapped(decode(at, &[inside], via(gone.range, at)));
        assert_unknown(decode(at, &[inside], via(mapped.range, destroyed)));
    }
    assert_not_mapped(driver.encoded_bytes(at, &[gone.range]));
    assert_invalid(driver.encoded_bytes(at, &[DeviceRange::new(mapped.range.addr + 1, g)]));
    assert_unknown(encode(destroyed, &[inside]));
    assert_unknown(decode(destroyed, &[inside], None));
    assert_unknown(driver.encoded_bytes(destroyed, &[mapped.range]));
    driver.synchronize().unwrap();
    assert!(read(driver, mapped.range) == contents.0.concat(), "a refused call changed something");
    driver.map(gone.range, gone.backing).unwrap();
    mapped.end();
    gone.end();
}
