//! What the command line accepts.

use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
#[cfg(target_os = "linux")]
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use poorwill::budget::Caps;
use poorwill::{ByteSize, Cap, Config, DeviceSpec, HostMemoryUse, InvalidTag, ParseSizeError, Tag};
use poorwill_bench::churn::{Load, ParseLoadError};
use poorwill_bench::sleep::{Fraction, InvalidFraction};
use poorwill_mock_engine::Telling;

/// GPU memory runtime for language-model engines: sleep, wake, and verified bytes.
#[derive(Debug, Parser)]
#[command(name = "poorwill", version, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write a small mixture-of-experts checkpoint to a temporary folder, load it, put it to sleep and wake it,
    /// and verify every tensor; then measure what loading large models takes
    Demo(DemoArgs),
    /// Load safetensors files, put them to sleep and wake them, and verify every tensor
    Nap(NapArgs),
    /// Say what this computer has: its devices, who says what about their memory, how much of it an engine may use,
    /// and what will get in the way
    Doctor(DoctorArgs),
    /// Measure
    Bench(BenchArgs),
    /// Have many models take turns on the same GPUs: serve them, or ask the service that does
    #[cfg(target_os = "linux")]
    Rotate(RotateArgs),
    /// Serve a mock engine, with vLLM's paths and memory of this computer
    #[command(hide = true)]
    MockEngine(MockEngineArgs),
}

impl Args {
    /// The command line, or what is wrong with it.
    pub(crate) fn read() -> Result<Self, clap::Error> {
        let args = Self::try_parse()?;
        let wrong = args.command.misplaced_budget().map(|message| (ErrorKind::ValueValidation, message));
        match wrong.or_else(|| args.command.unusable_rotation()) {
            None => Ok(args),
            Some((kind, message)) => Err(Self::command().error(kind, message)),
        }
    }
}

impl Command {
    /// What a rotation lacks, or has too much of.
    fn unusable_rotation(&self) -> Option<(ErrorKind, String)> {
        #[cfg(target_os = "linux")]
        if let Self::Rotate(args) = self {
            let missing = |words: &str| Some((ErrorKind::MissingRequiredArgument, words.to_owned()));
            let too_much = |words: &str| Some((ErrorKind::ArgumentConflict, words.to_owned()));
            return match (&args.ask, args.demo, &args.config) {
                (Some(_), true, _) => too_much("--demo starts a rotation of its own; ask without it"),
                (Some(_), false, None) => {
                    missing("--config FILE is needed: the configuration of the rotation that is asked")
                }
                (None, true, Some(_)) => {
                    too_much("--demo has a configuration of its own; leave --config away")
                }
                (None, false, None) => missing("--config FILE is needed, or --demo"),
                _ => None,
            };
        }
        None
    }

    /// What is wrong with a budget that names devices, and not the one that is used.
    fn misplaced_budget(&self) -> Option<String> {
        let (budget, device) = match self {
            Self::Demo(args) => (&args.budget, args.device.clone().unwrap_or(DeviceSpec::host())),
            Self::Nap(args) => (&args.budget, args.device.clone()),
            Self::Bench(BenchArgs { bench: Bench::Churn(args) }) => (&args.budget, args.device.clone()),
            Self::Bench(BenchArgs { bench: Bench::Sleep(args) }) => (&args.budget, args.device.clone()),
            #[cfg(target_os = "linux")]
            Self::Bench(BenchArgs { bench: Bench::Offload(args) }) => (&args.budget, args.device.clone()),
            #[cfg(target_os = "linux")]
            Self::Bench(BenchArgs { bench: Bench::Load(args) }) => (&args.budget, args.device.clone()),
            #[cfg(target_os = "linux")]
            Self::Rotate(_) => return None,
            Self::Doctor(_) | Self::MockEngine(_) => return None,
        };
        let (caps, used) = (budget.budget.as_ref()?, device.id());
        if caps.of(&device).is_some() {
            return None;
        }
        let other = caps.devices().next()?;
        Some(format!(
            "--budget names {other}, and the device is {used}; name that one with --device, or none"
        ))
    }
}

