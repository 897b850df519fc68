//! One block: how it is coded, its head, and its two planes.
//!
//! Values are dealt to the threads of a GPU's warp, which decodes a block. Value
//! `256 * row + 8 * thread + nth` is code `8 * row + nth` of its thread.

/// Raw bytes of a block; granules are multiples of it.
pub const BLOCK_BYTES: usize = 4096;

/// The data of blocks begins at multiples of this.
pub(crate) const UNIT_BYTES: usize = 128;

pub(super) type BlockBytes = [u8; BLOCK_BYTES];

const VALUES: usize = BLOCK_BYTES / 2;
const THREADS: usize = 32;
const ROWS: usize = 8;
const ROW_VALUES: usize = VALUES / ROWS;

/// Bytes of a thread's codes: 64 of 3 bits.
const THREAD_BYTES: usize = 24;

/// Units of the planes: a byte of sign and mantissa, and 3 bits, a value.
const PLANES_UNITS: usize = (VALUES + THREADS * THREAD_BYTES) / UNIT_BYTES;
const RAW_UNITS: usize = BLOCK_BYTES / UNIT_BYTES;

/// The code of an exponent that follows in full. Others are a distance below the base.
const ESCAPE: u8 = 7;

/// Blocks with as many escapes are no shorter than raw.
const ESCAPES_MAX: usize = BLOCK_BYTES - PLANES_UNITS * UNIT_BYTES - 1;

/// How far below the largest exponent the base may lie, so that a few large values cost little.
const SHIFT_MAX: u8 = 3;

/// How a block is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plan {
    /// One word of 4 bytes, over and over: no data.
    Fill([u8; 4]),
    Raw,
    Planes {
        base: u8,
        escapes: usize,
    },
}

/// What a head says, before its places are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockHead {
    kind: u8,
    /// Bits 0 to 23.
    data_units: u32,
    /// Bits 32 to 63: a word, or where escapes begin and the base.
    word: [u8; 4],
}

const FILL: u8 = 0;
const RAW: u8 = 1;
const BF16: u8 = 2;

impl BlockHead {
    pub(super) const BYTES: usize = 8;

    pub(super) fn new(plan: Plan, data_units: usize, escapes_at: usize) -> Self {
        let low = |number: usize| u32::try_from(number).unwrap_or_else(|_| unreachable!("codes are shorter"));
        let (kind, data_units, word) = match plan {
            Plan::Fill(word) => (FILL, 0, word),
            Plan::Raw => (RAW, low(data_units), [0; 4]),
            Plan::Planes { base, .. } => {
                let [first, second, third, _] = low(escapes_at).to_le_bytes();
                (BF16, low(data_units), [first, second, third, base])
            }
        };
        Self { kind, data_units, word }
    }

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let [first, second, third, _] = self.data_units.to_le_bytes();
        let [a, b, c, d] = self.word;
        [first, second, third, self.kind, a, b, c, d]
    }

    pub(super) fn from_bytes([first, second, third, kind, a, b, c, d]: [u8; Self::BYTES]) -> Self {
        Self { kind, data_units: u32::from_le_bytes([first, second, third, 0]), word: [a, b, c, d] }
    }
}

impl Plan {
    pub(super) fn of(raw: &BlockBytes) -> Self {
        let word = [raw[0], raw[1], raw[2], raw[3]];
        if raw.chunks_exact(4).all(|other| other == word) {
            return Self::Fill(word);
        }
        let exponents = exponents(&values(raw));
        let largest = exponents.iter().copied().fold(0, u8::max);
        // A base below zero would make escapes of all, so it is never the best.
        let (escapes, base) = (0..=SHIFT_MAX)
            .map(|shift| largest.wrapping_sub(shift))
            .map(|base| (escapes(&exponents, base), base))
            .fold((VALUES, 0), |best, next| if next.0 < best.0 { next } else { best });
        if escapes <= ESCAPES_MAX { Self::Planes { base, escapes } } else { Self::Raw }
    }

    pub(super) fn units(self) -> usize {
        match self {
            Self::Fill(_) => 0,
            Self::Raw => RAW_UNITS,
            Self::Planes { .. } => PLANES_UNITS,
        }
    }

