//! An answer to a canary, and whether it is right.

use serde_json::{Value, json};

use crate::config::CanaryKind;

/// Least cosine of an embedding and the first one. Batches and kernels change far less; wrong weights far more.
const COSINE_MIN: f64 = 0.99;
/// Most difference of a score from the first one, if scores are around 1 or less; otherwise relative.
const SCORE_ERROR_MAX: f64 = 0.02;
/// Most characters of a text in a message.
const EXCERPT_MAX: usize = 120;

/// An answer to a canary.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The kind of request that was answered.
    pub kind: CanaryKind,
    /// What it answered.
    pub content: Content,
}

/// The content of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Of a completion, a chat, or a page.
    Text(String),
    /// An embedding.
    Vector(Vec<f64>),
    /// Scores of a rerank, in the order of its documents.
    Scores(Vec<f64>),
}

impl Answer {
    /// Whether it is as right as the model's first one.
    ///
    /// # Errors
    /// How they differ.
    pub fn agrees_with(&self, first: &Self) -> Result<(), String> {
        match (&self.content, &first.content) {
            _ if matches!(self.kind, CanaryKind::Get | CanaryKind::None) => Ok(()),
            (Content::Text(text), Content::Text(first)) if text == first => Ok(()),
            (Content::Text(text), Content::Text(first)) => {
                Err(format!("it answered {:?}, and at first {:?}", start_of(text), start_of(first)))
            }
            (Content::Vector(numbers), Content::Vector(first)) => agree(numbers, first),
            (Content::Scores(scores), Content::Scores(first)) => scores_agree(scores, first),
            _ => Err("its answer is of another kind than its first one".to_owned()),
        }
    }

    /// Whether it contains this text.
    ///
    /// # Errors
    /// What it says instead.
    pub fn contains(&self, expected: &str) -> Result<(), String> {
        match &self.content {
            Content::Text(text) if text.contains(expected) => Ok(()),
            Content::Text(text) => Err(format!(
                "it answered {:?}, which does not contain {:?}",
                start_of(text),
                start_of(expected)
            )),
            _ => Err(format!("its answer is no text, and cannot contain {:?}", start_of(expected))),
        }
    }

    /// For the state file.
    pub(crate) fn to_json(&self) -> Value {
        match &self.content {
            Content::Text(text) => json!(text),
            Content::Vector(numbers) | Content::Scores(numbers) => json!(numbers),
        }
    }

    pub(crate) fn of_json(kind: CanaryKind, value: &Value) -> Option<Self> {
        let content = match kind {
            CanaryKind::Embedding => Content::Vector(numbers(value)?),
            CanaryKind::Rerank => Content::Scores(numbers(value)?),
            _ => Content::Text(value.as_str()?.to_owned()),
        };
        Some(Self { kind, content })
    }
}

/// `None` if one is not a number, as NaN is not in JSON.
pub(super) fn numbers(value: &Value) -> Option<Vec<f64>> {
    value.as_array()?.iter().map(Value::as_f64).collect()
}

fn agree(numbers: &[f64], first: &[f64]) -> Result<(), String> {
    if numbers.len() != first.len() {
        return Err(format!("its embedding has {} numbers, and at first {}", numbers.len(), first.len()));
    }
    let dot = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(a, b)| a * b).sum::<f64>();
    let cosine = dot(numbers, first) / (dot(numbers, numbers).sqrt() * dot(first, first).sqrt());
    // NaN is wrong as well.
    if cosine >= COSINE_MIN {
        return Ok(());
    }
    Err(format!(
        "its embedding has a cosine of {cosine:.3} with its first one, and {COSINE_MIN} is the least"
    ))
}

fn scores_agree(scores: &[f64], first: &[f64]) -> Result<(), String> {
    let is_near = |(one, other): (&f64, &f64)| (one - other).abs() <= SCORE_ERROR_MAX * other.abs().max(1.0);
    if scores.len() == first.len() && scores.iter().zip(first).all(is_near) {
        return Ok(());
    }
    Err(format!("its scores are {scores:?}, and at first {first:?}"))
}

fn start_of(text: &str) -> String {
    text.chars().take(EXCERPT_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(numbers: &[f64]) -> Answer {
        Answer { kind: CanaryKind::Embedding, content: Content::Vector(numbers.to_vec()) }
    }

    #[test]
    fn vectors_agree_by_their_direction() {
        let first = vector(&[1.0, 2.0, -3.0]);
        for near in [[1.0, 2.0, -3.0], [2.0, 4.0, -6.0], [1.01, 2.0, -2.98]] {
            assert_eq!(vector(&near).agrees_with(&first), Ok(()), "{near:?}");
        }
        let wrong: [(&[f64], &str); 4] = [
            (&[1.0, 2.0], "2 numbers, and at first 3"),
            (&[0.0, 0.0, 0.0], "cosine"),
            (&[f64::NAN, 2.0, -3.0], "cosine"),
            (&[3.0, -1.0, 2.0], "cosine of -0.357"),
        ];
        for (numbers, reason) in wrong {
            let error = vector(numbers).agrees_with(&first).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn scores_agree_within_a_tolerance() {
        let scores =
            |scores: [f64; 2]| Answer { kind: CanaryKind::Rerank, content: Content::Scores(scores.to_vec()) };
        for (one, first, is_right) in [
            ([0.98, 0.01], [0.97, 0.012], true),
            ([9.1, -11.0], [9.0, -10.9], true),
            ([0.01, 0.98], [0.98, 0.01], false),
            ([0.9, 0.01], [0.98, 0.01], false),
            ([f64::NAN, 0.01], [0.98, 0.01], false),
        ] {
            assert_eq!(scores(one).agrees_with(&scores(first)).is_ok(), is_right, "{one:?} {first:?}");
        }
    }

    #[test]
    fn answers_survive_the_state_file() {
        for answer in [
            vector(&[0.25, -1.0]),
            Answer { kind: CanaryKind::Rerank, content: Content::Scores(vec![1.0, 0.5]) },
            Answer { kind: CanaryKind::Chat, content: Content::Text("7".to_owned()) },
        ] {
            let text = answer.to_json().to_string();
            let value = serde_json::from_str(&text).unwrap();
            assert_eq!(Answer::of_json(answer.kind, &value), Some(answer));
        }
    }
}
