//! What the package's shared libraries and its command require of a system, and what they export, as `readelf` reports.
//!
//! The rules are narrower than manylinux's, which allows more libraries. Ours may need glibc only, besides Python's
//! own symbols, which the interpreter provides.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;

use crate::steps::{Failure, Step};

/// The program that reads a library, also one for another machine.
pub(crate) const READELF: &str = "readelf";

/// All exports of the module: how Python starts it, and the allocator's functions.
pub(crate) const MODULE_EXPORTS: &[&str] = &["PyInit__native", "poorwill_alloc", "poorwill_free"];

/// All exports of the library to preload: two of the CUDA runtime's functions, and the interface of its users.
pub(crate) const PRELOAD_EXPORTS: &[&str] = &[
    "cudaFree",
    "cudaMalloc",
    "poorwill_tms_last_error",
    "poorwill_tms_last_message",
    "poorwill_tms_owns",
    "poorwill_tms_report",
    "poorwill_tms_set_unused",
    "set_memory_margin_bytes",
    "tms_get_cpu_backup_backend",
    "tms_get_cpu_backup_pointer",
    "tms_get_current_tag",
    "tms_get_enable_cpu_backup",
    "tms_get_enable_disk_backup",
    "tms_get_interesting_region",
    "tms_get_retain_cpu_backup",
    "tms_pause",
    "tms_resume",
    "tms_set_cpu_backup_backend",
    "tms_set_current_tag",
    "tms_set_disk_backup_dir",
    "tms_set_enable_cpu_backup",
    "tms_set_enable_disk_backup",
    "tms_set_interesting_region",
    "tms_set_retain_cpu_backup",
];

/// The command exports nothing.
pub(crate) const COMMAND_EXPORTS: &[&str] = &[];

/// Parts of glibc 2.28, which later versions still have.
const LIBRARIES: [&str; 7] = [
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
];

/// The oldest glibc that the library must run with.
pub(crate) const OLDEST_GLIBC: [u32; 2] = [2, 28];

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Glibc(Vec<u32>);

/// What a shared library needs and exports.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Library {
    /// Libraries that are loaded with it.
    needed: Vec<String>,
    /// Versions of the symbols that it takes from them.
    versions: Vec<String>,
    /// Symbols that it takes from any library; weak ones do not count.
    taken: Vec<String>,
    exported: Vec<String>,
}

impl Library {
    pub(crate) fn read(path: &Path) -> Result<Library, Failure> {
        let arguments = ["--wide", "--dynamic", "--version-info", "--dyn-syms"].map(OsStr::new).into_iter();
        let step = Step::program(OsStr::new(READELF), arguments.chain([path.as_os_str()]));
        Ok(Library::parse(&step.env("LC_ALL", "C").output()?))
    }

