//! Arguments of `replay`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::PossibleValuesParser;
use poorwill::ByteSize;
use poorwill_replay::Setup;
use poorwill_replay::cases::Case;

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

    /// All memory of the card. Without this option it is the recorder's, or what the file shows where memory lacked, or
    /// else 80GiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) card: Option<ByteSize>,

    /// What contexts, libraries and other programs have of it; 1GiB if neither this option nor the file says it
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) taken: Option<ByteSize>,

    /// Most that this program may map
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) budget: Option<ByteSize>,

    /// Memory that the load takes beside its allocator, like graphs=1.5GiB, or graphs=1.5GiB@capture from that phase on
    #[arg(long, value_name = "CLAIM")]
    pub(crate) claim: Vec<ClaimArg>,

    /// Write a page with the curves, the addresses and who has what to this file, for a browser. Ranks are chosen there
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,

    /// Write the curves to this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,

    /// Print one JSON object to standard output instead of text; messages still go to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

/// A part of a budget, from a text such as `graphs=1.5GiB` or `graphs=1.5GiB@capture`.
#[derive(Debug, Clone)]
pub(crate) struct ClaimArg {
    pub(super) name: String,
    pub(super) bytes: ByteSize,
    pub(super) phase: Option<String>,
}

impl FromStr for ClaimArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text.split_once('=').ok_or("say NAME=SIZE, or NAME=SIZE@PHASE")?;
        let (size, phase) = rest.split_once('@').map_or((rest, None), |(size, phase)| (size, Some(phase)));
        let bytes = size.parse::<ByteSize>().map_err(|error| error.to_string())?;
        Ok(Self { name: name.to_owned(), bytes, phase: phase.map(str::to_owned) })
    }
}
