//! Traces whose pages are looked at.

use poorwill_bench::churn::{Load, Step};
use poorwill_replay::trace::{Block, Trace, TraceBuilder};
use poorwill_replay::{Card, Run, Setup, replay};

pub(crate) const GIB: u64 = 1 << 30;

/// The load of a mixture of experts, then what an engine does: profiling, caches, graphs, requests.
pub(crate) fn moe() -> Trace {
    let mut trace = TraceBuilder::new("moe, 24 layers");
    let engine = ["vllm/v1/worker/gpu_worker.py:214 load_model", "vllm/v1/engine/core.py:96 __init__"];
    let stack = |trace: &mut TraceBuilder, inner: &[&str]| {
        trace.stack(inner.iter().chain(&engine).map(|frame| (*frame).to_owned()).collect())
    };
    let raw = stack(
        &mut trace,
        &[
            "torch/nn/modules/module.py:1355 to",
            "vllm/model_executor/model_loader/weight_utils.py:712 safetensors_weights_iterator",
        ],
    );
    let transient = stack(
        &mut trace,
        &[
            "??:0 at::native::empty_cuda",
            "vllm/model_executor/layers/quantization/utils/flashinfer_utils.py:88 swizzle",
        ],
    );
    let weight = stack(
        &mut trace,
        &["vllm/model_executor/layers/fused_moe/layer.py:431 process_weights_after_loading"],
    );
    let scale = stack(&mut trace, &["vllm/model_executor/layers/quantization/mxfp4.py:157 create_scales"]);
    trace.phase("load");
    let mut blocks = 0_u64;
    for step in Load::Moe.steps(0) {
        match step {
            Step::Alloc { bytes } => {
                let (in_layer, mib) = (blocks % 20, bytes >> 20);
                let stack = match in_layer {
                    0..=3 => raw,
                    _ if mib >= 900 => transient,
                    _ if mib < 10 => scale,
                    _ => weight,
                };
                trace.alloc(blocks, Block { bytes, stream: 0, pool: 0, stack }).unwrap();
                blocks += 1;
            }
            Step::Free { block } => trace.free(u64::try_from(block).unwrap()).unwrap(),
        }
    }
    let key = blocks;
    let activations = stack(&mut trace, &["vllm/v1/worker/gpu_model_runner.py:3120 _dummy_run"]);
    trace.phase("profile");
    for round in 0..12_u64 {
        for part in 0..6 {
            let block =
                Block { bytes: (40 + 90 * part + round) << 20, stream: 0, pool: 0, stack: activations };
            trace.alloc(key + part, block).unwrap();
        }
        (0..6).for_each(|part| trace.free(key + part).unwrap());
    }
    trace.empty_cache();
    let cache = stack(&mut trace, &["vllm/v1/worker/gpu_model_runner.py:3801 _allocate_kv_cache_tensors"]);
    trace.phase("cache");
    for layer in 0..24 {
        let block = Block { bytes: 384 << 20, stream: 0, pool: 0, stack: cache };
        trace.alloc(key + 10 + layer, block).unwrap();
    }
    let graph = stack(&mut trace, &["vllm/compilation/cuda_graph.py:147 __call__"]);
    trace.phase("capture");
    for size in 0..64 {
        let block =
            Block { bytes: (1 << 20) * (4 + size % 7) + 512 * size, stream: 1, pool: 1, stack: graph };
        trace.alloc(key + 100 + size, block).unwrap();
    }
    trace.phase("serve");
    for request in 0..120_u64 {
        let block = Block { bytes: (3 + request % 50) << 20, stream: 0, pool: 0, stack: activations };
        trace.alloc(key + 1000 + request, block).unwrap();
        if request > 3 {
            trace.free(key + 1000 + request - 4).unwrap();
        }
    }
    trace.note("Blocks used by a second stream count as free when they are freed.".to_owned());
    trace.note("Captures of graphs are replayed as a private pool.".to_owned());
    trace.finish(None)
}

/// A trace of so many steps, with many stacks and sizes.
pub(crate) fn long(steps: usize) -> Trace {
    let mut random = Numbers(7);
    let mut trace = TraceBuilder::new("a million steps");
    let stacks: Vec<u32> = (0..3000_u64)
        .map(|number| {
            let frames = (0..24).map(|depth| {
                let (file, line) = (number >> (depth / 3), 10 + number * (depth + 1) % 900);
                format!(
                    "/opt/venv/lib/python3.12/site-packages/engine/layers/part_{}.py:{line} forward_{depth}",
                    file % 40
                )
            });
            trace.stack(frames.collect())
        })
        .collect();
    let mut live: Vec<u64> = Vec::new();
    let mut key = 0;
    let phases = ["load", "profile", "capture", "serve"];
    while trace.len() < steps {
        if trace.len() * 4 % steps < 4 {
            trace.phase(phases[(trace.len() * 4 / steps).min(3)]);
        }
        let wanted = 4000 + 3000 * trace.len() / steps;
        if live.len() > wanted && random.below(100) < 52 || live.len() > wanted * 2 {
            let at = usize::try_from(random.below(u64::try_from(live.len()).unwrap())).unwrap();
            trace.free(live.swap_remove(at)).unwrap();
        } else {
            let bytes = match random.below(100) {
                0..70 => 512 * (1 + random.below(1000)),
                70..98 => (1 + random.below(24)) << 20,
                _ => (30 + random.below(200)) << 20,
            };
            let stack = stacks[usize::try_from(random.below(3000)).unwrap()];
            trace.alloc(key, Block { bytes, stream: 0, pool: 0, stack }).unwrap();
            live.push(key);
            key += 1;
        }
    }
    trace.finish(None)
}

/// A few blocks, with this text wherever a trace has one.
pub(crate) fn named(text: &str) -> Trace {
    let mut trace = TraceBuilder::new(text);
    trace.phase(text);
    let stack = trace.stack(vec![text.to_owned()]);
    for key in 0..9 {
        trace.alloc(key, Block { bytes: 3 << 20, stream: 0, pool: 0, stack }).unwrap();
    }
    trace.note(text.to_owned());
    trace.finish(None)
}

/// On a card of so many bytes.
pub(crate) fn runs(trace: &Trace, total_bytes: u64) -> Vec<Run> {
    let card = Card { total_bytes, taken_bytes: total_bytes / 40, budget_bytes: None };
    let run = |text: &str| replay(trace, &text.parse().unwrap(), card).unwrap();
    Setup::ALL.into_iter().map(run).collect()
}

/// The same each time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}
