//! The arrows between the crates: `core ← driver ← poorwill ← {python, bench, preload, replay, rotate}`, with `cli` upon
//! `poorwill`, `bench`, `replay`, `rotate`, `router` and `mock-engine`, and the testkit for tests only. `triton` stands
//! by itself, for `python`, and `broker` for all that lend memory. What serves is `net ← {front, fleet} ← {rotate, router}`: a proxy compiles no etcd, a router
//! neither the service nor its policy, and `rotation-policy` knows none of them. What measures is for
//! the command and for tests: neither the library nor the Python package nor the service depends on it. Benchmarks that
//! compile a peer stand beside the house: nothing stands on them, and nobody compiles them by accident. The fake libcuda
//! stands on the driver's host device, and only the testkit on it; the mock engine is a process of that device; the fake NVML knows sizes and nothing else.
//!
//! Each crate names in the table below what it may stand on. Tests may use the testkit, the driver, what measures and
//! the fakes besides.

use std::collections::BTreeSet;

use cargo_metadata::{Dependency, DependencyKind, Metadata, MetadataCommand};

/// Which crates of the workspace a crate may depend on, normally and for its build.
const ARROWS: &[(&str, &[&str])] = &[
    ("poorwill-core", &[]),
    ("poorwill-triton", &[]),
    ("poorwill-broker", &[]),
    ("poorwill-net", &[]),
    ("poorwill-rotation-policy", &[]),
    ("poorwill-fleet", &["poorwill-net"]),
    ("poorwill-front", &["poorwill-core", "poorwill-net"]),
    ("poorwill-router", &["poorwill-core", "poorwill-fleet", "poorwill-front", "poorwill-net"]),
    ("poorwill-driver", &["poorwill-core"]),
    ("poorwill-fake-libcuda", &["poorwill-core", "poorwill-driver"]),
    ("poorwill-fake-nvml", &["poorwill-core"]),
    ("poorwill", &["poorwill-broker", "poorwill-core", "poorwill-driver"]),
    ("poorwill-bench", &["poorwill", "poorwill-driver"]),
    ("poorwill-local", &["poorwill", "poorwill-bench"]),
    ("poorwill-preload", &["poorwill"]),
    ("poorwill-python", &["poorwill", "poorwill-triton"]),
    ("poorwill-replay", &["poorwill"]),
    (
        "poorwill-rotate",
        &[
            "poorwill",
            "poorwill-driver",
            "poorwill-fleet",
            "poorwill-front",
            "poorwill-net",
            "poorwill-rotation-policy",
        ],
    ),
    ("poorwill-mock-engine", &["poorwill", "poorwill-driver", "poorwill-net"]),
    (
        "poorwill-cli",
        &[
            "poorwill",
            "poorwill-bench",
            "poorwill-broker",
            "poorwill-fleet",
            "poorwill-local",
            "poorwill-mock-engine",
            "poorwill-net",
            "poorwill-replay",
            "poorwill-rotate",
            "poorwill-router",
        ],
    ),
    ("poorwill-testkit", &["poorwill-core", "poorwill-driver", "poorwill-fake-libcuda"]),
    ("poorwill-bench-alloc", &["poorwill-core", "poorwill-driver"]),
    ("poorwill-interleavings", &[]),
    ("xtask", &[]),
];

/// How the name of a benchmark that compiles a peer begins.
const BENCH: &str = "poorwill-bench-";

/// How the name of a package of tests ends, behind that of the crate whose promises it holds.
const TESTS: &str = "-tests";

/// What any crate may use in its tests, beside its own row of the table.
const FOR_TESTS: &[&str] =
    &["poorwill-testkit", "poorwill-driver", "poorwill-bench", "poorwill-fake-libcuda", "poorwill-fake-nvml"];

/// What a crate may use in its examples: users name what the core defines by the library, which exports it.
const FOR_EXAMPLES: (&str, &str) = ("poorwill-core", "poorwill");

