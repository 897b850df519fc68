//! Reads what was recorded: snapshots of PyTorch, recordings of Poorwill, and the loads of `poorwill bench churn`.
//!
//! Promises:
//!
//! - Nothing of a file is run, whatever it says.
//! - Any bytes end in traces or in a sentence. Memory stays under a small multiple of the file's size.

mod json;
mod loads;
#[cfg(test)]
mod mutations;
mod pickle;
mod recorded;
mod snapshot;
mod value;

use std::fmt;

use crate::trace::{Trace, TraceError};

/// What was recorded, one trace for each device that has anything.
///
/// | format | begins with |
/// |---|---|
/// | pickle of `torch.cuda.memory._dump_snapshot`, protocols 0 to 5 | `0x80`, or a collection of protocol 0 or 1 |
/// | its JSON | `{` or `[` |
/// | recording of `poorwill.record()` | `{"poorwill_record":` |
/// | load of `poorwill bench churn --trace` | `step,event,` |
///
/// ```
/// use poorwill_replay::read::read;
///
/// let snapshot = br#"{"segments": [], "device_traces": [[
///     {"action": "alloc", "addr": 4096, "size": 600, "stream": 0},
///     {"action": "free_completed", "addr": 4096, "size": 600, "stream": 0}
/// ]]}"#;
/// let traces = read("load.json", snapshot)?;
/// assert_eq!(traces[0].live_bytes(), [600, 0]);
///
/// let error = read("load.pickle", b"\x80\x04cos\nsystem\n.").unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "load.pickle, offset 2: the opcode GLOBAL names code, and nothing was run; write the file with \
///      `torch.cuda.memory._dump_snapshot`"
/// );
/// # Ok::<(), poorwill_replay::read::ReadError>(())
/// ```
///
/// # Errors
/// If the bytes are in no such format, or contradict themselves.
pub fn read(name: &str, bytes: &[u8]) -> Result<Vec<Trace>, ReadError> {
    let read = || match Format::of(bytes)? {
        Format::Pickle => {
            let (arena, root) = pickle::read(bytes)?;
            snapshot::traces(name, &arena, root)
        }
        Format::Json => {
            let (arena, root) = json::read(bytes)?;
            snapshot::traces(name, &arena, root)
        }
        Format::Recording => Ok(vec![recorded::trace(name, bytes)?]),
        Format::Load => Ok(vec![loads::trace(name, bytes)?]),
    };
    read().map_err(|Fault { place, what, next }| ReadError { file: name.to_owned(), place, what, next })
}

/// Why a file has no traces: which file, where, what is wrong and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}, {place}: {what}; {next}")]
pub struct ReadError {
    file: String,
    place: Location,
    what: String,
    next: &'static str,
}

impl ReadError {
    /// Where in the file.
    #[must_use]
    pub const fn place(&self) -> Location {
        self.place
    }
}

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
const DUMP: &str = "write the file with `torch.cuda.memory._dump_snapshot`";
const AGAIN: &str = "copy the file again or record again";

/// A [`ReadError`] without its file.
#[derive(Debug)]
struct Fault {
    place: Location,
    what: String,
    next: &'static str,
}

impl Fault {
    /// Of a file that is broken.
    #[cold]
    fn new(place: Location, what: impl Into<String>) -> Self {
        Self { place, what: what.into(), next: AGAIN }
    }

