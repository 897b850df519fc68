//! What the threads of a disk do.

use super::file::Place;
use super::job::Job;

#[derive(Debug)]
pub(super) enum Task {
    Transfer(Job),
    Release(Place),
}
