//! Progress on a terminal, for whatever takes over a second; nothing when standard error is no terminal.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use poorwill::WakeProgress;

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

    /// What shows how far a wake is. It may outlive the step, and then shows nothing.
    pub(crate) fn teller(&self) -> impl Fn(WakeProgress) + Send + Sync + 'static {
        let bar = self.bar.clone();
        move |progress| {
            bar.set_length(progress.total_bytes);
            bar.set_position(progress.filled_bytes);
        }
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
