//! What test bytes are like; codes save nothing of noise, and nearly all of zeros.
//!
//! As in [`pattern`], bytes depend on their block and offset, except zeros. Any part can be generated alone.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use serde::{Serialize, Serializer};

use crate::pattern::{self, Key};

/// What the bytes of a load are like.
///
/// ```
/// use poorwill::codec;
/// use poorwill_bench::Contents;
///
/// let bytes = |contents: Contents| {
///     let mut granule = vec![0xFF; 2 << 20];
///     contents.write(7, &mut granule);
///     codec::encoded_bytes(&granule)
/// };
/// let [zeros, weights, noise] = ["zeros", "weights", "noise"].map(|name| bytes(name.parse().unwrap()));
/// assert!(10 * zeros < weights && 4 * weights < 3 * noise);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Contents {
    /// Uniform random bytes.
    #[default]
    Noise,
    /// Normally distributed bf16 with a standard deviation of 0.02.
    Weights,
    /// Zeros; ones where something has changed.
    Zeros,
}

impl Contents {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Noise, Self::Weights, Self::Zeros];

    /// Name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Noise => "noise",
            Self::Weights => "weights",
            Self::Zeros => "zeros",
        }
    }

    /// Fills `bytes`, the same for the same seed.
    pub fn write(self, seed: u64, bytes: &mut [u8]) {
        self.write_part(ContentsPart { block: seed, version: 0 }, 0, bytes);
    }

    /// `offset` begins a window of the pattern.
    pub(crate) fn write_part(self, part: ContentsPart, offset: u64, bytes: &mut [u8]) {
        match self {
            Self::Noise => pattern::write(part.key(), offset, bytes),
            Self::Weights => {
                pattern::write(part.key(), offset, bytes);
                to_weights(bytes);
            }
            Self::Zeros => bytes.fill(u8::from(part.version > 0)),
        }
    }

    /// Compares with what [`Self::write_part`] writes.
    pub(crate) fn first_mismatch(self, part: ContentsPart, offset: u64, bytes: &[u8]) -> Option<usize> {
        pattern::first_mismatch(offset, bytes, |at, expected| self.write_part(part, at, expected))
    }
}

/// What the bytes depend on, beside their offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContentsPart {
    pub(crate) block: u64,
    /// 0 until it is changed.
    pub(crate) version: u64,
}

impl ContentsPart {
    fn key(self) -> Key {
        Key::of([self.block, self.version])
    }
}

const SCALE: f64 = 0.02;
const SIGN: u16 = 1 << 15;

/// Normally distributed values, as bf16, by the random bits of one: its sign, and a quantile of the magnitudes.
static WEIGHTS: LazyLock<Vec<u16>> = LazyLock::new(|| {
    // The slope of the quantile function of a magnitude x is sqrt(pi / 2) * exp(x * x / 2).
    let slope = |x: f64| (std::f64::consts::FRAC_PI_2).sqrt() * (x * x / 2.0).exp();
    let step = 1.0 / f64::from(SIGN);
    let mut x = slope(0.0) * step / 2.0;
    let quantile = |_| {
        let now = x;
        x += slope(x + slope(x) * step / 2.0) * step;
        bf16(now * SCALE)
    };
    let magnitudes: Vec<u16> = (0..SIGN).map(quantile).collect();
    [0, SIGN].iter().flat_map(|sign| magnitudes.iter().map(move |magnitude| magnitude | sign)).collect()
});

/// Makes values of uniform random bits.
fn to_weights(bytes: &mut [u8]) {
    // Once, since each use asks whether the table is there.
    let weights: &[u16] = &WEIGHTS;
    for value in bytes.as_chunks_mut().0 {
        let weight = weights.get(usize::from(u16::from_le_bytes(*value))).copied().unwrap_or(0);
        *value = weight.to_le_bytes();
    }
}

#[expect(clippy::cast_possible_truncation, reason = "bf16 has fewer digits yet")]
fn bf16(value: f64) -> u16 {
    let [_, _, low, high] = (value as f32).to_bits().to_le_bytes();
    u16::from_le_bytes([low, high])
}

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for Contents {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A text that names no contents.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` names no contents; known are {}", Contents::ALL.map(Contents::name).join(", "))]
pub struct ParseContentsError {
    /// The text.
    pub text: String,
}

impl FromStr for Contents {
    type Err = ParseContentsError;

    fn from_str(text: &str) -> Result<Self, ParseContentsError> {
        let named = Self::ALL.into_iter().find(|contents| contents.name() == text);
        named.ok_or_else(|| ParseContentsError { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(count: usize) -> Vec<f64> {
        let mut bytes = vec![0; 2 * count];
        Contents::Weights.write(3, &mut bytes);
        bytes.chunks_exact(2).map(|value| f64::from(f32::from_le_bytes([0, 0, value[0], value[1]]))).collect()
    }

    #[test]
    #[expect(clippy::cast_precision_loss, reason = "counts are small")]
    fn weights_are_normally_distributed() {
        let weights = weights(1 << 18);
        let part = |within: fn(f64) -> bool| {
            weights.iter().filter(|value| within(**value / SCALE)).count() as f64 / weights.len() as f64
        };
        let within = [0.5, 1.0, 2.0, 3.0].map(|sigmas: f64| {
            weights.iter().filter(|value| value.abs() < sigmas * SCALE).count() as f64 / weights.len() as f64
        });
        for (found, expected) in within.into_iter().zip([0.3829, 0.6827, 0.9545, 0.9973]) {
            assert!((found - expected).abs() < 0.005, "{found} instead of {expected}");
        }
        assert!((part(|value| value < 0.0) - 0.5).abs() < 0.005);
        assert!(weights.iter().all(|value| value.abs() < 6.0 * SCALE));
    }

    #[test]
    fn parts_fit_together_and_every_wrong_byte_is_found() {
        for contents in Contents::ALL {
            let part = ContentsPart { block: 5, version: 1 };
            let mut whole = vec![0; 1500 * 2 + 1];
            contents.write_part(part, 1024, &mut whole);
            let mut parts = vec![0; whole.len()];
            let (first, rest) = parts.split_at_mut(1024);
            contents.write_part(part, 1024, first);
            contents.write_part(part, 2048, rest);
            assert_eq!(whole, parts, "{contents}");
            assert_eq!(contents.first_mismatch(part, 1024, &whole), None);
            for at in (0..whole.len()).step_by(7).chain([whole.len() - 1]) {
                whole[at] ^= 0x10;
                assert_eq!(contents.first_mismatch(part, 1024, &whole), Some(at), "{contents}");
                whole[at] ^= 0x10;
            }
            let unchanged = ContentsPart { version: 0, ..part };
            assert!(contents.first_mismatch(unchanged, 1024, &whole).is_some_and(|at| at < 8), "{contents}");
        }
    }
}
