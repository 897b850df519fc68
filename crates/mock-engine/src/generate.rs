//! Generation: one task per request, which ends when its client disconnects.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::{OwnedRwLockReadGuard, watch};
use tokio::time::{Instant, sleep_until};

use crate::delta::{Delta, Finish, GenerateRequest};
use crate::engine::Engine;
use crate::failure::Failure;
use crate::fault::Fault;
use crate::memory::{Memory, Sampled};
use crate::metrics::Running;
use crate::text::Text;

/// How long a crash in a stream waits, so that earlier tokens are sent.
const FLUSH_DELAY: Duration = Duration::from_millis(100);

/// Starts a request; dropping the receiver stops it. If the channel closes before every choice has ended, the
/// engine has crashed.
pub(crate) async fn begin(
    engine: &Arc<Engine>,
    request: GenerateRequest,
) -> Result<UnboundedReceiver<Delta>, Failure> {
    let admitted = Admitted::of(engine, request.prompt_tokens).await?;
    let (tx, rx) = mpsc::unbounded_channel();
    let end = engine.end().clone();
    tokio::spawn(async move { end.run_until_cancelled(admitted.run(&request, &tx)).await });
    Ok(rx)
}

/// Takes an embedding's time, and returns what the memory holds.
pub(crate) async fn embed(engine: &Arc<Engine>, prompt_tokens: u64) -> Result<Sampled, Failure> {
    let mut admitted = Admitted::of(engine, prompt_tokens).await?;
    let is_running = admitted.maybe_hang(std::future::pending()).await;
    if !is_running {
        let reason = "the request was aborted, because the engine was put to sleep";
        return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, reason));
    }
    sleep_until(Instant::now() + admitted.engine.token_time()).await;
    admitted.running.finish(Finish::Stop);
    Ok(admitted.sampled)
}

/// An admitted request: a call that moves memory waits for it.
struct Admitted {
    engine: Arc<Engine>,
    memory_lock: Option<OwnedRwLockReadGuard<()>>,
    aborts: watch::Receiver<u64>,
    sampled: Sampled,
    running: Running,
}

impl Admitted {
    /// Waits until no call moves memory, and fails if the engine sleeps then.
    async fn of(engine: &Arc<Engine>, prompt_tokens: u64) -> Result<Self, Failure> {
        let mut running = Running::new(Arc::clone(engine.counts()));
        // Before the lock is taken, so that no later sleep is missed.
        let aborts = engine.aborts().subscribe();
        let memory_lock = Arc::clone(engine.memory_lock()).read_owned().await;
        if engine.is_asleep() {
            running.refuse();
            let reason = "the engine is asleep: POST /wake_up first";
            return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, reason));
        }
        if engine.faults().occurs(Fault::Unhealthy) {
            running.refuse();
            let reason = "the engine's device has failed";
            return Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, reason));
        }
        let sampled = engine.with_memory(Memory::sample).await.inspect_err(|_| running.refuse())?;
        running.admit(prompt_tokens);
        Ok(Self { engine: Arc::clone(engine), memory_lock: Some(memory_lock), aborts, sampled, running })
    }

    /// Generates one choice after the other, until all have ended or the client is gone.
    async fn run(mut self, request: &GenerateRequest, tx: &UnboundedSender<Delta>) {
        let texts: Vec<(Text, u32, Finish)> =
            request.prompts.iter().map(|prompt| self.text(request, prompt)).collect();
        let all: u64 = texts.iter().map(|(_, len, _)| u64::from(*len)).sum();
        let crash_at = self.engine.faults().occurs(Fault::CrashesInStream).then_some(all / 2);
        let token_time = self.engine.token_time();
        if !self.maybe_hang(tx.closed()).await {
            return self.abort_choices(0, texts.len(), tx);
        }
        let mut generated = 0;
        let mut at = Instant::now();
        for (choice, (text, len, finish)) in texts.iter().enumerate() {
            for nth in 0..*len {
                if crash_at == Some(generated) {
                    tokio::time::sleep(FLUSH_DELAY).await;
                    return self.engine.crash(Fault::CrashesInStream).await;
                }
                at += token_time;
                if !self.wait_until(at, tx).await {
                    return self.abort_choices(choice, texts.len(), tx);
                }
                if *self.engine.is_pausing().borrow() {
                    if !self.wait_for_wake(tx).await {
                        return self.abort_choices(choice, texts.len(), tx);
                    }
                    at = Instant::now();
                }
                generated += 1;
                self.running.generated();
                let finish = (nth + 1 == *len).then_some(*finish);
                // The check above notices a closed channel.
                let _ = tx.send(Delta { choice, text: Some(text.token(nth, self.sampled)), finish });
            }
        }
        let finish = texts.last().map_or(Finish::Stop, |(_, _, finish)| *finish);
        self.running.finish(finish);
    }

    fn text(&self, request: &GenerateRequest, prompt: &str) -> (Text, u32, Finish) {
        let text = Text::new(self.engine.model(), prompt);
        match request.max_tokens {
            Some(max) if request.ignore_eos || max < text.len() => (text, max, Finish::Length),
            _ => (text, text.len(), Finish::Stop),
        }
    }

    /// Returns false if the request was aborted, or its client is gone.
    async fn wait_until(&mut self, at: Instant, tx: &UnboundedSender<Delta>) -> bool {
        tokio::select! {
            biased;
            () = tx.closed() => false,
            _ = self.aborts.changed() => false,
            () = sleep_until(at) => true,
        }
    }

    /// Hangs under [`Fault::HangsInAnswer`], until that is cleared. Returns false if the request was aborted
    /// or its client left.
    async fn maybe_hang(&mut self, disconnected: impl Future<Output = ()>) -> bool {
        if !self.engine.faults().occurs(Fault::HangsInAnswer) {
            return true;
        }
        tokio::select! {
            () = disconnected => false,
            _ = self.aborts.changed() => false,
            () = self.engine.faults().wait_until_cleared(Fault::HangsInAnswer) => true,
        }
    }

    /// Pauses during a sleep, and continues with what the memory holds after the wake. Returns false if the
    /// engine sleeps again, or the client left.
    async fn wait_for_wake(&mut self, tx: &UnboundedSender<Delta>) -> bool {
        self.memory_lock = None;
        let mut is_pausing = self.engine.is_pausing().subscribe();
        let memory_lock = loop {
            tokio::select! {
                () = tx.closed() => return false,
                // The engine holds the sender.
                _ = is_pausing.wait_for(|is_pausing| !is_pausing) => {}
            }
            let memory_lock = Arc::clone(self.engine.memory_lock()).read_owned().await;
            // It may have been put to sleep again at once, with what it kept.
            if !*is_pausing.borrow() {
                break memory_lock;
            }
        };
        if self.engine.is_asleep() {
            return false;
        }
        let Ok(sampled) = self.engine.with_memory(Memory::sample).await else { return false };
        (self.sampled, self.memory_lock) = (sampled, Some(memory_lock));
        true
    }

    /// Sends the abort for the remaining choices, if the client is still there.
    fn abort_choices(mut self, from: usize, to: usize, tx: &UnboundedSender<Delta>) {
        if tx.is_closed() {
            return;
        }
        self.running.finish(Finish::Abort);
        for choice in from..to {
            let _ = tx.send(Delta { choice, text: None, finish: Some(Finish::Abort) });
        }
    }
}
