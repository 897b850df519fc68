//! Checks a header's numbers.
//!
//! Afterwards each tensor lies inside the file, with the size of its shape and dtype. Every byte belongs to
//! exactly one tensor.

use super::dtype::Dtype;
use super::error::HeaderError;
use super::header::RawEntry;
use super::json::Naturals;

#[derive(Debug, Clone, Copy)]
pub(super) struct Payload {
    /// First byte after the header.
    pub(super) begin: u64,
    pub(super) file_bytes: u64,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// First byte, in the file.
    pub(super) begin: u64,
    /// First byte after it.
    pub(super) end: u64,
}

/// Sorts by offset; an empty tensor precedes the one at the same offset.
pub(super) fn check(raw: Vec<RawEntry>, payload: Payload) -> Result<Vec<Entry>, HeaderError> {
    let mut entries =
        raw.into_iter().map(|entry| check_entry(entry, payload)).collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(|entry| (entry.begin, entry.end));
    check_cover(&entries, payload)?;
    Ok(entries)
}

fn check_entry(raw: RawEntry, payload: Payload) -> Result<Entry, HeaderError> {
    let RawEntry { name, dtype, shape, offsets } = raw;
    let Some(dtype) = Dtype::of(&dtype) else {
        return Err(HeaderError::UnknownDtype { tensor: name, dtype });
    };
    let shape = dimensions(&name, shape)?;
    let shape_bytes = bytes_of(&name, dtype, &shape)?;
    let (begin, end) = offset_pair(&name, offsets)?;
    if begin > end {
        return Err(HeaderError::OffsetsReversed { tensor: name, begin, end });
    }
    if end > payload.file_bytes.saturating_sub(payload.begin) {
        let end = payload.begin.saturating_add(end);
        return Err(HeaderError::BeyondFile { tensor: name, end, file_bytes: payload.file_bytes });
    }
    let offset_bytes = end - begin;
    if offset_bytes != shape_bytes {
        return Err(HeaderError::SizeMismatch { tensor: name, dtype, shape, shape_bytes, offset_bytes });
    }
    Ok(Entry { name, dtype, shape, begin: payload.begin + begin, end: payload.begin + end })
}

fn dimensions(tensor: &str, shape: Naturals) -> Result<Vec<u64>, HeaderError> {
    match shape.invalid {
        None => Ok(shape.values),
        Some(invalid) => Err(HeaderError::BadDimension {
            tensor: tensor.to_owned(),
            dimension: invalid.position,
            value: invalid.value,
        }),
    }
}

fn offset_pair(tensor: &str, offsets: Naturals) -> Result<(u64, u64), HeaderError> {
    let tensor = || tensor.to_owned();
    if let Some(invalid) = offsets.invalid {
        return Err(HeaderError::BadOffset { tensor: tensor(), value: invalid.value });
    }
    match offsets.values[..] {
        [begin, end] => Ok((begin, end)),
        _ => Err(HeaderError::EntryMalformed {
            tensor: tensor(),
            reason: format!("`data_offsets` must be two numbers, not {}", offsets.values.len()),
        }),
    }
}

/// Multiplies in order, as the reference implementation: `[2^40, 2^40, 0]` overflows although it is empty.
fn bytes_of(tensor: &str, dtype: Dtype, shape: &[u64]) -> Result<u64, HeaderError> {
    let elements = shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
    let Some(bits) = elements.and_then(|elements| elements.checked_mul(dtype.bits())) else {
        return Err(HeaderError::SizeOverflow { tensor: tensor.to_owned(), dtype, shape: shape.to_vec() });
    };
    if !bits.is_multiple_of(8) {
        return Err(HeaderError::PartialByte { tensor: tensor.to_owned(), dtype, bits });
    }
    Ok(bits / 8)
}

