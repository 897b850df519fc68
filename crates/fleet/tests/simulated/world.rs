//! Machines, models, and copies of models on machines.

use std::collections::VecDeque;

use poorwill_fleet::records::{Goal, Stage};

/// How large a fleet is, and for how long it runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) nodes: usize,
    pub(crate) gpus: usize,
    pub(crate) models: usize,
    /// Nodes that have a model configured.
    pub(crate) copies: usize,
    /// Requests per second at the busiest time.
    pub(crate) per_second: f64,
    /// Not counted.
    pub(crate) hours_before: u64,
    /// Counted.
    pub(crate) hours: u64,
}

impl Size {
    /// One in fifty nodes, and two at least.
    pub(crate) fn nodes_of_domain(self) -> usize {
        (self.nodes / 50).max(2)
    }
}

pub(crate) const GPU_GIB: u64 = 80;
const HOST_GIB: u64 = 512;
/// Rates decay by a factor of e in this time.
const DECAY_MS: f64 = 1_800_000.0;

pub(crate) struct Model {
    pub(crate) need_gib: u64,
    pub(crate) wake_ms: u64,
    pub(crate) sleep_ms: u64,
    pub(crate) reload_ms: u64,
    pub(crate) start_ms: u64,
    /// Its copies, in an order that is the model's own. The first is its home.
    pub(crate) copies: Vec<usize>,
}

#[derive(Default)]
pub(crate) struct Node {
    pub(crate) is_alive: bool,
    pub(crate) is_known_dead: bool,
    pub(crate) host_used_gib: u64,
    /// In the order of their models.
    pub(crate) copies: Vec<usize>,
}

#[derive(Default)]
pub(crate) struct GpuState {
    pub(crate) used_gib: u64,
    pub(crate) copies: Vec<usize>,
}

pub(crate) struct Copy {
    pub(crate) model: usize,
    pub(crate) node: usize,
    /// Among those of all nodes.
    pub(crate) gpu: usize,
    pub(crate) stage: Stage,
    pub(crate) goal: Goal,
    pub(crate) running: usize,
    /// When each waiting request came.
    pub(crate) queue: VecDeque<u64>,
    /// Whether it lets nothing in, since others have waited for long.
    pub(crate) is_closing: bool,
    pub(crate) last_used: u64,
    /// What belonged to an earlier life is void.
    pub(crate) life: u32,
    rate: f64,
    rate_at: u64,
}

impl Copy {
    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.stage, Stage::Awake | Stage::Waking | Stage::Starting)
    }

    /// Requests per second.
    pub(crate) fn rate(&self, now: u64) -> f64 {
        self.rate * (-((now - self.rate_at) as f64) / DECAY_MS).exp()
    }
}

/// What nodes did.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) wakes: u64,
    pub(crate) reloads: u64,
    pub(crate) starts: u64,
    /// Starts for which requests waited.
    pub(crate) starts_waited: u64,
    /// Wakes, reloads and starts for which another model went to sleep.
    pub(crate) swaps: u64,
}

pub(crate) struct World {
    size: Size,
    pub(crate) now: u64,
    pub(crate) models: Vec<Model>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) gpus: Vec<GpuState>,
    pub(crate) copies: Vec<Copy>,
    pub(crate) counts: Counts,
}

impl World {
    pub(crate) fn new(size: Size, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let alive = || Node { is_alive: true, ..Node::default() };
        let mut world = Self {
            size,
            now: 0,
            models: Vec::new(),
            nodes: (0..size.nodes).map(|_| alive()).collect(),
            gpus: (0..size.nodes * size.gpus).map(|_| GpuState::default()).collect(),
            copies: Vec::new(),
            counts: Counts::default(),
        };
        for model in 0..size.models {
            let need_gib = match rng.u32(..100) {
                0..40 => 20,
                40..65 => 30,
                65..85 => 40,
                85..95 => 60,
                _ => 76,
            };
            let mut copies = Vec::new();
            let mut on: Vec<usize> = Vec::new();
            while on.len() < size.copies.min(size.nodes) {
                let node = rng.usize(..size.nodes);
                if on.contains(&node) {
                    continue;
                }
                on.push(node);
                let gpu = node * size.gpus + rng.usize(..size.gpus);
                copies.push(world.copies.len());
                world.nodes[node].copies.push(world.copies.len());
                world.gpus[gpu].copies.push(world.copies.len());
                world.copies.push(Copy {
                    model,
                    node,
                    gpu,
                    stage: Stage::Stopped,
                    goal: Goal::None,
                    running: 0,
                    queue: VecDeque::new(),
                    is_closing: false,
                    last_used: 0,
                    life: 0,
                    rate: 0.0,
                    rate_at: 0,
                });
            }
            world.models.push(Model {
                need_gib,
                wake_ms: 300 + 25 * need_gib,
                sleep_ms: 100 + 25 * need_gib,
                reload_ms: 500 + 250 * need_gib,
                start_ms: 30_000 + 1_000 * need_gib,
                copies,
            });
        }
        world
    }

