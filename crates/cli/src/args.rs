//! The command line: commands, arguments, and their help texts. `docs/reference/commands.md` is generated from them.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
#[cfg(target_os = "linux")]
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use poorwill::backup::{Compress, UnknownCompress};
use poorwill::budget::Caps;
use poorwill::{ByteSize, Cap, Config, DeviceSpec, HostMemoryUse, InvalidTag, ParseSizeError, Tag};
use poorwill_bench::churn::{Load, ParseLoadError};
use poorwill_bench::sleep::{Fraction, InvalidFraction};
use poorwill_bench::{Contents, ParseContentsError};
use poorwill_mock_engine::{Api, FaultSpec, Like};
use poorwill_replay::Setup;
use poorwill_replay::cases::Case;

use crate::replay::ClaimArg;

/// GPU memory runtime for language-model engines: sleep, wake, and verified bytes.
#[derive(Debug, Parser)]
#[command(name = "poorwill", version, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Load a small generated checkpoint, put it to sleep, wake it and verify every tensor; then measure large loads
    ///
    /// Needs no GPU. The checkpoint is a mixture of experts in a temporary folder. The large loads only allocate and
    /// free, as loading a large model does.
    Demo(DemoArgs),
    /// Load safetensors files, put them to sleep, wake them, and verify every tensor
    #[command(alias = "nap")]
    Verify(VerifyArgs),
    /// Take processes off their GPUs, so that engines that sleep leave nothing there, or put them back
    ///
    /// All processes that are named are one set: all go, or none. They are another program's, and run on without their
    /// devices. Let them sleep first. New work waits until they are back, but the driver ends a process that looks at a
    /// stream or an event meanwhile.
    #[cfg(target_os = "linux")]
    Hibernate(HibernateArgs),
    /// Report the devices, the sources and limits of their memory, what an engine may use, and likely problems
    Doctor(DoctorArgs),
    /// Run a benchmark
    Bench(BenchArgs),
    /// Say what recorded allocations would need: with any allocator, on any card, without a GPU
    Replay(ReplayArgs),
    /// Share GPUs between many models: run the rotation service, or control one that runs
    #[cfg(target_os = "linux")]
    Rotate(RotateArgs),
    /// Serve the models of many rotations at one address: route each request to a node that has its model
    ///
    /// The nodes are rotations with [fleet] in their configuration. Any number of routers run side by side. One of them
    /// is elected to place models on nodes.
    #[cfg(target_os = "linux")]
    Route(RouteArgs),
    /// Look at a fleet of rotations, or say what its controller should do
    #[cfg(target_os = "linux")]
    Fleet(FleetArgs),
    /// Print completions for a shell
    Completions(CompletionsArgs),
    /// Print the man page, or write the page of every command to a folder
    Man(ManArgs),
    /// Serve a mock engine with vLLM's HTTP paths, in host memory
    #[command(hide = true)]
    MockEngine(MockEngineArgs),
    /// Print the command reference as Markdown
    #[command(hide = true)]
    Reference,
}

impl Args {
    /// `words` are the arguments without the program's name.
    pub(crate) fn read(words: &[OsString]) -> Result<Self, clap::Error> {
        let read = || {
            let program = OsString::from("poorwill");
            let matches =
                with_usages(Self::command()).try_get_matches_from([&program].into_iter().chain(words))?;
            Self::from_arg_matches(&matches)
        };
        let args = read().map_err(|error| with_usage(error, words))?;
        let budget = args.command.budget_error().map(|message| (ErrorKind::ValueValidation, message));
        match budget.or_else(|| args.command.rotate_error()) {
            None => Ok(args),
            Some((kind, message)) => {
                let mut command = chosen(words);
                let name = command.get_bin_name().unwrap_or("poorwill").to_owned();
                Err(command.error(kind, format!("`{name}`: {message}")))
            }
        }
    }
}

/// clap leaves the usage out where a value is wrong, and with it the command's name.
fn with_usage(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    if error.use_stderr() && error.get(ContextKind::Usage).is_none() {
        error.insert(ContextKind::Usage, ContextValue::StyledStr(chosen(words).render_usage()));
    }
    error
}

/// The command that these words name.
fn chosen(words: &[OsString]) -> clap::Command {
    let mut command = with_usages(Args::command());
    // Names of subcommands then begin with those of their parents.
    command.build();
    for word in words {
        if let Some(next) = command.find_subcommand(word).cloned() {
            command = next;
        }
    }
    command
}

