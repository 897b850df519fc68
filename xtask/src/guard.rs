//! Process groups that end with this process.
//!
//! A process with its own group can be killed with all its children, but gets no Ctrl-C from the terminal. So a shell
//! is notified of the groups, and kills them when its input ends, even if this process crashed. If no shell can be
//! started, nothing is killed, and a message says so.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::console::note;

/// Reads `+ GROUP` for a new group, `- GROUP` for one that has ended, and `x GROUP` for one to kill.
const SCRIPT: &str = r#"
trap '' HUP INT TERM
groups=' '
while read -r what group; do
    case $what in
        +) groups="$groups$group " ;;
        -) groups="${groups%%" $group "*} ${groups#*" $group "}" ;;
        x) kill -s KILL -- "-$group" ;;
    esac
done
for group in $groups; do kill -s KILL -- "-$group"; done
"#;

/// Kills the remaining groups when it is dropped or this process ends.
#[derive(Debug)]
pub(crate) struct Guard {
    input: Mutex<Option<ChildStdin>>,
    shell: Option<Child>,
}

impl Guard {
    pub(crate) fn start() -> Guard {
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        match command.process_group(0).spawn() {
            Ok(mut shell) => Guard { input: Mutex::new(shell.stdin.take()), shell: Some(shell) },
            Err(error) => {
                note(&format!("!!! cannot start `sh`, so what hangs may leave processes behind: {error}"));
                Guard { input: Mutex::new(None), shell: None }
            }
        }
    }

    /// Starts the first process of a group.
    pub(crate) fn spawn(&self, command: &mut Command) -> std::io::Result<Child> {
        let child = command.process_group(0).spawn()?;
        self.tell('+', child.id());
        Ok(child)
    }

    /// Call this after the first process has ended: the rest of its group continues.
    pub(crate) fn forget(&self, first: u32) {
        self.tell('-', first);
    }

    /// Kills the whole group of this first process. The caller waits for it.
    pub(crate) fn kill(&self, first: u32) {
        self.tell('x', first);
    }

    fn tell(&self, what: char, first: u32) {
        let mut input = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        // If the shell was killed, it guards nothing.
        let _ = input.as_mut().map(|input| writeln!(input, "{what} {first}"));
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.input.lock().unwrap_or_else(PoisonError::into_inner).take());
        let _ = self.shell.as_mut().map(Child::wait);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// A process with a child; both keep the pipe open.
    fn pair(guard: &Guard) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 3600 & echo started; wait"]).stdout(Stdio::piped());
        guard.spawn(&mut command).unwrap()
    }

    fn first_word(child: &mut Child) {
        let mut word = [0; 8];
        child.stdout.as_mut().unwrap().read_exact(&mut word).unwrap();
        assert_eq!(&word, b"started\n");
    }

    /// Returns when no process holds the pipe.
    fn everybody_ends(mut child: Child) {
        let mut rest = Vec::new();
        child.stdout.take().unwrap().read_to_end(&mut rest).unwrap();
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn a_group_is_killed_with_all_that_is_in_it() {
        let guard = Guard::start();
        let mut child = pair(&guard);
        first_word(&mut child);
        guard.kill(child.id());
        everybody_ends(child);
    }

    #[test]
    fn remaining_groups_end_with_the_guard() {
        let guard = Guard::start();
        let [mut one, mut other] = [pair(&guard), pair(&guard)];
        let mut ended = guard.spawn(&mut Command::new("true")).unwrap();
        assert!(ended.wait().unwrap().success());
        guard.forget(ended.id());
        first_word(&mut one);
        first_word(&mut other);
        drop(guard);
        everybody_ends(one);
        everybody_ends(other);
    }
}
