//! Closing a pool: work under way ends, and everything is released.

use super::shared::Shared;
use crate::driver::StreamId;
use crate::pool::tools::error::{PoolError, Result};

const CLOSE: &str = "close the pool";

impl Shared {
    /// Refuses new work from now on, unless a tag is held.
    pub(super) fn close_unheld(&self) -> Result<()> {
        let mut state = self.lock_state();
        state.holds().check_all(CLOSE)?;
        state.close();
        Ok(())
    }

    /// Refuses new work, and waits until work on tags has ended.
    pub(super) fn drain_tags(&self) {
        let mut state = self.lock_state();
        state.close();
        self.notify();
        while !state.tags().iter().all(|(_, entry)| entry.is_free()) {
            match self.wait_anyway(state, None) {
                Ok(woken) => state = woken,
                Err(_) => return, // Poisoned: the working thread is gone.
            }
        }
    }

    /// Refuses to wait for the device during a capture. Without held memory, no wait is needed.
    pub(super) fn check_closable(&self) -> Result<()> {
        if self.counters().held_bytes() == 0 { Ok(()) } else { self.check_no_capture(CLOSE) }
    }

    pub(super) fn close(&self) -> Result<()> {
        let failed = |source| PoolError::Driver { op: CLOSE, source };
        self.check_closable()?;
        self.links().begin_close();
        if self.counters().held_bytes() > 0 {
            self.quiesce().map_err(failed)?;
        } else {
            self.forget_clocks();
        }
        // While there are the streams that it may have to wait for.
        self.opened().recover(self.driver());
        let mut memory = self.lock_memory_anyway();
        let swept = self.sweep(&mut memory);
        let streams: Vec<StreamId> = self.streams().all().collect();
        let ended = swept.and(memory.destroy_streams(&streams)).map_err(failed);
        drop(memory);
        self.links().close(self.driver());
        self.withdraw_left();
        self.opened().recover(self.driver());
        // The backups went with the pool. The storage may keep the memory if it cannot release it.
        let _ = self.backups().trim();
        ended
    }
}
