//! Python's pickles, protocols 0 to 5, as far as builtins need them.
//!
//! Promises:
//!
//! - Nothing is run. An opcode that names code, or that calls it, is an error.
//! - No bytes make it panic, recurse or loop. It takes at most about 20 bytes for each byte of the file.

use super::fault::{DUMP, Fault, Location};
use super::value::{Arena, Sequence, Value};

const PROTOCOL_MAX: u8 = 5;

/// Collections that a file of no length may have. Beyond that, Python writes at least two bytes for each.
const COLLECTIONS_MIN: usize = 64;

/// The value of a file.
pub(super) fn read(bytes: &[u8]) -> Result<(Arena, Value), Fault> {
    let mut machine = Machine {
        bytes,
        at: 0,
        opcode_at: 0,
        arena: Arena::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
    };
    let root = loop {
        if let Some(root) = machine.step()? {
            break root;
        }
    };
    match bytes.len() - machine.at {
        0 => Ok((machine.arena, root)),
        left => Err(Fault::new(Location::Offset(machine.at), format!("{left} bytes follow the pickle"))),
    }
}

struct Machine<'b> {
    bytes: &'b [u8],
    at: usize,
    opcode_at: usize,
    arena: Arena,
    stack: Vec<Value>,
    /// How high the stack was at each mark. Nothing below the last one may be taken.
    marks: Vec<u32>,
    memo: Vec<Option<Value>>,
}

impl<'b> Machine<'b> {
    /// Does one opcode; returns the value of the file at its end.
    fn step(&mut self) -> Result<Option<Value>, Fault> {
        self.opcode_at = self.at;
        let opcode = self.byte()?;
        let value = match opcode {
            0x80 => return self.protocol(),
            0x95 => return self.frame(),
            b'.' => return self.pop().map(Some),
            b'0' | b'1' | b'(' => return self.arrange(opcode),
            b'p' | b'q' | b'r' | 0x94 => return self.remember(opcode),
            b'a' => return self.append(1),
            b's' => return self.append(2),
            b'e' | 0x90 | b'u' => return self.append_all(opcode),
            b'2' => self.top()?,
            b'N' => Value::None,
            0x88 => Value::Bool(true),
            0x89 => Value::Bool(false),
            b'I' | b'L' | b'J' | b'K' | b'M' | 0x8a | 0x8b => self.int(opcode)?,
            b'F' | b'G' => self.float(opcode)?,
            b'S' | b'V' | b'T' | b'U' | 0x8c | b'X' | 0x8d => self.string(opcode)?,
            b'C' | b'B' | 0x8e | 0x96 => self.skipped(opcode)?,
            b']' | b'}' | 0x8f | b')' => self.begun(opcode)?,
            b'l' | b't' | 0x91 | b'd' | 0x85..=0x87 => self.ended(opcode)?,
            b'g' | b'h' | b'j' => self.remembered(opcode)?,
            _ => return Err(self.refused(opcode)),
        };
        self.stack.push(value);
        Ok(None)
    }

    /// Marks, and what is dropped.
    fn arrange(&mut self, opcode: u8) -> Result<Option<Value>, Fault> {
        match opcode {
            b'(' => self.marks.push(u32::try_from(self.stack.len()).unwrap_or(u32::MAX)),
            b'1' => {
                let since = self.mark()?;
                self.stack.truncate(since);
            }
            _ if self.marks.last().is_some_and(|mark| self.stack.len() == index(*mark)) => {
                self.marks.pop();
            }
            _ => {
                self.pop()?;
            }
        }
        Ok(None)
    }

    fn int(&mut self, opcode: u8) -> Result<Value, Fault> {
        match opcode {
            b'I' => self.int_line(),
            b'L' => {
                let line = self.text_line()?;
                self.decimal(line.strip_suffix('L').unwrap_or(line))
            }
            b'J' => Ok(Value::Int(i32::from_le_bytes(self.array()?))),
            b'K' => Ok(Value::Int(self.byte()?.into())),
            b'M' => Ok(Value::Int(u16::from_le_bytes(self.array()?).into())),
            0x8a => {
                let len = self.byte()?;
                self.long(len.into())
            }
            _ => {
                let len = self.signed_len()?;
                self.long(len)
            }
        }
    }

