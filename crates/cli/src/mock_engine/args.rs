//! Arguments of `mock-engine`.

use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroU64};

use poorwill::DeviceSpec;
use poorwill_local::arguments::{positive, positive_bytes};
use poorwill_mock_engine::{Api, FaultSpec, Like};

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

    /// Device that it shares with other engines, like host:8GiB@/run/gpu [default: one of its own]
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceSpec>,

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

    /// Seed that decides when faults occur
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
}
