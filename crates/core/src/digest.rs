//! The digest of a granule: 128 bits, sensitive to position, the same on every machine.
//!
//! It runs at memory speed, with one CPU thread per copy stream. It detects accidents (lost copies, stale
//! pages, swapped or torn granules, flipped bits), not attacks.
//!
//! # Version 1
//!
//! A two-level tree over XXH3-128 (Collet's xxHash, <https://github.com/Cyan4973/xxHash>):
//!
//! ```text
//! leaf[i] = XXH3_128(bytes[4096·i .. 4096·(i+1)], seed 0)            last leaf may be short
//! digest  = XXH3_128(LE128(leaf[0]) ‖ … ‖ LE128(leaf[n-1]) ‖ LE64(length), seed ROOT_SEED)
//! ```
//!
//! Leaves are independent, so a GPU computes all at once, and the root of 2 MiB from 8 KiB of leaf digests.
//! The seed separates leaves from roots. The length separates a short leaf from one padded with zeros. Any
//! change here needs a new [`DIGEST_VERSION`].

use std::fmt;

use twox_hash::XxHash3_128;

/// Stored wherever a digest outlives the process.
pub const DIGEST_VERSION: u32 = 1;

/// Bytes of a leaf.
pub const LEAF_BYTES: usize = 4096;

/// Seed of the root: ASCII `poorwil1` as a little-endian number.
pub const ROOT_SEED: u64 = u64::from_le_bytes(*b"poorwil1");

/// 128-bit digest of bytes, usually of one granule.
///
/// ```
/// use poorwill::Digest;
///
/// assert_eq!(Digest::of(&[7; 100]), Digest::of(&[7; 100]));
/// assert_ne!(Digest::of(&[7; 100]), Digest::of(&[7; 101]));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub u128);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl Digest {
    /// In version [`DIGEST_VERSION`].
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = DigestHasher::default();
        for leaf in bytes.chunks(LEAF_BYTES) {
            hasher.leaf(leaf);
        }
        hasher.finish()
    }
}

/// The same for bytes that arrive in parts.
///
/// ```
/// use poorwill::digest::{Digest, DigestHasher, LEAF_BYTES};
///
/// let bytes = vec![7; LEAF_BYTES + 100];
/// let mut hasher = DigestHasher::default();
/// hasher.update(&bytes[..LEAF_BYTES]);
/// hasher.update(&bytes[LEAF_BYTES..]);
/// assert_eq!(hasher.finish(), Digest::of(&bytes));
/// ```
pub struct DigestHasher {
    root: XxHash3_128,
    length: u64,
}

impl fmt::Debug for DigestHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DigestHasher").field("length", &self.length).finish_non_exhaustive()
    }
}

impl Default for DigestHasher {
    fn default() -> Self {
        Self { root: XxHash3_128::with_seed(ROOT_SEED), length: 0 }
    }
}

impl DigestHasher {
    /// Adds bytes: a multiple of [`LEAF_BYTES`], except in the last call.
    ///
    /// # Panics
    ///
    /// After a call that ended inside a leaf.
    pub fn update(&mut self, bytes: &[u8]) {
        for leaf in bytes.chunks(LEAF_BYTES) {
            self.leaf(leaf);
        }
    }

    /// The digest of all added bytes.
    #[must_use]
    pub fn finish(mut self) -> Digest {
        self.root.write(&self.length.to_le_bytes());
        Digest(self.root.finish_128())
    }

    fn leaf(&mut self, leaf: &[u8]) {
        assert!(self.length.is_multiple_of(LEAF_BYTES as u64), "only the last leaf may be short");
        self.root.write(&XxHash3_128::oneshot(leaf).to_le_bytes());
        self.length += leaf.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fixed linear generator: known answers must not depend on a random crate.
    fn sample(len: usize) -> Vec<u8> {
        let mut x = 0x9E37_79B9_7F4A_7C15_u64;
        (0..len)
            .map(|_| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                x.to_le_bytes()[7]
            })
            .collect()
    }

    #[test]
    fn known_answers_of_version_1() {
        assert_eq!(DIGEST_VERSION, 1, "a new version needs new answers");
        for (len, answer) in KNOWN_ANSWERS {
            assert_eq!(Digest::of(&sample(len)).to_string(), answer, "{len} bytes");
        }
    }

    /// Computed with xxHash's reference implementation in C.
    const KNOWN_ANSWERS: [(usize, &str); 6] = [
        (0, "dcbc6d0525dcd25bbb6a848477eea9ac"),
        (1, "55419f82a649b0c6ef1e2340132b9808"),
        (4096, "5653ee28387d2ca91be90e32b04fbee0"),
        (4097, "292d4d7f4b0d63a83daeb105fe33a04d"),
        (65536, "b4102f6431182495ad5cf6e46386af0a"),
        (2097152, "33a3de42ee199e725393e6891e380da1"),
    ];

    #[test]
    fn every_change_shows() {
        let original = sample(64 << 10);
        let digest = Digest::of(&original);
        let mut seen = std::collections::HashSet::from([digest]);
        for bit in (0..original.len() * 8).step_by(97) {
            let mut changed = original.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(seen.insert(Digest::of(&changed)), "bit {bit}");
        }
    }

    #[test]
    fn position_and_length_show() {
        let original = sample(16 << 10);
        let digest = Digest::of(&original);
        let mut leaves_swapped = original.clone();
        leaves_swapped.rotate_left(LEAF_BYTES);
        assert_ne!(Digest::of(&leaves_swapped), digest);
        let mut words_swapped = original.clone();
        for i in 0..8 {
            words_swapped.swap(i, 64 + i);
        }
        assert_ne!(Digest::of(&words_swapped), digest);
        let zeros = vec![0u8; 16 << 10];
        let lengths: std::collections::HashSet<_> =
            (0..zeros.len()).step_by(511).map(|n| Digest::of(&zeros[..n])).collect();
        assert_eq!(lengths.len(), zeros.len().div_ceil(511));
    }

    #[test]
    fn parts_give_the_same_digest() {
        let bytes = sample(9 * LEAF_BYTES + 17);
        for part_bytes in [LEAF_BYTES, 2 * LEAF_BYTES, 5 * LEAF_BYTES] {
            let mut hasher = DigestHasher::default();
            bytes.chunks(part_bytes).for_each(|chunk| hasher.update(chunk));
            assert_eq!(hasher.finish(), Digest::of(&bytes));
        }
    }
}
