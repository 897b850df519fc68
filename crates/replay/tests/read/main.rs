//! Files of PyTorch and of this project are read as traces; other files are refused.
#![allow(clippy::unwrap_used)]

mod files;
mod million;
