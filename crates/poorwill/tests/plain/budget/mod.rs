//! Budgets where they meet the machines: what everyone says about a GPU, what is made of it, and what can really be
//! had then.
//!
//! The GPUs are those of the fake libcuda, known to a fake NVML, both under NVIDIA's names. A process reads their
//! settings once, so each test runs again in a process of its own, which is the scene that it plays in.

mod disagreement;
mod doctor;
mod envelope;
mod scene;
mod slices;
mod truth;
