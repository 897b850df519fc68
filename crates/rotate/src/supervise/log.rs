//! An engine's output: its last lines in memory, and all of it in a file if configured.
//!
//! Promises: memory is bounded, and shown lines contain no terminal control. A line that carriage returns overwrite, as
//! a progress bar, counts once. The file gets every byte unchanged, and is bounded: at its limit it is renamed, and
//! replaces the older one. Of a symlink that is its target. One that cannot be renamed is cut in place. A file that
//! cannot be written, as on a full disk, stops no engine. A follower gets every line
//! once, or how many it missed, and delays no engine.

use std::collections::VecDeque;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::error::SuperviseError;

const LINES_MAX: usize = 1000;
/// Longer lines are cut.
const LINE_MAX_BYTES: usize = 4096;
const BUFFER_BYTES: usize = 8192;

/// Of the older file, behind the name of the log.
const OLDER: &str = ".1";

/// Of the full log until the next one is open, and with it known that it can be the older file.
const FULL: &str = ".poorwill";

/// Most lines in one part for a follower.
const PART_LINES: usize = 256;

/// The output of one engine.
#[derive(Debug)]
pub struct Log {
    ring: Mutex<LineBuffer>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct LineBuffer {
    /// Lines dropped before the first kept one.
    dropped: u64,
    lines: VecDeque<String>,
    /// The line in progress.
    open: Vec<u8>,
    was_cut: bool,
    has_returned: bool,
}

#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    max_bytes: u64,
    /// `None` until it can be opened.
    file: Option<File>,
    is_failing: bool,
    /// Whether its last limit was kept by a cut.
    is_cut: bool,
}

/// Reads an engine's output as it comes.
#[derive(Debug)]
pub struct LogFollower {
    log: Arc<Log>,
    changed: watch::Receiver<()>,
    /// The number of the next line.
    at: u64,
    /// What was given of the line in progress.
    open: String,
}

impl Default for Log {
    fn default() -> Self {
        Self { ring: Mutex::default(), changed: watch::Sender::new(()) }
    }
}

impl Log {
    /// The last lines, oldest first.
    #[must_use]
    pub fn last(&self, lines: usize) -> Vec<String> {
        let ring = self.lock();
        let open = (!ring.open.is_empty()).then(|| shown(&ring.open, ring.was_cut));
        let kept = lines.saturating_sub(usize::from(open.is_some())).min(ring.lines.len());
        let all = ring.lines.range(ring.lines.len() - kept..).cloned().chain(open);
        all.take(lines).collect()
    }

    /// Follows it from its last lines on.
    #[must_use]
    pub fn follow(self: &Arc<Self>, lines: usize) -> LogFollower {
        let changed = self.changed.subscribe();
        let ring = self.lock();
        let kept = lines.saturating_sub(usize::from(!ring.open.is_empty())).min(ring.lines.len());
        let at = ring.end() - wide(kept);
        drop(ring);
        LogFollower { log: Arc::clone(self), changed, at, open: String::new() }
    }

    /// Adds a line of the service's own.
    pub fn note(&self, text: &str) {
        self.lock().push(format!("[poorwill] {}", shown(text.as_bytes(), false)));
        self.changed.send_replace(());
    }

    fn take(&self, bytes: &[u8]) {
        self.lock().take(bytes);
        self.changed.send_replace(());
    }

