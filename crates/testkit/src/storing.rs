//! How the backups of a suite are stored: raw, or as codes. Then most of its bytes are such as codes are short of.

use poorwill_core::PoolConfig;
use poorwill_core::backup::Compress;

use crate::pattern;

/// How backups are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Storing {
    /// As the bytes are.
    #[default]
    Raw,
    /// As codes, where these save a tenth.
    Codes,
}

impl Storing {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Raw, Self::Codes];

    /// `config` for it.
    #[must_use]
    pub fn of(self, config: PoolConfig) -> PoolConfig {
        config.compressing(if self == Self::Codes { Compress::Always } else { Compress::Off })
    }

    /// `len` bytes that depend on `seed`, and on their positions: with codes, three of four seeds give weights.
    #[must_use]
    pub fn bytes(self, seed: u64, len: usize) -> Vec<u8> {
        if self == Self::Codes && !seed.is_multiple_of(4) {
            pattern::weights(seed, len)
        } else {
            pattern::bytes(seed, len)
        }
    }

    /// `len` of these bytes from `offset` on.
    #[must_use]
    pub fn part(self, seed: u64, offset: u64, len: usize) -> Vec<u8> {
        let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
        self.bytes(seed, skipped.saturating_add(len)).split_off(skipped)
    }

    /// Another byte; with codes, one that is as short of a code.
    #[must_use]
    pub fn changed(self, byte: u8) -> u8 {
        // A sign, a mantissa, or the lowest bit of an exponent.
        byte ^ if self == Self::Codes { 0x81 } else { 0xFF }
    }
}

#[cfg(test)]
mod tests {
    use poorwill_core::codec;

    use super::*;

    #[test]
    fn codes_are_short_of_three_seeds_of_four() {
        for storing in Storing::ALL {
            let saves_a_tenth = |seed: &u64| {
                let granule = storing.bytes(*seed, 8192);
                assert_eq!(storing.part(*seed, 512, 700), granule[512..1212]);
                codec::encoded_bytes(&granule) < 8192 / 10 * 9
            };
            let count = (0..40).filter(saves_a_tenth).count();
            assert_eq!(count, if storing == Storing::Codes { 30 } else { 0 });
        }
    }
}
