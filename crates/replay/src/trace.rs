//! What a program allocated and freed on one device, in its order.
//!
//! Promises:
//!
//! - A block is allocated once before it is freed, and freed once at most.
//! - No size is zero, and the sum of what is live fits into 64 bits.
//! - Text of a file has no controls of a terminal: what a builder is given has them escaped.

use std::borrow::Cow;
use std::collections::HashMap;

use crate::card::Card;
use crate::claim::Claim;

/// A block, by its position in [`Trace::blocks`].
pub type BlockNumber = u32;

/// Frames, by their position in [`Trace::stacks`]. 0 is unknown.
pub type StackNumber = u32;

/// One thing that happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A block is allocated.
    Alloc(BlockNumber),
    /// It is freed, and may be given out again.
    Free(BlockNumber),
    /// What is cached is to be given back, as by `torch.cuda.empty_cache`.
    EmptyCache,
}

/// A block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// As it was asked for.
    pub bytes: u64,
    /// The stream that it was allocated on, by its number in this trace.
    pub stream: u32,
    /// The private pool that it belongs to; 0 is the allocator's own.
    pub pool: u32,
    /// Who asked for it.
    pub stack: StackNumber,
}

/// A part of a trace with a name, such as `load`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phase {
    /// Its name.
    pub name: String,
    /// Its first step.
    pub from: usize,
}

/// What the allocator that was recorded did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Its settings, as `max_split_size_mb:20`; empty if none were set or known.
    pub settings: String,
    /// What it had mapped after each step.
    pub mapped_bytes: Vec<u64>,
    /// The refusal that ended the load. Those before which it went on are no steps.
    pub refused: Option<Refusal>,
}

/// A request that an allocator had no memory for. In a trace it is a block that is freed at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// Its step.
    pub step: usize,
    /// What was asked for.
    pub asked_bytes: u64,
    /// What the allocator had mapped then, and the card had free; `None` if that is not known.
    pub usable_bytes: Option<u64>,
}

/// Allocations and frees of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    /// For people: the file, and the device if there are several.
    pub name: String,
    /// The device that it was recorded on, by its number in the program; `None` if that is not known.
    pub device: Option<usize>,
    /// In their order.
    pub steps: Vec<Step>,
    /// In the order of their allocation.
    pub blocks: Vec<Block>,
    /// Lines such as `model.py:12 load`, the innermost first. The first stack is empty.
    pub stacks: Vec<Vec<String>>,
    /// In their order; steps before the first one belong to none.
    pub phases: Vec<Phase>,
    /// The card that it was recorded on, where that is known.
    pub card: Option<Card>,
    /// Whether all of its memory is known, and not only what was usable.
    pub is_card_whole: bool,
    /// Where the card is not known: that of another device of its snapshot, and that device's number.
    pub card_beside: Option<(Card, usize)>,
    /// What the recorded allocator did, where that is known.
    pub recorded: Option<Recorded>,
    /// What the load takes beside its allocator.
    pub claims: Vec<Claim>,
    /// What is not exact, for people.
    pub notes: Vec<String>,
}

/// A trace that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A block of no bytes.
    #[error("step {step}: a block of no bytes is allocated")]
    Empty {
        /// The step.
        step: usize,
    },
    /// A block is live already.
    #[error("step {step}: what is at {key:#x} is allocated, and was not freed")]
    Live {
        /// The step.
        step: usize,
        /// The block, as its recorder names it.
        key: u64,
    },
    /// A block is not live.
    #[error("step {step}: what is at {key:#x} is freed, and is not live")]
    NotLive {
        /// The step.
        step: usize,
        /// The block, as its recorder names it.
        key: u64,
    },
    /// More than can be.
    #[error("step {step}: live blocks have more bytes than 64 bits can count")]
    TooLarge {
        /// The step.
        step: usize,
    },
    /// More than can be counted.
    #[error("step {step}: more than {max} blocks; record a shorter part")]
    TooMany {
        /// The step.
        step: usize,
        /// How many there can be.
        max: u32,
    },
}

impl Trace {
    /// Bytes that are live after each step.
    #[must_use]
    pub fn live_bytes(&self) -> Vec<u64> {
        let mut live = 0_u64;
        let after = |step: &Step| {
            match step {
                Step::Alloc(block) => live += self.block(*block).bytes,
                Step::Free(block) => live -= self.block(*block).bytes,
                Step::EmptyCache => {}
            }
            live
        };
        self.steps.iter().map(after).collect()
    }

    /// A block of this trace.
    ///
    /// # Panics
    /// If it is none.
    #[must_use]
    pub fn block(&self, number: BlockNumber) -> &Block {
        &self.blocks[usize::try_from(number).unwrap_or(usize::MAX)]
    }

    /// The block that a step asks for.
    pub(crate) fn asked_at(&self, step: usize) -> Option<&Block> {
        match self.steps.get(step) {
            Some(Step::Alloc(number)) => Some(self.block(*number)),
            _ => None,
        }
    }

    /// Who asked for a block, the innermost frame first.
    pub(crate) fn frames_of(&self, block: &Block) -> &[String] {
        let at = usize::try_from(block.stack).unwrap_or(usize::MAX);
        self.stacks.get(at).map_or(&[], Vec::as_slice)
    }

    /// The refusal that ended the load: less was allocated after it than it asked for.
    #[must_use]
    pub fn ended_by(&self) -> Option<&Refusal> {
        self.recorded.as_ref()?.refused.as_ref()
    }

    /// The phase that a step belongs to.
    #[must_use]
    pub fn phase_at(&self, step: usize) -> Option<&str> {
        let at = self.phases.partition_point(|phase| phase.from <= step);
        at.checked_sub(1).map(|at| &*self.phases[at].name)
    }
}

