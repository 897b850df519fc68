//! Giving memory back: under pressure, above the high-water mark, and when asked to.

use super::blocks::Kind;
use super::error::{PoolError, Shortage, Usage};
use super::segment::SegmentKey;
use super::state::State;
use super::vm::{Backing, Piece, Vm};
use super::{Result, Shared};
use crate::driver::{DriverError, DriverErrorKind};

impl Shared {
    /// Tries again what the driver has refused before.
    pub(super) fn recover(&self, vm: &mut Vm) -> Option<DriverError> {
        let mut refused = vm.settle().1;
        let stuck: Vec<Piece> = {
            let state = self.state.lock_anyway();
            let addrs = state.stuck.iter().map(|key| state.blocks[*key].addr);
            let pieces = addrs.filter_map(|addr| state.piece((state.segment_of(addr), addr)));
            let tag = |piece: &Piece| state.segments.get(piece.segment).map(|segment| segment.tag);
            pieces.filter(|piece| !tag(piece).is_some_and(|tag| state.is_pinned(tag))).collect()
        };
        for mut piece in stuck {
            refused = refused.or(vm.take_out(std::slice::from_mut(&mut piece)).err());
            if piece.is_mapped() {
                continue;
            }
            vm.keep(&mut piece);
            let mut state = self.state.lock_anyway();
            let (start, end) = (piece.range.addr, piece.range.end());
            if let Some(first) = state.segments.get(piece.segment).map(|segment| segment.first) {
                let key = state.block_at(first, start);
                state.strip(piece.segment, key, start, end);
            }
        }
        refused
    }

    /// Takes pieces that nothing uses out of where they are mapped; their memory is loose then.
    pub(super) fn dispose(&self, vm: &mut Vm, mut pieces: Vec<Piece>) -> Option<DriverError> {
        pieces.sort_unstable_by_key(|piece| (piece.segment, piece.range.addr));
        let refused = vm.take_out_each(&mut pieces);
        for piece in &mut pieces {
            vm.keep(piece);
            if piece.backing != Backing::Absent {
                self.state.lock_anyway().take_back(piece);
            }
        }
        refused
    }

    /// Gives `bytes` of idle memory back to the device, or all there is. Returns the bytes given back.
    pub(super) fn reclaim(&self, vm: &mut Vm, bytes: u64) -> (u64, Option<DriverError>) {
        let refused = self.poll(vm).or(self.recover(vm));
        let mut leaving = Vec::new();
        let wanted = bytes.saturating_sub(vm.counters().loose_bytes());
        self.state.lock_anyway().steal_bytes(wanted, &mut leaving);
        let refused = refused.or(self.dispose(vm, leaving));
        let (freed_bytes, owed) = vm.let_go_of_loose(bytes, &[]);
        (freed_bytes, refused.or(owed).or(self.drop_emptied(vm)))
    }

