//! What a page says is what its runs did.

use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::*;
use crate::card::Card;
use crate::claim::Claim;
use crate::replay::{Run, replay};
use crate::trace::{Block, Trace, TraceBuilder};

const MARKUP: &str = "</script><img src=x onerror=alert(1)><!-- & \" '";

/// Blocks of many sizes from a few stacks, in two phases.
fn trace(steps: usize) -> Trace {
    let mut random = fastrand::Rng::with_seed(9);
    let mut trace = TraceBuilder::new(MARKUP);
    trace.phase(MARKUP);
    let mut live = Vec::new();
    for key in 0.. {
        if trace.len() >= steps {
            break;
        }
        let stack = trace.stack(vec![MARKUP.to_owned(), format!("m.py:{} f", random.u32(0..300))]);
        let bytes = random.u64(1..4 << 20);
        trace.alloc(key, Block { bytes, stream: 0, pool: 0, stack }).unwrap();
        live.push(key);
        if trace.len() == steps / 2 {
            trace.phase("serve");
        }
        if live.len() > 60 {
            trace.free(live.swap_remove(random.usize(0..live.len()))).unwrap();
        }
    }
    trace.note(MARKUP.to_owned());
    let claim = Claim { name: MARKUP.to_owned(), bytes: 5 << 20, from_step: 3, to_step: usize::MAX };
    Trace { claims: vec![claim], ..trace.finish(None) }
}

fn runs(trace: &Trace, total_bytes: u64) -> Vec<Run> {
    let card = Card { total_bytes, taken_bytes: 0, budget_bytes: None };
    let setups = ["pytorch", "pytorch:max_split_size_mb:20", "cumem", "poorwill"];
    setups.iter().map(|setup| replay(trace, &setup.parse().unwrap(), card).unwrap()).collect()
}

fn page_of(trace: &Trace, runs: &[Run]) -> String {
    page(&[PageTrace { trace, runs, answer: MARKUP, notes: &trace.notes }]).unwrap()
}

fn data_of(page: &str) -> Value {
    let (_, rest) = page.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
    let all: Value = serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap();
    all[0].clone()
}

