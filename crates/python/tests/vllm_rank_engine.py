"""One engine over several GPUs, for `vllm_ranks_gpu_suite`: a process that starts it, and does what its input
says.

Each line of the input is a call as JSON, a name and arguments, and is answered with a line that begins with
`ANSWER`. The weights are made up, other ones on every rank, so that tokens depend on all of them. Tensor and
pipeline parallel ranks are one engine; data parallel ones are several behind one `AsyncLLM`. The ranks speak
by NCCL alone.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import vllm_rank_places as places

ANSWER = "answer "
KV_BYTES = 2 << 30
PROMPTS = [list(range(100, 164)), [7, 1999, 31, 4242, 77, 1234, 901, 15]]
NEW_TOKENS = 16
# Qwen3, 0.6 GiB.
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}


def settings(folder: Path, layout: dict[str, int]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(MODEL))
    has_backends = tuple(map(int, metadata.version("vllm").split(".")[:2])) >= (0, 25)
    return {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": KV_BYTES,
        "gpu_memory_utilization": 0.5,
        # The second time a prompt would take another way through the kernels, and tokens could differ.
        "enable_prefix_caching": False,
        "enable_sleep_mode": True,
        "enforce_eager": True,
        "distributed_executor_backend": "mp",
        "disable_custom_all_reduce": True,
        **({"sleep_mode_backend": "poorwill"} if has_backends else {}),
        **layout,
    }


def sampling() -> Any:
    made = import_module("vllm").SamplingParams
    return made(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)


class Together:
    """A `vllm.LLM`: one engine, whose ranks hold parts of one model."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        self.llm = import_module("vllm").LLM(**chosen)

    def rpc(self, method: Any, *arguments: Any) -> list[Any]:
        return list(self.llm.collective_rpc(method, args=arguments))

    def sleep(self, level: int) -> None:
        self.llm.sleep(level=level)

    def wake_up(self, tags: list[str] | None) -> None:
        self.llm.wake_up(tags=tags)

    def tokens(self) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = self.llm.generate(prompts, sampling(), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Apart:
    """An `AsyncLLM` over data parallel engines, each with a model of its own, called as if it were one."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._requests = 0

        async def made() -> Any:
            arguments = import_module("vllm.engine.arg_utils").AsyncEngineArgs(**chosen)
            return import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(arguments)

        # In the loop, where its tasks belong.
        self._llm = self._do(made())
        self._client = self._llm.engine_core

    def _do(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def rpc(self, method: Any, *arguments: Any) -> list[Any]:
        """What each rank of every engine returns; vLLM's own call has the first engine's answers alone."""

        async def answers() -> list[Any]:
            asked = ("collective_rpc", method, None, arguments, None)
            engines = self._client.core_engines
            calls = [self._client._call_utility_async(*asked, engine=engine) for engine in engines]
            answered = [answer for of_engine in await asyncio.gather(*calls) for answer in of_engine]
            if method == "poorwill_mark_restored":
                # The frontend looks again, and has all engines go on together.
                await self._llm.check_health()
            return answered

        return list(self._do(answers()))

    def sleep(self, level: int) -> None:
        self._do(self._llm.sleep(level))

    def wake_up(self, tags: list[str] | None) -> None:
        self._do(self._llm.wake_up(tags))

    def tokens(self) -> list[list[int]]:
        """The prompts' tokens of the first engine, then of the next."""

        async def of_one(engine: int, prompt: list[int]) -> list[int]:
            self._requests += 1
            asked = {"prompt_token_ids": prompt}, sampling(), f"test-{self._requests}"
            made: list[int] = []
            async for output in self._llm.generate(*asked, data_parallel_rank=engine):
                made = list(output.outputs[0].token_ids)
            return made

        async def of_all() -> list[list[int]]:
            engines = range(len(self._client.core_engines))
            return [await of_one(engine, prompt) for engine in engines for prompt in PROMPTS]

        answered: list[list[int]] = self._do(of_all())
        return answered


class Ranks:
    """The calls. An engine that is awake has the bytes and tokens of its start."""

    def __init__(self, llm: Together | Apart) -> None:
        self.llm = llm
        self.about = llm.rpc(places.begin)
        llm.rpc(places.fill)
        self.prints, self.reference = llm.rpc(places.digests), llm.tokens()

    def sleep(self, level: int = 1) -> None:
        self.llm.sleep(level)

    def wake(self, tags: list[str] | None = None) -> None:
        self.llm.wake_up(tags)

    def used(self) -> list[int]:
        return self.llm.rpc(places.used_bytes)

    def status(self, name: str) -> list[Any]:
        return [one[name] for one in self.llm.rpc("poorwill_status")]

    def tokens(self) -> list[list[int]]:
        return self.llm.tokens()

    def different(self) -> list[str]:
        """The tensors that are not as they were, by rank, and `tokens`."""
        pairs = zip(self.prints, self.llm.rpc(places.digests), strict=True)
        wrong = [
            f"{rank}: {name}"
            for rank, (before, now) in enumerate(pairs)
            for name in before
            if before[name] != now.get(name)
        ]
        return wrong + ["tokens"] * (self.llm.tokens() != self.reference)

    def restore(self) -> list[Any]:
        """Writes the weights that a level 2 sleep has dropped; the tags that were waited for."""
        self.llm.rpc(places.write_back)
        return self.llm.rpc("poorwill_mark_restored")

    def break_down(self, rank: int, op: str, place: str) -> None:
        self.llm.rpc(places.break_down, rank, op, place)

    def mend(self) -> None:
        self.llm.rpc(places.mend)

    def hold_back(self, ranks: list[int], when: str, folder: str) -> None:
        self.llm.rpc(places.hold_back, ranks, when, folder)


def answer(value: object) -> None:
    print(f"{ANSWER}{json.dumps(value)}", flush=True)


def end_with(parent: int) -> None:
    """Ends this process's group once its parent has ended, which may have been killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    layout: dict[str, int] = json.loads(sys.argv[1])
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        chosen = settings(Path(folder), layout)
        ranks = Ranks(Apart(chosen) if "data_parallel_size" in layout else Together(chosen))
    answer(ranks.about)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer({"value": getattr(ranks, name)(**arguments)})
        except Exception as error:
            traceback.print_exc()
            kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
            answer({"error": str(error), "kinds": kinds})
    with contextlib.suppress(ProcessLookupError):
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
