//! Draws what one load maps, beside PyTorch's pool: `docs/images/churn-moe.svg`.
//!
//! `picture TRACE PICTURE` reads what `poorwill bench churn --trace` has written, and nothing else goes into the picture:
//! the same trace gives the same bytes. `cargo xtask picture` measures again and draws.
#![forbid(unsafe_code)]

mod chart;
mod peer;

use std::error::Error;
use std::process::ExitCode;
use std::{env, fs};

use poorwill_bench::churn::{ChurnEvent, ChurnProgress};

use self::chart::{Chart, Series, gib, ratio};
use self::peer::CachingPool;

const HEADER: &str = "step,event,block,bytes,live_bytes,mapped_bytes";

/// What vLLM sets while it loads a model, and the least that PyTorch takes.
const SPLIT_LIMIT_BYTES: u64 = 20 << 20;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("picture: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let paths: Vec<_> = env::args_os().skip(1).collect();
    let [trace, picture] = &paths[..] else { return Err("usage: picture TRACE PICTURE".into()) };
    fs::write(picture, drawn(&fs::read_to_string(trace)?)?)?;
    Ok(())
}

/// The picture of a trace.
fn drawn(trace: &str) -> Result<String, String> {
    let steps = parsed(trace)?;
    let progress: Vec<ChurnProgress> = steps.iter().map(|(progress, _)| *progress).collect();
    let peer_bytes = CachingPool::new(Some(SPLIT_LIMIT_BYTES)).mapped_bytes_along(&progress)?;
    let live_bytes: Vec<u64> = progress.iter().map(|progress| progress.live_bytes).collect();
    let our_bytes: Vec<u64> = steps.iter().map(|(_, mapped_bytes)| *mapped_bytes).collect();
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

/// Each step of a trace, and what was mapped after it.
fn parsed(trace: &str) -> Result<Vec<(ChurnProgress, u64)>, String> {
    let mut lines = (1..).zip(trace.lines());
    match lines.next() {
        Some((_, HEADER)) => {}
        _ => return Err(format!("line 1 is not `{HEADER}`")),
    }
    lines
        .map(|(number, line)| step(line).ok_or_else(|| format!("line {number} cannot be read: `{line}`")))
        .collect()
}

fn step(line: &str) -> Option<(ChurnProgress, u64)> {
    let fields: Vec<&str> = line.split(',').collect();
    let [step, event, block, bytes, live_bytes, mapped_bytes] = fields[..] else { return None };
    let event = match event {
        "take" => ChurnEvent::Alloc,
        "give" => ChurnEvent::Free,
        _ => return None,
    };
    let [bytes, live_bytes, mapped_bytes] =
        [bytes, live_bytes, mapped_bytes].map(|field| field.parse::<u64>().ok());
    let (step, block) = (step.parse().ok()?, block.parse().ok()?);
    Some((ChurnProgress { step, event, block, bytes: bytes?, live_bytes: live_bytes? }, mapped_bytes?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str) -> String {
        fs::read_to_string(format!("{}/../../docs/images/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    }

    #[test]
    fn the_picture_is_that_of_the_trace_beside_it() {
        let drawn = drawn(&read("churn-moe.csv")).unwrap();
        assert!(read("churn-moe.svg") == drawn, "run `cargo xtask picture`");
    }

    #[test]
    fn the_trace_is_that_of_the_measurements() {
        let steps = parsed(&read("churn-moe.csv")).unwrap();
        let peak_bytes = steps.iter().map(|(progress, _)| progress.live_bytes).max();
        assert_eq!((steps.len(), peak_bytes), (672, Some(24_251 << 20)));
        assert!(steps.iter().all(|(progress, mapped_bytes)| *mapped_bytes >= progress.live_bytes));
    }

    #[test]
    fn the_model_maps_what_was_measured() {
        // PyTorch 2.11 on an H200, as `docs/benchmarks/churn.md` has it.
        let progress: Vec<ChurnProgress> =
            parsed(&read("churn-moe.csv")).unwrap().into_iter().map(|(progress, _)| progress).collect();
        peer::assert_peak(&progress, Some(SPLIT_LIMIT_BYTES), 9628);
    }

    #[test]
    fn what_is_no_trace_is_refused_with_its_line() {
        assert!(
            drawn("").unwrap_err().contains("line 1") && drawn("step,live\n").unwrap_err().contains("line 1")
        );
        for line in ["", "1,take,0,512,512", "1,took,0,512,512,0", "1,take,0,-512,512,0", "1,take,0,1,1,1,1"]
        {
            let text = format!("{HEADER}\n1,take,0,1,1,1\n{line}\n");
            assert!(drawn(&text).unwrap_err().contains("line 3"), "{line}");
        }
    }
}
