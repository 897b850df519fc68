//! Runs a kernel's PTX on the CPU, one thread block at a time, so that its text is tested where no GPU is.
//!
//! Only what our kernels use is understood; anything else is a panic that quotes the line. Threads run one after
//! the other to the next point where they meet: the barrier, or a shuffle. All threads of a warp must reach a
//! shuffle together. Accesses that are not aligned, or outside of the memory that the test names, panic as well.

use std::collections::HashMap;

const WARP: usize = 32;

/// One kernel of a module.
pub(crate) struct Kernel {
    code: Vec<Line>,
    labels: HashMap<String, usize>,
    registers: HashMap<String, usize>,
    params: Vec<String>,
    constants: Vec<u8>,
}

struct Line {
    text: String,
    /// Register, and whether it has to be false.
    guard: Option<(usize, bool)>,
    op: Op,
}

#[derive(Debug, Clone, Copy)]
enum Value {
    Register(usize),
    Number(u64),
    Thread,
    Threads,
    Block,
    Blocks,
}

#[derive(Debug, Clone, Copy)]
enum Space {
    Param,
    Global,
    Const,
    Shared,
}

#[derive(Debug, Clone, Copy)]
enum Math {
    Move,
    Add,
    Sub,
    And,
    Or,
    Xor,
    Not,
    Min,
    Max,
    /// Bits of a word: from, and how many.
    Field,
    CountOnes,
    /// The low half of two words shifted right.
    Funnel,
    /// Sums of products of bytes.
    Products,
    /// Bytes of two words, as the nibbles of a third say.
    Permute,
    ShiftLeft,
    ShiftRight,
    /// Of a word of 32 bits, with copies of its sign.
    ShiftRightSigned,
    /// Bits of a word in place of some of another: from, and how many.
    Insert,
    Negate,
    MulLow,
    MulHigh,
    MulWide,
    MadLow,
    MadWide,
}

#[derive(Debug, Clone, Copy)]
enum Compare {
    Equal,
    NotEqual,
    Less,
    Greater,
    GreaterOrEqual,
}

enum Op {
    /// Bytes of a word, registers, base, offset.
    Load(Space, usize, Vec<usize>, Value, u64),
    Store(Space, usize, Vec<Value>, Value, u64),
    Math(Math, u32, usize, Vec<Value>),
    /// Bits of a word.
    Compare(Compare, u32, usize, Value, Value),
    Select(u32, usize, Value, Value, usize),
    Unpack(usize, usize, usize),
    Pack(usize, usize, usize),
    /// To, from, distance of the threads in the warp; then what must be 31, and all bits.
    Shuffle(usize, usize, [Value; 3]),
    Branch(String),
    /// Of the threads of a warp.
    Meet,
    Barrier,
    Return,
}

/// Memory that the kernel may touch, by address.
#[derive(Default)]
pub(crate) struct Memory(pub(crate) Vec<(u64, Vec<u8>)>);

/// How a kernel is launched, for one of its blocks.
pub(crate) struct Launch<'a> {
    pub(crate) params: &'a [u64],
    pub(crate) block: u64,
    pub(crate) blocks: u64,
    pub(crate) threads: usize,
    pub(crate) shared_bytes: usize,
}

#[derive(Clone)]
struct Thread {
    at: usize,
    registers: Vec<u64>,
    number: usize,
}

/// Where a thread has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    Shuffle(usize),
    Meet(usize),
    Barrier(usize),
    End,
}

