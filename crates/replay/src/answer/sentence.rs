//! The answer in a sentence, and what to do.

use std::fmt::Write as _;

use ::poorwill::ByteSize;

use super::holders::Holder;
use super::verdict::{Answer, Row, Verdict};
use crate::allocators::AllocatorKind;
use crate::claim;
use crate::replay::{Failure, Run};
use crate::trace::Trace;

/// Another setup saves memory if that is this part of what is needed at least.
const SAVES: u64 = 50;
const SHRINKABLE_MAX: usize = 3;

/// Whether the first run fits, and what would.
pub(super) fn sentence(trace: &Trace, runs: &[Run], answer: &Answer) -> String {
    let Some(run) = runs.first() else { return "There is nothing to replay with.".to_owned() };
    let mut text = match run.failure {
        None => fits(trace, run),
        Some(failure) => fails(trace, run, failure),
    };
    // Writing to a text cannot fail.
    if run.fits() {
        if let Some(retries) = run.retries.filter(|retries| *retries > 0) {
            let times = times(retries);
            let _ = write!(text, " PyTorch gives back all that is free and tries again {times} for that.");
        }
        return text;
    }
    let usable = run.card.usable_bytes();
    let fitting: Vec<String> = answer.rows.iter().filter(|row| row.fits()).map(needing).collect();
    if !fitting.is_empty() {
        let far = if trace.ended_by().is_some() { " so far" } else { "" };
        let _ = write!(text, " These fit{far}, with what they need: {}.", fitting.join(", "));
    } else if answer.live_peak_bytes > usable {
        let (live, lack) = (ByteSize(answer.live_peak_bytes), ByteSize(answer.live_peak_bytes - usable));
        let what = if trace.claims.is_empty() { "live" } else { "live or claimed" };
        let at = at(trace, live_peak_step(trace));
        let _ =
            write!(text, " No allocator can help: {live} are {what} at {at}, {lack} more than there are.");
    } else {
        text.push_str(" None of the setups that were tried fits.");
    }
    let is_said = fitting.is_empty() && answer.live_peak_bytes > usable;
    if let Some(needs) = answer.needs_bytes.filter(|_| !is_said) {
        let (needs, more) = (ByteSize(needs), ByteSize(needs.saturating_sub(usable)));
        let _ = write!(text, " With `{}` it needs {needs}, {more} more.", run.setup);
    }
    text
}

fn fits(trace: &Trace, run: &Run) -> String {
    let (mapped, usable) = (ByteSize(run.peak.mapped_bytes), ByteSize(run.card.usable_bytes()));
    let claims = claim::sums(&trace.claims).iter().map(|(_, sum)| *sum).max();
    let claims = claims.map(|bytes| format!(" beside claims of {}", ByteSize(bytes))).unwrap_or_default();
    let maps = format!(
        "`{}` maps {mapped} at most, at {}, of {usable}{claims}",
        run.setup,
        at(trace, run.peak.step)
    );
    match trace.ended_by() {
        None => format!("It fits: {maps}."),
        Some(refusal) => {
            let step = refusal.step + 1;
            format!(
                "Fits so far: {maps}. Memory lacked at step {step}; what came after step {step} is not known."
            )
        }
    }
}

fn fails(trace: &Trace, run: &Run, failure: Failure) -> String {
    let what = if failure.is_claim { " for claims" } else { "" };
    let [asked, usable, mapped, live] =
        [failure.asked_bytes, run.card.usable_bytes(), failure.at.mapped_bytes, failure.at.live_bytes]
            .map(ByteSize);
    let claims = trace.claims.iter().filter(|claim| claim.is_made_at(failure.step));
    let claimed = claims.fold(0_u64, |sum, claim| sum.saturating_add(claim.bytes));
    // What is asked for is not beside itself.
    let beside = claimed.saturating_sub(if failure.is_claim { failure.asked_bytes } else { 0 });
    let beside = Some(beside).filter(|bytes| *bytes > 0);
    let beside = beside.map(|bytes| format!(" beside claims of {}", ByteSize(bytes))).unwrap_or_default();
    let cached = Some(run).filter(|_| failure.is_claim).and_then(|run| cached(trace, run, failure, claimed));
    format!(
        "It does not fit: at {} `{}` has no {asked}{what} left of {usable}{beside}; {mapped} are mapped, and {live} of \
         that live.{}",
        at(trace, failure.step),
        run.setup,
        cached.unwrap_or_default()
    )
}

