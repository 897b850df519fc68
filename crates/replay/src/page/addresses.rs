//! Addresses at a moment, with small neighbours merged until there are few enough to show.
//!
//! Merging keeps the sums of bytes by state.

use crate::allocators::{PartState, Segment};
use crate::trace::BlockNumber;

/// Neighbours that are shown as one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) live: u64,
    pub(super) cached: u64,
    pub(super) unmapped: u64,
    /// Who has most of what is live, as far as is known.
    owner: u8,
    /// How much that is.
    owner_bytes: u64,
    /// How many parts it is made of.
    parts: u32,
}

impl Cell {
    pub(super) fn bytes(&self) -> u64 {
        self.live.saturating_add(self.cached).saturating_add(self.unmapped)
    }

    fn is_pure(&self) -> bool {
        [self.live, self.cached, self.unmapped].iter().filter(|bytes| **bytes > 0).count() <= 1
    }

    fn with(mut self, other: &Self) -> Self {
        if self.owner == other.owner || self.owner_bytes == 0 {
            self.owner = other.owner;
            self.owner_bytes += other.owner_bytes;
        } else if other.owner_bytes > self.owner_bytes {
            (self.owner, self.owner_bytes) = (other.owner, other.owner_bytes);
        }
        self.live = self.live.saturating_add(other.live);
        self.cached = self.cached.saturating_add(other.cached);
        self.unmapped = self.unmapped.saturating_add(other.unmapped);
        self.parts = self.parts.saturating_add(other.parts);
        self
    }
}

/// A segment, or small neighbours that are shown as one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    addr: u64,
    pool: u32,
    segments: u32,
    cells: Vec<Cell>,
}

impl Piece {
    fn bytes(&self) -> u64 {
        self.cells.iter().fold(0, |sum, cell| sum.saturating_add(cell.bytes()))
    }
}

/// All segments at a moment, by address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Map(Vec<Piece>);

/// What tells cells in a page's numbers: cached, unmapped, live by owner, or all of these with an owner.
const CACHED: i64 = 0;
const UNMAPPED: i64 = 1;
const LIVE: i64 = 2;

impl Map {
    /// With cells of at least `grain` bytes, but for the last of a segment.
    pub(super) fn of(segments: &[Segment], owner_of: impl Fn(BlockNumber) -> u8, grain: u64) -> Self {
        let piece = |segment: &Segment| {
            let cells = segment.parts.iter().filter(|part| part.bytes > 0).map(|part| {
                let mut cell = Cell { parts: 1, ..Cell::default() };
                match part.state {
                    PartState::Live(number) => {
                        (cell.live, cell.owner, cell.owner_bytes) =
                            (part.bytes, owner_of(number), part.bytes);
                    }
                    PartState::Cached => cell.cached = part.bytes,
                    PartState::Unmapped => cell.unmapped = part.bytes,
                }
                cell
            });
            Piece { addr: segment.addr, pool: segment.pool, segments: 1, cells: coarser(cells, grain) }
        };
        Self(grouped(segments.iter().map(piece), grain))
    }

    /// Merges what is smaller than `grain` bytes.
    pub(super) fn coarsen(&mut self, grain: u64) {
        let pieces = std::mem::take(&mut self.0).into_iter().map(|mut piece| {
            piece.cells = coarser(piece.cells.into_iter(), grain);
            piece
        });
        self.0 = grouped(pieces, grain);
    }

    /// About how much of a page it takes.
    pub(super) fn weight(&self) -> usize {
        let cells = self.0.iter().flat_map(|piece| &piece.cells);
        self.0.len() * 2 + cells.map(|cell| if cell.is_pure() { 1 } else { 3 }).sum::<usize>()
    }

    pub(super) fn sizes(&self) -> impl Iterator<Item = u64> {
        let cells = self.0.iter().flat_map(|piece| &piece.cells);
        cells.flat_map(|cell| [cell.live, cell.cached, cell.unmapped])
    }

    /// For each piece its address, pool, segments and cells, then the cells; sizes in units of so many bytes.
    pub(super) fn numbers(&self, unit: u64) -> Vec<i64> {
        let mut numbers = Vec::new();
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        for piece in &self.0 {
            let count = i64::try_from(piece.cells.len()).unwrap_or(i64::MAX);
            numbers.extend([signed(piece.addr), i64::from(piece.pool), i64::from(piece.segments), count]);
            for cell in &piece.cells {
                let owner = i64::from(cell.owner);
                let [live, cached, unmapped] =
                    [cell.live, cell.cached, cell.unmapped].map(|bytes| signed(bytes / unit.max(1)));
                match (live, cached, unmapped) {
                    (0, cached, 0) => numbers.extend([CACHED, cached]),
                    (0, 0, unmapped) => numbers.extend([UNMAPPED, unmapped]),
                    (live, 0, 0) if cell.parts == 1 => numbers.extend([LIVE + owner, live]),
                    _ => numbers.extend([-1 - owner, live, cached, unmapped, i64::from(cell.parts)]),
                }
            }
        }
        numbers
    }
}

