//! Requests that were refused: a part of what the load needs, and what they show of the card.

use ::poorwill::ByteSize;

use crate::card::Card;
use crate::trace::{Block, Refusal, Trace, TraceBuilder, TraceError};

/// The key of the first one's block; no device has such an address.
const KEY: u64 = u64::MAX - 1;

/// What the allocator had mapped at a refusal, and the card had free.
#[derive(Debug, Clone, Copy)]
pub(super) struct SeenMemory {
    pub(super) mapped_bytes: u64,
    pub(super) free_bytes: u64,
}

#[derive(Debug, Default)]
pub(super) struct Refusals {
    count: u64,
    last: Option<(Refusal, Option<SeenMemory>)>,
}

impl Refusals {
    /// The next step asks for a block in vain.
    pub(super) fn add(
        &mut self,
        builder: &mut TraceBuilder,
        block: Block,
        seen: Option<SeenMemory>,
    ) -> Result<(), TraceError> {
        let usable_bytes = seen.and_then(|seen| seen.mapped_bytes.checked_add(seen.free_bytes));
        let refusal = Refusal { step: builder.len(), asked_bytes: block.bytes, usable_bytes };
        self.last = Some((refusal, seen));
        let key = KEY - self.count;
        self.count += 1;
        if block.bytes > 0 {
            builder.alloc(key, block)?;
            builder.free(key)?;
        }
        Ok(())
    }

    pub(super) fn last(&self) -> Option<Refusal> {
        self.last.map(|(refusal, _)| refusal)
    }

    /// The card of the last one is the trace's; `known` is what the recorder says of it.
    pub(super) fn describe(&self, trace: &mut Trace, known: Option<Card>) {
        trace.card = known;
        if self.count > 1 {
            trace.notes.push(format!("Memory lacked {} times; the last one is shown.", self.count));
        }
        let Some((Refusal { step, usable_bytes: Some(usable), .. }, Some(seen))) = self.last else { return };
        if usable == 0 {
            return;
        }
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
