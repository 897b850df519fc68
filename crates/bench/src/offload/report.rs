//! What a run found. Sizes in bytes, times in seconds.

use serde::Serialize;

use crate::figures::Spread;

/// What weights in host memory cost. One shape in Rust and JSON. Seconds are medians of [`Report::passes`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// All layers.
    pub host_bytes_asked: u64,
    /// By how much the driver's host memory grew when they were made.
    pub host_bytes_used: u64,
    /// Making them, until every page was there.
    pub pin_gib_per_s: f64,
    /// A kernel that reads them where they are, and writes them to the device. Absent where there is none, see
    /// [`Report::uva_how`].
    pub uva_gib_per_s: Option<f64>,
    /// Copying them to the device, one after the other on one stream.
    pub explicit_gib_per_s: f64,
    /// All layers over [`Report::prefetch_s`].
    pub prefetch_gib_per_s: f64,
    /// A pass with layers that are on the device, nothing copied.
    pub compute_s: f64,
    /// A pass in which each layer is read in place by the kernel right before it is computed, on one stream. Absent
    /// as [`Report::uva_gib_per_s`] is.
    pub uva_s: Option<f64>,
    /// A pass with prefetching.
    pub prefetch_s: f64,
    /// How much of the shorter of computing and copying was hidden behind the other: [`overlap_of`].
    pub overlap: f64,
    /// Whether every digest of every pass was that of the layer's bytes.
    pub verified: bool,
    /// What was not, first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<String>,
    /// The device, as the command line names its kind.
    pub device: String,
    /// Its name for people.
    pub device_name: String,
    /// Whether the device computes digests at the speed of its memory; where not, computing uses the link, too.
    pub fast_digests: bool,
    /// How many layers.
    pub layers: u32,
    /// Size of each.
    pub layer_bytes: u64,
    /// How many slots prefetching had.
    pub slots: usize,
    /// How much of a layer was computed again, after all of it.
    pub part_bytes: u64,
    /// How often, to make computing last as long as copying.
    pub repeats: u32,
    /// What that came to: [`Report::compute_s`] over [`Report::transfer_s`].
    pub compute_transfer_ratio: f64,
    /// Copying all layers, as for [`Report::explicit_gib_per_s`].
    pub transfer_s: f64,
    /// Copying all layers on one stream while as many are computed on another, in slots that the other does not touch:
    /// what both take at the same time, whatever order is kept.
    pub side_by_side_s: f64,
    /// Over how many passes the medians are; one before them is not counted.
    pub passes: usize,
    /// How the prefetching passes varied.
    pub prefetch_spread_s: Spread,
    /// Whether all layers are page-locked.
    pub pinned: bool,
    /// Why not, if not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pageable_because: Option<String>,
    /// By what the layers were read in place, or why not, in a sentence.
    pub uva_how: String,
}

impl Report {
    /// What copying and computing take one after the other, over [`Report::prefetch_s`].
    #[must_use]
    pub fn speedup(&self) -> f64 {
        (self.compute_s + self.transfer_s) / self.prefetch_s.max(1e-9)
    }

    /// The longer of copying and computing over [`Report::prefetch_s`]: 1 is all that there is to be had.
    #[must_use]
    pub fn of_ideal(&self) -> f64 {
        self.compute_s.max(self.transfer_s) / self.prefetch_s.max(1e-9)
    }
}

/// How much of the shorter of computing and copying was hidden behind the other, if both together took `both_s`:
/// from 0, none, to 1, all.
#[must_use]
pub fn overlap_of(computing_s: f64, copying_s: f64, both_s: f64) -> f64 {
    let shorter_s = computing_s.min(copying_s);
    if shorter_s > 0.0 { ((computing_s + copying_s - both_s) / shorter_s).clamp(0.0, 1.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps() {
        for (computing_s, copying_s, both_s, expected) in [
            (2.0, 2.0, 2.0, 1.0),
            (2.0, 2.0, 4.0, 0.0),
            (2.0, 2.0, 3.0, 0.5),
            (1.0, 4.0, 4.0, 1.0),
            (1.0, 4.0, 4.5, 0.5),
            (4.0, 1.0, 4.75, 0.25),
            // Noise goes beyond either end.
            (2.0, 2.0, 1.9, 1.0),
            (2.0, 2.0, 4.4, 0.0),
            (0.0, 2.0, 2.0, 0.0),
        ] {
            assert!((overlap_of(computing_s, copying_s, both_s) - expected).abs() < 1e-12);
        }
    }
}
