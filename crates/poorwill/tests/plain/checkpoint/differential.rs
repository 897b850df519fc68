//! Our parser against the reference implementation, the `safetensors` crate.
//!
//! The reference accepts all that ours accepts, with the same tensors. A short list names what only the
//! reference accepts.

use std::collections::BTreeSet;

use fastrand::Rng;
use poorwill::checkpoint::{Checkpoint, CheckpointError, HeaderError};
use poorwill_testkit::effort::Effort;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::files::{Folder, entry, file, open, read};

/// Feeds bytes to both parsers.
struct Judge {
    folder: Folder,
    accepted: u32,
    both_refused: u32,
    /// Why ours refused what the reference accepts.
    deliberate: BTreeSet<&'static str>,
}

impl Judge {
    fn new() -> Self {
        Self { folder: Folder::new(), accepted: 0, both_refused: 0, deliberate: BTreeSet::new() }
    }

    fn compare(&mut self, bytes: &[u8]) {
        let path = self.folder.write("x.safetensors", bytes);
        match (open(&path), SafeTensors::deserialize(bytes)) {
            (Ok(ours), Ok(theirs)) => {
                assert_same(&ours, &theirs);
                self.accepted += 1;
            }
            (Err(error), Ok(_)) => {
                self.deliberate.insert(deliberate_difference(&error));
            }
            (Err(_), Err(_)) => self.both_refused += 1,
            (Ok(_), Err(error)) => panic!("only ours accepts: {error}\n{}", bytes.escape_ascii()),
        }
    }
}

pub(crate) fn assert_same(ours: &Checkpoint, theirs: &SafeTensors<'_>) {
    assert_eq!(ours.tensors().len(), theirs.len());
    for tensor in ours.tensors() {
        let view = theirs.tensor(&tensor.name).unwrap();
        let shape: Vec<u64> = view.shape().iter().map(|dim| *dim as u64).collect();
        assert_eq!((tensor.dtype.to_string(), &tensor.shape), (view.dtype().to_string(), &shape));
        assert_eq!(read(ours, tensor), view.data());
    }
}

/// Everything that the reference accepts and we refuse.
fn deliberate_difference(error: &CheckpointError) -> &'static str {
    let CheckpointError::Header { error, .. } = error else { panic!("{error:?}") };
    match error {
        HeaderError::DuplicateKey { .. } => "key twice",
        HeaderError::EntryMalformed { reason, .. } if reason.contains("unknown field") => "unknown field",
        HeaderError::Malformed { reason } if reason.contains("__metadata__: invalid type: null") => {
            "null metadata"
        }
        HeaderError::Malformed { reason } if reason.contains("sequence, expected an object with dtype") => {
            "entry as a list"
        }
        HeaderError::Malformed { reason } if reason.contains("map, expected a string") => {
            "dtype as an object"
        }
        other => panic!("not a deliberate difference: {other:?}"),
    }
}

/// Repeatable randomness.
struct Dice(Rng);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(Rng::with_seed(seed))
    }

    fn roll(&mut self, sides: u64) -> u64 {
        self.0.u64(..sides)
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0.usize(..bound.max(1))
    }

    fn one_in(&mut self, chances: u64) -> bool {
        self.roll(chances) == 0
    }

    fn pick<'a, T: ?Sized>(&mut self, choices: &[&'a T]) -> &'a T {
        choices[self.below(choices.len())]
    }
}

fn small_header() -> String {
    format!(
        r#"{{"__metadata__":{{"format":"pt"}},{},{},{},{}}}"#,
        entry("a", "F32", &[], 0, 4),
        entry("b", "BF16", &[2, 1], 4, 8),
        entry("c", "U8", &[0], 8, 8),
        entry("d", "F4", &[2], 8, 9),
    )
}

const SMALL_PAYLOAD: [u8; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];

#[test]
fn truncation_at_every_length_is_refused() {
    let whole = file(&small_header(), &SMALL_PAYLOAD);
    let mut judge = Judge::new();
    for bytes in 0..whole.len() {
        judge.compare(&whole[..bytes]);
    }
    assert_eq!((judge.accepted, judge.deliberate.len()), (0, 0));
    let mut longer = whole.clone();
    longer.push(0);
    judge.compare(&longer);
    assert_eq!(judge.accepted, 0);
    judge.compare(&whole);
    assert_eq!(judge.accepted, 1);
}

#[test]
fn every_flipped_bit_is_judged_as_by_the_reference() {
    let whole = file(&small_header(), &SMALL_PAYLOAD);
    let mut judge = Judge::new();
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        judge.compare(&flipped);
    }
    assert!(judge.accepted > 100 && judge.both_refused > 1000);
}

