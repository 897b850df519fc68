//! Progress of steps longer than a second, if standard error is a terminal.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Shorter steps show no progress.
const SHOW_AFTER: Duration = Duration::from_secs(1);

/// Disappears when dropped.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    /// Dropping the sender ends the thread that shows the bar.
    shown: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// A step of so many bytes.
    #[must_use]
    pub fn bytes(label: &str, bytes: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::hidden());
        Self::start(bar, label, "{msg:10} {wide_bar} {binary_bytes:>10} of {binary_total_bytes}")
    }

    /// A step without known size.
    #[must_use]
    pub fn waiting(label: &str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        Self::start(bar, label, "{msg:10} {spinner} {elapsed}")
    }

    /// So many more bytes are done.
    pub fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    pub(crate) fn set(&self, bytes: u64) {
        self.bar.set_position(bytes);
    }

    fn start(bar: ProgressBar, label: &str, template: &str) -> Self {
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(label.to_owned());
        let shown = std::io::stderr().is_terminal().then(|| {
            let (end, ended) = mpsc::channel::<()>();
            let late = bar.clone();
            let thread = thread::spawn(move || {
                if ended.recv_timeout(SHOW_AFTER) == Err(RecvTimeoutError::Timeout) {
                    late.set_draw_target(ProgressDrawTarget::stderr());
                    late.enable_steady_tick(Duration::from_millis(100));
                }
            });
            (end, thread)
        });
        Self { bar, shown }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.shown.take() {
            drop(end);
            // A panic of that thread concerns the display only.
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}

/// A step ends when the next begins.
#[derive(Default)]
pub(crate) struct Steps(Mutex<Option<(String, Progress)>>);

impl Steps {
    /// Begins a step; `None` without known size.
    pub(crate) fn begin(&self, label: &str, bytes: Option<u64>) {
        let mut current = self.current();
        // The bar before disappears first.
        *current = None;
        let progress = bytes.map_or_else(|| Progress::waiting(label), |bytes| Progress::bytes(label, bytes));
        *current = Some((label.to_owned(), progress));
    }

    pub(crate) fn add(&self, bytes: u64) {
        if let Some((_, progress)) = &*self.current() {
            progress.add(bytes);
        }
    }

    /// Only if `label` is the current step.
    pub(crate) fn set(&self, label: &str, bytes: u64, all_bytes: u64) {
        if let Some((current, progress)) = &*self.current()
            && *current == label
        {
            progress.bar.set_length(all_bytes);
            progress.bar.set_position(bytes);
        }
    }

    pub(crate) fn end(&self) {
        *self.current() = None;
    }

    fn current(&self) -> MutexGuard<'_, Option<(String, Progress)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
