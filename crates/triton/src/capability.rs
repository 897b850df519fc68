//! Shared memory and matrix units by compute capability.

const KIB: u64 = 1 << 10;

/// Shared memory per block without opting in, on every GPU.
pub const WITHOUT_OPT_IN_BYTES: u64 = 48 * KIB;

/// KiB per block with opting in. From 8.0 on, the driver's 1 KiB per block is subtracted.
const KIB_PER_BLOCK: &[((u32, u32), u64)] = &[
    ((7, 0), 96),
    ((7, 5), 64),
    ((8, 0), 163),
    ((8, 6), 99),
    ((8, 7), 163),
    ((8, 8), 99),
    ((8, 9), 99),
    ((9, 0), 227),
    ((10, 0), 227),
    ((10, 3), 227),
    ((11, 0), 227),
    ((12, 0), 99),
    ((12, 1), 99),
];

/// A compute capability: 9.0, also written `sm_90`.
///
/// ```
/// use poorwill_triton::{Capability, per_block_bytes};
///
/// assert_eq!(per_block_bytes(Capability { major: 9, minor: 0 }), Some(227 << 10));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capability {
    /// Before the point.
    pub major: u32,
    /// After the point.
    pub minor: u32,
}

impl From<(u32, u32)> for Capability {
    fn from((major, minor): (u32, u32)) -> Self {
        Self { major, minor }
    }
}

/// Maximum shared memory per block; `None` for an unknown capability.
#[must_use]
pub fn per_block_bytes(capability: impl Into<Capability>) -> Option<u64> {
    let Capability { major, minor } = capability.into();
    let row = KIB_PER_BLOCK.iter().find(|(known, _)| *known == (major, minor));
    row.map(|(_, kib)| kib * KIB)
}

/// In ascending order.
pub fn known_capabilities() -> impl Iterator<Item = Capability> {
    KIB_PER_BLOCK.iter().map(|(known, _)| Capability::from(*known))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Generation {
    /// Up to 7.5: one tile at a time, through registers into shared memory.
    Synchronous,
    /// 8.x and 12.x: tiles are copied ahead, then read into registers.
    Ahead,
    /// 9.x to 11.x: as `Ahead`, but four warps multiply straight from shared memory, so a tile stays in use while the
    /// next ones arrive.
    WarpGroups,
}

impl Generation {
    pub(crate) fn of(capability: Capability) -> Self {
        match capability.major {
            0..=7 => Self::Synchronous,
            9..=11 => Self::WarpGroups,
            _ => Self::Ahead,
        }
    }

    pub(crate) fn multiplies_in_place(self, rows: u64, num_warps: u64) -> bool {
        self == Self::WarpGroups && rows >= WARP_GROUP_ROWS && num_warps.is_multiple_of(WARP_GROUP_WARPS)
    }
}

/// 16 per warp.
const WARP_GROUP_ROWS: u64 = 64;
const WARP_GROUP_WARPS: u64 = 4;
pub(crate) const WARP_ROWS: u64 = 16;

#[test]
fn the_table_is_in_order() {
    let known: Vec<Capability> = known_capabilities().collect();
    assert!(known.is_sorted());
    assert!(known.iter().all(|&capability| per_block_bytes(capability) > Some(WITHOUT_OPT_IN_BYTES)));
}
