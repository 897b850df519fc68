//! One true total and one true figure of free memory suffice. Then budget and headroom can be allocated, and
//! the pool stops at the device's or the budget's limit.
//!
//! The GPUs are drawn at random: cards and slices with neighbours, and sources with wrong figures.

use fastrand::Rng;
use poorwill::{Arena, Cap, Config, Device, OpenError};

use poorwill_testkit::child;

use super::scene::{GRANULE, MIB, Scene, cap, gpu, is_full, play, take};

/// How many GPUs are drawn.
const CASES: u64 = 48;

/// A whole card.
const CARD: u64 = 24 << 30;

/// More than any card has; any source may report it.
const ABSURD: [u64; 3] = [1 << 50, 1 << 62, u64::MAX];

#[test]
fn what_the_budget_promises_can_be_had() {
    if let Some(role) = child::role() {
        return Case::drawn(role.parse().unwrap()).check();
    }
    for seed in 0..CASES {
        let scene = Case::drawn(seed).scene();
        play(&seed.to_string(), &scene);
    }
}

#[test]
fn the_draw_has_every_kind() {
    let cases: Vec<Case> = (0..CASES).map(Case::drawn).collect();
    let has = |what: &str, is: fn(&Case) -> bool| {
        let count = cases.iter().filter(|case| is(case)).count();
        assert!(count >= 2, "{what}: {count}");
    };
    has("whole cards", |case| case.limit == Limit::None);
    has("slices of HAMi's", |case| matches!(case.limit, Limit::Hami { .. }));
    has("clients of MPS", |case| matches!(case.limit, Limit::Mps { .. }));
    has("over the limit", Case::is_over_limit);
    has("nothing left", |case| case.available_bytes() == 0);
    has("lies about the total", |case| case.info_total.is_some());
    has("lies about what is free", |case| case.info_free.is_some());
    has("properties that lie", |case| case.properties.is_some());
    has("an NVML that tells the truth", |case| matches!(case.nvml, NvmlSays::Truth { .. }));
    has("an NVML that does not", |case| !matches!(case.nvml, NvmlSays::Truth { .. }));
    has("a process that has some", |case| case.own_bytes() > 0);
    has("no cap", |case| case.cap.is_empty());
    has("a share", |case| case.cap.ends_with('%'));
    has("a cap in bytes", |case| case.cap.ends_with(|last: char| last.is_ascii_digit()));
}

/// What keeps this process from having the whole card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Limit {
    None,
    Hami { bytes: u64, is_in_environment: bool },
    Mps { bytes: u64 },
}

/// What NVML says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NvmlSays {
    Missing,
    NothingOfIt,
    NotAllowed,
    /// The figures of a card that is divided, which would be too small.
    Divided,
    /// More than there is, and nothing used.
    TooMuch,
    /// True of the card or of HAMi's slice; `own_bytes` of memory in use are this process's.
    Truth {
        own_bytes: u64,
    },
}

/// A GPU, and its sources' figures.
#[derive(Debug)]
struct Case {
    capacity_bytes: u64,
    limit: Limit,
    /// What is in use before the test begins.
    used_bytes: u64,
    properties: Option<u64>,
    info_total: Option<u64>,
    info_free: Option<u64>,
    nvml: NvmlSays,
    cap: String,
}

impl Case {
    fn drawn(seed: u64) -> Self {
        let mut draw = Rng::with_seed(seed);
        let capacity_bytes = draw.u64(16..=CARD / GRANULE) * GRANULE;
        let size = |draw: &mut Rng| draw.u64(GRANULE..=capacity_bytes + capacity_bytes / 4);
        let limit = match draw.u64(..3) {
            0 => Limit::None,
            1 => Limit::Hami { bytes: size(&mut draw), is_in_environment: draw.bool() },
            _ => Limit::Mps { bytes: size(&mut draw).next_multiple_of(MIB) },
        };
        let used_bytes = match draw.u64(..4) {
            0 => 0,
            1 => size(&mut draw),
            _ => draw.u64(..capacity_bytes / 2),
        };
        let lie = |draw: &mut Rng| match draw.u64(..6) {
            0 => Some(0),
            1 => Some(ABSURD[draw.usize(..3)]),
            2 => Some(capacity_bytes + draw.u64(1..=CARD)),
            // One that errs on the safe side.
            3 => Some(draw.u64(1..=capacity_bytes)),
            _ => None,
        };
        let nvml = match draw.u64(..8) {
            0 => NvmlSays::Missing,
            1 => NvmlSays::NothingOfIt,
            2 => NvmlSays::NotAllowed,
            3 => NvmlSays::Divided,
            4 => NvmlSays::TooMuch,
            5 => NvmlSays::Truth { own_bytes: draw.u64(..used_bytes.min(capacity_bytes) + 1) },
            _ => NvmlSays::Truth { own_bytes: 0 },
        };
        let cap = match draw.u64(..4) {
            0 => String::new(),
            1 => format!("{}%", draw.u64(1..=100)),
            _ => draw.u64(MIB..=capacity_bytes + capacity_bytes / 5).to_string(),
        };
        let [properties, info_total, info_free] = [(); 3].map(|()| lie(&mut draw));
        let drawn = Self { capacity_bytes, limit, used_bytes, properties, info_total, info_free, nvml, cap };
        drawn.with_a_truth()
    }

