//! What [`super::Driver::encode`] and its relatives promise, for drivers that leave the codes to the host.

use std::num::NonZero;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::{
    CodePart, CopyPart, DeviceRange, Driver, DriverError, DriverErrorKind, Encoded, HostBuffer, Op, Pending,
    Result, StreamId,
};
use crate::codec;
use crate::digest::Digest;

/// Bytes of the device that are measured at a time.
const MEASURED_BYTES: u64 = 32 << 20;

const THREADS_MAX: usize = 4;

/// Bytes that justify a thread.
const WORTH_A_THREAD: usize = 1 << 20;

/// Checks that granules of this size have a code, and that the parts are granules. Their slots lie in a buffer of
/// `len` bytes without overlapping. Returns the slots.
///
/// # Errors
/// `InvalidArgument`, `Unsupported`.
pub fn check(op: Op, granule_bytes: u64, parts: &[CodePart], len: usize) -> Result<Vec<Range<usize>>> {
    check_granule(op, granule_bytes)?;
    let slot = |part: &CodePart| {
        let start = usize::try_from(part.host_offset).ok()?;
        let end = start.checked_add(usize::try_from(part.slot_bytes).ok()?)?;
        (part.host_offset.is_multiple_of(16) && part.granule.is_multiple_of(granule_bytes) && end <= len)
            .then_some(start..end)
    };
    let invalid = |part: &CodePart| {
        let CodePart { granule, host_offset, slot_bytes } = part;
        let reason = format!(
            "the granule at {granule:#x} with {slot_bytes} bytes at {host_offset} of a buffer of {len} bytes: \
             granules begin at multiples of {granule_bytes}, slots at multiples of 16 inside of the buffer"
        );
        DriverError::invalid(op, reason)
    };
    let slots: Vec<Range<usize>> =
        parts.iter().map(|part| slot(part).ok_or_else(|| invalid(part))).collect::<Result<_>>()?;
    let mut sorted = slots.clone();
    sorted.sort_unstable_by_key(|slot| slot.start);
    match sorted.windows(2).find(|pair| pair[1].start < pair[0].end) {
        Some(pair) => {
            let reason = format!("the slots {:?} and {:?} overlap", pair[0], pair[1]);
            Err(DriverError::invalid(op, reason))
        }
        None => Ok(slots),
    }
}

fn check_granule(op: Op, granule_bytes: u64) -> Result<usize> {
    match usize::try_from(granule_bytes) {
        Ok(bytes) if codec::supports(granule_bytes) => Ok(bytes),
        _ => {
            let reason = format!("granules of {granule_bytes} bytes have no code; use raw backups");
            Err(DriverError::new(op, DriverErrorKind::Unsupported { reason }))
        }
    }
}

/// Writes the codes of `granules` into the slots of `buffer`, and decodes them again for their digests.
#[must_use]
pub fn encoded(granules: &[u8], buffer: &mut [u8], slots: &[Range<usize>]) -> Vec<Option<Encoded>> {
    let granule_bytes = granules.len() / slots.len().max(1);
    let mut order: Vec<usize> = (0..slots.len()).collect();
    order.sort_unstable_by_key(|nth| slots[*nth].start);
    let (mut rest, mut at, mut work) = (buffer, 0, Vec::new());
    for nth in &order {
        let Range { start, end } = slots[*nth].clone();
        let (_, from_start) = std::mem::take(&mut rest).split_at_mut(start - at);
        let (slot, behind) = from_start.split_at_mut(end - start);
        (rest, at) = (behind, end);
        work.push((&granules[nth * granule_bytes..][..granule_bytes], slot));
    }
    let codes = in_parallel(work, granules.len(), |(granule, slot)| {
        let bytes = codec::encode(granule, slot)?;
        let mut decoded = vec![0; granule_bytes];
        codec::decode(&slot[..bytes], &mut decoded);
        Some(Encoded { bytes: bytes as u64, digest: Digest::of(&decoded) })
    });
    let mut in_order = vec![None; slots.len()];
    order.into_iter().zip(codes).for_each(|(nth, code)| in_order[nth] = code);
    in_order
}

/// Granules from their codes in the slots of `buffer`, one behind the other, and their digests.
#[must_use]
pub fn decoded(buffer: &[u8], slots: &[Range<usize>], granule_bytes: usize) -> (Vec<u8>, Vec<Digest>) {
    let mut granules = vec![0; slots.len() * granule_bytes];
    let work = granules.chunks_exact_mut(granule_bytes).zip(slots).collect();
    let digests =
        in_parallel(work, slots.len() * granule_bytes, |(granule, slot): (&mut [u8], &Range<usize>)| {
            codec::decode(&buffer[slot.clone()], granule);
            Digest::of(granule)
        });
    (granules, digests)
}

