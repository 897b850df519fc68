//! Reading what `poorwill bench churn --trace` has written.

const HEADER: &str = "step,event,block,bytes,live_bytes,mapped_bytes";

/// A load, step by step.
#[derive(Debug, PartialEq)]
pub(super) struct Trace {
    pub(super) lines: Vec<Line>,
}

/// One step and the figures after it.
#[derive(Debug, PartialEq)]
pub(super) struct Line {
    pub(super) event: Event,
    /// Which block, by number.
    pub(super) block: u64,
    pub(super) bytes: u64,
    pub(super) live_bytes: u64,
    pub(super) mapped_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Event {
    Take,
    Give,
}

impl Trace {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut lines = (1..).zip(text.lines());
        match lines.next() {
            Some((_, HEADER)) => {}
            _ => return Err(format!("line 1 is not `{HEADER}`")),
        }
        let parsed = lines.map(|(number, line)| {
            Line::parse(line).ok_or_else(|| format!("line {number} cannot be read: `{line}`"))
        });
        Ok(Self { lines: parsed.collect::<Result<_, _>>()? })
    }
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split(',').collect();
        let [_, event, block, bytes, live_bytes, mapped_bytes] = fields[..] else { return None };
        let event = match event {
            "take" => Event::Take,
            "give" => Event::Give,
            _ => return None,
        };
        let number = |field: &str| field.parse::<u64>().ok();
        let (block, bytes) = (number(block)?, number(bytes)?);
        let (live_bytes, mapped_bytes) = (number(live_bytes)?, number(mapped_bytes)?);
        Some(Self { event, block, bytes, live_bytes, mapped_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let text = format!("{HEADER}\n1,take,0,512,512,2097152\n2,give,0,512,0,2097152\n");
        let line =
            |event, live_bytes| Line { event, block: 0, bytes: 512, live_bytes, mapped_bytes: 2 << 20 };
        let lines = vec![line(Event::Take, 512), line(Event::Give, 0)];
        assert_eq!(Trace::parse(&text), Ok(Trace { lines }));
    }

    #[test]
    fn others_are_refused_with_their_number() {
        assert!(Trace::parse("").unwrap_err().contains("line 1"));
        assert!(Trace::parse("step,live\n").unwrap_err().contains("line 1"));
        for line in ["", "1,take,0,512,512", "1,took,0,512,512,0", "1,take,0,-512,512,0", "1,take,0,1,1,1,1"]
        {
            let text = format!("{HEADER}\n1,take,0,1,1,1\n{line}\n");
            assert!(Trace::parse(&text).unwrap_err().contains("line 3"), "{line}");
        }
    }
}
