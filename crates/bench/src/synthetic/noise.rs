//! Bytes like weights: the words of a [`pattern`], masked to finite numbers of a plausible size.

use crate::pattern::{self, Key};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Distribution {
    /// BF16 of either sign, 2^-7 to 2^-3.
    Bf16Weight,
    /// BF16 around 1.
    Bf16Norm,
    /// F32 of either sign, 2^-7 to 2^-3.
    F32Weight,
    /// Positive F32, 2^-15 to 2^-11.
    F32Scale,
    /// `F8_E4M3`, any but the NaNs.
    F8Weight,
}

/// `offset` begins a window of the pattern.
pub(super) fn fill(buf: &mut [u8], distribution: Distribution, key: Key, offset: u64) {
    let (kept, set) = match distribution {
        Distribution::Bf16Weight => (0x81ff_81ff_81ff_81ff, 0x3c00_3c00_3c00_3c00),
        Distribution::Bf16Norm => (0x00ff_00ff_00ff_00ff, 0x3f00_3f00_3f00_3f00),
        Distribution::F32Weight => (0x81ff_ffff_81ff_ffff, 0x3c00_0000_3c00_0000),
        Distribution::F32Scale => (0x01ff_ffff_01ff_ffff, 0x3800_0000_3800_0000),
        Distribution::F8Weight => return fill_with(buf, key, offset, without_f8_nans),
    };
    fill_with(buf, key, offset, |word| (word & kept) | set);
}

#[inline]
fn fill_with(buf: &mut [u8], key: Key, offset: u64, adjust: impl Fn(u64) -> u64) {
    pattern::write(key, offset, buf);
    let (words, rest) = buf.as_chunks_mut::<8>();
    for word in words {
        *word = adjust(u64::from_le_bytes(*word)).to_le_bytes();
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    rest.copy_from_slice(&adjust(u64::from_le_bytes(last)).to_le_bytes()[..rest.len()]);
}

/// Clears the lowest bit of each byte whose lower seven are set: 0x7F and 0xFF are the NaNs of `F8_E4M3`.
fn without_f8_nans(word: u64) -> u64 {
    let carries = (word & 0x7f7f_7f7f_7f7f_7f7f) + 0x0101_0101_0101_0101;
    word ^ ((carries >> 7) & 0x0101_0101_0101_0101)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(distribution: Distribution, bytes: usize) -> Vec<u8> {
        let mut buf = vec![0; bytes];
        fill(&mut buf, distribution, Key::of([42]), 0);
        buf
    }

    fn bf16(distribution: Distribution) -> Vec<f32> {
        let bytes = filled(distribution, 1 << 16);
        bytes.chunks_exact(2).map(|b| f32::from_le_bytes([0, 0, b[0], b[1]])).collect()
    }

    fn f32s(distribution: Distribution) -> Vec<f32> {
        let bytes = filled(distribution, 1 << 16);
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    #[test]
    fn numbers_are_of_the_size_promised() {
        let weight = |values: Vec<f32>| values.iter().all(|v| (0.0078125..0.125).contains(&v.abs()));
        assert!(weight(bf16(Distribution::Bf16Weight)) && weight(f32s(Distribution::F32Weight)));
        assert!(bf16(Distribution::Bf16Norm).iter().all(|v| (0.5..2.0).contains(v)));
        assert!(f32s(Distribution::F32Scale).iter().all(|v| (2f32.powi(-15)..2f32.powi(-11)).contains(v)));
    }

    #[test]
    fn f8_has_every_value_but_the_nans() {
        let mut seen = [false; 256];
        filled(Distribution::F8Weight, 1 << 16).iter().for_each(|byte| seen[usize::from(*byte)] = true);
        for (byte, seen) in seen.iter().enumerate() {
            assert_eq!(*seen, byte & 0x7f != 0x7f, "{byte:#x}");
        }
    }

    #[test]
    fn parts_fit_together() {
        let whole = filled(Distribution::F8Weight, 3003);
        let mut parts = vec![0; 3003];
        fill(&mut parts[..1024], Distribution::F8Weight, Key::of([42]), 0);
        fill(&mut parts[1024..], Distribution::F8Weight, Key::of([42]), 1024);
        assert_eq!(whole, parts);
    }
}
