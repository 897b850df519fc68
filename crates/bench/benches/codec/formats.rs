//! What the scheme of bf16 codes would save of other formats of normally distributed weights.
//!
//! A block of 4096 bytes has a plane of signs and mantissas, 3 bits an exponent, and a byte an escape, as in
//! `docs/codec.md`. Sizes are counted; beside them is what the codec, which takes all for bf16, makes of the bytes.

use std::collections::HashMap;

use fastrand::Rng;
use poorwill::codec::{self, BLOCK_BYTES};

/// Of each value.
const DEVIATION: f64 = 0.02;
const COLUMNS: usize = 4096;
const ROWS: usize = 1024;
const GRANULE_BYTES: usize = 2 << 20;
const HEAD_BYTES: usize = 8;

/// Distances from the base that need no escape.
const DISTANCES: usize = 7;
const SHIFT_MAX: usize = 3;

/// A format, and what its values are divided by.
pub(crate) struct Format {
    pub(crate) name: &'static str,
    exponent_bits: u32,
    mantissa_bits: u32,
    scale: Scale,
}

#[derive(Clone, Copy)]
enum Scale {
    None,
    /// The largest of the tensor becomes this.
    Tensor(f64),
    /// The largest of each square of this many values a side becomes this.
    Squares(usize, f64),
}

const E4M3_MAX: f64 = 448.0;
const E5M2_MAX: f64 = 57344.0;

pub(crate) const FORMATS: [Format; 7] = [
    Format { name: "bf16", exponent_bits: 8, mantissa_bits: 7, scale: Scale::None },
    Format { name: "fp16", exponent_bits: 5, mantissa_bits: 10, scale: Scale::None },
    Format {
        name: "e4m3, a scale a tensor",
        exponent_bits: 4,
        mantissa_bits: 3,
        scale: Scale::Tensor(E4M3_MAX),
    },
    Format {
        name: "e4m3, a scale a 128 x 128",
        exponent_bits: 4,
        mantissa_bits: 3,
        scale: Scale::Squares(128, E4M3_MAX),
    },
    Format {
        name: "e5m2, a scale a tensor",
        exponent_bits: 5,
        mantissa_bits: 2,
        scale: Scale::Tensor(E5M2_MAX),
    },
    Format {
        name: "e5m2, a scale a 128 x 128",
        exponent_bits: 5,
        mantissa_bits: 2,
        scale: Scale::Squares(128, E5M2_MAX),
    },
    Format { name: "e5m2, no scale", exponent_bits: 5, mantissa_bits: 2, scale: Scale::None },
];

/// Parts of the bytes.
pub(crate) struct Sizes {
    /// By the codec as it is.
    pub(crate) as_bf16: f64,
    /// By the scheme.
    pub(crate) code: f64,
    /// Of values whose exponents take their entropy, and the rest all its bits.
    pub(crate) exponents_bound: f64,
    /// Of values that take their entropy.
    pub(crate) values_bound: f64,
}

pub(crate) fn sizes(format: &Format) -> Sizes {
    let values = format.values(&weights());
    let bits = 1 + format.exponent_bits + format.mantissa_bits;
    let exponents: Vec<u32> = values.iter().map(|value| format.exponent(*value)).collect();
    let per_block = BLOCK_BYTES * 8 / bits as usize;
    let code: usize = exponents.chunks_exact(per_block).map(|block| format.block_bytes(block)).sum();
    let bytes = bits as usize / 8;
    let stored: Vec<u8> =
        values.iter().flat_map(|value| value.to_le_bytes().into_iter().take(bytes)).collect();
    let as_bf16: usize = stored.chunks_exact(GRANULE_BYTES).map(codec::encoded_bytes).sum();
    let rest_bits = f64::from(1 + format.mantissa_bits);
    Sizes {
        as_bf16: float(as_bf16) / float(stored.len()),
        code: float(code) / float(stored.len()),
        exponents_bound: (rest_bits + entropy(&exponents)) / f64::from(bits),
        values_bound: entropy(&values) / f64::from(bits),
    }
}

