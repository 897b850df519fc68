//! Names of devices.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use poorwill_core::{ByteSize, ParseSizeError};

/// Capacity of `host` without a size.
pub const HOST_CAPACITY_BYTES_DEFAULT: u64 = 32 << 30;

/// A device by name: `host`, `host:8GiB`, `host:8GiB@/run/user/1000/gpu`, `cuda:0`.
///
/// ```
/// use poorwill::DeviceSpec;
///
/// # fn main() -> Result<(), poorwill::ParseDeviceError> {
/// assert_eq!("host:1GiB".parse::<DeviceSpec>()?, DeviceSpec::host_of(1 << 30));
/// assert_eq!("cuda:1".parse::<DeviceSpec>()?.id(), "cuda:1");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceSpec {
    /// The host device.
    Host {
        /// Capacity in bytes. Only written memory takes memory of the machine.
        capacity_bytes: u64,
        /// A folder of its own: all processes that name it have one device together.
        shared_in: Option<PathBuf>,
    },
    /// An NVIDIA GPU.
    Cuda {
        /// Its CUDA ordinal.
        ordinal: u32,
    },
}

impl DeviceSpec {
    /// The host device of the default size.
    #[must_use]
    pub fn host() -> Self {
        Self::host_of(HOST_CAPACITY_BYTES_DEFAULT)
    }

    /// The host device of a size, for this process alone.
    #[must_use]
    pub const fn host_of(capacity_bytes: u64) -> Self {
        Self::Host { capacity_bytes, shared_in: None }
    }

    /// Its name without a size: `host`, `cuda:0`.
    #[must_use]
    pub fn id(&self) -> String {
        match self {
            Self::Host { .. } => "host".into(),
            Self::Cuda { ordinal } => format!("cuda:{ordinal}"),
        }
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { capacity_bytes, shared_in } => {
                let short = ByteSize(*capacity_bytes).to_string().replace(' ', "");
                let exact = short.parse() == Ok(ByteSize(*capacity_bytes));
                if exact { write!(f, "host:{short}") } else { write!(f, "host:{capacity_bytes}") }?;
                shared_in.as_ref().map_or(Ok(()), |folder| write!(f, "@{}", folder.display()))
            }
            Self::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A text that names no device; the message lists valid names.
///
/// ```
/// use poorwill::DeviceSpec;
///
/// println!("{}", "cuda:zero".parse::<DeviceSpec>().unwrap_err()); // With the accepted forms.
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseDeviceError {
    /// No such kind of device.
    #[error("`{text}` names no device; known are host, host:SIZE, host:SIZE@FOLDER and cuda:N")]
    Unknown {
        /// The text.
        text: String,
    },
    /// AMD GPUs are not supported yet.
    #[error("`{text}`: AMD GPUs are not supported yet; use host or cuda:N")]
    Hip {
        /// The text.
        text: String,
    },
    /// The size after `host:` is invalid.
    #[error("the capacity of the host device: {0}")]
    Capacity(ParseSizeError),
}

impl From<ParseSizeError> for ParseDeviceError {
    fn from(error: ParseSizeError) -> Self {
        Self::Capacity(error)
    }
}

impl FromStr for DeviceSpec {
    type Err = ParseDeviceError;

    fn from_str(text: &str) -> Result<Self, ParseDeviceError> {
        let unknown = || ParseDeviceError::Unknown { text: text.to_owned() };
        let (kind, rest) = match text.split_once(':') {
            None => (text, None),
            Some((kind, rest)) => (kind, Some(rest)),
        };
        match (kind, rest) {
            ("host", None) => Ok(Self::host()),
            ("host", Some(rest)) => {
                let (size, folder) = match rest.split_once('@') {
                    None => (rest, None),
                    Some((_, "")) => return Err(unknown()),
                    Some((size, folder)) => (size, Some(PathBuf::from(folder))),
                };
                Ok(Self::Host { capacity_bytes: size.parse::<ByteSize>()?.0, shared_in: folder })
            }
            ("cuda", None) => Ok(Self::Cuda { ordinal: 0 }),
            ("cuda", Some(ordinal)) => Ok(Self::Cuda { ordinal: ordinal.parse().map_err(|_| unknown())? }),
            ("hip" | "rocm", _) => Err(ParseDeviceError::Hip { text: text.to_owned() }),
            _ => Err(unknown()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let host = |capacity_bytes| Ok(DeviceSpec::host_of(capacity_bytes));
        assert_eq!("host".parse(), host(HOST_CAPACITY_BYTES_DEFAULT));
        assert_eq!("host:8GiB".parse(), host(8 << 30));
        assert_eq!("host:1.5g".parse(), host(3 << 29));
        let shared_in = Some(PathBuf::from("/a/b@c"));
        let shared = DeviceSpec::Host { capacity_bytes: 1 << 30, shared_in };
        assert_eq!(shared.to_string(), "host:1GiB@/a/b@c");
        assert_eq!(shared.to_string().parse(), Ok(shared));
        assert_eq!("cuda:3".parse(), Ok(DeviceSpec::Cuda { ordinal: 3 }));
        for text in [
            "",
            "gpu",
            "host:",
            "host:8GiBs",
            "host:8GiB@",
            "host:1.5.GiB",
            "cuda:",
            "cuda:-1",
            "cuda:x",
            "HOST",
            "hip:0",
            "host 8GiB",
        ] {
            let error = text.parse::<DeviceSpec>().unwrap_err();
            assert!(error.to_string().contains(text.trim_start_matches("host:")), "{error}");
        }
        for (capacity_bytes, name) in [(3 << 29, "host:1.5GiB"), (2_000_000, "host:2000000"), (0, "host:0B")]
        {
            let spec = DeviceSpec::host_of(capacity_bytes);
            assert_eq!(spec.to_string(), name);
            assert_eq!(name.parse(), Ok(spec), "a name names the same device");
        }
    }
}
