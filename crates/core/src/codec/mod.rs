//! A lossless code for granules of weights: bf16 in seven tenths of its bytes, equal words in nothing.
//!
//! bf16 spends 8 bits on an exponent that carries 2.6. A block stores 3 bits for each: its distance below a
//! base. Rare exponents follow in full. `docs/codec.md` has the format, to the byte.
//!
//! Promises:
//! - **One encoding.** The same bytes give the same code, here and on a GPU ([`CODEC_VERSION`]).
//! - **Exact.** [`decode`] of what [`encode`] wrote gives every byte back, whatever the granule holds.
//! - **Never undefined.** [`decode`] of any other bytes gives *some* granule, without a panic. Digests tell.
//! - **Bounded.** A code is at most [`code_bytes_max`] long.
//!
//! The idea of fixed short codes for exponents with escapes is `SplitZip`'s (arXiv 2605.01708).

mod block;

pub use self::block::BLOCK_BYTES;
pub(crate) use self::block::UNIT_BYTES;
use self::block::{BlockBytes, BlockHead, Plan};

/// Stored wherever a code outlives the process.
pub const CODEC_VERSION: u32 = 1;

/// Codes are multiples of this.
const END_BYTES: usize = 16;

/// Bytes of a granule's code in which escapes can begin.
const CODE_BYTES_MAX: usize = 1 << 24;

/// Whether granules of this size can be encoded.
///
/// ```
/// use poorwill::codec;
///
/// assert!(codec::supports(2 << 20) && !codec::supports(1000));
/// ```
#[must_use]
pub fn supports(granule_bytes: u64) -> bool {
    let blocks = granule_bytes / BLOCK_BYTES as u64;
    granule_bytes.is_multiple_of(BLOCK_BYTES as u64)
        && blocks > 0
        && usize::try_from(blocks).is_ok_and(|blocks| code_bytes_max_of(blocks) <= CODE_BYTES_MAX)
}

/// The longest code of a granule, in bytes.
///
/// ```
/// use poorwill::codec;
///
/// assert_eq!(codec::code_bytes_max(4096), 128 + 4096);
/// ```
#[must_use]
pub fn code_bytes_max(granule_bytes: usize) -> usize {
    code_bytes_max_of(granule_bytes / BLOCK_BYTES)
}

fn code_bytes_max_of(blocks: usize) -> usize {
    heads_bytes(blocks) + blocks * BLOCK_BYTES
}

/// Heads are padded, so that data begins on a unit.
fn heads_bytes(blocks: usize) -> usize {
    (blocks * BlockHead::BYTES).next_multiple_of(UNIT_BYTES)
}

/// Bytes of a granule's code.
///
/// # Panics
/// Unless [`supports`] the granule's size.
///
/// ```
/// use poorwill::codec;
///
/// assert_eq!(codec::encoded_bytes(&[7; 8192]), 128);
/// ```
#[must_use]
pub fn encoded_bytes(granule: &[u8]) -> usize {
    let (data, escapes) = plans(granule)
        .fold((0, 0), |(data, escapes), plan| (data + plan.units() * UNIT_BYTES, escapes + plan.escapes()));
    (heads_bytes(granule.len() / BLOCK_BYTES) + data + escapes).next_multiple_of(END_BYTES)
}

/// Writes a granule's code to the start of `slot`, and returns its length; `None` if it does not fit.
///
/// # Panics
/// Unless [`supports`] the granule's size.
///
/// ```
/// use poorwill::codec;
///
/// let granule: Vec<u8> = (0..4096_u32).flat_map(|nth| [nth.to_le_bytes()[0], 0x3F]).collect();
/// let mut slot = vec![0; codec::code_bytes_max(granule.len())];
/// let bytes = codec::encode(&granule, &mut slot).unwrap();
/// assert!(bytes < granule.len() * 3 / 4);
/// let mut decoded = vec![0; granule.len()];
/// codec::decode(&slot[..bytes], &mut decoded);
/// assert_eq!(decoded, granule);
/// ```
pub fn encode(granule: &[u8], slot: &mut [u8]) -> Option<usize> {
    let plans: Vec<Plan> = plans(granule).collect();
    let data_bytes: usize = plans.iter().map(|plan| plan.units() * UNIT_BYTES).sum();
    let heads_bytes = heads_bytes(plans.len());
    let mut escapes_at = heads_bytes + data_bytes;
    let end = escapes_at + plans.iter().map(|plan| plan.escapes()).sum::<usize>();
    let bytes = end.next_multiple_of(END_BYTES);
    let slot = slot.get_mut(..bytes)?;
    slot[plans.len() * BlockHead::BYTES..heads_bytes].fill(0);
    slot[end..].fill(0);
    let mut data_at = heads_bytes;
    for (nth, (plan, raw)) in plans.iter().zip(granule.chunks_exact(BLOCK_BYTES)).enumerate() {
        let head = BlockHead::new(*plan, data_at / UNIT_BYTES, escapes_at);
        slot[nth * BlockHead::BYTES..][..BlockHead::BYTES].copy_from_slice(&head.to_bytes());
        let (before, escapes) = slot.split_at_mut(escapes_at);
        let data = &mut before[data_at..data_at + plan.units() * UNIT_BYTES];
        block::write(*plan, block_of(raw), data, escapes);
        data_at += plan.units() * UNIT_BYTES;
        escapes_at += plan.escapes();
    }
    Some(bytes)
}

/// Writes the granule whose code is `stored`. Blocks whose place is outside of `stored` become zeros.
///
/// # Panics
/// Unless [`supports`] the granule's size.
pub fn decode(stored: &[u8], granule: &mut [u8]) {
    assert!(supports(granule.len() as u64), "granules of {} bytes have no code", granule.len());
    for (nth, raw) in granule.chunks_exact_mut(BLOCK_BYTES).enumerate() {
        let head = stored.get(nth * BlockHead::BYTES..(nth + 1) * BlockHead::BYTES);
        let head = head.and_then(|bytes| bytes.try_into().ok()).map(BlockHead::from_bytes);
        if head.and_then(|head| block::read(head, stored, raw)).is_none() {
            raw.fill(0);
        }
    }
}

fn plans(granule: &[u8]) -> impl Iterator<Item = Plan> {
    assert!(supports(granule.len() as u64), "granules of {} bytes have no code", granule.len());
    granule.chunks_exact(BLOCK_BYTES).map(|raw| Plan::of(block_of(raw)))
}

fn block_of(raw: &[u8]) -> &BlockBytes {
    raw.try_into().unwrap_or_else(|_| unreachable!("chunks have the length of blocks"))
}

#[cfg(test)]
mod tests;
