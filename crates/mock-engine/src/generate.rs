//! Generation: a task for each request, token by token, that ends when its client is gone.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::{OwnedRwLockReadGuard, watch};
use tokio::time::{Instant, sleep_until};

use crate::engine::Engine;
use crate::failure::Failure;
use crate::lie::Lie;
use crate::memory::{Memory, Sampled};
use crate::metrics::Running;
use crate::text::Text;

/// How long one that crashes in a stream gives what it has said to be sent.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// What to generate.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    /// A choice goes on behind each.
    pub(crate) prompts: Vec<String>,
    pub(crate) prompt_tokens: u64,
    /// How far; until the text ends, if not said.
    pub(crate) max_tokens: Option<u32>,
    /// Whether to go on behind the text's end.
    pub(crate) ignore_eos: bool,
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    Stop,
    Length,
    Abort,
}

impl Finish {
    pub(crate) const ALL: [Self; 3] = [Self::Stop, Self::Length, Self::Abort];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// A token, or an end.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub(crate) choice: usize,
    /// Nothing, if it ends without one.
    pub(crate) text: Option<String>,
    pub(crate) finish: Option<Finish>,
}

/// Begins; the pieces come as they are generated. Whoever drops the receiver has it stopped. When it gives nothing more
/// before each choice has ended, the engine is gone.
pub(crate) async fn begin(engine: &Arc<Engine>, ask: Ask) -> Result<UnboundedReceiver<Piece>, Failure> {
    let admitted = Admitted::of(engine, ask.prompt_tokens).await?;
    let (tell, told) = mpsc::unbounded_channel();
    let end = engine.end.clone();
    tokio::spawn(async move { end.run_until_cancelled(admitted.run(&ask, &tell)).await });
    Ok(told)
}

/// Waits as long as the embedding of something takes, and says what the memory holds.
pub(crate) async fn embed(engine: &Arc<Engine>, prompt_tokens: u64) -> Result<Sampled, Failure> {
    let mut admitted = Admitted::of(engine, prompt_tokens).await?;
    let is_there = admitted.may_hang(std::future::pending()).await;
    if !is_there {
        let reason = "the request was aborted, because the engine was put to sleep";
        return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, reason));
    }
    sleep_until(Instant::now() + admitted.engine.token_time()).await;
    admitted.running.finish(Finish::Stop);
    Ok(admitted.sampled)
}

/// A request that is let in, and whoever moves memory waits for it.
struct Admitted {
    engine: Arc<Engine>,
    turn: Option<OwnedRwLockReadGuard<()>>,
    aborts: watch::Receiver<u64>,
    sampled: Sampled,
    running: Running,
}

impl Admitted {
    /// Waits for whoever moves memory, and refuses what comes to a sleeper.
    async fn of(engine: &Arc<Engine>, prompt_tokens: u64) -> Result<Self, Failure> {
        let mut running = Running::new(Arc::clone(&engine.counts));
        // Before the turn: a sleep that comes behind it has to find us listening.
        let aborts = engine.aborts.subscribe();
        let turn = Arc::clone(&engine.turn).read_owned().await;
        if engine.is_asleep() {
            running.refuse();
            let reason = "the engine is asleep: POST /wake_up first";
            return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, reason));
        }
        let sampled = engine.with_memory(Memory::sample).await.inspect_err(|_| running.refuse())?;
        running.admit(prompt_tokens);
        Ok(Self { engine: Arc::clone(engine), turn: Some(turn), aborts, sampled, running })
    }

    /// Generates one choice after the other, until all have ended or nobody listens.
    async fn run(mut self, ask: &Ask, tell: &UnboundedSender<Piece>) {
        let texts: Vec<(Text, u32, Finish)> =
            ask.prompts.iter().map(|prompt| self.text(ask, prompt)).collect();
        let all: u64 = texts.iter().map(|(_, len, _)| u64::from(*len)).sum();
        let crash_at = self.engine.lies.tells(Lie::CrashesInStream).then_some(all / 2);
        let token_time = self.engine.token_time();
        if !self.may_hang(tell.closed()).await {
            return self.ended_early(0, texts.len(), tell);
        }
        let mut said = 0;
        let mut at = Instant::now();
        for (choice, (text, len, finish)) in texts.iter().enumerate() {
            for nth in 0..*len {
                if crash_at == Some(said) {
                    tokio::time::sleep(LAST_WORDS).await;
                    return self.engine.crash(Lie::CrashesInStream).await;
                }
                at += token_time;
                if !self.wait_until(at, tell).await {
                    return self.ended_early(choice, texts.len(), tell);
                }
                if *self.engine.is_keeping.borrow() {
                    if !self.wait_for_wake(tell).await {
                        return self.ended_early(choice, texts.len(), tell);
                    }
                    at = Instant::now();
                }
                said += 1;
                self.running.generated();
                let finish = (nth + 1 == *len).then_some(*finish);
                // Nobody listening is found out above, next time.
                let _ = tell.send(Piece { choice, text: Some(text.token(nth, self.sampled)), finish });
            }
        }
        let finish = texts.last().map_or(Finish::Stop, |(_, _, finish)| *finish);
        self.running.finish(finish);
    }

    fn text(&self, ask: &Ask, prompt: &str) -> (Text, u32, Finish) {
        let text = Text::new(&self.engine.model, prompt);
        match ask.max_tokens {
            Some(max) if ask.ignore_eos || max < text.len() => (text, max, Finish::Length),
            _ => (text, text.len(), Finish::Stop),
        }
    }

    /// Whether nobody aborted it, and its client is still there.
    async fn wait_until(&mut self, at: Instant, tell: &UnboundedSender<Piece>) -> bool {
        tokio::select! {
            biased;
            () = tell.closed() => false,
            _ = self.aborts.changed() => false,
            () = sleep_until(at) => true,
        }
    }

    /// Hangs if it is told to, until the lie is taken back: false if it was aborted, or its client is gone, before.
    async fn may_hang(&mut self, gone: impl Future<Output = ()>) -> bool {
        if !self.engine.lies.tells(Lie::HangsInAnswer) {
            return true;
        }
        tokio::select! {
            () = gone => false,
            _ = self.aborts.changed() => false,
            () = self.engine.lies.taken_back(Lie::HangsInAnswer) => true,
        }
    }

    /// Lets the engine sleep, and goes on when it has woken, with what there is then. False if it sleeps again and keeps
    /// nothing, or the client has left.
    async fn wait_for_wake(&mut self, tell: &UnboundedSender<Piece>) -> bool {
        self.turn = None;
        let mut is_keeping = self.engine.is_keeping.subscribe();
        tokio::select! {
            () = tell.closed() => return false,
            // The sender is the engine's, which is here.
            _ = is_keeping.wait_for(|is_keeping| !is_keeping) => {}
        }
        let turn = Arc::clone(&self.engine.turn).read_owned().await;
        if self.engine.is_asleep() {
            return false;
        }
        let Ok(sampled) = self.engine.with_memory(Memory::sample).await else { return false };
        (self.sampled, self.turn) = (sampled, Some(turn));
        true
    }

    /// Says why, to whoever still listens, for the choices that are left.
    fn ended_early(mut self, from: usize, to: usize, tell: &UnboundedSender<Piece>) {
        if tell.is_closed() {
            return;
        }
        self.running.finish(Finish::Abort);
        for choice in from..to {
            let _ = tell.send(Piece { choice, text: None, finish: Some(Finish::Abort) });
        }
    }
}
