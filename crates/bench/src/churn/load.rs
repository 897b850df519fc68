//! The loads: which sizes are allocated and freed, in which order.
//!
//! `moe` and `dense` are those of our measurements of PyTorch's pools, size for size. Sizes are whole MiB.

use std::fmt;
use std::str::FromStr;

use super::python::PythonRandom;

const MIB: u64 = 1 << 20;

/// A way in which loading a model allocates and frees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Load {
    /// A mixture of experts in 24 layers: raw tensors of 180 to 260 MiB, each converted with the help of a
    /// transient block of 0.9 to 2 GiB, and small scales of 2 to 9 MiB that stay. No two sizes fit each other.
    Moe,
    /// 60 layers of the same four tensors, each converted to half its size before the next. Takes no notice of
    /// the seed.
    Dense,
    /// 36 layers of experts whose two weights (530 and 270 MiB, as those of GPT-OSS-120B on two GPUs) are
    /// rearranged into new blocks of the same sizes. Each new block is taken while its old one is live, with a
    /// small buffer before it that goes when the old one goes, and a small one behind it that stays, 2 to 9 MiB
    /// each. In some layers both old weights go at the end, in others each goes as soon as its new one is there:
    /// then the place of 530 MiB is offered to 270, and a pool that takes it keeps 260 MiB in every such layer
    /// that fit nothing. The seed chooses the small sizes and the layers.
    Swizzle,
}

impl Load {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Moe, Self::Dense, Self::Swizzle];

    /// As the command line calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Moe => "moe",
            Self::Dense => "dense",
            Self::Swizzle => "swizzle",
        }
    }

    /// What it does, from an empty pool to the loaded model. The same for a seed, always.
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
    /// What was given.
    pub text: String,
}

impl FromStr for Load {
    type Err = ParseLoadError;

    fn from_str(text: &str) -> Result<Self, ParseLoadError> {
        let named = Self::ALL.into_iter().find(|load| load.name() == text);
        named.ok_or_else(|| ParseLoadError { text: text.to_owned() })
    }
}

/// One thing that a load does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Allocates a block.
    Take {
        /// Its size in bytes.
        bytes: u64,
    },
    /// Frees a block.
    Give {
        /// Which: that of the load's first `Take` is block 0.
        block: usize,
    },
}

/// Most bytes that `steps` have live at any time.
#[must_use]
pub fn peak_live_bytes(steps: &[Step]) -> u64 {
    let (mut taken, mut live_bytes, mut peak_bytes) = (Vec::new(), 0, 0);
    for step in steps {
        match *step {
            Step::Take { bytes } => {
                taken.push(bytes);
                live_bytes += bytes;
                peak_bytes = peak_bytes.max(live_bytes);
            }
            Step::Give { block } => live_bytes -= taken[block],
        }
    }
    peak_bytes
}

/// A load being written down.
#[derive(Debug, Default)]
struct Script {
    steps: Vec<Step>,
    taken: usize,
}

impl Script {
    fn moe_layer(&mut self, random: &mut PythonRandom) {
        let raw = [(); 4].map(|()| {
            let mib = random.randint(180..=260);
            (self.take(mib), mib)
        });
        for (_, mib) in raw {
            let transient = self.take(random.randint(900..=2000));
            self.take(mib);
            self.give(transient);
        }
        for _ in 0..8 {
            self.take(random.randint(2..=9));
        }
        // In the order in which a Python list lets go of its tensors while the last has one more name.
        for index in [2, 1, 0, 3] {
            self.give(raw[index].0);
        }
    }

    fn dense_layer(&mut self) {
        for mib in [96, 64, 530, 270] {
            let raw = self.take(mib);
            self.take(mib / 2);
            self.give(raw);
        }
    }

    fn swizzle_layer(&mut self, random: &mut PythonRandom) {
        const WEIGHTS_MIB: [u32; 2] = [530, 270];
        let together = random.randint(0..=1) == 1;
        let old = WEIGHTS_MIB.map(|mib| self.take(mib));
        let mut later = Vec::new();
        for (old, mib) in old.into_iter().zip(WEIGHTS_MIB) {
            let buffer = self.take(random.randint(2..=9));
            self.take(mib);
            self.take(random.randint(2..=9));
            later.extend([buffer, old]);
            if !together {
                later.drain(..).for_each(|block| self.give(block));
            }
        }
        later.into_iter().for_each(|block| self.give(block));
    }

    fn take(&mut self, mib: u32) -> usize {
        self.steps.push(Step::Take { bytes: u64::from(mib) * MIB });
        self.taken += 1;
        self.taken - 1
    }

    fn give(&mut self, block: usize) {
        self.steps.push(Step::Give { block });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes, and then peak live, live at the end and the sum of all takes, in MiB.
    fn figures(load: Load, seed: u64) -> (usize, [u64; 3]) {
        let steps = load.steps(seed);
        let takes: Vec<u64> = steps
            .iter()
            .filter_map(|step| match step {
                Step::Take { bytes } => Some(*bytes),
                Step::Give { .. } => None,
            })
            .collect();
        let given: u64 = steps
            .iter()
            .filter_map(|step| match step {
                Step::Give { block } => Some(takes[*block]),
                Step::Take { .. } => None,
            })
            .sum();
        let taken: u64 = takes.iter().sum();
        (takes.len(), [peak_live_bytes(&steps), taken - given, taken].map(|bytes| bytes / MIB))
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
        let mib = |mib| Step::Take { bytes: mib * MIB };
        assert_eq!(steps[..4], [229, 233, 185, 213].map(mib));
        assert_eq!(steps[5..8], [mib(229), Step::Give { block: 4 }, mib(1895)]);
        assert_eq!(steps[24..28], [2, 1, 0, 3].map(|block| Step::Give { block }));
        assert_eq!(steps.len(), 24 * 28);
    }

    #[test]
    fn dense_is_that_of_the_measurements() {
        // 28.51 GiB live at the peak, 28.12 at the end.
        assert_eq!(figures(Load::Dense, 0), (480, [29_195, 28_800, 86_400]));
        assert_eq!(Load::Dense.steps(0), Load::Dense.steps(u64::MAX));
    }

    #[test]
    fn swizzle_takes_each_new_weight_while_its_old_one_is_live() {
        for seed in [0, 1, u64::MAX] {
            let (takes, [peak_mib, end_mib, _]) = figures(Load::Swizzle, seed);
            assert_eq!(takes, 36 * 8);
            let weights_mib = 36 * 800;
            assert!((weights_mib + 36 * 4..=weights_mib + 36 * 18).contains(&end_mib), "{end_mib}");
            assert!((end_mib + 251..=end_mib + 818).contains(&peak_mib), "{peak_mib} of {end_mib}");
            let (mut live, mut both) = (Vec::new(), 0);
            for step in Load::Swizzle.steps(seed) {
                match step {
                    Step::Take { bytes } => {
                        live.push(bytes / MIB);
                        let weights = live[live.len() / 8 * 8..].iter().filter(|mib| **mib >= 270);
                        both += usize::from(weights.sum::<u64>() == 2 * 800);
                    }
                    Step::Give { block } => {
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
    fn a_load_gives_only_what_it_has_taken_and_not_given() {
        for load in Load::ALL {
            let mut live = Vec::new();
            for step in load.steps(7) {
                match step {
                    Step::Take { bytes } => live.push(bytes > 0),
                    Step::Give { block } => assert!(std::mem::replace(&mut live[block], false), "{load}"),
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
