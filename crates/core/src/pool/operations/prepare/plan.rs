//! The footprint of an extent as it was when it was planned.

use crate::backup::Footprint;
use crate::driver::{DriverError, Op};
use crate::pool::parts::backups::Save;
use crate::pool::shared::Shared;

/// The footprint for these granules.
pub(super) struct Planned {
    pub(super) granules: Vec<usize>,
    pub(super) footprint: Footprint,
}

impl Planned {
    /// Footprints for codes have a place for each granule that was live then.
    pub(super) fn is_for(&self, save: &Save) -> bool {
        !self.footprint.is_encoded() || self.granules == save.granules
    }
}

impl Shared {
    pub(super) fn plan_footprint(&self, save: &Save) -> Result<Footprint, DriverError> {
        let mut footprints = self.plan_footprints(self.streams().background(), std::iter::once(save))?;
        footprints.pop().ok_or_else(|| DriverError::invalid(Op::Save, "a store planned no footprint"))
    }
}
