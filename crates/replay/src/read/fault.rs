//! What is wrong with a file, and notes on what it lacks.

use std::fmt;

use ::poorwill::ByteSize;

use crate::trace::TraceError;

/// Where something is in a file. All but lines count from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Location {
    /// At a byte.
    Offset(usize),
    /// On a line, from 1.
    Line(usize),
    /// A key of a snapshot.
    Key(&'static str),
    /// An entry of a device's trace.
    Entry {
        /// The device.
        device: usize,
        /// The entry.
        entry: usize,
    },
    /// A segment of a snapshot.
    Segment(usize),
    /// A phase that Poorwill's recorder marked.
    Phase(usize),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Offset(offset) => write!(f, "offset {offset}"),
            Self::Line(line) => write!(f, "line {line}"),
            Self::Key(key) => write!(f, "key `{key}`"),
            Self::Entry { device, entry } => write!(f, "device {device}, entry {entry}"),
            Self::Segment(segment) => write!(f, "segment {segment}"),
            Self::Phase(phase) => write!(f, "phase {phase}"),
        }
    }
}

/// The file that the next step asks for.
pub(super) const DUMP: &str = "write the file with `torch.cuda.memory._dump_snapshot`";
pub(super) const AGAIN: &str = "copy the file again or record again";

/// A [`ReadError`] without its file.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) place: Location,
    pub(super) what: String,
    pub(super) next: &'static str,
}

impl Fault {
    /// Of a file that is broken.
    #[cold]
    pub(super) fn new(place: Location, what: impl Into<String>) -> Self {
        Self { place, what: what.into(), next: AGAIN }
    }

    pub(super) fn with_next(self, next: &'static str) -> Self {
        Self { next, ..self }
    }
}

/// Text of a file, short enough for a sentence.
pub(super) fn quoted(text: &str) -> String {
    const CHARS_MAX: usize = 40;
    let cut = text.char_indices().nth(CHARS_MAX).map(|(at, _)| at);
    let kept = text[..cut.unwrap_or(text.len())].replace('`', "'");
    format!("`{}{}`", kept.escape_debug(), if cut.is_some() { "…" } else { "" })
}

/// What cannot be, without the step: files have entries or lines instead.
pub(super) fn why(error: &TraceError) -> String {
    let text = error.to_string();
    text.split_once(": ").map_or(&*text, |(_, why)| why).to_owned()
}

/// A note: blocks that come first, because nothing says when they were allocated.
pub(super) fn lived_before(sizes: impl Iterator<Item = u64>) -> String {
    let (count, bytes) =
        sizes.fold((0_usize, 0_u64), |(count, sum), bytes| (count + 1, sum.saturating_add(bytes)));
    let (blocks, come) = if count == 1 { ("block", "comes") } else { ("blocks", "come") };
    let size = ByteSize(bytes);
    format!("{count} {blocks} of {size} lived before the trace began, and {come} first, by address.")
}