    fn float(&mut self, opcode: u8) -> Result<Value, Fault> {
        let float = if opcode == b'F' {
            self.text_line()?.parse().map_err(|_| self.broken("a float that is none"))?
        } else {
            f64::from_be_bytes(self.array()?)
        };
        Ok(self.arena.float(float))
    }

    fn string(&mut self, opcode: u8) -> Result<Value, Fault> {
        let len = match opcode {
            b'S' => return self.string_line(),
            b'V' => return self.unicode_line(),
            b'T' => self.signed_len()?,
            b'X' => index(u32::from_le_bytes(self.array()?)),
            0x8d => self.long_len()?,
            _ => self.byte()?.into(),
        };
        self.text(len)
    }

    fn skipped(&mut self, opcode: u8) -> Result<Value, Fault> {
        let len = match opcode {
            b'C' => self.byte()?.into(),
            b'B' => index(u32::from_le_bytes(self.array()?)),
            _ => self.long_len()?,
        };
        self.skip(len)
    }

    /// Empty collections.
    fn begun(&mut self, opcode: u8) -> Result<Value, Fault> {
        Ok(match opcode {
            b']' => Value::List(self.collection(None)?),
            b'}' => Value::Dict(self.collection(None)?),
            0x8f => Value::Set(self.collection(None)?),
            _ => Value::Tuple(self.arena.empty()),
        })
    }

    /// Collections of what is on the stack.
    fn ended(&mut self, opcode: u8) -> Result<Value, Fault> {
        Ok(match opcode {
            b'l' => Value::List(self.collected()?),
            b't' => Value::Tuple(self.collected()?),
            0x91 => Value::Set(self.collected()?),
            b'd' => {
                let since = self.mark()?;
                self.check_pairs(since)?;
                let dict = self.collection(None)?;
                self.arena.extend_dict(dict, &self.stack[since..]);
                self.stack.truncate(since);
                Value::Dict(dict)
            }
            _ => self.short_tuple(usize::from(opcode - 0x84))?,
        })
    }

    fn remembered(&mut self, opcode: u8) -> Result<Value, Fault> {
        let key = match opcode {
            b'g' => self.key_line()?,
            b'h' => self.byte()?.into(),
            _ => index(u32::from_le_bytes(self.array()?)),
        };
        self.recall(key)
    }

    fn remember(&mut self, opcode: u8) -> Result<Option<Value>, Fault> {
        let key = match opcode {
            b'p' => self.key_line()?,
            b'q' => self.byte()?.into(),
            b'r' => index(u32::from_le_bytes(self.array()?)),
            _ => self.memo.len(),
        };
        self.memoize(key)
    }

    fn key_line(&mut self) -> Result<usize, Fault> {
        self.text_line()?.parse().map_err(|_| self.broken("a place in the memo that is none"))
    }

    fn protocol(&mut self) -> Result<Option<Value>, Fault> {
        match self.byte()? {
            ..=PROTOCOL_MAX => Ok(None),
            newer => {
                Err(self.broken(&format!("protocol {newer}, {PROTOCOL_MAX} is the newest that is known")))
            }
        }
    }

    /// Frames tell how much to read at once; here, everything has been read.
    fn frame(&mut self) -> Result<Option<Value>, Fault> {
        let len = self.long_len()?;
        if len > self.bytes.len() - self.at {
            return Err(self.cut());
        }
        Ok(None)
    }