/// Sets the usages that clap cannot derive.
pub(crate) fn with_usages(command: clap::Command) -> clap::Command {
    #[cfg(target_os = "linux")]
    let command = command.mut_subcommands(with_config_usage);
    command
}

/// Shows `--config` as required: clap requires no option that may also stand before the subcommand.
#[cfg(target_os = "linux")]
fn with_config_usage(rotate: clap::Command) -> clap::Command {
    if rotate.get_name() != "rotate" {
        return rotate;
    }
    let usage = |command: clap::Command| {
        let config = match command.get_name() {
            "init" | "import" => "[--config <FILE>]",
            _ => "--config <FILE>",
        };
        let names = command.get_positionals().filter_map(clap::Arg::get_value_names).flatten();
        let names: String = names.map(|name| format!(" <{name}>")).collect();
        let usage = format!("poorwill rotate {} {config} [OPTIONS]{names}", command.get_name());
        command.override_usage(usage)
    };
    rotate.mut_subcommands(usage).override_usage(
        "poorwill rotate --config <FILE> [OPTIONS] [COMMAND]\n       poorwill rotate --demo [OPTIONS]",
    )
}

/// The old names in a command line, which work for one release, each with its new name.
pub(crate) fn old_names(words: &[OsString]) -> Vec<(&'static str, &'static str)> {
    // No option stands before a command.
    let (command, rest) = match words {
        [help, command, ..] if help == "help" => (command, &[][..]),
        [command, rest @ ..] => (command, rest),
        [] => return Vec::new(),
    };
    let has = |option: &str| {
        let name = |word: &str| word.split('=').next() == Some(option);
        rest.iter().any(|word| name(&word.to_string_lossy()))
    };
    match command.to_str() {
        Some("nap") => vec![("nap", "verify")],
        Some("rotate") if has("--lasts") => vec![("--lasts", "--duration")],
        Some("mock-engine") if has("--lie") => vec![("--lie", "--fault")],
        _ => Vec::new(),
    }
}

impl Command {
    fn rotate_error(&self) -> Option<(ErrorKind, String)> {
        #[cfg(target_os = "linux")]
        if let Self::Rotate(args) = self {
            let missing = |message: &str| Some((ErrorKind::MissingRequiredArgument, message.to_owned()));
            let conflict = |message: &str| Some((ErrorKind::ArgumentConflict, message.to_owned()));
            return match (&args.command, args.demo, &args.config) {
                (Some(_), true, _) => {
                    conflict("--demo starts its own rotation; leave --demo away to control one that runs")
                }
                (Some(command), false, None) if !command.writes_config() => {
                    missing("--config FILE is needed: the configuration of the rotation that runs")
                }
                (None, true, Some(_)) => conflict("--demo has its own configuration; leave --config away"),
                (None, false, None) => missing("--config FILE is needed, or --demo"),
                _ => None,
            };
        }
        None
    }