/// [`Driver::encoded_bytes`], by copies to the host.
///
/// # Errors
/// As there.
pub fn measured_on_the_host(
    driver: &(impl Driver + ?Sized),
    stream: StreamId,
    ranges: &[DeviceRange],
) -> Result<Pending<Vec<u64>>> {
    let granule_bytes = driver.info().granule_bytes;
    let granule = check_granule(Op::Encode, granule_bytes)?;
    let is_whole = |range: &&DeviceRange| {
        range.addr.is_multiple_of(granule_bytes) && range.bytes.is_multiple_of(granule_bytes)
    };
    if let Some(range) = ranges.iter().find(|range| !is_whole(range)) {
        let reason = format!("{range} does not begin and end on granules of {granule_bytes} bytes");
        return Err(DriverError::invalid(Op::Encode, reason));
    }
    let step = (MEASURED_BYTES / granule_bytes).max(1) * granule_bytes;
    let mut measured = Vec::new();
    for range in ranges {
        let mut offset = 0;
        while offset < range.bytes {
            let device = DeviceRange::new(range.addr + offset, step.min(range.bytes - offset));
            let copied = copied_granules(driver, stream, &[device])?.wait()?;
            let granules = copied.chunks_exact(granule).collect();
            let measure = |granule: &[u8]| codec::encoded_bytes(granule) as u64;
            measured.extend(in_parallel(granules, copied.len(), measure));
            offset += device.bytes;
        }
    }
    Ok(Pending::new(|| Ok(measured)))
}

/// [`Driver::encode`], by a copy to the host.
///
/// # Errors
/// As there.
pub fn encoded_on_the_host(
    driver: &(impl Driver + ?Sized),
    stream: StreamId,
    mut dst: HostBuffer,
    parts: &[CodePart],
) -> Result<Pending<(HostBuffer, Vec<Option<Encoded>>)>> {
    let granule_bytes = driver.info().granule_bytes;
    let slots = check(Op::Encode, granule_bytes, parts, dst.len())?;
    let granules: Vec<DeviceRange> =
        parts.iter().map(|part| DeviceRange::new(part.granule, granule_bytes)).collect();
    let copy = copied_granules(driver, stream, &granules)?;
    Ok(copy.then(move |copied| {
        let codes = encoded(&copied?, &mut dst, &slots);
        Ok((dst, codes))
    }))
}

/// [`Driver::decode`], by a copy of what the host has decoded.
///
/// # Errors
/// As there.
pub fn decoded_on_the_host(
    driver: &(impl Driver + ?Sized),
    stream: StreamId,
    src: &HostBuffer,
    parts: &[CodePart],
) -> Result<Pending<Vec<Digest>>> {
    let granule_bytes = driver.info().granule_bytes;
    let slots = check(Op::Decode, granule_bytes, parts, src.len())?;
    let (granules, digests) = decoded(src, &slots, to_usize(granule_bytes)?);
    let copies: Vec<CopyPart> = (0..)
        .zip(parts)
        .map(|(nth, part)| CopyPart {
            device: DeviceRange::new(part.granule, granule_bytes),
            host_offset: nth * granule_bytes,
        })
        .collect();
    let copy = driver.copy_to_device(stream, Arc::new(granules.into()), &copies)?;
    Ok(copy.then(move |copied| copied.map(|()| digests)))
}

/// Queues a copy of `granules` into a buffer of their own.
fn copied_granules(
    driver: &(impl Driver + ?Sized),
    stream: StreamId,
    granules: &[DeviceRange],
) -> Result<Pending<HostBuffer>> {
    let (mut parts, mut bytes) = (Vec::new(), 0);
    for device in granules {
        parts.push(CopyPart { device: *device, host_offset: bytes });
        bytes += device.bytes;
    }
    driver.copy_to_host(stream, vec![0; to_usize(bytes)?].into(), &parts)
}

fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes)
        .map_err(|_| DriverError::invalid(Op::Encode, format!("{bytes} is more than this machine counts")))
}

/// `f` of each piece of work, in order, by several threads where `bytes` justify them.
fn in_parallel<T: Send, U: Send>(work: Vec<T>, bytes: usize, f: impl Fn(T) -> U + Sync) -> Vec<U> {
    let count = work.len();
    let (work, done) = (Mutex::new(work.into_iter().enumerate()), Mutex::new(Vec::with_capacity(count)));
    let next = || work.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || {
        while let Some((nth, piece)) = next() {
            let result = f(piece);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((nth, result));
        }
    };
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = cores.min(THREADS_MAX).min(bytes / WORTH_A_THREAD).min(count);
    thread::scope(|scope| {
        for _ in 1..threads {
            // If no thread can be started, this one does its share.
            let _ = thread::Builder::new().spawn_scoped(scope, run);
        }
        run();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(nth, _)| *nth);
    done.into_iter().map(|(_, result)| result).collect()
}
