//! How many descriptors a process may have.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises this process's limit of open files as far as it may by itself. A process that lends has a descriptor for each chunk.
pub fn raise_descriptor_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        // A refusal leaves the limit as it was: then fewer chunks are lent.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
}
