//! Chance from a seed: the same seed gives the same row of numbers.

/// A generator (splitmix64, by Steele, Lea and Flood, 2014).
#[derive(Debug, Clone)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn of(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// Whether something happens that does so once in so many times.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// The position of one of so many.
    pub(crate) fn position(&mut self, len: usize) -> usize {
        usize::try_from(self.below(u64::try_from(len).unwrap())).unwrap()
    }

    pub(crate) fn shuffle<T>(&mut self, all: &mut [T]) {
        for at in (1..all.len()).rev() {
            all.swap(at, self.position(at + 1));
        }
    }
}

#[test]
fn a_seed_gives_one_row_of_numbers_and_another_seed_another() {
    let row = |seed| {
        let mut chance = Chance::of(seed);
        (0..32).map(|_| chance.below(1000)).collect::<Vec<_>>()
    };
    assert_eq!(row(7), row(7));
    assert_ne!(row(7), row(8));
    let mut all: Vec<usize> = (0..32).collect();
    Chance::of(7).shuffle(&mut all);
    assert_ne!(all, (0..32).collect::<Vec<_>>());
    all.sort_unstable();
    assert_eq!(all, (0..32).collect::<Vec<_>>());
}
