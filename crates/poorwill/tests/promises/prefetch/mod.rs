//! Layers from host memory: the order of copies and computation, what the measurement finds, and that no
//! failure leaves anything allocated.

mod careless;
mod faults;
mod measuring;
mod order;

use std::sync::Arc;

use poorwill::{Arena, Digest, Driver, HostBuffer, PoolConfig};
use poorwill_testkit::latch::source;

fn arena(driver: Arc<dyn Driver>) -> Arena {
    Arena::over(driver, PoolConfig::default().in_chunks_of(4)).unwrap()
}

/// A layer of so many granules in memory of the driver, and its digests.
fn layer(driver: &dyn Driver, number: usize, granules: u64) -> (Arc<HostBuffer>, Vec<Digest>) {
    let granule_bytes = usize::try_from(driver.info().granule_bytes).unwrap();
    let bytes = granule_bytes * usize::try_from(granules).unwrap();
    let bytes: Vec<u8> =
        (0..bytes).map(|at| u8::try_from((at ^ (at >> 8) ^ (97 * number + 1)) & 0xff).unwrap()).collect();
    (source(driver, &bytes), bytes.chunks(granule_bytes).map(Digest::of).collect())
}
