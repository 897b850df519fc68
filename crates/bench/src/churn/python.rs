//! The numbers of Python's `random.Random(seed).randint`. A seed means the same in a script that takes
//! PyTorch through the same load.

use std::ops::RangeInclusive;

use rand_mt::Mt;

#[derive(Debug)]
pub(super) struct PythonRandom(Mt);

impl PythonRandom {
    /// Seeded by the 32-bit words of the number, least first, without leading zeros.
    pub(super) fn new(seed: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = seed.to_le_bytes();
        let words = [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])];
        let used = if words[1] == 0 { &words[..1] } else { &words };
        Self(Mt::new_with_key(used.iter().copied()))
    }

    /// Draws as many bits as the number of choices has, until they are one of them.
    pub(super) fn randint(&mut self, range: RangeInclusive<u32>) -> u32 {
        let choices = range.end() - range.start() + 1;
        loop {
            let drawn = self.0.next_u32() >> choices.leading_zeros();
            if drawn < choices {
                return range.start() + drawn;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_pythons() {
        // From Python 3.11; seeds of one word and of two.
        for (seed, large, huge, small) in [
            (0, [229, 233, 185, 213, 245, 242], [1729, 1521, 1876, 1633], [5, 4, 6, 4]),
            (1, [197, 252, 188, 212, 195, 243], [1820, 1867, 1677, 1329], [3, 9, 2, 8]),
            (20, [199, 213, 192, 221, 253, 201], [955, 1742, 1733, 1053], [3, 4, 7, 9]),
            ((1 << 32) - 1, [259, 206, 207, 257, 246, 217], [1596, 1680, 1472, 1627], [9, 8, 3, 5]),
            (1 << 32, [194, 224, 233, 182, 182, 258], [1578, 1825, 928, 1182], [3, 8, 7, 7]),
            ((1 << 40) + 12345, [219, 224, 194, 180, 248, 197], [1317, 1182, 1080, 1486], [2, 5, 6, 8]),
            (u64::MAX, [182, 211, 223, 259, 207, 238], [1094, 1659, 1011, 1294], [9, 3, 7, 9]),
        ] {
            let mut python = PythonRandom::new(seed);
            assert_eq!(large, large.map(|_| python.randint(180..=260)), "seed {seed}");
            assert_eq!(huge, huge.map(|_| python.randint(900..=2000)), "seed {seed}");
            assert_eq!(small, small.map(|_| python.randint(2..=9)), "seed {seed}");
        }
    }

    #[test]
    fn a_single_choice_is_taken() {
        assert_eq!(PythonRandom::new(0).randint(7..=7), 7);
    }
}
