"""Releases and resumes a real SGLang engine by tag: greedy tokens, GPU memory, seconds.

The model is made up: random weights, no tokenizer. `--saver tms` is SGLang's own memory saver.
Prints one JSON object a line.
"""

import argparse
import importlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "dense": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
ALL = ("kv_cache", "weights", "cuda_graph")
PROMPTS = [[1, 5, 9, 200 + n, 31, 7, 11, 13] for n in range(4)]
GIB = 1 << 30


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def checkpoint(shape: str, folder: Path) -> Path:
    """A folder that says what the model looks like."""
    config = {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[shape],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def used_bytes(gpus: int) -> list[int]:
    """In use on each GPU, by NVML: this process opens none."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return [int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(n)).used) for n in range(gpus)]


def tokens(engine: Any, count: int) -> list[list[int]]:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    answers = engine.generate(input_ids=PROMPTS, sampling_params=sampling)
    return [list(answer["output_ids"]) for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--saver", choices=["poorwill", "tms"], required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="dense")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--graphs",
        action="store_true",
        help="capture CUDA graphs, and release them, too",
    )
    parser.add_argument("--repeated", action="store_true", help="release and resume twice each")
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    os.environ["POORWILL_SLEEP_MODE"] = "1" if given.saver == "poorwill" else "0"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    if given.graphs:
        os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        run(given, checkpoint(given.shape, Path(folder)))


def run(given: argparse.Namespace, model: Path) -> None:
    idle = used_bytes(given.tp)
    started = time.monotonic()
    sglang: Any = importlib.import_module("sglang")
    engine = sglang.Engine(
        model_path=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_memory_saver=True,
        enable_weights_cpu_backup=True,
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_radix_cache=True,
        disable_cuda_graph=not given.graphs,
        disable_prefill_cuda_graph=True,
        cuda_graph_max_bs_decode=8 if given.graphs else None,
        max_total_tokens=32768,
        max_running_requests=16,
        tp_size=given.tp,
        disable_custom_all_reduce=given.tp > 1,
        random_seed=7,
        log_level="info",
    )
    say(
        what="started",
        saver=given.saver,
        shape=given.shape,
        seconds=time.monotonic() - started,
    )
    expected = tokens(engine, given.tokens)
    awake = used_bytes(given.tp)
    say(
        what="awake",
        used_gib=[(used - before) / GIB for used, before in zip(awake, idle, strict=True)],
    )
    tags = list(ALL if given.graphs else ALL[:2])
    for turn in range(given.turns):
        asked = tags if turn % 3 != 2 else [tags[turn // 3 % len(tags)]]
        before = time.monotonic()
        for _ in range(1 + given.repeated):
            engine.release_memory_occupation(tags=asked)
        asleep_at = time.monotonic()
        asleep = used_bytes(given.tp)
        woken = 0.0
        # Trainers bring the weights back first.
        for each in (
            [*[tag for tag in asked if tag != "kv_cache"]],
            [tag for tag in asked if tag == "kv_cache"],
        ):
            if each:
                at = time.monotonic()
                for _ in range(1 + given.repeated):
                    engine.resume_memory_occupation(tags=each)
                woken += time.monotonic() - at
        again = tokens(engine, given.tokens)
        say(
            what="turn",
            turn=turn,
            tags=asked,
            release_s=asleep_at - before,
            resume_s=woken,
            asleep_gib=[(used - of) / GIB for used, of in zip(asleep, idle, strict=True)],
            equal=again == expected,
        )
    say(
        what="sample",
        tokens=expected[0][:8],
        distinct=len({tuple(each) for each in expected}),
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
