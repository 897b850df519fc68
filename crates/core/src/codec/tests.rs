//! Every byte comes back, sizes are as promised, and other programs' answers are met.

use proptest::prelude::*;

use super::*;
use crate::Digest;

fn coded(granule: &[u8]) -> Vec<u8> {
    let mut slot = vec![0xEE; code_bytes_max(granule.len())];
    let bytes = encode(granule, &mut slot).expect("the longest code fits");
    assert_eq!(bytes, encoded_bytes(granule), "measured and written");
    assert!(slot[bytes..].iter().all(|byte| *byte == 0xEE), "bytes behind the code were written");
    slot.truncate(bytes);
    slot
}

#[track_caller]
fn round_trip(granule: &[u8]) -> usize {
    let stored = coded(granule);
    let mut decoded = vec![0xEE; granule.len()];
    decode(&stored, &mut decoded);
    assert!(decoded == granule, "other bytes came back");
    if let Some(short) = stored.len().checked_sub(1) {
        assert_eq!(encode(granule, &mut vec![0; short]), None, "it was written where it does not fit");
    }
    stored.len()
}

fn words(values: impl Iterator<Item = u16>) -> Vec<u8> {
    values.flat_map(u16::to_le_bytes).collect()
}

/// Normally distributed bf16, by the sum of twelve uniform values.
fn weights(count: usize, scale: f32, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut value = || ((0..12).map(|_| random.f32()).sum::<f32>() - 6.0) * scale;
    words((0..count).map(|_| u16::try_from(value().to_bits() >> 16).unwrap()))
}

#[test]
fn every_pattern_of_bf16_comes_back() {
    // In order, so that blocks have few exponents; and mixed, so that they have all.
    assert!(round_trip(&words(0..=u16::MAX)) < 65536 * 2);
    round_trip(&words((0..=u16::MAX).map(|value| value.wrapping_mul(40503))));
}

#[test]
fn every_exponent_is_base_and_escape() {
    for exponent in 0..=255_u16 {
        let value = |nth: u16| match nth % 97 {
            0 => nth.wrapping_mul(40503),
            _ => (exponent.saturating_sub(nth % 9) << 7) | (nth & 0x807F),
        };
        round_trip(&words((0..2048).map(value)));
    }
}

#[test]
fn normal_weights_take_seven_tenths() {
    for (seed, scale) in [(1, 1.0), (2, 0.02), (3, 1e-30), (4, 3e30)] {
        let granule = weights(1 << 16, scale, seed);
        let tenths = round_trip(&granule) * 1000 / granule.len();
        assert!((690..=710).contains(&tenths), "scale {scale}: {tenths} thousandths");
    }
}

#[test]
fn a_few_large_values_cost_little() {
    let mut granule = weights(1 << 15, 0.02, 5);
    let without = round_trip(&granule);
    for at in (0..granule.len()).step_by(BLOCK_BYTES) {
        granule[at..at + 2].copy_from_slice(&u16::try_from(0.6_f32.to_bits() >> 16).unwrap().to_le_bytes());
    }
    assert!(round_trip(&granule) < without * 102 / 100, "{without} without them");
}

#[test]
fn equal_words_take_a_head_each_and_noise_nothing_more() {
    for word in [[0; 4], [0xFF; 4], [1, 2, 3, 4]] {
        assert_eq!(round_trip(&word.repeat(64 * BLOCK_BYTES / 4)), 512);
    }
    let mut noise = vec![0; 64 * BLOCK_BYTES];
    fastrand::Rng::with_seed(7).fill(&mut noise);
    assert_eq!(round_trip(&noise), code_bytes_max(noise.len()));
    // Where the last word alone differs.
    noise[..BLOCK_BYTES].fill(9);
    noise[BLOCK_BYTES - 1] = 8;
    round_trip(&noise);
}

/// Weights by arithmetic alone, for known answers.
fn arithmetic_weights(count: u32) -> impl Iterator<Item = u16> {
    (0..count).map(|nth| {
        let mixed = nth.wrapping_mul(0x9E37_79B1) ^ (nth >> 3);
        let exponent = 125 - (mixed >> 8).trailing_zeros().min(20);
        u16::try_from((mixed & 0x8000) | (exponent << 7) | (mixed & 0x7F)).unwrap()
    })
}

/// Computed with another program, in Python, that was written from `docs/codec.md`.
#[test]
fn known_answers_of_version_1() {
    assert_eq!(CODEC_VERSION, 1, "a new version needs new answers");
    let mut mixed = words(arithmetic_weights(8192));
    mixed.extend(vec![0; BLOCK_BYTES]);
    mixed.extend((0..BLOCK_BYTES).map(|nth| (nth * nth).to_le_bytes()[0] ^ (nth >> 3).to_le_bytes()[0]));
    mixed.extend(words((0..2048).map(|nth: u16| nth.wrapping_mul(37))));
    let answers = [
        (mixed, 19664, "65b2385edbcb870f267ff353989b2454"),
        (words((0..2048).map(|nth| 0x3F80 + nth % 500)), 2944, "21ddd77c4d5b616ad9ae34f373d6300f"),
    ];
    for (granule, bytes, digest) in answers {
        let stored = coded(&granule);
        assert_eq!((stored.len(), Digest::of(&stored).to_string()), (bytes, digest.to_owned()));
    }
}