    pub(crate) fn size(&self) -> Size {
        self.size
    }

    /// Every model was once started on its home, as far as there is host memory or disk.
    pub(crate) fn start_homes(&mut self) {
        for model in 0..self.models.len() {
            let home = self.models[model].copies[0];
            self.fall_asleep(home);
        }
    }

    pub(crate) fn model_of(&self, copy: usize) -> &Model {
        &self.models[self.copies[copy].model]
    }

    pub(crate) fn domain(&self, node: usize) -> usize {
        node / self.size.nodes_of_domain()
    }

    /// Until it is up, if it finds memory free.
    pub(crate) fn cost_ms(&self, copy: usize) -> u64 {
        let model = self.model_of(copy);
        match self.copies[copy].stage {
            Stage::Awake => 0,
            Stage::Waking | Stage::Asleep => model.wake_ms,
            Stage::OnDisk => model.reload_ms,
            _ => model.start_ms,
        }
    }

    pub(crate) fn asked(&mut self, copy: usize) {
        let now = self.now;
        let of = &mut self.copies[copy];
        of.rate = of.rate(now) + 1_000.0 / DECAY_MS;
        of.rate_at = now;
    }

    /// Gives its GPU back.
    pub(crate) fn sleep(&mut self, copy: usize) {
        self.gpus[self.copies[copy].gpu].used_gib -= self.model_of(copy).need_gib;
        self.fall_asleep(copy);
    }

    /// In host memory, from which the longest idle go to disk.
    fn fall_asleep(&mut self, copy: usize) {
        let node = self.copies[copy].node;
        let bytes = self.host_gib(copy);
        while self.nodes[node].host_used_gib + bytes > HOST_GIB {
            let asleep = self.nodes[node].copies.iter().copied();
            let asleep = asleep.filter(|other| self.copies[*other].stage == Stage::Asleep);
            let Some(oldest) = asleep.min_by_key(|other| (self.copies[*other].last_used, *other)) else {
                break;
            };
            self.copies[oldest].stage = Stage::OnDisk;
            self.nodes[node].host_used_gib -= self.host_gib(oldest);
        }
        let of = &mut self.copies[copy];
        (of.stage, of.is_closing) = (Stage::Asleep, false);
        self.nodes[node].host_used_gib += bytes;
    }

    pub(crate) fn host_gib(&self, copy: usize) -> u64 {
        self.model_of(copy).need_gib * 6 / 10
    }

    pub(crate) fn host_free_gib(&self, node: usize) -> u64 {
        HOST_GIB.saturating_sub(self.nodes[node].host_used_gib)
    }

    /// A machine stops at once. Returns the requests that it had.
    pub(crate) fn fail(&mut self, node: usize) -> usize {
        let mut lost = 0;
        self.nodes[node].is_alive = false;
        self.nodes[node].host_used_gib = 0;
        for copy in self.nodes[node].copies.clone() {
            let of = &mut self.copies[copy];
            lost += of.running + of.queue.len();
            (of.running, of.is_closing, of.stage, of.rate) = (0, false, Stage::Stopped, 0.0);
            of.goal = Goal::None;
            of.queue.clear();
            of.life += 1;
            self.gpus[of.gpu].used_gib = 0;
        }
        lost
    }

    /// What its placement says. Without one, its process ends if it sleeps.
    pub(crate) fn set_goal(&mut self, copy: usize, goal: Goal) {
        self.copies[copy].goal = goal;
        let of = &self.copies[copy];
        if goal == Goal::None && matches!(of.stage, Stage::Asleep | Stage::OnDisk) && of.waiting() == 0 {
            if of.stage == Stage::Asleep {
                let (node, gib) = (of.node, self.host_gib(copy));
                self.nodes[node].host_used_gib -= gib;
            }
            self.copies[copy].stage = Stage::Stopped;
        }
    }
}
