//! Recordings: what `poorwill.record()` and `poorwill.pool` write while a program runs.
//!
//! A line is a JSON object. The first one says what was recorded; all but the version may be missing:
//!
//! ```text
//! {"poorwill_record":1,"device":0,"allocator":"pytorch max_split_size_mb:20","card":{"total_bytes":1,"taken_bytes":0}}
//! ```
//!
//! | `t` | what happened | keys |
//! |---|---|---|
//! | `a` | a block is allocated | `k` its key, `b` its bytes, `s` stream, `p` pool, `f` frames |
//! | `f` | a block is freed | `k`; `b` if it may have lived before the recording |
//! | `p` | a phase begins | `n` its name |
//! | `m` | what the allocator has mapped now | `b` |
//! | `e` | what is cached is to be given back | |
//! | `o` | memory lacks | `b` asked for; `d` what the card has free, if known |
//!
//! - A key names a live block, and may come again once it is freed: addresses will do.
//! - Frames are a list of lines, or the number of a list that came before. Lists count from 0, in this file.
//! - A program that dies may leave half a last line, without its newline. It is left out, with a note.
//! - Another `t` or version is refused. Other keys are ignored: a recorder may add what can be.
//!
//! Promises: what is not so is an error with its line.

use std::borrow::Cow;
use std::collections::HashSet;
use std::iter;

use serde::Deserialize;

use super::fault::{Fault, Location, lived_before, quoted, why};
use super::json;
use super::refusals::{self, Refusals, Request, SeenMemory};
use crate::card::Card;
use crate::trace::{Block, Recorded, StackNumber, Trace, TraceBuilder};

const VERSION: u64 = 1;
const FIRST_KEY: &[u8] = b"\"poorwill_record\"";
const NEWER: &str = "read it with the version of Poorwill that wrote it";

/// Whether a file, which begins with a brace, is a recording.
pub(super) fn is_first_line(text: &[u8]) -> bool {
    text[1..].trim_ascii_start().starts_with(FIRST_KEY)
}

/// The trace of a file.
pub(super) fn trace(name: &str, bytes: &[u8]) -> Result<Trace, Fault> {
    let mut lines = lines(bytes);
    let first = lines.next().ok_or_else(|| Fault::new(Location::Line(1), "the file is empty"))?;
    let head: Head<'_> = first.parsed()?;
    if head.poorwill_record != VERSION {
        let what = format!("recordings of version {} are unknown", head.poorwill_record);
        return Err(Fault::new(Location::Line(first.number), what).with_next(NEWER));
    }
    let mut reader = Recording::new(name);
    for line in lines {
        match line.parsed() {
            Ok(event) => {
                let event = reader.event(event, &line)?;
                reader.events.push((line.number, event));
            }
            Err(_) if !line.is_whole => {
                reader.builder.note(format!("Line {} has no end, and is left out.", line.number));
            }
            Err(fault) => return Err(fault),
        }
    }
    reader.finish(&head)
}

#[derive(Deserialize)]
struct Head<'l> {
    poorwill_record: u64,
    #[serde(borrow)]
    allocator: Option<Cow<'l, str>>,
    device: Option<usize>,
    card: Option<CardSizes>,
}

#[derive(Deserialize, Clone, Copy)]
struct CardSizes {
    total_bytes: u64,
    #[serde(default)]
    taken_bytes: u64,
}

#[derive(Deserialize)]
struct EventLine<'l> {
    #[serde(borrow)]
    t: Cow<'l, str>,
    k: Option<u64>,
    b: Option<u64>,
    d: Option<u64>,
    #[serde(default)]
    s: u32,
    #[serde(default)]
    p: u32,
    f: Option<FramesKey>,
    n: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum FramesKey {
    Of(Vec<String>),
    At(usize),
}

/// A line, as far as the file has it.
#[derive(Debug)]
struct Source<'b> {
    number: usize,
    bytes: &'b [u8],
    is_whole: bool,
}