#[test]
fn the_first_bytes_are_as_documented() {
    // 2048 times 1.0, but for the sixth, whose exponent is 20 less, and the last, 1.5 with the sign.
    let mut values = vec![0x3F80; 2048];
    values[5] = 0x3F80 - (20 << 7);
    values[2047] = 0xBFC0;
    let stored = coded(&words(values.into_iter()));
    assert_eq!(stored.len(), 128 + 2816 + 16);
    // Data at unit 1; kind 2; escapes at 2944 = 0xB80; base 127.
    assert_eq!(stored[..8], [1, 0, 0, 2, 0x80, 0x0B, 0, 127]);
    assert_eq!(stored[8..128], [0; 120]);
    assert_eq!(stored[128 + 2047], 0xC0);
    // Code 5 of thread 0 is bits 15 to 17.
    assert_eq!(stored[128 + 2048..128 + 2048 + 4], [0, 0x80, 0x03, 0]);
    assert_eq!(stored[2944..], [107, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn codes_that_are_cut_or_spoiled_give_other_bytes_without_a_panic() {
    let granule = weights(8192, 0.02, 13);
    let stored = coded(&granule);
    let mut decoded = vec![0; granule.len()];
    for bytes in (0..=stored.len() - END_BYTES).step_by(7) {
        decode(&stored[..bytes], &mut decoded);
        assert!(decoded != granule, "cut to {bytes}");
    }
    let mut random = fastrand::Rng::with_seed(17);
    for _ in 0..2000 {
        let mut spoiled = stored.clone();
        let (at, bit) = (random.usize(..stored.len()), random.u32(..8));
        spoiled[at] ^= 1 << bit;
        decode(&spoiled, &mut decoded);
    }
    for _ in 0..200 {
        decode(&(0..random.usize(..9000)).map(|_| random.u8(..)).collect::<Vec<_>>(), &mut decoded);
    }
}

/// So no bit of a code is without a digest's notice, but paddings and the place of escapes that are none.
#[test]
fn any_wrong_bit_of_a_block_with_escapes_gives_other_bytes() {
    let mut granule = weights(2048, 0.02, 19);
    // Six escapes, all different: exponents 2 to 12.
    for (nth, exponent) in (1..7).enumerate() {
        granule[400 * nth + 1] = exponent;
    }
    let stored = coded(&granule);
    let (escapes_at, mut decoded) = (128 + 2816, vec![0; granule.len()]);
    let escapes = stored[escapes_at..].iter().take_while(|escape| **escape > 0).count();
    assert!(escapes >= 6, "{escapes}");
    let used = (0..BlockHead::BYTES).chain(128..escapes_at + escapes);
    for (at, bit) in used.flat_map(|at| (0..8).map(move |bit| (at, bit))) {
        let mut spoiled = stored.clone();
        spoiled[at] ^= 1 << bit;
        decode(&spoiled, &mut decoded);
        assert!(decoded != granule, "bit {bit} of byte {at}");
    }
}

#[test]
fn sizes_without_a_code_are_known() {
    for (bytes, is_supported) in
        [(0, false), (4095, false), (4096, true), (6144, false), (8 << 20, true), (16 << 20, false)]
    {
        assert_eq!(supports(bytes), is_supported, "{bytes}");
    }
}

/// Blocks of every kind, in any order and mixture.
fn block_contents() -> impl Strategy<Value = Vec<u8>> {
    let normal =
        (any::<u64>(), -120_i32..120).prop_map(|(seed, power)| weights(2048, 2_f32.powi(power), seed));
    let sparse = (any::<[u8; 4]>(), proptest::collection::vec((0..BLOCK_BYTES, any::<u8>()), 0..40))
        .prop_map(|(word, changes)| {
            let mut block = word.repeat(BLOCK_BYTES / 4);
            changes.into_iter().for_each(|(at, byte)| block[at] = byte);
            block
        });
    let noise = any::<u64>().prop_map(|seed| {
        let mut block = vec![0; BLOCK_BYTES];
        fastrand::Rng::with_seed(seed).fill(&mut block);
        block
    });
    let escaped = (any::<u64>(), 0..2048_usize).prop_map(|(seed, noisy)| {
        let mut block = weights(2048, 0.02, seed);
        let mut random = fastrand::Rng::with_seed(seed);
        (0..noisy).for_each(|nth| block[2 * nth + 1] = random.u8(..));
        block
    });
    prop_oneof![normal, sparse, noise, escaped]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn granules_of_any_blocks_come_back(blocks in proptest::collection::vec(block_contents(), 1..12)) {
        let granule = blocks.concat();
        prop_assert!(round_trip(&granule) <= code_bytes_max(granule.len()));
    }
}
