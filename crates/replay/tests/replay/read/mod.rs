//! Files of PyTorch and of this project are read as traces; other files are refused.

mod files;
mod million;
