//! Processes and this system, as `/proc` shows them.
//!
//! A number together with a start names one process until the system restarts ([`ProcessKey`]); numbers alone are used
//! again. What is read may end at any time, which is no error: there is no such process then.
//!
//! ```
//! use poorwill_driver::system::proc;
//!
//! let own = proc::key(std::process::id())?.expect("this process is there");
//! assert!(proc::is_alive(own)?);
//! # Ok::<(), std::io::Error>(())
//! ```

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

pub use poorwill_core::hibernation::plan::ProcessKey;
use rustix::io::Errno;

use super::System;

/// What `/proc/PID/stat` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessStat {
    /// Clock ticks from the system's start.
    pub start_ticks: u64,
    /// 0 where there is none, as for a process that the kernel is removing.
    pub parent: u32,
    /// As `parent`.
    pub group: u32,
    /// Whether it has ended, and its parent has not looked yet. Its other threads may go on.
    pub has_ended: bool,
    /// Whether it holds no resources and only waits to be reaped.
    pub is_gone: bool,
    /// Whether it has begun to end.
    pub is_exiting: bool,
}

/// What `/proc/PID/status` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessStatus {
    /// The process that it is a thread of; its own number for a process.
    pub process: u32,
    /// The process that started it, or took it over.
    pub parent: u32,
    /// `R`, `S`, `T` and so on.
    pub letter: char,
    /// The user for whom it acts.
    pub effective_uid: u32,
    /// Whether it has been sent SIGKILL, and has not taken it yet.
    pub is_killed: bool,
    /// Bytes of its pages in memory. `None` for one that has ended.
    pub resident_bytes: Option<u64>,
}

/// Processes by number.
pub type ProcessTable = BTreeMap<u32, ProcessStat>;

fn file(pid: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{name}"))
}