    /// With one source that is right about the total, and one about free memory.
    fn with_a_truth(mut self) -> Self {
        let is_over_limit = self.is_over_limit();
        if let Limit::Hami { is_in_environment, .. } = &mut self.limit {
            // Above its limit CUDA reports nothing, and the GPU opens only if a source reports the limit.
            *is_in_environment |= is_over_limit;
        }
        let nvml_knows =
            matches!(self.nvml, NvmlSays::Truth { .. }) && !matches!(self.limit, Limit::Mps { .. });
        let others_tell_truth = match self.limit {
            Limit::None => self.properties.is_none(),
            // A limit beyond the card is none.
            Limit::Hami { bytes, is_in_environment } => is_in_environment && bytes <= self.capacity_bytes,
            Limit::Mps { bytes } => bytes <= self.capacity_bytes || self.properties.is_none(),
        };
        if !others_tell_truth && !nvml_knows {
            self.info_total = None;
        }
        if !nvml_knows {
            self.info_free = None;
        }
        self
    }

    fn scene(&self) -> Scene {
        let mut play = vec![format!("0:used={}", self.used_bytes)];
        match self.limit {
            Limit::None => {}
            Limit::Hami { bytes, .. } => play.push(format!("0:hami={bytes}")),
            Limit::Mps { bytes } => play.push(format!("0:mps={bytes}")),
        }
        let lies =
            [("total", self.properties), ("info_total", self.info_total), ("info_free", self.info_free)];
        play.extend(lies.iter().filter_map(|(key, lie)| Some(format!("0:{key}={}", (*lie)?))));
        let scene = Scene::with(&self.capacity_bytes.to_string()).playing(&play.join(","));
        let scene = match self.limit {
            Limit::Hami { bytes, is_in_environment: true } => {
                scene.variable("CUDA_DEVICE_MEMORY_LIMIT_0", &bytes.to_string())
            }
            Limit::Mps { bytes } => {
                scene.variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", &format!("0={}M", bytes / MIB))
            }
            _ => scene,
        };
        let total_bytes = match self.limit {
            Limit::Hami { bytes, .. } => bytes.min(self.capacity_bytes),
            _ => self.capacity_bytes,
        };
        match self.nvml {
            NvmlSays::Missing => scene.without_nvml(),
            NvmlSays::NothingOfIt => scene,
            NvmlSays::NotAllowed => scene.known_as("MIG", ":total=1MiB:memory_error=4"),
            NvmlSays::Divided => scene.known_as("GPU", ":total=1MiB:mig_mode=1"),
            NvmlSays::TooMuch => scene.known_as("GPU", &format!(":total={}", 2 * CARD)),
            NvmlSays::Truth { own_bytes } => {
                let used = format!(":used={}:process=self/{own_bytes}", self.used_bytes);
                scene.known_as("GPU", &format!(":total={total_bytes}{used}"))
            }
        }
    }

    fn is_over_limit(&self) -> bool {
        matches!(self.limit, Limit::Hami { bytes, .. } if self.used_bytes > bytes)
    }

    /// What can be allocated.
    fn available_bytes(&self) -> u64 {
        let left = |bytes: u64| bytes.saturating_sub(self.used_bytes);
        let card = left(self.capacity_bytes);
        match self.limit {
            Limit::None => card,
            Limit::Hami { bytes, .. } => card.min(left(bytes)),
            Limit::Mps { bytes } => card.min(bytes),
        }
    }

    fn own_bytes(&self) -> u64 {
        if let NvmlSays::Truth { own_bytes } = self.nvml { own_bytes } else { 0 }
    }

    fn check(&self) {
        let cap: Option<Cap> = (!self.cap.is_empty()).then(|| cap(&self.cap));
        let device = Device::open(&gpu()).unwrap();
        let budget = device.budget(cap);
        drop(device);
        let (total, limit) = (budget.total_bytes.unwrap(), budget.budget_bytes.unwrap());
        let (headroom, available) = (budget.headroom_bytes.unwrap(), self.available_bytes());
        assert!(total <= available + self.used_bytes, "{self:?}: {budget:?}");
        assert!(headroom <= available && headroom <= limit && limit <= total, "{self:?}: {budget:?}");
        assert!(cap.is_none_or(|cap| limit <= cap.of(total)), "{self:?}: {budget:?}");
        assert_eq!(budget.process_used_bytes.unwrap_or(0), self.own_bytes(), "{self:?}");

        // What this process has in use is a part of the budget, too.
        let allowed = limit.saturating_sub(self.own_bytes());
        let arena = match Arena::open(Config::on(gpu()).within(cap)) {
            Ok(arena) => arena,
            Err(OpenError::Claim(_)) if allowed < GRANULE => return,
            Err(error) => panic!("{self:?}: {error}"),
        };
        assert_eq!(arena.limit_bytes(), allowed, "{self:?}");
        let mut granules = Granules { arena: &arena, held: 0 };
        granules.grow_to(headroom / GRANULE);
        // The pool may claim the rest of the budget, including what others use now, as far as the device
        // grants it.
        granules.grow_to(allowed.min(available) / GRANULE);
        for _ in 0..2 {
            let refused = take(&arena, GRANULE).expect_err("a granule more");
            assert!(is_full(&refused), "{self:?}: {refused}");
        }
        let stats = arena.stats().unwrap();
        assert_eq!(stats.mapped_bytes, granules.held * GRANULE, "{self:?}");
    }
}

/// An arena's memory: most granules in one block, the last ones separately.
struct Granules<'a> {
    arena: &'a Arena,
    held: u64,
}

impl Granules<'_> {
    fn grow_to(&mut self, granules: u64) {
        let more = granules.saturating_sub(self.held);
        let last = more.min(9);
        let parts = [more - last].into_iter().filter(|part| *part > 0);
        for part in parts.chain((0..last).map(|_| 1)) {
            take(self.arena, part * GRANULE).unwrap();
            self.held += part;
        }
    }
}
