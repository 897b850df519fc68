//! What the threads of a disk do.

use super::job::Job;

#[derive(Debug)]
pub(super) enum Task {
    Transfer(Job),
    /// Space that was left is given back.
    GiveBack,
}
