"""vLLM in this process: starting it, watching it load, its tokens, and the bytes of its weights."""

import contextlib
import itertools
import threading
import time
from pathlib import Path

import torch
from common import GIB, difference, emit, gib, host_memory, in_gib, installed, sleep_mode

PROMPTS = [list(range(100, 164)), [7, 1999, 31, 4242, 77, 1234, 901, 15]]
NEW_TOKENS = 16
FINGERPRINT_WORDS = 1 << 20
BATCH, BATCH_TOKENS = 16, 256
CAPTURED = [1, 2, 4, 8, 16]


class WrongAllocatorError(Exception):
    """What is in the place of vLLM's allocator is not what was to be measured."""


def used_memory() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


class Sampler(threading.Thread):
    """Reads the device's used memory every few milliseconds."""

    def __init__(self, interval_s: float = 0.02):
        super().__init__(daemon=True)
        self.interval_s = interval_s
        self.samples: list[tuple[float, int]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            self.samples.append((time.perf_counter(), used_memory()))
            self.ended.wait(self.interval_s)

    def stop(self) -> None:
        self.ended.set()
        self.join()

    def peak(self, begin: float, end: float) -> int:
        return max((used for at, used in self.samples if begin <= at <= end), default=0)


def allocator():
    """What is in the place of vLLM's allocator; None where none was needed."""
    from vllm.device_allocator import cumem

    return cumem.CuMemAllocator.instance


def check_allocator(mode: str) -> dict[str, str]:
    """The classes in place, which have to be those of the mode: no run without the plugin passes for one with
    it."""
    found = allocator()
    kind = type(found)
    name = f"{kind.__module__}.{kind.__qualname__}"
    ours = name.split(".")[0] == "poorwill"
    as_meant = {"none": found is None, "poorwill": ours, "cumem": found is not None and not ours}
    if not as_meant[mode]:
        raise WrongAllocatorError(
            f"mode {mode}, but the allocator is a {kind.__module__}.{kind.__qualname__}"
        )
    return {"allocator": f"{kind.__module__}.{kind.__qualname__}"}


def mapped() -> dict[str, int]:
    """What the allocator maps, in bytes, by its own account: now, at the peak, and for live tensors."""
    found = allocator()
    if found is None:
        return {}
    if hasattr(found, "arena"):
        stats = found.arena.stats()
        return {
            "mapped_bytes": stats.mapped_bytes,
            "peak_mapped_bytes": stats.peak_mapped_bytes,
            "live_bytes": stats.live_bytes,
            "peak_live_bytes": stats.peak_live_bytes,
        }
    import counting_allocator

    figures = counting_allocator.fill(found, "weights")
    figures["mapped_bytes"] = getattr(found, "mapped_bytes", figures["mapped_bytes"])
    if hasattr(found, "peak_mapped_bytes"):
        figures["peak_mapped_bytes"] = found.peak_mapped_bytes
    return figures


def watch_load(marks: dict, max_split_mib: int) -> None:
    """Notes, once vLLM loads, when that was and what it took; with a split limit meanwhile, if there is to be
    one. Has to come before vLLM starts."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def load_model(self, *positional, **named):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        marks.update(begin=time.perf_counter(), used_before=used_memory())
        if max_split_mib:
            torch._C._accelerator_setAllocatorSettings(f"max_split_size_mb:{max_split_mib}")
        try:
            return self.worker.load_model(*positional, **named)
        finally:
            if max_split_mib:
                torch._C._accelerator_setAllocatorSettings("")
            marks["end"] = time.perf_counter()
            # A load that failed shall say why it failed, and not that there is nothing to be read.
            with contextlib.suppress(Exception):
                torch.cuda.synchronize()
                marks.update(end=time.perf_counter(), used_after=used_memory())
                marks.update(torch_peak=torch.cuda.max_memory_reserved(), mapped=mapped())

    # The wrapper around every worker, poorwill's too, so that what a worker does behind its loading counts.
    WorkerWrapperBase.load_model = load_model


def settings(
    path: Path,
    *,
    mode: str,
    load_format: str = "dummy",
    kv_gib: float = 0,
    utilization: float = 0.9,
    graphs: str = "",
    quantization: str = "",
    moe_backend: str = "",
    attention: str = "",
    offload_graphs: bool = False,
) -> dict:
    """What vllm.LLM is given."""
    chosen = {
        "model": str(path),
        "skip_tokenizer_init": True,
        "load_format": load_format,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": 2048,
        "max_num_seqs": BATCH,
        "max_num_batched_tokens": 2048,
        "generation_config": "vllm",
        "disable_log_stats": True,
        # The second time a prompt would take another way through the kernels, and tokens could differ.
        "enable_prefix_caching": False,
        "enable_sleep_mode": mode != "none",
        "enforce_eager": not graphs,
        "gpu_memory_utilization": utilization,
        **sleep_mode(mode, installed()),
    }
    if kv_gib:
        chosen["kv_cache_memory_bytes"] = int(kv_gib * GIB)
    if attention:
        chosen["attention_config"] = {"backend": attention}
    if quantization:
        chosen["quantization"] = quantization
    if moe_backend:
        chosen["kernel_config"] = {"moe_backend": moe_backend}
    if graphs:
        chosen["compilation_config"] = {"cudagraph_capture_sizes": CAPTURED}
    if offload_graphs:
        chosen["sleep_mode_offload_cudagraph"] = True
    if graphs == "nocompile":
        chosen["compilation_config"] |= {"mode": 0, "cudagraph_mode": "FULL"}
    return chosen


def generated(llm, prompts: list[list[int]] = PROMPTS, tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Greedy tokens; of two prompts if none are given."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def model_of(worker):
    """A worker's model, without what is around it where graphs are captured."""
    model = worker.model_runner.model
    return model.unwrap() if hasattr(model, "unwrap") else model


class Engine:
    """A `vllm.LLM`, and what of it is in this process."""

    def __init__(self, mode: str, chosen: dict):
        from vllm import LLM

        self.mode = mode
        self.events: list[dict] = []
        self.llm = LLM(**chosen)
        wrapper = self.llm.llm_engine.model_executor.driver_worker
        self.worker = getattr(wrapper, "worker", wrapper)
        if mode == "poorwill":
            self._listen()

    def _listen(self) -> None:
        """Keeps what each operation reports, whichever caller asks first."""
        ask = self.worker.poorwill_status

        def poorwill_status():
            status = ask()
            self.events += status["events"]
            return status

        self.worker.poorwill_status = poorwill_status

    @property
    def model(self):
        return model_of(self.worker)

    @property
    def kv_blocks(self) -> int:
        return self.worker.cache_config.num_gpu_blocks

    def status(self) -> dict:
        """What poorwill's worker says of itself; what happened is kept in `events`."""
        return self.llm.collective_rpc("poorwill_status")[0] if self.mode == "poorwill" else {}

    def reported(self) -> list[dict] | dict[str, float]:
        """What is known of the operations since this was asked last."""
        if self.mode == "poorwill":
            self.status()
            events, self.events = self.events, []
            return events
        import counting_allocator

        return counting_allocator.phases()

    def prepare(self) -> float:
        """Has the backups made, and waits for them; the seconds that took."""
        start = time.perf_counter()
        self.llm.collective_rpc("poorwill_prepare", kwargs={"wait": True})
        return time.perf_counter() - start

    def tokens(self) -> list[list[int]]:
        """The greedy tokens of two prompts."""
        return generated(self.llm)

    def throughput(self, rounds: int = 3) -> list[float]:
        """Tokens a second of a fixed batch, in each round; one more goes before them and does not count."""
        prompts = [[(7 * row + 13 * place) % 30000 + 10 for place in range(64)] for row in range(BATCH)]
        rates = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            made = sum(map(len, generated(self.llm, prompts, BATCH_TOKENS)))
            rates.append(round(made / (time.perf_counter() - start), 1))
        return rates[1:]


def timed(action, *positional, **named) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    action(*positional, **named)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def storages(model) -> dict[int, tuple[str, object]]:
    """Every storage of a model on the GPU by its address, under the first name that has it."""
    found: dict[int, tuple[str, object]] = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_cuda:
            storage = tensor.untyped_storage()
            found.setdefault(storage.data_ptr(), (name, storage))
    return found


def weight_bytes(model) -> int:
    return sum(storage.nbytes() for _, storage in storages(model).values())


def fill_weights(model, seed: int = 1234, normal: bool = False) -> tuple[int, int]:
    """Overwrites the weights that are plain numbers, so that tokens depend on every layer. They are uniform,
    or normally distributed with the same deviation, as those of trained models nearly are. Returns how many
    were, and how many were not: what is quantised stays as it is."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    filled = left = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dtype not in (torch.bfloat16, torch.float16):
                left += 1
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                bound = 1.0 if "embed" in name else (3.0 / parameter.shape[-1]) ** 0.5
                if normal:
                    parameter.normal_(0, bound / 3.0**0.5, generator=generator)
                else:
                    parameter.uniform_(-bound, bound, generator=generator)
            filled += 1
    torch.cuda.synchronize()
    return filled, left


def fingerprint(model) -> dict[str, torch.Tensor]:
    """For every storage the sums of its bytes in pieces of 4 MiB, on the host."""
    sums = {}
    for name, storage in storages(model).values():
        raw = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        even = raw.numel() // 4 * 4
        words = raw[:even].view(torch.int32)
        whole = words.numel() // FINGERPRINT_WORDS * FINGERPRINT_WORDS
        parts = [
            words[:whole].view(-1, FINGERPRINT_WORDS).sum(dim=1, dtype=torch.int64),
            words[whole:].sum(dtype=torch.int64).reshape(1),
            raw[even:].sum(dtype=torch.int64).reshape(1),
        ]
        sums[name] = torch.cat(parts).cpu()
    torch.cuda.empty_cache()  # else it would count as memory that a sleep gives back
    return sums


def same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def start(mode: str, chosen: dict, max_split_mib: int = 0) -> Engine:
    """Starts vLLM with everything measured; emits an `import` and a `start` line."""
    torch.cuda.init()
    begin = time.perf_counter()
    import vllm

    emit(
        "import",
        vllm=vllm.__version__,
        torch=torch.__version__,
        device=torch.cuda.get_device_name(),
        import_s=round(time.perf_counter() - begin, 2),
        used_gib=gib(used_memory()),
    )
    marks: dict = {}
    watch_load(marks, max_split_mib)
    host = host_memory()
    sampler = Sampler()
    sampler.start()
    begin = time.perf_counter()
    try:
        engine = Engine(mode, chosen)
        ready = time.perf_counter()
    finally:
        sampler.stop()
        if "end" in marks:
            emit("load", **load_figures(marks, sampler))
    classes = check_allocator(mode)
    emit(
        "start",
        start_s=round(ready - begin, 2),
        parameters_gib=gib(weight_bytes(engine.model)),
        peak_used_gib=gib(sampler.peak(begin, ready)),
        used_gib=gib(used_memory()),
        kv_blocks=engine.kv_blocks,
        utilization=chosen["gpu_memory_utilization"],
        host_added=difference(host_memory(), host),
        worker=f"{type(engine.worker).__module__}.{type(engine.worker).__qualname__}",
        **classes,
        **in_gib(mapped()),
    )
    return engine


def load_figures(marks: dict, sampler: Sampler) -> dict:
    """What is said of a load, which may have failed: seconds, and what was mapped by the allocator's account
    and by the device's."""
    return {
        "load_s": round(marks["end"] - marks["begin"], 3),
        "peak_used_gib": gib(sampler.peak(marks["begin"], marks["end"]) - marks["used_before"]),
        "kept_used_gib": gib(marks.get("used_after", marks["used_before"]) - marks["used_before"]),
        "torch_peak_reserved_gib": gib(marks.get("torch_peak")),
        **in_gib(marks.get("mapped", {})),
    }
