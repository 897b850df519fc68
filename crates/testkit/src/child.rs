//! Runs a test again in its own process, where it tests what is read once per process or ends the process.

use std::ops::{Deref, DerefMut};
use std::process::{Child, Command, Output};

/// The environment variable that holds the child's role.
const ROLE: &str = "POORWILL_TEST_ROLE";

/// Prefixes of the variables that concern GPUs.
const SETTINGS: [&str; 5] =
    ["CUDA_", "NVIDIA_", "LD_PRELOAD", "POORWILL_FAKE_CUDA_", "POORWILL_FAKE_NVML_DEVICES"];

/// The role of this process; `None` in the test itself.
#[must_use]
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// A command that runs the calling test alone, as `role`, with these variables.
///
/// # Panics
/// Outside the test's own thread.
#[must_use]
pub fn command(role: &str, variables: &[(&str, &str)]) -> Command {
    let thread = std::thread::current();
    let test =
        thread.name().filter(|name| *name != "main").expect("test threads have the names of their tests");
    command_for(test, role, variables)
}

/// A command that runs the test at this path of the same program.
///
/// # Panics
/// If the program cannot be found.
#[must_use]
pub fn command_for(test: &str, role: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).envs(variables.iter().copied());
    command
}

/// Removes the caller's GPU variables from a command.
#[must_use]
pub fn without_settings(mut command: Command) -> Command {
    let given: Vec<_> = command.get_envs().map(|(name, _)| name.to_owned()).collect();
    for (name, _) in std::env::vars_os().filter(|(name, _)| !given.contains(name)) {
        let text = name.to_string_lossy();
        if SETTINGS.iter().any(|setting| text.starts_with(setting)) {
            command.env_remove(name);
        }
    }
    command
}

/// A child that is killed when this is dropped, as by a test that fails.
#[derive(Debug)]
pub struct OwnedChild(Option<Child>);

impl OwnedChild {
    /// Starts the command.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start(command: &mut Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    /// Waits until it has ended.
    ///
    /// # Panics
    /// If its output cannot be read.
    #[must_use]
    pub fn output(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }

    /// Kills it, and waits until it is gone.
    ///
    /// # Panics
    /// If the system refuses it.
    pub fn end(&mut self) {
        self.kill().unwrap();
        self.wait().unwrap();
    }
}

impl Deref for OwnedChild {
    type Target = Child;

    fn deref(&self) -> &Child {
        self.0.as_ref().unwrap()
    }
}

impl DerefMut for OwnedChild {
    fn deref_mut(&mut self) -> &mut Child {
        self.0.as_mut().unwrap()
    }
}

impl Drop for OwnedChild {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs the command.
///
/// # Panics
/// Unless exactly one test ran, and passed.
pub fn expect_success(command: Command) {
    drop(output_of(command));
}

/// Runs the command and returns its output.
///
/// # Panics
/// As [`expect_success`].
#[must_use]
pub fn output_of(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let [out, err] = [stdout, stderr].map(|output| String::from_utf8_lossy(&output).into_owned());
    assert!(status.success() && out.contains("1 passed"), "{command:?}: {status}\n{out}\n{err}");
    out
}

/// Whether this is the child process, with these variables set. Otherwise runs the child first.
///
/// # Panics
/// If the child fails.
#[must_use]
pub fn in_a_child(variables: &[(&str, &str)]) -> bool {
    let is_child = role().is_some();
    if !is_child {
        expect_success(command("alone", variables));
    }
    is_child
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_the_same_test_in_another_environment() {
        let variables = [("POORWILL_FAKE_CUDA_SIMULATE", "one")];
        if !in_a_child(&variables) {
            return;
        }
        assert_eq!(role().as_deref(), Some("alone"));
        assert_eq!(std::env::var("POORWILL_FAKE_CUDA_SIMULATE").as_deref(), Ok("one"));
        let gone = without_settings(command("another", &[]));
        let gone: Vec<_> =
            gone.get_envs().filter(|(_, value)| value.is_none()).map(|(name, _)| name).collect();
        assert!(gone.contains(&std::ffi::OsStr::new("POORWILL_FAKE_CUDA_SIMULATE")), "{gone:?}");
        let kept = without_settings(command("another", &variables));
        assert!(kept.get_envs().all(|(_, value)| value.is_some()));
    }

    #[test]
    fn a_child_ends_with_a_test_that_fails() {
        let mut child = None;
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let owned = OwnedChild::start(Command::new("sleep").arg("1000"));
            child = Some(owned.id());
            panic!("as it is meant");
        }));
        let folder = format!("/proc/{}", child.unwrap());
        assert!(failed.is_err() && !std::path::Path::new(&folder).exists(), "{folder}");
    }

    #[test]
    fn a_child_that_fails_is_noticed() {
        if role().is_some() {
            panic!("as it is meant");
        }
        let failed = std::panic::catch_unwind(|| expect_success(command("failing", &[])));
        assert!(failed.is_err());
        let no_such_test = std::panic::catch_unwind(|| expect_success(command_for("nothing", "", &[])));
        assert!(no_such_test.is_err());
    }
}
