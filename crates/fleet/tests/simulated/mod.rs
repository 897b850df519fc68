//! A day of a fleet in virtual time: machines that fail, models in Zipf's order of demand, bursts, day and night.
//!
//! What is decided lies behind [`Placing`]. Everything else is the same for each policy: traffic, failures, and how a
//! node takes turns. A node wakes what is asked for after idle models went to sleep, the longest idle first. What
//! waits for `TURN_MAX_MS` closes busy ones.

mod figures;
mod placing;
mod traffic;
mod turns;
mod world;

pub(crate) use figures::Figures;
pub(crate) use placing::{Fleet, LeastRecent, Placing, Static};
pub(crate) use world::{Size, World};

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use poorwill_fleet::records::{Goal, Stage};
use traffic::Traffic;
use world::Copy;

/// How long a node is dead before its lease ends.
const LEASE_MS: u64 = 10_000;
const DOWN_MS: u64 = 30 * 60_000;
const HOUR_MS: u64 = 3_600_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive,
    BurstBegins,
    BurstArrives { model: usize, until: u64 },
    Ends { copy: usize, life: u32 },
    Up { copy: usize, life: u32 },
    Turn { gpu: usize },
    Fails(usize),
    Detected(usize),
    Recovers(usize),
    Tick,
}

pub(crate) struct Simulation {
    world: World,
    traffic: Traffic,
    placing: Box<dyn Placing>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    figures: Figures,
    tick_ms: u64,
}

impl Simulation {
    /// The same seed and size bring the same traffic and failures, whatever the policy.
    pub(crate) fn new(size: Size, seed: u64, placing: Box<dyn Placing>) -> Self {
        let world = World::new(size, seed);
        let traffic = Traffic::new(&world, seed);
        let mut simulation = Self {
            world,
            traffic,
            placing,
            events: BinaryHeap::new(),
            order: 0,
            figures: Figures::default(),
            tick_ms: 30_000,
        };
        simulation.world.start_homes();
        simulation.at(0, Event::Arrive);
        simulation.at(0, Event::BurstBegins);
        simulation.at(0, Event::Tick);
        for (at, node) in traffic::failures(size, seed) {
            simulation.at(at, Event::Fails(node));
        }
        simulation
    }

    /// Runs through the first hours, which are not counted, and those that are.
    pub(crate) fn run(mut self) -> Figures {
        let size = self.world.size();
        let begin = size.hours_before * HOUR_MS;
        let end = begin + size.hours * HOUR_MS;
        let mut is_counted = false;
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            if at >= end {
                break;
            }
            self.world.now = at;
            if !is_counted && at >= begin {
                is_counted = true;
                self.world.counts = Default::default();
                self.figures = Figures::default();
            }
            self.on(event);
        }
        let late = self.world.copies.iter().map(Copy::waiting);
        self.figures.unanswered = late.sum();
        self.figures.finish(self.placing.name(), size.hours, &self.world.counts);
        self.figures
    }

    fn at(&mut self, at: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((at, self.order, event)));
    }

    fn on(&mut self, event: Event) {
        let now = self.world.now;
        match event {
            Event::Arrive => {
                if let Some(model) = self.traffic.model(now) {
                    self.arrived(model);
                }
                let next = now + self.traffic.gap_ms();
                self.at(next, Event::Arrive);
            }
            Event::BurstBegins => {
                let (model, until) = self.traffic.burst(now);
                self.at(now, Event::BurstArrives { model, until });
                let next = now + self.traffic.until_burst_ms();
                self.at(next, Event::BurstBegins);
            }
            Event::BurstArrives { model, until } if now < until => {
                self.arrived(model);
                let next = now + self.traffic.burst_gap_ms();
                self.at(next, Event::BurstArrives { model, until });
            }
            Event::BurstArrives { .. } => {}
            Event::Ends { copy, life } if self.world.copies[copy].life == life => {
                let of = &mut self.world.copies[copy];
                of.running -= 1;
                of.last_used = now;
                self.admit(copy);
                self.serve(self.world.copies[copy].gpu);
            }
            Event::Up { copy, life } if self.world.copies[copy].life == life => {
                let of = &mut self.world.copies[copy];
                of.stage = Stage::Awake;
                of.last_used = now;
                if of.goal != Goal::Hot && of.waiting() == 0 {
                    self.world.sleep(copy);
                }
                self.admit(copy);
                self.serve(self.world.copies[copy].gpu);
            }
            Event::Ends { .. } | Event::Up { .. } => {}
            Event::Turn { gpu } => {
                self.world.close_for_the_oldest(gpu);
                self.serve(gpu);
            }
            Event::Fails(node) => {
                self.figures.failed += self.world.fail(node);
                self.at(now + LEASE_MS, Event::Detected(node));
                self.at(now + DOWN_MS, Event::Recovers(node));
            }
            Event::Detected(node) => {
                self.world.nodes[node].is_known_dead = !self.world.nodes[node].is_alive;
                self.tick();
            }
            Event::Recovers(node) => {
                let of = &mut self.world.nodes[node];
                (of.is_alive, of.is_known_dead) = (true, false);
            }
            Event::Tick => {
                self.tick();
                self.at(now + self.tick_ms, Event::Tick);
            }
        }
    }

    fn arrived(&mut self, model: usize) {
        let now = self.world.now;
        let copy = match self.placing.route(&self.world, model) {
            Some(copy) if self.world.nodes[self.world.copies[copy].node].is_alive => copy,
            Some(_) => {
                self.figures.failed += 1;
                return;
            }
            None => {
                self.figures.refused += 1;
                return;
            }
        };
        self.world.asked(copy);
        self.world.copies[copy].queue.push_back(now);
        if self.world.copies[copy].stage == Stage::Awake {
            self.admit(copy);
        }
        let of = &self.world.copies[copy];
        if of.waiting() > 0 && !of.is_up() {
            let gpu = of.gpu;
            self.serve(gpu);
            if self.world.copies[copy].stage != Stage::Awake {
                self.at(now + turns::TURN_MAX_MS, Event::Turn { gpu });
            }
        }
    }

    /// Requests run that a copy can take.
    fn admit(&mut self, copy: usize) {
        let now = self.world.now;
        while let Some(since) = self.world.next_of(copy) {
            if self.figures.waited(now - since) {
                let of = &mut self.world.copies[copy];
                of.running += 1;
                of.last_used = now;
                let life = of.life;
                let takes = self.traffic.answer_ms();
                self.at(now + takes, Event::Ends { copy, life });
            }
        }
    }

    /// What waits on a GPU wakes, the oldest first.
    fn serve(&mut self, gpu: usize) {
        while let Some(copy) = self.world.oldest_waiting(gpu) {
            if !self.wake(copy, true) {
                return;
            }
        }
    }

    fn wake(&mut self, copy: usize, may_displace_hot: bool) -> bool {
        let Some(takes) = self.world.wake(copy, may_displace_hot) else { return false };
        let life = self.world.copies[copy].life;
        self.at(self.world.now + takes, Event::Up { copy, life });
        true
    }

    /// Goals change, and nodes act on them.
    fn tick(&mut self) {
        for (copy, goal) in self.placing.goals(&self.world) {
            self.world.set_goal(copy, goal);
        }
        for copy in self.world.to_prepare() {
            self.wake(copy, false);
        }
    }
}
