//! Requests that were refused: what they show of the card, and the one that ended the load.

use ::poorwill::ByteSize;

use crate::card::Card;
use crate::trace::{Block, Refusal, Trace, TraceBuilder, TraceError};

/// The key of its block; no device has such an address.
const KEY: u64 = u64::MAX - 1;

/// What the allocator had mapped at a refusal, and the card had free.
#[derive(Debug, Clone, Copy)]
pub(super) struct SeenMemory {
    pub(super) mapped_bytes: u64,
    pub(super) free_bytes: u64,
}

/// An event that says whether a load went on.
#[derive(Debug, Clone, Copy)]
pub(super) enum Request {
    Allocated(u64),
    Refused(u64),
}

/// By their position, the refusal that ended the load: the last one that less was allocated after than it asked for. A
/// program that prints its error may allocate a little.
pub(super) fn ending(requests: impl DoubleEndedIterator<Item = (usize, Request)>) -> Option<usize> {
    let mut after_bytes = 0_u64;
    requests.rev().find_map(|(at, request)| match request {
        Request::Allocated(bytes) => {
            after_bytes = after_bytes.saturating_add(bytes);
            None
        }
        Request::Refused(bytes) => (after_bytes < bytes.max(1)).then_some(at),
    })
}

#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// How many did not end the load, and the step of the last.
    survived: (u64, usize),
    ended: Option<Refusal>,
    /// At the one that ended the load, or else the last one.
    seen: Option<(usize, SeenMemory)>,
}

impl Refusals {
    /// A block is asked for in vain. It is a step if that ended the load: the load needs it then.
    pub(super) fn add(
        &mut self,
        builder: &mut TraceBuilder,
        block: Block,
        seen: Option<SeenMemory>,
        is_end: bool,
    ) -> Result<(), TraceError> {
        let step = builder.len();
        if is_end || self.ended.is_none() {
            self.seen = seen.map(|seen| (step, seen)).or(self.seen);
        }
        if !is_end {
            self.survived = (self.survived.0 + 1, step);
            return Ok(());
        }
        let usable_bytes = seen.and_then(SeenMemory::usable_bytes);
        self.ended = Some(Refusal { step, asked_bytes: block.bytes, usable_bytes });
        if block.bytes > 0 {
            builder.alloc(KEY, block)?;
            builder.free(KEY)?;
        }
        Ok(())
    }

    /// The one that ended the load.
    pub(super) const fn ended(&self) -> Option<Refusal> {
        self.ended
    }

    /// The card that was seen is the trace's; `known` is what the recorder says of it.
    pub(super) fn describe(&self, trace: &mut Trace, known: Option<Card>) {
        (trace.card, trace.is_card_whole) = (known, known.is_some());
        match self.survived {
            (0, _) => {}
            (1, step) => {
                let step = step + 1;
                trace.notes.push(format!("Memory lacked at step {step}, and the program went on."));
            }
            (count, step) => {
                let step = step + 1;
                trace.notes.push(format!(
                    "Memory lacked {count} times, the last time at step {step}, and the program went on."
                ));
            }
        }
        let Some((step, seen)) = self.seen else { return };
        let Some(usable) = seen.usable_bytes().filter(|usable| *usable > 0) else { return };
        trace.card = Some(Card::seen(known, usable));
        trace.notes.push(format!(
            "When memory lacked at step {}, {} were mapped and {} were free on the card: {} are usable, unless --card \
             says otherwise.",
            step + 1,
            ByteSize(seen.mapped_bytes),
            ByteSize(seen.free_bytes),
            ByteSize(usable)
        ));
    }
}

impl SeenMemory {
    const fn usable_bytes(self) -> Option<u64> {
        self.mapped_bytes.checked_add(self.free_bytes)
    }
}

#[test]
fn a_load_ended_where_less_than_was_refused_came_after() {
    use self::Request::{Allocated, Refused};
    for (requests, expected) in [
        (&[Allocated(9), Refused(5)][..], Some(1)),
        (&[Refused(5), Allocated(1), Allocated(3)], Some(0)),
        (&[Refused(5), Allocated(2), Allocated(3)], None),
        // The last one was survived, and the first one was not.
        (&[Refused(50), Allocated(2), Refused(5), Allocated(6)], Some(0)),
        (&[Refused(50), Refused(40), Allocated(6)], Some(1)),
        (&[Refused(0)], Some(0)),
        (&[Allocated(1)], None),
    ] {
        assert_eq!(ending(requests.iter().copied().enumerate()), expected, "{requests:?}");
    }
}
