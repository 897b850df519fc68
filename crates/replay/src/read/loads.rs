//! Loads of the project: what `poorwill bench churn --trace` writes.
//!
//! Promises: each line has to agree with those before it.

use std::collections::HashMap;

use super::fault::{Fault, Location, quoted, why};
use crate::trace::{Block, Recorded, Trace, TraceBuilder};

pub(super) const BEGINNING: &[u8] = b"step,event,";
const HEADER: &str = "step,event,block,bytes,live_bytes,mapped_bytes";

/// The trace of a file.
pub(super) fn trace(name: &str, bytes: &[u8]) -> Result<Trace, Fault> {
    let text = str::from_utf8(bytes).map_err(|error| {
        let before = bytes[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
        Fault::new(Location::Line(before + 1), "this is no UTF-8")
    })?;
    let mut lines = (1..).zip(text.trim_start().lines());
    if lines.next().is_none_or(|(_, first)| first.trim_end() != HEADER) {
        return Err(Fault::new(Location::Line(1), format!("the columns are not `{HEADER}`")));
    }
    let mut builder = TraceBuilder::new(name);
    let mut mapped = Vec::new();
    let mut sizes = HashMap::new();
    let mut live: u64 = 0;
    for (number, line) in lines {
        let fault = |what: String| Fault::new(Location::Line(number), what);
        let row = LoadLine::of(line).ok_or_else(|| fault(format!("{} is no row", quoted(line))))?;
        let changed = if row.is_take {
            let block = Block { bytes: row.bytes, stream: 0, pool: 0, stack: 0 };
            builder.alloc(row.block, block).map_err(|error| fault(why(&error)))?;
            sizes.insert(row.block, row.bytes);
            live.checked_add(row.bytes)
        } else {
            builder.free(row.block).map_err(|error| fault(why(&error)))?;
            if sizes.remove(&row.block) != Some(row.bytes) {
                return Err(fault(format!("block {} was taken with another size", row.block)));
            }
            live.checked_sub(row.bytes)
        };
        live = changed.filter(|live| *live == row.live_bytes).ok_or_else(|| {
            fault(format!("`live_bytes` is {}, and does not follow from {live}", row.live_bytes))
        })?;
        mapped.push(row.mapped_bytes);
    }
    if builder.is_empty() {
        return Err(Fault::new(Location::Line(1), "nothing follows the header"));
    }
    Ok(builder.finish(Some(Recorded { settings: String::new(), mapped_bytes: mapped, refused: None })))
}

struct LoadLine {
    is_take: bool,
    block: u64,
    bytes: u64,
    live_bytes: u64,
    mapped_bytes: u64,
}

impl LoadLine {
    fn of(line: &str) -> Option<Self> {
        let mut fields = line.trim_end().split(',');
        let _step: u64 = fields.next()?.parse().ok()?;
        let is_take = match fields.next()? {
            "take" => true,
            "give" => false,
            _ => return None,
        };
        let mut number = || fields.next()?.parse().ok();
        let row = Self {
            is_take,
            block: number()?,
            bytes: number()?,
            live_bytes: number()?,
            mapped_bytes: number()?,
        };
        fields.next().is_none().then_some(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(rows: &str) -> Result<Trace, Fault> {
        trace("a", format!("{HEADER}\n{rows}").as_bytes())
    }

    #[test]
    fn a_load_is_a_trace() {
        let trace = read("1,take,0,5,5,8\n2,take,1,6,11,16\r\n3,give,0,5,6,16\n").unwrap();
        assert_eq!(trace.live_bytes(), [5, 11, 6]);
        assert_eq!(trace.recorded.unwrap().mapped_bytes, [8, 16, 16]);
    }

    #[test]
    fn what_does_not_agree_has_its_line() {
        for (rows, line, text) in [
            ("", 1, "nothing follows"),
            ("1,take,0,5,5", 2, "`1,take,0,5,5` is no row"),
            ("1,take,0,5,5,8,9", 2, "is no row"),
            ("1,hold,0,5,5,8", 2, "is no row"),
            ("1,take,0,-5,5,8", 2, "is no row"),
            ("1,take,0,5,5,8\n2,give,1,5,0,8", 3, "freed, and is not live"),
            ("1,take,0,5,5,8\n2,take,0,5,10,8", 3, "was not freed"),
            ("1,take,0,0,0,8", 2, "no bytes"),
            ("1,take,0,5,5,8\n2,take,1,5,9,8", 3, "`live_bytes` is 9, and does not follow from 5"),
            ("1,take,0,5,5,8\n2,give,0,4,1,8", 3, "block 0 was taken with another size"),
        ] {
            let fault = read(rows).unwrap_err();
            assert_eq!(fault.place, Location::Line(line), "{rows}: {fault:?}");
            assert!(fault.what.contains(text), "{rows}: {fault:?}");
        }
        assert_eq!(trace("a", b"step,event,\n").unwrap_err().place, Location::Line(1));
        assert_eq!(
            trace("a", format!("{HEADER}\n\n\n\0\u{e9}").as_bytes()).unwrap_err().place,
            Location::Line(2)
        );
        assert_eq!(trace("a", b"step,event,\n\n\xff").unwrap_err().place, Location::Line(3));
    }
}
