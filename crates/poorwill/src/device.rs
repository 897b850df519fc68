//! Names of devices.

use std::fmt;
use std::str::FromStr;

use poorwill_core::{ByteSize, ParseSizeError};

/// Capacity of `host` without a size.
pub const HOST_CAPACITY_BYTES_DEFAULT: u64 = 32 << 30;

/// A device by name: `host`, `host:8GiB`, `cuda:0`.
///
/// ```
/// use poorwill::DeviceSpec;
///
/// # fn main() -> Result<(), poorwill::ParseDeviceError> {
/// assert_eq!("host:1GiB".parse::<DeviceSpec>()?, DeviceSpec::Host { capacity_bytes: 1 << 30 });
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
        Self::Host { capacity_bytes: HOST_CAPACITY_BYTES_DEFAULT }
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
            Self::Host { capacity_bytes } => {
                let short = ByteSize(*capacity_bytes).to_string().replace(' ', "");
                let exact = short.parse() == Ok(ByteSize(*capacity_bytes));
                if exact { write!(f, "host:{short}") } else { write!(f, "host:{capacity_bytes}") }
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
    #[error("`{text}` names no device; known are host, host:SIZE and cuda:N")]
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
            ("host", Some(size)) => Ok(Self::Host { capacity_bytes: size.parse::<ByteSize>()?.0 }),
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
        let host = |capacity_bytes| Ok(DeviceSpec::Host { capacity_bytes });
        assert_eq!("host".parse(), host(HOST_CAPACITY_BYTES_DEFAULT));
        assert_eq!("host:8GiB".parse(), host(8 << 30));
        assert_eq!("host:1.5g".parse(), host(3 << 29));
        assert_eq!("cuda:3".parse(), Ok(DeviceSpec::Cuda { ordinal: 3 }));
        for text in [
            "",
            "gpu",
            "host:",
            "host:8GiBs",
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
            let spec = DeviceSpec::Host { capacity_bytes };
            assert_eq!(spec.to_string(), name);
            assert_eq!(name.parse(), Ok(spec), "a name names the same device");
        }
    }
}
