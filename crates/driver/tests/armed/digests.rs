//! Digests by the kernel and without it: what happens where the driver refuses the kernel, or fails anywhere else.

use poorwill_core::{CopyPart, DeviceRange, Digest, Driver, HostBuffer, HostMemory, StreamId};
use poorwill_driver::CudaDevice;
use poorwill_fake_libcuda::Census;
use poorwill_testkit::{child, pattern};

use super::fake::{Fake, alone, config, mapped, open};

/// Fills the range, and gives the digests of its granules.
fn fill(device: &CudaDevice, range: DeviceRange, seed: u64) -> Vec<Digest> {
    let bytes = pattern::bytes(seed, usize::try_from(range.bytes).unwrap());
    let granule = usize::try_from(device.info().granule_bytes).unwrap();
    let digests = bytes.chunks(granule).map(Digest::of).collect();
    let parts = [CopyPart { device: range, host_offset: 0 }];
    let source = std::sync::Arc::new(HostBuffer::from(bytes));
    device.copy_to_device(StreamId::DEFAULT, source, &parts).unwrap().wait().unwrap();
    digests
}

fn expect_right_digests(device: &CudaDevice, seed: u64) {
    let range = mapped(device, 3);
    let expected = fill(device, range, seed);
    let stream = device.stream_create().unwrap();
    assert_eq!(device.digest(stream, &[range]).unwrap().wait().unwrap(), expected);
    let parts = [CopyPart { device: range, host_offset: 0 }];
    for buffer in [device.host_alloc(range.bytes).unwrap(), vec![0; range.bytes.try_into().unwrap()].into()] {
        assert_eq!(device.save(stream, buffer, &parts).unwrap().wait().unwrap().1, expected);
    }
    device.stream_destroy(stream).unwrap();
    device.unmap(range).unwrap();
    device.unreserve(range).unwrap();
}

#[test]
fn without_the_kernel_digests_are_computed_on_the_host() {
    // One that finds the PTX too new; then one after which everything is as it should be.
    if !child::in_a_child(&[("POORWILL_FAKE_CUDA_FAIL", "cuModuleLoadData:1:1:218")]) {
        return;
    }
    let refused = open(0);
    let why = refused.digest_kernel().unwrap_err();
    assert!(why.contains("does not take it") && why.contains("CUDA_ERROR_INVALID_PTX (218)"), "{why}");
    assert!(!refused.info().fast_digests);
    expect_right_digests(&refused, 1);
    let taken = open(0);
    assert_eq!(taken.digest_kernel(), Ok(()));
    assert!(taken.info().fast_digests);
    expect_right_digests(&taken, 2);
}

#[test]
fn granules_of_a_page_are_not_for_the_kernel() {
    let _turn = alone();
    let device = open(1);
    let why = device.digest_kernel().unwrap_err();
    assert!(why.contains("granules of 15 to 2048 times 4096 bytes, not for"), "{why}");
    assert!(!device.info().fast_digests);
    expect_right_digests(&device, 3);
}

/// A buffer that can be recognised as the driver's only by its address.
#[derive(Debug)]
struct Wrapped(HostBuffer);

