//! The codec kernels: loading, testing, and queuing their work.

use std::sync::Arc;

use poorwill_core::Digest;
use poorwill_core::codec::{self, BLOCK_BYTES};
use poorwill_core::driver::Result as DriverResult;

use super::super::context::Context;
use super::super::digest::{DIGEST_LEAVES_MAX, DIGEST_LEAVES_MIN};
use super::super::kernel::{Function, Grid, KernelArg, Module};
use super::super::slots::{PinnedSlot, PinnedSlots};
use super::super::stream::Stream;
use crate::ledger::{Result, invalid};

/// PTX of the kernels `poorwill_encode(u64 granules, u64 sizes, u32 blocks)` and
/// `poorwill_decode(u64 granules, u64 digests, u32 blocks)`. `kernel.cu` states the requirements.
pub const CODEC_PTX: &str = include_str!("kernel.ptx");

const WARPS_MAX: u32 = 32;

/// Shared memory of a warp for escapes, in bytes.
const STAGE_BYTES: u32 = 1296;

/// Shared memory that every thread block has, in bytes.
const SHARED_BYTES_MAX: u32 = 48 << 10;

/// Bytes of an entry of the array of granules.
const ENTRY_BYTES: usize = 32;

/// With more warps than blocks, and blocks of each kind.
const SAMPLE_BLOCKS: u32 = 20;

#[derive(Debug)]
pub(super) struct CodecKernels {
    encode: Function,
    /// For codes in memory of the device, and of the host.
    decode: Function,
    decode_host: Function,
    slots: Arc<PinnedSlots>,
    blocks: u32,
}

/// A launch, and its arguments and results. The code that queues it keeps it until the stream has passed it.
#[derive(Debug)]
struct KernelWork {
    kernels: Arc<CodecKernels>,
    slot: Option<PinnedSlot>,
    count: usize,
}

/// Measures or encodes granules.
#[derive(Debug)]
pub(in crate::cuda) struct EncodeJob(KernelWork);

/// Decodes granules.
#[derive(Debug)]
pub(in crate::cuda) struct DecodeJob {
    job: KernelWork,
    codes: Codes,
}

/// Where codes are.
#[derive(Debug, Clone, Copy)]
pub(super) enum Codes {
    Device,
    Host,
}

impl CodecKernels {
    /// The context is entered.
    pub(super) fn open(
        context: &Arc<Context>,
        slots: &std::result::Result<Arc<PinnedSlots>, String>,
        granule_bytes: u64,
    ) -> std::result::Result<Self, String> {
        let blocks = granule_bytes / BLOCK_BYTES as u64;
        let is_supported =
            codec::supports(granule_bytes) && (DIGEST_LEAVES_MIN..=DIGEST_LEAVES_MAX).contains(&blocks);
        let blocks = u32::try_from(blocks)
            .ok()
            .filter(|_| is_supported)
            .ok_or_else(|| format!("they are not made for granules of {granule_bytes} bytes"))?;
        let load = || -> DriverResult<[Function; 3]> {
            let module = Module::load_in(context, CODEC_PTX)?;
            let names = ["poorwill_encode", "poorwill_decode", "poorwill_decode_host"];
            let [encode, decode, decode_host] = names.map(|name| module.function(name));
            Ok([encode?, decode?, decode_host?])
        };
        let [encode, decode, decode_host] =
            load().map_err(|error| format!("the driver does not take them: {error}"))?;
        let failed = |error| format!("trying them out failed: {error}");
        let kernels = Self { encode, decode, decode_host, slots: slots.clone()?, blocks };
        if kernels.are_correct(context).map_err(failed)? {
            Ok(kernels)
        } else {
            Err("they compute other codes than the host".into())
        }
    }

    /// The driver may load the kernels only here.
    fn are_correct(&self, context: &Arc<Context>) -> Result<bool> {
        let raw = sample();
        let mut code = vec![0; codec::code_bytes_max(raw.len())];
        let code_bytes = codec::encode(&raw, &mut code).unwrap_or(0);
        let slot = |bytes: usize| self.slots.take(bytes.next_multiple_of(16));
        let (mut granule, slot, decoded) = (slot(raw.len())?, slot(code_bytes)?, slot(raw.len())?);
        granule.write(words(&raw));
        let encoding = self.slot(&[[granule.device(), slot.device(), code_bytes as u64]], 8)?;
        let decoding = self.slot(&[[slot.device(), code_bytes as u64, decoded.device()]], 16)?;
        // The other decoder's, for the digest alone.
        let digesting = self.slot(&[[slot.device(), code_bytes as u64, 0]], 16)?;
        let stream = Stream::create(context.primary())?;
        let launched =
            [(&self.encode, &encoding), (&self.decode_host, &decoding), (&self.decode, &digesting)]
                .into_iter()
                .try_for_each(|(function, slot)| self.launch(function, &stream, slot, 1, SAMPLE_BLOCKS));
        let finished = stream.synchronize().or_else(|_| context.synchronize());
        if finished.is_err() {
            // They may still be running.
            std::mem::forget((granule, slot, decoded, encoding, decoding, digesting));
            return finished.map(|()| false);
        }
        launched?;
        let holds = |slot: &PinnedSlot, bytes: &[u8]| slot.words(0, bytes.len() / 8).eq(words(bytes));
        Ok(encoding.words(ENTRY_BYTES, 1).eq([code_bytes as u64])
            && holds(&slot, &code[..code_bytes])
            && holds(&decoded, &raw)
            && [&decoding, &digesting]
                .iter()
                .all(|slot| slot.values(ENTRY_BYTES, 1).eq([Digest::of(&raw).0])))
    }