    fn parse(output: &str) -> Library {
        let mut library = Library::default();
        for line in output.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                [_, "(NEEDED)", .., name] => library.needed.push(name.trim_matches(['[', ']']).to_owned()),
                [_, "Name:", version, "Flags:", ..] => library.versions.push(version.to_owned()),
                [number, _, _, _, "GLOBAL" | "WEAK" | "UNIQUE", ..] if number.ends_with(':') => {
                    library.add_symbol(&words[4..]);
                }
                _ => {}
            }
        }
        library
    }

    /// Adds a symbol, from its binding on, as in `GLOBAL DEFAULT UND malloc@GLIBC_2.2.5 (2)`.
    fn add_symbol(&mut self, words: &[&str]) {
        match words {
            ["GLOBAL", _, "UND", name, ..] if !name.contains('@') => self.taken.push((*name).to_owned()),
            // Versioned symbols are listed among the versions, and weak ones may be absent.
            [_, _, "UND", ..] | [_, "HIDDEN" | "INTERNAL", ..] => {}
            // Between visibility and section there may be machine-specific words.
            [.., name] => {
                self.exported.push(name.split('@').next().unwrap_or_default().to_owned());
            }
            [] => {}
        }
    }

    /// The oldest glibc that it runs with, or else what would not work everywhere, or must not be exported.
    pub(crate) fn checked(&self, exports: &[&str]) -> Result<Glibc, Vec<String>> {
        let mut problems = Vec::new();
        let mut add = |problem: String| problems.push(problem);
        for name in exports.iter().filter(|name| !self.exported.iter().any(|has| has == *name)) {
            add(format!("it does not export `{name}`"));
        }
        for name in self.exported.iter().filter(|name| !exports.contains(&name.as_str())) {
            add(format!("it exports `{name}`"));
        }
        for name in self.needed.iter().filter(|name| !LIBRARIES.contains(&name.as_str())) {
            add(format!("it needs {name}, which is no part of glibc"));
        }
        for name in self.taken.iter().filter(|name| !name.starts_with("Py") && !name.starts_with("_Py")) {
            add(format!("it takes `{name}`, which neither glibc nor Python has"));
        }
        let oldest = Glibc::of(OLDEST_GLIBC);
        for version in &self.versions {
            if Glibc::parse(version).is_none_or(|version| version > oldest) {
                add(format!("it needs {version}, and glibc {oldest} does not have it"));
            }
        }
        match self.versions.iter().filter_map(|version| Glibc::parse(version)).max() {
            Some(glibc) if problems.is_empty() => Ok(glibc),
            Some(_) => Err(problems),
            // Every library has such symbols, so the output was not understood.
            None => {
                problems.push("no version of glibc was found in it".to_owned());
                Err(problems)
            }
        }
    }
}

impl Glibc {
    pub(crate) fn of(version: [u32; 2]) -> Glibc {
        Glibc(version.to_vec())
    }

    /// Parses a symbol's version, as in `GLIBC_2.28`. Others, such as `GLIBC_PRIVATE`, are not numbers: they require
    /// one exact build of glibc, or a lookup by name.
    fn parse(version: &str) -> Option<Glibc> {
        let numbers = version.strip_prefix("GLIBC_")?.split('.').map(|number| number.parse().ok());
        numbers.collect::<Option<Vec<u32>>>().map(Glibc)
    }
}