/// The dials of every command that takes memory of a device.
#[derive(Debug, clap::Args)]
pub(crate) struct Budget {
    /// Most to use of the device: bytes, like 20GiB, or a share of what it has for this process, like 0.92
    #[arg(long, value_name = "BUDGET", allow_hyphen_values = true)]
    budget: Option<Caps>,

    /// Most host memory to hold, for backups and a little for other copies, like 64GiB; control groups and free memory
    /// are limits in any case
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    host_budget: Option<ByteSize>,

    /// Do not page-lock host memory: slower, for machines where it is short, or is the GPU's own memory
    #[arg(long)]
    pageable: bool,
}

impl Budget {
    /// How a device is opened with them: whatever is said about its memory, and about the host's, goes in here.
    pub(crate) fn open(&self, device: &DeviceSpec) -> Config {
        let cap = self.budget.as_ref().and_then(|caps| caps.of(device));
        let limit_bytes = self.host_budget.map(|size| size.0);
        let host_memory = HostMemoryUse::default().limited_to(limit_bytes).left_pageable(self.pageable);
        Config::on(device.clone()).within(cap).backing_up_in(host_memory)
    }
}

/// Arguments of `poorwill demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Device to use: host, host:SIZE, cuda:N [default: host:4GiB, and host:64GiB for the large loads]
    ///
    /// On a device that is too small for the large loads they run with all sizes divided by a power of two.
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceSpec>,

    #[command(flatten)]
    pub(crate) budget: Budget,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `poorwill nap`.
#[derive(Debug, clap::Args)]
pub(crate) struct NapArgs {
    /// Files in the safetensors format, or folders of them
    #[arg(required = true, value_name = "CHECKPOINT")]
    pub(crate) checkpoints: Vec<PathBuf>,

    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: Budget,

    /// How many times to sleep and wake
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..),
        allow_negative_numbers = true)]
    pub(crate) cycles: u32,

    /// Sleep level: 1 keeps the weights in host memory, 2 drops them and reads them from the files again
    #[arg(long, value_name = "LEVEL", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) level: u8,

    /// Most memory to map on the device, like 24GiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) limit: Option<ByteSize>,

    /// Back the weights up in the background before the first sleep, so that it has nothing to copy
    #[arg(long)]
    pub(crate) prepare: bool,

    /// Size of a key-value cache to hold beside the weights, like 2GiB
    #[arg(long, value_name = "SIZE", default_value = "0", allow_hyphen_values = true)]
    pub(crate) kv_cache: ByteSize,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `poorwill doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Look at this device only, and the host device: host, host:SIZE, cuda:N [default: all]
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceSpec>,

    /// Most to use of each device: bytes, like 20GiB, a share of what it has for this process, like 0.92, or one
    /// each, like cuda:0=20GiB,cuda:1=0.92
    #[arg(long, value_name = "BUDGET", allow_hyphen_values = true)]
    pub(crate) budget: Option<Caps>,

    /// What an engine will need before its key-value cache, like weights=16GiB; may be given several times
    ///
    /// The report says what is left for the cache. A claim that does not fit into the budget is refused.
    #[arg(long = "claim", value_name = "NAME=SIZE", value_parser = claim)]
    pub(crate) claims: Vec<(Tag, u64)>,

    /// Print one JSON object instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `poorwill bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) bench: Bench,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Allocate and free as the loading of a large model does, and compare mapped with live memory
    Churn(ChurnArgs),
    /// Put a load like a model's to sleep and wake it, compare every byte, and put the times beside what the link and
    /// the driver alone take
    Sleep(SleepArgs),
    /// Keep layers in host memory and bring them to the device for each pass: read in place, and prefetched; check all
    /// that is computed, and put the times beside the link and the computing alone
    #[cfg(target_os = "linux")]
    Offload(OffloadArgs),
    /// Load a checkpoint into host memory, and put the time beside what its storage reads at best, and the memory that it
    /// takes beside its size
    #[cfg(target_os = "linux")]
    Load(LoadArgs),
}

/// Arguments of `poorwill bench churn`.
#[derive(Debug, clap::Args)]
pub(crate) struct ChurnArgs {
    /// What is loaded: experts converted with large transients, dense layers converted to half their size, or
    /// experts rearranged into new blocks while the old ones are live
    #[arg(long, value_name = "LOAD", value_parser = load_parser())]
    pub(crate) load: Load,