/// Makes a trace, a step at a time. Blocks go by keys of the recorder, such as addresses, that may come again.
#[derive(Debug, Default)]
pub struct TraceBuilder {
    trace: Trace,
    live: HashMap<u64, BlockNumber>,
    live_bytes: u64,
    stacks: HashMap<Vec<String>, StackNumber>,
}

impl TraceBuilder {
    /// Of this name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let trace = Trace { name: name.to_owned(), stacks: vec![Vec::new()], ..Trace::default() };
        Self { trace, stacks: HashMap::from([(Vec::new(), 0)]), ..Self::default() }
    }

    /// The number of these frames.
    pub fn stack(&mut self, frames: Vec<String>) -> StackNumber {
        if let Some(number) = self.stacks.get(&frames) {
            return *number;
        }
        let number = u32::try_from(self.trace.stacks.len()).unwrap_or(0);
        if number > 0 {
            self.trace.stacks.push(frames.iter().map(|frame| printable(frame).into_owned()).collect());
            self.stacks.insert(frames, number);
        }
        number
    }

    /// # Errors
    /// If it cannot be.
    pub fn alloc(&mut self, key: u64, block: Block) -> Result<(), TraceError> {
        let step = self.trace.steps.len();
        if block.bytes == 0 {
            return Err(TraceError::Empty { step });
        }
        let number = u32::try_from(self.trace.blocks.len()).ok().filter(|number| *number < u32::MAX);
        let number = number.ok_or(TraceError::TooMany { step, max: u32::MAX })?;
        let live_bytes = self.live_bytes.checked_add(block.bytes).ok_or(TraceError::TooLarge { step })?;
        if self.live.contains_key(&key) {
            return Err(TraceError::Live { step, key });
        }
        self.live.insert(key, number);
        self.live_bytes = live_bytes;
        self.trace.blocks.push(block);
        self.trace.steps.push(Step::Alloc(number));
        Ok(())
    }

    /// # Errors
    /// If it is not live.
    pub fn free(&mut self, key: u64) -> Result<(), TraceError> {
        let step = self.trace.steps.len();
        let number = self.live.remove(&key).ok_or(TraceError::NotLive { step, key })?;
        self.live_bytes -= self.trace.block(number).bytes;
        self.trace.steps.push(Step::Free(number));
        Ok(())
    }

    /// What is cached is to be given back.
    pub fn empty_cache(&mut self) {
        self.trace.steps.push(Step::EmptyCache);
    }

    /// What follows belongs to this phase.
    pub fn phase(&mut self, name: &str) {
        self.trace.phases.push(Phase { name: printable(name).into_owned(), from: self.trace.steps.len() });
    }

    /// What is not exact, for people.
    pub fn note(&mut self, note: String) {
        self.trace.notes.push(note);
    }

    /// Whether a block with this key is live.
    #[must_use]
    pub fn is_live(&self, key: u64) -> bool {
        self.live.contains_key(&key)
    }

    /// How many steps there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.trace.steps.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.trace.steps.is_empty()
    }

    /// The trace, with what its recorder's allocator did.
    #[must_use]
    pub fn finish(mut self, recorded: Option<Recorded>) -> Trace {
        self.trace.recorded = recorded
            .map(|recorded| Recorded { settings: printable(&recorded.settings).into_owned(), ..recorded });
        self.trace
    }
}

/// With what moves a cursor, colours or turns text around escaped, as `\u{1b}`.
fn printable(text: &str) -> Cow<'_, str> {
    let is_control = |letter: char| {
        letter.is_control()
            || matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(is_control) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_control(letter) { escaped.extend(letter.escape_default()) } else { escaped.push(letter) }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(bytes: u64) -> Block {
        Block { bytes, stream: 0, pool: 0, stack: 0 }
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_step() {
        let mut trace = TraceBuilder::new("a");
        trace.alloc(7, block(5)).unwrap();
        assert_eq!(trace.alloc(7, block(5)), Err(TraceError::Live { step: 1, key: 7 }));
        assert_eq!(trace.alloc(8, block(0)), Err(TraceError::Empty { step: 1 }));
        assert_eq!(trace.alloc(8, block(u64::MAX)), Err(TraceError::TooLarge { step: 1 }));
        trace.phase("serve");
        trace.free(7).unwrap();
        assert_eq!(
            trace.free(7).unwrap_err().to_string(),
            "step 2: what is at 0x7 is freed, and is not live"
        );
        let trace = trace.finish(None);
        assert_eq!(trace.live_bytes(), [5, 0]);
        assert_eq!([0, 1].map(|step| trace.phase_at(step)), [None, Some("serve")]);
    }

    #[test]
    fn controls_of_a_terminal_are_escaped() {
        let text = "é`\u{1b}[31m\n\u{9b}\u{202e}";
        let escaped = "é`\\u{1b}[31m\\n\\u{9b}\\u{202e}";
        let mut trace = TraceBuilder::new("a");
        let numbers = [trace.stack(vec![text.to_owned()]), trace.stack(vec![text.to_owned()])];
        trace.phase(text);
        let trace = trace.finish(Some(Recorded { settings: text.to_owned(), ..Recorded::default() }));
        assert_eq!((numbers, &trace.stacks[1][..]), ([1, 1], &[escaped.to_owned()][..]));
        assert_eq!((&*trace.phases[0].name, &*trace.recorded.unwrap().settings), (escaped, escaped));
    }

    #[test]
    fn equal_frames_have_one_number() {
        let mut trace = TraceBuilder::new("a");
        let numbers = ["", "x", "y", "x"]
            .map(|line| trace.stack(line.split_terminator(' ').map(str::to_owned).collect()));
        assert_eq!(numbers, [0, 1, 2, 1]);
    }
}
