//! Files with random damage end in a trace or in a sentence, and take little memory.

use std::{fs, panic};

use poorwill_testkit::effort::{Effort, seed_of_this_run};

use super::{json, pickle, read};

/// Long runs have a hundred thousand.
const CASES: u32 = 5000;

/// All opcodes, and what makes numbers and lengths large.
const OPCODES: &[&[u8]] = &[
    b"(",
    b".",
    b"0",
    b"1",
    b"2",
    b"N",
    b"\x88",
    b"I1\n",
    b"L9L\n",
    b"J\xff\xff\xff\xff",
    b"K\0",
    b"M\xff\xff",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0",
    b"\x8b\xff\xff\xff\x7f",
    b"F1e308\n",
    b"G\x7f\xf8\0\0\0\0\0\0",
    b"S'a'\n",
    b"T\xff\xff\xff\x7f",
    b"U\0",
    b"V\\u0041\n",
    b"X\xff\xff\xff\xff",
    b"\x8c\x01a",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
    b"C\0",
    b"]",
    b"}",
    b"\x8f",
    b")",
    b"l",
    b"t",
    b"\x91",
    b"d",
    b"\x85",
    b"\x86",
    b"\x87",
    b"a",
    b"e",
    b"\x90",
    b"s",
    b"u",
    b"g0\n",
    b"h\0",
    b"h\x05",
    b"j\xff\xff\xff\xff",
    b"p3\n",
    b"q\0",
    b"r\xff\xff\xff\x7f",
    b"\x94",
    b"\x95\xff\xff\xff\xff\xff\xff\xff\xff",
    b"cos\nsystem\n",
    b"R",
    b"b",
    b"o",
    b"P1\n",
    b"\x93",
    b"\x81",
    b"\x97",
    b"\x80\x05",
];

const TOKENS: &[&[u8]] = &[
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b"\"",
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1e999",
    b"0.5",
    b"18446744073709551615",
    b"99999999999999999999",
    b"\\ud800",
    b"{\"size\":",
    b"\"action\": \"oom\", ",
    b"\"frames\": [[]], ",
    b"\n",
    b"\xff",
    b"\"segment_pool_id\": [-1, 5], ",
    b"\"is_expandable\": true, ",
    b"{\"name\": \"load\", \"time_us\": 0}, ",
];

#[test]
fn damaged_pickles_end_in_a_trace_or_a_sentence() {
    let names = [
        "load-0.pickle",
        "load-1.pickle",
        "load-2.pickle",
        "load-4.pickle",
        "segments.pickle",
        "code-4.pickle",
    ];
    try_all(&names, OPCODES, |bytes| {
        if let Ok((arena, _)) = pickle::read(bytes) {
            assert!(arena.bytes() <= 20 * bytes.len() + 4096, "{} of {}", arena.bytes(), bytes.len());
        }
    });
}

#[test]
fn damaged_json_ends_in_a_trace_or_a_sentence() {
    try_all(&["load.json"], TOKENS, |bytes| {
        if let Ok((arena, _)) = json::read(bytes) {
            assert!(arena.bytes() <= 12 * bytes.len() + 4096, "{} of {}", arena.bytes(), bytes.len());
        }
    });
}

#[test]
fn damaged_recordings_and_loads_end_in_a_trace_or_a_sentence() {
    let recording = concat!(
        "{\"poorwill_record\":1,\"allocator\":\"pytorch a:b\",\"card\":{\"total_bytes\":9,\"taken_bytes\":1}}\n",
        "{\"t\":\"p\",\"n\":\"load\"}\n{\"t\":\"a\",\"k\":7,\"b\":5,\"s\":1,\"p\":2,\"f\":[\"a.py:1 f\"]}\n",
        "{\"t\":\"m\",\"b\":200}\n{\"t\":\"a\",\"k\":8,\"b\":6,\"f\":0}\n{\"t\":\"f\",\"k\":7}\n{\"t\":\"e\"}\n",
        "{\"t\":\"o\",\"b\":9}\n{\"t\":\"f\",\"k\":9,\"b\":3}\n",
    );
    let load =
        "step,event,block,bytes,live_bytes,mapped_bytes\n1,take,0,5,5,8\n2,take,1,6,11,16\n3,give,0,5,6,16\n";
    for file in [recording, load] {
        damage("text", &[file.as_bytes().to_vec()], TOKENS, CASES, |_| {});
    }
}

