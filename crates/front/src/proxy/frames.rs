//! Follows the frames of one direction of a WebSocket, without changing them.

/// The longest header without a mask.
const HEADER_MAX: usize = 10;

/// Where a direction is within its frames.
#[derive(Debug, Default)]
pub(super) struct Frames {
    header: [u8; HEADER_MAX],
    /// Bytes of `header` so far.
    had: usize,
    /// Bytes of the frame after them.
    left: u64,
    is_data: bool,
}

impl Frames {
    /// Returns whether any of these bytes are data. Pings, pongs and closes are none.
    pub(super) fn push(&mut self, mut bytes: &[u8]) -> bool {
        let mut has_data = false;
        while let Some(&first) = bytes.first() {
            if self.left > 0 {
                let skipped = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
                has_data |= self.is_data;
                self.left -= u64::try_from(skipped).unwrap_or(self.left);
                bytes = &bytes[skipped..];
                continue;
            }
            self.header[self.had] = first;
            self.had += 1;
            bytes = &bytes[1..];
            if let Some(left) = self.rest() {
                self.is_data = self.header[0] & 0x0f < 8;
                has_data |= self.is_data;
                (self.left, self.had) = (left, 0);
            }
        }
        has_data
    }

    /// What follows a complete header: the mask and the payload.
    fn rest(&self) -> Option<u64> {
        let [_, second, extended @ ..] = &self.header;
        let of = |len: usize| extended[..len].iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
        let (len, bytes) = match (self.had, second & 0x7f) {
            (0 | 1, _) => return None,
            (_, 126) => (2, of(2)),
            (_, 127) => (8, of(8)),
            (_, bytes) => (0, u64::from(bytes)),
        };
        let mask = if second & 0x80 == 0 { 0 } else { 4 };
        (self.had == 2 + len).then(|| bytes.saturating_add(mask))
    }

    /// Whether another frame may follow now.
    pub(super) fn is_between(&self) -> bool {
        self.had == 0 && self.left == 0
    }
}

/// An engine's last frame.
pub(super) fn close(code: u16, reason: &str) -> Vec<u8> {
    // A control frame has at most 125 bytes.
    let reason = &reason.as_bytes()[..reason.len().min(123)];
    let len = u8::try_from(2 + reason.len()).unwrap_or(2);
    [&[0x88, len][..], &code.to_be_bytes(), reason].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_followed_however_they_are_cut() {
        let long = vec![7; 300];
        let large = vec![7; 70_000];
        for (frame, is_data) in [
            (vec![0x81, 2, b'h', b'i'], true),
            (vec![0x01, 0x82, 1, 2, 3, 4, b'h', b'i'], true),
            (vec![0x82, 0], true),
            ([&[0x82, 126, 1, 44][..], &long].concat(), true),
            ([&[0x82, 127, 0, 0, 0, 0, 0, 1, 0x11, 0x70][..], &large].concat(), true),
            (vec![0x89, 0], false),
            (vec![0x8a, 0x81, 1, 2, 3, 4, 5], false),
            (close(1001, "going"), false),
        ] {
            let (mut whole, mut cut) = (Frames::default(), Frames::default());
            assert_eq!(whole.push(&frame), is_data, "{frame:?}");
            assert!(whole.is_between());
            let (last, before) = frame.split_last().unwrap();
            for byte in before {
                cut.push(&[*byte]);
                assert!(!cut.is_between(), "{frame:?}");
            }
            cut.push(&[*last]);
            assert!(cut.is_between());
            assert_eq!(whole.push(&[&frame[..], &[0x89, 0]].concat()), is_data);
            assert!(!whole.push(&[0x89, 0x80, 1, 2, 3, 4]) && whole.is_between());
        }
        assert_eq!(close(1001, &"x".repeat(200)).len(), 127);
    }
}