fn coarser(cells: impl Iterator<Item = Cell>, grain: u64) -> Vec<Cell> {
    let mut found = Vec::new();
    let mut small: Option<Cell> = None;
    for cell in cells {
        if cell.bytes() >= grain {
            found.extend(small.take());
            found.push(cell);
            continue;
        }
        let merged = small.get_or_insert_default();
        *merged = merged.with(&cell);
        if merged.bytes() >= grain {
            found.extend(small.take());
        }
    }
    found.extend(small);
    found
}

/// Small segments that follow each other and are of one pool become one piece of one cell.
fn grouped(pieces: impl Iterator<Item = Piece>, grain: u64) -> Vec<Piece> {
    let mut found: Vec<Piece> = Vec::new();
    // Whether the last one may grow.
    let mut is_open = false;
    for piece in pieces {
        let bytes = piece.bytes();
        if bytes >= grain {
            found.push(piece);
            is_open = false;
            continue;
        }
        match found.last_mut().filter(|last| is_open && last.pool == piece.pool) {
            Some(last) => {
                last.segments = last.segments.saturating_add(piece.segments);
                let mut whole = Cell::default();
                last.cells.iter().chain(&piece.cells).for_each(|cell| whole = whole.with(cell));
                last.cells = vec![whole];
                is_open = whole.bytes() < grain;
            }
            None => {
                found.push(piece);
                is_open = true;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocators::SegmentPart;

    fn sums(map: &Map) -> [u64; 3] {
        let cells = map.0.iter().flat_map(|piece| &piece.cells);
        cells.fold([0; 3], |sums, cell| [sums[0] + cell.live, sums[1] + cell.cached, sums[2] + cell.unmapped])
    }

    #[test]
    fn merging_keeps_the_sums_of_bytes_by_state() {
        let mut random = fastrand::Rng::with_seed(11);
        let mut addr = 0;
        let mut expected = [0; 3];
        let segments: Vec<Segment> = (0..400)
            .map(|_| {
                let parts = (0..random.usize(1..60)).map(|_| {
                    let bytes =
                        512 * if random.u8(..) < 8 { random.u64(1..100_000) } else { random.u64(1..50) };
                    let (place, state) = match random.u8(0..5) {
                        0 => (1, PartState::Cached),
                        1 => (2, PartState::Unmapped),
                        _ => (0, PartState::Live(random.u32(0..9))),
                    };
                    expected[place] += bytes;
                    SegmentPart { bytes, state }
                });
                let parts: Vec<SegmentPart> = parts.collect();
                addr += 1 << 30;
                Segment { addr, pool: random.u32(0..2), parts }
            })
            .collect();
        let owner_of = |number| u8::try_from(number % 9).unwrap();
        let mut map = Map::of(&segments, owner_of, 1);
        assert_eq!(sums(&map), expected);
        let count = |map: &Map| map.0.iter().map(|piece| piece.cells.len()).sum::<usize>();
        let mut cells = count(&map);
        assert_eq!(cells, segments.iter().map(|segment| segment.parts.len()).sum::<usize>());
        for grain in (9..34).map(|power| 1_u64 << power) {
            map.coarsen(grain);
            assert_eq!(sums(&map), expected, "{grain}");
            assert!(count(&map) <= cells, "{grain}");
            cells = count(&map);
            let at_once = Map::of(&segments, owner_of, grain);
            assert_eq!(sums(&at_once), expected, "{grain}");
            assert_eq!(map.0.iter().map(|piece| piece.segments).sum::<u32>(), 400);
        }
        assert!(map.weight() < 2000, "{}", map.weight());
    }

    #[test]
    fn the_owner_of_most_names_a_merged_cell() {
        let part = |bytes, state| SegmentPart { bytes, state };
        let parts = vec![
            part(100, PartState::Live(3)),
            part(50, PartState::Live(4)),
            part(20, PartState::Cached),
            part(4096, PartState::Live(5)),
            part(30, PartState::Live(5)),
            part(30, PartState::Live(5)),
        ];
        let map =
            Map::of(&[Segment { addr: 7, pool: 2, parts }], |number| u8::try_from(number).unwrap(), 512);
        assert_eq!(map.numbers(1), [7, 2, 1, 3, -4, 150, 20, 0, 3, 7, 4096, -6, 60, 0, 0, 2]);
        assert_eq!(map.sizes().sum::<u64>(), 150 + 20 + 4096 + 60);
    }
}