    pub(super) fn escapes(self) -> usize {
        if let Self::Planes { escapes, .. } = self { escapes } else { 0 }
    }
}

/// `data` has the plan's units; `escapes` begins where the block's escapes do.
pub(super) fn write(plan: Plan, raw: &BlockBytes, data: &mut [u8], escapes: &mut [u8]) {
    let Plan::Planes { base, .. } = plan else {
        if plan == Plan::Raw {
            data.copy_from_slice(raw);
        }
        return;
    };
    let values = values(raw);
    let exponents = exponents(&values);
    let (rests, packed_codes) = data.split_at_mut(VALUES);
    for (rest, value) in rests.iter_mut().zip(&values) {
        *rest = low_byte(((value >> 8) & 0x80) | (value & 0x7F));
    }
    let mut codes = [0; VALUES];
    for (code, exponent) in codes.iter_mut().zip(&exponents) {
        *code = base.wrapping_sub(*exponent).min(ESCAPE);
    }
    let mut bits = [[0; THREADS]; ROWS];
    let mut escaped = [0; THREADS];
    for (row, (codes, bits)) in codes.chunks_exact(ROW_VALUES).zip(&mut bits).enumerate() {
        for ((codes, bits), escaped) in codes.chunks_exact(8).zip(bits).zip(&mut escaped) {
            let codes = word(codes);
            *bits = gathered(codes);
            *escaped |= escapes_of(codes) << (8 * row);
        }
    }
    pack(&bits, packed_codes);
    for (escape, at) in escapes.iter_mut().zip(places(&escaped)) {
        *escape = exponents[at];
    }
}

/// `None` where the head names no kind, or places outside of `stored`.
pub(super) fn read(head: BlockHead, stored: &[u8], raw: &mut [u8]) -> Option<()> {
    let data_at = usize::try_from(head.data_units).ok()?.checked_mul(UNIT_BYTES)?;
    let data = |units: usize| stored.get(data_at..data_at.checked_add(units * UNIT_BYTES)?);
    match head.kind {
        FILL => raw.chunks_exact_mut(4).for_each(|to| to.copy_from_slice(&head.word)),
        RAW => raw.copy_from_slice(data(RAW_UNITS)?),
        BF16 => {
            let [first, second, third, base] = head.word;
            let escapes_at = usize::try_from(u32::from_le_bytes([first, second, third, 0])).ok()?;
            read_planes(base, data(PLANES_UNITS)?, stored.get(escapes_at..)?, raw)?;
        }
        _ => return None,
    }
    Some(())
}

fn read_planes(base: u8, data: &[u8], escapes: &[u8], raw: &mut [u8]) -> Option<()> {
    let (rests, packed_codes) = data.split_at(VALUES);
    let bits = unpacked(packed_codes);
    let mut exponents = [0; VALUES];
    let mut escaped = [0; THREADS];
    for (row, (exponents, bits)) in exponents.chunks_exact_mut(ROW_VALUES).zip(&bits).enumerate() {
        for ((exponents, bits), escaped) in exponents.chunks_exact_mut(8).zip(bits).zip(&mut escaped) {
            let codes = spread(*bits);
            exponents.copy_from_slice(&codes.to_le_bytes());
            *escaped |= escapes_of(codes) << (8 * row);
        }
    }
    let count = escaped.iter().map(|escaped| escaped.count_ones() as usize).sum();
    if count > ESCAPES_MAX {
        return None;
    }
    exponents.iter_mut().for_each(|code| *code = base.wrapping_sub(*code));
    for (escape, at) in escapes.get(..count)?.iter().zip(places(&escaped)) {
        exponents[at] = *escape;
    }
    for ((value, rest), exponent) in raw.chunks_exact_mut(2).zip(rests).zip(&exponents) {
        value[0] = (exponent << 7) | (rest & 0x7F);
        value[1] = (rest & 0x80) | (exponent >> 1);
    }
    Some(())
}

