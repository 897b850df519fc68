//! Loads that users reported, rebuilt from what their reports say.
//!
//! The sizes that a report does not give are guessed, and [`Case::guessed`] says which.

use crate::card::Card;
use crate::trace::{Block, Trace, TraceBuilder, TraceError};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A load with the card that it ran on.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name on the command line.
    pub name: &'static str,
    /// The report.
    pub source: &'static str,
    /// What happened there.
    pub reported: &'static str,
    /// What had to be guessed.
    pub guessed: &'static [&'static str],
    /// What was allocated.
    pub trace: Trace,
    /// The card.
    pub card: Card,
    /// What was in use there, first, and what else to look at.
    pub setups: &'static [&'static str],
}

impl Case {
    /// Their names.
    pub const NAMES: [&'static str; 4] =
        ["moe-block-layout", "gpt-oss-swizzle", "dense", "graphs-on-a-slice"];

    /// The case of this name.
    ///
    /// # Errors
    /// Never for the cases that there are: each is a trace that can be.
    pub fn of(name: &str) -> Result<Option<Self>, TraceError> {
        Ok(Some(match name {
            "moe-block-layout" => moe_block_layout()?,
            "gpt-oss-swizzle" => gpt_oss_swizzle()?,
            "dense" => dense()?,
            "graphs-on-a-slice" => graphs_on_a_slice()?,
            _ => return Ok(None),
        }))
    }
}

/// Blocks that are freed by their number.
struct Script {
    trace: TraceBuilder,
    next: u64,
}

impl Script {
    fn new(name: &str) -> Self {
        Self { trace: TraceBuilder::new(name), next: 0 }
    }

    fn alloc(&mut self, bytes: u64, by: &str) -> Result<u64, TraceError> {
        self.next += 1;
        let stack = self.trace.stack(vec![by.to_owned()]);
        self.trace.alloc(self.next, Block { bytes, stream: 0, pool: 0, stack })?;
        Ok(self.next)
    }