    fn slot(&self, entries: &[[u64; 3]], result_bytes: usize) -> Result<PinnedSlot> {
        let mut slot = self.slots.take((ENTRY_BYTES + result_bytes) * entries.len())?;
        slot.write(entries.iter().flat_map(|[first, second, third]| [*first, *second, *third, 0]));
        Ok(slot)
    }

    fn launch(
        &self,
        function: &Function,
        stream: &Stream,
        slot: &PinnedSlot,
        count: usize,
        blocks: u32,
    ) -> Result<()> {
        let thread_blocks = u32::try_from(count)
            .ok()
            .filter(|count| i32::try_from(*count).is_ok())
            .ok_or_else(|| invalid(format!("{count} granules are more than a grid has")))?;
        let results = slot.device() + (ENTRY_BYTES * count) as u64;
        // Heads, counts and lengths of the encoder, or digests of the decoder.
        let of_blocks = 16 * blocks + 32;
        let warps = (SHARED_BYTES_MAX.saturating_sub(of_blocks) / STAGE_BYTES).clamp(1, WARPS_MAX);
        let shared_bytes = of_blocks + warps * STAGE_BYTES;
        let grid = Grid { blocks: thread_blocks, threads: 32 * warps, shared_bytes };
        let args = [KernelArg::U64(slot.device()), KernelArg::U64(results), KernelArg::U32(blocks)];
        // SAFETY: C5: the parameters are the kernel's. Granules and scratch memory are mapped with access, slots and
        // codes are page-locked or in scratch memory. The code that queues it keeps all of them, and the slot, until
        // the kernel has finished.
        unsafe { function.queue(stream, grid, &args) }
    }
}

impl KernelWork {
    /// `None` where no slot can be allocated.
    fn new(kernels: &Arc<CodecKernels>, entries: &[[u64; 3]], result_bytes: usize) -> Option<Self> {
        let slot = if entries.is_empty() { None } else { Some(kernels.slot(entries, result_bytes).ok()?) };
        Some(Self { kernels: Arc::clone(kernels), slot, count: entries.len() })
    }

    fn queue(&self, function: &Function, stream: &Stream) -> Result<()> {
        match &self.slot {
            Some(slot) => self.kernels.launch(function, stream, slot, self.count, self.kernels.blocks),
            None => Ok(()),
        }
    }
}

impl EncodeJob {
    /// Of each granule: its address, that of the slot, bytes of the slot.
    pub(super) fn new(kernels: &Arc<CodecKernels>, entries: &[[u64; 3]]) -> Option<Self> {
        KernelWork::new(kernels, entries, 8).map(Self)
    }

    /// The context is entered. The caller keeps this, the granules and the slots until the stream has passed it.
    pub(in crate::cuda) fn queue(&self, stream: &Stream) -> Result<()> {
        self.0.queue(&self.0.kernels.encode, stream)
    }

    /// Call it once the stream has passed the job.
    pub(in crate::cuda) fn sizes(&self) -> Vec<u64> {
        let words = |slot: &PinnedSlot| slot.words(ENTRY_BYTES * self.0.count, self.0.count).collect();
        self.0.slot.as_ref().map_or_else(Vec::new, words)
    }
}

impl DecodeJob {
    /// Of each granule: the address of its code, bytes of the code, its own address, or 0 for its digest alone.
    pub(super) fn new(kernels: &Arc<CodecKernels>, codes: Codes, entries: &[[u64; 3]]) -> Option<Self> {
        Some(Self { job: KernelWork::new(kernels, entries, 16)?, codes })
    }

    /// As for [`EncodeJob::queue`].
    pub(in crate::cuda) fn queue(&self, stream: &Stream) -> Result<()> {
        let kernels = &self.job.kernels;
        let function = match self.codes {
            Codes::Device => &kernels.decode,
            Codes::Host => &kernels.decode_host,
        };
        self.job.queue(function, stream)
    }

    /// Call it once the stream has passed the job.
    pub(in crate::cuda) fn digests(&self) -> Vec<Digest> {
        let KernelWork { slot, count, .. } = &self.job;
        let values = |slot: &PinnedSlot| slot.values(ENTRY_BYTES * count, *count).map(Digest).collect();
        slot.as_ref().map_or_else(Vec::new, values)
    }
}

/// Blocks of every kind: equal words, noise, and values with few exponents and some others.
fn sample() -> Vec<u8> {
    let block = |nth: u32| {
        let values = (0..BLOCK_BYTES / 2).zip(1_u32..).map(move |(_, at)| {
            let mixed = (nth << 16 | at).wrapping_mul(0x9E37_79B1);
            let exponent = if mixed >> 26 == 0 { mixed >> 18 } else { 125 - mixed.leading_zeros() };
            match nth % 3 {
                0 => nth,
                1 => mixed >> 8,
                _ => (mixed & 0x807F) | (exponent & 0xFF) << 7,
            }
        });
        values.flat_map(|value| {
            let [first, second, ..] = value.to_le_bytes();
            [first, second]
        })
    };
    (0..SAMPLE_BLOCKS).flat_map(block).collect()
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| {
        let mut eight = [0; 8];
        eight.copy_from_slice(word);
        u64::from_le_bytes(eight)
    })
}