impl Kernel {
    pub(crate) fn parse(ptx: &str, name: &str) -> Self {
        let lines: Vec<&str> = ptx
            .lines()
            .map(|line| line.split("//").next().unwrap().trim())
            .filter(|line| !line.is_empty())
            .collect();
        let text = lines.join("\n");
        let table = text.split_once(".b8 CONSTANTS[").map(|(_, rest)| rest.split_once('{').unwrap().1);
        let table = table.map_or("", |rest| rest.split_once("};").unwrap().0);
        let bytes = table.split(',').filter(|byte| !byte.is_empty());
        let constants = bytes.map(|byte| byte.trim().parse::<u8>().unwrap()).collect();
        let entry = text.split_once(&format!(".visible .entry {name}(")).unwrap().1;
        let (params, rest) = entry.split_once(')').unwrap();
        let params =
            params.split(',').map(|param| param.split_whitespace().last().unwrap().to_owned()).collect();
        let body = rest.split_once('{').unwrap().1.split_once("\n}").unwrap().0;
        let (code, labels, registers) = Default::default();
        let mut kernel = Self { code, labels, registers, params, constants };
        for line in body.lines() {
            if line.is_empty() || line.starts_with(".reg") || line.starts_with(".pragma") {
                continue;
            }
            if let Some(label) = line.strip_suffix(':') {
                assert!(kernel.labels.insert(label.to_owned(), kernel.code.len()).is_none(), "{label} twice");
                continue;
            }
            let line = kernel.line(line);
            kernel.code.push(line);
        }
        kernel
    }

    fn register(&mut self, name: &str) -> usize {
        assert!(name.starts_with('%'), "`{name}` is no register");
        let next = self.registers.len();
        *self.registers.entry(name.to_owned()).or_insert(next)
    }

    fn value(&mut self, text: &str) -> Value {
        match text {
            "%tid.x" => Value::Thread,
            "%ntid.x" => Value::Threads,
            "%ctaid.x" => Value::Block,
            "%nctaid.x" => Value::Blocks,
            "CONSTANTS" | "found" => Value::Number(0),
            _ if text.starts_with('%') => Value::Register(self.register(text)),
            _ => {
                let number = match (text.strip_prefix("0x"), text.starts_with('-')) {
                    (Some(hex), _) => u64::from_str_radix(hex, 16),
                    (None, true) => text.parse().map(i64::cast_unsigned),
                    (None, false) => text.parse(),
                };
                Value::Number(number.unwrap_or_else(|_| panic!("what is `{text}`?")))
            }
        }
    }

    fn line(&mut self, text: &str) -> Line {
        let code = text.strip_suffix(';').unwrap_or_else(|| panic!("no end of `{text}`"));
        let (guard, code) = match code.strip_prefix('@') {
            None => (None, code),
            Some(guarded) => {
                let (guard, code) = guarded.split_once(' ').unwrap();
                let name = guard.trim_start_matches('!');
                (Some((self.register(name), guard.starts_with('!'))), code)
            }
        };
        let (name, args) = code.split_once(char::is_whitespace).unwrap_or((code, ""));
        let op = self.op(name, args).unwrap_or_else(|| panic!("not understood: `{text}`"));
        Line { text: text.to_owned(), guard, op }
    }

