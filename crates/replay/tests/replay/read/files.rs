//! What Python's pickle wrote, `fixtures/make.py` says how, and what it comes to.

use std::path::Path;
use std::{env, fs};

use poorwill_replay::Trace;
use poorwill_replay::answer::holders;
use poorwill_replay::read::{Location, ReadError, read};
use poorwill_replay::trace::Step;

const MIB: u64 = 1 << 20;

fn fixture(name: &str) -> Result<Vec<Trace>, ReadError> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    read(name, fs::read(path).unwrap())
}

#[test]
fn all_protocols_and_json_say_the_same() {
    let traces = fixture("load-4.pickle").unwrap();
    for name in ["load-0.pickle", "load-1.pickle", "load-2.pickle", "load-5.pickle", "load.json"] {
        let mut same = fixture(name).unwrap();
        for trace in &mut same {
            trace.name = trace.name.replace(name, "load-4.pickle");
        }
        assert_eq!(same, traces, "{name}");
    }
}

#[test]
fn a_snapshot_is_a_trace_for_each_device() {
    let traces = fixture("load-4.pickle").unwrap();
    let names: Vec<_> = traces.iter().map(|trace| &*trace.name).collect();
    assert_eq!(names, ["load-4.pickle, device 0", "load-4.pickle, device 1"]);
    let [first, second] = &traces[..] else { panic!("{traces:?}") };

    let steps = [
        // What lived before, by address: one block stays, one is freed.
        Step::Alloc(0),
        Step::Alloc(1),
        Step::Alloc(2),
        Step::Alloc(3),
        Step::Free(1),
        Step::EmptyCache,
        Step::Alloc(4),
        Step::Free(2),
        Step::Alloc(5),
        Step::Free(4),
        // The segment that goes back here is for the next one.
        Step::Alloc(6),
        Step::Alloc(7),
        // It could not be had, and was asked for.
        Step::Alloc(8),
        Step::Free(8),
    ];
    assert_eq!(first.steps, steps);
    let sizes: Vec<_> = first.blocks.iter().map(|block| block.bytes).collect();
    let expected = [MIB - 8, 7 * MIB, 5 * MIB - 100, 3 * MIB, 39 * MIB, 4 * MIB, 60 * MIB, 1000, 900 * MIB];
    assert_eq!(sizes, expected);
    let places: Vec<_> = first.blocks.iter().map(|block| (block.stream, block.pool)).collect();
    assert_eq!(places, [(0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 1), (1, 0), (0, 0)]);

    let recorded = first.recorded.as_ref().unwrap();
    assert_eq!(recorded.settings, "max_split_size_mb:20");
    let mapped: Vec<_> = recorded.mapped_bytes.iter().map(|bytes| bytes / MIB).collect();
    assert_eq!(mapped, [22, 22, 42, 42, 42, 22, 62, 62, 62, 62, 82, 84, 84, 84]);
    let refused = recorded.refused.map(|refusal| (refusal.step, refusal.asked_bytes));
    assert_eq!(refused, Some((12, 900 * MIB)));
    let card = first.card.unwrap();
    assert_eq!((card.usable_bytes(), first.ended_by().is_some()), (87 * MIB, true));
    assert_eq!(
        first.notes,
        [
            "2 blocks of 8 MiB lived before the trace began, and come first, by address.",
            "Calls of `torch.cuda.empty_cache` that were seen by what went back: 1.",
            "Entries that are no allocations, and are ignored: 1.",
            "When memory lacked at step 13, 84 MiB were mapped and 3 MiB were free on the card: 87 MiB are usable, \
             unless --card says otherwise.",
        ]
    );

    let recorded = second.recorded.as_ref().unwrap();
    let mapped: Vec<_> = recorded.mapped_bytes.iter().map(|bytes| bytes / MIB).collect();
    assert_eq!(second.steps, [Step::Alloc(0), Step::Alloc(1), Step::Free(1), Step::EmptyCache]);
    assert_eq!(mapped, [2, 6, 6, 2]);
}

/// The names of a trace's phases, and their first steps.
fn phases(trace: &Trace) -> Vec<(&str, usize)> {
    trace.phases.iter().map(|phase| (&*phase.name, phase.from)).collect()
}