impl<'b> Source<'b> {
    fn parsed<T: Deserialize<'b>>(&self) -> Result<T, Fault> {
        let place = Location::Line(self.number);
        serde_json::from_slice(self.bytes).map_err(|error| Fault { place, ..json::fault(&error) })
    }

    fn fault(&self, what: impl Into<String>) -> Fault {
        Fault::new(Location::Line(self.number), what)
    }
}

/// Those that are not blank.
fn lines(bytes: &[u8]) -> impl Iterator<Item = Source<'_>> {
    let mut left = bytes;
    let next = move || {
        let line = left.split_inclusive(|byte| *byte == b'\n').next()?;
        left = &left[line.len()..];
        Some(line)
    };
    let all = (1..).zip(iter::from_fn(next)).map(|(number, line)| Source {
        number,
        bytes: line.trim_ascii(),
        is_whole: line.ends_with(b"\n"),
    });
    all.filter(|line| !line.bytes.is_empty())
}

enum Event {
    Alloc(u64, Block),
    Free(u64, Option<u64>),
    Phase(String),
    Mapped(u64),
    EmptyCache,
    /// What was asked for, and what the card had free.
    OutOfMemory(u64, Option<u64>),
}

impl Event {
    const fn request(&self) -> Option<Request> {
        match self {
            Self::Alloc(_, block) => Some(Request::Allocated(block.bytes)),
            Self::OutOfMemory(bytes, _) => Some(Request::Refused(*bytes)),
            _ => None,
        }
    }
}

struct Recording {
    builder: TraceBuilder,
    /// With their lines.
    events: Vec<(usize, Event)>,
    stacks: Vec<StackNumber>,
}

impl Recording {
    fn new(name: &str) -> Self {
        Self { builder: TraceBuilder::new(name), events: Vec::new(), stacks: Vec::new() }
    }

    fn event(&mut self, line: EventLine<'_>, source: &Source<'_>) -> Result<Event, Fault> {
        let needed = |value: Option<u64>, key| {
            value.ok_or_else(|| source.fault(format!("`{}` has no `{key}`", line.t)))
        };
        match &*line.t {
            "a" => {
                let (key, bytes) = (needed(line.k, "k")?, needed(line.b, "b")?);
                let stack = self.stack(line.f, source)?;
                Ok(Event::Alloc(key, Block { bytes, stream: line.s, pool: line.p, stack }))
            }
            "f" => Ok(Event::Free(needed(line.k, "k")?, line.b)),
            "p" => Ok(Event::Phase(line.n.ok_or_else(|| source.fault("`p` has no `n`"))?)),
            "m" => Ok(Event::Mapped(needed(line.b, "b")?)),
            "e" => Ok(Event::EmptyCache),
            "o" => Ok(Event::OutOfMemory(needed(line.b, "b")?, line.d)),
            other => {
                Err(source.fault(format!("{} is no event that is known", quoted(other))).with_next(NEWER))
            }
        }
    }

    fn stack(&mut self, frames: Option<FramesKey>, source: &Source<'_>) -> Result<StackNumber, Fault> {
        match frames {
            None => Ok(0),
            Some(FramesKey::Of(frames)) => {
                let number = self.builder.stack(frames);
                self.stacks.push(number);
                Ok(number)
            }
            Some(FramesKey::At(at)) => {
                let found = self.stacks.get(at).copied();
                found.ok_or_else(|| source.fault(format!("no list of frames {at} came before")))
            }
        }
    }