    fn op(&mut self, name: &str, args: &str) -> Option<Op> {
        let words: Vec<&str> = name.split('.').collect();
        let bits = |word: &str| match word {
            "u32" | "b32" | "s32" => Some(32),
            "u64" | "b64" | "s64" => Some(64),
            "u16" => Some(16),
            "u8" => Some(8),
            "pred" => Some(1),
            _ => None,
        };
        let width = bits(words.last()?);
        // `{a, b}` is one argument.
        let mut list: Vec<String> = Vec::new();
        let mut open = false;
        for part in args.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            match list.last_mut().filter(|_| open) {
                Some(last) => *last = format!("{last}, {part}"),
                None => list.push(part.to_owned()),
            }
            open = (open || part.starts_with('{')) && !part.ends_with('}');
        }
        let several = |text: &str| -> Vec<String> {
            text.trim_matches(['{', '}']).split(',').map(|part| part.trim().to_owned()).collect()
        };
        Some(match (words[0], &list[..]) {
            ("ld" | "st", [first, second]) => {
                let is_load = words[0] == "ld";
                let (values, place) = if is_load { (first, second) } else { (second, first) };
                let space = words[1..].iter().find_map(|word| match *word {
                    "param" => Some(Space::Param),
                    "global" => Some(Space::Global),
                    "const" => Some(Space::Const),
                    "shared" => Some(Space::Shared),
                    _ => None,
                })?;
                let known =
                    ["param", "global", "const", "shared", "cv", "cs", "v2", "v4", "u64", "u32", "u8"];
                assert!(words[1..].iter().all(|word| known.contains(word)), "{name}");
                let place = place.strip_prefix('[')?.strip_suffix(']')?;
                let (base, offset) = place.split_once('+').unwrap_or((place, "0"));
                let base = match space {
                    Space::Param => Value::Number(self.params.iter().position(|param| param == base)? as u64),
                    _ => self.value(base),
                };
                let offset = offset.parse::<i64>().ok()?.cast_unsigned();
                let (bytes, values) = (usize::try_from(width? / 8).ok()?, several(values));
                let count = words.iter().find_map(|word| word.strip_prefix('v')).unwrap_or("1");
                assert_eq!(values.len().to_string(), count, "{name}");
                if is_load {
                    let to = values.iter().map(|name| self.register(name)).collect();
                    Op::Load(space, bytes, to, base, offset)
                } else {
                    let from = values.iter().map(|text| self.value(text)).collect();
                    Op::Store(space, bytes, from, base, offset)
                }
            }
            ("cvta", [to, from]) => Op::Math(Math::Move, 64, self.register(to), vec![self.value(from)]),
            ("cvt", [to, from]) if name == "cvt.u32.u64" => {
                Op::Math(Math::Move, 32, self.register(to), vec![self.value(from)])
            }
            ("cvt", [to, from]) if name == "cvt.u64.u32" => {
                Op::Math(Math::Move, 64, self.register(to), vec![self.value(from)])
            }
            ("mov", [to, from]) if to.starts_with('{') => {
                let parts = several(to);
                Op::Unpack(self.register(&parts[0]), self.register(&parts[1]), self.register(from))
            }
            ("mov", [to, from]) if from.starts_with('{') => {
                let parts = several(from);
                Op::Pack(self.register(to), self.register(&parts[0]), self.register(&parts[1]))
            }
            ("setp", [to, a, b]) => {
                let compare = match words[1] {
                    "eq" => Compare::Equal,
                    "ne" => Compare::NotEqual,
                    "lt" => Compare::Less,
                    "gt" => Compare::Greater,
                    "ge" => Compare::GreaterOrEqual,
                    _ => return None,
                };
                let has_sign = words[2].starts_with('s');
                assert!(!has_sign || matches!(compare, Compare::Equal | Compare::NotEqual), "{name}");
                Op::Compare(compare, width?, self.register(to), self.value(a), self.value(b))
            }
            ("selp", [to, a, b, p]) => {
                Op::Select(width?, self.register(to), self.value(a), self.value(b), self.register(p))
            }
            ("shfl", [to, from, rest @ ..]) if name == "shfl.sync.bfly.b32" => {
                // Whether the other thread is there is not used.
                let to = to.split('|').next()?;
                let rest: Vec<Value> = rest.iter().map(|text| self.value(text)).collect();
                Op::Shuffle(self.register(to), self.register(from), rest.try_into().ok()?)
            }
            ("bra", [label]) => Op::Branch(label.clone()),
            ("bar", [zero]) if zero == "0" => Op::Barrier,
            ("bar", [mask]) if name == "bar.warp.sync" && mask == "-1" => Op::Meet,
            ("ret", []) => Op::Return,
            (_, [to, from @ ..]) => {
                let (math, wide) = match &words[..words.len() - 1] {
                    ["shr"] if name == "shr.s32" => (Math::ShiftRightSigned, false),
                    ["mov"] => (Math::Move, false),
                    ["add"] => (Math::Add, false),
                    ["sub"] => (Math::Sub, false),
                    ["and"] => (Math::And, false),
                    ["or"] => (Math::Or, false),
                    ["xor"] => (Math::Xor, false),
                    ["not"] => (Math::Not, false),
                    ["min"] => (Math::Min, false),
                    ["max"] => (Math::Max, false),
                    ["bfe"] => (Math::Field, false),
                    ["popc"] => (Math::CountOnes, false),
                    ["shf", "r", "wrap"] => (Math::Funnel, false),
                    ["prmt"] => (Math::Permute, false),
                    ["dp4a", "u32"] => (Math::Products, false),
                    ["shl"] => (Math::ShiftLeft, false),
                    ["shr"] => (Math::ShiftRight, false),
                    ["mul", "lo"] => (Math::MulLow, false),
                    ["mul", "hi"] => (Math::MulHigh, false),
                    ["bfi"] => (Math::Insert, false),
                    ["neg"] => (Math::Negate, false),
                    ["mul", "wide"] => (Math::MulWide, true),
                    ["mad", "lo"] => (Math::MadLow, false),
                    ["mad", "wide"] => (Math::MadWide, true),
                    _ => return None,
                };
                let width = if wide { 64 } else { width? };
                Op::Math(math, width, self.register(to), from.iter().map(|text| self.value(text)).collect())
            }
            _ => return None,
        })
    }

    /// Runs one block to its end.
    pub(crate) fn run(&self, memory: &mut Memory, launch: &Launch<'_>) {
        assert!(launch.threads.is_multiple_of(WARP));
        let mut shared = vec![0xEE; launch.shared_bytes];
        let registers = vec![0xEEEE_EEEE_EEEE_EEEE; self.registers.len()];
        let thread = |number| Thread { at: 0, registers: registers.clone(), number };
        let mut threads: Vec<Thread> = (0..launch.threads).map(thread).collect();
        loop {
            let mut stops: Vec<Stop> = Vec::new();
            for warp in threads.chunks_mut(WARP) {
                stops.push(self.warp(warp, memory, &mut shared, launch));
            }
            if stops.iter().all(|stop| *stop == Stop::End) {
                return;
            }
            let barrier = stops[0];
            assert!(
                matches!(barrier, Stop::Barrier(_)) && stops.iter().all(|stop| *stop == barrier),
                "{stops:?}"
            );
            threads.iter_mut().for_each(|thread| thread.at += 1);
        }
    }

    /// Runs a warp to a barrier or its end.
    fn warp(&self, warp: &mut [Thread], memory: &mut Memory, shared: &mut [u8], launch: &Launch<'_>) -> Stop {
        loop {
            let stops: Vec<Stop> =
                warp.iter_mut().map(|thread| self.thread(thread, memory, shared, launch)).collect();
            assert!(stops.iter().all(|stop| *stop == stops[0]), "a warp is of two minds: {stops:?}");
            if let Stop::Meet(_) = stops[0] {
                warp.iter_mut().for_each(|thread| thread.at += 1);
                continue;
            }
            let Stop::Shuffle(at) = stops[0] else { return stops[0] };
            let Op::Shuffle(to, from, how) = self.code[at].op else { unreachable!() };
            let [distance, clamp, mask] = how.map(|value| {
                let values = warp.iter().map(|thread| get(thread, value, launch) & 0xFFFF_FFFF);
                let first = values.clone().next().unwrap();
                assert!(values.clone().all(|value| value == first), "{}", self.code[at].text);
                first
            });
            assert_eq!((clamp, mask), (31, 0xFFFF_FFFF), "{}", self.code[at].text);
            let distance = usize::try_from(distance).unwrap();
            let given: Vec<u64> = warp.iter().map(|thread| thread.registers[from]).collect();
            for (lane, thread) in warp.iter_mut().enumerate() {
                thread.registers[to] = given[lane ^ distance];
                thread.at += 1;
            }
        }
    }

    fn thread(
        &self,
        thread: &mut Thread,
        memory: &mut Memory,
        shared: &mut [u8],
        launch: &Launch<'_>,
    ) -> Stop {
        loop {
            let line = &self.code[thread.at];
            if line.guard.is_some_and(|(register, negated)| (thread.registers[register] != 0) == negated) {
                thread.at += 1;
                continue;
            }
            let get = |thread: &Thread, value: Value| get(thread, value, launch);
            match &line.op {
                Op::Load(space, bytes, to, base, offset) => {
                    let addr = get(thread, *base).wrapping_add(*offset);
                    if matches!(space, Space::Param) {
                        thread.registers[to[0]] = launch.params[usize::try_from(addr).unwrap()];
                    } else {
                        let len = bytes * to.len();
                        assert!(addr.is_multiple_of(len as u64), "{}: {addr:#x} is not aligned", line.text);
                        let found = match space {
                            Space::Const => slice(&self.constants, addr, len),
                            Space::Shared => slice(shared, addr, len),
                            _ => memory.read(addr, len),
                        };
                        for (to, word) in to.iter().zip(found.chunks(*bytes)) {
                            let mut value = [0; 8];
                            value[..*bytes].copy_from_slice(word);
                            thread.registers[*to] = u64::from_le_bytes(value);
                        }
                    }
                }
                Op::Store(space, bytes, from, base, offset) => {
                    let addr = get(thread, *base).wrapping_add(*offset);
                    let words: Vec<u8> = from
                        .iter()
                        .flat_map(|value| get(thread, *value).to_le_bytes()[..*bytes].to_vec())
                        .collect();
                    assert!(
                        addr.is_multiple_of(words.len() as u64),
                        "{}: {addr:#x} is not aligned",
                        line.text
                    );
                    match space {
                        Space::Shared => slice_mut(shared, addr, words.len()).copy_from_slice(&words),
                        Space::Global => memory.write(addr, &words),
                        _ => panic!("{}", line.text),
                    }
                }
                Op::Math(math, width, to, from) => {
                    let values: Vec<u64> = from.iter().map(|value| get(thread, *value)).collect();
                    thread.registers[*to] = calculated(*math, *width, &values);
                }
                Op::Compare(compare, width, to, a, b) => {
                    let [a, b] = [a, b].map(|value| cut(get(thread, *value), *width));
                    let holds = match compare {
                        Compare::Equal => a == b,
                        Compare::NotEqual => a != b,
                        Compare::Less => a < b,
                        Compare::Greater => a > b,
                        Compare::GreaterOrEqual => a >= b,
                    };
                    thread.registers[*to] = u64::from(holds);
                }
                Op::Select(width, to, a, b, predicate) => {
                    let chosen = if thread.registers[*predicate] != 0 { a } else { b };
                    thread.registers[*to] = cut(get(thread, *chosen), *width);
                }
                Op::Unpack(low, high, from) => {
                    let value = thread.registers[*from];
                    (thread.registers[*low], thread.registers[*high]) = (value & 0xFFFF_FFFF, value >> 32);
                }
                Op::Pack(to, low, high) => {
                    thread.registers[*to] =
                        thread.registers[*low] & 0xFFFF_FFFF | thread.registers[*high] << 32;
                }
                Op::Shuffle(..) => return Stop::Shuffle(thread.at),
                Op::Meet => return Stop::Meet(thread.at),
                Op::Barrier => return Stop::Barrier(thread.at),
                Op::Return => return Stop::End,
                Op::Branch(label) => {
                    thread.at = self.labels[label];
                    continue;
                }
            }
            thread.at += 1;
        }
    }
}