/// The call that makes way for claims, if what is cached suffices for them.
fn cached(trace: &Trace, run: &Run, failure: Failure, claimed: u64) -> Option<String> {
    let call = match run.setup.kind() {
        AllocatorKind::PyTorch => "torch.cuda.empty_cache()",
        AllocatorKind::Poorwill => "poorwill.trim()",
        // A pool of a sleep mode does not give back for either.
        AllocatorKind::Cumem | AllocatorKind::TorchMemorySaver => return None,
    };
    let (_, live_bytes) = claim::peak_with(&trace.claims, &trace.live_bytes());
    let suffices = run.held_bytes.saturating_add(claimed).max(live_bytes) <= run.card.usable_bytes();
    let back = ByteSize(failure.at.mapped_bytes.saturating_sub(run.held_bytes));
    suffices.then(|| format!(" `{call}` before the claim gives {back} back, which suffices."))
}

fn times(count: u64) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

fn at(trace: &Trace, step: usize) -> String {
    let phase = trace.phase_at(step).map(|phase| format!(" of `{phase}`")).unwrap_or_default();
    format!("step {}{phase}", step + 1)
}

/// The first one of those with most live and claimed bytes.
fn live_peak_step(trace: &Trace) -> usize {
    claim::peak_with(&trace.claims, &trace.live_bytes()).0
}

/// With what it needs, or its peak where that was not looked for.
fn needing(row: &Row) -> String {
    format!("`{}` ({})", row.setup, ByteSize(row.needs_bytes.unwrap_or(row.peak_bytes)))
}

/// What to change, in sentences.
pub(super) fn advice(trace: &Trace, runs: &[Run], answer: &Answer) -> Vec<String> {
    let Some((run, asked)) = runs.first().zip(answer.rows.iter().find(|row| row.setup == answer.setup))
    else {
        return Vec::new();
    };
    match answer.verdict {
        Verdict::Fits | Verdict::FitsSoFar => saving(asked, &answer.rows).into_iter().collect(),
        // One that changes only a setting comes before another allocator. The rows come by their needs.
        Verdict::DoesNotFit => {
            match answer.rows.iter().filter(|row| row.fits()).min_by_key(|row| !row.is_like(asked)) {
                Some(row) => vec![format!("For `{}`: {}.", row.setup, row.typed)],
                None => shrinking(trace, run, answer).into_iter().collect(),
            }
        }
    }
}

/// The setup that needs least, if that is less than what is asked about. One that changes only a setting comes first.
fn saving(asked: &Row, rows: &[Row]) -> Option<String> {
    let saves = |of: &dyn Fn(&Row) -> Option<u64>| {
        let own = of(asked)?;
        let saved = |row: &Row| {
            let less = own.checked_sub(of(row)?).filter(|less| less.saturating_mul(SAVES) >= own)?;
            Some((of(row)?, less))
        };
        let saving = rows.iter().filter(|row| row.fits()).filter_map(|row| Some((row, saved(row)?)));
        let (row, (bytes, less)) = saving.min_by_key(|(row, (bytes, _))| (!row.is_like(asked), *bytes))?;
        Some((row, ByteSize(bytes), ByteSize(less)))
    };
    let needs = saves(&|row| row.needs_bytes);
    let (verb, (row, bytes, less)) = match needs {
        Some(found) => ("needs", found),
        None => ("maps", saves(&|row| Some(row.peak_bytes))?),
    };
    Some(format!("`{}` {verb} {bytes}, {less} less: {}.", row.setup, row.typed))
}

