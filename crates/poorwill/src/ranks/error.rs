//! Why a group did not sleep or wake, or cannot be reached.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::protocol::GroupOp;

/// As long as the kernel allows the path of a socket to be, without the zero at its end.
pub(super) const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Why a call of this module failed.
///
/// ```
/// use poorwill::ranks::{GroupConfig, RanksError};
///
/// let error = GroupConfig::new("job", 2).and_then(|group| group.socket(2)).unwrap_err();
/// assert_eq!(error.to_string(), "`job` has no rank 2: its 2 ranks are counted from 0");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RanksError {
    /// Not a group's name.
    #[error(
        "`{name}` cannot be a group: use 1 to 64 ASCII letters, digits, `_`, `-` or `.`, and no `.` first"
    )]
    Name {
        /// Escaped and shortened.
        name: String,
    },
    /// A group without ranks.
    #[error("a group has one rank at least")]
    WorldSize,
    /// There is no such rank.
    #[error("`{name}` has no rank {rank}: its {world_size} ranks are counted from 0")]
    Rank {
        /// The rank.
        rank: u32,
        /// The group.
        name: String,
        /// Its size.
        world_size: u32,
    },
    /// A folder cannot be used.
    #[error("cannot {action} {}: choose another folder for the group, or mend this one", path.display())]
    Folder {
        /// What failed.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The kernel takes no such socket.
    #[error(
        "the socket {} has a path of {bytes} bytes, and the system allows {SOCKET_PATH_BYTES_MAX}: choose a shorter \
         folder or name",
        path.display()
    )]
    PathTooLong {
        /// Of the socket.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// The rank is taken.
    #[error("rank {rank} of `{name}` is served by another process already ({}): give each rank its own number", path.display())]
    Taken {
        /// The rank.
        rank: u32,
        /// The group.
        name: String,
        /// Its socket.
        path: PathBuf,
    },
    /// The rank cannot serve.
    #[error("cannot {action} {}", path.display())]
    Serve {
        /// What failed.
        action: &'static str,
        /// The socket or its lock.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The decision was removed, or never made.
    #[error("there is no decision {}: its coordinator has ended; ask again", path.display())]
    DecisionGone {
        /// Its folder.
        path: PathBuf,
    },
    /// The group did not do it as a whole.
    #[error(transparent)]
    Group(Box<GroupError>),
}

impl RanksError {
    pub(super) fn folder(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Folder { action, path: path.to_owned(), source }
    }
}

/// Where a group is left by a call that failed.
///
/// ```
/// use poorwill::ranks::GroupState;
///
/// assert_eq!(GroupState::Unchanged, GroupState::Unchanged);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupState {
    /// All ranks are as they were.
    Unchanged,
    /// All ranks have done it.
    Done,
    /// Not known here. The ranks find the verdict by themselves, and it is the same for all.
    Unknown,
}

/// A group that did not sleep or wake as a whole, with what each rank said.
///
/// ```
/// use poorwill::ranks::{GroupConfig, GroupSleep, GroupState, Group, RanksError};
/// use poorwill::Level;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path().to_owned();
/// let group = Group::open(&GroupConfig::new("job", 1)?.in_folder(folder))?;
/// let error = group.sleep(&GroupSleep::all(Level::One)).unwrap_err();
/// let RanksError::Group(error) = error else { return Err(error.into()) };
/// assert_eq!((error.state, error.complaints[0].0), (GroupState::Unchanged, 0));
/// println!("{error}"); // … rank 0: it does not serve …
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupError {
    /// What the group was to do.
    pub op: GroupOp,
    /// The group.
    pub name: String,
    /// Where it is left.
    pub state: GroupState,
    /// Ranks that failed, in their words.
    pub complaints: Vec<(u32, String)>,
    /// Ranks that have not confirmed that state. They come to it by themselves when they go on, or have ended.
    pub unconfirmed: Vec<u32>,
    /// What hindered the coordinator itself.
    pub problem: Option<String>,
}

impl GroupError {
    pub(super) fn of(op: GroupOp, name: &str, state: GroupState) -> Self {
        let (complaints, unconfirmed) = (Vec::new(), Vec::new());
        Self { op, name: name.to_owned(), state, complaints, unconfirmed, problem: None }
    }
}

impl std::error::Error for GroupError {}

impl fmt::Display for GroupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, name, .. } = self;
        match self.state {
            GroupState::Done => write!(f, "`{name}` did {op}, but not all is well")?,
            GroupState::Unchanged | GroupState::Unknown => write!(f, "`{name}` did not {op}")?,
        }
        for (rank, words) in &self.complaints {
            write!(f, "; rank {rank}: {words}")?;
        }
        if let Some(problem) = &self.problem {
            write!(f, "; {problem}")?;
        }
        f.write_str(match (self.state, op) {
            (GroupState::Unchanged, _) => "; all ranks are as they were",
            (GroupState::Done, GroupOp::Sleep) => "; all ranks are asleep",
            (GroupState::Done, GroupOp::Wake) => "; all ranks are awake",
            (GroupState::Unknown, _) => {
                "; the ranks find the verdict by themselves, the same for all: ask for their state"
            }
        })?;
        if !self.unconfirmed.is_empty() {
            let ranks: Vec<String> = self.unconfirmed.iter().map(u32::to_string).collect();
            write!(
                f,
                ", except that rank {} has not confirmed it: it does so when it goes on, or has ended",
                ranks.join(", ")
            )?;
        }
        Ok(())
    }
}
