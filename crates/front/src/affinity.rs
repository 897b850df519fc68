//! What draws a request to one of several places that may answer it.
//!
//! Promise: all processes of one version agree upon the numbers, so that routers need not speak to each other.

/// What draws a request to one of several places.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Affinity {
    /// Requests with the same key have a long beginning in common, which a place keeps for a while.
    pub key: Option<u64>,
    /// The [`hash`] of the URL of the place that made what this request goes on from.
    pub place: Option<u64>,
}

/// By words of eight bytes, as in Firefox's hash, and with a last step that spreads it over all bits.
///
/// ```
/// use poorwill_front::affinity::hash;
///
/// assert_ne!(hash(b"gpu-1"), hash(b"gpu-2"));
/// ```
#[must_use]
pub fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, word: &[u8]| {
        let mut bytes = [0; 8];
        bytes[..word.len()].copy_from_slice(word);
        (hash.rotate_left(5) ^ u64::from_le_bytes(bytes)).wrapping_mul(0x517c_c1b7_2722_0a95)
    };
    let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    spread(bytes.chunks(8).fold(length, step))
}

/// A number of two, in their order.
///
/// ```
/// use poorwill_front::affinity::pair;
///
/// assert_ne!(pair(1, 2), pair(2, 1));
/// ```
#[must_use]
pub const fn pair(one: u64, other: u64) -> u64 {
    spread(one.wrapping_add(spread(other).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// The last step of MurmurHash3: each bit depends on all.
const fn spread(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    bits = (bits ^ (bits >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    bits ^ (bits >> 33)
}
