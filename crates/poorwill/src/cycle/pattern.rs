//! Bytes that depend on their tensor and on where in it they are, so that any that end up elsewhere are noticed.
//!
//! Each tensor has several editions of them: what is written over the first is told from it, word by word.

/// Between the words of a tensor. Odd, so that all of them differ.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Between the editions of a tensor.
const EDITION: u64 = 0x94D0_49BB_1331_11EB;

/// How many bytes are compared before it is asked whether they were the same.
const WINDOW_BYTES: usize = 4096;

/// What is written: which tensor, and for which time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Text {
    pub(crate) tensor: usize,
    pub(crate) edition: u32,
}

/// The word at `offset`, which begins one.
fn word(text: Text, offset: u64) -> u64 {
    let seed = (text.tensor as u64 + 1).wrapping_mul(0xBF58_476D_1CE4_E5B9)
        ^ u64::from(text.edition).wrapping_mul(EDITION);
    (seed ^ (seed >> 29)).wrapping_add((offset / 8).wrapping_mul(STEP))
}

/// What `text` has from `offset` on, which begins a word.
pub(crate) fn write(text: Text, offset: u64, bytes: &mut [u8]) {
    let mut word = word(text, offset);
    let mut words = bytes.chunks_exact_mut(8);
    for place in &mut words {
        place.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(STEP);
    }
    let rest = words.into_remainder();
    let held = rest.len();
    rest.copy_from_slice(&word.to_le_bytes()[..held]);
}

/// Where the first byte is that [`write()`] would not have written.
pub(crate) fn first_wrong(text: Text, offset: u64, bytes: &[u8]) -> Option<usize> {
    let windows = bytes.chunks(WINDOW_BYTES).enumerate();
    windows.map(|(nth, window)| (nth * WINDOW_BYTES, window)).find_map(|(at, window)| {
        let mut word = word(text, offset + at as u64);
        let mut words = window.chunks_exact(8);
        let mut difference = 0;
        for held in &mut words {
            let held: [u8; 8] = held.try_into().unwrap_or_default();
            difference |= u64::from_le_bytes(held) ^ word;
            word = word.wrapping_add(STEP);
        }
        let rest = words.remainder();
        if difference == 0 && *rest == word.to_le_bytes()[..rest.len()] {
            return None;
        }
        let mut expected = [0; WINDOW_BYTES];
        write(text, offset + at as u64, &mut expected);
        window.iter().zip(expected).position(|(held, expected)| *held != expected).map(|wrong| at + wrong)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(tensor: usize) -> Text {
        Text { tensor, edition: 0 }
    }

    #[test]
    fn every_wrong_byte_is_found() {
        for length in [0, 1, 7, 8, 9, WINDOW_BYTES - 1, WINDOW_BYTES, 2 * WINDOW_BYTES + 13] {
            let mut bytes = vec![0; length];
            write(text(3), 64, &mut bytes);
            assert_eq!(first_wrong(text(3), 64, &bytes), None);
            for at in (0..length).step_by(5).chain(length.checked_sub(1)) {
                bytes[at] ^= 0x10;
                assert_eq!(first_wrong(text(3), 64, &bytes), Some(at), "{length}");
                bytes[at] ^= 0x10;
            }
        }
    }

    #[test]
    fn other_tensors_editions_and_places_hold_other_bytes() {
        let mut bytes = [0; 64];
        write(text(3), 64, &mut bytes);
        for (tensor, offset) in [(2, 64), (4, 64), (3, 0), (3, 72), (3, 64 + (1 << 40))] {
            let at = first_wrong(text(tensor), offset, &bytes);
            assert!(at.is_some_and(|at| at < 8), "{tensor} {offset}");
        }
        let later = Text { edition: 1, ..text(3) };
        assert!(first_wrong(later, 64, &bytes).is_some_and(|at| at < 8));
        // The second half of a piece is what would be written there by itself.
        let mut half = [0; 32];
        write(text(3), 96, &mut half);
        assert_eq!(bytes[32..], half);
    }
}