    fn free(&mut self, blocks: impl IntoIterator<Item = u64>) -> Result<(), TraceError> {
        blocks.into_iter().try_for_each(|block| self.trace.free(block))
    }
}

const LAYERS: u64 = 94;
const EXPERTS: u64 = 128;
/// Of one expert on one of four ranks, in BF16: 2 x 384 x 4096 and 4096 x 384.
const EXPERT_BYTES: [(u64, &str); 2] = [(6 * MIB, "w13"), (3 * MIB, "w2")];
/// Of a rank, as reported.
const WEIGHTS_BYTES: u64 = 112_343 * MIB;

/// Qwen3-235B-A22B in BF16, one of four ranks: 94 layers of 128 experts. All weights are there, and then each layer's
/// experts are converted to the block layout of TRTLLM's kernels.
fn moe_block_layout() -> Result<Case, TraceError> {
    let mut script = Script::new("moe-block-layout");
    script.trace.phase("load");
    let layer_bytes: u64 = EXPERT_BYTES.iter().map(|(bytes, _)| EXPERTS * bytes).sum();
    script.alloc(WEIGHTS_BYTES - LAYERS * layer_bytes, "attention, embeddings and others")?;
    let mut layers = Vec::new();
    for _ in 0..LAYERS {
        let raw = EXPERT_BYTES.map(|(bytes, name)| script.alloc(EXPERTS * bytes, name));
        layers.push(raw.into_iter().collect::<Result<Vec<_>, _>>()?);
    }
    script.trace.phase("convert");
    for raw in layers {
        for (bytes, _) in EXPERT_BYTES {
            for _ in 0..EXPERTS {
                script.alloc(bytes, "convert_moe_weights_to_flashinfer_trtllm_block_layout")?;
            }
        }
        script.free(raw)?;
    }
    Ok(Case {
        name: "moe-block-layout",
        source: "vLLM: mixture of experts with sleep mode runs out of memory while it loads, bisected to #41268",
        reported: "with a split limit of 20 MiB: no memory for a segment of 20 MiB, 181.80 GiB taken, 69.99 to 71.20 GiB of it \
                   stranded. Without it: a clean start behind 109.71 GiB of weights",
        guessed: &[
            "that each expert's converted weights are a tensor of their own, and a layer's old tensors go when all of its \
             experts are converted",
            "that all other weights are one block",
            "what else takes memory of the card: 2.51 GiB",
        ],
        trace: script.trace.finish(None),
        card: Card { total_bytes: 188_733 * MIB, taken_bytes: 2_570 * MIB, budget_bytes: None },
        setups: &[
            "cumem:max_split_size_mb:20",
            "cumem",
            "pytorch:max_split_size_mb:20",
            "pytorch",
            "pytorch:expandable_segments:True",
            "poorwill",
        ],
    })
}

/// GPT-OSS-120B on two GPUs: 36 layers of 530 and 270 MiB, each swizzled into a new block of its size.
fn gpt_oss_swizzle() -> Result<Case, TraceError> {
    let mut script = Script::new("gpt-oss-swizzle");
    script.trace.phase("load");
    for layer in 0..36 {
        let old = [script.alloc(530 * MIB, "w13")?, script.alloc(270 * MIB, "w2")?];
        let mut later = Vec::new();
        for (old, (mib, name)) in old.into_iter().zip([(530, "swizzle_data w13"), (270, "swizzle_data w2")]) {
            let buffer = script.alloc((2 + layer * 3 % 8) * MIB, "a buffer of the swizzle")?;
            script.alloc(mib * MIB, name)?;
            script.alloc((2 + layer * 5 % 8) * MIB, "scales")?;
            later.extend([buffer, old]);
            if layer % 2 == 0 {
                script.free(later.drain(..))?;
            }
        }
        script.free(later)?;
    }
    Ok(Case {
        name: "gpt-oss-swizzle",
        source: "vLLM's pull request #41268: max_split_size_mb while a model is loaded",
        reported: "270 MiB are cut from 530 MiB, and remainders of 260 MiB serve nothing: out of memory. It fits with a \
                   limit of 20 MiB",
        guessed: &[
            "that each layer is swizzled when its weights have come, with a buffer of 2 to 9 MiB before and scales behind",
            "that in every other layer both old tensors go at the end",
            "a card with 31 GiB for the weights",
        ],
        trace: script.trace.finish(None),
        card: Card { total_bytes: 80 * GIB, taken_bytes: GIB, budget_bytes: Some(31 * GIB) },
        setups: &["pytorch", "pytorch:max_split_size_mb:20", "cumem:max_split_size_mb:20", "poorwill"],
    })
}

/// 60 layers of four tensors, each converted to half its size before the next comes.
fn dense() -> Result<Case, TraceError> {
    let mut script = Script::new("dense");
    script.trace.phase("load");
    for mib in [96, 64, 530, 270].into_iter().cycle().take(240) {
        let raw = script.alloc(mib * MIB, "raw")?;
        script.alloc(mib * MIB / 2, "converted")?;
        script.free([raw])?;
    }
    Ok(Case {
        name: "dense",
        source: "the same reports: dense models want the limit that mixtures of experts do not",
        reported: "splitting leaves remainders of half-used segments; the limit keeps each segment for one size",
        guessed: &["all sizes"],
        trace: script.trace.finish(None),
        card: Card { total_bytes: 32 * GIB, taken_bytes: GIB, budget_bytes: None },
        setups: &[
            "pytorch",
            "pytorch:max_split_size_mb:20",
            "cumem",
            "cumem:max_split_size_mb:20",
            "poorwill",
        ],
    })
}

/// A slice of 23 GiB. Weights, activations and the key-value cache are sized by the whole card, and then graphs ask for
/// more than is left, whatever the utilisation.
fn graphs_on_a_slice() -> Result<Case, TraceError> {
    let mut script = Script::new("graphs-on-a-slice");
    script.trace.phase("load");
    script.alloc(14 * GIB + 512 * MIB, "weights, int4")?;
    script.trace.phase("profile");
    script.alloc(2 * GIB, "workspaces and activations")?;
    script.trace.phase("cache");
    script.alloc(4 * GIB + 682 * MIB, "key-value cache, fp8")?;
    script.trace.phase("capture");
    script.alloc(1567 * MIB, "profile_cudagraph_memory")?;
    Ok(Case {
        name: "graphs-on-a-slice",
        source: "vllm-project/vllm#40937: graphs are profiled beyond a slice's memory",
        reported: "1.53 GiB asked for, 1.39 GiB free, 21.68 GiB in use of 23.00 visible, at a utilisation of 0.88, 0.92 and 0.95",
        guessed: &["how the 21.6 GiB in use are divided: weights, what the profile keeps, and the cache"],
        trace: script.trace.finish(None),
        card: Card { total_bytes: 23 * GIB, taken_bytes: 450 * MIB, budget_bytes: None },
        setups: &["pytorch", "pytorch:expandable_segments:True", "poorwill"],
    })
}
