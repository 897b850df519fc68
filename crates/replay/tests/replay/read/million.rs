//! A snapshot of a million entries, as Python pickles it: how long it takes to read, and how much memory.
//!
//! `cargo test --release -p poorwill-replay --test replay read:: -- --ignored --nocapture --test-threads=1`

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::time::Instant;

use poorwill_replay::read::read;

const ENTRIES: usize = 1_000_000;
/// Blocks that live at once.
const LIVE: usize = 1000;
const PLACES: usize = 1024;
const FRAMES: usize = 2000;
const DEPTH: usize = 20;
const BASE: u64 = 0x7f12_0000_0000;
const PLACE_BYTES: u64 = 2 << 20;

#[test]
#[ignore = "for figures: it writes and reads 200 MB"]
fn a_million_entries_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("million.pickle");
    write(File::create(&path).unwrap()).unwrap();
    let before = peak_kib();
    let bytes = fs::read(&path).unwrap();
    let start = Instant::now();
    let traces = read("million.pickle", &bytes).unwrap();
    let took = start.elapsed();
    println!(
        "{} MiB: {took:?}, peak {} MiB (before {} MiB), {} steps, {} stacks, {:?}",
        bytes.len() >> 20,
        peak_kib() >> 10,
        before >> 10,
        traces[0].steps.len(),
        traces[0].stacks.len(),
        traces[0].notes,
    );
    assert_eq!(traces[0].recorded.as_ref().unwrap().mapped_bytes.len(), traces[0].steps.len());
}

#[test]
#[ignore = "for figures: it reads 230 MB"]
fn a_hundred_thousand_entries_of_json_are_read() {
    let mut text = String::from("{\"segments\": [], \"device_traces\": [[");
    for number in 0..100_000_usize {
        let (block, action) = (number / 2, ["alloc", "free_completed"][number % 2]);
        let address = BASE + block as u64 % 1000 * PLACE_BYTES;
        let comma = if number == 0 { "" } else { ", " };
        write!(
            text,
            r#"{comma}{{"action": "{action}", "addr": {address}, "size": 4096, "stream": 0, "frames": ["#
        )
        .unwrap();
        for depth in 0..DEPTH {
            let frame = (block * 7919 % 3001 * (depth / 8 + 1) + depth * 97) % FRAMES;
            let comma = if depth == 0 { "" } else { ", " };
            let path = "/usr/lib/python3.12/site-packages/vllm/models/module";
            write!(
                text,
                r#"{comma}{{"name": "function_{frame}", "filename": "{path}_{frame}.py", "line": {frame}}}"#
            )
            .unwrap();
        }
        text.push_str("]}");
    }
    text.push_str("]]}");
    let before = peak_kib();
    let start = Instant::now();
    let traces = read("a.json", text.as_bytes()).unwrap();
    let (took, peak) = (start.elapsed(), peak_kib() >> 10);
    println!("{} MiB: {took:?}, peak {peak} MiB (before {} MiB)", text.len() >> 20, before >> 10);
    assert_eq!((traces[0].steps.len(), &traces[0].notes[..]), (100_000, &[][..]));
}

fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Opcodes of protocol 4, in frames of 64 KiB.
struct Pickler {
    file: File,
    frame: Vec<u8>,
    memo: u32,
}

impl Pickler {
    fn op(&mut self, bytes: &[u8]) {
        self.frame.extend_from_slice(bytes);
    }

    fn end_frame(&mut self) -> io::Result<()> {
        self.file.write_all(&[0x95])?;
        self.file.write_all(&(self.frame.len() as u64).to_le_bytes())?;
        self.file.write_all(&self.frame)?;
        self.frame.clear();
        Ok(())
    }

    fn memoize(&mut self) -> u32 {
        self.op(&[0x94]);
        self.memo += 1;
        self.memo - 1
    }

    fn text(&mut self, text: &str) -> u32 {
        self.op(&[0x8c, u8::try_from(text.len()).unwrap()]);
        self.op(text.as_bytes());
        self.memoize()
    }

    fn recall(&mut self, key: u32) {
        match u8::try_from(key) {
            Ok(key) => self.op(&[b'h', key]),
            Err(_) => {
                self.op(b"j");
                self.op(&key.to_le_bytes());
            }
        }
    }