    /// A budget that names devices, but not the one in use.
    fn budget_error(&self) -> Option<String> {
        let (budget, device) = match self {
            Self::Demo(args) => (&args.budget, args.device.clone().unwrap_or(DeviceSpec::host())),
            Self::Verify(args) => (&args.budget, args.device.clone()),
            Self::Bench(BenchArgs { bench: Bench::Churn(args) }) => (&args.budget, args.device.clone()),
            Self::Bench(BenchArgs { bench: Bench::Sleep(args) }) => (&args.budget, args.device.clone()),
            #[cfg(target_os = "linux")]
            Self::Bench(BenchArgs { bench: Bench::Offload(args) }) => (&args.budget, args.device.clone()),
            #[cfg(target_os = "linux")]
            Self::Bench(BenchArgs { bench: Bench::Load(args) }) => (&args.budget, args.device.clone()),
            #[cfg(target_os = "linux")]
            Self::Rotate(_) | Self::Route(_) | Self::Fleet(_) | Self::Hibernate(_) => return None,
            Self::Doctor(_) | Self::Replay(_) | Self::Completions(_) => return None,
            Self::Man(_) | Self::MockEngine(_) | Self::Reference => {
                return None;
            }
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

/// Options of every command that uses device memory.
#[derive(Debug, clap::Args)]
pub(crate) struct BudgetArgs {
    /// Most device memory to use: bytes, like 20GiB, or a share of the memory for this process, like 0.92
    #[arg(long, value_name = "BUDGET", allow_hyphen_values = true)]
    budget: Option<Caps>,

    /// Most host memory for backups and other copies, like 64GiB; control groups and free memory also limit it
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    host_budget: Option<ByteSize>,

    /// Do not page-lock host memory: slower; for machines where host memory is short, or shared with the GPU
    #[arg(long)]
    pageable: bool,
}

impl BudgetArgs {
    pub(crate) fn config(&self, device: &DeviceSpec) -> Config {
        let cap = self.budget.as_ref().and_then(|caps| caps.of(device));
        let limit_bytes = self.host_budget.map(|size| size.0);
        let host_memory = HostMemoryUse::default().limited_to(limit_bytes).left_pageable(self.pageable);
        Config::on(device.clone()).within(cap).backing_up_in(host_memory)
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Device to use: host, host:SIZE, cuda:N [default: host:4GiB, and host:64GiB for the large loads]
    ///
    /// On a smaller device the sizes of the large loads are divided by a power of two.
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceSpec>,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    /// Files in the safetensors format, or folders of them
    #[arg(required = true, value_name = "CHECKPOINT")]
    pub(crate) checkpoints: Vec<PathBuf>,

    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// How many times to sleep and wake
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..),
        allow_negative_numbers = true)]
    pub(crate) cycles: u32,

    /// Sleep level: 1 keeps the weights in host memory, 2 drops them and reads the files again
    #[arg(long, value_name = "LEVEL", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) level: u8,

    /// Most memory to map on the device, like 24GiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) limit: Option<ByteSize>,

    /// Back up the weights in the background first, so that the first sleep copies nothing
    #[arg(long)]
    pub(crate) prepare: bool,

    /// Take this process off its device after each sleep, by a helper, and put it back before the wake
    #[cfg(target_os = "linux")]
    #[arg(long)]
    pub(crate) hibernate: bool,

    /// Size of a key-value cache beside the weights, like 2GiB
    #[arg(long, value_name = "SIZE", default_value = "0", allow_hyphen_values = true)]
    pub(crate) kv_cache: ByteSize,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `hibernate` does instead of hibernating.
#[cfg(target_os = "linux")]
const INSTEAD: [&str; 5] = ["resume", "state", "inspect", "recover", "serve"];

#[cfg(target_os = "linux")]
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct HibernateArgs {
    /// Process of the set; may be repeated
    #[arg(long = "pid", value_name = "PID", required_unless_present_any = ["recover", "serve"],
        conflicts_with_all = ["recover", "serve"], value_parser = clap::value_parser!(u32).range(1..),
        allow_negative_numbers = true)]
    pub(crate) pids: Vec<u32>,

    /// Put the processes back
    #[arg(long, conflicts_with_all = ["state", "inspect", "recover", "serve"])]
    pub(crate) resume: bool,

    /// Print where each process stands
    #[arg(long, conflicts_with_all = ["inspect", "recover", "serve"])]
    pub(crate) state: bool,

    /// Print what each process holds and what hinders it, and change nothing
    #[arg(long, conflicts_with_all = ["recover", "serve"])]
    pub(crate) inspect: bool,

    /// Bring back what commands and helpers have left that were killed
    #[arg(long, conflicts_with = "serve")]
    pub(crate) recover: bool,

    /// Stay, and take requests from standard input, one JSON object a line, until its end or SIGTERM
    #[arg(long, conflicts_with = "json")]
    pub(crate) serve: bool,

