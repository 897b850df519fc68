//! FrameTexts of a snapshot as lines: `vllm/linear.py:12 load`.
//!
//! Promises:
//!
//! - FrameTexts of C++ are left out where there are Python's. Of others, those of recorder and allocator are.
//! - Text takes a bounded amount of memory, whatever the file shares.

use std::collections::HashMap;

use super::view::{Keys, PerSequence, View};
use crate::frames;
use crate::read::fault::{Fault, Location};
use crate::read::value::{Extents, Sequence, Value};
use crate::trace::{StackNumber, TraceBuilder};

/// How many are kept, the innermost first.
const KEPT_MAX: usize = 30;
/// Names of C++ templates have thousands.
const LINE_CHARS_MAX: usize = 200;
const PATH_BYTES_MAX: usize = 1024;
/// What all stacks of a file may take, beside a multiple of its own values.
const TEXT_BYTES_MIN: usize = 64 << 20;

/// A line of a file's frames, by its position.
type LineNumber = u32;

pub(super) struct FrameTexts<'a> {
    view: &'a View<'a>,
    keys: Keys<3>,
    lines: Vec<FrameLine>,
    line_of: PerSequence,
    /// By file, line and name: JSON shares no frames.
    equal: HashMap<[Value; 3], LineNumber>,
    /// Of each list, by where its items are, in `lists`.
    list_of: HashMap<Extents, u32>,
    kept: HashMap<Vec<LineNumber>, u32>,
    lists: Vec<Vec<LineNumber>>,
    text_bytes_left: usize,
    empty_cache: Option<Value>,
}

/// Where Poorwill's pools for PyTorch are.
const OWN_FOLDER: &str = "poorwill/torch/";

struct FrameLine {
    text: String,
    is_python: bool,
    empties_cache: bool,
    is_plumbing: bool,
    is_backward: bool,
    /// Whether it is of Poorwill's pools, which stand between PyTorch and those who ask.
    is_own: bool,
}

/// Stacks of one trace, by the lists of the file.
#[derive(Default)]
pub(super) struct Stacks {
    of_list: HashMap<u32, StackNumber>,
    left_out: usize,
}

impl<'a> FrameTexts<'a> {
    pub(super) fn new(view: &'a View<'a>) -> Self {
        Self {
            view,
            keys: view.keys(["filename", "line", "name"]),
            lines: Vec::new(),
            line_of: PerSequence::new(view.arena()),
            equal: HashMap::new(),
            list_of: HashMap::new(),
            kept: HashMap::new(),
            lists: Vec::new(),
            text_bytes_left: TEXT_BYTES_MIN + 4 * size_of::<Value>() * view.arena().items_len(),
            empty_cache: view.arena().find("empty_cache").map(Value::Text),
        }
    }

    /// The stack of a block that has these frames.
    pub(super) fn stack(
        &mut self,
        frames: Value,
        stacks: &mut Stacks,
        builder: &mut TraceBuilder,
        place: Location,
    ) -> Result<StackNumber, Fault> {
        let Some(list) = self.list(frames, place)? else { return Ok(0) };
        if let Some(number) = stacks.of_list.get(&list) {
            return Ok(*number);
        }
        let lines = &self.lists[usize::try_from(list).unwrap_or(0)];
        let others = lines.iter().map(|line| self.line(*line)).filter(|line| !line.is_own);
        let texts: Vec<String> = others.map(|line| line.text.clone()).collect();
        let bytes: usize = texts.iter().map(|text| text.len() + size_of::<String>()).sum();
        let number = if self.has_space(bytes) {
            builder.stack(texts)
        } else {
            stacks.left_out += 1;
            0
        };
        stacks.of_list.insert(list, number);
        Ok(number)
    }

    /// Whether text may take so much more memory; if so, it does.
    pub(super) const fn has_space(&mut self, bytes: usize) -> bool {
        let left = self.text_bytes_left.checked_sub(bytes);
        if let Some(left) = left {
            self.text_bytes_left = left;
        }
        left.is_some()
    }