    fn with_next(self, next: &'static str) -> Self {
        Self { next, ..self }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Pickle,
    Json,
    Recording,
    Load,
}

impl Format {
    /// By the first bytes.
    fn of(bytes: &[u8]) -> Result<Self, Fault> {
        let refuse = |what: &str, next| Err(Fault::new(Location::Offset(0), what).with_next(next));
        if u32::try_from(bytes.len()).is_err() {
            return refuse("the file has 4 GiB or more", "record a shorter part");
        }
        match bytes.trim_ascii_start() {
            [] => refuse("the file is empty", AGAIN),
            [0x80, ..] if bytes[0] == 0x80 => Ok(Self::Pickle),
            [b'(', b'd' | b'l', ..] | [b'}' | b']', b'q' | b'(' | b'.' | b'a', ..] => Ok(Self::Pickle),
            text @ [b'{', ..] if recorded::is_first_line(text) => Ok(Self::Recording),
            [b'{' | b'[', ..] => Ok(Self::Json),
            text if text.starts_with(loads::BEGINNING) => Ok(Self::Load),
            [0x1f, 0x8b, ..] => refuse("the file is compressed", "unpack it with gzip"),
            [b'P', b'K', ..] => refuse("the file is a zip archive, as of `torch.save`", DUMP),
            _ => refuse("this is no pickle, JSON, recording or load", DUMP),
        }
    }
}

/// Text of a file, short enough for a sentence.
fn quoted(text: &str) -> String {
    const CHARS_MAX: usize = 40;
    let cut = text.char_indices().nth(CHARS_MAX).map(|(at, _)| at);
    let kept = text[..cut.unwrap_or(text.len())].replace('`', "'");
    format!("`{}{}`", kept.escape_debug(), if cut.is_some() { "…" } else { "" })
}

/// What cannot be, without the step: files have entries or lines instead.
fn why(error: &TraceError) -> String {
    let text = error.to_string();
    text.split_once(": ").map_or(&*text, |(_, why)| why).to_owned()
}

/// A note: blocks that come first, because nothing says when they were allocated.
fn lived_before(sizes: impl Iterator<Item = u64>) -> String {
    let (count, bytes) =
        sizes.fold((0_usize, 0_u64), |(count, sum), bytes| (count + 1, sum.saturating_add(bytes)));
    let (blocks, come) = if count == 1 { ("block", "comes") } else { ("blocks", "come") };
    format!("{count} {blocks} of {} lived before the trace began, and {come} first, by address.", gib(bytes))
}

/// A note: the trace keeps one failure.
fn failed_often(count: usize) -> String {
    format!("Memory lacked {count} times; the last one is shown.")
}

/// A size for people.
fn gib(bytes: u64) -> String {
    const HUNDREDTH: u64 = (1 << 30) / 100;
    let hundredths = bytes / HUNDREDTH;
    format!("{}.{:02} GiB", hundredths / 100, hundredths % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_first_bytes() {
        let cases: [(&[u8], Format); 9] = [
            (b"\x80\x02}.", Format::Pickle),
            (b"(dp0\n.", Format::Pickle),
            (b"}q\x00.", Format::Pickle),
            (b"].", Format::Pickle),
            (b"\n {\"segments\": []}", Format::Json),
            (b"[]", Format::Json),
            (b"[{\"device\": 0}]", Format::Json),
            (b"{\"poorwill_record\": 1}\n{\"t\":\"e\"}\n", Format::Recording),
            (b"step,event,block", Format::Load),
        ];
        for (bytes, format) in cases {
            assert_eq!(Format::of(bytes).ok(), Some(format), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn other_files_are_refused_with_what_to_do() {
        for (bytes, text) in [
            (&b""[..], "f, offset 0: the file is empty; copy the file again or record again"),
            (b"\x1f\x8b\x08", "f, offset 0: the file is compressed; unpack it with gzip"),
            (
                b"PK\x03\x04",
                "f, offset 0: the file is a zip archive, as of `torch.save`; write the file with \
                 `torch.cuda.memory._dump_snapshot`",
            ),
            (
                b"hello",
                "f, offset 0: this is no pickle, JSON, recording or load; write the file with \
                 `torch.cuda.memory._dump_snapshot`",
            ),
        ] {
            assert_eq!(read("f", bytes).unwrap_err().to_string(), text);
        }
    }

    #[test]
    fn long_text_is_cut() {
        assert_eq!(quoted("a\nb"), "`a\\nb`");
        assert_eq!(quoted(&"é".repeat(50)), format!("`{}…`", "é".repeat(40)));
    }
}