/// What has to be smaller where no setup helps, and who has enough for that.
fn shrinking(trace: &Trace, run: &Run, answer: &Answer) -> Option<String> {
    let usable = run.card.usable_bytes();
    let needs = answer.needs_bytes.unwrap_or(answer.live_peak_bytes);
    let lack = needs.checked_sub(usable).filter(|lack| *lack > 0)?;
    let step = run.failure.map_or(run.peak.step, |failure| failure.step);
    // What holds memory at one of them need not be there at the other.
    if step != live_peak_step(trace) {
        return None;
    }
    let claims = trace.claims.iter().filter(|claim| claim.is_made_at(step));
    let claims = claims.map(|claim| (format!("the claim {}", claim.name), claim.bytes));
    let asked = run.failure.filter(|failure| !failure.is_claim);
    let asked = asked.and_then(|failure| trace.asked_at(failure.step));
    let asked = asked.map(|block| (request_of(trace.frames_of(block)), block.bytes));
    let held = answer.holders.iter().map(|holder| (who(holder), holder.bytes));
    let mut all: Vec<(String, u64)> = claims.chain(asked).chain(held).collect();
    all.sort_by_key(|(_, bytes)| u64::MAX - bytes);
    let enough: Vec<String> = all
        .iter()
        .filter(|(_, bytes)| *bytes >= lack)
        .take(SHRINKABLE_MAX)
        .map(|(name, bytes)| format!("{name} ({})", ByteSize(*bytes)))
        .collect();
    let lack = ByteSize(lack);
    Some(if enough.is_empty() {
        format!("It fits with {lack} less; none of the holders alone has as much.")
    } else {
        format!("It fits with {lack} less of one of these: {}.", enough.join(", "))
    })
}

fn who(holder: &Holder) -> String {
    holder.shown.first().map_or_else(|| "blocks without frames".to_owned(), Clone::clone)
}

fn request_of(frames: &[String]) -> String {
    let own = crate::frames::of_program(frames).into_iter().next();
    own.map_or_else(|| "the request itself".to_owned(), |own| format!("the request of {own}"))
}

#[cfg(test)]
mod tests {
    use super::super::answer;
    use super::*;
    use crate::Claim;
    use crate::card::Card;
    use crate::replay::replay;
    use crate::trace::{Block, TraceBuilder};

    const GIB: u64 = 1 << 30;

    fn said(trace: &Trace, usable_bytes: u64, setups: &[&str]) -> Answer {
        let card = Card { total_bytes: usable_bytes, taken_bytes: 0, budget_bytes: None };
        let run = |setup: &&str| replay(trace, &setup.parse().unwrap(), card).unwrap();
        answer(trace, &setups.iter().map(run).collect::<Vec<Run>>()).unwrap()
    }

    /// A block that is freed at once, if it is one of staging, and eight that stay.
    fn staged(staging_bytes: u64) -> TraceBuilder {
        let mut trace = TraceBuilder::new("a");
        let stacks = ["a.py:1 staging", "a.py:2 w"].map(|line| trace.stack(vec![line.to_owned()]));
        let block = |bytes, stack| Block { bytes, stream: 0, pool: 0, stack };
        trace.alloc(1, block(staging_bytes, stacks[0])).unwrap();
        trace.free(1).unwrap();
        for key in 2..10 {
            trace.alloc(key, block(GIB, stacks[1])).unwrap();
        }
        trace
    }

    #[test]
    fn what_can_shrink_is_there_where_most_is_live() {
        let trace = staged(5 * GIB).finish(None);
        assert!(said(&trace, 3 * GIB, &["pytorch"]).advice.is_empty());
        let advice = said(&trace, 7 * GIB, &["pytorch"]).advice;
        assert_eq!(
            advice,
            ["It fits with 1 GiB less of one of these: a.py:2 w (7 GiB), the request of a.py:2 w (1 GiB)."]
        );
    }

