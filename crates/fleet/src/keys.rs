//! Where a fleet's records lie in etcd.
//!
//! ```text
//! /poorwill/FLEET/nodes/NODE                  a node, under its lease
//! /poorwill/FLEET/nodes/NODE/models/MODEL     a model of its configuration, under the same lease
//! /poorwill/FLEET/placements/MODEL/NODE       what the controller wants of that node
//! /poorwill/FLEET/wishes/drains/NODE          an operator's wish
//! /poorwill/FLEET/wishes/pins/MODEL           another
//! /poorwill/FLEET/election                    who is controller
//! ```
//!
//! A model's name may have slashes. Here `/` is written as `%2F` and `%` as `%25`.

use std::fmt;

use crate::name::{FleetName, ModelName, NameError, NodeName};

/// What all keys of all fleets begin with.
pub const ROOT: &str = "/poorwill/";

/// A key of a fleet.
///
/// ```
/// use poorwill_fleet::keys::Key;
///
/// let fleet = "prod".parse()?;
/// let key = Key::Placement { model: "Qwen/Qwen3-8B".parse()?, node: "gpu-17".parse()? };
/// assert_eq!(key.in_fleet(&fleet), "/poorwill/prod/placements/Qwen%2FQwen3-8B/gpu-17");
/// assert_eq!(Key::parse(&fleet, &key.in_fleet(&fleet))?, key);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// A [`NodeRecord`](crate::records::NodeRecord).
    Node(NodeName),
    /// A [`ModelRecord`](crate::records::ModelRecord).
    Model {
        /// The node that has it.
        node: NodeName,
        /// The model.
        model: ModelName,
    },
    /// A [`Placement`](crate::records::Placement).
    Placement {
        /// The model.
        model: ModelName,
        /// The node that should have it.
        node: NodeName,
    },
    /// A [`Drain`](crate::records::Drain).
    Drain(NodeName),
    /// A [`Pin`](crate::records::Pin).
    Pin(ModelName),
    /// What candidates for the controller compete for; also the keys below it.
    Election,
}

/// Why a key is none of a fleet's.
///
/// ```
/// use poorwill_fleet::keys::Key;
///
/// let error = Key::parse(&"prod".parse()?, "/poorwill/prod/moods/gpu-17").unwrap_err();
/// assert_eq!(error.to_string(), "key `/poorwill/prod/moods/gpu-17`: no such kind of record");
/// # Ok::<(), poorwill_fleet::name::NameError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("key `{key}`: {problem}")]
pub struct KeyError {
    /// The key, as it was read.
    pub key: String,
    /// What is wrong with it.
    pub problem: KeyProblem,
}

/// What is wrong with a key.
///
/// ```
/// use poorwill_fleet::keys::KeyProblem;
///
/// assert_eq!(KeyProblem::Foreign.to_string(), "it belongs to another fleet");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyProblem {
    /// It does not begin as this fleet's keys do.
    #[error("it belongs to another fleet")]
    Foreign,
    /// Its parts are of no known kind. A newer version may have written it.
    #[error("no such kind of record")]
    Kind,
    /// A `%` in it stands before neither `2F` nor `25`.
    #[error("`%` must be followed by `2F` or `25`")]
    Escape,
    /// A part is no name.
    #[error("{0}")]
    Name(NameError),
}

impl Key {
    /// As it stands in etcd.
    #[must_use]
    pub fn in_fleet(&self, fleet: &FleetName) -> String {
        format!("{}{self}", prefix(fleet))
    }

    /// Reads a key of this fleet.
    ///
    /// # Errors
    /// It is another fleet's, of an unknown kind, or has a part that is no name.
    pub fn parse(fleet: &FleetName, key: &str) -> Result<Self, KeyError> {
        let below = key.strip_prefix(&prefix(fleet)).ok_or(KeyProblem::Foreign);
        below.and_then(Self::parse_below).map_err(|problem| KeyError { key: key.to_owned(), problem })
    }

    fn parse_below(below: &str) -> Result<Self, KeyProblem> {
        let node = |text: &str| text.parse().map_err(KeyProblem::Name);
        let parts: Vec<&str> = below.split('/').collect();
        match parts[..] {
            ["nodes", of] => Ok(Self::Node(node(of)?)),
            ["nodes", of, "models", model] => Ok(Self::Model { node: node(of)?, model: unescape(model)? }),
            ["placements", model, of] => Ok(Self::Placement { model: unescape(model)?, node: node(of)? }),
            ["wishes", "drains", of] => Ok(Self::Drain(node(of)?)),
            ["wishes", "pins", model] => Ok(Self::Pin(unescape(model)?)),
            ["election", ..] => Ok(Self::Election),
            _ => Err(KeyProblem::Kind),
        }
    }
}

/// What all keys of a fleet begin with.
///
/// ```
/// assert_eq!(poorwill_fleet::keys::prefix(&"prod".parse()?), "/poorwill/prod/");
/// # Ok::<(), poorwill_fleet::name::NameError>(())
/// ```
#[must_use]
pub fn prefix(fleet: &FleetName) -> String {
    format!("{ROOT}{fleet}/")
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => write!(f, "nodes/{node}"),
            Self::Model { node, model } => write!(f, "nodes/{node}/models/{}", escape(model)),
            Self::Placement { model, node } => write!(f, "placements/{}/{node}", escape(model)),
            Self::Drain(node) => write!(f, "wishes/drains/{node}"),
            Self::Pin(model) => write!(f, "wishes/pins/{}", escape(model)),
            Self::Election => f.write_str("election"),
        }
    }
}

fn escape(model: &ModelName) -> String {
    model.as_str().replace('%', "%25").replace('/', "%2F")
}

fn unescape(text: &str) -> Result<ModelName, KeyProblem> {
    let mut parts = text.split('%');
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (character, rest) = match (part.strip_prefix("2F"), part.strip_prefix("25")) {
            (Some(rest), _) => ('/', rest),
            (_, Some(rest)) => ('%', rest),
            _ => return Err(KeyProblem::Escape),
        };
        name.push(character);
        name.push_str(rest);
    }
    name.parse().map_err(KeyProblem::Name)
}
