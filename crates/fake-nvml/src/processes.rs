//! Processes over the fake libcuda, as they tell what they hold.
//!
//! Each listens on the socket `PID.sock` of the folder `POORWILL_FAKE_CUDA_PROCESSES`.

use std::env;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A process that is stopped has no figure.
const ANSWER_MAX: Duration = Duration::from_millis(500);

/// Number and bytes of each process that is on the device with this UUID, without prefix.
pub(crate) fn on(uuid: &str) -> Vec<(u32, u64)> {
    let Some(folder) = env::var_os("POORWILL_FAKE_CUDA_PROCESSES") else { return Vec::new() };
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let sockets =
        entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "sock"));
    let held = sockets.filter_map(|path| {
        let pid = path.file_stem()?.to_str()?.parse().ok()?;
        let answer = inspect(&path)?;
        let is_there = ["state running", "state locked"].iter().any(|state| answer.starts_with(state));
        is_there.then(|| (pid, held(&answer, uuid)))
    });
    held.collect()
}

fn inspect(socket: &Path) -> Option<String> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(ANSWER_MAX)).ok()?;
    stream.write_all(b"inspect\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

/// Lines of `held UUID BYTES`.
fn held(answer: &str, uuid: &str) -> u64 {
    let lines = answer.lines().filter_map(|line| line.strip_prefix("held ")?.rsplit_once(' '));
    let bytes = lines
        .filter(|(of, _)| of.eq_ignore_ascii_case(uuid))
        .filter_map(|(_, bytes)| bytes.parse::<u64>().ok());
    bytes.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_device() {
        let answer = "state running\nheld a-b 7\nheld c-d 9\nheld a-B unknown\nheld A-b 1\nend\n";
        assert_eq!(
            (held(answer, "a-b"), held(answer, "c-d"), held(answer, "x"), held("", "a-b")),
            (8, 9, 0, 0)
        );
    }
}
