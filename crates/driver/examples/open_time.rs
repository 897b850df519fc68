//! Temporary.
#![allow(clippy::unwrap_used)]
use std::time::Instant;
fn main() {
    let t = Instant::now();
    let gpus = poorwill_driver::cuda::gpus(None);
    println!("gpus {:?} {}", t.elapsed(), gpus.is_ok());
    for _ in 0..2 {
        let t = Instant::now();
        let device = poorwill_driver::CudaDevice::open(&poorwill_driver::CudaConfig::gpu(0)).unwrap();
        println!("open {:?}", t.elapsed());
        let t = Instant::now();
        let streams: Vec<_> = (0..9).map(|_| poorwill_core::Driver::stream_create(&device).unwrap()).collect();
        println!("streams {:?} {}", t.elapsed(), streams.len());
        let t = Instant::now();
        let used = device.process_used_bytes();
        println!("used {:?} {used:?}", t.elapsed());
    }
}