#[test]
fn arrows_hold() {
    let problems = problems(&workspace());
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

#[test]
fn benchmarks_are_built_by_name_only() {
    let metadata = metadata();
    let defaults = metadata.workspace_default_packages();
    assert!(!defaults.is_empty());
    for package in defaults {
        assert!(!package.name.starts_with(BENCH), "`cargo build` would compile {}", package.name);
    }
    for package in metadata.workspace_packages().iter().filter(|package| package.name.starts_with(BENCH)) {
        assert_eq!(package.publish.as_deref(), Some(&[][..]), "{} must not be published", package.name);
    }
}

/// How many packages the README's first command may compile.
const DEMO_PACKAGES_MAX: usize = 65;

/// What it may not compile, by the beginnings of their names: services, TLS, and what only tests need.
const NOT_IN_THE_DEMO: &[&str] = &[
    "axum",
    "h2",
    "hyper",
    "nvml-wrapper",
    "opentelemetry",
    "poorwill-fake",
    "poorwill-fleet",
    "poorwill-front",
    "poorwill-mock",
    "poorwill-net",
    "poorwill-preload",
    "poorwill-replay",
    "poorwill-rot",
    "poorwill-router",
    "poorwill-testkit",
    "prost",
    "proptest",
    "regex",
    "ring",
    "rustls",
    "tokio",
    "toml",
    "tracing",
];

#[test]
fn the_demo_compiles_little() {
    let mut command = MetadataCommand::new();
    command.manifest_path(manifest());
    command.other_options(["--locked", "--filter-platform", "x86_64-unknown-linux-gnu"].map(str::to_owned));
    let metadata = command.exec().expect("`cargo metadata` resolves this workspace");
    let packages = closure(&metadata, "poorwill-local");
    let wrong: Vec<&String> = packages
        .iter()
        .filter(|name| NOT_IN_THE_DEMO.iter().any(|beginning| name.starts_with(beginning)))
        .collect();
    assert!(wrong.is_empty(), "`cargo run --release -- demo` would compile {wrong:?}");
    let count = packages.len();
    assert!(count <= DEMO_PACKAGES_MAX, "it would compile {count} packages: {packages:?}");
    assert!(packages.contains("poorwill-core") && packages.contains("clap"), "{packages:?}");
}

#[test]
fn cargo_run_means_the_demo() {
    let metadata = metadata();
    let defaults: Vec<_> =
        metadata.workspace_default_packages().iter().map(|package| package.name.clone()).collect();
    assert_eq!(defaults, ["poorwill-local"]);
}

/// The names of the packages that are compiled for one of the workspace, its own among them.
fn closure(metadata: &Metadata, name: &str) -> BTreeSet<String> {
    let resolve = metadata.resolve.as_ref().expect("dependencies were resolved");
    let first = metadata.packages.iter().find(|package| package.name == name).expect("a member");
    let mut waiting = vec![&first.id];
    let mut seen = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if !seen.insert(id) {
            continue;
        }
        let node = resolve.nodes.iter().find(|node| node.id == *id).expect("each package is resolved");
        let needed = node
            .deps
            .iter()
            .filter(|needed| needed.dep_kinds.iter().any(|kind| kind.kind != DependencyKind::Development));
        waiting.extend(needed.map(|needed| &needed.pkg));
    }
    let name = |id| metadata[id].name.to_string();
    seen.into_iter().map(name).collect()
}

/// A crate of the workspace with the crates of the workspace that it depends on.
struct Crate {
    name: String,
    needs: Vec<(String, DependencyKind)>,
}

/// What is wrong with the arrows between `crates`, a line for each.
fn problems(crates: &[Crate]) -> Vec<String> {
    let mut problems = Vec::new();
    for Crate { name, needs } in crates {
        // Tests that are a package of their own may use what their crate's tests might.
        let tested = name.strip_suffix(TESTS);
        let row = tested.unwrap_or(name);
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == row) else {
            problems.push(format!("`{name}` is not in the table of arrows: add it to the table"));
            continue;
        };
        for (needed, kind) in needs {
            let in_table = allowed.contains(&needed.as_str());
            let for_tests =
                FOR_TESTS.contains(&needed.as_str()) || FOR_EXAMPLES == (name.as_str(), needed.as_str());
            let is_for_tests = *kind == DependencyKind::Development || tested.is_some();
            let is_allowed = in_table || for_tests && is_for_tests || tested == Some(needed);
            if !is_allowed {
                problems.push(format!(
                    "`{name}` must not have `{needed}` as a {kind} dependency; it may stand on {allowed:?}, \
                     and its tests on {FOR_TESTS:?}"
                ));
            }
        }
    }
    problems
}

fn workspace() -> Vec<Crate> {
    let metadata = metadata();
    let packages = metadata.workspace_packages();
    let is_ours = |name: &str| packages.iter().any(|package| package.name == name);
    packages
        .iter()
        .map(|package| Crate {
            name: package.name.to_string(),
            needs: package
                .dependencies
                .iter()
                .filter(|dependency| is_ours(&dependency.name) && !is_never_linked(dependency))
                .map(|dependency| (dependency.name.clone(), dependency.kind))
                .collect(),
        })
        .collect()
}

/// Whether no target has the dependency: such a one is named for the source archive only.
fn is_never_linked(dependency: &Dependency) -> bool {
    dependency.target.as_ref().is_some_and(|target| target.to_string() == "cfg(any())")
}

fn metadata() -> Metadata {
    MetadataCommand::new()
        .manifest_path(manifest())
        .no_deps()
        .exec()
        .expect("`cargo metadata` reads this workspace")
}

fn manifest() -> String {
    // As cargo says now: checkouts that share a target folder share this test's program.
    let own = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").into());
    // The root says which members `cargo run` means; a member would say itself.
    format!("{own}/../Cargo.toml")
}

mod the_checker {
    use super::*;
    use DependencyKind::{Build, Development, Normal};

