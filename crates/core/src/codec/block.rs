//! One block: how it is coded, its head, and its two planes.
//!
//! A value of a block has a place in a *lane*, as threads of a GPU's warp decode it: value
//! `256 * row + 8 * lane + nth` is code `8 * row + nth` of its lane.

use super::{BLOCK_BYTES, UNIT_BYTES};

pub(super) type Block = [u8; BLOCK_BYTES];

const VALUES: usize = BLOCK_BYTES / 2;
const LANES: usize = 32;
const ROWS: usize = 8;
const ROW_VALUES: usize = VALUES / ROWS;

/// Bytes of a lane's codes: 64 of 3 bits.
const LANE_BYTES: usize = 24;

/// Units of the planes: a byte of sign and mantissa, and 3 bits, a value.
const PLANES_UNITS: usize = (VALUES + LANES * LANE_BYTES) / UNIT_BYTES;
const RAW_UNITS: usize = BLOCK_BYTES / UNIT_BYTES;

/// The code of an exponent that follows in full. Others are a distance below the base.
const ESCAPE: u8 = 7;

/// Blocks with as many escapes are no shorter than raw.
const ESCAPES_MAX: usize = BLOCK_BYTES - PLANES_UNITS * UNIT_BYTES - 1;

/// How far below the largest exponent the base may lie, so that a few large values cost little.
const SHIFT_MAX: usize = 3;

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
    pub(super) fn of(raw: &Block) -> Self {
        let word = [raw[0], raw[1], raw[2], raw[3]];
        if raw.chunks_exact(4).all(|other| other == word) {
            return Self::Fill(word);
        }
        let exponents = exponents(raw);
        let largest = exponents.iter().copied().fold(0, u8::max);
        // Distances below the largest that some base cannot reach.
        let mut at = [0; 7 + SHIFT_MAX];
        let mut beyond = VALUES;
        for (distance, count) in (0..).zip(&mut at) {
            *count = exponents.iter().map(|exponent| usize::from(largest - exponent == distance)).sum();
            beyond -= *count;
        }
        let escapes =
            |shift: usize| at[..shift].iter().sum::<usize>() + at[shift + 7..].iter().sum::<usize>() + beyond;
        let (shift, escapes) = (0..=SHIFT_MAX)
            .map(|shift| (shift, escapes(shift)))
            .fold((0, usize::MAX), |best, next| if next.1 < best.1 { next } else { best });
        match u8::try_from(shift).ok().and_then(|shift| largest.checked_sub(shift)) {
            Some(base) if escapes <= ESCAPES_MAX => Self::Planes { base, escapes },
            _ => Self::Raw,
        }
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
pub(super) fn write(plan: Plan, raw: &Block, data: &mut [u8], escapes: &mut [u8]) {
    let Plan::Planes { base, .. } = plan else {
        if plan == Plan::Raw {
            data.copy_from_slice(raw);
        }
        return;
    };
    let exponents = exponents(raw);
    let (rests, lanes) = data.split_at_mut(VALUES);
    for (rest, value) in rests.iter_mut().zip(raw.chunks_exact(2)) {
        *rest = (value[1] & 0x80) | (value[0] & 0x7F);
    }
    let mut codes = [0; VALUES];
    for (code, exponent) in codes.iter_mut().zip(&exponents) {
        *code = base.wrapping_sub(*exponent).min(ESCAPE);
    }
    let mut next = escapes.iter_mut();
    for lane in 0..LANES {
        let mut packed = [0; LANE_BYTES + 1];
        for row in 0..ROWS {
            let at = ROW_VALUES * row + 8 * lane;
            let of_row = word(&codes, at);
            packed[3 * row..3 * row + 4].copy_from_slice(&gathered(of_row).to_le_bytes());
            each_escape(of_row, |nth| {
                next.by_ref().take(1).for_each(|escape| *escape = exponents[at + nth]);
            });
        }
        for (nth, word) in packed[..LANE_BYTES].chunks_exact(4).enumerate() {
            lanes[4 * LANES * nth + 4 * lane..][..4].copy_from_slice(word);
        }
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
    let (rests, lanes) = data.split_at(VALUES);
    let mut exponents = [0; VALUES];
    let (mut escaped, mut count) = ([0_u16; VALUES], 0);
    for lane in 0..LANES {
        let mut packed = [0; LANE_BYTES + 1];
        for (nth, word) in packed[..LANE_BYTES].chunks_exact_mut(4).enumerate() {
            word.copy_from_slice(&lanes[4 * LANES * nth + 4 * lane..][..4]);
        }
        for row in 0..ROWS {
            let at = ROW_VALUES * row + 8 * lane;
            let three = [packed[3 * row], packed[3 * row + 1], packed[3 * row + 2], 0];
            let of_row = spread(u32::from_le_bytes(three));
            exponents[at..at + 8].copy_from_slice(&of_row.to_le_bytes());
            each_escape(of_row, |nth| {
                escaped[count] = u16::try_from(at + nth).unwrap_or(u16::MAX);
                count += 1;
            });
        }
    }
    if count > ESCAPES_MAX {
        return None;
    }
    exponents.iter_mut().for_each(|code| *code = base.wrapping_sub(*code));
    for (at, escape) in escaped[..count].iter().zip(escapes.get(..count)?) {
        exponents[usize::from(*at)] = *escape;
    }
    for ((value, rest), exponent) in raw.chunks_exact_mut(2).zip(rests).zip(&exponents) {
        value[0] = (exponent << 7) | (rest & 0x7F);
        value[1] = (rest & 0x80) | (exponent >> 1);
    }
    Some(())
}

fn exponents(raw: &Block) -> [u8; VALUES] {
    let mut exponents = [0; VALUES];
    for (exponent, value) in exponents.iter_mut().zip(raw.chunks_exact(2)) {
        *exponent = (value[1] << 1) | (value[0] >> 7);
    }
    exponents
}

fn word(codes: &[u8; VALUES], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&codes[at..at + 8]);
    u64::from_le_bytes(word)
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

fn each_escape(codes: u64, mut escape: impl FnMut(usize)) {
    let mut bits = codes & (codes >> 1) & (codes >> 2) & 0x0101_0101_0101_0101;
    while bits != 0 {
        escape(bits.trailing_zeros() as usize / 8);
        bits &= bits - 1;
    }
}