    fn long(&mut self, len: usize) -> Result<Value, Fault> {
        let bytes = self.take(len)?;
        let is_negative = bytes.last().is_some_and(|last| *last >= 0x80);
        let mut all = [if is_negative { 0xff } else { 0 }; 8];
        match (bytes, is_negative) {
            (bytes, _) if len <= 8 => {
                all[..len].copy_from_slice(bytes);
                Ok(self.arena.int(i64::from_le_bytes(all)))
            }
            ([low @ .., 0], false) if len == 9 => {
                all.copy_from_slice(low);
                Ok(self.arena.unsigned(u64::from_le_bytes(all)))
            }
            _ => Err(self.broken("a whole number of more than 64 bits")),
        }
    }

    fn int_line(&mut self) -> Result<Value, Fault> {
        match self.text_line()? {
            "00" => Ok(Value::Bool(false)),
            "01" => Ok(Value::Bool(true)),
            line => self.decimal(line),
        }
    }

    fn decimal(&mut self, line: &str) -> Result<Value, Fault> {
        let line = line.trim();
        if let Ok(int) = line.parse() {
            return Ok(self.arena.int(int));
        }
        let int = line.parse().map_err(|_| self.broken("a whole number of more than 64 bits, or none"))?;
        Ok(self.arena.unsigned(int))
    }

    fn text(&mut self, len: usize) -> Result<Value, Fault> {
        let bytes = self.take(len)?;
        // Names of files need not be Unicode: Python writes their bytes as halves of surrogates.
        Ok(self.arena.text(&String::from_utf8_lossy(bytes)))
    }

    /// As Python 2 wrote it, with its quotes.
    fn string_line(&mut self) -> Result<Value, Fault> {
        let line = self.line()?;
        let inner = match line {
            [b'\'', inner @ .., b'\''] | [b'"', inner @ .., b'"'] => inner,
            _ => return Err(self.broken("a text without its quotes")),
        };
        Ok(self.unescaped(inner, Escapes::Python))
    }

    fn unicode_line(&mut self) -> Result<Value, Fault> {
        let line = self.line()?;
        Ok(self.unescaped(line, Escapes::Unicode))
    }

    fn unescaped(&mut self, bytes: &[u8], escapes: Escapes) -> Value {
        let mut text = String::with_capacity(bytes.len());
        let mut left = bytes;
        while let Some((first, rest)) = left.split_first() {
            let (found, after) = match escaped(left, escapes) {
                Some(found) => found,
                None => (char::from(*first), rest),
            };
            text.push(found);
            left = after;
        }
        self.arena.text(&text)
    }

    fn skip(&mut self, len: usize) -> Result<Value, Fault> {
        self.take(len)?;
        Ok(Value::Bytes)
    }

    /// A new collection, of what is on the stack since then.
    fn collection(&mut self, since: Option<usize>) -> Result<Sequence, Fault> {
        if self.arena.sequences_len() > COLLECTIONS_MIN + self.bytes.len() / 2 {
            return Err(self.broken("more lists and dicts than Python writes in so few bytes"));
        }
        let since = since.unwrap_or(self.stack.len());
        let sequence = self.arena.sequence(&self.stack[since..]);
        self.stack.truncate(since);
        Ok(sequence)
    }

    fn collected(&mut self) -> Result<Sequence, Fault> {
        let since = self.mark()?;
        self.collection(Some(since))
    }

    fn short_tuple(&mut self, len: usize) -> Result<Value, Fault> {
        let since = self.below(len)?;
        Ok(Value::Tuple(self.collection(Some(since))?))
    }

    fn append(&mut self, count: usize) -> Result<Option<Value>, Fault> {
        let since = self.below(count)?;
        self.add(since, if count == 1 { b'a' } else { b's' })
    }

    fn append_all(&mut self, opcode: u8) -> Result<Option<Value>, Fault> {
        let since = self.mark()?;
        self.add(since, opcode)
    }

    /// Adds what is on the stack since then to the collection below.
    fn add(&mut self, since: usize, opcode: u8) -> Result<Option<Value>, Fault> {
        let below = since.checked_sub(1).filter(|below| *below >= self.fence());
        match (below.map(|below| self.stack[below]), opcode) {
            (Some(Value::List(to)), b'a' | b'e') | (Some(Value::Set(to)), 0x90) => {
                self.arena.extend(to, &self.stack[since..]);
            }
            (Some(Value::Dict(to)), b's' | b'u') => {
                self.check_pairs(since)?;
                self.arena.extend_dict(to, &self.stack[since..]);
            }
            _ => return Err(self.broken("something is added to what is no such collection")),
        }
        self.stack.truncate(since);
        Ok(None)
    }