    fn krate(name: &str, needs: &[(&str, DependencyKind)]) -> Crate {
        let needs = needs.iter().map(|(needed, kind)| ((*needed).to_owned(), *kind)).collect();
        Crate { name: name.to_owned(), needs }
    }

    #[test]
    fn accepts_the_house_as_it_is_meant() {
        let house = [
            krate("poorwill-core", &[("poorwill-testkit", Development), ("poorwill-driver", Development)]),
            krate("poorwill-driver", &[("poorwill-core", Normal), ("poorwill-testkit", Development)]),
            krate(
                "poorwill",
                &[("poorwill-core", Normal), ("poorwill-driver", Normal), ("poorwill-bench", Development)],
            ),
            krate("poorwill-bench", &[("poorwill", Normal), ("poorwill-testkit", Development)]),
            krate("poorwill-python", &[("poorwill", Normal), ("poorwill-triton", Normal)]),
            krate("poorwill-fleet", &[("poorwill-net", Normal), ("poorwill-testkit", Development)]),
            krate("poorwill-front", &[("poorwill-net", Normal), ("poorwill-testkit", Development)]),
            krate("poorwill-router", &[("poorwill-fleet", Normal), ("poorwill-front", Normal)]),
            krate(
                "poorwill-rotate",
                &[("poorwill", Normal), ("poorwill-front", Normal), ("poorwill-rotation-policy", Normal)],
            ),
            krate(
                "poorwill-cli",
                &[("poorwill", Normal), ("poorwill-bench", Normal), ("poorwill-rotate", Normal)],
            ),
            krate("poorwill-testkit", &[("poorwill-core", Normal), ("poorwill-driver", Normal)]),
            krate("poorwill-bench-alloc", &[("poorwill-core", Normal), ("poorwill-driver", Normal)]),
            krate("xtask", &[]),
        ];
        assert_eq!(problems(&house), Vec::<String>::new());
    }

    #[test]
    fn refuses_each_wrong_arrow() {
        for (from, to, kind) in [
            ("poorwill-core", "poorwill-driver", Normal),
            ("poorwill-core", "poorwill", Normal),
            ("poorwill-driver", "poorwill", Development),
            ("poorwill-driver", "poorwill", Normal),
            ("poorwill-driver", "poorwill-core-old", Build),
            ("poorwill", "poorwill-testkit", Normal),
            ("poorwill", "poorwill-testkit", Build),
            ("poorwill", "poorwill-bench", Normal),
            ("poorwill-python", "poorwill-bench", Normal),
            ("poorwill-rotate", "poorwill-bench", Normal),
            ("poorwill-broker", "poorwill-core", Normal),
            ("poorwill-net", "poorwill-fleet", Normal),
            ("poorwill-front", "poorwill-fleet", Normal),
            ("poorwill-front", "poorwill-rotation-policy", Normal),
            ("poorwill-front", "poorwill-rotate", Development),
            ("poorwill-rotation-policy", "poorwill-net", Normal),
            ("poorwill-router", "poorwill-rotate", Normal),
            ("poorwill-mock-engine", "poorwill-rotate", Normal),
            ("poorwill-python", "poorwill-core", Normal),
            ("poorwill-python", "poorwill-rotate", Normal),
            ("poorwill-rotate", "poorwill-cli", Development),
            ("poorwill-testkit", "poorwill", Normal),
            ("poorwill-cli", "xtask", Development),
            ("poorwill-core", "poorwill-bench-alloc", Development),
            ("poorwill-core-tests", "poorwill", Normal),
            ("poorwill", "poorwill-core-tests", Development),
        ] {
            let problems = problems(&[krate(from, &[(to, kind)])]);
            assert!(
                matches!(&problems[..], [problem] if problem.contains(from) && problem.contains(to)),
                "{from} → {to} ({kind:?}): {problems:?}"
            );
        }
    }

    #[test]
    fn refuses_a_crate_that_is_not_in_the_table() {
        let problems = problems(&[krate("poorwill-surprise", &[])]);
        assert!(matches!(&problems[..], [problem] if problem.contains("add it to the table")));
    }

    #[test]
    fn sees_the_arrows_of_this_workspace() {
        let crates = workspace();
        let driver = crates.iter().find(|krate| krate.name == "poorwill-driver").expect("a member");
        assert!(driver.needs.contains(&("poorwill-core".to_owned(), Normal)));
    }

    #[test]
    fn has_no_circle_and_no_arrow_into_the_tools() {
        let row = |name: &str| ARROWS.iter().position(|(row, _)| *row == name);
        for (name, allowed) in ARROWS {
            for needed in *allowed {
                assert!(row(needed) < row(name), "{name} stands on {needed}, whose row comes later");
                assert!(!["xtask", "poorwill-cli", "poorwill-testkit"].contains(needed), "{name}: {needed}");
                assert!(!needed.starts_with(BENCH), "{name}: {needed}");
            }
        }
    }
}