#[test]
fn phases_begin_with_the_first_entry_at_their_time() {
    let traces = fixture("load-4.pickle").unwrap();
    // What lived before is of the first one. The others begin when this device has no entries any more.
    assert_eq!(phases(&traces[0]), [("load", 0), ("profile", 6), ("cache", 14), ("capture", 14)]);
    assert_eq!(traces[0].phase_at(5), Some("load"));
    assert_eq!(phases(&traces[1]), [("load", 0), ("profile", 0), ("cache", 1), ("capture", 4)]);
}

/// Of one device, with an entry at each time.
fn with_phases(times: &[u64], marks: &str) -> Result<Trace, String> {
    let entry = |(at, time): (usize, &u64)| {
        let time = if *time == 0 { String::new() } else { format!(r#","time_us":{time}"#) };
        format!(r#"{{"action":"alloc","addr":{},"size":5{time}}}"#, (at + 1) * 16)
    };
    let entries: Vec<_> = times.iter().enumerate().map(entry).collect();
    let live =
        r#"[{"address": 4096, "total_size": 8, "blocks": [{"size": 8, "state": "active_allocated"}]}]"#;
    let text =
        format!(r#"{{"segments": {live}, "device_traces": [[{}]], "poorwill": {marks}}}"#, entries.join(","));
    let traces = read("a.json", text.as_bytes()).map_err(|error| error.to_string())?;
    let [trace] = traces.try_into().unwrap();
    Ok(trace)
}

#[test]
fn phases_go_with_what_a_recorder_kept() {
    let marks = r#"{"phases": [{"name": "a", "time_us": 30}, {"name": "b", "time_us": 50}]}"#;
    for (times, expected) in [
        (&[30, 49, 50, 60][..], [("a", 0), ("b", 3)]),
        // The history was on before.
        (&[20, 29, 31, 60], [("a", 3), ("b", 4)]),
        // Entries were dropped, a part of the first phase or all of it.
        (&[45, 60], [("a", 0), ("b", 2)]),
        (&[55, 60], [("a", 0), ("b", 1)]),
        // A phase has no entries.
        (&[30, 40], [("a", 0), ("b", 3)]),
        (&[], [("a", 0), ("b", 1)]),
        // Some have no time.
        (&[0, 30, 0, 60], [("a", 2), ("b", 4)]),
    ] {
        let trace = with_phases(times, marks).unwrap();
        assert_eq!(phases(&trace), expected, "{times:?}");
        assert_eq!(trace.notes.len(), 1, "{:?}", trace.notes);
    }
    let trace = with_phases(&[0, 0], marks).unwrap();
    assert!(trace.phases.is_empty());
    assert_eq!(trace.notes[0], "Phases are left out: no entry has its time.");
    for marks in ["null", "{}", r#"{"phases": null}"#, r#"{"phases": []}"#, r#"{"other": 3}"#] {
        let trace = with_phases(&[30, 0], marks).unwrap();
        assert!(trace.phases.is_empty() && trace.notes.len() == 1, "{marks}: {:?}", trace.notes);
    }
}

#[test]
fn phases_stay_in_their_order_if_the_clock_was_set_back() {
    let mark = |name, time| format!(r#"{{"name": "{name}", "time_us": {time}}}"#);
    let marks = format!(r#"{{"phases": [{}, {}, {}]}}"#, mark("a", 10), mark("b", 40), mark("c", 20));
    let trace = with_phases(&[10, 20, 30, 40, 50], &marks).unwrap();
    assert_eq!(phases(&trace), [("a", 0), ("b", 4), ("c", 4)]);
    assert!(trace.notes[0].contains("clock was set back"), "{:?}", trace.notes);
}

#[test]
fn phases_that_cannot_be_have_their_place() {
    for (marks, text) in [
        ("3", "key `poorwill`: this is no dict; "),
        (r#"{"phases": {}}"#, "key `poorwill`: this is no list; "),
        (r#"{"phases": [3]}"#, "phase 0: this is no dict; "),
        (r#"{"phases": [{"name": "a", "time_us": 1}, {"time_us": 1}]}"#, "phase 1: `name` is no text; "),
        (r#"{"phases": [{"name": ["a"], "time_us": 1}]}"#, "phase 0: `name` is no text; "),
        (r#"{"phases": [{"name": "a"}]}"#, "phase 0: `time_us` is missing; "),
        (r#"{"phases": [{"name": "a", "time_us": -1}]}"#, "phase 0: `time_us` is below 0; "),
        (r#"{"phases": [{"name": "a", "time_us": 1.5}]}"#, "phase 0: `time_us` is no whole number; "),
    ] {
        let error = with_phases(&[10], marks).unwrap_err();
        assert!(error.starts_with(&format!("a.json, {text}")), "{marks}: {error}");
    }
}

#[test]
fn the_card_is_the_recorders() {
    let cards = |text: &str| with_phases(&[30], &format!(r#"{{"cards": {text}}}"#));
    let two = r#"[{"device": 3, "total_bytes": 9, "taken_bytes": 9},
        {"device": 0, "total_bytes": 80, "taken_bytes": 7, "other": 1}]"#;
    let card = cards(two).unwrap().card.unwrap();
    assert_eq!((card.total_bytes, card.taken_bytes, card.budget_bytes), (80, 7, None));
    for none in ["null", "[]", r#"[{"device": 1, "total_bytes": 9, "taken_bytes": 0}]"#] {
        assert_eq!(cards(none).unwrap().card, None);
    }
    for (wrong, text) in [
        (r#"[{"device": 0, "taken_bytes": 0}]"#, "`total_bytes` is missing; "),
        (r#"[{"device": 0, "total_bytes": 1, "taken_bytes": -1}]"#, "`taken_bytes` is below 0; "),
        ("[4]", "this is no dict; "),
    ] {
        let error = cards(wrong).unwrap_err();
        assert!(error.starts_with(&format!("a.json, key `poorwill`: {text}")), "{wrong}: {error}");
    }
}

#[test]
fn frames_are_lines_of_python_where_there_are_some() {
    let traces = fixture("load-4.pickle").unwrap();
    let of = |block: usize| &traces[0].stacks[usize::try_from(traces[0].blocks[block].stack).unwrap()][..];
    assert_eq!(of(0), ["vllm/loader.py:120 load_weights", "work/train.py:7 <module>"]);
    assert!(of(1).is_empty(), "it was allocated before the trace");
    assert_eq!(of(3)[0], "vllm/quant.py:33 swizzle");
    assert_eq!(of(6), ["c10::cuda::CUDACachingAllocator::malloc(unsigned long)"]);
    assert_eq!(traces[0].stacks.len(), 4, "equal ones are one");
}

/// Poorwill's pools give back what PyTorch caches. Of another allocator, the user would not have asked that.
#[test]
fn what_poorwills_pools_give_back_empties_no_other_cache() {
    let of = |folder: &str| {
        let frames = |file: &str| format!(r#"[{{"filename":"{file}","line":3,"name":"empty_cache"}}]"#);
        let entry = |action: &str, frames: &str| {
            format!(r#"{{"action":"{action}","addr":4096,"size":2097152,"stream":0,"frames":{frames}}}"#)
        };
        let load = format!(
            r#"[{{"filename":"/x/{folder}/_watch.py","line":9,"name":"watch"}},{}"#,
            &frames("/x/model.py")[1..]
        );
        let entries = [
            entry("segment_alloc", "[]"),
            entry("alloc", &load),
            entry("free_requested", "[]"),
            entry("free_completed", "[]"),
            entry("segment_free", &frames(&format!("/x/{folder}/_gpu.py"))),
        ];
        let text = format!(r#"{{"segments":[],"device_traces":[[{}]]}}"#, entries.join(","));
        let [trace] = read("a.json", text.as_bytes()).unwrap().try_into().unwrap();
        trace
    };
    assert_eq!(of("user").steps, [Step::Alloc(0), Step::Free(0), Step::EmptyCache]);
    assert_eq!(of("poorwill/torch").steps, [Step::Alloc(0), Step::Free(0)]);
    // Nor are they the ones who ask for blocks.
    let asked = |trace: &Trace| trace.stacks[1].len();
    assert_eq!([asked(&of("user")), asked(&of("poorwill/torch"))], [2, 1]);
}

#[test]
fn segments_alone_are_what_lives() {
    let traces = fixture("segments.pickle").unwrap();
    let [trace] = &traces[..] else { panic!("{traces:?}") };
    let sizes: Vec<_> = trace.blocks.iter().map(|block| block.bytes).collect();
    assert_eq!(sizes, [4 * MIB, 3 * MIB, 60 * MIB, MIB, 1024]);
    assert_eq!(trace.recorded.as_ref().unwrap().mapped_bytes, [84 * MIB; 5]);
    assert_eq!(trace.steps.len(), 5);
}

#[test]
fn code_is_refused_and_not_run() {
    for (name, opcode) in
        [("code-0.pickle", "GLOBAL"), ("code-2.pickle", "GLOBAL"), ("code-4.pickle", "STACK_GLOBAL")]
    {
        let error = fixture(name).unwrap_err();
        let Location::Offset(offset) = error.place() else { panic!("{error}") };
        assert_eq!(
            error.to_string(),
            format!(
                "{name}, offset {offset}: the opcode {opcode} names code, and nothing was run; write the file with \
                 `torch.cuda.memory._dump_snapshot`"
            )
        );
    }
    assert!(!env::current_dir().unwrap().join("poorwill-was-here").exists());
}

#[test]
fn the_load_in_the_documents_is_a_trace() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/images/churn-moe.csv");
    let traces = read("churn-moe.csv", fs::read(path).unwrap()).unwrap();
    let peak = traces[0].live_bytes().into_iter().max();
    assert_eq!((traces[0].steps.len(), peak), (672, Some(24_251 << 20)));
    assert_eq!(traces[0].recorded.as_ref().unwrap().mapped_bytes.len(), 672);
}

/// Entries of device 0, without segments.
fn snapshot(entries: &str) -> Result<Vec<Trace>, String> {
    let text = format!("{{\"device_traces\": [[{entries}]]}}");
    read("a.json", text.as_bytes()).map_err(|error| error.to_string())
}

fn alloc(address: u64) -> String {
    format!(r#"{{"action":"alloc","addr":{address},"size":5,"stream":0}}"#)
}

fn free(address: u64) -> String {
    format!(r#"{{"action":"free_completed","addr":{address},"size":5}}"#)
}

/// A program may catch the error and go on with less, and one that dies may print a line.
#[test]
fn only_the_refusal_that_ended_a_load_is_a_step() {
    let alloc = |address: u64, size: u64| format!(r#"{{"action":"alloc","addr":{address},"size":{size}}}"#);
    let refused = r#"{"action":"oom","size":40,"device_free":10}"#.to_owned();
    let of = |after: &[String]| {
        let entries = [&[alloc(16, 90), refused.clone()], after].concat().join(",");
        let file = format!(
            r#"{{"segments":[{{"address":16,"total_size":100,"blocks":[]}}],"device_traces":[[{entries}]]}}"#
        );
        let [trace] = read("a.json", file.as_bytes()).unwrap().try_into().unwrap();
        (trace.card.unwrap().usable_bytes(), trace.ended_by().map(|refusal| refusal.step), trace)
    };
    let (usable, ended, trace) = of(&[alloc(32, 20), alloc(48, 20)]);
    assert_eq!((usable, ended, trace.live_bytes()), (110, None, vec![90, 110, 130]));
    assert_eq!(trace.notes[0], "Memory lacked at step 2, and the program went on.");
    assert!(
        trace.notes[1].starts_with("When memory lacked at step 2, 100 B were mapped"),
        "{:?}",
        trace.notes
    );
    let (usable, ended, trace) = of(&[refused.clone(), alloc(32, 40)]);
    assert_eq!((usable, ended, trace.live_bytes()), (110, None, vec![90, 130]));
    assert!(
        trace.notes[0].starts_with("Memory lacked 2 times, the last time at step 2, "),
        "{:?}",
        trace.notes
    );
    let (usable, ended, trace) = of(&[alloc(32, 1)]);
    assert_eq!((usable, ended, trace.live_bytes()), (110, Some(1), vec![90, 130, 90, 91]));
    assert_eq!(trace.notes.len(), 1, "{:?}", trace.notes);
}

#[test]
fn contradictions_have_their_device_and_entry() {
    for (entries, text) in [
        (
            [alloc(16), alloc(16)].join(","),
            "a.json, device 0, entry 1: 0x10 is allocated, and was not freed; ",
        ),
        (
            [alloc(16), free(16), free(16)].join(","),
            "a.json, device 0, entry 2: 0x10 is freed, and is not live; ",
        ),
        (r#"{"action":"alloc","addr":1}"#.to_owned(), "a.json, device 0, entry 0: `size` is missing; "),
        (r#"{"action":"alloc","size":1}"#.to_owned(), "a.json, device 0, entry 0: `addr` is missing; "),
        (
            r#"{"action":"alloc","addr":1,"size":-5}"#.to_owned(),
            "a.json, device 0, entry 0: `size` is below 0; ",
        ),
        (
            r#"{"action":"alloc","addr":1,"size":0}"#.to_owned(),
            "a.json, device 0, entry 0: a block of no bytes is allocated; ",
        ),
        (
            r#"{"action":"alloc","addr":"x","size":0}"#.to_owned(),
            "a.json, device 0, entry 0: `addr` is no whole number; ",
        ),
        (r#"{"addr":1}"#.to_owned(), "a.json, device 0, entry 0: `action` is no text; "),
        ("7".to_owned(), "a.json, device 0, entry 0: this is no dict; "),
        (
            r#"{"action":"alloc","addr":1,"size":1,"frames":3}"#.to_owned(),
            "a.json, device 0, entry 0: `frames` is no list; ",
        ),
        (String::new(), "a.json, key `device_traces`: nothing was recorded; "),
    ] {
        let error = snapshot(&entries).unwrap_err();
        assert!(error.starts_with(text), "{entries}: {error}");
    }
    for (file, text) in [
        ("{}", "key `segments`: this is no snapshot, it has neither `segments` nor `device_traces`; "),
        ("{\"segments\": 3}", "key `segments`: this is no list; "),
        ("[3]", "segment 0: this is no dict; "),
        ("[{\"address\": 16}]", "segment 0: `total_size` is missing; "),
        (
            r#"[{"address": 16, "total_size": 8, "blocks": [{"size": 9, "state": "inactive"}]}]"#,
            "segment 0: its block at 0x10 is outside of it; ",
        ),
        (
            r#"[{"address": 16, "total_size": 8, "blocks": [{"size": 8, "state": "lost"}]}]"#,
            "segment 0: its block at 0x10 has no state that is known; ",
        ),
        (
            r#"{"segments": [{"address": 16, "total_size": 8,
                "blocks": [{"size": 8, "state": "active_allocated"}]}],
                "device_traces": [[{"action": "free_completed", "addr": 16, "size": 8}]]}"#,
            "device 0, entry 0: 0x10 is freed, and `segments` has it live; ",
        ),
    ] {
        let error = read("a.json", file.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("a.json, {text}")), "{file}: {error}");
    }
}

#[test]
fn what_a_file_shares_is_not_looked_at_again_and_again() {
    // A thousand references to one trace, and to one entry.
    for [open, shared, reference] in [
        ["X\x0d\0\0\0device_traces](", "](K\x01K\x02K\x03eq\x01", "h\x01"],
        ["X\x0d\0\0\0device_traces](](", "}(X\x06\0\0\0actionX\x05\0\0\0othereuq\x01", "h\x01"],
    ] {
        let bytes = format!("}}q\0({open}{shared}{}", reference.repeat(1000));
        assert!(read("a", bytes.as_bytes()).is_err());
    }
    let entry = "}(X\x06\0\0\0actionX\x08\0\0\0snapshotuq\x01";
    let many = format!("}}q\0(X\x0d\0\0\0device_traces](]({entry}{}eeu.", "h\x01".repeat(5000));
    let error = read("a", many.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("the same values come again and again"), "{error}");
    // Each phase has the same long name.
    let name = format!("X\x40\x42\x0f\0{}q\x01", "n".repeat(1_000_000));
    let phases = "}(X\x04\0\0\0nameh\x01X\x07\0\0\0time_usK\x01u".repeat(100);
    let marks = format!("X\x08\0\0\0poorwill}}(X\x01\0\0\0n{name}X\x06\0\0\0phases]({phases}eu");
    let many = format!("}}(X\x0d\0\0\0device_traces](](}}X\x06\0\0\0actionX\x05\0\0\0othersee{marks}u.");
    let error = read("a", many.as_bytes()).unwrap_err().to_string();
    assert!(error.starts_with("a, key `poorwill`: there are too many phases; "), "{error}");
}

/// Converters in Python share one pool tuple among all segments, and PyTorch's own file has one each.
#[test]
fn segments_may_share_the_tuple_of_their_pool() {
    let segment = |number: u32, pool: &[u8]| {
        let key = |name: &str| {
            [b"X", &u32::try_from(name.len()).unwrap().to_le_bytes()[..], name.as_bytes()].concat()
        };
        let int = |value: u32| [b"J", &value.to_le_bytes()[..]].concat();
        let parts = [key("address"), int(number << 12), key("total_size"), int(4096), key("segment_pool_id")];
        [b"}(", &parts.concat()[..], pool, b"u"].concat()
    };
    let first = segment(1, b"K\x00K\x07\x86q\x01");
    let others: Vec<u8> = (2..2000).flat_map(|number| segment(number, b"h\x01")).collect();
    let begin = b"\x80\x02}(X\x08\0\0\0segments](";
    let block = b"}(X\x06\0\0\0actionX\x05\0\0\0allocX\x04\0\0\0addrJ\0\x10\0\0X\x04\0\0\0sizeK\x09u";
    let traces = [&b"eX\x0d\0\0\0device_traces](]"[..], block, b"aeu."].concat();
    let [trace] = read("a", [&begin[..], &first, &others, &traces].concat()).unwrap().try_into().unwrap();
    assert_eq!(trace.recorded.unwrap().mapped_bytes, [1999 * 4096]);
    assert_eq!(trace.blocks[0].pool, 1);
}

/// As `stacks="all"` records it: a backward pass runs on a thread without Python.
#[test]
fn a_backward_pass_is_held_by_its_operations() {
    let frames = |own: &[&str]| {
        let recorder = ["torch::unwind::unwind()", "torch::CapturedTraceback::gather(bool, bool, bool)"];
        let allocator = [
            "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(signed char)",
            "at::detail::empty_cuda(c10::ArrayRef<long>, c10::TensorOptions const&)",
        ];
        let all = recorder.iter().chain(&allocator).chain(own);
        let all: Vec<_> =
            all.map(|name| format!(r#"{{"filename":"??","line":0,"name":"{name}"}}"#)).collect();
        all.join(",")
    };
    let apply = |node: &str| format!("torch::autograd::generated::{node}::apply(std::vector<at::Tensor>&&)");
    let deep = vec!["at::_ops::mul::redispatch(c10::DispatchKeySet)"; 40];
    let (bmm, mul) = (apply("BmmBackward0"), apply("MulBackward0"));
    let stacks = [
        frames(&["at::_ops::bmm::call(at::Tensor const&)", &bmm, "clone3"]),
        frames(&["at::_ops::transpose::call(at::Tensor const&)", &bmm, "clone3"]),
        frames(&[&deep[..], &[&mul]].concat()),
    ];
    let alloc = |(number, frames): (usize, &String)| {
        format!(r#"{{"action":"alloc","addr":{},"size":{},"frames":[{frames}]}}"#, number + 1, 100 - number)
    };
    let entries: Vec<String> = stacks.iter().enumerate().map(alloc).collect();
    let [trace] = snapshot(&entries.join(",")).unwrap().try_into().unwrap();
    let held: Vec<_> =
        holders(&trace, 3).into_iter().map(|held| (held.shown, held.bytes, held.blocks)).collect();
    let shown = |text: &str| vec![text.to_owned()];
    assert_eq!(held, [(shown("BmmBackward0::apply"), 199, 2), (shown("MulBackward0::apply"), 98, 1)]);
}

#[test]
fn rows_of_who_holds_memory_differ_in_what_is_shown() {
    let line = |file: &str, line: u32| format!(r#"{{"filename":"{file}","line":{line},"name":"f"}}"#);
    let stack = |caller: u32, einsum: u32| {
        let einsum = [line("/x/einops/einops.py", einsum), line("/x/torch/functional.py", 9)];
        let own = [7, 7, 8].map(|at| line("w/net.py", at));
        [&einsum[..], &own, &[line("w/main.py", caller)]].concat().join(",")
    };
    let alloc = |(number, frames): (usize, String)| {
        format!(r#"{{"action":"alloc","addr":{},"size":{},"frames":[{frames}]}}"#, number + 1, 100 - number)
    };
    let entries = [stack(1, 3), stack(2, 3), stack(2, 4)].into_iter().enumerate().map(alloc);
    let [trace] = snapshot(&entries.collect::<Vec<_>>().join(",")).unwrap().try_into().unwrap();
    let held: Vec<_> =
        holders(&trace, 3).into_iter().map(|held| (held.shown.join(" < "), held.bytes)).collect();
    let shown = |caller: u32| format!("w/net.py:7 f < w/net.py:7 f < w/net.py:8 f < w/main.py:{caller} f");
    assert_eq!(held, [(shown(2), 197), (shown(1), 100)]);
}

#[test]
fn optional_keys_may_be_missing() {
    let traces = snapshot(&[free(32), alloc(16), free(16)].join(",")).unwrap();
    assert_eq!(traces[0].live_bytes(), [5, 0, 5, 0]);
    let recorded = traces[0].recorded.as_ref().unwrap();
    assert!(recorded.mapped_bytes.is_empty() && recorded.settings.is_empty(), "{recorded:?}");
}

#[test]
fn frees_count_when_asked_for_if_none_is_completed() {
    let requested = free(16).replace("completed", "requested");
    let traces = snapshot(&[alloc(16), requested.clone(), alloc(16)].join(",")).unwrap();
    assert_eq!(traces[0].live_bytes(), [5, 0, 5]);
    assert!(traces[0].notes[0].contains("none was completed"), "{:?}", traces[0].notes);
    let traces = snapshot(&[alloc(16), requested, free(16)].join(",")).unwrap();
    assert_eq!(traces[0].live_bytes(), [5, 0]);
}

#[test]
fn mapped_bytes_that_cannot_be_are_left_out() {
    let file = r#"{"segments": [], "device_traces": [[
        {"action": "segment_alloc", "addr": 16, "size": 8}, {"action": "alloc", "addr": 16, "size": 8}]]}"#;
    let traces = read("a.json", file.as_bytes()).unwrap();
    assert!(traces[0].recorded.as_ref().unwrap().mapped_bytes.is_empty());
    assert_eq!(
        traces[0].notes,
        [
            "What was mapped is not known: device 0, entry 0 has less than nothing, counted back from `segments`."
        ]
    );
}

#[test]
fn a_pool_has_an_address_only_since_its_segment_is_there() {
    let file = r#"{"segments": [{"address": 16, "total_size": 8, "segment_pool_id": [0, 3],
            "blocks": [{"size": 8, "state": "active_allocated"}]}],
        "device_traces": [[
            {"action": "alloc", "addr": 16, "size": 8},
            {"action": "free_completed", "addr": 16, "size": 8},
            {"action": "segment_free", "addr": 16, "size": 8},
            {"action": "segment_alloc", "addr": 16, "size": 8},
            {"action": "alloc", "addr": 16, "size": 8},
            {"action": "snapshot", "addr": 0, "size": 0}]]}"#;
    let traces = read("a.json", file.as_bytes()).unwrap();
    assert_eq!(traces[0].blocks.iter().map(|block| block.pool).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(traces[0].steps, [Step::Alloc(0), Step::Free(0), Step::Alloc(1)]);
}
