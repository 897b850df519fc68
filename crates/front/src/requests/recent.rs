//! What a model's answers of the last minute took, in steps of a second.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::now::Tokens;

/// What is recent.
pub const RECENT: Duration = Duration::from_secs(60);

/// A model's answers that ended in the last minute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Recent {
    /// How many.
    pub answers: u64,
    /// Tokens of their prompts each second; `None` if no answer counted them.
    pub prompt_tokens_per_s: Option<f64>,
    /// Tokens of the answers each second; `None` if no answer counted them.
    pub completion_tokens_per_s: Option<f64>,
    /// The mean of seconds until an engine's first byte.
    pub ttft_s: Option<f64>,
}

/// Of one model.
#[derive(Debug, Default)]
pub(super) struct Window(VecDeque<Second>);

#[derive(Debug)]
struct Second {
    begins: Instant,
    answers: u64,
    prompt: Option<u64>,
    completion: Option<u64>,
    ttft: Duration,
    ttfts: u32,
}

impl Window {
    pub(super) fn add(&mut self, now: Instant, tokens: Tokens, ttft: Option<Duration>) {
        self.forget(now);
        if self.0.back().is_none_or(|last| now.duration_since(last.begins) >= Duration::from_secs(1)) {
            let (prompt, completion, ttft) = (None, None, Duration::ZERO);
            self.0.push_back(Second { begins: now, answers: 0, prompt, completion, ttft, ttfts: 0 });
        }
        let Some(last) = self.0.back_mut() else { return };
        last.answers += 1;
        last.prompt = sum(last.prompt, tokens.prompt);
        last.completion = sum(last.completion, tokens.completion);
        if let Some(ttft) = ttft {
            last.ttft = last.ttft.saturating_add(ttft);
            last.ttfts += 1;
        }
    }

    pub(super) fn recent(&mut self, now: Instant) -> Recent {
        self.forget(now);
        let per_s = |of: fn(&Second) -> Option<u64>| {
            let all = self.0.iter().map(of).fold(None, sum)?;
            #[expect(clippy::cast_precision_loss, reason = "a minute has fewer than 2^52 tokens")]
            Some(all as f64 / RECENT.as_secs_f64())
        };
        let ttfts: u32 = self.0.iter().map(|second| second.ttfts).sum();
        let ttft: f64 = self.0.iter().map(|second| second.ttft.as_secs_f64()).sum();
        Recent {
            answers: self.0.iter().map(|second| second.answers).sum(),
            prompt_tokens_per_s: per_s(|second| second.prompt),
            completion_tokens_per_s: per_s(|second| second.completion),
            ttft_s: (ttfts > 0).then(|| ttft / f64::from(ttfts)),
        }
    }

    fn forget(&mut self, now: Instant) {
        while self.0.front().is_some_and(|first| now.duration_since(first.begins) >= RECENT) {
            self.0.pop_front();
        }
    }
}

fn sum(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.saturating_add(other)),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_count_for_a_minute() {
        let (mut window, begin) = (Window::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(window.recent(begin), Recent::default());
        let tokens = Tokens { prompt: Some(30), completion: Some(600) };
        window.add(at(0), tokens, Some(Duration::from_secs(1)));
        window.add(at(0), tokens, Some(Duration::from_secs(2)));
        window.add(at(40), Tokens::default(), Some(Duration::from_secs(6)));
        let all = Recent {
            answers: 3,
            prompt_tokens_per_s: Some(1.0),
            completion_tokens_per_s: Some(20.0),
            ttft_s: Some(3.0),
        };
        assert_eq!(window.recent(at(59)), all);
        let last = Recent { answers: 1, ttft_s: Some(6.0), ..Recent::default() };
        assert_eq!(window.recent(at(60)), last, "an answer without usage is not one of no tokens");
        assert_eq!(window.recent(at(100)), Recent::default());
    }

    #[test]
    fn its_size_does_not_follow_the_load() {
        let (mut window, begin) = (Window::default(), Instant::now());
        for ms in 0..90_000 {
            window.add(begin + Duration::from_millis(ms), Tokens::default(), None);
        }
        assert_eq!(window.0.len(), 60);
    }
}
