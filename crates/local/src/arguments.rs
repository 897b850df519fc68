//! Arguments that several commands have, and readers of their values. A reader's error says how to write the value.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use poorwill::budget::Caps;
use poorwill::{ByteSize, Config, DeviceSpec, HostMemoryUse, ParseSizeError};

/// Options of every command that uses device memory.
#[derive(Debug, clap::Args)]
pub struct BudgetArgs {
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

    pub(crate) fn caps(&self) -> Option<&Caps> {
        self.budget.as_ref()
    }
}

/// A device that a budget names instead of this one.
pub(crate) fn other_device<'a>(caps: Option<&'a Caps>, device: &DeviceSpec) -> Option<&'a str> {
    caps.filter(|caps| caps.of(device).is_none())?.devices().next()
}

const HOST_LOAD_BYTES: NonZeroU64 = NonZeroU64::new(1 << 30).unwrap();

const GPU_LOAD_BYTES: NonZeroU64 = NonZeroU64::new(24 << 30).unwrap();

pub(crate) fn load_bytes(device: &DeviceSpec) -> NonZeroU64 {
    match device {
        DeviceSpec::Host { .. } => HOST_LOAD_BYTES,
        _ => GPU_LOAD_BYTES,
    }
}

/// A size above nothing, like `24GiB`.
pub fn positive_bytes(text: &str) -> Result<NonZeroU64, String> {
    let size: ByteSize = text.parse().map_err(|error: ParseSizeError| error.to_string())?;
    NonZeroU64::new(size.0).ok_or_else(|| "there must be something to load; write it like 24GiB".into())
}

/// A time, like `500ms`.
pub fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write it like 5s or 500ms"))
}

/// A time above nothing, like `60s`.
pub fn positive_time(text: &str) -> Result<Duration, String> {
    let time =
        humantime::parse_duration(text).map_err(|error| format!("{error}; write it like 60s or 2m"))?;
    if time.is_zero() {
        return Err("it has to be more than no time; write it like 60s or 2m".to_owned());
    }
    Ok(time)
}

/// A number above nothing.
pub fn positive(text: &str) -> Result<NonZeroU32, String> {
    text.parse().map_err(|_| format!("{} is not in 1..={}", text.escape_debug(), u32::MAX))
}
