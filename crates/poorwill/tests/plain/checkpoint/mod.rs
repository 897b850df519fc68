//! Checkpoints as they come: whole, sharded, torn, hostile, and changing under the reader.

mod differential;
mod files;
mod folders;
mod headers;
mod indexes;
mod reading;
