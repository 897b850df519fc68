//! A look at an engine that should be awake.
//!
//! Promises: a look ends within [`LOOK_MAX`]. One that is late says whether the engine is at work all the same.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::directory::Entry;
use poorwill_rotation_policy::{EngineState, Look};

/// Three looks that are late, the pauses between them and one before them take 13 s with usual rules.
pub(super) const LOOK_MAX: Duration = Duration::from_secs(2);

/// For reading what an engine has used of the cores, at the end of a look.
const CPU_TIME_MAX: Duration = Duration::from_millis(250);

/// An engine computes that uses this part of a core.
const CORE_PART: u32 = 10;

/// How many parts of answers came from its engine.
pub(super) fn answered(entry: &Entry) -> u64 {
    entry.answered.now()
}

/// What the engine says, or why that counts against it. `answered` is the count of answers' parts at the last look.
pub(super) async fn look(entry: &Entry, answered_before: u64) -> Result<EngineState, Look> {
    let half = LOOK_MAX / 2;
    let mut asked = entry.handle.engine().probe();
    let found = match timeout(half, asked.as_mut()).await {
        Ok(found) => found,
        Err(_) => {
            let mut is_computing = false;
            let watching = async {
                is_computing = computes(entry, half.saturating_sub(CPU_TIME_MAX)).await;
                std::future::pending().await
            };
            let answer = async {
                tokio::select! {
                    found = asked => found,
                    never = watching => never,
                }
            };
            let answered_late = timeout(half, answer).await;
            match answered_late {
                Ok(found) => found,
                Err(_) if answered(entry) != answered_before => return Err(Look::Flowing),
                Err(_) => return Err(if is_computing { Look::Computing } else { Look::Late }),
            }
        }
    };
    found.map_err(|error| Look::Unwell(error.to_string()))
}

/// Whether its processes use the cores in this time. Reading that may hang as well.
async fn computes(entry: &Entry, time: Duration) -> bool {
    let before = entry.handle.cpu_time().await;
    sleep(time).await;
    match (before, entry.handle.cpu_time().await) {
        (Some(before), Some(now)) => now.saturating_sub(before) >= time / CORE_PART,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::super::{Tools, entry};
    use super::*;
    use crate::config::{CanaryKind, Config};
    use crate::engine::{Answer, Engine, EngineError, EngineFuture};
    use crate::hibernation::{Hibernator, Sets};
    use crate::measure::{Measured, Meter};
    use poorwill_rotation_policy::Gpu;

    /// Answers its probe after this time.
    #[derive(Debug)]
    struct Slow(Duration, Result<EngineState, EngineError>);

    impl Engine for Slow {
        fn probe(&self) -> EngineFuture<'_, EngineState> {
            Box::pin(async {
                sleep(self.0).await;
                self.1.clone()
            })
        }

        fn sleep(&self) -> EngineFuture<'_, ()> {
            unreachable!()
        }

        fn wake(&self) -> EngineFuture<'_, ()> {
            unreachable!()
        }

        fn is_awake(&self) -> EngineFuture<'_, bool> {
            unreachable!()
        }

        fn generate(&self, _: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
            unreachable!()
        }
    }

    #[derive(Debug)]
    struct Unmeasured;

    impl Meter for Unmeasured {
        fn measure<'a>(&'a self, _: &'a [Gpu]) -> Measured<'a> {
            unreachable!()
        }
    }

    fn entry_of(after: Duration, says: Result<EngineState, EngineError>) -> Entry {
        let file = "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"";
        let config = Config::parse(file, &|_| Ok(String::new())).unwrap();
        let meter: Arc<dyn Meter> = Arc::new(Unmeasured);
        let sets: Arc<dyn Hibernator> = Arc::new(Sets::new(&Default::default(), None, std::iter::empty()));
        let engine = Arc::new(Slow(after, says));
        let connect = move |_: &crate::config::Model| Ok(Arc::clone(&engine) as Arc<dyn Engine>);
        let tools = Tools { meter: &meter, hibernator: &sets, connect: &connect };
        entry(&config, &config.models[0], tools).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_late_says_whether_answers_flow() {
        let seconds = Duration::from_secs_f64;
        let late = entry_of(seconds(2.1), Ok(EngineState::Awake));
        assert_eq!(look(&late, 0).await, Err(Look::Late));
        late.answered.counter().fetch_add(1, Ordering::Relaxed);
        assert_eq!(look(&late, 0).await, Err(Look::Flowing));
        assert_eq!(look(&late, answered(&late)).await, Err(Look::Late), "none came since");
        for wait in [0.0, 1.5, 1.9] {
            let slow = entry_of(seconds(wait), Ok(EngineState::Awake));
            assert_eq!(look(&slow, 0).await, Ok(EngineState::Awake), "{wait}");
        }
        let refused =
            EngineError::Refused { request_line: "GET".into(), status: 503, message: "sick".into() };
        let unwell = entry_of(seconds(1.5), Err(refused));
        assert_eq!(look(&unwell, 0).await, Err(Look::Unwell("GET: it answered 503: sick".to_owned())));
    }
}
