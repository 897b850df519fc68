//! Devices of one snapshot: where memory lacked on one, its card says what the others have.

use ::poorwill::ByteSize;

use crate::trace::Trace;

/// Gives each trace of a snapshot whose card is not known that of another one, with a note. If there are several, it is the
/// one with least usable memory.
pub fn share_cards(traces: &mut [Trace]) {
    let known = traces.iter().filter_map(|trace| Some((trace.card?, trace.device?)));
    let Some((card, device)) = known.min_by_key(|(card, device)| (card.usable_bytes(), *device)) else {
        return;
    };
    for trace in traces.iter_mut().filter(|trace| trace.card.is_none()) {
        trace.card = Some(card);
        trace.notes.push(format!(
            "The card of this device is not known. That of device {device} is assumed: {} are usable, unless --card says \
             otherwise.",
            ByteSize(card.usable_bytes())
        ));
    }
}

#[test]
fn devices_of_a_snapshot_have_the_card_that_was_seen() {
    let card = |gib: u64| crate::Card { total_bytes: gib << 30, taken_bytes: 0, budget_bytes: None };
    let trace = |device, card| Trace { device: Some(device), card, ..Trace::default() };
    let mut traces = [trace(0, None), trace(1, Some(card(24))), trace(2, Some(card(22))), trace(3, None)];
    share_cards(&mut traces);
    assert_eq!(traces.each_ref().map(|trace| trace.card), [22, 24, 22, 22].map(|gib| Some(card(gib))));
    assert_eq!(traces.each_ref().map(|trace| trace.notes.len()), [1, 0, 0, 1]);
    let note = "The card of this device is not known. That of device 2 is assumed: 22 GiB are usable, unless --card says \
                otherwise.";
    assert_eq!(traces[3].notes, [note]);
    let mut traces = [trace(0, None), trace(1, None)];
    share_cards(&mut traces);
    assert!(traces.iter().all(|trace| trace.card.is_none() && trace.notes.is_empty()));
}