    /// Whether these frames are in `torch.cuda.empty_cache`.
    pub(super) fn empties_cache(&mut self, frames: Value, place: Location) -> Result<bool, Fault> {
        let Some(list) = self.list(frames, place)? else { return Ok(false) };
        let lines = &self.lists[usize::try_from(list).unwrap_or(0)];
        Ok(lines.iter().any(|line| self.line(*line).empties_cache))
    }

    /// Whether Poorwill's own pools gave back what has these frames. Other allocators would not have.
    pub(super) fn are_own(&mut self, frames: Value, place: Location) -> Result<bool, Fault> {
        let Some(list) = self.list(frames, place)? else { return Ok(false) };
        let lines = &self.lists[usize::try_from(list).unwrap_or(0)];
        Ok(lines.iter().any(|line| self.line(*line).is_own))
    }

    fn line(&self, number: LineNumber) -> &FrameLine {
        &self.lines[usize::try_from(number).unwrap_or(0)]
    }

    /// The number of what is kept of a list of frames; `None` if that is nothing.
    fn list(&mut self, frames: Value, place: Location) -> Result<Option<u32>, Fault> {
        let (Value::List(sequence) | Value::Tuple(sequence)) = frames else {
            return if frames == Value::None {
                Ok(None)
            } else {
                Err(Fault::new(place, "`frames` is no list"))
            };
        };
        let Some(extents) = self.view.arena().extents(sequence) else { return Ok(None) };
        if let Some(list) = self.list_of.get(&extents) {
            return Ok(Some(*list));
        }
        let mut lines = Vec::new();
        for frame in self.view.items(frames, place)? {
            let Value::Dict(frame) = frame else { return Err(Fault::new(place, "a frame is no dict")) };
            lines.push(self.frame(frame, place)?);
        }
        if lines.is_empty() {
            return Ok(None);
        }
        if lines.iter().any(|line| self.line(*line).is_python) {
            lines.retain(|line| self.line(*line).is_python);
        } else if lines.iter().any(|line| !self.line(*line).is_plumbing) {
            lines.retain(|line| !self.line(*line).is_plumbing);
            // What matters stays, however deep it is.
            let backward = lines.iter().position(|line| self.line(*line).is_backward);
            if let Some(deep) = backward.filter(|at| *at >= KEPT_MAX) {
                lines.drain(KEPT_MAX - 1..deep);
            }
        }
        lines.truncate(KEPT_MAX);
        let list = match self.kept.get(&lines) {
            Some(list) => *list,
            None => {
                let list = u32::try_from(self.lists.len()).unwrap_or(0);
                self.lists.push(lines.clone());
                self.kept.insert(lines, list);
                list
            }
        };
        self.list_of.insert(extents, list);
        Ok(Some(list))
    }

    fn frame(&mut self, frame: Sequence, place: Location) -> Result<LineNumber, Fault> {
        if let Some(line) = self.line_of.get(frame) {
            return Ok(line);
        }
        let fields = self.view.fields(Value::Dict(frame), &self.keys, place)?;
        let number = match self.equal.get(&fields) {
            Some(number) => *number,
            None => self.new_line(fields),
        };
        self.line_of.set(frame, number);
        Ok(number)
    }

    fn new_line(&mut self, fields: [Value; 3]) -> LineNumber {
        let [file, line, name] = fields;
        let arena = self.view.arena();
        let text = |value| arena.as_text(value).unwrap_or_default();
        let (whole, line) = (text(file), arena.as_unsigned(line).unwrap_or(0));
        // Many frames may share a path of a megabyte, so only its end is searched.
        let path = tail(whole);
        let is_python = path.ends_with(".py") || whole.starts_with('<') || whole.starts_with("fx_graph");
        let text = match (short(path), text(name)) {
            ("" | "??", name) => cut(name),
            (path, name) => cut(&format!("{path}:{line} {}", cut(name))),
        };
        let left = self.text_bytes_left.checked_sub(text.len());
        let text = if left.is_some() { text } else { String::new() };
        self.text_bytes_left = left.unwrap_or(0);
        let number = u32::try_from(self.lines.len()).unwrap_or(0);
        let (is_plumbing, is_backward) = (frames::is_plumbing(&text), frames::is_backward(&text));
        let empties_cache = Some(name) == self.empty_cache;
        let is_own = path.contains(OWN_FOLDER);
        self.lines.push(FrameLine { text, is_python, empties_cache, is_plumbing, is_backward, is_own });
        self.equal.insert(fields, number);
        number
    }
}

