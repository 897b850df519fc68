//! The kernels that encode and decode, run line by line on the CPU: their text computes `poorwill_core::codec`.

use poorwill_core::{Digest, codec};
use poorwill_driver::cuda::CODEC_PTX;
use poorwill_testkit::effort::Effort;
use poorwill_testkit::{granules, pattern};

use super::ptx::{Kernel, Launch, Memory};

const ARRAY: u64 = 0x1000;
const RESULT: u64 = 0x8000;
const GRANULE: u64 = 0x7000_0000_0000;
const SLOT: u64 = 0x10_0000_0000;

/// Shared memory of a warp for escapes.
const STAGE_BYTES: usize = 1296;

struct Kernels {
    encode: Kernel,
    /// From memory of the device, and of the host.
    decoders: [Kernel; 2],
}

impl Kernels {
    fn parse() -> Self {
        let kernel = |name| Kernel::parse(CODEC_PTX, name);
        let decoders = ["poorwill_decode", "poorwill_decode_host"].map(kernel);
        Self { encode: kernel("poorwill_encode"), decoders }
    }

    /// The code's length, and the slot with what was written there.
    fn encode(&self, granule: &[u8], slot_bytes: usize, threads: usize) -> (u64, Vec<u8>) {
        let array = [GRANULE, SLOT, slot_bytes as u64, 0].into_iter().flat_map(u64::to_le_bytes).collect();
        let mut memory = Memory(vec![
            (ARRAY, array),
            (RESULT, vec![0xAA; 8]),
            (GRANULE, granule.to_vec()),
            (SLOT, vec![0xEE; slot_bytes]),
        ]);
        let leaves = granule.len() / codec::BLOCK_BYTES;
        let shared_bytes = 12 * leaves + 32 + threads / 32 * STAGE_BYTES;
        let params = [ARRAY, RESULT, leaves as u64];
        self.encode.run(&mut memory, &Launch { params: &params, block: 0, blocks: 1, threads, shared_bytes });
        let slot = memory.0.pop().unwrap().1;
        (u64::from_le_bytes(memory.0[1].1.clone().try_into().unwrap()), slot)
    }

    /// The granule, and its digest.
    fn decode(&self, code: &[u8], granule_bytes: usize, threads: usize) -> (Vec<u8>, Digest) {
        let [of_device, of_host] =
            self.decoders.each_ref().map(|kernel| decoded(kernel, code, granule_bytes, threads));
        assert!(of_device == of_host);
        of_device
    }
}

fn decoded(kernel: &Kernel, code: &[u8], granule_bytes: usize, threads: usize) -> (Vec<u8>, Digest) {
    let array = [SLOT, code.len() as u64, GRANULE, 0].into_iter().flat_map(u64::to_le_bytes).collect();
    let mut memory = Memory(vec![
        (ARRAY, array),
        (RESULT, vec![0xAA; 16]),
        (SLOT, code.to_vec()),
        (GRANULE, vec![0xEE; granule_bytes]),
    ]);
    let leaves = granule_bytes / codec::BLOCK_BYTES;
    let shared_bytes = 16 * leaves + 16 + threads / 32 * STAGE_BYTES;
    let params = [ARRAY, RESULT, leaves as u64];
    kernel.run(&mut memory, &Launch { params: &params, block: 0, blocks: 1, threads, shared_bytes });
    let granule = memory.0.pop().unwrap().1;
    let digest = u128::from_le_bytes(memory.0[1].1.clone().try_into().unwrap());
    (granule, Digest(digest))
}

impl Kernels {
    #[track_caller]
    fn check(&self, granule: &[u8], threads: usize) {
        let mut expected = vec![0xEE; codec::code_bytes_max(granule.len())];
        let bytes = codec::encode(granule, &mut expected).unwrap();
        // More bytes than the code, of which the rest is left alone.
        let (measured, slot) = self.encode(granule, expected.len(), threads);
        assert_eq!(measured, bytes as u64);
        let differs = slot.iter().zip(&expected).position(|(found, expected)| found != expected);
        assert_eq!(differs, None, "of {bytes} bytes, {} blocks", granule.len() / codec::BLOCK_BYTES);
        let (decoded, digest) = self.decode(&slot[..bytes], granule.len(), threads);
        assert!(decoded == granule, "other bytes were decoded");
        assert_eq!(digest, Digest::of(granule));
    }
}

#[test]
fn granules_of_every_kind_of_block() {
    let kernels = Kernels::parse();
    for (nth, threads) in [(15, 32), (16, 64), (17, 512), (33, 96), (64, 128)] {
        kernels.check(&granules::mixed(nth as u64, nth), threads);
    }
}

#[test]
fn every_pattern_of_bf16() {
    let kernels = Kernels::parse();
    let words = |factor: u16| {
        (0..=u16::MAX).flat_map(|nth| nth.wrapping_mul(factor).to_le_bytes()).collect::<Vec<_>>()
    };
    kernels.check(&words(1), 512);
    kernels.check(&words(40503), 256);
}

#[test]
fn codes_that_do_not_fit_are_measured_only() {
    let kernels = Kernels::parse();
    let granule = granules::weights(3, 16);
    let bytes = codec::encoded_bytes(&granule);
    for slot_bytes in [0, 128, bytes - 1] {
        let (measured, slot) = kernels.encode(&granule, slot_bytes, 128);
        assert_eq!(measured, bytes as u64);
        assert!(slot.iter().all(|byte| *byte == 0xEE), "something was written");
    }
    let (_, slot) = kernels.encode(&granule, bytes, 128);
    assert!(kernels.decode(&slot, granule.len(), 128).0 == granule);
}

#[test]
fn spoiled_codes_decode_as_on_the_host() {
    let kernels = Kernels::parse();
    let granule = granules::mixed(5, 16);
    let mut code = vec![0; codec::code_bytes_max(granule.len())];
    let bytes = codec::encode(&granule, &mut code).unwrap();
    code.truncate(bytes);
    let spoil = |at: usize, byte: u8| {
        let mut code = code.clone();
        code[at] ^= byte;
        code
    };
    // Heads: places, kinds, escapes and bases; then planes and escapes.
    let heads =
        (0..16).flat_map(|block| (0..8).map(move |byte| (8 * block + byte, [0x01, 0x80, 0xFF][byte % 3])));
    let data = (0..24).map(|nth| (128 + nth * (bytes - 128) / 24, 0xFF));
    let cut = [16, 128, 1024, bytes / 2 / 16 * 16, bytes - 16].map(|bytes| code[..bytes].to_vec());
    let noise = [2944, 32 << 10].map(|bytes| pattern::bytes(9, bytes));
    let step = if Effort::of_this_run() == Effort::Quick { 5 } else { 1 };
    for code in heads.chain(data).step_by(step).map(|(at, byte)| spoil(at, byte)).chain(cut).chain(noise) {
        let mut expected = vec![0; granule.len()];
        codec::decode(&code, &mut expected);
        let (decoded, digest) = kernels.decode(&code, granule.len(), 512);
        assert!(decoded == expected, "other bytes than on the host");
        assert_eq!(digest, Digest::of(&expected));
    }
}
