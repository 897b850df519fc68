//! The kernel that computes digests, run line by line on the CPU: its text computes `Digest::of`.

use poorwill_core::Digest;
use poorwill_core::digest::LEAF_BYTES;
use poorwill_driver::cuda::{DIGEST_LEAVES_MIN, DIGEST_PTX};
use poorwill_testkit::pattern;

use super::ptx::{Kernel, Launch, Memory};

/// The entries, and how many threads the driver gives their blocks.
const ENTRIES: [(&str, usize); 2] = [("poorwill_digest", 64), ("poorwill_digest_host", 512)];

const GRANULES: u64 = 0x7000_0000_0000;
const ARRAY: u64 = 0x1000;
const DIGESTS: u64 = 0x20_0000;

/// What the kernel makes of granules of one size.
fn digests(kernel: &Kernel, granules: &[Vec<u8>], threads: usize) -> Vec<Digest> {
    let leaves = granules[0].len() / LEAF_BYTES;
    let step = (granules[0].len() as u64).next_power_of_two();
    let places = (0..granules.len() as u64).map(|nth| GRANULES + nth * step);
    let array = places.clone().flat_map(u64::to_le_bytes).collect();
    let mut memory = Memory(vec![(ARRAY, array), (DIGESTS, vec![0xAA; 16 * granules.len()])]);
    memory.0.extend(places.zip(granules.iter().cloned()));
    let blocks = granules.len() as u64;
    for block in 0..blocks {
        let params = [ARRAY, DIGESTS, leaves as u64];
        let launch = Launch { params: &params, block, blocks, threads, shared_bytes: 16 * leaves + 16 };
        kernel.run(&mut memory, &launch);
    }
    let found =
        memory.0[1].1.chunks(16).map(|digest| Digest(u128::from_le_bytes(digest.try_into().unwrap())));
    found.collect()
}

fn kernels() -> impl Iterator<Item = (Kernel, usize)> {
    ENTRIES.into_iter().map(|(name, threads)| (Kernel::parse(DIGEST_PTX, name), threads))
}

fn check(kernel: &Kernel, granules: &[Vec<u8>], threads: usize) {
    let expected: Vec<Digest> = granules.iter().map(|granule| Digest::of(granule)).collect();
    assert!(digests(kernel, granules, threads) == expected, "{} bytes, {threads} threads", granules[0].len());
}

#[test]
fn granules_of_many_lengths() {
    // Roots that end in every place of a stripe and a block, and with more leaves than warps and fewer.
    let shortest = usize::try_from(DIGEST_LEAVES_MIN).unwrap();
    for (kernel, _) in kernels() {
        for leaves in (shortest..=70).chain([126, 127, 128, 129]) {
            let granule = pattern::bytes(leaves as u64, leaves * LEAF_BYTES);
            check(&kernel, &[granule], [128, 32, 64, 512][leaves % 4]);
        }
    }
}

#[test]
fn granules_of_2_mib() {
    for (kernel, threads) in kernels() {
        check(&kernel, &[pattern::bytes(1, 2 << 20)], threads);
    }
}

#[test]
fn bytes_that_are_hard_on_arithmetic() {
    let len = 16 * LEAF_BYTES;
    let mut granules = vec![vec![0; len], vec![0xFF; len], [0xFF, 0].repeat(len / 2), pattern::bytes(3, len)];
    for bit in [0, 7, 8 * LEAF_BYTES - 1, 8 * LEAF_BYTES, 8 * len - 1] {
        let mut flipped = vec![0; len];
        flipped[bit / 8] |= 1 << (bit % 8);
        granules.push(flipped);
    }
    for (kernel, threads) in kernels() {
        check(&kernel, &granules, threads);
    }
}