#[test]
fn random_edits_are_judged_as_by_the_reference() {
    const SNIPPETS: [&str; 34] = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        "\\",
        "0",
        "1",
        "-1",
        "2.0",
        "1e400",
        "-0",
        "4",
        "8",
        "9",
        "18446744073709551615",
        "null",
        "true",
        "\"a\"",
        "\"b\"",
        "\"F32\"",
        "\"U8\"",
        "\"dtype\"",
        "\"shape\"",
        "\"data_offsets\"",
        "\"__metadata__\"",
        "\"\\u0061\"",
        "\"\\ud800\"",
        " \n\t",
        "[[[[]]]]",
        "{\"F32\":null}",
        "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[8,8]},",
    ];
    let mut dice = Dice::new(1);
    let mut judge = Judge::new();
    let cases = Effort::of_this_run().cases(8_000);
    for _ in 0..cases {
        let mut header = small_header();
        for _ in 0..=dice.below(3) {
            let (from, other) = (dice.below(header.len() + 1), dice.below(header.len() + 1));
            let to = if dice.one_in(2) { from } else { header.len().min(from + 1 + other % 6) };
            header.replace_range(from..to, dice.pick(&SNIPPETS));
        }
        judge.compare(&file(&header, &SMALL_PAYLOAD));
    }
    assert!(
        judge.accepted > cases / 160 && judge.both_refused > cases / 8,
        "{} {}",
        judge.accepted,
        judge.both_refused
    );
}

/// A header that is right, or wrong at one or two points, and the size of its payload.
fn almost_right(dice: &mut Dice) -> (String, usize) {
    const DTYPES: [(&str, u64); 6] =
        [("U8", 8), ("BF16", 16), ("F32", 32), ("F64", 64), ("F4", 4), ("F6_E2M3", 6)];
    let mut entries = Vec::new();
    let mut end = 0usize;
    let mistakes = if dice.one_in(2) { 1_000_000 } else { 24 };
    for number in 0..dice.below(6) {
        let (dtype, bits) = DTYPES[dice.below(DTYPES.len())];
        let mut shape: Vec<u64> = (0..dice.below(4)).map(|_| dice.roll(4)).collect();
        if bits < 8 {
            shape.push(4);
        }
        let begin = end;
        end += usize::try_from(shape.iter().product::<u64>() * bits / 8).unwrap();
        entries.push(blunder(dice, mistakes, number, dtype, shape, (begin, end)));
    }
    match dice.below(8) {
        0 => entries.push(r#""__metadata__":{"k":"v"}"#.to_owned()),
        1 if dice.one_in(2) => entries.push(r#""__metadata__":null"#.to_owned()),
        2 if dice.one_in(2) => entries.push(r#""__metadata__":{"k":"v","k":"w"}"#.to_owned()),
        _ => {}
    }
    // The order in a header is free.
    let turn = dice.below(entries.len());
    entries.rotate_left(turn);
    (format!("{{{}}}", entries.join(", ")), end + usize::from(dice.one_in(mistakes)))
}

/// An entry, with a mistake now and then.
fn blunder(
    dice: &mut Dice,
    mistakes: u64,
    number: usize,
    dtype: &str,
    mut shape: Vec<u64>,
    (begin, end): (usize, usize),
) -> String {
    let name = if dice.one_in(mistakes) { "t0".to_owned() } else { format!("t{number}") };
    if dice.one_in(mistakes) {
        shape.push(dice.roll(3));
    }
    if dice.one_in(mistakes * 2) {
        shape.extend([1 << 33, 1 << 33]);
    }
    let begin = if dice.one_in(mistakes) { begin + 1 } else { begin };
    let end = if dice.one_in(mistakes) { end.saturating_sub(1) } else { end };
    if dice.one_in(mistakes) {
        return format!(r#""{name}":["{dtype}",{shape:?},[{begin},{end}]]"#);
    }
    if dice.one_in(mistakes) {
        return format!(
            r#""{name}":{{"dtype":{{"{dtype}":null}},"shape":{shape:?},"data_offsets":[{begin},{end}]}}"#
        );
    }
    let extra = if dice.one_in(mistakes) { r#","extra":[{}]"# } else { "" };
    format!(r#""{name}":{{"data_offsets":[{begin},{end}],"dtype":"{dtype}","shape":{shape:?}{extra}}}"#)
}

#[test]
fn headers_that_are_almost_right_are_judged_as_by_the_reference() {
    let mut dice = Dice::new(2);
    let mut judge = Judge::new();
    let payload: Vec<u8> = (0..=255).cycle().take(20_000).collect();
    let cases = Effort::of_this_run().cases(8_000);
    for _ in 0..cases {
        let (header, payload_bytes) = almost_right(&mut dice);
        judge.compare(&file(&header, &payload[..payload_bytes]));
    }
    assert!(
        judge.accepted > cases / 4 && judge.both_refused > cases / 16,
        "{} {}",
        judge.accepted,
        judge.both_refused
    );
    let all = ["dtype as an object", "entry as a list", "key twice", "null metadata", "unknown field"];
    assert_eq!(judge.deliberate, BTreeSet::from(all));
}

#[test]
fn files_of_the_reference_are_read() {
    let data = vec![0x5a; 8 * 5 * 8];
    let tensors = [
        Dtype::BOOL,
        Dtype::F4,
        Dtype::F6_E2M3,
        Dtype::F8_E4M3,
        Dtype::F8_E8M0,
        Dtype::I16,
        Dtype::BF16,
        Dtype::F32,
        Dtype::C64,
        Dtype::U64,
    ]
    .map(|dtype| {
        let bytes = 8 * 5 * dtype.bitsize() / 8;
        (dtype.to_string(), TensorView::new(dtype, vec![8, 5], &data[..bytes]).unwrap())
    });
    let bytes = safetensors::serialize(tensors, None).unwrap();
    let mut judge = Judge::new();
    judge.compare(&bytes);
    assert_eq!(judge.accepted, 1);
}