    pub(super) fn take_all(&self, mut from: impl Read, mut log_file: Option<LogFile>) {
        let mut bytes = vec![0; BUFFER_BYTES];
        loop {
            match from.read(&mut bytes) {
                Ok(0) => break,
                Ok(len) => {
                    let bytes = &bytes[..len];
                    self.take(bytes);
                    if let Some(log_file) = &mut log_file {
                        log_file.write(bytes, self);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    self.note(&format!("what the engine writes can be read no more: {error}"));
                    break;
                }
            }
        }
        self.lock().end_line();
        self.changed.send_replace(());
    }

    fn lock(&self) -> MutexGuard<'_, LineBuffer> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LogFollower {
    /// What is new, as a terminal gets it: lines, and the line in progress, which a carriage return takes back. Empty if
    /// nothing is new.
    pub fn read(&mut self) -> String {
        self.changed.mark_unchanged();
        let ring = self.log.lock();
        let missed = ring.dropped.saturating_sub(self.at);
        self.at += missed;
        let skipped = usize::try_from(self.at - ring.dropped).unwrap_or(usize::MAX);
        let lines: Vec<&String> = ring.lines.iter().skip(skipped).take(PART_LINES).collect();
        self.at += wide(lines.len());
        let open = if self.at == ring.end() && !ring.open.is_empty() {
            shown(&ring.open, ring.was_cut)
        } else {
            String::new()
        };
        if missed == 0 && lines.is_empty() && open == self.open {
            return String::new();
        }
        let mut text = String::from(if self.open.is_empty() { "" } else { "\r" });
        if missed > 0 {
            text += &format!("[poorwill] {missed} lines came too fast to be shown here\n");
        }
        for line in lines {
            text.push_str(line);
            text.push('\n');
        }
        text += &open;
        self.open = open;
        text
    }

    /// What takes back the line in progress and gives it again: nothing new, but bytes.
    #[must_use]
    pub fn again(&self) -> String {
        format!("\r{}", self.open)
    }

    /// Waits until there is more to read.
    pub async fn wait_for_more(&mut self) {
        // The follower itself keeps the sender.
        let _kept = self.changed.changed().await;
    }
}

fn wide(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

impl LineBuffer {
    /// The number behind the last line.
    fn end(&self) -> u64 {
        self.dropped + wide(self.lines.len())
    }

    fn take(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if *byte == b'\n' {
                self.push_open();
                continue;
            }
            if self.has_returned {
                self.open.clear();
                (self.was_cut, self.has_returned) = (false, false);
            }
            if *byte == b'\r' {
                self.has_returned = true;
            } else if self.open.len() < LINE_MAX_BYTES {
                self.open.push(*byte);
            } else {
                self.was_cut = true;
            }
        }
    }

    fn end_line(&mut self) {
        if !self.open.is_empty() {
            self.push_open();
        }
    }

    fn push_open(&mut self) {
        let line = shown(&self.open, self.was_cut);
        self.open.clear();
        (self.was_cut, self.has_returned) = (false, false);
        self.push(line);
    }

    fn push(&mut self, line: String) {
        while self.lines.len() >= LINES_MAX {
            self.lines.pop_front();
            self.dropped += 1;
        }
        self.lines.push_back(line);
    }
}

impl LogFile {
    /// On a full disk it is opened later.
    pub(super) fn open(path: &Path, max_bytes: u64, log: &Log) -> Result<Self, SuperviseError> {
        let mut own = Self { path: path.into(), max_bytes, file: None, is_failing: false, is_cut: false };
        match opened(path) {
            Ok(file) => own.file = Some(file),
            Err(error) if is_full(&error) => own.failed(&error, log),
            Err(error) => {
                return Err(SuperviseError::Log { path: path.into(), reason: error.to_string() });
            }
        }
        Ok(own)
    }

    /// Write errors do not stop the engine.
    fn write(&mut self, bytes: &[u8], log: &Log) {
        match self.written(bytes, log) {
            Ok(()) => self.is_failing = false,
            Err(error) => self.failed(&error, log),
        }
    }

    fn failed(&mut self, error: &io::Error, log: &Log) {
        if !self.is_failing {
            let path = self.path.display();
            log.note(&format!("the log {path} lacks what follows, until it can be written again: {error}"));
            tracing::warn!(path = %path, %error, "an engine's log cannot be written");
        }
        self.is_failing = true;
    }

    fn written(&mut self, bytes: &[u8], log: &Log) -> io::Result<()> {
        if self.file.is_none() {
            self.file = Some(opened(&self.path)?);
        }
        self.make_space(bytes.len(), log)?;
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(bytes))
    }

