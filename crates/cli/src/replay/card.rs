//! Which card a trace is replayed on, and what of it is only assumed.

use poorwill::ByteSize;
use poorwill_local::failure::Failure;
use poorwill_replay::{Card, Trace};

use super::args::ReplayArgs;

const CARD: ByteSize = ByteSize::gib(80);
const TAKEN: ByteSize = ByteSize::gib(1);
/// More than any device has; larger sizes would only be mistakes.
const CARD_MAX: ByteSize = ByteSize::gib(1 << 20);
/// A size within this part of a card names it.
const CARD_PARTS: u64 = 32;
/// Most of a card that others had, where that is not known.
const TAKEN_PARTS: u64 = 8;

/// As asked for, else as recorded. A case has one of its own.
pub(super) fn card(
    args: &ReplayArgs,
    trace: &Trace,
    known: Option<Card>,
    notes: &mut Vec<String>,
) -> Result<Card, Failure> {
    let usual = known.unwrap_or(Card { total_bytes: CARD.0, taken_bytes: TAKEN.0, budget_bytes: None });
    let recorded = known.or(trace.card);
    let is_whole = known.is_some() || trace.is_card_whole;
    let beside = trace.card_beside.filter(|_| recorded.is_none() && args.card.is_none());
    let mut card = match (args.card, recorded.or(beside.map(|(card, _)| card))) {
        (None, Some(seen)) if args.taken.is_some() && !is_whole => {
            let usable = ByteSize(seen.usable_bytes());
            return Err(Failure::new(format!(
                "--taken is a part of the whole card, of which only {usable} is known, that was usable; say --card, too"
            )));
        }
        (None, Some(seen)) => seen,
        (None, None) => usual,
        (Some(size), seen) => {
            let seen = seen.filter(|_| args.taken.is_none());
            match seen.and_then(|seen| named(size.0, seen, is_whole)) {
                Some(same) => same,
                None => Card { total_bytes: size.0, taken_bytes: TAKEN.0, ..usual },
            }
        }
    };
    card.taken_bytes = args.taken.map_or(card.taken_bytes, |size| size.0);
    card.budget_bytes = args.budget.map(|size| size.0).or(card.budget_bytes);
    check_card(card)?;
    if let Some((_, device)) = beside {
        notes.push(format!(
            "The card of this device is not known. From that of device {device}, {} are assumed to be usable; say --card.",
            ByteSize(card.usable_bytes())
        ));
    }
    match (args.card, recorded) {
        (None, None) if beside.is_none() => {
            notes.push(format!("the card is assumed to have {CARD}; say --card"));
        }
        (Some(size), Some(seen)) if args.taken.is_none() => notes.extend(match named(size.0, seen, is_whole) {
            None => Some(format!("others are assumed to have {TAKEN} of this card; say --taken")),
            Some(same) if same != seen || size.0 != seen.total_bytes => Some(format!(
                "--card {size} is taken for the card that was seen, of which {} were usable; say --taken for another one",
                ByteSize(same.usable_bytes())
            )),
            Some(_) => None,
        }),
        _ => {}
    }
    Ok(card)
}

/// The card that was seen, if that may be what is sold with this size: drivers and figures for people leave a little out.
/// Where only what was usable is known, the rest is what others had.
fn named(size_bytes: u64, seen: Card, is_whole: bool) -> Option<Card> {
    let near = size_bytes.abs_diff(seen.total_bytes) <= seen.total_bytes / CARD_PARTS;
    if is_whole {
        return near.then_some(seen);
    }
    let taken_bytes = size_bytes.saturating_sub(seen.total_bytes);
    let may_be = taken_bytes <= size_bytes / TAKEN_PARTS && (near || size_bytes > seen.total_bytes);
    may_be.then_some(Card { total_bytes: seen.total_bytes.saturating_add(taken_bytes), taken_bytes, ..seen })
}

fn check_card(card: Card) -> Result<(), Failure> {
    let Card { total_bytes, taken_bytes, budget_bytes } = card;
    let [total, taken] = [total_bytes, taken_bytes].map(ByteSize);
    if total_bytes > CARD_MAX.0 {
        return Err(Failure::new(format!("no card has {total}; {CARD_MAX} are the most")));
    }
    if budget_bytes == Some(0) {
        return Err(Failure::new(
            "a budget of nothing holds nothing; say a --budget, or none for all of the card",
        ));
    }
    if card.usable_bytes() == 0 {
        return Err(Failure::new(format!(
            "nothing is left: of a card of {total}, others have {taken}; say --taken"
        )));
    }
    Ok(())
}

#[test]
fn a_size_names_the_card_that_was_seen() {
    let card = |total_bytes, taken_bytes| Card { total_bytes, taken_bytes, budget_bytes: None };
    // All of it is known.
    for (size, seen) in [(8000, card(7965, 200)), (7965, card(7965, 0)), (7800, card(7965, 200))] {
        assert_eq!(named(size, seen, true), Some(seen), "{size}");
    }
    for size in [4800, 8400, 9600] {
        assert_eq!(named(size, card(7965, 0), true), None, "{size}");
    }
    // Only what was usable is known.
    assert_eq!(named(2400, card(2210, 0), false), Some(card(2400, 190)));
    assert_eq!(named(2210, card(2210, 0), false), Some(card(2210, 0)));
    assert_eq!(named(2200, card(2210, 0), false), Some(card(2210, 0)));
    assert_eq!(named(1600, card(2210, 0), false), None);
    assert_eq!(named(8000, card(2210, 0), false), None);
}
