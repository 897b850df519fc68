//! Which sizes a load allocates and frees.
//!
//! Sizes are whole MiB. `moe` and `dense` repeat our measurements of PyTorch's pools, size for size.

use std::fmt;
use std::str::FromStr;

use super::python::PythonRandom;

const MIB: u64 = 1 << 20;

/// Allocations and frees of loading a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Load {
    /// A mixture of experts in 24 layers. Raw tensors of 180 to 260 MiB are converted with transient blocks
    /// of 0.9 to 2 GiB. Scales of 2 to 9 MiB stay. No two sizes fit each other.
    Moe,
    /// 60 layers of four tensors, each converted to half its size before the next. Ignores the seed.
    Dense,
    /// 36 layers of two expert weights (530 and 270 MiB, as GPT-OSS-120B on two GPUs), rearranged into new
    /// blocks of the same sizes. A buffer of 2 to 9 MiB before each new block is freed with the old one; one
    /// after it stays. In some layers, chosen by the seed, both old weights are freed at the end; in others
    /// each at once. A pool that puts the 270 MiB block into the free 530 MiB keeps 260 MiB that fit nothing.
    Swizzle,
}

impl Load {
    /// All loads.
    pub const ALL: [Self; 3] = [Self::Moe, Self::Dense, Self::Swizzle];