    fn make_space(&mut self, len: usize, log: &Log) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let own = file.metadata()?;
        let is_full = own.len() > 0 && own.len().saturating_add(len as u64) > self.max_bytes;
        if !is_full || !own.is_file() {
            return Ok(());
        }
        // Another writer of the same file may have renamed it already.
        let Some(real) = fs::canonicalize(&self.path).ok().filter(|real| is_at(real, &own)) else {
            self.file = None;
            self.file = Some(opened(&self.path)?);
            return Ok(());
        };
        match rotate(&self.path, &real, &own)? {
            Rotation::Renamed(next) => (self.file, self.is_cut) = (Some(next), false),
            Rotation::Impossible(reason) => {
                file.set_len(0)?;
                self.was_cut(&reason, log);
            }
        }
        Ok(())
    }

    fn was_cut(&mut self, error: &io::Error, log: &Log) {
        if !self.is_cut {
            let path = self.path.display();
            let reason = format!("it cannot be renamed to end in {OLDER}: {error}");
            log.note(&format!(
                "the log {path} is cut in place at its limit, and no older one is kept: {reason}"
            ));
            tracing::warn!(path = %path, reason, "an engine's log is cut in place at its limit");
        }
        self.is_cut = true;
    }
}

/// What a full log allowed.
#[derive(Debug)]
enum Rotation {
    /// With the next file.
    Renamed(File),
    /// It has its name still, and is to be cut.
    Impossible(io::Error),
}

/// Renames the file at `real`, to which `path` leads. The older file is replaced last, once nothing else can fail.
///
/// # Errors
/// If no next file can be opened; both files are then as before.
fn rotate(path: &Path, real: &Path, own: &Metadata) -> io::Result<Rotation> {
    let (full, older) = (beside(real, FULL), beside(real, OLDER));
    if let Err(error) = fs::rename(real, &full) {
        return Ok(Rotation::Impossible(error));
    }
    let reason = match opened(path).and_then(|next| Ok((next.metadata()?, next))) {
        Ok((there, _)) if is_same(&there, own) => io::Error::other("its path leads to the renamed file"),
        Ok((_, next)) => match fs::rename(&full, &older) {
            Ok(()) => return Ok(Rotation::Renamed(next)),
            Err(error) => error,
        },
        Err(error) => {
            fs::rename(&full, real)?;
            return Err(error);
        }
    };
    fs::rename(&full, real)?;
    Ok(Rotation::Impossible(reason))
}

fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

