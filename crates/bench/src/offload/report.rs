//! Result of a run.

use serde::Serialize;

use crate::figures::Spread;

/// Cost of weights in host memory. Seconds are medians of [`OffloadReport::passes`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OffloadReport {
    /// Size of all layers.
    pub host_bytes_asked: u64,
    /// Growth of the driver's host memory.
    pub host_bytes_used: u64,
    /// Allocation until every page was resident.
    pub pin_gib_per_s: f64,
    /// Copies by a kernel that reads host memory in place; `None` as [`OffloadReport::uva_how`] says.
    pub uva_gib_per_s: Option<f64>,
    /// Copies on one stream.
    pub explicit_gib_per_s: f64,
    /// All layers over [`OffloadReport::prefetch_s`].
    pub prefetch_gib_per_s: f64,
    /// A pass with resident layers.
    pub compute_s: f64,
    /// A pass with in-place reads; `None` as [`OffloadReport::uva_gib_per_s`].
    pub uva_s: Option<f64>,
    /// A pass with prefetching.
    pub prefetch_s: f64,
    /// The hidden share, by [`overlap_of`].
    pub overlap: f64,
    /// Whether all digests of all passes were right.
    pub verified: bool,
    /// The first wrong digest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<String>,
    /// Kind of device, as on the command line.
    pub device: String,
    /// Name of the device.
    pub device_name: String,
    /// Whether digests run at memory speed; otherwise computing uses the link, too.
    pub fast_digests: bool,
    /// Number of layers.
    pub layers: u32,
    /// Size of a layer.
    pub layer_bytes: u64,
    /// Slots of the prefetching pass.
    pub slots: usize,
    /// Part of a layer that is computed again.
    pub part_bytes: u64,
    /// How often it is computed again.
    pub repeats: u32,
    /// [`OffloadReport::compute_s`] over [`OffloadReport::transfer_s`].
    pub compute_transfer_ratio: f64,
    /// Copying all layers.
    pub transfer_s: f64,
    /// Copying all layers while as many others are computed: a bound without any order.
    pub side_by_side_s: f64,
    /// Passes per median, without the warm-up.
    pub passes: usize,
    /// Spread of the prefetching passes.
    pub prefetch_spread_s: Spread,
    /// Whether all layers are page-locked.
    pub pinned: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pageable_because: Option<String>,
    /// How layers were read in place, or why not.
    pub uva_how: String,
}

impl OffloadReport {
    /// Copying and computing in turn, over prefetching.
    #[must_use]
    pub fn speedup(&self) -> f64 {
        (self.compute_s + self.transfer_s) / self.prefetch_s.max(1e-9)
    }

    /// The longer of copying and computing, over prefetching; 1 is ideal.
    #[must_use]
    pub fn of_ideal(&self) -> f64 {
        self.compute_s.max(self.transfer_s) / self.prefetch_s.max(1e-9)
    }
}

/// Hidden share of the shorter of computing and copying, from 0 to 1.
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
            // Noise exceeds either end.
            (2.0, 2.0, 1.9, 1.0),
            (2.0, 2.0, 4.4, 0.0),
            (0.0, 2.0, 2.0, 0.0),
        ] {
            assert!((overlap_of(computing_s, copying_s, both_s) - expected).abs() < 1e-12);
        }
    }
}
