//! Headers that are torn, malformed, contradictory or hostile, each with an error of its own.

use poorwill::checkpoint::HeaderError;

use super::files::{Folder, entry, file, header_error_of, open};

#[test]
fn headers_that_the_file_cannot_hold() {
    for file_bytes in 0..8 {
        assert_eq!(
            header_error_of(&vec![0; file_bytes]),
            HeaderError::FileTooShort { file_bytes: file_bytes as u64 }
        );
    }
    let mut claim = 100_000_000u64.to_le_bytes().to_vec();
    claim.push(b'{');
    assert_eq!(
        header_error_of(&claim),
        HeaderError::HeaderBeyondFile { header_bytes: 100_000_000, file_bytes: 9 }
    );
    assert_eq!(
        header_error_of(b"\x89PNG\r\n\x1a\n and so on"),
        HeaderError::HeaderTooLarge { header_bytes: 0x0a1a_0a0d_474e_5089, limit_bytes: 100_000_000 }
    );
    assert_eq!(
        header_error_of(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"),
        HeaderError::GitLfsPointer
    );
}

#[test]
fn headers_that_are_not_what_they_should_be() {
    let malformed =
        |header: &str| matches!(header_error_of(&file(header, b"")), HeaderError::Malformed { .. });
    for header in
        ["", " ", "null", "[]", "{", "{}{}", "{\"a\":1}", "{\"a\":[]}", "{'a':{}}", "{\"__metadata__\":[]}"]
    {
        assert!(malformed(header), "{header:?}");
    }
    assert!(malformed(&"[".repeat(1 << 20)));
    assert!(malformed(&"{\"a\":".repeat(1 << 18)));
    assert_eq!(header_error_of(b"\x02\0\0\0\0\0\0\0{\xff"), HeaderError::NotUtf8 { position: 9 });
}

#[test]
fn each_fault_has_its_own_error() {
    let one = |fields: &str| header_error_of(&file(&format!(r#"{{"t":{{{fields}}}}}"#), &[0; 4]));
    let shape = |shape: &str| one(&format!(r#""dtype":"F32","shape":{shape},"data_offsets":[0,4]"#));
    let offsets = |offsets: &str| one(&format!(r#""dtype":"F32","shape":[1],"data_offsets":{offsets}"#));
    let bad_dimension = |dimension, value: &str| HeaderError::BadDimension {
        tensor: "t".to_owned(),
        dimension,
        value: value.to_owned(),
    };
    assert_eq!(shape("[-1]"), bad_dimension(0, "-1"));
    assert_eq!(shape("[1, 0.5]"), bad_dimension(1, "0.5"));
    assert_eq!(shape("[1e3]"), bad_dimension(0, "1000.0"));
    assert_eq!(shape("[18446744073709551616]"), bad_dimension(0, "1.8446744073709552e19"));
    assert!(matches!(shape("[4294967296, 4294967296]"), HeaderError::SizeOverflow { .. }));
    assert!(matches!(shape("[2]"), HeaderError::SizeMismatch { shape_bytes: 8, offset_bytes: 4, .. }));
    assert!(matches!(offsets("[0, -4]"), HeaderError::BadOffset { value, .. } if value == "-4"));
    assert!(matches!(offsets("[0]"), HeaderError::EntryMalformed { .. }));
    assert!(matches!(offsets("[0, 4, 8]"), HeaderError::EntryMalformed { .. }));
    assert!(matches!(offsets("[4, 0]"), HeaderError::OffsetsReversed { begin: 4, end: 0, .. }));
    assert!(matches!(offsets("[1, 5]"), HeaderError::BeyondFile { .. }));
    assert!(matches!(
        one(r#""dtype":"F33","shape":[1],"data_offsets":[0,4]"#),
        HeaderError::UnknownDtype { dtype, .. } if dtype == "F33"
    ));
    assert!(matches!(
        one(r#""dtype":"F4","shape":[7],"data_offsets":[0,4]"#),
        HeaderError::PartialByte { bits: 28, .. }
    ));
    assert!(matches!(
        one(r#""dtype":"F32","shape":[1],"data_offsets":[0,4],"strides":[1]"#),
        HeaderError::EntryMalformed { reason, .. } if reason.contains("strides")
    ));

    let two = |begin, end| {
        let header = format!("{{{},{}}}", entry("a", "U8", &[4], 0, 4), entry("b", "U8", &[2], begin, end));
        header_error_of(&file(&header, &[0; 8]))
    };
    assert!(matches!(two(3, 5), HeaderError::Overlap { first, second, .. } if first == "a" && second == "b"));
    assert!(matches!(two(6, 8), HeaderError::Hole { tensor, .. } if tensor == "b"));
    assert!(matches!(two(4, 6), HeaderError::TrailingBytes { .. }));
    let repeated = format!("{{{0},{0}}}", entry("a", "U8", &[4], 0, 4));
    assert_eq!(header_error_of(&file(&repeated, &[0; 4])), HeaderError::DuplicateKey { key: "a".to_owned() });
}

#[test]
fn a_hostile_name_cannot_reach_the_terminal() {
    let escape = r"\u001b]0;owned\u0007\u001b[2J\r\u202e\u009b31m";
    let header = format!("{{{}}}", entry(&format!("{escape}{}", "x".repeat(50_000)), "U8", &[9], 0, 4));
    let folder = Folder::new();
    let error = open(folder.write("x.safetensors", file(&header, &[0; 4]))).unwrap_err();
    let shown = error.to_string();
    assert!(shown.chars().all(|c| !c.is_control() && c != '\u{202e}'), "{shown:?}");
    assert!(shown.len() < 1000 && shown.contains("bytes long"), "{shown}");
}