    /// How long to wait for work that a process has queued, like 5s or 500ms
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time, conflicts_with_all = INSTEAD)]
    pub(crate) wait_max: Duration,

    /// Most host memory to take, like 8GiB; what the system has left limits it, too
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, conflicts_with_all = INSTEAD)]
    pub(crate) host_max: Option<ByteSize>,

    /// Go on where nothing says whether the GPUs have space for the processes again: without space they are lost
    #[arg(long, conflicts_with_all = ["state", "inspect", "recover", "serve"])]
    pub(crate) without_space_check: bool,

    /// How many of NCCL's communicators each process has suspended; others are refused, since they lose the process
    #[arg(long, value_name = "COUNT", default_value_t = 0, conflicts_with_all = INSTEAD)]
    pub(crate) suspended_communicators: usize,

    /// Folder where processes of the host device are registered, instead of NVIDIA's GPUs
    #[arg(long, value_name = "FOLDER")]
    pub(crate) processes: Option<PathBuf>,

    /// Folder of the journal [default: $XDG_RUNTIME_DIR/poorwill/hibernate, or /tmp/poorwill-UID/hibernate]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) journal: Option<PathBuf>,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Report this device only, beside the host: host, host:SIZE, cuda:N [default: all]
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceSpec>,

    /// Most memory to use of each device: bytes, like 20GiB, or a share, like 0.92, or one each, like
    /// cuda:0=20GiB,cuda:1=0.92
    #[arg(long, value_name = "BUDGET", allow_hyphen_values = true)]
    pub(crate) budget: Option<Caps>,

    /// Memory that an engine needs before its key-value cache, like weights=16GiB; may be repeated
    ///
    /// The report has the rest for the cache. Claims that do not fit into the budget are refused.
    #[arg(long = "claim", value_name = "NAME=SIZE", value_parser = claim)]
    pub(crate) claims: Vec<(Tag, u64)>,

    /// Open and measure GPUs for so long, like 30s [default: 7s]
    #[arg(long, value_name = "TIME", value_parser = positive_time)]
    pub(crate) timeout: Option<Duration>,

    /// Print one JSON object to standard output instead of tables; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) bench: Bench,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Allocate and free as loading a large model does, and compare mapped with live memory
    Churn(ChurnArgs),
    /// Put a synthetic model to sleep and wake it, compare every byte, and compare the times with the hardware's limits
    Sleep(SleepArgs),
    /// Keep layers in host memory, read them in place or prefetch them for each pass, and compare with link and compute
    /// times
    #[cfg(target_os = "linux")]
    Offload(OffloadArgs),
    /// Load a checkpoint into host memory; compare the time with direct reads, and the peak memory with its size
    #[cfg(target_os = "linux")]
    Load(LoadArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct ReplayArgs {
    /// What was recorded: PyTorch's memory snapshots, as pickles or JSON; files of `poorwill.record`; traces of `bench churn`
    #[arg(value_name = "FILE", required_unless_present = "case")]
    pub(crate) files: Vec<PathBuf>,

    /// Only what was on this device of a program that uses several, like 0
    #[arg(long, value_name = "N")]
    pub(crate) device: Option<usize>,

    /// A reported load instead of files
    #[arg(long, value_name = "NAME", conflicts_with = "files", value_parser = PossibleValuesParser::new(Case::NAMES))]
    pub(crate) case: Option<String>,

    /// An allocator with its settings, like pytorch:max_split_size_mb:20. Say it again to compare others with the first
    ///
    /// Allocators are pytorch, cumem, torch_memory_saver and poorwill. Without this option it is what was recorded, beside
    /// usual ones.
    #[arg(long, value_name = "SETUP")]
    pub(crate) setup: Vec<Setup>,

    /// All memory of the card; 80GiB if neither this option nor the file says it
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) card: Option<ByteSize>,

    /// What contexts, libraries and other programs have of it; 1GiB if neither this option nor the file says it
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) taken: Option<ByteSize>,

    /// Most that this program may map
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) budget: Option<ByteSize>,

    /// A part of the budget to lay over the page, like graphs=1.5GiB, or graphs=1.5GiB@capture from that phase on
    #[arg(long, value_name = "CLAIM", requires = "html")]
    pub(crate) claim: Vec<ClaimArg>,

    /// Write a page with the curves, the addresses and who has what to this file, for a browser
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,

    /// Write the curves to this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,

    /// Print one JSON object to standard output instead of text; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ChurnArgs {
    /// The load: experts converted with large transients, dense layers converted to half size, or experts copied to new
    /// blocks
    #[arg(long, value_name = "LOAD", value_parser = load_parser())]
    pub(crate) load: Load,

    /// Seed of the sizes that vary
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    /// How many times to load; each round first frees the one before
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) rounds: NonZeroU32,

    /// Most memory to map on the device, like 24GiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) limit: Option<ByteSize>,

    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host:64GiB")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// Write live and mapped memory after each step to this file, as comma-separated values
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct SleepArgs {
    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// How much to load: bytes, or with a unit like 24GiB [default: 1GiB on the host device, 24GiB on a GPU]
    ///
    /// It becomes whole layers of 496 MiB, or one smaller layer.
    #[arg(long, value_name = "SIZE", value_parser = positive_bytes, allow_hyphen_values = true)]
    size: Option<NonZeroU64>,

    /// Part of the load that changes before the last sleep, like 1% or 0.01
    #[arg(long, value_name = "PART", default_value = "1%", value_parser = fraction, allow_hyphen_values = true)]
    pub(crate) changed: Fraction,

    /// What to load: random bytes, of which codes save nothing; bf16 weights as of a layer, normally distributed; or
    /// zeros
    #[arg(long, value_name = "CONTENT", default_value_t, value_parser = content_parser())]
    pub(crate) content: Contents,

    /// Whether backups are stored as codes, which save three tenths of bf16 weights; auto: where the device encodes
    /// faster than its link
    #[arg(long, value_name = "WHEN", default_value_t, value_parser = compress_parser())]
    pub(crate) compress: Compress,

    /// Folder on a local disk: some sleeps move their backups there, and the wakes are timed beside a plain reader of
    /// the same file
    #[arg(long, value_name = "FOLDER")]
    pub(crate) disk: Option<PathBuf>,

    /// How many times to sleep and wake without changes
    #[arg(long, value_name = "N", default_value = "3", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) cycles: NonZeroU32,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

const HOST_LOAD_BYTES: NonZeroU64 = NonZeroU64::new(1 << 30).unwrap();

const GPU_LOAD_BYTES: NonZeroU64 = NonZeroU64::new(24 << 30).unwrap();

impl SleepArgs {
    pub(crate) fn bytes(&self) -> NonZeroU64 {
        self.size.unwrap_or(load_bytes(&self.device))
    }
}

#[cfg(target_os = "linux")]
#[derive(Debug, clap::Args)]
pub(crate) struct OffloadArgs {
    /// Device to use: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// How much to keep in host memory: bytes, or with a unit like 24GiB [default: 1GiB on the host device, 24GiB on a
    /// GPU]
    ///
    /// Each layer has whole granules.
    #[arg(long, value_name = "SIZE", value_parser = positive_bytes, allow_hyphen_values = true)]
    size: Option<NonZeroU64>,

    /// Number of layers
    #[arg(long, value_name = "N", default_value = "32", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) layers: NonZeroU32,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(target_os = "linux")]
impl OffloadArgs {
    pub(crate) fn bytes(&self) -> NonZeroU64 {
        self.size.unwrap_or(load_bytes(&self.device))
    }
}

#[cfg(target_os = "linux")]
#[derive(Debug, clap::Args)]
pub(crate) struct LoadArgs {
    /// Files in the safetensors format, or folders of them
    #[arg(required = true, value_name = "CHECKPOINT")]
    pub(crate) checkpoints: Vec<PathBuf>,

    /// Device that the host memory is for: host, host:SIZE, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: DeviceSpec,

    #[command(flatten)]
    pub(crate) budget: BudgetArgs,

    /// Number of concurrent readers [default: two for each core, 4 to 16]
    #[arg(long, value_name = "N", value_parser = readers, allow_negative_numbers = true)]
    pub(crate) readers: Option<NonZeroUsize>,

    /// How many times to load, and to read the files directly
    #[arg(long, value_name = "N", default_value = "4", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) rounds: NonZeroU32,

    /// Print one JSON object to standard output instead of a table; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(target_os = "linux")]
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct RotateArgs {
    #[command(subcommand)]
    pub(crate) command: Option<RotateCommand>,

    /// Configuration of the service; --demo needs none, and init and import write it, or else to standard output
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) config: Option<PathBuf>,

    /// Start three mock engines, send them traffic, and serve the status page; needs no GPU
    #[arg(long)]
    pub(crate) demo: bool,

    /// How long the demo sends traffic, with a unit, like 60s or 2m
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = positive_time)]
    duration: Duration,

    /// Old name of --duration
    #[arg(long, value_name = "TIME", hide = true, value_parser = positive_time,
        conflicts_with = "duration")]
    lasts: Option<Duration>,

    /// Keep the engines running when the service ends; the next service finds them
    #[arg(long)]
    pub(crate) keep_engines: bool,

    /// Print the result as one JSON object to standard output; the service logs JSON lines to standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[cfg(target_os = "linux")]