fn step_of(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

/// The sums of differences.
fn summed(differences: &Value) -> Vec<i64> {
    let mut sum = 0;
    let add = |difference: &Value| {
        sum += difference.as_i64().unwrap();
        sum
    };
    differences.as_array().unwrap().iter().map(add).collect()
}

#[test]
fn the_policy_lets_this_style_and_this_script_run_and_no_other() {
    for (kind, text) in [("style", STYLE), ("script", SCRIPT)] {
        let hash = BASE64_STANDARD.encode(Sha256::digest(text));
        let source = format!("{kind}-src 'sha256-{hash}';");
        assert!(POLICY.contains(&source), "the page was changed; it has to be {source}");
    }
    assert!(POLICY.starts_with("default-src 'none';") && !POLICY.contains("unsafe"));
    for part in ["http:", "https:", "src=", "@import", "url(", " style=", " onclick=", "innerHTML", "eval("] {
        let is_name = |text: &str| text.replace("http://www.w3.org/2000/svg", "").contains(part);
        assert!(![STYLE, SCRIPT, BODY].into_iter().any(is_name), "{part}");
    }
}

#[test]
fn no_text_of_a_trace_becomes_markup() {
    let trace = trace(200);
    let runs = runs(&trace, 1 << 30);
    let page = page_of(&trace, &runs);
    assert!(!page.contains("<img") && !page.contains("<!-- &"));
    assert_eq!(page.matches("</script>").count(), 2, "the data and the script end once each");
    let data = data_of(&page);
    for text in
        [&data["name"], &data["answer"], &data["notes"][0], &data["claims"][0]["name"], &data["phases"][0][0]]
    {
        assert_eq!(text, MARKUP);
    }
    assert!(data["frames"].as_array().unwrap().iter().any(|frame| frame == MARKUP));
    let svg = svg(&trace, &runs, 800, 440);
    assert!(!svg.contains("<img") && svg.contains("&lt;img"));
}

#[test]
fn figures_of_a_page_are_those_of_its_runs() {
    let trace = trace(30_000);
    let large = runs(&trace, 1 << 30);
    let needed = large.iter().map(|run| run.peak.mapped_bytes).min().unwrap();
    for (runs, has_failures) in [(large, false), (runs(&trace, needed - (12 << 20)), true)] {
        let page = page_of(&trace, &runs);
        let again = page_of(&trace, &runs);
        assert!(page == again, "the same each time");
        assert!(page.len() < 3 << 20, "{}", page.len());
        let data = data_of(&page);
        let points = data["points"].as_array().unwrap();
        assert!(points.len() <= 2000);
        let live = trace.live_bytes();
        assert_eq!(summed(&data["live"]).into_iter().max(), live.iter().max().map(|most| most.cast_signed()));
        for (run, said) in runs.iter().zip(data["runs"].as_array().unwrap()) {
            let mapped = summed(&said["mapped"]);
            for (step, value) in points.iter().zip(&mapped) {
                assert_eq!(value.cast_unsigned(), run.mapped_bytes[step_of(step)]);
            }
            assert_eq!(mapped.into_iter().max().unwrap().cast_unsigned(), run.peak.mapped_bytes);
            assert_eq!(said["failure"].is_null(), run.fits());
        }
        assert_eq!(runs.iter().all(|run| !run.fits()), has_failures);

        // A run has maps as far as it goes, and each has what was mapped.
        let unit = data["unit"].as_u64().unwrap();
        let moments = data["moments"].as_array().unwrap();
        for (run, maps) in runs.iter().zip(data["maps"].as_array().unwrap()) {
            let maps = maps.as_array().unwrap();
            let steps = moments.iter().map(|moment| step_of(&moment[0]));
            assert_eq!(maps.len(), steps.clone().filter(|step| *step < run.mapped_bytes.len()).count());
            for (map, step) in maps.iter().zip(steps) {
                // Poorwill's pool may hold a granule that is at no address.
                let elsewhere =
                    if run.setup.kind() == crate::allocators::AllocatorKind::Poorwill { 2 << 20 } else { 0 };
                let (shown, mapped) = (mapped_bytes(map, unit), run.mapped_bytes[step]);
                assert!((mapped - elsewhere..=mapped).contains(&shown), "{} {step}: {shown}", run.setup);
            }
        }
        for (holders, moment) in data["holders"].as_array().unwrap().iter().zip(moments) {
            let rows = holders["rows"].as_array().unwrap();
            let sum: u64 = rows.chunks(4).map(|row| row[1].as_u64().unwrap()).sum();
            let step = step_of(&moment[0]);
            assert_eq!(sum + holders["rest"][1].as_u64().unwrap(), live[step]);
        }
    }
}

/// What a map's numbers have of live and cached bytes.
fn mapped_bytes(map: &Value, unit: u64) -> u64 {
    let mut numbers = map.as_array().unwrap().iter().map(|number| number.as_i64().unwrap());
    let mut sum = 0;
    while numbers.next().is_some() {
        for _ in 0..numbers.nth(2).unwrap() {
            let (kind, size) = (numbers.next().unwrap(), numbers.next().unwrap());
            sum += if kind == 1 { 0 } else { size };
            if kind < 0 {
                sum += numbers.next().unwrap();
                numbers.nth(1).unwrap();
            }
        }
    }
    u64::try_from(sum).unwrap() * unit
}

#[test]
fn a_trace_without_steps_has_a_page_and_a_picture() {
    let trace = Trace { name: "nothing".to_owned(), ..Trace::default() };
    for runs in [runs(&trace, 1 << 30), Vec::new()] {
        let data = data_of(&page_of(&trace, &runs));
        assert_eq!((&data["steps"], data["maps"].as_array().unwrap().len()), (&0.into(), runs.len()));
        assert!(svg(&trace, &runs, 0, 0).ends_with("</svg>\n"));
    }
}

/// Elements opened and closed in order, quoted attributes, no bare `&`.
#[test]
fn pictures_are_well_formed_and_the_same_each_time() {
    let trace = trace(9000);
    for total_bytes in [40 << 20, 1 << 30, 1 << 40] {
        let runs = runs(&trace, total_bytes);
        for (width, height) in [(0, 0), (400, 300), (1200, 500), (u32::MAX, u32::MAX)] {
            let svg = svg(&trace, &runs, width, height);
            assert_eq!(svg, super::svg(&trace, &runs, width, height));
            let mut open = Vec::new();
            for (at, _) in svg.match_indices('<') {
                let tag = &svg[at + 1..];
                let tag = &tag[..tag.find('>').unwrap()];
                assert!(!tag.contains('<') && tag.matches('"').count().is_multiple_of(2), "{tag}");
                if let Some(name) = tag.strip_prefix('/') {
                    assert_eq!(open.pop(), Some(name));
                } else if !tag.ends_with('/') {
                    open.push(tag.split(' ').next().unwrap());
                }
            }
            assert!(open.is_empty() && svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{open:?}");
            for (at, _) in svg.match_indices('&') {
                let entities = ["&amp;", "&lt;", "&gt;", "&quot;"];
                assert!(entities.iter().any(|entity| svg[at..].starts_with(entity)));
            }
        }
    }
}
