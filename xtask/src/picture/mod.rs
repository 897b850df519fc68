//! `cargo xtask picture`: measures one load again and draws what it maps, beside PyTorch's pool.
//!
//! The trace is kept beside the picture that is drawn from it, and nothing else goes into the picture: the
//! same trace gives the same bytes.

mod chart;
mod peer;
mod trace;

use std::fs;

use self::chart::{Chart, Series, gib, ratio};
use self::peer::CachingPool;
use self::trace::Trace;
use crate::steps::{Failure, Step, say, workspace_root};

const TRACE: &str = "docs/images/churn-moe.csv";
const PICTURE: &str = "docs/images/churn-moe.svg";

/// What vLLM sets while it loads a model, and the least that PyTorch takes.
const SPLIT_LIMIT_BYTES: u64 = 20 << 20;

pub(crate) fn run() -> Result<(), Failure> {
    let poorwill = ["run", "--release", "--quiet", "--locked", "--package", "poorwill-cli", "--"];
    let bench = ["bench", "churn", "--load", "moe", "--seed", "0", "--trace", TRACE];
    Step::cargo([&poorwill[..], &bench].concat()).run()?;
    let picture = drawn(&read(TRACE)?)?;
    let path = workspace_root().join(PICTURE);
    fs::write(&path, picture).map_err(|cause| Failure::File { path, cause })?;
    say(&format!("xtask picture: {PICTURE}, from {TRACE}"));
    Ok(())
}

/// The picture of a trace.
fn drawn(trace: &str) -> Result<String, Failure> {
    let wrong = |problem| Failure::Content { path: TRACE.into(), problem };
    let trace = Trace::parse(trace).map_err(wrong)?;
    let peer_bytes = CachingPool::new(Some(SPLIT_LIMIT_BYTES)).mapped_bytes_along(&trace).map_err(wrong)?;
    let live_bytes: Vec<u64> = trace.lines.iter().map(|line| line.live_bytes).collect();
    let our_bytes: Vec<u64> = trace.lines.iter().map(|line| line.mapped_bytes).collect();
    let peak = |bytes: &[u64]| bytes.iter().copied().max().unwrap_or(0);
    let live_peak = peak(&live_bytes);
    let named = |name: &str, bytes: &[u64]| {
        format!("{name}: peak {}, {} live", gib(peak(bytes)), ratio(peak(bytes), live_peak))
    };
    let chart = Chart {
        title: "Loading a mixture of experts: device memory mapped for what is live".into(),
        steps: "allocations and frees of one load".into(),
        series: [
            Series {
                class: "peer",
                name: named("PyTorch, max_split_size_mb:20 (model)", &peer_bytes),
                bytes: peer_bytes,
            },
            Series { class: "ours", name: named("Poorwill", &our_bytes), bytes: our_bytes },
            Series { class: "live", name: format!("live: peak {}", gib(live_peak)), bytes: live_bytes },
        ],
    };
    Ok(chart.svg())
}

fn read(path: &str) -> Result<String, Failure> {
    let path = workspace_root().join(path);
    fs::read_to_string(&path).map_err(|cause| Failure::File { path, cause })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_is_that_of_the_trace_beside_it() {
        let drawn = drawn(&read(TRACE).unwrap()).unwrap();
        assert!(read(PICTURE).unwrap() == drawn, "run `cargo xtask picture`");
    }

    #[test]
    fn the_trace_is_that_of_the_measurements() {
        let trace = Trace::parse(&read(TRACE).unwrap()).unwrap();
        let peak_bytes = trace.lines.iter().map(|line| line.live_bytes).max();
        assert_eq!((trace.lines.len(), peak_bytes), (672, Some(24_251 << 20)));
        assert!(trace.lines.iter().all(|line| line.mapped_bytes >= line.live_bytes));
    }

    #[test]
    fn the_model_maps_what_was_measured() {
        // PyTorch 2.11 on an H200, as `docs/benchmarks/churn.md` has it.
        let trace = Trace::parse(&read(TRACE).unwrap()).unwrap();
        peer::assert_peak(&trace, Some(SPLIT_LIMIT_BYTES), 9628);
    }

    #[test]
    fn a_torn_trace_is_an_error_with_its_line() {
        let whole = read(TRACE).unwrap();
        let torn = drawn(&whole[..whole.len() - 20]).unwrap_err().to_string();
        assert!(torn.contains(TRACE) && torn.contains("line 673"), "{torn}");
    }
}