impl Stacks {
    pub(super) fn note(&self) -> Option<String> {
        let left_out = self.left_out;
        (left_out > 0)
            .then(|| format!("{left_out} stacks of frames are left out, because there are too many."))
    }
}

/// A path from its package on, or its last folder and file.
fn short(path: &str) -> &str {
    for packages in ["/site-packages/", "/dist-packages/"] {
        if let Some((_, inner)) = path.rsplit_once(packages) {
            return inner;
        }
    }
    path.rmatch_indices('/').nth(1).map_or(path, |(at, _)| &path[at + 1..])
}

/// The end of a path, however long that is.
fn tail(path: &str) -> &str {
    let start = path.len().saturating_sub(PATH_BYTES_MAX);
    &path[path.ceil_char_boundary(start)..]
}

fn cut(line: &str) -> String {
    match line.char_indices().nth(LINE_CHARS_MAX) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line.trim().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_frames_are_one_line() {
        let frame = r#"{"filename": "a.py", "line": 7, "name": "f"}"#;
        let text = format!("[[{frame}, {frame}], [{frame}, {frame}]]");
        let (arena, root) = crate::read::json::read(text.as_bytes()).unwrap();
        let view = View::new(&arena);
        let mut frames = FrameTexts::new(&view);
        let place = Location::Offset(0);
        let lists: Vec<_> =
            view.items(root, place).unwrap().map(|list| frames.list(list, place).unwrap()).collect();
        assert_eq!((lists, frames.lines.len()), (vec![Some(0), Some(0)], 1));
    }

    #[test]
    fn only_the_end_of_a_path_is_searched() {
        let far = format!("/{OWN_FOLDER}{}.py", "y".repeat(PATH_BYTES_MAX));
        let near = format!("/{}/{OWN_FOLDER}a.py", "y".repeat(PATH_BYTES_MAX));
        let start = format!("<{}>", "y".repeat(PATH_BYTES_MAX));
        let frame = |path: &str| format!(r#"{{"filename": "{path}", "line": 7, "name": "f"}}"#);
        let text = format!("[{}, {}, {}]", frame(&far), frame(&near), frame(&start));
        let (arena, root) = crate::read::json::read(text.as_bytes()).unwrap();
        let view = View::new(&arena);
        let mut frames = FrameTexts::new(&view);
        frames.list(root, Location::Offset(0)).unwrap();
        let seen: Vec<_> = frames.lines.iter().map(|line| (line.is_own, line.is_python)).collect();
        assert_eq!(seen, [(false, true), (true, true), (false, true)]);
        assert!(frames.lines.iter().all(|line| line.text.len() <= 4 * LINE_CHARS_MAX));
    }

    #[test]
    fn paths_are_short() {
        for (path, expected) in [
            ("a.py", "a.py"),
            ("b/a.py", "b/a.py"),
            ("/a.py", "/a.py"),
            ("/home/me/work/load.py", "work/load.py"),
            ("/usr/lib/python3.12/site-packages/vllm/model/loader.py", "vllm/model/loader.py"),
            ("/usr/lib/python3/dist-packages/torch/cuda/memory.py", "torch/cuda/memory.py"),
            ("", ""),
        ] {
            assert_eq!(short(path), expected);
        }
        assert_eq!(cut(&"é".repeat(300)).chars().count(), LINE_CHARS_MAX + 1);
    }
}