fn is_at(path: &Path, own: &Metadata) -> bool {
    fs::metadata(path).is_ok_and(|there| is_same(&there, own))
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

fn opened(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// Whether that is the disk's fault, and may pass.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::ReadOnlyFilesystem)
}

fn shown(bytes: &[u8], was_cut: bool) -> String {
    let harmless = |c: char| match c {
        '\t' => ' ',
        '\u{0}'..='\u{1f}' => char::from_u32(0x2400 + u32::from(c)).unwrap_or('\u{fffd}'),
        '\u{7f}' => '\u{2421}',
        // These change the text direction or break lines.
        '\u{80}'..='\u{9f}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            '\u{fffd}'
        }
        c => c,
    };
    let mut text: String = String::from_utf8_lossy(bytes).chars().map(harmless).collect();
    if was_cut {
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parts: &[&[u8]]) -> Vec<String> {
        let log = Log::default();
        parts.iter().for_each(|bytes| log.lock().take(bytes));
        log.last(usize::MAX)
    }

    #[test]
    fn lines_come_in_any_pieces() {
        let text = b"one\r\ntwo\n\n 10%\r 20%\r 30%\nfour\rfive\r\n\xc3\xa9\ntail";
        let expected = ["one", "two", "", " 30%", "five", "é", "tail"];
        assert_eq!(read(&[text]), expected);
        for at in 0..text.len() {
            assert_eq!(read(&[&text[..at], &text[at..]]), expected, "{at}");
        }
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(read(&bytes), expected);
    }

    #[test]
    fn memory_is_bounded() {
        let log = Log::default();
        for _ in 0..100 {
            log.lock().take(&[b'a'; 5000]);
        }
        assert!(log.lock().open.capacity() <= 2 * LINE_MAX_BYTES);
        log.lock().take(b"\n");
        assert_eq!(log.last(9), [format!("{}…", "a".repeat(LINE_MAX_BYTES))]);
        for nth in 0..2 * LINES_MAX {
            log.lock().take(format!("{nth}\n").as_bytes());
        }
        let last = log.last(usize::MAX);
        assert_eq!((last.len(), last[0].as_str()), (LINES_MAX, "1000"));
        log.lock().take(b"open");
        assert_eq!(log.last(2), ["1999", "open"]);
        assert_eq!(log.last(0), [""; 0]);
        // The next line is not truncated.
        log.take_all(&b"\nnext"[..], None);
        assert_eq!(log.last(2), ["open", "next"]);
    }

    /// What a terminal shows that takes a line back at a carriage return.
    fn on_a_terminal(text: &str) -> Vec<String> {
        let lines = text.split('\n').map(|line| line.rsplit('\r').next().unwrap_or_default().to_owned());
        let mut lines: Vec<String> = lines.collect();
        lines.pop_if(|last| last.is_empty());
        lines
    }

    #[test]
    fn a_follower_gets_the_same_lines_at_any_speed() {
        let bytes = b"one\r\ntwo\n\n 10%\r 20%\r 30%\nfour\rfive\r\n\xc3\xa9\nend";
        for every in 1..=bytes.len() {
            let log = Arc::new(Log::default());
            log.note("before");
            let (mut all, mut last) = (log.follow(usize::MAX), log.follow(0));
            let (mut of_all, mut of_last) = (String::new(), String::new());
            for (nth, byte) in bytes.chunks(1).enumerate() {
                log.take(byte);
                if nth % every == 0 {
                    of_all += &all.read();
                    of_last += &last.read();
                    of_last += &last.again();
                    assert_eq!((all.read(), last.read()), (String::new(), String::new()));
                }
            }
            of_all += &all.read();
            of_last += &last.read();
            assert_eq!(on_a_terminal(&of_all), log.last(usize::MAX), "{every}");
            assert_eq!(on_a_terminal(&of_last), log.last(usize::MAX)[1..], "{every}");
            assert_eq!(on_a_terminal(&log.follow(2).read()), log.last(2));
        }
    }

    #[tokio::test]
    async fn a_slow_follower_gets_the_number_of_lines_that_it_missed() {
        let log = Arc::new(Log::default());
        let mut follower = log.follow(0);
        for nth in 0..LINES_MAX + 7 {
            log.note(&nth.to_string());
        }
        follower.wait_for_more().await;
        let mut text = String::new();
        loop {
            let part = follower.read();
            if part.is_empty() {
                break;
            }
            assert!(part.lines().count() <= PART_LINES + 1);
            text += &part;
        }
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("[poorwill] 7 lines came too fast to be shown here"));
        assert_eq!(lines.next(), Some("[poorwill] 7"));
        assert_eq!(lines.count(), LINES_MAX - 1);
    }

    /// A log in this folder, at its limit of 10 bytes after each write.
    fn log_file(path: &Path, log: &Log) -> LogFile {
        LogFile::open(path, 10, log).unwrap()
    }

    fn warnings(log: &Log) -> Vec<String> {
        log.last(usize::MAX)
    }

    #[test]
    fn the_target_of_a_symlink_is_what_is_renamed() {
        let folder = tempfile::tempdir().unwrap();
        let (link, log) = (folder.path().join("one.log"), Log::default());
        let there = folder.path().join("disk");
        fs::create_dir(&there).unwrap();
        std::os::unix::fs::symlink("disk/real", &link).unwrap();
        let mut file = log_file(&link, &log);
        for text in ["first 12345", "second 1234", "third 12345"] {
            file.write(text.as_bytes(), &log);
        }
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("disk/real"));
        assert_eq!(fs::read_to_string(there.join("real")).unwrap(), "third 12345");
        assert_eq!(fs::read_to_string(there.join("real.1")).unwrap(), "second 1234");
        assert!(!folder.path().join("one.log.1").exists());
        assert_eq!(warnings(&log), [""; 0]);
    }

    /// A folder in the way stands for one that cannot be written, which does not stop root.
    #[test]
    fn without_a_second_file_the_log_is_cut_in_place_with_one_warning() {
        let folder = tempfile::tempdir().unwrap();
        let (path, log) = (folder.path().join("one.log"), Log::default());
        let in_the_way = folder.path().join("one.log.1");
        fs::create_dir(&in_the_way).unwrap();
        let mut file = log_file(&path, &log);
        for text in ["first 12345", "second 1234", "third 12345"] {
            file.write(text.as_bytes(), &log);
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        let noted = warnings(&log);
        assert!(matches!(&noted[..], [one] if one.contains("cut in place")), "{noted:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        // Once it can be renamed, it is.
        fs::remove_dir(&in_the_way).unwrap();
        file.write(b"fourth", &log);
        assert_eq!(fs::read_to_string(&in_the_way).unwrap(), "third 12345");
    }

    /// As `/dev/stdout`, which follows a file that is renamed. What ends in `.1` beside it is not of the log.
    #[test]
    fn a_path_that_follows_its_file_is_cut_in_place() {
        let folder = tempfile::tempdir().unwrap();
        let (path, log) = (folder.path().join("one.log"), Log::default());
        let beside = folder.path().join("one.log.1");
        fs::write(&beside, "of another").unwrap();
        let kept = opened(&path).unwrap();
        let magic = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&kept));
        let mut file = log_file(Path::new(&magic), &log);
        for text in ["first 12345", "second 1234", "third 12345"] {
            file.write(text.as_bytes(), &log);
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(fs::read_to_string(&beside).unwrap(), "of another");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        assert_eq!(warnings(&log).len(), 1);
    }

    #[test]
    fn without_a_next_file_both_files_are_as_before() {
        const WITH_FEW_FILES: &str = "POORWILL_TEST_WITH_FEW_FILES";
        let name = "supervise::log::tests::without_a_next_file_both_files_are_as_before";
        if std::env::var_os(WITH_FEW_FILES).is_none() {
            let child = std::process::Command::new("sh")
                .args(["-c", "ulimit -n 64 && exec \"$0\" --exact \"$1\""])
                .arg(std::env::current_exe().unwrap())
                .arg(name)
                .env(WITH_FEW_FILES, "")
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&child.stdout);
            assert!(child.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        // The child, with few descriptors.
        let folder = tempfile::tempdir().unwrap();
        let (path, log) = (folder.path().join("one.log"), Log::default());
        let older = folder.path().join("one.log.1");
        let mut file = log_file(&path, &log);
        file.write(b"first 12345", &log);
        file.write(b"second 1234", &log);
        let every: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        file.write(b"third 12345", &log);
        file.write(b"fourth 1234", &log);
        drop(every);
        assert_eq!(fs::read_to_string(&path).unwrap(), "second 1234");
        assert_eq!(fs::read_to_string(&older).unwrap(), "first 12345");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        let noted = warnings(&log);
        assert!(matches!(&noted[..], [one] if one.contains("lacks what follows")), "{noted:?}");
        file.write(b"fifth 12345", &log);
        assert_eq!(fs::read_to_string(&path).unwrap(), "fifth 12345");
        assert_eq!(fs::read_to_string(&older).unwrap(), "second 1234");
    }

    #[test]
    fn nothing_that_moves_a_terminal_is_shown() {
        let every: Vec<u8> = (0..=255).filter(|byte| !b"\r\n".contains(byte)).collect();
        let line = read(&[&every]).concat();
        assert!(!line.contains(char::is_control), "{line:?}");
        assert_eq!(read(&["\x1b[31mred\u{9b}2J\u{202e}\tx\u{2028}".as_bytes()]), ["␛[31mred�2J� x�"]);
        let log = Log::default();
        log.note("a\nb");
        assert_eq!(log.last(1), ["[poorwill] a␊b"]);
    }
}
