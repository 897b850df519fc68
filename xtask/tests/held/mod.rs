//! The folders whose modules use each other in one direction and keep what changes to themselves.

/// Each with all that is below it. `xtask/tests/arrows_inside.rs` holds them to it.
pub(crate) const HELD: &[&str] = &[
    "crates/bench/src",
    "crates/broker/src",
    "crates/cli/src",
    "crates/core/src",
    "crates/driver/src",
    "crates/fake-libcuda/src",
    "crates/fake-nvml/src",
    "crates/fleet/src",
    "crates/front/src",
    "crates/local/src",
    "crates/mock-engine/src",
    "crates/net/src",
    "crates/poorwill/src",
    "crates/preload/src",
    "crates/python/src",
    "crates/replay/src",
    "crates/rotate/src",
    "crates/rotation-policy/src",
    "crates/router/src",
    "crates/testkit/src",
    "crates/triton/src",
    "xtask/src",
];

/// Types in them that change and have fields which other files see: crate and name. It only gets shorter.
pub(crate) const OPEN: &[(&str, &str)] = &[
    ("crates/driver", "HostArena"),
    ("crates/driver", "SlabTable"),
    ("crates/driver", "Transfer"),
    ("crates/testkit", "Authority"),
    ("crates/testkit", "Tenant"),
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
