//! Test bytes by key and offset, so misplaced data is found. Any part can be generated alone.

use fastrand::Rng;

/// Bytes per seed; writes and comparisons begin at a multiple of this.
pub(crate) const WINDOW_BYTES: usize = 512;

/// What the bytes depend on, beside their offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key(u64);

impl Key {
    pub(crate) fn of(numbers: impl IntoIterator<Item = u64>) -> Self {
        Self(numbers.into_iter().fold(0, |key, number| Rng::with_seed(key ^ number).u64(..)))
    }

    fn window(self, offset: u64) -> Rng {
        Rng::with_seed(self.0.wrapping_add(offset / WINDOW_BYTES as u64))
    }
}

pub(crate) fn write(key: Key, offset: u64, bytes: &mut [u8]) {
    for (window, at) in bytes.chunks_mut(WINDOW_BYTES).zip((offset..).step_by(WINDOW_BYTES)) {
        key.window(at).fill(window);
    }
}

/// Compares with what `write` writes, given the offset and bytes of each window.
pub(crate) fn first_mismatch(offset: u64, bytes: &[u8], write: impl Fn(u64, &mut [u8])) -> Option<usize> {
    let windows = bytes.chunks(WINDOW_BYTES).zip((offset..).step_by(WINDOW_BYTES));
    windows.zip((0..).step_by(WINDOW_BYTES)).find_map(|((held, at), index)| {
        let mut expected = [0; WINDOW_BYTES];
        let expected = &mut expected[..held.len()];
        write(at, expected);
        first_difference(held, expected).map(|wrong| index + wrong)
    })
}

pub(crate) fn first_nonzero(bytes: &[u8]) -> Option<usize> {
    let windows = bytes.chunks(WINDOW_BYTES).zip((0..).step_by(WINDOW_BYTES));
    windows.into_iter().find_map(|(held, index)| {
        first_difference(held, &[0; WINDOW_BYTES][..held.len()]).map(|wrong| index + wrong)
    })
}

fn first_difference(held: &[u8], expected: &[u8]) -> Option<usize> {
    // Far faster than byte by byte.
    if held == expected {
        return None;
    }
    held.iter().zip(expected).position(|(held, expected)| held != expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTHS: [usize; 8] = [0, 1, 7, 8, 9, WINDOW_BYTES - 1, WINDOW_BYTES, 2 * WINDOW_BYTES + 13];

    fn key(tensor: u64) -> Key {
        Key::of([tensor, 0])
    }

    fn first_mismatch(key: Key, offset: u64, bytes: &[u8]) -> Option<usize> {
        super::first_mismatch(offset, bytes, |at, expected| write(key, at, expected))
    }

    #[test]
    fn every_wrong_byte_is_found() {
        for length in LENGTHS {
            let mut bytes = vec![0; length];
            write(key(3), 1024, &mut bytes);
            assert_eq!(first_mismatch(key(3), 1024, &bytes), None);
            let mut zeros = vec![0; length];
            assert_eq!(first_nonzero(&zeros), None);
            for at in (0..length).step_by(5).chain(length.checked_sub(1)) {
                bytes[at] ^= 0x10;
                zeros[at] ^= 0x10;
                assert_eq!([first_mismatch(key(3), 1024, &bytes), first_nonzero(&zeros)], [Some(at); 2]);
                bytes[at] ^= 0x10;
                zeros[at] ^= 0x10;
            }
        }
    }

    #[test]
    fn other_keys_and_places_have_other_bytes() {
        let mut bytes = [0; 64];
        write(key(3), 1024, &mut bytes);
        for (tensor, offset) in [(2, 1024), (4, 1024), (3, 0), (3, 1536), (3, 1024 + (1 << 40))] {
            let at = first_mismatch(key(tensor), offset, &bytes);
            assert!(at.is_some_and(|at| at < 8), "{tensor} {offset}");
        }
        for other in [Key::of([3, 1]), Key::of([0, 3]), Key::of([3])] {
            assert!(first_mismatch(other, 1024, &bytes).is_some_and(|at| at < 8), "{other:?}");
        }
    }

    #[test]
    fn parts_fit_together() {
        let mut whole = [0; 3 * WINDOW_BYTES + 7];
        write(key(1), 0, &mut whole);
        let mut parts = [0; 3 * WINDOW_BYTES + 7];
        let (first, rest) = parts.split_at_mut(2 * WINDOW_BYTES);
        write(key(1), 0, first);
        write(key(1), 2 * WINDOW_BYTES as u64, rest);
        assert_eq!(whole, parts);
    }
}
