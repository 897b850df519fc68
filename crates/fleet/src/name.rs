//! Names of fleets, nodes and models.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Most bytes of a name.
pub const NAME_BYTES_MAX: usize = 255;

/// Why a text is no name.
///
/// ```
/// use poorwill_fleet::name::{NameError, NodeName};
///
/// assert_eq!("a/b".parse::<NodeName>(), Err(NameError::Slash));
/// assert_eq!("".parse::<NodeName>(), Err(NameError::Empty));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// It is empty.
    #[error("the name is empty")]
    Empty,
    /// It is too long.
    #[error("the name has {bytes} bytes, and {NAME_BYTES_MAX} are allowed")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// It has a slash, which separates the parts of a key.
    #[error("the name has a slash, which separates the parts of a key; use another character")]
    Slash,
    /// It has blanks around it, or control characters in it.
    #[error("the name has blanks around it or control characters in it")]
    Odd,
}

fn check(text: &str) -> Result<(), NameError> {
    match text {
        "" => Err(NameError::Empty),
        _ if text.len() > NAME_BYTES_MAX => Err(NameError::TooLong { bytes: text.len() }),
        _ if text.trim() != text || text.contains(char::is_control) => Err(NameError::Odd),
        _ => Ok(()),
    }
}

fn check_without_slash(text: &str) -> Result<(), NameError> {
    check(text)?;
    if text.contains('/') { Err(NameError::Slash) } else { Ok(()) }
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $check:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Its text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                $check(text)?;
                Ok(Self(text.into()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.as_str().to_owned()
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                self.as_str()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

name! {
    /// The name of a fleet. Fleets of one etcd have different names.
    ///
    /// ```
    /// use poorwill_fleet::name::FleetName;
    ///
    /// assert!("prod".parse::<FleetName>().is_ok());
    /// assert!("prod/eu".parse::<FleetName>().is_err());
    /// ```
    FleetName, check_without_slash
}

name! {
    /// The name of a machine, unique in its fleet.
    ///
    /// ```
    /// use poorwill_fleet::name::NodeName;
    ///
    /// let node: NodeName = "gpu-17".parse()?;
    /// assert_eq!(node.as_str(), "gpu-17");
    /// # Ok::<(), poorwill_fleet::name::NameError>(())
    /// ```
    NodeName, check_without_slash
}

name! {
    /// The name of a model, as clients send it. It may have slashes; [keys](crate::keys) escape them.
    ///
    /// ```
    /// use poorwill_fleet::name::ModelName;
    ///
    /// assert!("Qwen/Qwen3-8B".parse::<ModelName>().is_ok());
    /// assert!(" qwen".parse::<ModelName>().is_err());
    /// ```
    ModelName, check
}
