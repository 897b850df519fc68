//! Budgets on devices: the figures of all sources, the decision, and what can then be allocated.
//!
//! The GPUs are those of the fake libcuda, known to a fake NVML, both under NVIDIA's names. A process reads
//! their settings once, so each test runs again in a process of its own, its scene.

mod disagreement;
mod doctor;
mod envelope;
mod scene;
mod slices;
mod truth;
mod unified;
