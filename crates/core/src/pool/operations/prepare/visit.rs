//! The order of a preparation: chunk by chunk, with buffers made ahead.

use std::collections::VecDeque;
use std::time::Instant;

use super::chunk::NextStep;
use super::job::Job;
use super::plan::Planned;
use super::report::{PrepareEnd, PrepareReport};
use super::store::{Totals, Visit};
use crate::backup::{BackupBuffer, Footprint};
use crate::driver::Pending;
use crate::pool::parts::backups::Save;
use crate::pool::parts::heap::Landmark;
use crate::pool::shared::Shared;
use crate::pool::tools::error::{PoolError, Result};
use crate::tag::Tag;

/// Host memory requested at a time: enough to occupy a few threads.
const AHEAD_BYTES: u64 = 256 << 20;

/// A buffer for the footprint that an extent took when it was planned.
struct Ahead {
    /// Number of its save.
    turn: usize,
    planned: Planned,
    buffer: Pending<BackupBuffer>,
}

impl Shared {
    pub(super) fn prepare(&self, job: &Job, saves: &[Save], tags: Vec<Tag>) -> Result<PrepareReport> {
        let started = Instant::now();
        // One at a time: the second finds what the first has stored.
        let guard = self.preparing();
        let mut done = Totals::default();
        let end = self.prepare_all(job, saves, &mut done);
        drop(guard);
        let seconds = started.elapsed().as_secs_f64();
        let Totals { copied_bytes, stored_bytes, unchanged_bytes } = done;
        Ok(PrepareReport { tags, end: end?, seconds, copied_bytes, stored_bytes, unchanged_bytes })
    }

    fn prepare_all(&self, job: &Job, saves: &[Save], done: &mut Totals) -> Result<PrepareEnd> {
        let (mut ahead, mut near) = (VecDeque::new(), None);
        for (turn, save) in saves.iter().enumerate() {
            if self.starving() > 0 {
                return Ok(PrepareEnd::Overtaken);
            }
            let lacks = self.lock_state().backups().get(save).is_none();
            if lacks && ahead.is_empty() {
                match self.look_ahead(job, saves, turn, near)? {
                    Ok(found) => ahead = found,
                    Err(end) => return Ok(end),
                }
            }
            // Buffers of chunks that need none any more are released.
            while ahead.front().is_some_and(|next: &Ahead| next.turn < turn) {
                ahead.pop_front();
            }
            let mut ready = match ahead.pop_front_if(|next| next.turn == turn) {
                Some(Ahead { planned, buffer, .. }) => Some(self.ready(planned, buffer)?),
                None => None,
            };
            loop {
                let was_ready = ready.is_some();
                let visit = match self.hold_chunk(job, save, near)? {
                    NextStep::End(end) => return Ok(end),
                    NextStep::Gone => Visit::Done,
                    NextStep::Chunk(found) => {
                        near = Some(found.snapshot.landmark);
                        self.bring_up_to_date(*found, ready.take(), saves, done)?
                    }
                };
                match visit {
                    // What changes again and again is left to the sleep.
                    Visit::Lacks(_) if was_ready => break,
                    Visit::Lacks(planned) => {
                        let buffer = self.new_buffer(&planned.footprint);
                        ready = Some(self.ready(planned, buffer)?);
                    }
                    Visit::Done => break,
                }
            }
            let visited_bytes = save.granules.len() as u64 * self.shape().granule_bytes;
            job.note_visited(visited_bytes);
        }
        Ok(PrepareEnd::Finished)
    }

    /// Waits for host memory, with nothing held.
    fn ready(&self, planned: Planned, buffer: Pending<BackupBuffer>) -> Result<(Planned, BackupBuffer)> {
        let again = || self.new_buffer(&planned.footprint).wait();
        let buffer = self.with_cached_host_memory(planned.footprint.bytes(), buffer.wait(), again);
        buffer.map(|buffer| (planned, buffer)).map_err(|source| PoolError::PrepareFailed { source })
    }

    /// Buffers for saves from `turn` on that have none. They are made during copies.
    fn look_ahead(
        &self,
        job: &Job,
        saves: &[Save],
        turn: usize,
        mut near: Option<Landmark>,
    ) -> Result<Result<VecDeque<Ahead>, PrepareEnd>> {
        let failed = |source| PoolError::PrepareFailed { source };
        let mut lacking: Vec<usize> = Vec::new();
        {
            let (state, mut ahead_bytes) = (self.lock_state(), 0_u64);
            for nth in (turn..saves.len()).filter(|nth| state.backups().get(&saves[*nth]).is_none()) {
                ahead_bytes = ahead_bytes.saturating_add(saves[nth].bytes);
                if ahead_bytes > AHEAD_BYTES && !lacking.is_empty() {
                    break;
                }
                lacking.push(nth);
            }
        }
        let mut planned: Vec<(usize, Planned)> = Vec::new();
        for nth in lacking {
            if !self.backups().measures() {
                let (granules, footprint) = (Vec::new(), self.plan_footprint(&saves[nth]).map_err(failed)?);
                planned.push((nth, Planned { granules, footprint }));
                continue;
            }
            match self.hold_chunk(job, &saves[nth], near)? {
                NextStep::End(end) => return Ok(Err(end)),
                NextStep::Gone => {}
                NextStep::Chunk(found) => {
                    near = Some(found.snapshot.landmark);
                    let footprint = self.plan_footprint(&found.save).map_err(failed)?;
                    planned.push((nth, Planned { granules: found.save.granules.clone(), footprint }));
                }
            }
        }
        if planned.is_empty() {
            return Ok(Ok(VecDeque::new()));
        }
        let footprints: Vec<Footprint> =
            planned.iter().map(|(_, planned)| planned.footprint.clone()).collect();
        let bytes = footprints.iter().map(Footprint::bytes).sum();
        let made = self.backups().buffers(&footprints);
        let made = self.with_cached_host_memory(bytes, made, || self.backups().buffers(&footprints));
        let ahead = planned.into_iter().zip(made.map_err(failed)?);
        Ok(Ok(ahead.map(|((turn, planned), buffer)| Ahead { turn, planned, buffer }).collect()))
    }
}