    /// Segments that grow need whole units.
    #[test]
    fn what_lacks_is_of_the_setup_that_is_asked_about() {
        let usable = 15 * GIB / 2;
        let trace = staged(GIB).finish(None);
        let said = said(&trace, usable, &["pytorch:expandable_segments:True", "pytorch"]);
        let needs = said.needs_bytes.unwrap();
        assert!(needs > 8 * GIB && said.rows[0].needs_bytes == Some(8 * GIB), "{said:?}");
        let lacks =
            format!("It fits with {} less of one of these: a.py:2 w (7 GiB)", ByteSize(needs - usable));
        assert!(said.advice[0].starts_with(&lacks), "{lacks}: {said:?}");
    }

    #[test]
    fn claims_are_said_beside_what_fails() {
        let claim = |bytes, from_step| Claim { name: "graphs".into(), bytes, from_step, to_step: usize::MAX };
        let trace = Trace { claims: vec![claim(GIB, 0)], ..staged(GIB).finish(None) };
        let sentence = said(&trace, 8 * GIB, &["pytorch"]).sentence;
        let expected =
            "has no 1 GiB left of 8 GiB beside claims of 1 GiB; 7 GiB are mapped, and 7 GiB of that live.";
        assert!(sentence.contains(expected), "{sentence}");
        let trace = Trace { claims: vec![claim(GIB, 0), claim(2 * GIB, 8)], ..trace };
        let sentence = said(&trace, 8 * GIB, &["pytorch"]).sentence;
        assert!(
            sentence.contains("has no 2 GiB for claims left of 8 GiB beside claims of 1 GiB; 6 GiB"),
            "{sentence}"
        );
    }

    /// The program can empty the cache before.
    #[test]
    fn what_a_claim_lacks_is_said_to_be_cached() {
        let mut trace = staged(2 * GIB);
        trace.free(9).unwrap();
        let last = trace.len();
        let claim = Claim { name: "graphs".into(), bytes: 2 * GIB, from_step: last, to_step: usize::MAX };
        let trace = Trace { claims: vec![claim], ..trace.finish(None) };
        // Poorwill has created granules ahead.
        for (setup, call, back) in
            [("pytorch", "torch.cuda.empty_cache()", "1 GiB"), ("poorwill", "poorwill.trim()", "1.01 GiB")]
        {
            let sentence = said(&trace, 19 * GIB / 2, &[setup]).sentence;
            let expected = format!(" `{call}` before the claim gives {back} back, which suffices.");
            assert!(sentence.contains(&expected), "{sentence}");
            let sentence = said(&trace, 17 * GIB / 2, &[setup]).sentence;
            assert!(!sentence.contains("which suffices"), "{sentence}");
        }
    }

    #[test]
    fn most_may_be_claimed_behind_the_last_step() {
        let trace = staged(GIB).finish(None);
        let last = trace.steps.len();
        let claim = Claim { name: "graphs".into(), bytes: 4 * GIB, from_step: last, to_step: usize::MAX };
        let trace = Trace { claims: vec![claim], ..trace };
        let said = said(&trace, 10 * GIB, &["pytorch"]);
        assert_eq!(said.live_peak_bytes, 12 * GIB);
        let sentence = &said.sentence;
        assert!(sentence.contains("12 GiB are live or claimed at step 11,"), "{sentence}");
        assert_eq!(
            said.advice,
            ["It fits with 2 GiB less of one of these: a.py:2 w (8 GiB), the claim graphs (4 GiB)."]
        );
    }

    /// Another card than the one that was seen changes no verdict in silence.
    #[test]
    fn another_card_than_what_was_seen_is_noted() {
        let card = |total_bytes| Card { total_bytes, taken_bytes: 0, budget_bytes: None };
        let trace = Trace { card: Some(card(7 * GIB)), ..staged(GIB).finish(None) };
        let notes = said(&trace, 9 * GIB, &["pytorch"]).notes;
        let expected =
            "What was recorded had 7 GiB usable, and this answer is for 9 GiB. On 7 GiB it does not fit.";
        assert_eq!(notes, [expected]);
        let notes = said(&trace, 6 * GIB, &["pytorch"]).notes;
        assert_eq!(notes, ["What was recorded had 7 GiB usable, and this answer is for 6 GiB."]);
        assert!(said(&trace, 7 * GIB, &["pytorch"]).notes.is_empty());
    }
}