fn get(thread: &Thread, value: Value, launch: &Launch<'_>) -> u64 {
    match value {
        Value::Register(register) => thread.registers[register],
        Value::Number(number) => number,
        Value::Thread => thread.number as u64,
        Value::Threads => launch.threads as u64,
        Value::Block => launch.block,
        Value::Blocks => launch.blocks,
    }
}

fn cut(value: u64, width: u32) -> u64 {
    if width == 64 { value } else { value & ((1 << width) - 1) }
}

fn calculated(math: Math, width: u32, values: &[u64]) -> u64 {
    let low = |value: u64| value & 0xFFFF_FFFF;
    let result = match (math, values) {
        (Math::Move, [a]) => *a,
        (Math::Add, [a, b]) => a.wrapping_add(*b),
        (Math::Sub, [a, b]) => a.wrapping_sub(*b),
        (Math::And, [a, b]) => a & b,
        (Math::Or, [a, b]) => a | b,
        (Math::Xor, [a, b]) => a ^ b,
        (Math::Not, [a]) => !a,
        (Math::Min, [a, b]) => *a.min(b),
        (Math::Max, [a, b]) => *a.max(b),
        // Shifts by the width or more leave nothing.
        (Math::ShiftLeft, [a, b]) => shift(*b, width).map_or(0, |bits| a << bits),
        (Math::ShiftRight, [a, b]) => shift(*b, width).map_or(0, |bits| a >> bits),
        (Math::ShiftRightSigned, [a, b]) => {
            let word = i64::from(u32::try_from(low(*a)).unwrap().cast_signed());
            (word >> low(*b).min(31)).cast_unsigned()
        }
        (Math::Insert, [a, b, from, count]) => {
            let bits = cut(u64::MAX, u32::try_from(*count).unwrap()) << from;
            a << from & bits | b & !bits
        }
        (Math::Negate, [a]) => a.wrapping_neg(),
        (Math::MadLow, [a, b, c]) => a.wrapping_mul(*b).wrapping_add(*c),
        (Math::Field, [a, from, count]) => a >> from & ((1 << count) - 1),
        (Math::CountOnes, [a]) => u64::from(a.count_ones()),
        (Math::Funnel, [low_word, high_word, bits]) => (low_word | high_word << 32) >> (bits & 31),
        (Math::Products, [a, b, sum]) => {
            let bytes = |word: u64| word.to_le_bytes().into_iter().take(4).map(u64::from);
            bytes(*a).zip(bytes(*b)).map(|(a, b)| a * b).sum::<u64>().wrapping_add(*sum)
        }
        (Math::Permute, [a, b, nibbles]) => {
            let bytes = (a | b << 32).to_le_bytes();
            let chosen = |nth: u64| {
                let nibble = nibbles >> (4 * nth) & 15;
                assert!(nibble < 8, "no signs are replicated");
                u64::from(bytes[usize::try_from(nibble).unwrap()]) << (8 * nth)
            };
            (0..4).map(chosen).sum()
        }
        (Math::MulLow, [a, b]) => a.wrapping_mul(*b),
        (Math::MulHigh, [a, b]) => u64::try_from((u128::from(*a) * u128::from(*b)) >> 64).unwrap(),
        (Math::MulWide, [a, b]) => low(*a) * low(*b),
        (Math::MadWide, [a, b, c]) => (low(*a) * low(*b)).wrapping_add(*c),
        _ => panic!("{math:?} of {}", values.len()),
    };
    cut(result, width)
}