/// The `entries`, in offset order, cover the payload without overlap.
fn check_cover(entries: &[Entry], payload: Payload) -> Result<(), HeaderError> {
    let mut covered = payload.begin;
    let mut before: Option<&Entry> = None;
    for entry in entries {
        if let Some(first) = before.filter(|_| entry.begin < covered) {
            return Err(HeaderError::Overlap {
                first: first.name.clone(),
                second: entry.name.clone(),
                first_end: covered,
                second_begin: entry.begin,
            });
        }
        if entry.begin > covered {
            return Err(HeaderError::Hole { tensor: entry.name.clone(), begin: covered, end: entry.begin });
        }
        covered = entry.end;
        before = Some(entry);
    }
    if covered < payload.file_bytes {
        return Err(HeaderError::TrailingBytes { begin: covered, file_bytes: payload.file_bytes });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const U64_MAX: u64 = u64::MAX;

    fn raw(name: &str, dtype: &str, shape: &[u64], offsets: &[u64]) -> RawEntry {
        let naturals = |values: &[u64]| Naturals { values: values.to_vec(), invalid: None };
        RawEntry {
            name: name.to_owned(),
            dtype: dtype.to_owned(),
            shape: naturals(shape),
            offsets: naturals(offsets),
        }
    }

    fn check_in(payload_bytes: u64, entries: Vec<RawEntry>) -> Result<Vec<Entry>, HeaderError> {
        check(entries, Payload { begin: 100, file_bytes: 100 + payload_bytes })
    }

    fn error(payload_bytes: u64, entries: Vec<RawEntry>) -> HeaderError {
        check_in(payload_bytes, entries).unwrap_err()
    }

    #[test]
    fn every_dtype_of_the_format_is_known() {
        for (name, bits) in [
            ("BOOL", 8),
            ("F4", 4),
            ("F6_E2M3", 6),
            ("F6_E3M2", 6),
            ("U8", 8),
            ("I8", 8),
            ("F8_E5M2", 8),
            ("F8_E4M3", 8),
            ("F8_E8M0", 8),
            ("F8_E4M3FNUZ", 8),
            ("F8_E5M2FNUZ", 8),
            ("I16", 16),
            ("U16", 16),
            ("F16", 16),
            ("BF16", 16),
            ("I32", 32),
            ("U32", 32),
            ("F32", 32),
            ("C64", 64),
            ("F64", 64),
            ("I64", 64),
            ("U64", 64),
        ] {
            let entries = check_in(bits, vec![raw("t", name, &[8], &[0, bits])]).unwrap();
            assert_eq!(entries[0].dtype.to_string(), name);
        }
        for name in ["", "f32", "F128", "BF16 "] {
            let expected = HeaderError::UnknownDtype { tensor: "t".to_owned(), dtype: name.to_owned() };
            assert_eq!(error(4, vec![raw("t", name, &[1], &[0, 4])]), expected);
        }
    }

    #[test]
    fn tensors_are_sorted_and_placed_in_the_file() {
        let entries = check_in(
            9,
            vec![
                raw("scalar", "F32", &[], &[5, 9]),
                raw("empty", "F32", &[3, 0], &[5, 5]),
                raw("bytes", "U8", &[5], &[0, 5]),
            ],
        )
        .unwrap();
        let positions: Vec<_> =
            entries.iter().map(|entry| (entry.name.as_str(), entry.begin, entry.end)).collect();
        assert_eq!(positions, [("bytes", 100, 105), ("empty", 105, 105), ("scalar", 105, 109)]);
        assert!(check_in(0, vec![]).unwrap().is_empty());
    }

    #[test]
    fn sizes_that_overflow() {
        for shape in [&[U64_MAX][..], &[1 << 32, 1 << 32], &[1 << 40, 1 << 40, 0], &[1 << 60]] {
            assert!(matches!(
                error(4, vec![raw("t", "F32", shape, &[0, 4])]),
                HeaderError::SizeOverflow { .. }
            ));
        }
        assert!(check_in(0, vec![raw("t", "F32", &[0, U64_MAX, U64_MAX], &[0, 0])]).is_ok());
    }

    #[test]
    fn sub_byte_tensors_fill_their_bytes() {
        assert!(check_in(3, vec![raw("t", "F6_E2M3", &[4], &[0, 3])]).is_ok());
        assert_eq!(
            error(2, vec![raw("t", "F4", &[3], &[0, 2])]),
            HeaderError::PartialByte { tensor: "t".to_owned(), dtype: Dtype::F4, bits: 12 }
        );
    }

    #[test]
    fn offsets_are_a_pair_in_order_and_inside_the_file() {
        for count in [0, 1, 3] {
            let shown = error(1, vec![raw("t", "U8", &[1], &vec![1; count])]).to_string();
            assert_eq!(shown, format!("tensor \"t\": `data_offsets` must be two numbers, not {count}"));
        }
        assert_eq!(
            error(4, vec![raw("t", "U8", &[1], &[2, 1])]),
            HeaderError::OffsetsReversed { tensor: "t".to_owned(), begin: 2, end: 1 }
        );
        assert_eq!(
            error(4, vec![raw("t", "U8", &[5], &[0, 5])]).to_string(),
            "tensor \"t\" ends at byte 105 but the file has only 104; the file is torn, fetch it again"
        );
        assert!(matches!(
            error(4, vec![raw("t", "U8", &[1], &[0, U64_MAX])]),
            HeaderError::BeyondFile { end: U64_MAX, .. }
        ));
    }

    #[test]
    fn offsets_and_shape_agree() {
        assert_eq!(
            error(9, vec![raw("t", "F32", &[2], &[0, 9])]).to_string(),
            "tensor \"t\": its data offsets span 9 bytes, but F32 [2] needs 8"
        );
    }

    #[test]
    fn no_byte_belongs_to_two_tensors() {
        let overlap = |entries| match error(9, entries) {
            HeaderError::Overlap { first, second, first_end, second_begin } => {
                (first, second, first_end, second_begin)
            }
            other => panic!("{other:?}"),
        };
        let named = |first: &str, second: &str, end, begin| (first.to_owned(), second.to_owned(), end, begin);
        let bytes = |name, begin: u64, end: u64| raw(name, "U8", &[end - begin], &[begin, end]);
        assert_eq!(overlap(vec![bytes("b", 4, 9), bytes("a", 0, 5)]), named("a", "b", 105, 104));
        assert_eq!(overlap(vec![bytes("a", 0, 9), bytes("b", 0, 9)]), named("a", "b", 109, 100));
        assert_eq!(overlap(vec![bytes("a", 0, 9), bytes("empty", 3, 3)]), named("a", "empty", 109, 103));
    }

    #[test]
    fn every_byte_belongs_to_a_tensor() {
        let bytes = |name, begin: u64, end: u64| raw(name, "U8", &[end - begin], &[begin, end]);
        let hole = |begin, end| HeaderError::Hole { tensor: "b".to_owned(), begin, end };
        assert_eq!(error(9, vec![bytes("a", 0, 4), bytes("b", 5, 9)]), hole(104, 105));
        assert_eq!(error(9, vec![bytes("b", 1, 9)]), hole(100, 101));
        assert_eq!(
            error(9, vec![bytes("a", 0, 8)]),
            HeaderError::TrailingBytes { begin: 108, file_bytes: 109 }
        );
        assert_eq!(error(1, vec![]), HeaderError::TrailingBytes { begin: 100, file_bytes: 101 });
    }
}
