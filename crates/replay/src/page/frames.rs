//! Frames of stacks, each text once, and which of a stack is the program's own.

use std::collections::HashMap;

use crate::trace::{StackNumber, Trace};

/// Deeper frames are counted only.
const DEPTH_MAX: usize = 64;
/// Longer lines are cut.
const LETTERS_MAX: usize = 400;
const UNKNOWN: &str = "unknown";

/// The innermost frame that is neither PyTorch's own nor of C++; the innermost one if there is no such.
pub(super) fn own(stack: &[String]) -> &str {
    own_at(stack).map_or(UNKNOWN, |at| &stack[at])
}

fn own_at(stack: &[String]) -> Option<usize> {
    let found = stack.iter().position(|frame| !is_foreign(frame));
    found.or_else(|| (!stack.is_empty()).then_some(0))
}

fn is_foreign(frame: &str) -> bool {
    const STARTS: [&str; 4] = ["??", "<frozen ", "torch/", "<eval_with_key>"];
    const PARTS: [&str; 6] = ["/torch/", "c10::", "at::", "torch::", "std::", ".so:"];
    STARTS.iter().any(|start| frame.starts_with(start)) || PARTS.iter().any(|part| frame.contains(part))
}

/// The frames of some stacks of a trace.
#[derive(Debug)]
pub(super) struct Frames<'t> {
    trace: &'t Trace,
    texts: Vec<String>,
    known: HashMap<&'t str, usize>,
    stacks: Vec<(usize, Vec<usize>)>,
    numbers: HashMap<StackNumber, usize>,
}

impl<'t> Frames<'t> {
    pub(super) fn of(trace: &'t Trace) -> Self {
        let (texts, known, stacks, numbers) = Default::default();
        Self { trace, texts, known, stacks, numbers }
    }

    /// The number of a stack among those that were asked for.
    pub(super) fn stack(&mut self, number: StackNumber) -> usize {
        if let Some(known) = self.numbers.get(&number) {
            return *known;
        }
        let stack = frames_of(self.trace, number);
        let mut frames: Vec<usize> = stack.iter().take(DEPTH_MAX).map(|frame| self.text(frame)).collect();
        if stack.len() > DEPTH_MAX {
            self.texts.push(format!("and {} more", stack.len() - DEPTH_MAX));
            frames.push(self.texts.len() - 1);
        }
        let own_at = own_at(stack).filter(|at| *at < frames.len()).unwrap_or(0);
        self.stacks.push((own_at, frames));
        self.numbers.insert(number, self.stacks.len() - 1);
        self.stacks.len() - 1
    }

    fn text(&mut self, frame: &'t str) -> usize {
        let texts = &mut self.texts;
        *self.known.entry(frame).or_insert_with(|| {
            texts.push(shortened(frame));
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
    fn the_own_frame_is_the_innermost_of_the_program() {
        for (frames, expected) in [
            (&["??:0 c10::alloc", "/v/site-packages/torch/nn/m.py:3 to", "/v/vllm/moe.py:9 load"][..], 2),
            (&["torch/nn/m.py:3 to", "<frozen runpy>:1 run", "<string>:1 <module>"], 2),
            (&["/v/site-packages/torch/nn/m.py:3 to", "??:0 main"], 0),
            (&["/x/attorch.py:3 to"], 0),
        ] {
            let stack: Vec<String> = frames.iter().map(|frame| (*frame).to_owned()).collect();
            assert_eq!(own(&stack), frames[expected]);
        }
        assert_eq!(own(&[]), "unknown");
    }

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
}
