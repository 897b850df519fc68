//! Lines of bounded length from a stream.

use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Why there is no line.
#[derive(Debug, thiserror::Error)]
pub(super) enum LineError {
    #[error("a line of more than {bytes_max} bytes")]
    TooLong { bytes_max: usize },
    #[error("it hung up within a line")]
    Torn,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Cuts what a stream brings into lines.
#[derive(Debug)]
pub(super) struct Lines {
    bytes_max: usize,
    held: Vec<u8>,
}

impl Lines {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { bytes_max, held: Vec::new() }
    }

    /// Whether more came than the lines that were taken.
    pub(super) fn holds_more(&self) -> bool {
        !self.held.is_empty()
    }

    /// The next line, without its end. `None`: the stream has ended.
    pub(super) fn next(&mut self, stream: &mut impl Read) -> Result<Option<Vec<u8>>, LineError> {
        let mut searched = 0;
        loop {
            if let Some(at) = self.held[searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.held.split_off(searched + at + 1);
                let mut line = std::mem::replace(&mut self.held, rest);
                line.pop();
                return Ok(Some(line));
            }
            searched = self.held.len();
            if searched > self.bytes_max {
                return Err(LineError::TooLong { bytes_max: self.bytes_max });
            }
            let mut part = [0; 4096];
            match stream.read(&mut part) {
                Ok(0) if self.held.is_empty() => return Ok(None),
                Ok(0) => return Err(LineError::Torn),
                Ok(bytes) => self.held.extend_from_slice(&part[..bytes]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Reads until a time.
#[derive(Debug)]
pub(super) struct Until<'s> {
    pub(super) stream: &'s UnixStream,
    pub(super) end: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(bytes).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => ErrorKind::TimedOut.into(),
            _ => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_and_bounded() {
        let (mut lines, mut text) = (Lines::new(5000), &b"one\n\ntwo\nto"[..]);
        for line in ["one", "", "two"] {
            assert_eq!(lines.next(&mut text).unwrap(), Some(line.into()));
        }
        assert!(matches!(lines.next(&mut text), Err(LineError::Torn)));
        assert!(matches!(Lines::new(9).next(&mut &b""[..]), Ok(None)));
        let mut endless = io::repeat(b'x');
        assert!(matches!(Lines::new(5000).next(&mut endless), Err(LineError::TooLong { bytes_max: 5000 })));
    }
}