    fn check_pairs(&self, since: usize) -> Result<(), Fault> {
        let is_even = (self.stack.len() - since).is_multiple_of(2);
        if is_even { Ok(()) } else { Err(self.broken("a key of a dict without its value")) }
    }

    fn recall(&self, key: usize) -> Result<Value, Fault> {
        let value = self.memo.get(key).copied().flatten();
        value.ok_or_else(|| self.broken(&format!("place {key} of the memo is empty")))
    }

    fn memoize(&mut self, key: usize) -> Result<Option<Value>, Fault> {
        let value = self.top()?;
        // Python counts from 0, one for each value that it writes.
        if key >= self.bytes.len() {
            return Err(self.broken(&format!("place {key} of the memo is beyond what the file can fill")));
        }
        if key >= self.memo.len() {
            self.memo.resize(key + 1, None);
        }
        self.memo[key] = Some(value);
        Ok(None)
    }

    fn fence(&self) -> usize {
        self.marks.last().map_or(0, |mark| index(*mark))
    }

    /// Where the last so many values begin.
    fn below(&self, count: usize) -> Result<usize, Fault> {
        let since = self.stack.len().checked_sub(count).filter(|since| *since >= self.fence());
        since.ok_or_else(|| self.broken("a value is taken where none is"))
    }

    fn top(&self) -> Result<Value, Fault> {
        self.below(1).map(|at| self.stack[at])
    }

    fn pop(&mut self) -> Result<Value, Fault> {
        let at = self.below(1)?;
        let value = self.stack[at];
        self.stack.truncate(at);
        Ok(value)
    }

    fn mark(&mut self) -> Result<usize, Fault> {
        let mark = self.marks.pop().map(index);
        mark.ok_or_else(|| self.broken("the end of a collection without its beginning"))
    }

    fn byte(&mut self) -> Result<u8, Fault> {
        let byte = self.bytes.get(self.at).copied().ok_or_else(|| self.cut())?;
        self.at += 1;
        Ok(byte)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let found = self.bytes[self.at..].first_chunk().copied().ok_or_else(|| self.cut())?;
        self.at += N;
        Ok(found)
    }

    fn take(&mut self, len: usize) -> Result<&'b [u8], Fault> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| self.cut())?;
        let bytes = self.bytes;
        let found = &bytes[self.at..end];
        self.at = end;
        Ok(found)
    }

    fn line(&mut self) -> Result<&'b [u8], Fault> {
        let len = self.bytes[self.at..].iter().position(|byte| *byte == b'\n').ok_or_else(|| self.cut())?;
        let line = self.take(len)?;
        self.at += 1;
        Ok(line)
    }

    fn text_line(&mut self) -> Result<&'b str, Fault> {
        let line = self.line()?;
        str::from_utf8(line).map_err(|_| self.broken("a number that is none"))
    }

    fn signed_len(&mut self) -> Result<usize, Fault> {
        let len = i32::from_le_bytes(self.array()?);
        usize::try_from(len).map_err(|_| self.broken("a length below 0"))
    }

    fn long_len(&mut self) -> Result<usize, Fault> {
        let len = u64::from_le_bytes(self.array()?);
        usize::try_from(len).map_err(|_| self.cut())
    }

    #[cold]
    fn broken(&self, what: &str) -> Fault {
        Fault::new(Location::Offset(self.opcode_at), format!("the pickle is broken: {what}"))
    }

    #[cold]
    fn cut(&self) -> Fault {
        Fault::new(Location::Offset(self.opcode_at), "the pickle ends before its end")
    }

    #[cold]
    fn refused(&self, opcode: u8) -> Fault {
        let what = match CODE.iter().find(|(code, _)| *code == opcode) {
            Some((_, name)) => format!("the opcode {name} names code, and nothing was run"),
            None => match BUFFERS.iter().find(|(code, _)| *code == opcode) {
                Some((_, name)) => format!("the opcode {name} needs what is not in the file"),
                None => return self.broken(&format!("{opcode:#04x} is no opcode")),
            },
        };
        Fault::new(Location::Offset(self.opcode_at), what).with_next(DUMP)
    }
}

