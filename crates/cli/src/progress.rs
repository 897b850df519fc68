//! Progress on a terminal, for whatever takes over a second; nothing when standard error is no terminal.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How long a step may take in silence.
const SILENCE: Duration = Duration::from_secs(1);

/// One step under way. Disappears when dropped.
pub(crate) struct Progress {
    bar: ProgressBar,
    /// Dropping the sender ends the thread that shows the bar after a while.
    shown: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// A step that moves `bytes`.
    pub(crate) fn bytes(label: &str, bytes: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::hidden());
        Self::start(bar, label, "{msg:10} {wide_bar} {binary_bytes:>10} of {binary_total_bytes}")
    }

    /// A step that cannot tell how far it is.
    pub(crate) fn waiting(label: &str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        Self::start(bar, label, "{msg:10} {spinner} {elapsed}")
    }

    /// `bytes` more are done.
    pub(crate) fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// `bytes` are done in all.
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
                if ended.recv_timeout(SILENCE) == Err(RecvTimeoutError::Timeout) {
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

/// The steps of a run, one after the other: a step begins when the one before is over.
#[derive(Default)]
pub(crate) struct Shown(Mutex<Option<(String, Progress)>>);

impl Shown {
    /// A step that moves `bytes`, or cannot tell how far it is.
    pub(crate) fn begin(&self, label: &str, bytes: Option<u64>) {
        let mut now = self.now();
        // The one before goes first.
        *now = None;
        let progress = bytes.map_or_else(|| Progress::waiting(label), |bytes| Progress::bytes(label, bytes));
        *now = Some((label.to_owned(), progress));
    }

    /// `bytes` more of this step are done.
    pub(crate) fn add(&self, bytes: u64) {
        if let Some((_, progress)) = &*self.now() {
            progress.add(bytes);
        }
    }

    /// So many of all bytes are done, if this is still that step.
    pub(crate) fn set(&self, label: &str, bytes: u64, all_bytes: u64) {
        if let Some((now, progress)) = &*self.now()
            && *now == label
        {
            progress.bar.set_length(all_bytes);
            progress.bar.set_position(bytes);
        }
    }

    /// The last step is over.
    pub(crate) fn end(&self) {
        *self.now() = None;
    }

    fn now(&self) -> MutexGuard<'_, Option<(String, Progress)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