fn try_all(names: &[&str], pieces: &[&[u8]], check: impl Fn(&[u8])) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/");
    let files: Vec<Vec<u8>> = names.iter().map(|name| fs::read(format!("{folder}{name}")).unwrap()).collect();
    damage(names[0], &files, pieces, CASES, check);
}

fn damage(name: &str, files: &[Vec<u8>], pieces: &[&[u8]], cases: u32, check: impl Fn(&[u8])) {
    let seed = seed_of_this_run().unwrap_or_else(|| fastrand::u64(..));
    let mut random = fastrand::Rng::with_seed(seed);
    let mut read_whole = 0;
    for case in 0..Effort::of_this_run().cases(cases) {
        let bytes = damaged(&mut random, files, pieces);
        let outcome = panic::catch_unwind(panic::AssertUnwindSafe(|| {
            check(&bytes);
            is_fine(name, &bytes)
        }));
        match outcome {
            Ok(is_read) => read_whole += u32::from(is_read),
            Err(_) => panic!("case {case} of POORWILL_SEED={seed}: {}", bytes.escape_ascii()),
        }
    }
    assert!(read_whole > 0, "no damage was small: POORWILL_SEED={seed}");
}

/// Whether it could be read.
fn is_fine(name: &str, bytes: &[u8]) -> bool {
    match read(name, bytes) {
        Ok(traces) => {
            let steps: usize = traces.iter().map(|trace| trace.steps.len()).sum();
            assert!(!traces.is_empty() && steps <= bytes.len());
            for trace in &traces {
                assert_eq!(trace.live_bytes().len(), trace.steps.len());
                assert!(trace.phases.is_sorted_by_key(|phase| phase.from));
                assert!(trace.phases.iter().all(|phase| phase.from <= trace.steps.len()));
                let mapped = &trace.recorded.as_ref().unwrap().mapped_bytes;
                assert!(mapped.is_empty() || mapped.len() == trace.steps.len());
            }
            true
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with(&format!("{name}, ")) && text.len() < 400, "{text}");
            let own: String = text.split('`').step_by(2).collect();
            assert!(!text.contains(char::is_control) && !own.contains(". "), "{text}");
            assert!(text.contains(": ") && text.contains("; "), "{text}");
            false
        }
    }
}

fn damaged(random: &mut fastrand::Rng, files: &[Vec<u8>], pieces: &[&[u8]]) -> Vec<u8> {
    let mut bytes = files[random.usize(..files.len())].clone();
    for _ in 0..random.usize(1..=4) {
        let at = random.usize(..=bytes.len());
        let most = if random.bool() { 8 } else { 600 };
        let len = random.usize(..=most.min(bytes.len() - at));
        match random.u8(..7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.u32(..8),
            1 if at < bytes.len() => bytes[at] = random.u8(..),
            2 => bytes.truncate(bytes.len() - len),
            3 => drop(bytes.drain(at..at + len)),
            4 => {
                let again = bytes[at..at + len].repeat(random.usize(1..4));
                bytes.splice(at..at, again);
            }
            5 => {
                let piece = pieces[random.usize(..pieces.len())];
                bytes.splice(at..at, piece.repeat(random.usize(1..4)));
            }
            _ => {
                let from = random.usize(..=bytes.len() - len);
                let moved = bytes[from..from + len].to_vec();
                bytes.splice(at..at + len, moved);
            }
        }
    }
    bytes
}
