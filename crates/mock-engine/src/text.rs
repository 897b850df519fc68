//! The generated text: plain words from the model's name and the prompt, garbled if the memory is wrong.

use crate::memory::Sampled;
use crate::random::{choose, hash, nth};

const WORDS: [&str; 64] = [
    "river", "stone", "the", "under", "quiet", "of", "morning", "light", "and", "a", "field", "turns",
    "slow", "over", "winter", "bird", "sleeps", "while", "snow", "falls", "on", "old", "roofs", "where",
    "nobody", "has", "walked", "since", "autumn", "came", "with", "its", "many", "colours", "to", "valley",
    "in", "which", "small", "fires", "burn", "until", "dawn", "then", "wind", "carries", "smoke", "along",
    "road", "past", "mills", "that", "still", "grind", "grain", "for", "bread", "as", "they", "did",
    "before", "war", "ended", "here",
];

/// Replaces letters if bytes are wrong.
const GARBAGE: [char; 24] = [
    '#', 'q', '~', 'z', '%', 'x', '^', 'j', '§', 'v', '$', 'k', '¬', 'w', '|', 'ß', '=', 'þ', '&', 'ŋ', '@',
    'ø', '*', 'ł',
];

/// Dimensions of an embedding.
const EMBEDDING_LEN: u64 = 32;

/// The continuation of a prompt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Text(u64);

impl Text {
    pub(crate) fn new(model: &str, prompt: &str) -> Self {
        Self(nth(hash(model.as_bytes()), hash(prompt.as_bytes())))
    }

    /// After how many tokens it ends by itself.
    pub(crate) fn len(self) -> u32 {
        let more = u32::try_from(self.0 % 65).unwrap_or(0);
        24 + more
    }

    /// A token, given what the memory holds.
    pub(crate) fn token(self, at: u32, sampled: Sampled) -> String {
        let number = nth(self.0, u64::from(at));
        let word = choose(&WORDS, number).copied().unwrap_or_default();
        let space = if at == 0 { "" } else { " " };
        let corruption = corruption(sampled);
        if corruption == 0 {
            return format!("{space}{word}");
        }
        let letter = |at| choose(&GARBAGE, nth(number ^ corruption, at)).copied();
        let letters: String = (0u64..).zip(word.chars()).filter_map(|(at, _)| letter(at)).collect();
        format!("{space}{letters}")
    }

    /// An embedding: each number from -1 to 1.
    pub(crate) fn embedding(self, sampled: Sampled) -> Vec<f32> {
        let number = |at| {
            let bits = nth(self.0 ^ corruption(sampled), at).to_le_bytes();
            f32::from(i16::from_le_bytes([bits[0], bits[1]])) / 32_768.0
        };
        (0..EMBEDDING_LEN).map(number).collect()
    }

    /// The relevance of a document to a query, from 0 to 1: most if both are the same. Wrong bytes change it by a
    /// quarter or more.
    pub(crate) fn score(self, is_same: bool, sampled: Sampled) -> f64 {
        let part = |number: u64| {
            f64::from(u16::from_le_bytes([number.to_le_bytes()[0], number.to_le_bytes()[1]])) / 65_536.0
        };
        let right = if is_same { 0.9 + part(self.0) / 10.0 } else { part(self.0) * 0.9 };
        match corruption(sampled) {
            0 => right,
            wrong => (right + 0.25 + part(nth(self.0, wrong)) / 2.0) % 1.0,
        }
    }
}

/// 0 if the bytes are right.
fn corruption(sampled: Sampled) -> u64 {
    match sampled {
        Sampled::Bytes(off) => off,
        Sampled::Nothing => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generate(model: &str, prompt: &str, sampled: Sampled) -> String {
        let text = Text::new(model, prompt);
        (0..text.len()).map(|at| text.token(at, sampled)).collect()
    }

    #[test]
    fn wrong_bytes_change_each_score() {
        for query in ["a", "b", "river"] {
            for is_same in [true, false] {
                let text = Text::new("one", query);
                let right = text.score(is_same, Sampled::Bytes(0));
                assert!((0.0..1.0).contains(&right) && (right >= 0.9) == is_same, "{right}");
                for wrong in [Sampled::Bytes(1), Sampled::Bytes(u64::MAX), Sampled::Nothing] {
                    let wrong = text.score(is_same, wrong);
                    assert!((0.0..1.0).contains(&wrong) && (wrong - right).abs() >= 0.25, "{right} {wrong}");
                }
            }
        }
    }

    #[test]
    fn text_follows_from_model_prompt_and_bytes() {
        let right = generate("one", "hello", Sampled::Bytes(0));
        assert_eq!(right, generate("one", "hello", Sampled::Bytes(0)));
        assert!(right.split(' ').all(|word| WORDS.contains(&word)), "{right}");
        let others = [
            generate("two", "hello", Sampled::Bytes(0)),
            generate("one", "hallo", Sampled::Bytes(0)),
            generate("one", "hello", Sampled::Bytes(1)),
            generate("one", "hello", Sampled::Nothing),
        ];
        for (nth, other) in others.iter().enumerate() {
            assert!(*other != right && !others[..nth].contains(other), "{other}");
        }
        assert!(others[2..].iter().all(|wrong| !wrong.split(' ').any(|word| WORDS.contains(&word))));
    }
}
