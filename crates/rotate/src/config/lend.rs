//! `[lend]`: whether engines lend what they hold while they sleep, and by which broker.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use poorwill_front::settings::SectionMistakes;
use serde::Deserialize;

use super::{Lend, MemorySource, Model};
use crate::measure::DeviceDriver;

/// A socket's name has so many bytes at most.
const PATH_BYTES_MAX: usize = 107;

/// Pools of the process lend what sleeps, unless it is 0.
pub(crate) const LEND: &str = "POORWILL_LEND";

/// Whether they keep copies in the idle memory of other GPUs.
pub(crate) const PEER_COPIES: &str = "POORWILL_PEER_COPIES";

/// Where their broker is.
pub(crate) const BROKER: &str = "POORWILL_BROKER";

/// An engine that lends where the service does not count with it seems to keep its memory.
pub(super) fn check_environment(model: &Model, lend: Option<&Lend>, mistakes: &mut SectionMistakes<'_>) {
    let value = |name: &str| model.start.as_ref().and_then(|start| start.environment.get(name));
    let lends = value(LEND).is_some_and(|value| value != "0");
    let reason = "its environment has POORWILL_LEND without a [lend]: add that, or leave it out";
    mistakes.add_if(lends && lend.is_none(), reason);
    let copies = value(PEER_COPIES).is_some_and(|value| value == "1");
    let reason = "its environment has POORWILL_PEER_COPIES and no lending: add a [lend], or leave it out";
    mistakes.add_if(copies && (lend.is_none() || value(LEND).is_some_and(|value| value != "1")), reason);
    let is_other = |broker: &String| lend.is_some_and(|lend| lend.path() != Path::new(broker));
    let reason = "its environment has another POORWILL_BROKER than [lend]: leave it out";
    mistakes.add_if(value(BROKER).is_some_and(is_other), reason);
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLend {
    broker: Option<PathBuf>,
    #[serde(default)]
    peer_copies: bool,
}

impl RawLend {
    pub(super) fn checked(self, memory: &MemorySource, mistakes: &mut SectionMistakes<'_>) -> Lend {
        if let Some(path) = &self.broker {
            let (shown, length) = (path.display(), path.as_os_str().as_bytes().len());
            mistakes.add_if(
                !path.is_absolute(),
                format!(
                    "broker is `{shown}`; give the whole path, since engines run in folders of their own"
                ),
            );
            mistakes.add_if(
                length > PATH_BYTES_MAX,
                format!(
                    "broker has {length} bytes, and a socket's path {PATH_BYTES_MAX} at most; shorten it"
                ),
            );
        }
        let reason = match memory {
            MemorySource::Devices(DeviceDriver::Any | DeviceDriver::Nvml) => None,
            MemorySource::Processes { folder: Some(_), .. } => None,
            MemorySource::Processes { folder: None, .. } => Some(
                "simulated GPUs lend by a folder that their engines share; say folder = \"/some/folder\" under [memory]",
            ),
            MemorySource::Devices(_) | MemorySource::Declared { .. } => Some(
                "it is for GPUs that NVML measures, and for simulated ones; leave [lend] out, or measure otherwise",
            ),
        };
        if let Some(reason) = reason {
            mistakes.add(reason);
        }
        Lend { broker: self.broker, peer_copies: self.peer_copies }
    }
}
