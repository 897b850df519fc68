//! What the threads of a disk do.

use super::transfer::Transfer;

#[derive(Debug)]
pub(super) enum Task {
    Transfer(Transfer),
    /// Space that was left is given back.
    GiveBack,
}
