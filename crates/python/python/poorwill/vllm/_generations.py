"""What vLLM does differently from one version to the next, as far as it concerns an engine that sleeps: one
adapter for each generation, and the right one is chosen by the version.

Each stands for its version and those up to the next one here. It has what they have and does what it takes
there; what a class leaves out is as in the one above. Nobody else asks what this vLLM has: whether it is what
its version says, the contract has looked (`_versions`), and the tests hold what is said here against the
sources of each.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

from poorwill.vllm import _versions
from poorwill.vllm._versions import Version

Maker = tuple[Any, str]
"""An object, and the name of a function of it."""

# The second model runner, which vLLM takes for more and more models from 0.22 on.
_SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"


class Vllm0_20:
    """Of everything what came first: no names for backends, no beginning of an update, two pools."""

    since: ClassVar[Version] = (0, 20, 0)

    touching: ClassVar[frozenset[str]] = frozenset(
        {"add_lora", "save_sharded_state", "save_tensorized_model"}
    )
    """Methods of the worker, beside those that write weights, that read or write what may sleep."""
    saved: ClassVar[frozenset[str]] = frozenset({"_sleep_saved_buffers"})
    """What the worker remembers between a sleep at level 2 and the wake, by name."""
    restores_at_any_wake: ClassVar[bool] = True
    """Whether a wake without `weights` writes into them what was saved."""
    resets_scales: ClassVar[bool] = True
    """Whether a wake has the first model runner set scales of an FP8 cache to 1."""
    bounds_profile_by_requests: ClassVar[bool] = False
    """Whether graphs are profiled with no more blocks than there are requests."""
    has_state_pool: ClassVar[bool] = False
    """Whether what is made around the KV cache has a pool of its own."""
    has_adapter_pool: ClassVar[bool] = False
    """Whether LoRA's adapters have one."""
    releases_cache: ClassVar[bool] = False
    """Whether the cache alone can be given back, by `release_kv_cache_memory`."""

    # The worker

    def suspend(self, worker: Any, level: int) -> None:
        """Puts memory to sleep as the worker would, without what it does around that."""
        worker.allocator.suspend(level)

    def resumes_communicators(self, worker: Any) -> bool:
        """Whether a wake lets NCCL's communicators resume, that a sleep has suspended."""
        return False

    def is_updating(self, worker: Any) -> bool:
        """Whether an update of the weights has begun and not ended."""
        return False

    def drafter(self, runner: Any) -> Any:
        """What drafts tokens, by the name that the runner has for it; None if nothing does."""
        return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)

    def cache_makers(self, runner: Any) -> list[Maker]:
        """What allocates the KV cache and nothing else, where what is made around it is in the cache's pool,
        too.
        """
        # The second of these where a connector wants the caches of all layers in one tensor.
        names = ("_allocate_kv_cache_tensors", "allocate_uniform_kv_caches")
        if hasattr(runner, names[0]):
            return [(runner, name) for name in names]
        return [(importlib.import_module(_SECOND_RUNNER), "init_kv_cache")]

    # The engine's core

    def tell_asleep(self, executor: Any, tags: frozenset[str]) -> None:
        """Makes these what the executor holds for asleep."""
        executor.sleeping_tags = set(tags)
        executor.is_sleeping = bool(tags)

    def is_known(self, scheduler: Any, request: Any) -> bool:
        """Whether a request adds to one that was there before."""
        return False

    def is_aborted(self, request: Any) -> bool:
        """Whether a request comes to be ended at once."""
        return False

    def answer_refused(self, module: Any, core: Any, request: Any, sentence: str) -> bool:
        """Answers a request that is refused, in the process of the core. Whether more is to be done with it
        then.
        """
        core._send_error_outputs_to_client([request.request_id], request.client_index)
        return False


class Vllm0_21(Vllm0_20):
    """An update of the weights has a beginning and an end."""

    since = (0, 21, 0)
    touching = Vllm0_20.touching | {"start_weight_update"}

    def is_updating(self, worker: Any) -> bool:
        return bool(worker._weight_update_active)

    def is_aborted(self, request: Any) -> bool:
        return bool(request.abort_immediately)


class Vllm0_25(Vllm0_21):
    """Backends of sleep mode have names."""

    since = (0, 25, 0)

    def suspend(self, worker: Any, level: int) -> None:
        worker._get_sleep_mode_backend().suspend(level)


class Vllm0_26(Vllm0_25):
    """Drafters are updated on their own."""

    since = (0, 26, 0)
    touching = Vllm0_25.touching | {"start_draft_weight_update"}
    saved = Vllm0_25.saved | {"_sleep_rebuild_draft_metadata_buffers"}
    bounds_profile_by_requests = True


class Vllm0_27(Vllm0_26):
    """What was saved is restored with the weights."""

    since = (0, 27, 0)
    saved = Vllm0_25.saved | {"_sleep_saved_draft_buffers"}
    restores_at_any_wake = False


class Vllm0_29(Vllm0_27):
    """The cache's pool has the cache and nothing else."""

    since = (0, 29, 0)
    resets_scales = False

    def cache_makers(self, runner: Any) -> list[Maker]:
        return []


class Vllm0_30(Vllm0_29):
    """The backend is a property of the worker, and NCCL's communicators may sleep."""

    since = (0, 30, 0)

    def suspend(self, worker: Any, level: int) -> None:
        worker.sleep_mode_backend.suspend(level)

    def resumes_communicators(self, worker: Any) -> bool:
        return bool(worker.vllm_config.model_config.enable_nccl_comm_suspend)


class Vllm0_31(Vllm0_30):
    """Tags alone say what sleeps, and the cache can be given back alone."""

    since = (0, 31, 0)
    saved = Vllm0_30.saved | {"_sleep_saved_parameters"}
    releases_cache = True

    def tell_asleep(self, executor: Any, tags: frozenset[str]) -> None:
        executor.sleeping_tags = set(tags)


class Vllm0_32(Vllm0_31):
    """State, scratch memory and graphs have pools."""

    since = (0, 32, 0)
    touching = Vllm0_31.touching | {"compute_weight_checksums", "reset_weights"}
    has_state_pool = True


class Vllm0_33(Vllm0_32):
    """Adapters have one, too, and a refused request is told why."""

    since = (0, 33, 0)
    has_adapter_pool = True

    def is_known(self, scheduler: Any, request: Any) -> bool:
        return bool(scheduler.has_request(request.request_id))

    def answer_refused(self, module: Any, core: Any, request: Any, sentence: str) -> bool:
        error = module.RequestError(code="poorwill_not_ready", message=sentence, retryable=True)
        ids, reason = [request.request_id], module.FinishReason.ERROR
        core._send_finish_outputs_to_client(ids, request.client_index, reason, error)
        # So that a connector frees what another engine holds for it.
        return bool(request.kv_transfer_params)


Generation = Vllm0_20

ALL: Sequence[type[Generation]] = (
    *(Vllm0_20, Vllm0_21, Vllm0_25, Vllm0_26, Vllm0_27, Vllm0_29, Vllm0_30, Vllm0_31, Vllm0_32, Vllm0_33),
)
"""In the order of their versions."""


@functools.cache
def of(version: str) -> Generation:
    """The adapter for this version. Raises UnsupportedVllmError for one that is not known."""
    release = _versions.known(version)
    return max((each for each in ALL if each.since <= release), key=lambda each: each.since)()


def chosen() -> Generation:
    """The adapter for the vLLM of this process."""
    return of(_versions.running())