impl RotateArgs {
    pub(crate) fn duration(&self) -> Duration {
        self.lasts.unwrap_or(self.duration)
    }
}

/// Commands to a rotation that runs, or about its configuration.
#[cfg(target_os = "linux")]
#[derive(Debug, Subcommand)]
pub(crate) enum RotateCommand {
    /// Write a first configuration, from the engines that run and the GPUs; changes no engine
    ///
    /// A file that exists is not replaced. API keys in command lines are left out.
    Init,
    /// Write the configuration that a llama-swap configuration becomes
    ///
    /// What has no counterpart is in comments, and on standard error. A file that exists is not replaced.
    Import {
        /// llama-swap's YAML file
        #[arg(value_name = "YAML")]
        file: PathBuf,
    },
    /// Check a configuration and this machine for it; starts no engine
    Check,
    /// Show the state of every model and GPU
    Status,
    /// Wake a model
    Wake {
        /// Name or alias of the model
        model: String,
    },
    /// Put a model to sleep
    Sleep {
        /// Name or alias of the model
        model: String,
    },
    /// Put a model to sleep, and take its engine's processes off their GPUs
    Hibernate {
        /// Name or alias of the model
        model: String,
    },
    /// Stop a model's engine, and start it again if it was running
    Restart {
        /// Name or alias of the model
        model: String,
    },
    /// Keep a model awake
    Pin {
        /// Name or alias of the model
        model: String,
        /// Unpin it
        #[arg(long)]
        off: bool,
    },
    /// Read the configuration again, without dropping a request
    Reload,
    /// Choose a profile: its names come before all others in clients' requests
    Profile {
        /// Name of the profile
        #[arg(required_unless_present = "off")]
        profile: Option<String>,
        /// Choose none
        #[arg(long, conflicts_with = "profile")]
        off: bool,
    },
    /// Put every model to sleep, wake it, and compare its answers before and after
    Validate {
        /// Number of prompts for each model, before and after
        #[arg(long, value_name = "N", default_value = "30", value_parser = positive, allow_negative_numbers = true)]
        requests: NonZeroU32,
    },
}