fn shift(bits: u64, width: u32) -> Option<u32> {
    u32::try_from(bits).ok().filter(|bits| *bits < width)
}

fn slice(bytes: &[u8], addr: u64, len: usize) -> &[u8] {
    let start = usize::try_from(addr).unwrap();
    &bytes[start..start + len]
}

fn slice_mut(bytes: &mut [u8], addr: u64, len: usize) -> &mut [u8] {
    let start = usize::try_from(addr).unwrap();
    &mut bytes[start..start + len]
}

impl Memory {
    fn place(&self, addr: u64, len: usize) -> (usize, usize) {
        let inside = |(start, bytes): &(u64, Vec<u8>)| {
            addr >= *start && addr - *start + len as u64 <= bytes.len() as u64
        };
        let nth = self.0.iter().position(inside).unwrap_or_else(|| panic!("{addr:#x} is nobody's"));
        (nth, usize::try_from(addr - self.0[nth].0).unwrap())
    }

    fn read(&self, addr: u64, len: usize) -> &[u8] {
        let (nth, at) = self.place(addr, len);
        &self.0[nth].1[at..at + len]
    }

    fn write(&mut self, addr: u64, bytes: &[u8]) {
        let (nth, at) = self.place(addr, bytes.len());
        self.0[nth].1[at..at + bytes.len()].copy_from_slice(bytes);
    }
}