/// A thread's 24 bits of four rows are three words, and each word lies beside those of the other threads.
fn pack(bits: &[[u32; THREADS]; ROWS], packed_codes: &mut [u8]) {
    for (rows, words) in bits.chunks_exact(4).zip(packed_codes.chunks_exact_mut(3 * 4 * THREADS)) {
        for thread in 0..THREADS {
            let [first, second, third, fourth] = [0, 1, 2, 3].map(|row: usize| rows[row][thread]);
            let packed =
                [first | (second << 24), (second >> 8) | (third << 16), (third >> 16) | (fourth << 8)];
            for (nth, word) in packed.iter().enumerate() {
                words[4 * THREADS * nth + 4 * thread..][..4].copy_from_slice(&word.to_le_bytes());
            }
        }
    }
}

/// The inverse of [`pack`].
fn unpacked(packed_codes: &[u8]) -> [[u32; THREADS]; ROWS] {
    let mut bits = [[0; THREADS]; ROWS];
    for (rows, words) in bits.chunks_exact_mut(4).zip(packed_codes.chunks_exact(3 * 4 * THREADS)) {
        for thread in 0..THREADS {
            let [first, second, third] = [0, 1, 2].map(|nth: usize| {
                let mut word = [0; 4];
                word.copy_from_slice(&words[4 * THREADS * nth + 4 * thread..][..4]);
                u32::from_le_bytes(word)
            });
            let packed = [first, (first >> 24) | (second << 8), (second >> 16) | (third << 16), third >> 8];
            for (row, packed) in rows.iter_mut().zip(packed) {
                row[thread] = packed & 0x00FF_FFFF;
            }
        }
    }
    bits
}

fn values(raw: &BlockBytes) -> [u16; VALUES] {
    let mut values = [0; VALUES];
    for (value, bytes) in values.iter_mut().zip(raw.chunks_exact(2)) {
        *value = u16::from_le_bytes([bytes[0], bytes[1]]);
    }
    values
}

fn exponents(values: &[u16; VALUES]) -> [u8; VALUES] {
    values.map(|value| low_byte(value >> 7))
}

fn low_byte(value: u16) -> u8 {
    value.to_le_bytes()[0]
}

/// How many exponents are not 0 to 6 below `base`.
fn escapes(exponents: &[u8; VALUES], base: u8) -> usize {
    // Counts of a part fit a byte.
    let parts = exponents.chunks_exact(128).map(|part| {
        part.iter().fold(0_u8, |count, exponent| count + u8::from(base.wrapping_sub(*exponent) >= ESCAPE))
    });
    parts.map(usize::from).sum()
}

/// Of eight codes.
fn word(codes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(codes);
    u64::from_le_bytes(word)
}

/// Where the values are whose codes, by thread, are escapes: in order of the escapes.
fn places(escaped: &[u64; THREADS]) -> impl Iterator<Item = usize> {
    escaped.iter().enumerate().flat_map(|(thread, escaped)| {
        let mut rest = *escaped;
        std::iter::from_fn(move || {
            let code = rest.trailing_zeros() as usize;
            rest &= rest.wrapping_sub(1);
            (code < 64).then_some(ROW_VALUES * (code / 8) + 8 * thread + code % 8)
        })
    })
}

/// A bit for each of eight codes that is an escape.
fn escapes_of(codes: u64) -> u64 {
    let bits = codes & (codes >> 1) & (codes >> 2) & 0x0101_0101_0101_0101;
    bits.wrapping_mul(0x0102_0408_1020_4080) >> 56
}

/// 24 bits from eight bytes of 3 bits.
fn gathered(codes: u64) -> u32 {
    let pairs = (codes | (codes >> 5)) & 0x003F_003F_003F_003F;
    let fours = (pairs | (pairs >> 10)) & 0x0000_0FFF_0000_0FFF;
    u32::try_from((fours | (fours >> 20)) & 0x00FF_FFFF).unwrap_or(0)
}

/// The inverse of [`gathered`].
fn spread(bits: u32) -> u64 {
    let bits = u64::from(bits);
    let fours = (bits | (bits << 20)) & 0x0000_0FFF_0000_0FFF;
    let pairs = (fours | (fours << 10)) & 0x003F_003F_003F_003F;
    (pairs | (pairs << 5)) & 0x0707_0707_0707_0707
}