    /// Name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Moe => "moe",
            Self::Dense => "dense",
            Self::Swizzle => "swizzle",
        }
    }

    /// From an empty pool to the loaded model.
    #[must_use]
    pub fn steps(self, seed: u64) -> Vec<Step> {
        let (mut script, mut random) = (Script::default(), PythonRandom::new(seed));
        match self {
            Self::Moe => (0..24).for_each(|_| script.moe_layer(&mut random)),
            Self::Dense => (0..60).for_each(|_| script.dense_layer()),
            Self::Swizzle => (0..36).for_each(|_| script.swizzle_layer(&mut random)),
        }
        script.steps
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that names no load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` names no load; known are {}", Load::ALL.map(Load::name).join(", "))]
pub struct ParseLoadError {
    /// The text.
    pub text: String,
}

impl FromStr for Load {
    type Err = ParseLoadError;

    fn from_str(text: &str) -> Result<Self, ParseLoadError> {
        let named = Self::ALL.into_iter().find(|load| load.name() == text);
        named.ok_or_else(|| ParseLoadError { text: text.to_owned() })
    }
}

/// One allocation or free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Allocates a block.
    Alloc {
        /// Size in bytes.
        bytes: u64,
    },
    /// Frees a block.
    Free {
        /// Index of its allocation, from 0.
        block: usize,
    },
}

/// Peak of the live bytes of `steps`.
#[must_use]
pub fn peak_live_bytes(steps: &[Step]) -> u64 {
    let (mut allocated, mut live_bytes, mut peak_bytes) = (Vec::new(), 0, 0);
    for step in steps {
        match *step {
            Step::Alloc { bytes } => {
                allocated.push(bytes);
                live_bytes += bytes;
                peak_bytes = peak_bytes.max(live_bytes);
            }
            Step::Free { block } => live_bytes -= allocated[block],
        }
    }
    peak_bytes
}

#[derive(Debug, Default)]
struct Script {
    steps: Vec<Step>,
    allocated: usize,
}

impl Script {
    fn moe_layer(&mut self, random: &mut PythonRandom) {
        let raw = [(); 4].map(|()| {
            let mib = random.randint(180..=260);
            (self.alloc(mib), mib)
        });
        for (_, mib) in raw {
            let transient = self.alloc(random.randint(900..=2000));
            self.alloc(mib);
            self.free(transient);
        }
        for _ in 0..8 {
            self.alloc(random.randint(2..=9));
        }
        // As a Python list drops its tensors while the last has one more name.
        for index in [2, 1, 0, 3] {
            self.free(raw[index].0);
        }
    }

    fn dense_layer(&mut self) {
        for mib in [96, 64, 530, 270] {
            let raw = self.alloc(mib);
            self.alloc(mib / 2);
            self.free(raw);
        }
    }

    fn swizzle_layer(&mut self, random: &mut PythonRandom) {
        const WEIGHTS_MIB: [u32; 2] = [530, 270];
        let together = random.randint(0..=1) == 1;
        let old = WEIGHTS_MIB.map(|mib| self.alloc(mib));
        let mut later = Vec::new();
        for (old, mib) in old.into_iter().zip(WEIGHTS_MIB) {
            let buffer = self.alloc(random.randint(2..=9));
            self.alloc(mib);
            self.alloc(random.randint(2..=9));
            later.extend([buffer, old]);
            if !together {
                later.drain(..).for_each(|block| self.free(block));
            }
        }
        later.into_iter().for_each(|block| self.free(block));
    }

    fn alloc(&mut self, mib: u32) -> usize {
        self.steps.push(Step::Alloc { bytes: u64::from(mib) * MIB });
        self.allocated += 1;
        self.allocated - 1
    }

    fn free(&mut self, block: usize) {
        self.steps.push(Step::Free { block });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allocations, then peak live, live at the end and sum, in MiB.
    fn figures(load: Load, seed: u64) -> (usize, [u64; 3]) {
        let steps = load.steps(seed);
        let allocs: Vec<u64> = steps
            .iter()
            .filter_map(|step| match step {
                Step::Alloc { bytes } => Some(*bytes),
                Step::Free { .. } => None,
            })
            .collect();
        let freed: u64 = steps
            .iter()
            .filter_map(|step| match step {
                Step::Free { block } => Some(allocs[*block]),
                Step::Alloc { .. } => None,
            })
            .sum();
        let allocated: u64 = allocs.iter().sum();
        (allocs.len(), [peak_live_bytes(&steps), allocated - freed, allocated].map(|bytes| bytes / MIB))
    }

    #[test]
    fn moe_is_that_of_the_measurements() {
        // From the Python script; seed 0 has 23.68 GiB live at its peak and 21.32 at its end.
        for (seed, figures_mib) in [
            (0, [24_251, 21_834, 183_442]),
            (1, [24_183, 22_339, 178_919]),
            (20, [24_448, 21_968, 177_947]),
            ((1 << 32) - 1, [24_474, 22_242, 189_613]),
            (1 << 32, [24_371, 21_742, 186_044]),
            ((1 << 40) + 12345, [23_923, 21_662, 181_654]),
            (u64::MAX, [24_576, 22_162, 181_704]),
        ] {
            assert_eq!(figures(Load::Moe, seed), (480, figures_mib), "seed {seed}");
        }
        let steps = Load::Moe.steps(0);
        let mib = |mib| Step::Alloc { bytes: mib * MIB };
        assert_eq!(steps[..4], [229, 233, 185, 213].map(mib));
        assert_eq!(steps[5..8], [mib(229), Step::Free { block: 4 }, mib(1895)]);
        assert_eq!(steps[24..28], [2, 1, 0, 3].map(|block| Step::Free { block }));
        assert_eq!(steps.len(), 24 * 28);
    }

    #[test]
    fn dense_is_that_of_the_measurements() {
        // 28.51 GiB live at the peak, 28.12 at the end.
        assert_eq!(figures(Load::Dense, 0), (480, [29_195, 28_800, 86_400]));
        assert_eq!(Load::Dense.steps(0), Load::Dense.steps(u64::MAX));
    }

    #[test]
    fn swizzle_allocates_each_new_weight_while_its_old_one_is_live() {
        for seed in [0, 1, u64::MAX] {
            let (allocs, [peak_mib, end_mib, _]) = figures(Load::Swizzle, seed);
            assert_eq!(allocs, 36 * 8);
            let weights_mib = 36 * 800;
            assert!((weights_mib + 36 * 4..=weights_mib + 36 * 18).contains(&end_mib), "{end_mib}");
            assert!((end_mib + 251..=end_mib + 818).contains(&peak_mib), "{peak_mib} of {end_mib}");
            let (mut live, mut both) = (Vec::new(), 0);
            for step in Load::Swizzle.steps(seed) {
                match step {
                    Step::Alloc { bytes } => {
                        live.push(bytes / MIB);
                        let weights = live[live.len() / 8 * 8..].iter().filter(|mib| **mib >= 270);
                        both += usize::from(weights.sum::<u64>() == 2 * 800);
                    }
                    Step::Free { block } => {
                        let same = live.iter().enumerate().filter(|(_, mib)| **mib == live[block]);
                        assert!(live[block] < 10 || same.count() >= 2, "its new block is there");
                        live[block] = 0;
                    }
                }
            }
            assert!((9..=27).contains(&both), "{both} of 36 layers have all four weights at once");
        }
        assert_ne!(Load::Swizzle.steps(0), Load::Swizzle.steps(1));
    }

    #[test]
    fn a_load_frees_each_block_once() {
        for load in Load::ALL {
            let mut live = Vec::new();
            for step in load.steps(7) {
                match step {
                    Step::Alloc { bytes } => live.push(bytes > 0),
                    Step::Free { block } => assert!(std::mem::replace(&mut live[block], false), "{load}"),
                }
            }
        }
    }

    #[test]
    fn names() {
        for load in Load::ALL {
            assert_eq!(load.to_string().parse(), Ok(load));
        }
        for text in ["", "Moe", "moe ", "mixture"] {
            let error = text.parse::<Load>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}`")) && error.contains("swizzle"), "{error}");
        }
    }
}
