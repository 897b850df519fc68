//! `cargo xtask dist`: the wheels of the Python package, as they are handed out.
//!
//! Each is a release build for CPython's stable ABI on manylinux_2_28. The system of the machine that builds is newer
//! as a rule, and what is linked against its glibc runs on nothing older; so zig links, which knows the symbols of
//! every glibc. It is pinned beside maturin in `requirements-dist.txt`, in an environment of its own, for it is large.
//!
//! The wheel for this machine is installed under every CPython here that it is for. One for another architecture is
//! built where the compiler has the target, and only its library is looked at. A wheel comes to lie in `dist`, in cargo's
//! target folder, when all of its checks have passed, and not before. (In `wheels` maturin leaves what pip builds.)

mod installed;
mod library;
mod wheel;

use std::env::consts::ARCH;
use std::process::{Command, Stdio};
use std::time::Instant;

use self::wheel::Wheel;
use crate::python::environment::{Environment, Tools, Unready};
use crate::python::interpreter;
use crate::steps::{Failure, say};
use crate::toolchain::{is_installed, not_installed};

/// What builds a wheel.
const TOOLS: Tools = Tools {
    folder: "dist-venv",
    requirements: "crates/python/requirements-dist.txt",
    modules: &["pip", "maturin", "ziglang"],
};

/// What wheels are built for, by Rust's name and a wheel's tag alike.
const ARCHITECTURES: [&str; 2] = ["x86_64", "aarch64"];

pub(crate) fn run() -> Result<(), Failure> {
    let start = Instant::now();
    let environment = match ready() {
        Ok(environment) => environment,
        // It has been said, and there is nothing else to say.
        Err(unready) => return unready.skip("no wheel built").map(drop),
    };
    let folder = environment.beside("dist");
    wheel::make_empty(&folder)?;
    let (mut wheels, mut left_out) = (Vec::new(), Vec::new());
    for architecture in ARCHITECTURES {
        let wheel = Wheel { architecture };
        if !is_installed(&wheel.target())? {
            left_out.push(format!("no wheel for {architecture}: {}", not_installed(&wheel.target())));
            continue;
        }
        let built = wheel.build(&environment)?;
        let glibc = built.check()?;
        let under = if architecture == ARCH {
            let interpreters = interpreter::all();
            installed::check(&built.path, &interpreters)?;
            format!("installed under CPython {}", installed::versions(&interpreters))
        } else {
            let why = format!("not installed: this is an {ARCH} machine");
            left_out.push(format!("wheel for {architecture} {why}"));
            why
        };
        let size_kib = built.size_bytes()?.div_ceil(1024);
        say(&format!("xtask dist: {}: {size_kib} KiB, needs glibc {glibc}, {under}", wheel.file_name()));
        wheels.push(built.hand_out(&folder)?);
    }
    if wheels.is_empty() {
        return Err(Failure::Missing { what: left_out.join("; ") });
    }
    let left_out =
        if left_out.is_empty() { String::new() } else { format!(" (left out: {})", left_out.join("; ")) };
    say(&format!("xtask dist: done in {:.1} s{left_out}", start.elapsed().as_secs_f64()));
    for path in wheels {
        say(&path.display().to_string());
    }
    Ok(())
}

fn ready() -> Result<Environment, Unready> {
    let readelf = Command::new(library::READELF).arg("--version").stdout(Stdio::null()).status();
    if !readelf.is_ok_and(|status| status.success()) {
        return Err(Unready::Missing { what: format!("no `{}` of binutils here", library::READELF) });
    }
    Environment::ready(TOOLS)
}