impl fmt::Display for Glibc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&numbers.join("."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of readelf, shortened.
    const SAID: &str = "
Dynamic section at offset 0x1c4c00 contains 28 entries:
  Tag        Type                         Name/Value
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
 0x0000000000000001 (NEEDED)             Shared library: [ld-linux-x86-64.so.2]
 0x0000000000000019 (INIT_ARRAY)         0x1b5d28

Symbol table '.dynsym' contains 150 entries:
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     0: 0000000000000000     0 NOTYPE  LOCAL  DEFAULT  UND\x20
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND memcpy@GLIBC_2.14 (2)
     2: 0000000000000000     0 NOTYPE  GLOBAL DEFAULT  UND PyExc_ValueError
     3: 0000000000000000     0 NOTYPE  WEAK   DEFAULT  UND gettid
     4: 0000000000000000     0 FUNC    WEAK   DEFAULT  UND statx@GLIBC_2.28 (10)
   147: 00000000000a1b90    22 FUNC    GLOBAL DEFAULT   13 PyInit__native
   148: 00000000000a1bb0    88 FUNC    GLOBAL DEFAULT   13 poorwill_alloc
   149: 00000000000a1c10    61 FUNC    GLOBAL DEFAULT   13 poorwill_free

Version symbols section '.gnu.version' contains 150 entries:
 Addr: 0x0000000000001348  Offset: 0x00001348  Link: 3 (.dynsym)
  000:   0 (*local*)       2 (GLIBC_2.14)    1 (*global*)      1 (*global*)

Version needs section '.gnu.version_r' contains 2 entries:
 Addr: 0x0000000000001470  Offset: 0x00001470  Link: 8 (.dynstr)
  000000: Version: 1  File: libc.so.6  Cnt: 2
  0x0010:   Name: GLIBC_2.14  Flags: none  Version: 2
  0x0020:   Name: GLIBC_2.28  Flags: none  Version: 10
  0x0030: Version: 1  File: ld-linux-x86-64.so.2  Cnt: 1
  0x0040:   Name: GLIBC_2.3  Flags: none  Version: 3
";

    #[test]
    fn readelfs_output_is_parsed() {
        let library = Library::parse(SAID);
        assert_eq!(library.needed, ["libc.so.6", "ld-linux-x86-64.so.2"]);
        assert_eq!(library.versions, ["GLIBC_2.14", "GLIBC_2.28", "GLIBC_2.3"]);
        assert_eq!(library.taken, ["PyExc_ValueError"]);
        assert_eq!(library.exported, MODULE_EXPORTS);
        assert_eq!(library.checked(MODULE_EXPORTS).unwrap().to_string(), "2.28");
    }

    #[test]
    fn unportable_needs_are_problems() {
        for (with, instead, says) in [
            (
                "libc.so.6]",
                "libpython3.11.so.1.0]",
                "it needs libpython3.11.so.1.0, which is no part of glibc",
            ),
            ("GLIBC_2.28  ", "GLIBC_2.29  ", "it needs GLIBC_2.29, and glibc 2.28 does not have it"),
            ("GLIBC_2.28  ", "GLIBC_3.0  ", "it needs GLIBC_3.0, and glibc 2.28 does not have it"),
            ("GLIBC_2.28  ", "GLIBC_PRIVATE  ", "it needs GLIBC_PRIVATE, and glibc 2.28 does not have it"),
            ("GLIBC_2.28  ", "GCC_3.0  ", "it needs GCC_3.0, and glibc 2.28 does not have it"),
            ("UND PyExc_ValueError", "UND cuInit", "it takes `cuInit`, which neither glibc nor Python has"),
            ("DEFAULT  UND gettid", "DEFAULT   13 gettid", "it exports `gettid`"),
            ("DEFAULT  UND gettid", "PROTECTED [VARIANT_PCS] 13 gettid@@OURS", "it exports `gettid`"),
            (
                "FUNC    GLOBAL DEFAULT   13",
                "FUNC    GLOBAL HIDDEN    13",
                "it does not export `PyInit__native`",
            ),
        ] {
            assert!(SAID.contains(with), "{with}");
            let problems =
                Library::parse(&SAID.replacen(with, instead, 1)).checked(MODULE_EXPORTS).unwrap_err();
            assert_eq!(problems, [says]);
        }
        let other = Library::parse(&SAID.replace("PyInit__native", "PyInit__other")).checked(MODULE_EXPORTS);
        assert_eq!(
            other,
            Err(["it does not export `PyInit__native`", "it exports `PyInit__other`"]
                .map(str::to_owned)
                .to_vec())
        );
    }

    #[test]
    fn unparsed_output_is_a_problem() {
        let problems = Library::parse("readelf: warning: nothing here").checked(MODULE_EXPORTS).unwrap_err();
        assert!(problems.iter().any(|problem| problem.contains("no version of glibc")), "{problems:?}");
    }

    #[test]
    fn versions_of_glibc_are_compared_by_their_numbers() {
        let parse = |version| Glibc::parse(version).unwrap();
        assert!(parse("GLIBC_2.2.5") < parse("GLIBC_2.28") && parse("GLIBC_2.9") < parse("GLIBC_2.28"));
        assert!(parse("GLIBC_2.28.1") > parse("GLIBC_2.28"));
        assert_eq!(Glibc::parse("GLIBC_"), None);
    }

    #[test]
    fn this_program_can_be_read() {
        let Ok(library) = Library::read(&crate::toolchain::own_program().unwrap()) else {
            eprintln!("skipped: there is no {READELF} here");
            return;
        };
        assert!(!library.versions.is_empty() || cfg!(not(target_env = "gnu")), "{library:?}");
    }
}
