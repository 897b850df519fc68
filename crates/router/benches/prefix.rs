//! How much of prompts is in caches, and how even loads are, by how a copy is chosen. All of it is simulated.
//!
//! Argument: `chats`, few applications with long chats; or `tasks`, many applications with one long prompt and one turn
//! each.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "a benchmark's figures are small"
)]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::process::ExitCode;

use fastrand::Rng;
use poorwill_front::affinity::pair;
use poorwill_router::rendezvous;

const SEED: u64 = 1;
const COPIES: usize = 8;
/// Of a prompt, as engines cache them.
const BLOCK_TOKENS: usize = 64;
const CACHE_TOKENS: usize = 400_000;
/// A prompt is computed at this rate, and an answer takes so long for each token, the longer the fuller its engine.
const PREFILL_PER_S: f64 = 10_000.0;
const TOKEN_S: f64 = 0.02;
const FULL: f64 = 32.0;
/// Four characters are about a token.
const KIB_TOKENS: usize = 256;
const MINUTES: f64 = 30.0;
/// Caches are empty at first.
const BEFORE_S: f64 = 300.0;

#[derive(Debug, Clone, Copy)]
struct Workload {
    apps: usize,
    chats_per_s: f64,
    /// Tokens, evenly by their logarithm.
    system: (f64, f64),
    turns_mean: f64,
    think_mean_s: f64,
}

const CHATS: Workload =
    Workload { apps: 40, chats_per_s: 5.0, system: (64.0, 6000.0), turns_mean: 6.0, think_mean_s: 20.0 };
const TASKS: Workload =
    Workload { apps: 1500, chats_per_s: 25.0, system: (500.0, 8000.0), turns_mean: 1.0, think_mean_s: 20.0 };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Random,
    TwoChoices,
    Least,
    /// By the application and the user's first message.
    Chat,
    /// The same, of which the first KiB counts.
    ChatKib,
    /// First turns as the one, later ones as the other.
    ByTurn,
    /// Without a bound of its load.
    ChatUnbound,
}

const POLICIES: [(Policy, &str); 7] = [
    (Policy::Random, "random"),
    (Policy::TwoChoices, "two choices"),
    (Policy::Least, "least loaded"),
    (Policy::ChatUnbound, "rendezvous, first message, no bound"),
    (Policy::Chat, "rendezvous, first message"),
    (Policy::ChatKib, "rendezvous, first message, at most 1 KiB"),
    (Policy::ByTurn, "rendezvous, 1 KiB at first, the whole first message later"),
];

struct Chat {
    app: usize,
    system_tokens: usize,
    /// Questions and answers so far.
    history_tokens: usize,
    turns: Vec<Turn>,
}

#[derive(Clone, Copy)]
struct Turn {
    question_tokens: usize,
    answer_tokens: usize,
    think_s: f64,
}

/// The least recently used blocks leave first.
#[derive(Default)]
struct Cache {
    used_at: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
    clock: u64,
}

impl Cache {
    /// How many blocks are there, from the first one on.
    fn hits(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|block| self.used_at.contains_key(block)).count()
    }

    fn touch(&mut self, blocks: &[u64]) {
        // The end of a prompt is of less use than its beginning.
        for block in blocks.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.used_at.insert(*block, self.clock) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(self.clock, *block);
        }
        while self.used_at.len() > CACHE_TOKENS / BLOCK_TOKENS
            && let Some((_, block)) = self.by_use.pop_first()
        {
            self.used_at.remove(&block);
        }
    }
}

fn exponential(rng: &mut Rng, mean: f64) -> f64 {
    -mean * (1.0 - rng.f64()).ln()
}

fn between(rng: &mut Rng, (low, high): (f64, f64)) -> usize {
    (low * (high / low).powf(rng.f64())) as usize
}

fn chats(workload: Workload, rng: &mut Rng) -> Vec<(f64, Chat)> {
    let systems: Vec<usize> =
        (0..workload.apps).map(|_| between(rng, workload.system).next_multiple_of(BLOCK_TOKENS)).collect();
    let weights: Vec<f64> = (1..=workload.apps).map(|rank| 1.0 / rank as f64).collect();
    let all_weights: f64 = weights.iter().sum();
    let (mut all, mut at) = (Vec::new(), 0.0);
    while at < MINUTES * 60.0 {
        at += exponential(rng, 1.0 / workload.chats_per_s);
        let mut left = rng.f64() * all_weights;
        let app = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        let app = app.unwrap_or_default();
        let turns = 1 + exponential(rng, workload.turns_mean - 1.0 + 1e-9) as usize;
        let turn = |rng: &mut Rng| Turn {
            question_tokens: between(rng, (20.0, 800.0)),
            answer_tokens: between(rng, (50.0, 600.0)),
            think_s: exponential(rng, workload.think_mean_s),
        };
        let turns = (0..turns).map(|_| turn(rng)).collect();
        all.push((at, Chat { app, system_tokens: systems[app], history_tokens: 0, turns }));
    }
    all
}

fn blocks(chat: &Chat, nth: usize, tokens: usize) -> Vec<u64> {
    let of_system = chat.system_tokens / BLOCK_TOKENS;
    let of_chat = tokens / BLOCK_TOKENS;
    let block = |kind: u64, whose: usize, at: usize| kind << 62 | (whose as u64) << 24 | at as u64;
    let system = (0..of_system).map(|at| block(0, chat.app, at));
    system.chain((0..of_chat).map(|at| block(1, nth, at))).collect()
}

