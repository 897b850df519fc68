//! Comparing the bytes that a wake has copied with what was stored.
//!
//! Where a granule differs, its backup is digested. From an intact backup it is copied once more; a spoiled backup is what
//! the wake reports. Where one backup has spoiled others may have, too: then every granule is compared.
//!
//! Promise: when this returns, none of its device work is in flight.

use crate::backup::BackupBuffer;
use crate::digest::Digest;
use crate::driver::{CopyPart, DeviceRange, DriverError, Op};
use crate::pool::shared::Shared;
use crate::pool::tools::error::{Corruption, Phase, PoolError, Result};

/// A granule that was copied back from the byte `offset` of `buffer`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival<'a> {
    pub(super) granule: DeviceRange,
    pub(super) buffer: &'a BackupBuffer,
    pub(super) offset: u64,
    pub(super) expected: Digest,
}

#[derive(Debug, Default)]
pub(super) struct Verified {
    pub(super) equal_bytes: u64,
    pub(super) unseen: Vec<DeviceRange>,
    pub(super) spoiled: Vec<DeviceRange>,
}

fn at(phase: Phase) -> impl Fn(DriverError) -> PoolError {
    move |source| PoolError::WakeFailed { phase, source }
}

impl Shared {
    /// Compares `chosen`, and `others` as well if any backup of those has spoiled.
    pub(super) fn verify(&self, chosen: &[Arrival<'_>], others: &[Arrival<'_>]) -> Result<Verified> {
        let mut spoiled = self.spoiled_arrivals(chosen)?;
        let (mut compared, mut unseen) = (chosen.len(), others);
        if !spoiled.is_empty() {
            spoiled.extend(self.spoiled_arrivals(others)?);
            compared += others.len();
            unseen = &[];
        }
        let granule_bytes = self.shape().granule_bytes;
        Ok(Verified {
            equal_bytes: (compared - spoiled.len()) as u64 * granule_bytes,
            unseen: unseen.iter().map(|arrival| arrival.granule).collect(),
            spoiled,
        })
    }

    /// The granules whose backups have spoiled. Others that differ are copied once more.
    fn spoiled_arrivals(&self, arrivals: &[Arrival<'_>]) -> Result<Vec<DeviceRange>> {
        let mut spoiled = Vec::new();
        let again = self.not_arrived(arrivals, &mut spoiled)?;
        for Arrival { granule, buffer, offset, .. } in &again {
            let part = CopyPart { device: *granule, host_offset: *offset };
            let copy = buffer.load(self.streams().copy(0), &[part], None).map_err(at(Phase::Copy))?;
            copy.wait().map_err(at(Phase::Copy))?;
        }
        let never = self.not_arrived(&again, &mut spoiled)?;
        let never = never.iter().map(|arrival| arrival.granule);
        let lost = self.lock_state().lost_in(never);
        if lost.is_empty() {
            Ok(spoiled)
        } else {
            Err(PoolError::Corrupt { location: Corruption::Transfer, lost })
        }
    }

    /// Those that differ although their backups are intact. Those with spoiled backups are added to `spoiled`.
    fn not_arrived<'a>(
        &self,
        arrivals: &[Arrival<'a>],
        spoiled: &mut Vec<DeviceRange>,
    ) -> Result<Vec<Arrival<'a>>> {
        let mut again = Vec::new();
        for arrival in self.different(arrivals)? {
            let Arrival { granule, buffer, offset, expected } = arrival;
            match buffer.digest(offset, granule.bytes).map_err(at(Phase::Verify))? == expected {
                true => again.push(arrival),
                false => spoiled.push(granule),
            }
        }
        Ok(again)
    }

    /// Those whose digests on the device differ. All digests are queued at once, spread over the streams.
    fn different<'a>(&self, arrivals: &[Arrival<'a>]) -> Result<Vec<Arrival<'a>>> {
        let share = arrivals.len().div_ceil(self.streams().saves()).max(1);
        let (mut queued, mut failed) = (Vec::new(), None);
        for (turn, arrivals) in arrivals.chunks(share).enumerate() {
            let touch = |a: &Arrival<'_>, b: &Arrival<'_>| {
                a.granule.end() == b.granule.addr && std::ptr::eq(a.buffer, b.buffer)
            };
            let range = |run: &[Arrival<'_>]| {
                DeviceRange::new(run[0].granule.addr, run.len() as u64 * self.shape().granule_bytes)
            };
            let ranges: Vec<DeviceRange> = arrivals.chunk_by(touch).map(range).collect();
            match self.driver().digest(self.streams().save(turn), &ranges) {
                Ok(digests) => queued.push((arrivals, digests)),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        // After a failure, too: nothing may be in flight when the undo unmaps.
        let mut different = Vec::new();
        for (arrivals, digests) in queued {
            match digests.wait().and_then(|found| compare(arrivals, &found)) {
                Ok(found) => different.extend(found),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(different), |error| Err(at(Phase::Verify)(error)))
    }
}

fn compare<'a>(arrivals: &[Arrival<'a>], found: &[Digest]) -> Result<Vec<Arrival<'a>>, DriverError> {
    if found.len() != arrivals.len() {
        let reason = format!("{} digests were requested, and {} returned", arrivals.len(), found.len());
        return Err(DriverError::invalid(Op::Digest, reason));
    }
    let different = arrivals.iter().zip(found).filter(|(arrival, found)| arrival.expected != **found);
    Ok(different.map(|(arrival, _)| *arrival).collect())
}
