//! What a GPU has, by its compute capability.

const KIB: u64 = 1 << 10;

/// What a block has on every GPU, if its kernel does not opt in to more.
pub const WITHOUT_OPT_IN_BYTES: u64 = 48 * KIB;

/// Compute capability, and the KiB a block may opt in to. From 8.0 on the driver keeps 1 KiB per block for
/// itself; it is taken off here.
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

/// NVIDIA's number for what a GPU can do: 9.0, also written `sm_90`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capability {
    /// The number before the point.
    pub major: u32,
    /// The number behind it.
    pub minor: u32,
}

impl From<(u32, u32)> for Capability {
    fn from((major, minor): (u32, u32)) -> Self {
        Self { major, minor }
    }
}

/// The most shared memory that a kernel may ask for per block; `None` for a capability that is not in the table.
#[must_use]
pub fn per_block_bytes(capability: impl Into<Capability>) -> Option<u64> {
    let Capability { major, minor } = capability.into();
    let row = KIB_PER_BLOCK.iter().find(|(known, _)| *known == (major, minor));
    row.map(|(_, kib)| kib * KIB)
}

/// The capabilities that [`per_block_bytes`] knows, in ascending order.
pub fn known_capabilities() -> impl Iterator<Item = Capability> {
    KIB_PER_BLOCK.iter().map(|(known, _)| Capability::from(*known))
}

/// How a GPU multiplies tiles, as far as it decides what lies in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Generation {
    /// Up to 7.5: a tile goes through registers into shared memory, one at a time.
    Synchronous,
    /// 8.x and 12.x: tiles are copied ahead of their use, which then reads them into registers.
    Ahead,
    /// 9.x to 11.x: as `Ahead`, and four warps together multiply straight from shared memory, so that a tile is
    /// still in use while the next ones arrive.
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

    /// Whether a product of tiles with this many rows is one of warp groups.
    pub(crate) fn multiplies_in_place(self, rows: u64, num_warps: u64) -> bool {
        self == Self::WarpGroups && rows >= WARP_GROUP_ROWS && num_warps.is_multiple_of(WARP_GROUP_WARPS)
    }
}

/// A warp group's product has this many rows at least, 16 a warp.
const WARP_GROUP_ROWS: u64 = 64;
const WARP_GROUP_WARPS: u64 = 4;
/// Rows of a product that one warp computes at a time.
pub(crate) const WARP_ROWS: u64 = 16;

#[test]
fn the_table_is_in_order() {
    let known: Vec<Capability> = known_capabilities().collect();
    assert!(known.is_sorted());
    assert!(known.iter().all(|&capability| per_block_bytes(capability) > Some(WITHOUT_OPT_IN_BYTES)));
}
