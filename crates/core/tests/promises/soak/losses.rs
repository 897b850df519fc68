//! What a spoiled backup has lost: named in full, refused when read, and right again once it is written.

use std::collections::BTreeSet;

use poorwill_core::{LostRange, PoolError};

use super::worker::Worker;

impl Worker {
    /// Only one thread has a disk that spoils.
    pub(super) fn heal(&mut self) {
        let lost = self.world.pool.lost_ranges().unwrap();
        assert!(!lost.is_empty(), "nothing is lost");
        let blocks: BTreeSet<_> = lost.iter().map(|lost| lost.block).collect();
        for block in blocks {
            let n = self.live.iter().position(|known| known.block.id == block).unwrap();
            let of_block: Vec<&LostRange> = lost.iter().filter(|lost| lost.block == block).collect();
            self.check_beside(n, &of_block);
            for lost in of_block {
                let (start, end) = self.bytes_of(n, lost);
                let bytes = self.live[n].bytes[start..end].to_vec();
                self.write_at(n, start, bytes).unwrap();
            }
            assert!(!self.world.pool.mark_block_restored(block).unwrap().is_empty());
            self.check_bytes(n);
        }
        assert_eq!(self.world.pool.lost_ranges().unwrap(), []);
    }

    /// What is lost cannot be read, and what is beside it is right.
    fn check_beside(&mut self, n: usize, lost: &[&LostRange]) {
        let mut at = 0;
        for lost in lost {
            let (start, end) = self.bytes_of(n, lost);
            let refused = self.read_at(n, start, 1);
            assert!(matches!(refused, Err(PoolError::Lost { .. })), "{refused:?}");
            if at < start {
                let read = self.read_at(n, at, start - at).unwrap();
                self.expect_bytes(n, at, &read);
            }
            at = end;
        }
        let len = self.live[n].bytes.len();
        if at < len {
            let read = self.read_at(n, at, len - at).unwrap();
            self.expect_bytes(n, at, &read);
        }
    }

    fn bytes_of(&self, n: usize, lost: &LostRange) -> (usize, usize) {
        let [start, bytes] =
            [lost.offset_bytes, lost.range.bytes].map(|bytes| usize::try_from(bytes).unwrap());
        (start, (start + bytes).min(self.live[n].bytes.len()))
    }
}
