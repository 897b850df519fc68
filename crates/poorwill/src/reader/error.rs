//! Why a range is not read.

use std::io;

/// Why a range was not read; both with the byte of the file.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// The file ends here.
    End(u64),
    /// The system failed here.
    Failed(u64, io::Error),
}
