//! Memory of another GPU, which this one maps without a context there.
//!
//! Needs two devices: the fake library has them, and a machine with two GPUs that reach each other.

use std::os::fd::AsFd;
use std::sync::Arc;

use poorwill_core::driver::MovePart;
use poorwill_core::peer::PeerMemory;
use poorwill_core::{CopyPart, DeviceRange, Driver, DriverErrorKind, StreamId};
use poorwill_driver::CudaDevice;
use poorwill_driver::cuda::{GpuInfo, gpus};
use poorwill_driver::link::Scratch;
use poorwill_testkit::device::{DeviceKind, cuda_config, cuda_library, skipped_unless};
use poorwill_testkit::latch::source;
use poorwill_testkit::pattern;

use crate::turn;

fn memory_of(gpu: &GpuInfo) -> u64 {
    let device = CudaDevice::open(&cuda_config().numbered(gpu.ordinal)).unwrap();
    device.memory_info().unwrap().free_bytes
}

#[test]
fn another_gpus_memory_is_taken_there_and_mapped_here() {
    let _turn = turn();
    let device = CudaDevice::open(&cuda_config()).unwrap();
    let peers = device.peer_memories();
    if skipped_unless(|_| !peers.is_empty(), "it has one GPU, or none whose memory it reaches") {
        return;
    }
    let (peer, bytes) = (&peers[0], device.info().granule_bytes * 2);
    let known = gpus(cuda_library().as_deref()).unwrap().into_iter().map(Result::unwrap);
    let other = known.into_iter().find(|gpu| peer.memory_name() == format!("GPU-{}", gpu.uuid)).unwrap();
    let (own_bytes, other_bytes) = (device.memory_info().unwrap().free_bytes, memory_of(&other));

    let descriptor = peer.create(bytes).unwrap();
    let mut mapped = Scratch::reserve(&device, bytes).unwrap();
    mapped.map_backings(&[bytes]).unwrap();
    let own = mapped.range().addr;
    let range = device.reserve(bytes).unwrap();
    let backing = device.import(descriptor.as_fd(), bytes).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    if matches!(DeviceKind::of_this_run(), DeviceKind::Cuda(_)) {
        assert!(own_bytes - device.memory_info().unwrap().free_bytes < bytes + (64 << 20));
        assert!(memory_of(&other) <= other_bytes - bytes);
    }
    let copied = |to, from| {
        let part = MovePart { to: DeviceRange::new(to, bytes), from };
        device.copy_within(StreamId::DEFAULT, &[part]).unwrap().wait().unwrap();
    };
    let digests = |at| {
        let range = DeviceRange::new(at, bytes);
        device.digest(StreamId::DEFAULT, &[range]).unwrap().wait().unwrap()
    };
    let sample = pattern::bytes(7, usize::try_from(bytes).unwrap());
    let sample = source(&device, &sample);
    let part = CopyPart { device: DeviceRange::new(own, bytes), host_offset: 0 };
    device.copy_to_device(StreamId::DEFAULT, Arc::clone(&sample), &[part]).unwrap().wait().unwrap();
    let expected = digests(own);
    copied(range.addr, own);
    device.zero(StreamId::DEFAULT, DeviceRange::new(own, bytes)).unwrap().wait().unwrap();
    copied(own, range.addr);
    assert_eq!(digests(own), expected);

    device.unmap(range).unwrap();
    device.release(backing).unwrap();
    device.unreserve(range).unwrap();
    drop(descriptor);
    mapped.unmap_all().unwrap();
}

#[test]
fn what_is_no_other_gpu_is_refused_by_name() {
    let _turn = turn();
    let device = CudaDevice::open(&cuda_config()).unwrap();
    let own = device.gpu().ordinal;
    for (number, word) in [(own, "leave it out"), (99, "there is no GPU 99")] {
        let refused = device.peer_memory(number).unwrap_err();
        assert!(matches!(refused.kind, DriverErrorKind::InvalidArgument { .. }), "{refused}");
        assert!(refused.to_string().contains(word), "{refused}");
    }
    assert!(
        device
            .peer_memories()
            .iter()
            .all(|peer| Some(peer.memory_name()) != device.info().memory_name.as_deref())
    );
}