    /// Where sizes that vary come from
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    /// How many times to load; each frees what the one before left
    #[arg(long, value_name = "N", default_value = "1", value_parser = some, allow_negative_numbers = true)]
    pub(crate) rounds: NonZeroU32,

    /// Most memory to map on the device, like 24GiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) limit: Option<ByteSize>,

    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host:64GiB")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: Budget,

    /// Write what is live and mapped after each step to this file, as comma-separated values
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `poorwill bench sleep`.
#[derive(Debug, clap::Args)]
pub(crate) struct SleepArgs {
    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: Budget,

    /// How much to load, like 24GiB: whole layers of 496 MiB, or one that is smaller throughout [default: 1GiB on
    /// the host device, 24GiB on a GPU]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes, allow_hyphen_values = true)]
    size: Option<NonZeroU64>,

    /// Which part of the load changes before the last sleep, like 1% or 0.01
    #[arg(long, value_name = "PART", default_value = "1%", value_parser = part, allow_hyphen_values = true)]
    pub(crate) changed: Fraction,

    /// How many times to sleep and wake with nothing changed
    #[arg(long, value_name = "N", default_value = "3", value_parser = some, allow_negative_numbers = true)]
    pub(crate) cycles: NonZeroU32,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// What is loaded unless a size is given: on the host device.
const HOST_LOAD_BYTES: NonZeroU64 = NonZeroU64::new(1 << 30).unwrap();

/// The same on a GPU.
const GPU_LOAD_BYTES: NonZeroU64 = NonZeroU64::new(24 << 30).unwrap();

impl SleepArgs {
    /// How much to load.
    pub(crate) fn bytes(&self) -> NonZeroU64 {
        self.size.unwrap_or(load_bytes(&self.device))
    }
}

/// Arguments of `poorwill bench offload`.
#[cfg(target_os = "linux")]
#[derive(Debug, clap::Args)]
pub(crate) struct OffloadArgs {
    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: Budget,

    /// How much to keep in host memory, like 24GiB: as many whole granules as each layer's part has [default: 1GiB on
    /// the host device, 24GiB on a GPU]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes, allow_hyphen_values = true)]
    size: Option<NonZeroU64>,

    /// Of how many layers it is
    #[arg(long, value_name = "N", default_value = "32", value_parser = some, allow_negative_numbers = true)]
    pub(crate) layers: NonZeroU32,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(target_os = "linux")]
impl OffloadArgs {
    /// How much to keep in host memory.
    pub(crate) fn bytes(&self) -> NonZeroU64 {
        self.size.unwrap_or(load_bytes(&self.device))
    }
}

/// Arguments of `poorwill bench load`.
#[cfg(target_os = "linux")]
#[derive(Debug, clap::Args)]
pub(crate) struct LoadArgs {
    /// Files in the safetensors format, or folders of them
    #[arg(required = true, value_name = "CHECKPOINT")]
    pub(crate) checkpoints: Vec<PathBuf>,

    /// Device whose host memory it is: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: Budget,

    /// How many read at the same time [default: two for each core, 4 to 16]
    #[arg(long, value_name = "N", value_parser = readers, allow_negative_numbers = true)]
    pub(crate) readers: Option<NonZeroUsize>,

    /// How many times to load, and to read directly
    #[arg(long, value_name = "N", default_value = "4", value_parser = some, allow_negative_numbers = true)]
    pub(crate) rounds: NonZeroU32,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `poorwill rotate`.
#[cfg(target_os = "linux")]
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct RotateArgs {
    #[command(subcommand)]
    pub(crate) ask: Option<RotateAsk>,

    /// The configuration: of the service that is to run, or that runs and is asked
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) config: Option<PathBuf>,

    /// Start three mock engines, send them traffic, and show the page; needs no GPU
    #[arg(long)]
    pub(crate) demo: bool,

    /// How long the demo sends traffic
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration)]
    pub(crate) lasts: Duration,

    /// Leave the engines that were started running when the service ends; the next one finds them
    #[arg(long)]
    pub(crate) keep_engines: bool,

