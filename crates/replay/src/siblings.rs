//! Devices of one snapshot: where memory lacked on one, its card says what the others may have.

use crate::card::Card;
use crate::trace::Trace;

/// Gives each trace of a snapshot whose card is not known that of another one. If there are several, it is the one with
/// least usable memory. A device has at least what it had mapped.
pub fn share_cards(traces: &mut [Trace]) {
    let known = traces.iter().filter_map(|trace| Some((trace.card?, trace.device?)));
    let Some((card, device)) = known.min_by_key(|(card, device)| (card.usable_bytes(), *device)) else {
        return;
    };
    for trace in traces.iter_mut().filter(|trace| trace.card.is_none()) {
        let mapped = trace.recorded.iter().flat_map(|recorded| &recorded.mapped_bytes).copied().max();
        let usable_bytes = card.usable_bytes().max(mapped.unwrap_or(0));
        trace.card_beside = Some((Card::seen(Some(card), usable_bytes), device));
    }
}

#[test]
fn devices_of_a_snapshot_have_the_card_that_was_seen() {
    let card = |gib: u64| Card { total_bytes: gib << 30, taken_bytes: 0, budget_bytes: None };
    let recorded = crate::trace::Recorded { mapped_bytes: vec![23 << 30, 1 << 30], ..Default::default() };
    let trace = |device, card| Trace { device: Some(device), card, ..Trace::default() };
    let more = Trace { recorded: Some(recorded), ..trace(4, None) };
    let mut traces =
        [trace(0, None), trace(1, Some(card(24))), trace(2, Some(card(22))), trace(3, None), more];
    share_cards(&mut traces);
    let beside = traces.each_ref().map(|trace| trace.card_beside);
    let shared = Some((card(22), 2));
    assert_eq!(beside, [shared, None, None, shared, Some((card(23), 2))]);
    let mut traces = [trace(0, None), trace(1, None)];
    share_cards(&mut traces);
    assert!(traces.iter().all(|trace| trace.card_beside.is_none()));
}
