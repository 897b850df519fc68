//! Contents of granules for codes: weights, and blocks of every kind.

use poorwill_core::codec::BLOCK_BYTES;

/// Normally distributed bf16 of the scale of a layer, `blocks` of them.
#[must_use]
pub fn weights(seed: u64, blocks: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut value = || {
        // The sum of twelve uniform values.
        let sum: f32 = (0..12).map(|_| random.f32()).sum();
        let [_, _, third, fourth] = ((sum - 6.0) * 0.02).to_le_bytes();
        [third, fourth]
    };
    (0..blocks * BLOCK_BYTES / 2).flat_map(|_| value()).collect()
}

/// Weights, equal words, noise, and weights with ever more noise among them.
#[must_use]
pub fn mixed(seed: u64, blocks: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut granule = Vec::with_capacity(blocks * BLOCK_BYTES);
    for nth in 0..blocks {
        let mut block = weights(random.u64(..), 1);
        match (seed + nth as u64) % 7 {
            0 => block.fill(random.u8(..2)),
            1 => {
                let word = random.u32(..).to_le_bytes();
                block.chunks_exact_mut(4).for_each(|to| to.copy_from_slice(&word));
            }
            2 => random.fill(&mut block),
            // Exponents of any size, among a sixteenth to all of the values.
            3 | 4 => {
                let every = 1 << random.usize(..5);
                block.chunks_exact_mut(2).step_by(every).for_each(|value| value[1] = random.u8(..));
            }
            // One byte that differs.
            5 => {
                block.fill(7);
                block[random.usize(..BLOCK_BYTES)] = 8;
            }
            _ => {}
        }
        granule.append(&mut block);
    }
    granule
}
