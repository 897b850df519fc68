//! Metrics, with vLLM's names where vLLM has them.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use crate::delta::Finish;
use crate::fault::{Fault, Faults};

#[derive(Debug, Default)]
pub(crate) struct Counts {
    waiting: AtomicI64,
    running: AtomicI64,
    prompt_tokens: AtomicU64,
    generation_tokens: AtomicU64,
    /// Finished requests, in the order of [`Finish::ALL`].
    finished: [AtomicU64; 3],
    /// Requests aborted by a disconnect.
    clients_gone: AtomicU64,
}

/// A request, from its arrival until it is dropped.
#[derive(Debug)]
pub(crate) struct Running {
    counts: Arc<Counts>,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Running,
    Ended,
}

impl Running {
    pub(crate) fn new(counts: Arc<Counts>) -> Self {
        counts.waiting.fetch_add(1, Ordering::Relaxed);
        Self { counts, stage: Stage::Waiting }
    }

    pub(crate) fn admit(&mut self, prompt_tokens: u64) {
        self.leave(Stage::Running);
        self.counts.running.fetch_add(1, Ordering::Relaxed);
        self.counts.prompt_tokens.fetch_add(prompt_tokens, Ordering::Relaxed);
    }

    pub(crate) fn refuse(&mut self) {
        self.leave(Stage::Ended);
    }

    pub(crate) fn generated(&self) {
        self.counts.generation_tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end; a request dropped without this was abandoned by its client.
    pub(crate) fn finish(&mut self, finish: Finish) {
        self.leave(Stage::Ended);
        if let Some(nth) = Finish::ALL.iter().position(|one| *one == finish) {
            self.counts.finished[nth].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn leave(&mut self, next: Stage) {
        match self.stage {
            Stage::Waiting => self.counts.waiting.fetch_sub(1, Ordering::Relaxed),
            Stage::Running => self.counts.running.fetch_sub(1, Ordering::Relaxed),
            Stage::Ended => 0,
        };
        self.stage = next;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.stage != Stage::Ended {
            self.finish(Finish::Abort);
            self.counts.clients_gone.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// What an engine reports of itself.
#[derive(Debug)]
pub(crate) struct Report<'a> {
    pub(crate) model: &'a str,
    pub(crate) counts: &'a Counts,
    pub(crate) faults: &'a Faults,
    pub(crate) sleep_state: &'static str,
    pub(crate) held_bytes: u64,
    pub(crate) leaked_bytes: usize,
}

/// All metrics, in Prometheus' text format.
pub(crate) fn text(report: &Report<'_>) -> String {
    let counts = report.counts;
    let model = report.model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut text = String::new();
    let mut write = |kind: &str, name: &str, values: &[(String, String)]| {
        // Writing to a `String` cannot fail.
        let _ = writeln!(text, "# TYPE {name} {kind}");
        for (labels, value) in values {
            let _ = writeln!(text, "{name}{{engine=\"0\",model_name=\"{model}\"{labels}}} {value}");
        }
    };
    let plain = |value: String| vec![(String::new(), value)];
    let whole = |count: &AtomicU64| plain(count.load(Ordering::Relaxed).to_string());
    let now = |count: &AtomicI64| plain(count.load(Ordering::Relaxed).to_string());
    write("gauge", "vllm:num_requests_running", &now(&counts.running));
    write("gauge", "vllm:num_requests_waiting", &now(&counts.waiting));
    let states = ["awake", "weights_offloaded", "discard_all"].map(|state| {
        let is_it = report.sleep_state == state;
        (format!(",sleep_state=\"{state}\""), u8::from(is_it).to_string())
    });
    write("gauge", "vllm:engine_sleep_state", &states);
    write("counter", "vllm:prompt_tokens_total", &whole(&counts.prompt_tokens));
    write("counter", "vllm:generation_tokens_total", &whole(&counts.generation_tokens));
    let finished: Vec<(String, String)> = Finish::ALL
        .iter()
        .zip(&counts.finished)
        .map(|(finish, count)| {
            (format!(",finished_reason=\"{}\"", finish.name()), count.load(Ordering::Relaxed).to_string())
        })
        .collect();
    write("counter", "vllm:request_success_total", &finished);
    write("counter", "mock:clients_gone_total", &whole(&counts.clients_gone));
    let faults =
        Fault::ALL.map(|fault| (format!(",fault=\"{fault}\""), report.faults.count(fault).to_string()));
    write("counter", "mock:faults_total", &faults);
    write("gauge", "mock:held_bytes", &plain(report.held_bytes.to_string()));
    write("gauge", "mock:leaked_bytes", &plain(report.leaked_bytes.to_string()));
    text
}
