//! Whether the card is the one of what was recorded, so that no verdict changes without a word.

use ::poorwill::ByteSize;

use super::verdict::Verdict;
use crate::card::Card;
use crate::replay::{ReplayError, Run, replay};
use crate::trace::Trace;

/// That another size is usable than where it was recorded, with the verdict there if it is another one. A card that the
/// recorder knew nothing of has no bytes.
pub(super) fn note(trace: &Trace, run: &Run, recorded: Card) -> Result<Option<String>, ReplayError> {
    let (had, has) = (recorded.usable_bytes(), run.card.usable_bytes());
    if had == has || had == 0 {
        return Ok(None);
    }
    let (here, there) = (Verdict::of(trace, run), Verdict::of(trace, &replay(trace, &run.setup, recorded)?));
    let fits = match there {
        Verdict::Fits => "it fits",
        Verdict::FitsSoFar => "it fits so far",
        Verdict::DoesNotFit => "it does not fit",
    };
    let verdict = if here == there { String::new() } else { format!(" On {} {fits}.", ByteSize(had)) };
    let (had, has) = (ByteSize(had), ByteSize(has));
    Ok(Some(format!("What was recorded had {had} usable, and this answer is for {has}.{verdict}")))
}
