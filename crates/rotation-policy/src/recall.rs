//! Models that come up again after they left for others.
//!
//! Promises: of idle models, and of busy ones, a hot one leaves last, and none for being idle. One that is held leaves for
//! nothing. While it is not awake, and no command put it to sleep, a hot model comes up again in free memory. It also takes
//! that of models which had no request for two minutes, can sleep, and are neither hot nor preloaded. One that is held waits
//! for memory like a request.

use super::time::Time;
use super::{ModelState, Policy};

impl ModelState {
    pub(super) fn is_hot(&self) -> bool {
        self.hot.is_ordered()
    }

    pub(super) fn set_hot(&mut self, is_hot: bool, now: Time) {
        if self.hot.set(is_hot, now) && !self.is_ready() {
            self.sleeps_after = false;
            self.left_for_others();
        }
    }

    /// Whether it gives way to nothing.
    pub(super) fn is_held(&self) -> bool {
        self.is_pinned || self.hot.is_held()
    }

    /// Whether it comes up without a request, and only because it is hot.
    pub(super) fn is_recalled(&self) -> bool {
        self.is_hot() && self.waiting_since().is_none() && (self.is_preloading || self.comes())
    }

    /// Whether it comes up again after it left for others.
    pub(super) fn returns(&self) -> bool {
        self.rules.preload || self.is_hot()
    }

    pub(super) fn left_for_others(&mut self) {
        self.is_displaced = self.returns();
    }

    /// It is awake, or a command put it to sleep, and so it need not come up again.
    pub(super) fn ends_recall(&mut self, was_put_to_sleep: bool) {
        self.is_displaced = false;
        self.hot.set_put_to_sleep(was_put_to_sleep);
    }

    /// It found no memory. What others leave does not bring it back now, and a hot one looks again later.
    pub(super) fn recall_failed(&mut self, now: Time) {
        self.is_displaced = false;
        self.hot.has_looked(now);
    }

    /// Its start made way for others. What they leave does not bring it back before its rest is over.
    pub(super) fn made_way(&mut self, now: Time) {
        if self.is_hot() {
            self.is_displaced = false;
            self.hot.made_way(now);
        }
    }

    /// When a hot model looks for memory.
    pub(super) fn recalled_at(&self) -> Option<Time> {
        let may = !self.is_wanted() && self.activation().is_some();
        self.hot.looks_at().filter(|_| may)
    }

    fn comes_up_again(&mut self) {
        (self.is_preloading, self.sleeps_after) = (true, false);
    }
}

impl Policy {
    /// What left for others comes up again where this one has left its GPUs to nothing that waits.
    pub(super) fn recall(&mut self, id: usize) {
        for other in 0..self.models.len() {
            let model = &self.models[other];
            let may = model.is_displaced && model.returns() && model.activation().is_some();
            if may && self.share(other, id) && !self.is_waited_for_beside(other) {
                self.models[other].comes_up_again();
            }
        }
    }

    /// Hot models that are due come up again where nothing waits, if there is memory.
    pub(super) fn recall_hot(&mut self) {
        let now = self.now;
        for id in 0..self.models.len() {
            if self.models[id].recalled_at().is_none_or(|at| now < at) {
                continue;
            }
            self.models[id].hot.has_looked(now);
            if self.models[id].hot.is_held() {
                self.models[id].wake_requested = Some(now);
            } else if !self.is_waited_for_beside(id) {
                self.models[id].comes_up_again();
            }
        }
    }

    /// Whether something on its GPUs is waited for, or is about to come.
    pub(super) fn is_waited_for_beside(&self, id: usize) -> bool {
        let is_waited_for =
            |model: &ModelState| model.is_selected || !model.is_ready() && model.waiting_since().is_some();
        (0..self.models.len()).any(|other| self.share(id, other) && is_waited_for(&self.models[other]))
    }
}
