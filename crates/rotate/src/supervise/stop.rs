//! The command of the configuration that ends an engine, such as `docker stop`.
//!
//! Promises: it has the engine's folder and environment, and its output is in the engine's log. When its time is over,
//! its process group is killed. `${PID}` in a word is the id of the engine's first process. After the end of that
//! process the id may be another's, so such a command does not run then.

use std::io;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

const PID: &str = "${PID}";
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The words, with `leader` in place of [`PID`]. `None` if a word needs it, and it has ended.
pub(super) fn words_of(command: &[String], leader: Option<u32>) -> Option<Vec<String>> {
    let word = |word: &String| match leader {
        Some(pid) => Some(word.replace(PID, &pid.to_string())),
        None => (!word.contains(PID)).then(|| word.clone()),
    };
    command.iter().map(word).collect()
}

/// Waits for its end; `None` if it was killed after `most`.
pub(super) fn wait(child: &mut Child, most: Duration) -> io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begun.elapsed() >= most {
            end_at_once(child);
            return Ok(None);
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Ends a child that is not reaped yet, and its group.
pub(super) fn end_at_once(child: &mut Child) {
    // Until it is reaped, the group id is its own. If it is gone, nothing is left to end.
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    drop(child.wait());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pid_of_an_ended_process_is_never_used() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let kill = words("kill -s INT ${PID}");
        assert_eq!(words_of(&kill, Some(41)), Some(words("kill -s INT 41")));
        assert_eq!(words_of(&kill, None), None);
        let docker = words("docker stop one");
        assert_eq!(words_of(&docker, None), Some(docker.clone()));
        assert_eq!(words_of(&words("a ${PID}x${PID} ${pid}"), Some(7)), Some(words("a 7x7 ${pid}")));
    }
}