    fn finish(mut self, head: &Head<'_>) -> Result<Trace, Fault> {
        self.allocate_earlier()?;
        let mut mapped = MappedLines::default();
        let mut refusals = Refusals::default();
        let requests = self.events.iter().filter_map(|(line, event)| Some((*line, event.request()?)));
        let ending = refusals::ending(requests);
        for (line, event) in self.events {
            let fault = |error| Fault::new(Location::Line(line), why(&error));
            match event {
                Event::Alloc(key, block) => self.builder.alloc(key, block).map_err(fault)?,
                Event::Free(key, _) => self.builder.free(key).map_err(fault)?,
                Event::Phase(name) => self.builder.phase(&name),
                Event::Mapped(bytes) => mapped.set(self.builder.len(), bytes),
                Event::EmptyCache => self.builder.empty_cache(),
                Event::OutOfMemory(bytes, free_bytes) => {
                    let block = Block { bytes, stream: 0, pool: 0, stack: 0 };
                    let seen = mapped.now().zip(free_bytes);
                    let seen = seen.map(|(mapped_bytes, free_bytes)| SeenMemory { mapped_bytes, free_bytes });
                    let is_end = ending == Some(line);
                    refusals.add(&mut self.builder, block, seen, is_end).map_err(fault)?;
                }
            }
        }
        if self.builder.is_empty() {
            return Err(Fault::new(Location::Line(1), "nothing was recorded"));
        }
        let allocator = head.allocator.as_deref().unwrap_or_default();
        let (kind, settings) = allocator.split_once(' ').unwrap_or((allocator, ""));
        if !kind.is_empty() && kind != "pytorch" {
            self.builder.note(format!("The allocator that was recorded is {}.", quoted(allocator)));
        }
        let settings = if kind == "pytorch" { settings.trim().to_owned() } else { String::new() };
        let mapped_bytes = mapped.after_steps(self.builder.len());
        let refused = refusals.ended();
        let card = head.card.map(|CardSizes { total_bytes, taken_bytes }| Card {
            total_bytes,
            taken_bytes,
            budget_bytes: None,
        });
        let mut trace = self.builder.finish(Some(Recorded { settings, mapped_bytes, refused }));
        trace.device = head.device;
        refusals.describe(&mut trace, card);
        Ok(trace)
    }

    /// Blocks that are freed, and were allocated before the recording began.
    fn allocate_earlier(&mut self) -> Result<(), Fault> {
        let mut seen = HashSet::new();
        let mut earlier = Vec::new();
        for (line, event) in &self.events {
            match event {
                Event::Alloc(key, _) => {
                    seen.insert(*key);
                }
                Event::Free(key, Some(bytes)) if seen.insert(*key) => earlier.push((*key, *bytes, *line)),
                _ => {}
            }
        }
        earlier.sort_unstable();
        for (key, bytes, line) in &earlier {
            let allocated = self.builder.alloc(*key, Block { bytes: *bytes, stream: 0, pool: 0, stack: 0 });
            allocated.map_err(|error| Fault::new(Location::Line(*line), why(&error)))?;
        }
        if !earlier.is_empty() {
            self.builder.note(lived_before(earlier.iter().map(|(_, bytes, _)| *bytes)));
        }
        Ok(())
    }
}

/// What was mapped, as it was said between steps.
#[derive(Debug, Default)]
struct MappedLines(Vec<(usize, u64)>);

impl MappedLines {
    fn set(&mut self, steps: usize, bytes: u64) {
        self.0.push((steps, bytes));
    }

    fn now(&self) -> Option<u64> {
        self.0.last().map(|(_, bytes)| *bytes)
    }