    fn int(&mut self, int: u64) {
        if let Ok(int) = u8::try_from(int) {
            self.op(&[b'K', int]);
        } else if let Ok(int) = u16::try_from(int) {
            self.op(b"M");
            self.op(&int.to_le_bytes());
        } else if let Ok(int) = i32::try_from(int) {
            self.op(b"J");
            self.op(&int.to_le_bytes());
        } else {
            let bytes = int.to_le_bytes();
            let len = 8 - usize::try_from((int << 1).leading_zeros() / 8).unwrap();
            self.op(&[0x8a, u8::try_from(len).unwrap()]);
            self.op(&bytes[..len.min(8)]);
        }
    }
}

fn write(file: File) -> io::Result<()> {
    let mut out = Pickler { file, frame: Vec::new(), memo: 0 };
    out.file.write_all(&[0x80, 4])?;
    out.op(b"}");
    out.memoize();
    out.op(b"(");
    // The frames come first here, in a key of their own; PyTorch's are within the first entries that have them.
    out.text("external_annotations");
    out.op(b"]");
    out.memoize();
    out.text("all_frames");
    out.op(b"]");
    out.memoize();
    let words = ["action", "addr", "size", "stream", "time_us", "frames", "filename", "line", "name"];
    let actions =
        ["alloc", "free_requested", "free_completed", "N/A", "compile_context", "user_metadata", ""];
    out.op(b"(");
    let words = words.map(|word| out.text(word));
    let actions = actions.map(|word| out.text(word));
    let mut frames = Vec::new();
    for frame in 0..FRAMES {
        out.op(b"}");
        frames.push(out.memoize());
        out.op(b"(");
        out.recall(words[6]);
        out.text(&format!("/usr/lib/python3.12/site-packages/vllm/models/module_{}.py", frame / 20));
        out.recall(words[7]);
        out.int(frame as u64);
        out.recall(words[8]);
        out.text(&format!("function_{frame}"));
        out.op(b"u");
    }
    out.op(b"e");
    out.text("device_traces");
    out.op(b"]");
    out.memoize();
    out.op(b"]");
    out.memoize();
    let mut entries = 0;
    let mut block = 0;
    let mut pending = Vec::new();
    while entries < ENTRIES {
        if pending.is_empty() {
            pending.push((0, block));
            if block >= LIVE {
                pending = vec![(2, block - LIVE), (1, block - LIVE), (0, block)];
            }
            block += 1;
        }
        let Some((action, of)) = pending.pop() else { break };
        if entries % 1000 == 0 {
            out.op(if entries == 0 { b"(" } else { b"e(" });
        }
        entry(&mut out, words, actions, &frames, action, of, entries as u64);
        entries += 1;
        if out.frame.len() > 64 << 10 {
            out.end_frame()?;
        }
    }
    // One trace was appended alone.
    out.op(b"ea");
    out.text("segments");
    out.op(b"]");
    out.memoize();
    out.op(b"}");
    out.memoize();
    out.op(b"(");
    for (key, value) in [("address", BASE), ("total_size", PLACES as u64 * PLACE_BYTES)] {
        out.text(key);
        out.int(value);
    }
    out.op(b"uau.");
    out.end_frame()
}

fn entry(
    out: &mut Pickler,
    words: [u32; 9],
    actions: [u32; 7],
    frames: &[u32],
    action: usize,
    of: usize,
    number: u64,
) {
    out.op(b"}");
    out.memoize();
    out.op(b"(");
    out.recall(words[0]);
    out.recall(actions[action]);
    out.recall(words[1]);
    out.int(BASE + (of % PLACES) as u64 * PLACE_BYTES);
    out.recall(words[2]);
    out.int(100_000 + of as u64 % 1_900_000);
    out.recall(words[3]);
    out.int(0);
    out.recall(words[4]);
    out.int(1_700_000_000_000_000 + number * 137);
    for (key, value) in [(4, 3), (5, 6)] {
        out.recall(actions[key]);
        out.recall(actions[value]);
    }
    out.recall(words[5]);
    out.op(b"]");
    out.memoize();
    out.op(b"(");
    // Some three thousand stacks.
    let stack = (of * 7919) % 3001;
    for depth in 0..DEPTH {
        out.recall(frames[(stack * (depth / 8 + 1) + depth * 97) % FRAMES]);
    }
    out.op(b"eu");
}
