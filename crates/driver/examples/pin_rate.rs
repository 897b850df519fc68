//! How fast a GPU's host memory is made, in JSON: `pin_rate [GIB] [CHUNK_MIB] [never]`.
//!
//! Asks for so many GiB (8) in buffers of so many MiB (32) on `cuda:0`, waits for them in their order, drops them,
//! asks again, and gives all of it back; with `never`, nothing is page-locked.
#![allow(clippy::unwrap_used)]
#![forbid(unsafe_code)]

use std::env;
use std::time::Instant;

use poorwill_core::{Driver, HostBuffer};
use poorwill_driver::{CudaConfig, CudaDevice, HostMemoryConfig, Pin};
use serde::Serialize;

#[derive(Serialize)]
struct Report {
    asked_bytes: u64,
    buffers: usize,
    held_bytes: u64,
    pinned_bytes: u64,
    /// Until the call returned, the first buffer was there, and the last.
    call_s: f64,
    first_s: f64,
    all_s: f64,
    gib_per_s: f64,
    /// The same again, from what was kept.
    again_s: f64,
    trim_s: f64,
    held_after_trim_bytes: u64,
    details: poorwill_driver::HostMemoryDetails,
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let number = |nth: usize, default: u64| {
        arguments
            .get(nth)
            .map_or(default, |text| text.parse().expect("usage: pin_rate [GIB] [CHUNK_MIB] [never]"))
    };
    let (total, chunk) = (number(0, 8) << 30, number(1, 32) << 20);
    let pin = if arguments.iter().any(|word| word == "never") { Pin::Never } else { Pin::Auto };
    let host_memory = HostMemoryConfig { limit_bytes: None, pin };
    // Where tests name a library, that one.
    let library = env::var_os("POORWILL_FAKE_LIBCUDA").map(Into::into);
    let device = CudaDevice::open(&CudaConfig { ordinal: 0, library, host_memory }).unwrap();
    let sizes = vec![chunk; usize::try_from(total.div_ceil(chunk)).unwrap()];

    let start = Instant::now();
    let pending = device.host_alloc_all(&sizes).unwrap();
    let call_s = start.elapsed().as_secs_f64();
    let mut first_s = 0.0;
    let mut buffers: Vec<HostBuffer> = Vec::new();
    for one in pending {
        buffers.push(one.wait().unwrap());
        if buffers.len() == 1 {
            first_s = start.elapsed().as_secs_f64();
        }
    }
    let all_s = start.elapsed().as_secs_f64();
    let (info, details) = (device.host_memory(), device.host_memory_details());
    buffers.clear();
    let start = Instant::now();
    let again: Vec<HostBuffer> =
        device.host_alloc_all(&sizes).unwrap().into_iter().map(|one| one.wait().unwrap()).collect();
    let again_s = start.elapsed().as_secs_f64();
    drop(again);
    let start = Instant::now();
    device.host_trim().unwrap();
    let trim_s = start.elapsed().as_secs_f64();
    let asked_bytes: u64 = sizes.iter().sum();
    #[allow(clippy::cast_precision_loss)] // A rate.
    let gib_per_s = asked_bytes as f64 / f64::from(1 << 30) / all_s;
    let report = Report {
        asked_bytes,
        buffers: sizes.len(),
        held_bytes: info.held_bytes,
        pinned_bytes: info.pinned_bytes,
        call_s,
        first_s,
        all_s,
        gib_per_s,
        again_s,
        trim_s,
        held_after_trim_bytes: device.host_memory().held_bytes,
        details,
    };
    println!("{}", serde_json::to_string_pretty(&report).unwrap());
}
