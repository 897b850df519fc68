//! The folders whose modules use each other in one direction and keep what changes to themselves.

/// Each with all that is below it. `xtask/tests/arrows_inside.rs` holds them to it.
pub(crate) const HELD: &[&str] = &[
    "crates/bench/src/churn",
    "crates/bench/src/load",
    "crates/bench/src/offload",
    "crates/bench/src/synthetic",
    "crates/cli/src/bench",
    "crates/core/src",
    "crates/driver/src",
    "crates/fake-libcuda/src/calls",
    "crates/fake-libcuda/src/kernels",
    "crates/fake-nvml/src",
    "crates/fleet/src",
    "crates/poorwill/src/budget",
    "crates/poorwill/src/checkpoint",
    "crates/poorwill/src/ranks",
    "crates/preload/src/saver",
    "crates/python/src/block",
    "crates/python/src/budget",
    "crates/rotate/src/measure",
    "crates/testkit/src",
    "crates/triton/src",
    "xtask/src/vllm",
];

/// Folders whose modules are in layers, from top to bottom. `mod` is the folder's own file.
pub(crate) const LAYERS: &[(&str, &[&[&str]])] = &[(
    "crates/core/src/pool",
    &[
        &["mod", "close", "stats"],
        &["operations"],
        &["means"],
        &["shared"],
        &["state"],
        &["parts"],
        &["tools"],
    ],
)];
