//! Reads what was recorded: snapshots of PyTorch, recordings of Poorwill, and the loads of `poorwill bench churn`.
//!
//! Promises:
//!
//! - Nothing of a file is run, whatever it says.
//! - Any bytes end in traces or in a sentence. Memory stays under a small multiple of the file's size.

mod fault;
mod json;
mod loads;
#[cfg(test)]
mod mutations;
mod pickle;
mod recorded;
mod refusals;
mod snapshot;
mod value;

use self::fault::{AGAIN, DUMP, Fault};
use crate::trace::Trace;

pub use self::fault::Location;

/// What was recorded, one trace for each device that has anything.
///
/// | format | begins with |
/// |---|---|
/// | pickle of `torch.cuda.memory._dump_snapshot`, protocols 0 to 5 | `0x80`, or a collection of protocol 0 or 1 |
/// | its JSON | `{` or `[` |
/// | recording of `poorwill.record()` | `{"poorwill_record":` |
/// | load of `poorwill bench churn --trace` | `step,event,` |
///
/// Text is UTF-8, and may begin with its byte order mark.
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
pub fn read(name: &str, bytes: impl AsRef<[u8]>) -> Result<Vec<Trace>, ReadError> {
    let read = || match Format::of(bytes.as_ref())? {
        Format::Pickle => {
            let (arena, root) = pickle::read(bytes.as_ref())?;
            // Memory is short from here on.
            drop(bytes);
            snapshot::traces(name, &arena, root)
        }
        Format::Json => {
            let (arena, root) = json::read(without_mark(bytes.as_ref()))?;
            drop(bytes);
            snapshot::traces(name, &arena, root)
        }
        Format::Recording => Ok(vec![recorded::trace(name, without_mark(bytes.as_ref()))?]),
        Format::Load => Ok(vec![loads::trace(name, without_mark(bytes.as_ref()))?]),
    };
    read().map_err(|fault| fault.of(name))
}

/// Larger files are refused.
pub const FILE_BYTES_MAX: u64 = u32::MAX as u64;

/// Looks at the beginning of a file alone, so that one of another format need not be read.
///
/// # Errors
/// If no format begins so.
pub fn check_beginning(name: &str, bytes: &[u8]) -> Result<(), ReadError> {
    Format::of(bytes).map(drop).map_err(|fault| fault.of(name))
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

impl Fault {
    fn of(self, name: &str) -> ReadError {
        let Self { place, what, next } = self;
        ReadError { file: name.to_owned(), place, what, next }
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
        if let Some(what) = other_encoding(bytes) {
            return refuse(what, "write the text again as UTF-8");
        }
        match without_mark(bytes).trim_ascii_start() {
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

/// Text without the byte order mark that some editors and shells write.
fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// By the byte order mark, or by the zeros around the bracket that JSON begins with.
fn other_encoding(bytes: &[u8]) -> Option<&'static str> {
    Some(match bytes {
        [0xff, 0xfe, 0, 0, ..] | [b'{' | b'[', 0, 0, 0, ..] => "the text is in UTF-32, little end first",
        [0, 0, 0xfe, 0xff, ..] | [0, 0, 0, b'{' | b'[', ..] => "the text is in UTF-32, big end first",
        [0xff, 0xfe, ..] | [b'{' | b'[', 0, ..] => "the text is in UTF-16, little end first",
        [0xfe, 0xff, ..] | [0, b'{' | b'[', ..] => "the text is in UTF-16, big end first",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::fault::quoted;
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
    fn a_byte_order_mark_of_utf_8_is_passed_over() {
        let load = b"step,event,block,bytes,live_bytes,mapped_bytes\n0,take,0,5,5,5\n";
        let snapshot = br#"{"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": 6, "stream": 0}]]}"#;
        let recording = b"{\"poorwill_record\":1}\n{\"t\":\"a\",\"k\":7,\"b\":5}\n";
        for text in [&snapshot[..], recording, load] {
            assert_eq!(
                read("f", [b"\xef\xbb\xbf", text].concat()),
                read("f", text),
                "{}",
                text.escape_ascii()
            );
            assert!(read("f", text).is_ok(), "{}", text.escape_ascii());
        }
        let alone = read("f", b"\xef\xbb\xbf").unwrap_err().to_string();
        assert_eq!(alone, "f, offset 0: the file is empty; copy the file again or record again");
    }

    #[test]
    fn other_encodings_are_named_with_what_to_do() {
        let widened = |text: &str, width: usize, is_big: bool| -> Vec<u8> {
            let of = |letter: char| {
                let bytes = u32::from(letter).to_le_bytes();
                let mut unit = bytes[..width].to_vec();
                if is_big {
                    unit.reverse();
                }
                unit
            };
            text.chars().flat_map(of).collect()
        };
        for (width, name) in [(2, "UTF-16"), (4, "UTF-32")] {
            for (is_big, end) in [(false, "little"), (true, "big")] {
                for text in ["\u{feff}{}", "\u{feff} {}", "{}", "[]"] {
                    let error = read("f", widened(text, width, is_big)).unwrap_err().to_string();
                    let expected = format!(
                        "f, offset 0: the text is in {name}, {end} end first; write the text again as UTF-8"
                    );
                    assert_eq!(error, expected, "{text:?}");
                }
            }
        }
    }

    #[test]
    fn long_text_is_cut() {
        assert_eq!(quoted("a\nb"), "`a\\nb`");
        assert_eq!(quoted(&"é".repeat(50)), format!("`{}…`", "é".repeat(40)));
    }
}