    /// After each step: what was said last before the next one. Nothing if it was never said.
    fn after_steps(&self, len: usize) -> Vec<u64> {
        let Some((_, first)) = self.0.first() else { return Vec::new() };
        let mut said = self.0.iter().peekable();
        let mut now = *first;
        let after = |step| {
            while let Some((_, bytes)) = said.next_if(|(steps, _)| *steps <= step) {
                now = *bytes;
            }
            now
        };
        (1..=len).map(after).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Step;

    const HEAD: &str =
        "{\"poorwill_record\":1,\"device\":0,\"allocator\":\"pytorch max_split_size_mb:20\"}\n";

    fn read(lines: &str) -> Result<Trace, Fault> {
        trace("a", format!("{HEAD}{lines}").as_bytes())
    }

    #[test]
    fn a_recording_is_a_trace() {
        let trace = read(concat!(
            "{\"t\":\"p\",\"n\":\"load\"}\n",
            "{\"t\":\"m\",\"b\":100}\n",
            "{\"t\":\"a\",\"k\":7,\"b\":5,\"f\":[\"a.py:1 f\",\"b.py:2 g\"],\"new\":true}\n",
            "{\"t\":\"a\",\"k\":8,\"b\":6,\"s\":1,\"p\":2,\"f\":0}\n",
            "{\"t\":\"m\",\"b\":200}\n\n",
            "{\"t\":\"p\",\"n\":\"serve\"}\n",
            "{\"t\":\"f\",\"k\":7,\"b\":5}\n",
            "{\"t\":\"e\"}\n",
            "{\"t\":\"m\",\"b\":50}\n",
            "{\"t\":\"o\",\"b\":999}\n",
            "{\"t\":\"f\",\"k\":9,\"b\":4}\n",
            "{\"t\":\"a\",\"k\":7,\"b\":1}",
        ))
        .unwrap();
        let steps = [
            Step::Alloc(0),
            Step::Alloc(1),
            Step::Alloc(2),
            Step::Free(1),
            Step::EmptyCache,
            Step::Alloc(3),
            Step::Free(3),
            Step::Free(0),
            Step::Alloc(4),
        ];
        assert_eq!(trace.steps, steps);
        assert_eq!(trace.blocks[2], Block { bytes: 6, stream: 1, pool: 2, stack: 1 });
        assert_eq!(trace.stacks, [vec![], vec!["a.py:1 f".to_owned(), "b.py:2 g".to_owned()]]);
        assert_eq!([0, 1, 3].map(|step| trace.phase_at(step)), [None, Some("load"), Some("serve")]);
        let recorded = trace.recorded.unwrap();
        assert_eq!(recorded.settings, "max_split_size_mb:20");
        assert_eq!(recorded.mapped_bytes, [100, 100, 200, 200, 50, 50, 50, 50, 50]);
        let refused = recorded.refused.map(|refusal| (refusal.step, refusal.asked_bytes));
        assert_eq!(refused, Some((5, 999)));
        assert_eq!(
            trace.notes,
            ["1 block of 4 B lived before the trace began, and comes first, by address."]
        );
    }

    #[test]
    fn a_line_without_an_end_is_left_out() {
        let trace = read("{\"t\":\"a\",\"k\":7,\"b\":5}\n{\"t\":\"a\",\"k\":8").unwrap();
        assert_eq!((trace.steps.len(), trace.notes.len()), (1, 1));
        assert!(trace.recorded.unwrap().mapped_bytes.is_empty());
        assert!(read("{\"t\":\"a\",\"k\":7\n{\"t\":\"a\",\"k\":8,\"b\":5}").is_err());
    }

    #[test]
    fn what_is_not_so_has_its_line() {
        for (lines, line, text) in [
            ("", 1, "nothing was recorded"),
            ("{\"t\":\"z\"}\n", 2, "`z` is no event that is known"),
            ("{\"t\":\"a\",\"k\":7}\n", 2, "`a` has no `b`"),
            ("{\"t\":\"p\"}\n", 2, "`p` has no `n`"),
            ("{\"t\":\"f\",\"k\":7}\n", 2, "freed, and is not live"),
            ("\n{\"t\":\"a\",\"k\":7,\"b\":0}\n", 3, "no bytes"),
            ("{\"t\":\"a\",\"k\":7,\"b\":1}\n{\"t\":\"a\",\"k\":7,\"b\":1}\n", 3, "was not freed"),
            ("{\"t\":\"a\",\"k\":7,\"b\":1,\"f\":3}\n", 2, "no list of frames 3"),
            ("{\"t\":\"a\",\"k\":-7,\"b\":1}\n", 2, "cannot be read"),
            ("[]\n", 2, "cannot be read"),
        ] {
            let fault = read(lines).unwrap_err();
            assert_eq!(fault.place, Location::Line(line), "{lines}: {fault:?}");
            assert!(fault.what.contains(text), "{lines}: {fault:?}");
        }
        let fault = trace("a", b"{\"poorwill_record\":2}\n").unwrap_err();
        assert_eq!((&*fault.what, fault.next), ("recordings of version 2 are unknown", NEWER));
    }
}