impl Format {
    fn values(&self, weights: &[f64]) -> Vec<u32> {
        let largest =
            |at: &mut dyn Iterator<Item = usize>| at.map(|at| weights[at].abs()).fold(0.0, f64::max);
        let factors: Vec<f64> = match self.scale {
            Scale::None => vec![1.0; weights.len()],
            Scale::Tensor(top) => vec![top / largest(&mut (0..weights.len())); weights.len()],
            Scale::Squares(side, top) => {
                let square = |nth: usize| {
                    let (row, column) = (nth / (COLUMNS / side) * side, nth % (COLUMNS / side) * side);
                    (row..row + side)
                        .flat_map(move |row| (column..column + side).map(move |at| row * COLUMNS + at))
                };
                let mut factors = vec![0.0; weights.len()];
                for nth in 0..weights.len() / (side * side) {
                    let factor = top / largest(&mut square(nth));
                    square(nth).for_each(|at| factors[at] = factor);
                }
                factors
            }
        };
        weights.iter().zip(factors).map(|(weight, factor)| self.value(weight * factor)).collect()
    }

    /// The nearest value, of two the even one.
    fn value(&self, of: f64) -> u32 {
        let lowest = 2 - (1 << (self.exponent_bits - 1));
        let magnitude = of.abs();
        // Below the lowest exponent, steps are as large as there.
        let exponent = (exponent_of(magnitude)).max(lowest);
        let steps = (magnitude / 2_f64.powi(exponent - self.mantissa_bits.cast_signed())).round_ties_even();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at most twice the mantissas"
        )]
        let steps = steps as u32;
        let field = (exponent - lowest).cast_unsigned() << self.mantissa_bits;
        let sign = u32::from(of.is_sign_negative()) << (self.exponent_bits + self.mantissa_bits);
        sign | (field + steps)
    }

    fn exponent(&self, value: u32) -> u32 {
        (value >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
    }

    fn block_bytes(&self, exponents: &[u32]) -> usize {
        let largest = exponents.iter().copied().fold(0, u32::max) as usize;
        let escapes = |base: usize| {
            let lowest = (base + 1).saturating_sub(DISTANCES);
            exponents.iter().filter(|exponent| !(lowest..=base).contains(&(**exponent as usize))).count()
        };
        let bases = (0..=SHIFT_MAX).filter_map(|shift| largest.checked_sub(shift));
        let escapes = bases.map(escapes).min().unwrap_or(exponents.len());
        let planes = exponents.len() * (1 + self.mantissa_bits as usize + 3) / 8;
        HEAD_BYTES + (planes + escapes).min(BLOCK_BYTES)
    }
}

/// A matrix, by Box and Muller.
fn weights() -> Vec<f64> {
    let mut random = Rng::with_seed(1);
    let mut weights = Vec::with_capacity(ROWS * COLUMNS);
    while weights.len() < ROWS * COLUMNS {
        let length = DEVIATION * (-2.0 * (1.0 - random.f64()).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * random.f64()).sin_cos();
        weights.extend([length * sin, length * cos]);
    }
    weights
}

/// Of the power of two that is at most `magnitude`.
fn exponent_of(magnitude: f64) -> i32 {
    i32::try_from(magnitude.to_bits() >> 52).map_or(0, |field| field - 1023)
}

/// In bits a symbol.
fn entropy(symbols: &[u32]) -> f64 {
    let mut counts: HashMap<u32, usize> = HashMap::new();
    for symbol in symbols {
        *counts.entry(*symbol).or_default() += 1;
    }
    let share = |count: &usize| float(*count) / float(symbols.len());
    -counts.values().map(share).map(|share| share * share.log2()).sum::<f64>()
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn float(number: usize) -> f64 {
    number as f64
}
