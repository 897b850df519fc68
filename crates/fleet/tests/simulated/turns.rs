//! How a node takes turns: simpler than the rotation's policy, and the same for all placements.

use std::cmp::Reverse;

use poorwill_fleet::records::{Goal, Stage};

use super::world::{GPU_GIB, World};

/// Requests that a copy runs at a time.
const RUNNING_MAX: usize = 64;
/// A copy that was idle for this time leaves for one that should be hot.
const SETTLED_MS: u64 = 120_000;
/// After this time, what waits closes what is busy.
pub(super) const TURN_MAX_MS: u64 = 10_000;

impl World {
    /// The next request that a copy lets in, and when it came.
    pub(crate) fn next_of(&mut self, copy: usize) -> Option<u64> {
        let of = &mut self.copies[copy];
        let may = of.stage == Stage::Awake && !of.is_closing && of.running < RUNNING_MAX;
        if may { of.queue.pop_front() } else { None }
    }

    /// The copy on a GPU whose request has waited for longest, of those that are not up.
    pub(crate) fn oldest_waiting(&self, gpu: usize) -> Option<usize> {
        let waiting = self.gpus[gpu].copies.iter().copied().filter(|copy| {
            let of = &self.copies[*copy];
            !of.is_up() && of.waiting() > 0
        });
        waiting.min_by_key(|copy| (self.copies[*copy].queue.front().copied(), *copy))
    }

    /// What would go to sleep for it, and whether that is enough. Hot ones leave last.
    pub(crate) fn victims(&self, copy: usize, may_displace_hot: bool) -> (Vec<usize>, bool) {
        let gpu = &self.gpus[self.copies[copy].gpu];
        let mut free = GPU_GIB - gpu.used_gib;
        let need = self.model_of(copy).need_gib;
        if free >= need {
            return (Vec::new(), true);
        }
        let mut idle: Vec<usize> =
            gpu.copies.iter().copied().filter(|other| self.may_sleep(*other)).collect();
        // What is only prepared displaces nothing that was used just now.
        idle.retain(|other| {
            let of = &self.copies[*other];
            may_displace_hot || of.goal != Goal::Hot && self.now - of.last_used >= SETTLED_MS
        });
        idle.sort_by_key(|other| {
            let of = &self.copies[*other];
            (of.goal == Goal::Hot, of.last_used, *other)
        });
        let mut victims = Vec::new();
        for other in idle {
            if free >= need {
                break;
            }
            free += self.model_of(other).need_gib;
            victims.push(other);
        }
        (victims, free >= need)
    }

    fn may_sleep(&self, copy: usize) -> bool {
        let of = &self.copies[copy];
        of.stage == Stage::Awake && of.running == 0 && (of.waiting() == 0 || of.is_closing)
    }

    /// Begins to bring a copy up, if memory can be had. Returns how long it takes.
    pub(crate) fn wake(&mut self, copy: usize, may_displace_hot: bool) -> Option<u64> {
        let (victims, is_enough) = self.victims(copy, may_displace_hot);
        if !is_enough {
            return None;
        }
        let asleep_ms = victims.iter().map(|other| self.model_of(*other).sleep_ms).max().unwrap_or_default();
        for other in &victims {
            self.sleep(*other);
        }
        let takes = asleep_ms + self.cost_ms(copy);
        let has_requests = self.copies[copy].waiting() > 0;
        self.counts.swaps += u64::from(!victims.is_empty());
        let node = self.copies[copy].node;
        let stage = match self.copies[copy].stage {
            Stage::Asleep => {
                self.nodes[node].host_used_gib -= self.host_gib(copy);
                self.counts.wakes += 1;
                Stage::Waking
            }
            Stage::OnDisk => {
                self.counts.reloads += 1;
                Stage::Waking
            }
            _ => {
                self.counts.starts += 1;
                self.counts.starts_waited += u64::from(has_requests);
                Stage::Starting
            }
        };
        self.copies[copy].stage = stage;
        self.gpus[self.copies[copy].gpu].used_gib += self.model_of(copy).need_gib;
        Some(takes)
    }

    /// Busy copies let nothing in for a request that has waited for long: those with few requests first.
    pub(crate) fn close_for_the_oldest(&mut self, gpu: usize) {
        let Some(copy) = self.oldest_waiting(gpu) else { return };
        let since = self.copies[copy].queue.front().copied().unwrap_or(self.now);
        if self.now - since < TURN_MAX_MS {
            return;
        }
        let mut free = GPU_GIB - self.gpus[gpu].used_gib;
        let mut awake = self.gpus[gpu].copies.clone();
        awake.retain(|other| self.copies[*other].stage == Stage::Awake);
        awake.sort_by_key(|other| {
            let of = &self.copies[*other];
            (Reverse(of.is_closing), of.goal == Goal::Hot, of.running, of.last_used, *other)
        });
        for other in awake {
            if free >= self.model_of(copy).need_gib {
                return;
            }
            free += self.model_of(other).need_gib;
            self.copies[other].is_closing = true;
        }
    }

    /// What nodes bring up without a request: hot copies, and warm ones that were never started. One start at a time on
    /// each node.
    pub(crate) fn to_prepare(&self) -> Vec<usize> {
        let mut chosen = Vec::new();
        for node in self.nodes.iter().filter(|node| node.is_alive) {
            let is_starting = |copy: &usize| self.copies[*copy].stage == Stage::Starting;
            let mut may_start = !node.copies.iter().any(is_starting);
            for copy in node.copies.iter().copied() {
                let of = &self.copies[copy];
                if of.is_up() || of.goal == Goal::None {
                    continue;
                }
                let is_start = of.stage == Stage::Stopped;
                if is_start && may_start || !is_start && of.goal == Goal::Hot {
                    may_start &= !is_start;
                    chosen.push(copy);
                }
            }
        }
        chosen
    }
}