impl HostMemory for Wrapped {
    fn as_slice(&self) -> &[u8] {
        &self.0
    }
    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[test]
fn saves_into_the_drivers_memory_need_no_thread_of_the_host() {
    let _turn = alone();
    let fake = Fake::load();
    let device = open(0);
    let range = mapped(&device, 2);
    let expected = fill(&device, range, 4);
    let parts = [CopyPart { device: range, host_offset: 0 }];
    let calls = |buffer: HostBuffer| {
        fake.arm(u64::MAX, 0);
        let save = device.save(StreamId::DEFAULT, buffer, &parts).unwrap();
        let calls = fake.disarm();
        assert_eq!(save.wait().unwrap().1, expected);
        calls
    };
    let plain = calls(vec![0; usize::try_from(range.bytes).unwrap()].into());
    let pinned = calls(device.host_alloc(range.bytes).unwrap());
    let wrapped = calls(HostBuffer::new(Wrapped(device.host_alloc(range.bytes).unwrap())));
    assert_eq!((pinned, wrapped), (plain + 1, plain + 1), "one kernel behind the copies");
}

/// What bytes pass through on a stream is page-locked, and stays so: not once more for each size that there is.
#[test]
fn a_stream_that_is_given_ever_more_page_locks_little() {
    let _turn = alone();
    let fake = Fake::load();
    let device = open(1); // Digests pass through staging there.
    let range = mapped(&device, 512);
    let expected = fill(&device, range, 6);
    let before = fake.census(1).registered_host_ranges;
    for granules in (1..=512).step_by(7) {
        let part = DeviceRange::new(range.addr, granules as u64 * device.info().granule_bytes);
        let digests = device.digest(StreamId::DEFAULT, &[part]).unwrap().wait().unwrap();
        assert_eq!(digests, expected[..granules]);
    }
    let more = fake.census(1).registered_host_ranges - before;
    assert!((1..=10).contains(&more), "{more} pieces");
}

/// Every call of the library, in turn, while a device is opened.
#[test]
fn whatever_fails_a_device_opens_whole_or_without_a_kernel() {
    let _turn = alone();
    let fake = Fake::load();
    let witness = open(0); // Keeps the context, which would take along all that was left in it.
    let before = fake.census(0);
    let (mut refused, mut without, mut whole) = (0, 0, 0);
    for nth in 0.. {
        fake.arm(nth, 1);
        let device = CudaDevice::open(&config(0));
        let calls = fake.disarm();
        match device {
            Err(_) => refused += 1,
            Ok(device) => {
                assert_eq!(device.info().fast_digests, device.digest_kernel().is_ok());
                assert_eq!(device.info().kernel_copies, device.copy_kernel().is_ok());
                if device.info().fast_digests {
                    whole += 1;
                } else {
                    without += 1;
                }
                expect_right_digests(&device, nth);
            }
        }
        let left = fake.census(0);
        // A stream that is dropped is lost when its destruction is the call that fails: one for each of the kernels that
        // are tried out.
        let streams_max = before.streams + 3;
        assert!(left.streams <= streams_max, "call {nth}: {left:?}");
        assert_eq!(Census { streams: before.streams, ..left }, before, "call {nth}");
        if nth >= calls {
            break;
        }
    }
    assert!(refused > 5 && without > 5 && whole > 0, "{refused}, {without}, {whole}");
    drop(witness);
}

/// Every call of the library, in turn, while digests are computed and granules saved.
#[test]
fn whatever_fails_digests_are_right_or_refused() {
    let _turn = alone();
    let fake = Fake::load();
    for ordinal in [0, 1] {
        let device = open(ordinal);
        let range = mapped(&device, 3);
        let expected = fill(&device, range, 5);
        let halves = [
            DeviceRange::new(range.addr, device.info().granule_bytes),
            DeviceRange::new(range.addr + device.info().granule_bytes, 2 * device.info().granule_bytes),
        ];
        let parts = halves.map(|device| CopyPart { device, host_offset: device.addr - range.addr });
        let mut failed = 0;
        for nth in 0.. {
            let buffer = device.host_alloc(range.bytes).unwrap();
            fake.arm(nth, 1);
            let digests = device.digest(StreamId::DEFAULT, &halves);
            let save = device.save(StreamId::DEFAULT, buffer, &parts);
            let digests = digests.and_then(poorwill_core::Pending::wait);
            let save = save.and_then(poorwill_core::Pending::wait);
            let calls = fake.disarm();
            failed += u32::from(digests.is_err()) + u32::from(save.is_err());
            if let Ok(digests) = digests {
                assert_eq!(digests, expected, "call {nth}");
            }
            if let Ok((_, digests)) = save {
                assert_eq!(digests, expected, "call {nth}");
            }
            if nth >= calls {
                break;
            }
        }
        assert!(failed > 4, "{failed}");
        device.synchronize().unwrap();
        let again = device.digest(StreamId::DEFAULT, &[range]).unwrap().wait().unwrap();
        assert_eq!(again, expected, "an error is not remembered");
    }
}
