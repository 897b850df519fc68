//! A simulated computer, and common checks on it.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use poorwill::budget::{Budget, Source, SourceName};
use poorwill::doctor::Plan;
use poorwill::{AllocRequest, Arena, Cap, Device, DeviceSpec, PoolError, Tag};
use poorwill_testkit::child;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// Granule of the fake's devices.
pub(crate) const GRANULE: u64 = 2 * MIB;

/// The driver and NVML, as NVIDIA's programs look for them.
const LIBCUDA: [&str; 1] = ["libcuda.so.1"];
const LIBNVML: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// A computer with one GPU or several, and an environment.
#[derive(Debug)]
pub(crate) struct Scene {
    variables: Vec<(String, String)>,
    has_cuda: bool,
    has_nvml: bool,
}

impl Scene {
    /// With GPUs of these capacities, as the fake libcuda reads them, and an NVML that knows none of them.
    pub(crate) fn with(capacities: &str) -> Self {
        let scene = Self { variables: Vec::new(), has_cuda: true, has_nvml: true };
        scene.variable("POORWILL_FAKE_CUDA_DEVICES", capacities)
    }

    /// Sets the fake's options.
    pub(crate) fn playing(self, play: &str) -> Self {
        self.variable("POORWILL_FAKE_CUDA_SIMULATE", play)
    }

    /// Sets NVML's figures for the first GPU, known by the prefix `GPU` or `MIG`.
    pub(crate) fn known_as(self, prefix: &str, settings: &str) -> Self {
        let uuid = poorwill_fake_libcuda::uuid_text(0);
        self.variable("POORWILL_FAKE_NVML_DEVICES", &format!("{prefix}-{uuid}{settings}"))
    }

    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Without a loadable NVML.
    pub(crate) fn without_nvml(self) -> Self {
        Self { has_nvml: false, ..self }
    }

    /// Without a loadable driver library.
    pub(crate) fn without_cuda(self) -> Self {
        Self { has_cuda: false, ..self }
    }

    fn run(&self, role: &str) {
        let libraries = tempfile::tempdir().unwrap();
        put(libraries.path(), &LIBCUDA, self.has_cuda.then(poorwill_fake_libcuda::path).as_deref());
        put(libraries.path(), &LIBNVML, self.has_nvml.then(poorwill_fake_nvml::path).as_deref());
        let mut command = child::without_settings(child::command(role, &[]));
        command.env("LD_LIBRARY_PATH", libraries.path());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        child::expect_success(command);
    }
}

/// Puts a library, or an invalid file, under each of these names, so that the system's own is not found.
fn put(folder: &Path, names: &[&str], library: Option<&Path>) {
    for name in names.iter().map(|name| folder.join(name)) {
        match library {
            Some(library) => symlink(library, name).unwrap(),
            None => std::fs::write(name, "no library").unwrap(),
        }
    }
}

/// Whether the caller runs in the scene. Otherwise its test has passed there.
pub(crate) fn in_scene(scene: &Scene) -> bool {
    let is_in_it = child::role().is_some();
    if !is_in_it {
        play("alone", scene);
    }
    is_in_it
}

/// Runs the calling test in a scene. Panics with its output unless it ran and passed.
pub(crate) fn play(role: &str, scene: &Scene) {
    scene.run(role);
}

pub(crate) fn gpu() -> DeviceSpec {
    "cuda:0".parse().unwrap()
}

pub(crate) fn open() -> Device {
    Device::open(&gpu()).unwrap()
}

pub(crate) fn cap(text: &str) -> Cap {
    text.parse().unwrap()
}

/// The first GPU's budget without a cap.
pub(crate) fn budget() -> Budget {
    open().budget(None)
}

/// Winner, budget and headroom.
pub(crate) fn figures(budget: &Budget) -> (Option<SourceName>, Option<u64>, Option<u64>) {
    (budget.winner, budget.budget_bytes, budget.headroom_bytes)
}

/// The figure of a source.
pub(crate) fn source_of(budget: &Budget, name: SourceName) -> &Source {
    budget.source(name).unwrap_or_else(|| panic!("{name} was not queried: {budget:?}"))
}

/// A source has this figure, and a note with these words.
pub(crate) fn assert_noted(budget: &Budget, name: SourceName, bytes: Option<u64>, words: &str) {
    let source = source_of(budget, name);
    let note = source.note.as_deref().unwrap_or_default();
    assert!(source.bytes == bytes && note.contains(words), "`{words}`, {bytes:?}: {source:?}");
}

/// A source's figure counts unchanged.
pub(crate) fn assert_plain(budget: &Budget, name: SourceName, bytes: u64) {
    let source = source_of(budget, name);
    assert!(source.bytes == Some(bytes) && source.note.is_none() && !source.is_odd, "{bytes}: {source:?}");
}

pub(crate) fn take(arena: &Arena, bytes: u64) -> Result<(), PoolError> {
    arena.alloc(&AllocRequest::new(bytes, Tag::weights())).map(drop)
}

/// The arena can allocate `bytes`, and not one granule more.
pub(crate) fn assert_allocatable(arena: &Arena, bytes: u64) {
    let whole = bytes / GRANULE * GRANULE;
    if whole > 0 {
        take(arena, whole).unwrap();
    }
    let refused = take(arena, GRANULE).expect_err("a granule more");
    assert!(is_full(&refused), "{refused}");
}

/// Whether the only reason is missing memory.
pub(crate) fn is_full(error: &PoolError) -> bool {
    matches!(error, PoolError::OverLimit { .. } | PoolError::DeviceFull { .. })
}

/// The default plan, with time for a busy machine.
pub(crate) fn plan_with_time() -> Plan {
    Plan::default().with_timeout(Duration::from_secs(3600))
}