#[cfg(target_os = "linux")]
impl RotateCommand {
    /// Whether `--config` names a file to be written.
    fn writes_config(&self) -> bool {
        matches!(self, Self::Init | Self::Import { .. })
    }
}

#[cfg(target_os = "linux")]
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct RouteArgs {
    /// Configuration of the router
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,

    /// Run only this part: the front without a candidate for the controller, or the candidate without a front
    #[arg(long, value_name = "PART")]
    pub(crate) only: Option<Part>,

    /// Log JSON lines to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

/// A part of a router.
#[cfg(target_os = "linux")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    Front,
    Controller,
}

#[cfg(target_os = "linux")]
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct FleetArgs {
    #[command(subcommand)]
    pub(crate) command: Option<FleetCommand>,

    /// Start an etcd, three nodes with mock engines and two routers, send traffic, and kill a node; needs no GPU
    #[arg(long)]
    pub(crate) demo: bool,

    /// How long the demo sends traffic, with a unit, like 60s or 2m
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = positive_time)]
    pub(crate) duration: Duration,

    /// Configuration of a router of the fleet
    #[arg(long, value_name = "FILE", global = true, required = false, default_value = "fleet.toml")]
    pub(crate) config: PathBuf,

    /// Print the result as one JSON object to standard output
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// Commands about a fleet.
#[cfg(target_os = "linux")]
#[derive(Debug, Subcommand)]
pub(crate) enum FleetCommand {
    /// Show the nodes, and every model on them
    Status,
    /// Have a node's models go elsewhere, as before work on the machine
    Drain {
        /// Name of the node
        node: String,
        /// Let it take models again
        #[arg(long)]
        off: bool,
        /// The reason, for people
        #[arg(long, value_name = "TEXT", default_value = "")]
        why: String,
        /// End the drain by itself after this time
        #[arg(long = "for", value_name = "TIME", value_parser = lease_time, conflicts_with = "off")]
        lasts: Option<Duration>,
    },
    /// Keep a model awake
    Pin {
        /// Name of the model
        model: String,
        /// On how many nodes
        #[arg(long, value_name = "N", default_value = "1", value_parser = positive)]
        copies: NonZeroU32,
        /// Only on these nodes
        #[arg(long = "node", value_name = "NODE")]
        nodes: Vec<String>,
        /// Unpin it
        #[arg(long, conflicts_with_all = ["copies", "nodes"])]
        off: bool,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct MockEngineArgs {
    /// Address to listen on; the port chosen for 0 is on standard output
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: SocketAddr,

    /// Name of the served model
    #[arg(long, value_name = "NAME")]
    pub(crate) model: String,

    /// Memory while awake, like 256MiB
    #[arg(long, value_name = "SIZE", value_parser = positive_bytes, allow_hyphen_values = true)]
    pub(crate) bytes: NonZeroU64,

    /// What it still holds asleep, until its process hibernates
    #[arg(long, value_name = "SIZE", value_parser = positive_bytes, allow_hyphen_values = true)]
    pub(crate) residue: Option<NonZeroU64>,

    /// What it serves; other paths are answered with 404
    #[arg(long, value_name = "API", value_delimiter = ',', default_values_t = Api::USUAL)]
    pub(crate) serves: Vec<Api>,

    /// Whose paths it has for its operator: vllm, llama-server or ollama
    #[arg(long, value_name = "ENGINE", default_value_t = Like::Vllm)]
    pub(crate) like: Like,

    /// Tokens per second for each request
    #[arg(long, value_name = "N", default_value = "200", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) tokens_per_s: NonZeroU32,

    /// Fault to inject, with its probability, like gibberish or refuses=0.25; may be repeated
    #[arg(long = "fault", value_name = "NAME[=PROBABILITY]")]
    pub(crate) faults: Vec<FaultSpec>,

    /// Old name of --fault
    #[arg(long = "lie", value_name = "NAME[=PROBABILITY]", hide = true)]
    pub(crate) old_faults: Vec<FaultSpec>,

    /// Seed that decides when faults occur
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to complete in
    pub(crate) shell: Shell,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// Folder for one page per command, created if missing; without it the main page goes to standard output
    pub(crate) dir: Option<PathBuf>,
}

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

fn positive_bytes(text: &str) -> Result<NonZeroU64, String> {
    let size: ByteSize = text.parse().map_err(|error: ParseSizeError| error.to_string())?;
    NonZeroU64::new(size.0).ok_or_else(|| "there must be something to load; write it like 24GiB".into())
}

#[cfg(target_os = "linux")]
fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write it like 5s or 500ms"))
}

#[cfg(target_os = "linux")]
fn positive_time(text: &str) -> Result<Duration, String> {
    let time =
        humantime::parse_duration(text).map_err(|error| format!("{error}; write it like 60s or 2m"))?;
    if time.is_zero() {
        return Err("the demo has to send traffic for some time; write it like 60s or 2m".to_owned());
    }
    Ok(time)
}

/// As a lease of etcd has it.
#[cfg(target_os = "linux")]
fn lease_time(text: &str) -> Result<Duration, String> {
    let time = time(text)?;
    match time.subsec_nanos() == 0 && (2..=86_400).contains(&time.as_secs()) {
        true => Ok(time),
        false => Err("it has to be whole seconds, from 2s to 1day".to_owned()),
    }
}

fn positive(text: &str) -> Result<NonZeroU32, String> {
    text.parse().map_err(|_| format!("{} is not in 1..={}", text.escape_debug(), u32::MAX))
}

#[cfg(target_os = "linux")]
fn readers(text: &str) -> Result<NonZeroUsize, String> {
    let readers = text.parse().ok().filter(|readers: &NonZeroUsize| readers.get() <= 256);
    readers.ok_or_else(|| format!("{} is not in 1..=256", text.escape_debug()))
}

fn fraction(text: &str) -> Result<Fraction, String> {
    text.parse().map_err(|error: InvalidFraction| error.to_string())
}

fn content_parser() -> impl TypedValueParser<Value = Contents> {
    PossibleValuesParser::new(Contents::ALL.map(Contents::name))
        .try_map(|name| -> Result<_, ParseContentsError> { name.parse() })
}

fn compress_parser() -> impl TypedValueParser<Value = Compress> {
    PossibleValuesParser::new(["auto", "off", "always"])
        .try_map(|name| -> Result<_, UnknownCompress> { name.parse() })
}

fn load_parser() -> impl TypedValueParser<Value = Load> {
    PossibleValuesParser::new(Load::ALL.map(Load::name))
        .try_map(|name| -> Result<_, ParseLoadError> { name.parse() })
}