fn choose(policy: Policy, chat: &Chat, nth: usize, loads: &[u64], rng: &mut Rng) -> usize {
    const NAMES: [&str; COPIES] = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let first = rng.usize(..COPIES);
    let second = (first + 1 + rng.usize(..COPIES - 1)) % COPIES;
    let least = |of: &mut dyn Iterator<Item = usize>| of.min_by_key(|at| loads[*at]).unwrap_or_default();
    let by = |key: u64, is_bound: bool| {
        let load = |at: usize| if is_bound { loads[at] } else { 0 };
        let places: Vec<(&str, u64)> = NAMES.iter().enumerate().map(|(at, name)| (*name, load(at))).collect();
        rendezvous::choose(key, &places).unwrap_or_default()
    };
    let (of_app, of_chat) = (pair(2, chat.app as u64), pair(1, nth as u64));
    match policy {
        Policy::Random => first,
        Policy::TwoChoices => least(&mut [first, second].into_iter()),
        Policy::Least => least(&mut (0..COPIES).map(|at| (first + at) % COPIES)),
        Policy::Chat => by(of_chat, true),
        Policy::ByTurn if chat.history_tokens > 0 => by(of_chat, true),
        Policy::ChatKib | Policy::ByTurn if chat.system_tokens >= KIB_TOKENS => by(of_app, true),
        Policy::ChatKib | Policy::ByTurn => by(of_chat, true),
        Policy::ChatUnbound => by(of_chat, false),
    }
}

#[derive(Default)]
struct Figures {
    requests: usize,
    prompt_tokens: usize,
    hit_tokens: usize,
    /// The most loaded copy's load by the mean one's, added up over arrivals.
    uneven: f64,
    first_token_s: Vec<f64>,
}

impl Figures {
    fn row(mut self, name: &str) -> String {
        self.first_token_s.sort_by(f64::total_cmp);
        let part = |percent: usize| self.first_token_s[(self.first_token_s.len() - 1) * percent / 100];
        format!(
            "| {name} | {:.1} % | {:.2} | {:.0} ms | {:.0} ms |",
            100.0 * self.hit_tokens as f64 / self.prompt_tokens as f64,
            self.uneven / self.requests as f64,
            part(50) * 1e3,
            part(99) * 1e3,
        )
    }
}

/// What happens next: a turn begins, or ends at a copy.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Happening {
    micros: u64,
    chat: usize,
    turn: usize,
    ends_at: Option<usize>,
}

fn simulate(workload: Workload, policy: Policy) -> Figures {
    let mut chats = chats(workload, &mut Rng::with_seed(SEED));
    let mut rng = Rng::with_seed(SEED + 1);
    let mut caches: Vec<Cache> = (0..COPIES).map(|_| Cache::default()).collect();
    let mut loads = vec![0_u64; COPIES];
    let micros = |s: f64| (s * 1e6) as u64;
    let begin = |(chat, (at, _)): (usize, &(f64, Chat))| {
        Reverse(Happening { micros: micros(*at), chat, turn: 0, ends_at: None })
    };
    let mut ahead: BinaryHeap<Reverse<Happening>> = chats.iter().enumerate().map(begin).collect();
    let mut figures = Figures::default();
    while let Some(Reverse(now)) = ahead.pop() {
        let at_s = now.micros as f64 / 1e6;
        if at_s > MINUTES * 60.0 {
            break;
        }
        let (_, chat) = &mut chats[now.chat];
        let Turn { question_tokens, answer_tokens, think_s } = chat.turns[now.turn];
        if let Some(copy) = now.ends_at {
            loads[copy] -= 1;
            chat.history_tokens += question_tokens + answer_tokens;
            caches[copy].touch(&blocks(chat, now.chat, chat.history_tokens));
            if now.turn + 1 < chat.turns.len() {
                let micros = now.micros + micros(think_s);
                ahead.push(Reverse(Happening { micros, turn: now.turn + 1, ends_at: None, ..now }));
            }
            continue;
        }
        let copy = choose(policy, chat, now.chat, &loads, &mut rng);
        let prompt_tokens = chat.system_tokens + chat.history_tokens + question_tokens;
        let prompt = blocks(chat, now.chat, chat.history_tokens + question_tokens);
        let hit_tokens = caches[copy].hits(&prompt) * BLOCK_TOKENS;
        caches[copy].touch(&prompt);
        loads[copy] += 1;
        let prefill_s = (prompt_tokens - hit_tokens) as f64 / PREFILL_PER_S;
        let slower = 1.0 + loads[copy] as f64 / FULL;
        let took_s = (prefill_s + answer_tokens as f64 * TOKEN_S) * slower;
        ahead.push(Reverse(Happening { micros: now.micros + micros(took_s), ends_at: Some(copy), ..now }));
        if at_s < BEFORE_S {
            continue;
        }
        figures.requests += 1;
        figures.prompt_tokens += prompt_tokens;
        figures.hit_tokens += hit_tokens;
        figures.first_token_s.push(prefill_s * slower);
        let all: u64 = loads.iter().sum();
        let most = loads.iter().max().copied().unwrap_or_default();
        figures.uneven += most as f64 * COPIES as f64 / all as f64;
    }
    figures
}

fn main() -> ExitCode {
    // Cargo adds `--bench`.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let workload = match words[..] {
        ["chats"] => CHATS,
        ["tasks"] => TASKS,
        _ => {
            println!("name what to do: `chats` or `tasks`");
            return ExitCode::SUCCESS;
        }
    };
    println!("{workload:?}, {COPIES} copies with {CACHE_TOKENS} tokens each");
    println!("| choice | prompt tokens in a cache | most loaded, by the mean | prefill p50 | p99 |");
    println!("|---|---|---|---|---|");
    for (policy, name) in POLICIES {
        println!("{}", simulate(workload, policy).row(name));
    }
    ExitCode::SUCCESS
}
