//! `cargo xtask dist`: the Python package's wheels, as they are released, with an archive of the same command for each,
//! and the archive of the package's sources.
//!
//! Each is a release build for CPython's stable ABI on manylinux_2_28. The building machine is usually newer, and a
//! library linked against its glibc does not run on older ones. So zig links, which knows the symbols of every glibc.
//! It is pinned beside maturin in `requirements-dist.txt`, in its own environment because of its size.
//!
//! The wheel for this machine is installed under every supported CPython here. A wheel for another architecture is
//! built where the compiler has the target, and only its library is checked. A wheel is moved to `dist`, in cargo's
//! target folder, only after all of its checks have passed. (`wheels` is the folder of pip's builds.)

mod archive;
mod installed;
mod library;
pub(crate) mod licenses;
mod wheel;

use std::env::consts::ARCH;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use self::archive::Printed;
use self::library::Glibc;
use self::licenses::ARCHITECTURES;
use self::wheel::Wheel;
pub(crate) use self::wheel::cargo_home;
use crate::python::environment::{Environment, Tools, Unready};
use crate::python::interpreter::{self, Interpreter};
use crate::steps::{Failure, note, say};
use crate::toolchain::{is_installed, not_installed};

/// The tools that build a wheel.
pub(crate) const TOOLS: Tools = Tools {
    folder: "dist-venv",
    requirements: "crates/python/requirements-dist.txt",
    modules: &["pip", "maturin", "ziglang"],
};

/// Makes the wheels; `Some` is the reason if there are none.
pub(crate) fn run() -> Result<Option<String>, Failure> {
    let start = Instant::now();
    match dist() {
        Ok(made) => {
            say(&summary(start.elapsed(), &made.left_out));
            for path in made.files {
                say(&path.display().to_string());
            }
            Ok(None)
        }
        Err(unready) => unready.skip("no wheel built").map(Some),
    }
}

/// The wheels and archives.
#[derive(Debug, Default)]
struct Made {
    files: Vec<PathBuf>,
    left_out: Vec<String>,
}

fn dist() -> Result<Made, Unready> {
    let (environment, interpreters) = ready()?;
    licenses::check().map_err(Unready::Failed)?;
    let folder = environment.beside("dist");
    wheel::make_empty(&folder).map_err(Unready::Failed)?;
    let mut made = Made::default();
    let mut printed = None;
    for architecture in ours_first() {
        let wheel = Wheel { architecture };
        if !is_installed(&wheel.target()).map_err(Unready::Failed)? {
            made.left_out.push(format!("no wheel for {architecture}: {}", not_installed(&wheel.target())));
            continue;
        }
        let interpreters = if architecture == ARCH { &interpreters[..] } else { &[] };
        if interpreters.is_empty() {
            made.left_out
                .push(format!("the wheel for {architecture} was not installed: this is an {ARCH} machine"));
        }
        let files = hand_out(wheel, &environment, interpreters, (&folder, &mut printed));
        made.files.extend(files.map_err(Unready::Failed)?);
    }
    if made.files.is_empty() {
        return Err(Unready::Missing { what: made.left_out.join("; ") });
    }
    made.files.push(archive::pack_sources(&environment, &folder).map_err(Unready::Failed)?);
    Ok(made)
}

/// The architectures, this machine's first: its command prints what each archive has.
fn ours_first() -> Vec<&'static str> {
    let mut architectures = ARCHITECTURES.to_vec();
    architectures.sort_by_key(|architecture| *architecture != ARCH);
    architectures
}

/// The environment that builds wheels, and the interpreters to install them under.
fn ready() -> Result<(Environment, Vec<Interpreter>), Unready> {
    let readelf = Command::new(library::READELF).arg("--version").stdout(Stdio::null()).status();
    if !readelf.is_ok_and(|status| status.success()) {
        return Err(Unready::Missing { what: format!("no `{}` of binutils here", library::READELF) });
    }
    let environment = Environment::ready(TOOLS)?;
    match interpreter::all() {
        none if none.is_empty() => Err(Unready::no_python()),
        interpreters => Ok((environment, interpreters)),
    }
}

/// Builds a wheel, checks it, and moves it into the folder, with the archive of its command.
fn hand_out(
    wheel: Wheel,
    environment: &Environment,
    interpreters: &[Interpreter],
    (folder, printed): (&Path, &mut Option<Printed>),
) -> Result<Vec<PathBuf>, Failure> {
    let built = wheel.build(environment)?;
    let glibc = built.check()?;
    installed::check(&built.path, interpreters)?;
    let work = environment.beside("dist-build").join(wheel.architecture);
    let program = wheel.program()?;
    if wheel.architecture == ARCH {
        *printed = Some(Printed::by(&program, &environment.beside("dist-build"))?);
    }
    let mut files = Vec::new();
    match printed {
        Some(printed) => files.push(archive::pack(&wheel.target(), &program, printed, [&work, folder])?),
        None => {
            note(&format!("!!! no archive for {}: its pages need a wheel for {ARCH}", wheel.architecture));
        }
    }
    let size_kib = built.size_bytes()?.div_ceil(1024);
    files.insert(0, built.hand_out(folder)?);
    let versions: Vec<&str> = interpreters.iter().map(|interpreter| interpreter.version.as_str()).collect();
    say(&about(wheel, size_kib, &glibc, &versions));
    Ok(files)
}

fn about(wheel: Wheel, size_kib: u64, glibc: &Glibc, versions: &[&str]) -> String {
    let installed = if versions.is_empty() {
        "not installed".to_owned()
    } else {
        format!("installed under CPython {}", versions.join(", "))
    };
    format!("xtask dist: {}: {size_kib} KiB, needs glibc {glibc}, {installed}", wheel.file_name())
}

fn summary(took: Duration, left_out: &[String]) -> String {
    let left_out: String = left_out.iter().map(|what| format!("; {what}")).collect();
    format!("xtask dist: done in {:.1} s{left_out}", took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::python;
    use crate::steps::workspace_root;

    #[test]
    fn omissions_are_reported() {
        let left_out = ["no wheel for aarch64".to_owned(), "no tea".to_owned()];
        assert_eq!(summary(Duration::from_secs(2), &[]), "xtask dist: done in 2.0 s");
        let summarized = summary(Duration::from_secs(2), &left_out);
        assert_eq!(summarized, "xtask dist: done in 2.0 s; no wheel for aarch64; no tea");
    }

    #[test]
    fn interpreters_of_a_wheel_are_reported() {
        let (wheel, glibc) = (Wheel { architecture: "x86_64" }, Glibc::of(library::OLDEST_GLIBC));
        let summarized = about(wheel, 826, &glibc, &["3.10.13", "3.13.0"]);
        assert!(
            summarized.ends_with(".whl: 826 KiB, needs glibc 2.28, installed under CPython 3.10.13, 3.13.0"),
            "{summarized}"
        );
        assert!(about(wheel, 826, &glibc, &[]).ends_with(", not installed"));
    }

    #[test]
    fn wheels_and_tests_are_built_by_one_maturin() {
        let maturin = |tools: Tools| {
            let text = fs::read_to_string(workspace_root().join(tools.requirements)).unwrap();
            let pinned: Vec<String> =
                text.lines().filter(|line| line.starts_with("maturin==")).map(str::to_owned).collect();
            assert_eq!(pinned.len(), 1, "{text}");
            pinned
        };
        assert_eq!(maturin(TOOLS), maturin(python::TOOLS));
    }
}