    /// Print one JSON object, or log lines as JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// What a rotation that runs is asked.
#[cfg(target_os = "linux")]
#[derive(Debug, Subcommand)]
pub(crate) enum RotateAsk {
    /// Say what every model and GPU is doing
    Status,
    /// Wake a model
    Wake {
        /// Its name, or an alias
        model: String,
    },
    /// Put a model to sleep
    Sleep {
        /// Its name, or an alias
        model: String,
    },
    /// Stop a model's engine, and start it again if it was up
    Restart {
        /// Its name, or an alias
        model: String,
    },
    /// Keep a model awake
    Pin {
        /// Its name, or an alias
        model: String,
        /// Let it go again
        #[arg(long)]
        off: bool,
    },
    /// Read the configuration again, without dropping a request
    Reload,
    /// Walk every model through sleep and wake, and ask it the same before and behind
    Validate {
        /// Questions to ask each, before and behind
        #[arg(long, value_name = "N", default_value = "30", value_parser = some, allow_negative_numbers = true)]
        requests: NonZeroU32,
    },
}

/// Arguments of `poorwill mock-engine`.
#[derive(Debug, clap::Args)]
pub(crate) struct MockEngineArgs {
    /// Address to listen on; the port that was taken for 0 is on standard output
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: SocketAddr,

    /// Name of the model that clients ask for
    #[arg(long, value_name = "NAME")]
    pub(crate) model: String,

    /// Memory to hold while awake, like 256MiB
    #[arg(long, value_name = "SIZE", value_parser = some_bytes, allow_hyphen_values = true)]
    pub(crate) bytes: NonZeroU64,

    /// Tokens to generate in a second for each request
    #[arg(long, value_name = "N", default_value = "200", value_parser = some, allow_negative_numbers = true)]
    pub(crate) tokens_per_s: NonZeroU32,

    /// What to do wrong, and how likely each time, like gibberish or refuses=0.25; may be given several times
    #[arg(long = "lie", value_name = "NAME[=PROBABILITY]")]
    pub(crate) lies: Vec<Telling>,

    /// Where the chance comes from that decides when
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
}

/// What is loaded unless a size is given.
fn load_bytes(device: &DeviceSpec) -> NonZeroU64 {
    match device {
        DeviceSpec::Host { .. } => HOST_LOAD_BYTES,
        _ => GPU_LOAD_BYTES,
    }
}

fn claim(text: &str) -> Result<(Tag, u64), String> {
    let (name, size) = text.split_once('=').ok_or("write it like weights=16GiB")?;
    let name = name.trim().parse().map_err(|error: InvalidTag| error.to_string())?;
    match (size.parse::<Cap>(), size.parse::<ByteSize>()) {
        (Ok(Cap::Share(_)), _) => {
            Err("a claim is a number of bytes, like weights=16GiB; shares are for --budget".into())
        }
        (_, Err(error)) => Err(error.to_string()),
        (Err(_), Ok(ByteSize(bytes))) if bytes > 0 => {
            Err(format!("without a unit it is {bytes} bytes; write it like weights=16GiB"))
        }
        (_, Ok(ByteSize(bytes))) => Ok((name, bytes)),
    }
}

fn some_bytes(text: &str) -> Result<NonZeroU64, String> {
    let size: ByteSize = text.parse().map_err(|error: ParseSizeError| error.to_string())?;
    NonZeroU64::new(size.0).ok_or_else(|| "there must be something to load; write it like 24GiB".into())
}

fn some(text: &str) -> Result<NonZeroU32, String> {
    text.parse().map_err(|_| format!("{} is not in 1..={}", text.escape_debug(), u32::MAX))
}

#[cfg(target_os = "linux")]
fn readers(text: &str) -> Result<NonZeroUsize, String> {
    let readers = text.parse().ok().filter(|readers: &NonZeroUsize| readers.get() <= 256);
    readers.ok_or_else(|| format!("{} is not in 1..=256", text.escape_debug()))
}

fn part(text: &str) -> Result<Fraction, String> {
    text.parse().map_err(|error: InvalidFraction| error.to_string())
}

fn load_parser() -> impl TypedValueParser<Value = Load> {
    PossibleValuesParser::new(Load::ALL.map(Load::name))
        .try_map(|name| -> Result<_, ParseLoadError> { name.parse() })
}