/// Whether a read failed because the process has ended.
#[must_use]
pub fn has_ended(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// `None` without such a process.
///
/// # Errors
/// Where `/proc` cannot be read or is not understood.
pub fn stat(pid: u32) -> io::Result<Option<ProcessStat>> {
    let path = file(pid, "stat");
    match fs::read(&path) {
        Ok(text) => ProcessStat::parse(&text).map(Some).ok_or_else(|| unknown(&path)),
        Err(error) if has_ended(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// `None` without such a process or thread, as for [`stat`].
///
/// # Errors
/// Where `/proc` cannot be read or is not understood.
pub fn status(pid: u32) -> io::Result<Option<ProcessStatus>> {
    let path = file(pid, "status");
    match fs::read(&path) {
        Ok(text) => {
            ProcessStatus::parse(&String::from_utf8_lossy(&text)).map(Some).ok_or_else(|| unknown(&path))
        }
        Err(error) if has_ended(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn unknown(path: &Path) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("{} is not understood", path.display()))
}

/// The process that has this number now.
///
/// # Errors
/// As for [`stat`].
pub fn key(pid: u32) -> io::Result<Option<ProcessKey>> {
    Ok(stat(pid)?.map(|stat| ProcessKey { pid, start_ticks: stat.start_ticks }))
}

/// Whether it runs and holds resources.
///
/// # Errors
/// As for [`stat`].
pub fn is_alive(one: ProcessKey) -> io::Result<bool> {
    Ok(stat(one.pid)?.is_some_and(|stat| stat.start_ticks == one.start_ticks && !stat.is_gone))
}

/// The numbers of all processes that this user sees.
///
/// # Errors
/// Where `/proc` cannot be read.
pub fn pids() -> io::Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc")? {
        pids.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(pids)
}

/// All processes that this user sees. Takes milliseconds for some hundreds of them.
///
/// # Errors
/// As for [`stat`].
pub fn table() -> io::Result<ProcessTable> {
    let mut table = ProcessTable::new();
    for pid in pids()? {
        match stat(pid) {
            Ok(Some(stat)) => drop(table.insert(pid, stat)),
            Ok(None) => {}
            // Another user's process, on systems that hide those.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {}
            Err(error) => return Err(error),
        }
    }
    Ok(table)
}

/// The words of its command line. Empty for threads of the kernel, and for what has ended.
#[must_use]
pub fn command(pid: u32) -> Vec<String> {
    fields(&fs::read(file(pid, "cmdline")).unwrap_or_default())
}

/// The folder in which it works. `None` where it may not be read.
#[must_use]
pub fn folder(pid: u32) -> Option<PathBuf> {
    fs::read_link(file(pid, "cwd")).ok()
}

/// The environment with which a process began. Empty for other users' processes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessEnvironment(Vec<u8>);

impl ProcessEnvironment {
    /// That of a process.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        Self(fs::read(file(pid, "environ")).unwrap_or_default())
    }

    /// The value of a variable.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<OsString> {
        let value = |entry: &[u8]| Some(entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?.to_vec());
        self.0.split(|byte| *byte == 0).find_map(value).map(OsString::from_vec)
    }

    /// Whether it has exactly this `NAME=VALUE`.
    #[must_use]
    pub fn has(&self, entry: &str) -> bool {
        self.0.split(|byte| *byte == 0).any(|one| one == entry.as_bytes())
    }
}

/// The folder of its open files: each is a link to what is open, named by its number.
#[must_use]
pub fn descriptors_folder(pid: u32) -> PathBuf {
    file(pid, "fd")
}

/// What its open files are. Those that close meanwhile are left out.
///
/// # Errors
/// Which folder cannot be read, and why.
pub fn descriptors(pid: u32) -> io::Result<Vec<PathBuf>> {
    let folder = descriptors_folder(pid);
    let failed = |error: io::Error| unreadable(&folder, &error);
    let mut found = Vec::new();
    for link in fs::read_dir(&folder).map_err(failed)? {
        match fs::read_link(link.map_err(failed)?.path()) {
            Ok(path) => found.push(path),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(found)
}

/// A text of its folder, as `maps` or `net/unix`.
///
/// # Errors
/// Which file cannot be read, and why.
pub fn text(pid: u32, name: &str) -> io::Result<String> {
    let path = file(pid, name);
    let bytes = fs::read(&path).map_err(|error| unreadable(&path, &error))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn unreadable(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{} cannot be read: {error}", path.display()))
}

/// The number of a socket, of a link such as `socket:[1234]`.
#[must_use]
pub fn socket(link: &Path) -> Option<&str> {
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')
}

/// Bytes that a process holds, with its part of what it shares. 0 after its end.
///
/// # Errors
/// Where neither its parts nor its pages in memory can be read.
pub fn held_bytes(pid: u32) -> io::Result<u64> {
    // The file may be missing, or closed to this user.
    if let Ok(shares) = fs::read_to_string(file(pid, "smaps_rollup"))
        && !shares.is_empty()
    {
        return size(&shares, "Pss:").map(Option::unwrap_or_default);
    }
    match fs::read_to_string(file(pid, "status")) {
        // A zombie has no such line.
        Ok(text) => size(&text, "VmRSS:").map(Option::unwrap_or_default),
        Err(error) if has_ended(&error) => Ok(0),
        Err(error) => Err(error),
    }
}

/// Parses a line like `VmRSS: 16384 kB`.
fn size(text: &str, key: &str) -> io::Result<Option<u64>> {
    let Some(line) = text.lines().find_map(|line| line.strip_prefix(key)) else { return Ok(None) };
    let kib = line.trim().strip_suffix("kB").and_then(|kib| kib.trim().parse::<u64>().ok());
    let bytes = kib.and_then(|kib| kib.checked_mul(1024));
    let none = || io::Error::new(ErrorKind::InvalidData, format!("`{key}{line}` is no size"));
    bytes.map(Some).ok_or_else(none)
}

/// Bytes of this process's own pages in memory.
#[must_use]
pub fn resident_bytes() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(rustix::param::page_size() as u64)
}

/// What names this start of the system; empty where it has none.
#[must_use]
pub fn boot() -> String {
    own("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// In which namespace of numbers this process is; empty where the system has none.
#[must_use]
pub fn namespace() -> String {
    fs::read_link("/proc/self/ns/pid").unwrap_or_default().to_string_lossy().into_owned()
}

/// The name of this machine; empty if the system does not say it.
#[must_use]
pub fn hostname() -> String {
    own("/proc/sys/kernel/hostname").unwrap_or_default()
}

/// Memory of this machine that programs may still take.
#[must_use]
pub fn available_bytes() -> Option<u64> {
    System::here().memory().available_bytes
}

/// The kernel's version.
#[must_use]
pub fn kernel() -> Option<String> {
    own("/proc/sys/kernel/osrelease")
}

fn own(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The fields of a file, each ended by NUL.
fn fields(bytes: &[u8]) -> Vec<String> {
    let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
    if bytes.is_empty() {
        return Vec::new();
    }
    bytes.split(|byte| *byte == 0).map(|field| String::from_utf8_lossy(field).into_owned()).collect()
}

impl ProcessStat {
    /// Parses `PID (NAME) STATE PARENT GROUP …`; the name may contain anything.
    fn parse(text: &[u8]) -> Option<Self> {
        /// `PF_EXITING`.
        const EXITING: u64 = 1 << 2;
        let end = text.iter().rposition(|byte| *byte == b')')?;
        let rest = std::str::from_utf8(text.get(end + 1..)?).ok()?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let flags: u64 = fields.get(6)?.parse().ok()?;
        let threads: i64 = fields.get(17)?.parse().ok()?;
        let has_ended = matches!(*fields.first()?, "Z" | "X" | "x");
        // While the kernel removes a reaped process, it has neither parent nor group.
        let is_taken_away = *fields.get(2)? == "-1";
        Some(Self {
            start_ticks: fields.get(19)?.parse().ok()?,
            parent: fields.get(1)?.parse().ok()?,
            group: if is_taken_away { 0 } else { fields.get(2)?.parse().ok()? },
            has_ended,
            // The first thread may end before the others, which still hold the memory.
            is_gone: is_taken_away || has_ended && threads <= 1,
            is_exiting: flags & EXITING != 0,
        })
    }
}

impl ProcessStatus {
    fn parse(text: &str) -> Option<Self> {
        const SIGKILL: u64 = 1 << 8;
        let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        let signals = ["SigPnd:", "ShdPnd:"].into_iter().filter_map(value);
        let mut masks = signals.filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        Some(Self {
            process: value("Tgid:")?.trim().parse().ok()?,
            parent: value("PPid:")?.trim().parse().ok()?,
            letter: value("State:")?.trim().chars().next()?,
            effective_uid: value("Uid:")?.split_whitespace().nth(1)?.parse().ok()?,
            is_killed: masks.any(|mask| mask & SIGKILL != 0),
            resident_bytes: size(text, "VmRSS:").ok().flatten(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, state: &str, threads: u32) -> String {
        format!(
            "41 ({name}) {state} 7 40 3 0 -1 4194304 9 0 0 0 0 0 0 0 20 0 {threads} 0 3175199 3133440 360 1 2\n"
        )
    }

    const ALIVE: ProcessStat = ProcessStat {
        start_ticks: 3_175_199,
        parent: 7,
        group: 40,
        has_ended: false,
        is_gone: false,
        is_exiting: false,
    };

    #[test]
    fn names_may_have_anything_in_them() {
        for name in ["cat", "a) Z 1 2 3", "(", ") ) (", "\u{e9}"] {
            let stat = ProcessStat::parse(line(name, "S", 1).as_bytes()).unwrap();
            assert_eq!(stat, ALIVE, "{name}");
        }
        let foreign = b"41 (\xff\xfe) R 7 40 3 0 -1 4 9 0 0 0 0 0 0 0 20 0 1 0 5 1 1";
        assert!(ProcessStat::parse(foreign).unwrap().is_exiting);
    }

    #[test]
    fn one_whose_other_threads_go_on_has_ended_and_is_not_gone() {
        let ends = |state, threads| {
            let stat = ProcessStat::parse(line("x", state, threads).as_bytes()).unwrap();
            (stat.has_ended, stat.is_gone)
        };
        assert_eq!((ends("Z", 1), ends("X", 0)), ((true, true), (true, true)));
        assert_eq!(ends("Z", 2), (true, false));
        assert_eq!((ends("D", 1), ends("T", 1)), ((false, false), (false, false)));
    }

    /// As the kernel shows processes that were just reaped.
    #[test]
    fn one_that_is_taken_away_is_gone() {
        for state in ["X", "Z", "R"] {
            let text =
                format!("41 (x) {state} 0 -1 -1 0 -1 0 9 0 0 0 0 0 0 0 20 0 0 0 3175199 0 0 360 1 2\n");
            let expected =
                ProcessStat { parent: 0, group: 0, has_ended: state != "R", is_gone: true, ..ALIVE };
            assert_eq!(ProcessStat::parse(text.as_bytes()), Some(expected), "{state}");
        }
    }

    #[test]
    fn a_truncated_stat_is_no_process() {
        let whole = line("x", "S", 1);
        let whole = whole.trim_end();
        for end in 0..whole.find("3175199").unwrap() {
            assert_eq!(ProcessStat::parse(&whole.as_bytes()[..end]), None, "{end}");
        }
    }

    #[test]
    fn a_status_is_read() {
        let text =
            "Name:\tpython3\nState:\tT (stopped)\nTgid:\t41\nPid:\t42\nPPid:\t7\nUid:\t1000\t1001\t0\t0\n";
        let expected = ProcessStatus {
            process: 41,
            parent: 7,
            letter: 'T',
            effective_uid: 1001,
            is_killed: false,
            resident_bytes: None,
        };
        assert_eq!(ProcessStatus::parse(text), Some(expected));
        let killed = format!("{text}VmRSS:\t8 kB\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\n");
        let expected = ProcessStatus { is_killed: true, resident_bytes: Some(8192), ..expected };
        assert_eq!(ProcessStatus::parse(&killed), Some(expected));
        for missing in ["State:", "Tgid:", "PPid:", "Uid:"] {
            assert_eq!(ProcessStatus::parse(&text.replace(missing, "Other:")), None, "{missing}");
        }
    }

    #[test]
    fn this_process_is_found() {
        let own = std::process::id();
        let one = key(own).unwrap().unwrap();
        assert!(is_alive(one).unwrap() && table().unwrap().contains_key(&own));
        assert!(!is_alive(ProcessKey { start_ticks: one.start_ticks + 1, ..one }).unwrap());
        assert_eq!((key(u32::MAX).unwrap(), status(u32::MAX).unwrap()), (None, None));
        let status = status(own).unwrap().unwrap();
        assert_eq!((status.process, status.parent), (own, std::os::unix::process::parent_id()));
        assert!(status.resident_bytes.is_some_and(|bytes| bytes >= 64 << 10));
        assert!(resident_bytes().unwrap() >= 64 << 10);
        assert!(held_bytes(own).unwrap() > 0 && held_bytes(u32::MAX).unwrap() == 0);
        assert_eq!((boot(), namespace()), (boot(), namespace()));
    }

    #[test]
    fn this_process_has_a_command_line_a_folder_and_an_environment() {
        let own = std::process::id();
        assert_eq!(command(own), std::env::args().collect::<Vec<_>>());
        assert_eq!(folder(own), std::env::current_dir().ok());
        let environment = ProcessEnvironment::of(own);
        assert_eq!(environment.variable("PATH"), std::env::var_os("PATH"));
        assert_eq!(environment.variable("PAT"), None);
    }

    #[test]
    fn variables_have_whole_names() {
        let environment = ProcessEnvironment(b"PATH=/bin\0CUDA_MPS_PIPE_DIRECTORY=/run/mps\0X=".to_vec());
        assert_eq!(environment.variable("CUDA_MPS_PIPE_DIRECTORY"), Some("/run/mps".into()));
        assert_eq!((environment.variable("X"), environment.variable("CUDA")), (Some("".into()), None));
        assert!(environment.has("PATH=/bin") && !environment.has("PATH=/bi") && !environment.has("PATH"));
    }

    #[test]
    fn an_empty_argument_is_a_word() {
        assert_eq!(fields(b"a\0\0b\0"), ["a", "", "b"]);
        assert!(fields(b"").is_empty() && fields(b"\0").is_empty());
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let error = descriptors(u32::MAX).unwrap_err().to_string();
        assert!(error.contains("/proc/4294967295/fd cannot be read"), "{error}");
        let error = text(u32::MAX, "maps").unwrap_err().to_string();
        assert!(error.contains("/proc/4294967295/maps cannot be read"), "{error}");
    }

    #[test]
    fn a_size_is_in_kib() {
        assert_eq!(size("VmSize: 1 kB\nVmRSS:\t  8 kB\n", "VmRSS:").unwrap(), Some(8192));
        assert_eq!(size("VmSize: 1 kB\n", "VmRSS:").unwrap(), None);
        let error = size("VmRSS: many\n", "VmRSS:").unwrap_err().to_string();
        assert_eq!(error, "`VmRSS: many` is no size");
    }
}
