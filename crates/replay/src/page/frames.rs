//! Frames of stacks, each text once, and which of a stack is the program's own.

use std::collections::HashMap;

use crate::frames::own_at;
use crate::trace::{StackNumber, Trace};

/// Deeper frames are counted only.
const DEPTH_MAX: usize = 64;
/// Longer lines are cut.
const LETTERS_MAX: usize = 400;
/// When there are so many bytes of text, further stacks have their own frame and what is known of others.
const TEXT_BYTES_MAX: usize = 600_000;
const UNKNOWN: &str = "unknown";

/// The text of the frame that matters.
pub(super) fn own(stack: &[String]) -> &str {
    own_at(stack).map_or(UNKNOWN, |at| &stack[at])
}

/// The frames of some stacks of a trace.
#[derive(Debug)]
pub(super) struct Frames<'t> {
    trace: &'t Trace,
    texts: Vec<String>,
    text_bytes: usize,
    known: HashMap<&'t str, usize>,
    stacks: Vec<(usize, Vec<usize>)>,
    numbers: HashMap<StackNumber, usize>,
}

impl<'t> Frames<'t> {
    pub(super) fn of(trace: &'t Trace) -> Self {
        let (texts, known, stacks, numbers) = Default::default();
        Self { trace, texts, text_bytes: 0, known, stacks, numbers }
    }

    /// The number of a stack among those that were asked for.
    pub(super) fn stack(&mut self, number: StackNumber) -> usize {
        if let Some(known) = self.numbers.get(&number) {
            return *known;
        }
        let stack = frames_of(self.trace, number);
        let own_at = own_at(stack).filter(|at| *at < DEPTH_MAX).unwrap_or(0);
        let (mut frames, mut own, mut left_out) = (Vec::new(), 0, stack.len().saturating_sub(DEPTH_MAX));
        for (at, frame) in stack.iter().take(DEPTH_MAX).enumerate() {
            let has_space = self.text_bytes < TEXT_BYTES_MAX;
            if at == own_at {
                own = frames.len();
            }
            if at == own_at || has_space || self.known.contains_key(frame.as_str()) {
                frames.push(self.text(frame));
            } else {
                left_out += 1;
            }
        }
        if left_out > 0 {
            self.texts.push(format!("and {left_out} more"));
            frames.push(self.texts.len() - 1);
        }
        let own_at = own;
        self.stacks.push((own_at, frames));
        self.numbers.insert(number, self.stacks.len() - 1);
        self.stacks.len() - 1
    }

    fn text(&mut self, frame: &'t str) -> usize {
        let (texts, text_bytes) = (&mut self.texts, &mut self.text_bytes);
        *self.known.entry(frame).or_insert_with(|| {
            texts.push(shortened(frame));
            *text_bytes += texts.last().map_or(0, String::len);
            texts.len() - 1
        })
    }

    /// All texts, and for each stack which of its frames is its own, then all of them.
    pub(super) fn finish(self) -> (Vec<String>, Vec<Vec<usize>>) {
        let whole = |(own_at, frames): (usize, Vec<usize>)| [vec![own_at], frames].concat();
        (self.texts, self.stacks.into_iter().map(whole).collect())
    }
}

pub(super) fn frames_of(trace: &Trace, number: StackNumber) -> &[String] {
    let at = usize::try_from(number).unwrap_or(usize::MAX);
    trace.stacks.get(at).map_or(&[], Vec::as_slice)
}

/// The end of a line says more than its beginning, which is a path.
pub(super) fn shortened(frame: &str) -> String {
    match frame.char_indices().rev().nth(LETTERS_MAX - 1) {
        Some((at, _)) if at > 0 => format!("…{}", &frame[at..]),
        _ => frame.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_and_deep_stacks_are_cut_and_texts_are_kept_once() {
        let deep: Vec<String> = (0..100).map(|at| format!("a.py:{at} f")).collect();
        let long = vec!["ä".repeat(1000), "a.py:3 f".to_owned()];
        let trace = Trace { stacks: vec![vec![], deep, long], ..Trace::default() };
        let mut frames = Frames::of(&trace);
        assert_eq!([2, 1, 2, 0].map(|number| frames.stack(number)), [0, 1, 0, 2]);
        let (texts, stacks) = frames.finish();
        assert_eq!(stacks.iter().map(Vec::len).collect::<Vec<_>>(), [3, 66, 1]);
        assert_eq!(texts[0], format!("…{}", "ä".repeat(LETTERS_MAX)));
        assert_eq!(texts[*stacks[1].last().unwrap()], "and 36 more");
        assert_eq!(texts.len(), 1 + 64 + 1, "what two stacks have is there once");
    }

    #[test]
    fn all_texts_together_have_a_bound_and_each_stack_its_own_frame() {
        let stack = |number: usize| {
            let mut frames: Vec<String> =
                (0..50).map(|at| format!("{}{at}.py:{number} f", "x".repeat(90))).collect();
            frames.insert(3, format!("/torch/{number}"));
            frames.rotate_left(3);
            frames
        };
        let trace = Trace { stacks: (0..500).map(stack).collect(), ..Trace::default() };
        let mut frames = Frames::of(&trace);
        (0..500).for_each(|number| assert_eq!(u32::try_from(frames.stack(number)), Ok(number)));
        let (texts, stacks) = frames.finish();
        assert!(texts.iter().map(String::len).sum::<usize>() < TEXT_BYTES_MAX * 5 / 4);
        for (number, stack) in stacks.iter().enumerate() {
            assert_eq!(texts[stack[1 + stack[0]]], own(&trace.stacks[number]));
        }
        assert_eq!(stacks[499].len(), 3);
        assert!(texts[stacks[499][2]].starts_with("and "));
    }
}