/// Opcodes that name code, call it or set what it sees.
const CODE: [(u8, &str); 13] = [
    (b'c', "GLOBAL"),
    (0x93, "STACK_GLOBAL"),
    (b'R', "REDUCE"),
    (b'i', "INST"),
    (b'o', "OBJ"),
    (0x81, "NEWOBJ"),
    (0x92, "NEWOBJ_EX"),
    (b'b', "BUILD"),
    (0x82, "EXT1"),
    (0x83, "EXT2"),
    (0x84, "EXT4"),
    (b'P', "PERSID"),
    (b'Q', "BINPERSID"),
];

const BUFFERS: [(u8, &str); 2] = [(0x97, "NEXT_BUFFER"), (0x98, "READONLY_BUFFER")];

/// Which escapes a text has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Escapes {
    /// Those of a `repr` of Python 2's `str`.
    Python,
    /// `\u` and `\U` alone.
    Unicode,
}

/// The character that an escape stands for, and what follows.
fn escaped(bytes: &[u8], escapes: Escapes) -> Option<(char, &[u8])> {
    let [b'\\', kind, rest @ ..] = bytes else { return None };
    let digits = match (kind, escapes) {
        (b'u', Escapes::Unicode) => 4,
        (b'U', Escapes::Unicode) => 8,
        (b'x', Escapes::Python) => 2,
        (b'n', Escapes::Python) => return Some(('\n', rest)),
        (b'r', Escapes::Python) => return Some(('\r', rest)),
        (b't', Escapes::Python) => return Some(('\t', rest)),
        (b'\\' | b'\'' | b'"', Escapes::Python) => return Some((char::from(*kind), rest)),
        _ => return None,
    };
    let hex = rest.get(..digits).filter(|hex| hex.iter().all(u8::is_ascii_hexdigit))?;
    let number = u32::from_str_radix(str::from_utf8(hex).ok()?, 16).ok()?;
    Some((char::from_u32(number).unwrap_or(char::REPLACEMENT_CHARACTER), &rest[digits..]))
}

fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(bytes: &[u8]) -> String {
        let (arena, root) = read(bytes).unwrap_or_else(|fault| panic!("{}: {fault:?}", bytes.escape_ascii()));
        shown(&arena, root)
    }

    /// Without cycles, please.
    fn shown(arena: &Arena, value: Value) -> String {
        let all =
            |sequence| arena.items(sequence).map(|item| shown(arena, item)).collect::<Vec<_>>().join(" ");
        match value {
            Value::Int(_) | Value::Wide(_) => arena.as_int(value).unwrap().to_string(),
            Value::Huge(_) => arena.as_unsigned(value).unwrap().to_string(),
            Value::Float(_) => arena.as_float(value).unwrap().to_string(),
            Value::Text(_) => format!("{:?}", arena.as_text(value).unwrap()),
            Value::List(items) => format!("[{}]", all(items)),
            Value::Tuple(items) => format!("({})", all(items)),
            Value::Dict(items) => format!("{{{}}}", all(items)),
            Value::Set(items) => format!("<{}>", all(items)),
            Value::None | Value::Bool(_) | Value::Bytes => format!("{value:?}"),
        }
    }

    #[test]
    fn every_opcode_of_builtins_is_read() {
        let cases: [(&[u8], &str); 40] = [
            (b"N.", "None"),
            (b"\x80\x05\x88.", "Bool(true)"),
            (b"\x89.", "Bool(false)"),
            (b"I00\n.", "Bool(false)"),
            (b"I01\n.", "Bool(true)"),
            (b"I-7\n.", "-7"),
            (b"L12345678901L\n.", "12345678901"),
            (b"L18446744073709551615L\n.", "18446744073709551615"),
            (b"J\xfe\xff\xff\xff.", "-2"),
            (b"K\xff.", "255"),
            (b"M\x01\x02.", "513"),
            (b"\x8a\x00.", "0"),
            (b"\x8a\x01\xff.", "-1"),
            (b"\x8a\x06\x00\x00\x00\x00\x00\x7f.", "139637976727552"),
            (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00.", "18446744073709551615"),
            (b"\x8b\x02\x00\x00\x00\x00\x01.", "256"),
            (b"F0.5\n.", "0.5"),
            (b"Finf\n.", "inf"),
            (b"G?\xe0\x00\x00\x00\x00\x00\x00.", "0.5"),
            (b"S'a\\'\\x41\\n'\n.", r#""a'A\n""#),
            (b"T\x02\x00\x00\x00ab.", "\"ab\""),
            (b"U\x02ab.", "\"ab\""),
            (b"V\\u00e9\xe9\\x\n.", r#""éé\\x""#),
            (b"X\x02\x00\x00\x00\xc3\xa9.", "\"é\""),
            (b"\x8c\x01a.", "\"a\""),
            (b"\x8c\x03\xed\xb2\x80.", "\"\u{fffd}\u{fffd}\u{fffd}\""),
            (b"\x8d\x01\x00\x00\x00\x00\x00\x00\x00a.", "\"a\""),
            (b"C\x01a.", "Bytes"),
            (b"B\x01\x00\x00\x00a.", "Bytes"),
            (b"\x8e\x01\x00\x00\x00\x00\x00\x00\x00a.", "Bytes"),
            (b"\x96\x01\x00\x00\x00\x00\x00\x00\x00a.", "Bytes"),
            (b"](K\x01K\x02eK\x03a.", "[1 2 3]"),
            (b"(K\x01K\x02l.", "[1 2]"),
            (b"()K\x01\x85K\x01K\x02\x86NNN\x87t.", "(() (1) (1 2) (None None None))"),
            (b"}(K\x01K\x02uK\x03K\x04s.", "{1 2 3 4}"),
            (b"(K\x01K\x02d.", "{1 2}"),
            (b"\x8f(K\x01\x90.", "<1>"),
            (b"(K\x01\x91.", "<1>"),
            (b"(K\x01K\x020K\x032(K\x091(0t.", "(1 3 3)"),
            (
                b"\x95\x14\x00\x00\x00\x00\x00\x00\x00]\x94(K\x01\x85\x94h\x01h\x01j\x01\x00\x00\x00e0h\x00.",
                "[(1) (1) (1) (1)]",
            ),
        ];
        for (bytes, expected) in cases {
            assert_eq!(text_of(bytes), expected, "{}", bytes.escape_ascii());
        }
        assert_eq!(
            text_of(b"(lp0\ng0\n00K\x01p1\nq\x02r\x03\x00\x00\x00g1\nh\x02j\x03\x00\x00\x00\x87."),
            "(1 1 1)"
        );
    }

    #[test]
    fn what_is_shared_is_there_once() {
        let (arena, root) = read(b"\x80\x04]\x94(]\x94h\x01h\x01e.").unwrap();
        let Value::List(root) = root else { panic!("{root:?}") };
        let items: Vec<_> = arena.items(root).collect();
        assert!(items.len() == 3 && items.iter().all(|item| *item == items[0]), "{items:?}");
        assert_eq!(arena.sequences_len(), 3, "the empty one is the first");
        let (arena, root) = read(b"]\x94h\x00a.").unwrap();
        let Value::List(own) = root else { panic!("{root:?}") };
        assert_eq!(arena.items(own).collect::<Vec<_>>(), [root]);
    }

    #[test]
    fn code_is_named_and_not_run() {
        for (opcode, name) in CODE {
            let bytes = [&b"\x80\x02}"[..], &[opcode], b"os\nsystem\n."].concat();
            let fault = read(&bytes).unwrap_err();
            assert_eq!(fault.place, Location::Offset(3));
            assert_eq!(fault.what, format!("the opcode {name} names code, and nothing was run"));
        }
        for (opcode, name) in BUFFERS {
            let fault = read(&[opcode]).unwrap_err();
            assert_eq!(fault.what, format!("the opcode {name} needs what is not in the file"));
        }
    }

    #[test]
    fn what_is_broken_has_its_offset() {
        let cases: [(&[u8], usize, &str); 27] = [
            (b"", 0, "ends before"),
            (b"N", 1, "ends before"),
            (b"NN", 2, "ends before"),
            (b"J\x00", 0, "ends before"),
            (b"X\xff\xff\xff\xffa.", 0, "ends before"),
            (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffa.", 0, "ends before"),
            (b"\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.", 0, "ends before"),
            (b"T\xff\xff\xff\xffa.", 0, "below 0"),
            (b"\x8b\xff\xff\xff\xff.", 0, "below 0"),
            (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x01.", 0, "64 bits"),
            (b"L99999999999999999999\n.", 0, "64 bits"),
            (b"I\xff\n.", 0, "a number that is none"),
            (b"Fx\n.", 0, "a float that is none"),
            (b"Sab\n.", 0, "quotes"),
            (b"S'\n.", 0, "quotes"),
            (b"Nh\x00.", 1, "place 0 of the memo is empty"),
            (b"Nr\xff\xff\xff\xff.", 1, "beyond what the file can fill"),
            (b"N(.", 2, "taken where none is"),
            (b"N(2.", 2, "taken where none is"),
            (b"Nt.", 1, "without its beginning"),
            (b"NNa.", 2, "no such collection"),
            (b"](Na.", 3, "no such collection"),
            (b"Ne.", 1, "without its beginning"),
            (b"}(Nu.", 3, "without its value"),
            (b"(Nd.", 2, "without its value"),
            (b"\x80\x06N.", 0, "protocol 6"),
            (b"N.N.", 2, "2 bytes follow"),
        ];
        for (bytes, offset, text) in cases {
            let fault = read(bytes).unwrap_err();
            assert!(fault.what.contains(text), "{}: {fault:?}", bytes.escape_ascii());
            assert_eq!(fault.place, Location::Offset(offset), "{}: {fault:?}", bytes.escape_ascii());
        }
        assert!(read(b"\xff").unwrap_err().what.contains("0xff is no opcode"));
    }

    #[test]
    fn nesting_needs_no_stack() {
        for (open, close) in [(&b"]"[..], &b"a"[..]), (b"(", b"l"), (b"(", b"t")] {
            let filler = b"N0".repeat(200_000);
            let bytes = [&filler, &*open.repeat(200_000), b"N", &close.repeat(200_000), b"."].concat();
            assert!(read(&bytes).is_ok());
        }
    }

    #[test]
    fn values_take_a_small_multiple_of_the_bytes() {
        let list = b"]\x940";
        for step in [
            &b"]"[..],
            b"]\x94",
            b"}\x94",
            b"(",
            b"N",
            b"2",
            b")",
            b"\x94",
            b"K\x01",
            b"h\x00h\x00a0",
            b"\x8c\x00",
            b"(t",
        ] {
            let bytes = [list, &b"N"[..], &step.repeat(50_000)].concat();
            let mut machine = Machine {
                bytes: &bytes,
                at: 0,
                opcode_at: 0,
                arena: Arena::new(),
                stack: Vec::new(),
                marks: Vec::new(),
                memo: Vec::new(),
            };
            while machine.step().is_ok() {}
            let own =
                size_of_val(&*machine.stack) + size_of_val(&*machine.marks) + size_of_val(&*machine.memo);
            let all = own + machine.arena.bytes();
            assert!(all <= 20 * bytes.len() + 4096, "{}: {all} of {}", step.escape_ascii(), bytes.len());
        }
    }
}
