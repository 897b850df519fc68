//! Waking on the host device, beside its limit.
//!
//! For the limit, as many threads copy the same bytes into equally fresh memory (a new mapping of a new
//! memfd) and digest them there. Both alternate in one process. The ratio of the medians is the result, since
//! the seconds depend on the machine, mostly on its first touch of memory.
//!
//! `cargo xtask bench wake [--size SIZE] [--rounds N] [--json]`
#![allow(unsafe_code)]

use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use memmap2::{MmapMut, MmapOptions};
use poorwill::{
    AllocRequest, Block, ByteSize, Digest, Driver, HostBuffer, Level, Pool, PoolConfig, SleepRequest,
    StreamId, Tag, Verify, WakeReport, WakeRequest,
};
use poorwill_driver::{HostConfig, HostDevice};
use poorwill_testkit::pattern;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const BLOCK_BYTES: usize = 64 << 20;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    bytes: usize,
    rounds: usize,
    json: bool,
}

fn options() -> Outcome<Options> {
    let mut options = Options { bytes: 1 << 30, rounds: 15, json: false };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--size" => {
                options.bytes =
                    usize::try_from(value()?.parse::<ByteSize>()?.0)?.next_multiple_of(BLOCK_BYTES);
            }
            "--rounds" => options.rounds = value()?.parse::<usize>()?.max(1),
            "--json" => options.json = true,
            "--bench" => {} // What `cargo bench` adds.
            _ => {
                return Err(
                    format!("unknown argument {arg}; known are --size SIZE, --rounds N, --json").into()
                );
            }
        }
    }
    Ok(options)
}

fn run() -> Outcome<()> {
    let Options { bytes, rounds, json } = options()?;
    let device = Arc::new(HostDevice::open(&HostConfig::with_capacity(2 * bytes as u64))?);
    let threads = device.info().copy_streams;
    let pool = Pool::new(Arc::clone(&device) as Arc<dyn Driver>, PoolConfig::default())?;
    let sources: Vec<Vec<u8>> =
        (0..).map(|seed| pattern::bytes(seed, BLOCK_BYTES)).take(bytes / BLOCK_BYTES).collect();
    let blocks: Vec<Block> = sources.iter().map(|source| load(&pool, source)).collect::<Outcome<_>>()?;
    let (mut wakes, mut limits) = (Vec::new(), Vec::new());
    let all = SleepRequest::all(Level::One);
    for _ in 0..rounds {
        // Each follows a sleep, so that both find free what a sleep has just released.
        pool.sleep(&all)?;
        // Every granule, as the limit digests every one.
        wakes.push(pool.wake(&WakeRequest::all().verifying(Verify::All))?);
        pool.sleep(&all)?;
        limits.push(limit(&sources, threads)?);
        pool.wake(&WakeRequest::all())?;
    }
    drop(blocks);
    report(bytes, threads, &wakes, limits, json);
    Ok(())
}

fn load(pool: &Pool, source: &[u8]) -> Outcome<Block> {
    let block = pool.alloc(&AllocRequest::new(source.len() as u64, Tag::weights()))?;
    let buffer = Arc::new(HostBuffer::from(source.to_vec()));
    pool.write(StreamId::DEFAULT, block.id, 0, buffer, 0, source.len() as u64)?.wait()?;
    Ok(block)
}

/// Seconds that `threads` threads need to copy the sources into fresh memory and to digest them there.
fn limit(sources: &[Vec<u8>], threads: usize) -> Outcome<f64> {
    let granule = usize::try_from(poorwill_driver::host::GRANULE_BYTES)?;
    let mut fresh: Vec<MmapMut> =
        sources.iter().map(|source| fresh_memory(source.len())).collect::<Outcome<_>>()?;
    let started = Instant::now();
    let share = sources.len().div_ceil(threads);
    thread::scope(|scope| {
        for (sources, fresh) in sources.chunks(share).zip(fresh.chunks_mut(share)) {
            scope.spawn(move || {
                for (source, fresh) in sources.iter().zip(fresh) {
                    for (from, to) in source.chunks(granule).zip(fresh.chunks_mut(granule)) {
                        to.copy_from_slice(from);
                        std::hint::black_box(Digest::of(to));
                    }
                }
            });
        }
    });
    Ok(started.elapsed().as_secs_f64())
}

fn fresh_memory(bytes: usize) -> Outcome<MmapMut> {
    let file = rustix::fs::memfd_create("limit", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, bytes as u64)?;
    // SAFETY: this process alone has the file, so nothing can change or truncate it under the mapping.
    Ok(unsafe { MmapOptions::new().len(bytes).map_mut(&file) }?)
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

#[allow(clippy::cast_precision_loss)] // Rates for people.
fn report(bytes: usize, threads: usize, wakes: &[WakeReport], limits: Vec<f64>, json: bool) {
    let part = |f: fn(&WakeReport) -> f64| median(wakes.iter().map(f).collect());
    let (wake_s, limit_s) = (part(|wake| wake.seconds), median(limits));
    let phases = [
        ("map_s", part(|wake| wake.phases.create_s + wake.phases.map_s)),
        ("copy_s", part(|wake| wake.phases.copy_s)),
        ("verify_s", part(|wake| wake.phases.verify_s)),
    ];
    let rate = |seconds: f64| bytes as f64 / f64::from(1 << 30) / seconds;
    let ratio = limit_s / wake_s;
    if json {
        let phases: Vec<String> =
            phases.iter().map(|(name, seconds)| format!("\"{name}\":{seconds:.6}")).collect();
        println!(
            "{{\"bytes\":{bytes},\"threads\":{threads},\"rounds\":{},\"wake_s\":{wake_s:.6},{},\"limit_s\":{limit_s:.6},\"ratio\":{ratio:.4}}}",
            wakes.len(),
            phases.join(",")
        );
    } else {
        println!("{} on {threads} threads, medians of {} rounds", ByteSize(bytes as u64), wakes.len());
        println!("  wake   {wake_s:.3} s  {:.2} GiB/s", rate(wake_s));
        phases.iter().for_each(|(name, seconds)| println!("    {name:9} {seconds:.3}"));
        println!("  limit  {limit_s:.3} s  {:.2} GiB/s", rate(limit_s));
        println!("  wake runs at {:.0} % of the limit", ratio * 100.0);
    }
}