    /// Gives back everything that serves no byte, waiting for work that may still touch it, unless a stream is being
    /// captured.
    pub(super) fn trim(&self) -> Result<u64> {
        let mut vm = self.lock_vm()?;
        let mut refused = self.poll(&vm);
        let awaited = self.state.lock_anyway().clocks.flying();
        drop(vm);
        for (clock, tick, event) in awaited {
            match self.captured() {
                Ok(None) => refused = refused.or(self.wait_for_one(clock, tick, event).err()),
                Ok(Some(_)) => break,
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        let mut state = self.open_state()?;
        while state.is_copying_freed() {
            state = self.wait(state)?;
        }
        drop(state);
        vm = self.lock_vm()?;
        refused = refused.or(self.poll(&vm));
        self.open_state()?.join_lanes();
        let before = vm.counters().held_bytes();
        match refused.or(self.reclaim(&mut vm, u64::MAX).1) {
            None => Ok(before.saturating_sub(vm.counters().held_bytes())),
            Some(source) => Err(PoolError::Driver { op: "give cached memory back", source }),
        }
    }

    /// Gives idle memory back as far as the cache is above its mark. Returns whether more could follow later.
    pub(super) fn reclaim_above_mark(&self, vm: &mut Vm) -> bool {
        let excess = {
            let state = self.state.lock_anyway();
            let Some(mark) = state.cached_max_bytes else { return false };
            state.cached_bytes(vm.counters()).saturating_sub(mark)
        };
        if excess > 0 {
            // What is refused stays and is tried again.
            let _ = self.reclaim(vm, excess);
        }
        let state = self.state.lock_anyway();
        state.is_above_mark(vm.counters()) && state.idle().pending_bytes > 0
    }

    /// Gives the addresses of segments back in which nothing is. A refusal leaves them for the next time.
    pub(super) fn drop_emptied(&self, vm: &Vm) -> Option<DriverError> {
        let mut refused = None;
        let emptied = std::mem::take(&mut self.state.lock_anyway().emptied);
        for key in emptied {
            let range = {
                let mut state = self.state.lock_anyway();
                if !state.is_emptied(key) {
                    continue;
                }
                let Some(segment) = state.segments.get(key) else { continue };
                let (first, range) = (segment.first, segment.range);
                state.unlist(first);
                range
            };
            let dropped = vm.driver().unreserve(range);
            let mut state = self.state.lock_anyway();
            let Some(first) = state.segments.get(key).map(|segment| segment.first) else { continue };
            match dropped {
                Ok(()) => {
                    state.blocks.remove(first);
                    state.remove_segment(key);
                }
                Err(error) => {
                    state.list(first);
                    refused = refused.or(Some(error));
                }
            }
        }
        refused
    }

    /// Gives back everything, whatever lives in it, as far as the driver lets it; returns its first refusal.
    pub(super) fn sweep(&self, vm: &mut Vm) -> Result<(), DriverError> {
        let keys: Vec<SegmentKey> = self.state.lock_anyway().segments.keys().collect();
        let mut refused = None;
        for key in keys {
            let (range, mut pieces) = {
                let state = self.state.lock_anyway();
                let Some(segment) = state.segments.get(key) else { continue };
                let pieces = segment.chunks.keys().filter_map(|at| state.piece((key, *at)));
                (segment.range, pieces.collect::<Vec<_>>())
            };
            let mut swept = vm.take_out_each(&mut pieces);
            pieces.iter_mut().for_each(|piece| swept = swept.take().or(vm.let_go(piece).err()));
            self.state.lock_anyway().store(&pieces);
            if pieces.iter().all(|piece| piece.backing == Backing::Absent) {
                match vm.driver().unreserve(range) {
                    Ok(()) => self.state.lock_anyway().remove_segment(key),
                    Err(error) => swept = swept.or(Some(error)),
                }
            }
            refused = refused.or(swept);
        }
        refused.or(vm.let_go_of_loose(u64::MAX, &[]).1).or(vm.settle().1).map_or(Ok(()), Err)
    }

    /// Whether the device could give `bytes`, by its own figure and with what this pool has idle.
    pub(super) fn could_have(&self, bytes: u64) -> bool {
        let ours = self.state.lock_anyway().idle().quiet_bytes + self.counters.loose_bytes();
        self.driver.memory_info().is_ok_and(|info| info.free_bytes.saturating_add(ours) >= bytes)
    }

    pub(super) fn usage(&self) -> Usage {
        let state = self.state.lock_anyway();
        let counters = &self.counters;
        let idle = state.idle();
        let stuck: u64 = state.stuck.iter().map(|key| state.blocks[*key].bytes()).sum();
        Usage {
            limit_bytes: self.shape.limit_bytes(),
            live_bytes: state.live_bytes,
            mapped_bytes: counters.held_bytes(),
            idle_bytes: idle.quiet_bytes
                + idle.pending_bytes
                + idle.pinned_bytes
                + stuck
                + counters.loose_bytes()
                + counters.owed_bytes(),
        }
    }

    /// The refusal of a full device, with figures of now: whatever was brought in before is gone again.
    pub(super) fn device_full(&self, op: String, needed_bytes: u64, source: DriverError) -> PoolError {
        let info = self.driver.memory_info().ok();
        let free_bytes = info.map(|info| info.free_bytes).or(match source.kind {
            DriverErrorKind::OutOfMemory { free_bytes, .. } => Some(free_bytes),
            _ => None,
        });
        let total_bytes = self.shape.total_bytes;
        let shortage = Shortage { needed_bytes, free_bytes: free_bytes.unwrap_or(0), total_bytes };
        PoolError::DeviceFull { op, shortage, usage: self.usage(), source: source.into() }
    }
}

impl State {
    /// Writes back memory that the driver refuses to unmap: to the chunk it is of, or as a stuck one.
    fn take_back(&mut self, piece: &Piece) {
        if self.chunk((piece.segment, piece.range.addr)).is_some() {
            self.store(&[*piece]);
        } else {
            self.make_stuck(piece);
        }
    }

    /// Whether a segment is bare from end to end.
    fn is_emptied(&self, key: SegmentKey) -> bool {
        self.segments.get(key).is_some_and(|segment| {
            let first = &self.blocks[segment.first];
            self.blocks.kind(segment.first) == Kind::Bare && first.bytes() == segment.range.bytes
        })
    }
}
