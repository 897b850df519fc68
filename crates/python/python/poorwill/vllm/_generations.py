"""Differences between vLLM versions that concern an engine that sleeps: one adapter for each generation.

An adapter stands for its version and those up to the next one here; a subclass inherits what it does not
override. `Extended` is that of a vLLM with extension points of `contrib/upstream/vllm`, whichever it has.
Only this module depends on the version. The contract (`_versions`) checks that a vLLM is what its
version says, and the tests check the adapters against each version's sources.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from poorwill._contract import Version
from poorwill.vllm import _versions

Maker = tuple[Any, str]
"""An object, and the name of one of its functions."""

_CUMEM = "vllm.device_allocator.cumem"
# The second model runner, which vLLM uses for more and more models from 0.22 on.
_SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"


class Vllm0_20:
    """The first: no named backends, no start of an update, two pools."""

    since: ClassVar[Version] = (0, 20, 0)

    touching: ClassVar[frozenset[str]] = frozenset(
        {"add_lora", "save_sharded_state", "save_tensorized_model"}
    )
    """Methods of the worker that access what may sleep, besides those that write weights."""
    saved: ClassVar[frozenset[str]] = frozenset({"_sleep_saved_buffers"})
    """Attributes that the worker keeps between a sleep at level 2 and the wake."""
    restores_at_any_wake: ClassVar[bool] = True
    """Whether a wake without `weights` restores the saved buffers into them."""
    resets_scales: ClassVar[bool] = True
    """Whether a wake makes the first model runner set the scales of an FP8 cache to 1."""
    bounds_profile_by_requests: ClassVar[bool] = False
    """Whether graphs are profiled with no more blocks than requests."""
    has_state_pool: ClassVar[bool] = False
    """Whether state beside the KV cache has a pool of its own."""
    has_adapter_pool: ClassVar[bool] = False
    """Whether LoRA adapters have one."""
    pauses_together: ClassVar[bool] = False
    """Whether data parallel engines agree on a pause before any of them sleeps."""
    releases_cache: ClassVar[bool] = False
    """Whether `release_kv_cache_memory` can release the cache alone."""

    # The worker

    def replaced(self) -> list[Any]:
        """The modules in which our allocator takes the place of vLLM's."""
        return [importlib.import_module(_CUMEM)]

    def allocator_class(self) -> Any:
        """The class that vLLM has for its allocator; None if it is not imported and need not be."""
        [cumem] = self.replaced()
        return cumem.CuMemAllocator

    def suspend(self, worker: Any, level: int) -> None:
        """Puts memory to sleep as the worker would, without its other steps."""
        worker.allocator.suspend(level)

    def resumes_communicators(self, worker: Any) -> bool:
        """Whether a wake resumes NCCL's communicators that a sleep suspended."""
        return False

    def is_updating(self, worker: Any) -> bool:
        """Whether an update of the weights is in progress."""
        return False

    def drafter(self, runner: Any) -> Any:
        """The drafter of a runner; None if there is none."""
        return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)

    def cache_makers(self, runner: Any) -> list[Maker]:
        """Functions that allocate only the KV cache, where state beside it is in the cache's pool."""
        # The second where a connector wants all layers' caches in one tensor.
        names = ("_allocate_kv_cache_tensors", "allocate_uniform_kv_caches")
        if hasattr(runner, names[0]):
            return [(runner, name) for name in names]
        return [(importlib.import_module(_SECOND_RUNNER), "init_kv_cache")]

    def layers_of(self, tensor: Any) -> Sequence[str]:
        """The layers that have a part of the KV cache, as its configuration describes it."""
        names: Sequence[str] = tensor.shared_by
        return names

    def block_dimension(self, layer: Any) -> int:
        """Which dimension of a layer's view counts blocks: that of an unlikely number in a shape."""
        return int(layer.get_attn_backend().get_kv_cache_block_dim(16, 1, 256))

    def block_step(self, tensor: Any) -> int | None:
        """Bytes from block to block, in the versions where other layers may lie in between."""
        return None

    # The engine's core

    def tell_asleep(self, executor: Any, tags: frozenset[str]) -> None:
        """Sets the tags that the executor believes to be asleep."""
        executor.sleeping_tags = set(tags)
        executor.is_sleeping = bool(tags)

    def is_known(self, scheduler: Any, request: Any) -> bool:
        """Whether a request continues an earlier one."""
        return False

    def is_aborted(self, request: Any) -> bool:
        """Whether a request is to be aborted at once."""
        return False

    def answer_refused(self, module: Any, core: Any, request: Any, sentence: str) -> bool:
        """Answers a refused request in the core's process. Returns whether vLLM has to finish it."""
        if request.pooling_params is None:
            core._send_error_outputs_to_client([request.request_id], request.client_index)
            return False
        # Without an output it would end all requests of that frontend, which takes an empty one for this.
        nothing = importlib.import_module("torch").empty(0)
        reason = module.FinishReason.ERROR
        output = module.EngineCoreOutput(request.request_id, [], pooling_output=nothing, finish_reason=reason)
        outputs = module.EngineCoreOutputs(finished_requests=[request.request_id], outputs=[output])
        core.output_queue.put_nowait((request.client_index, outputs))
        return False


class Vllm0_21(Vllm0_20):
    """An update of the weights has a start and an end."""

    since = (0, 21, 0)
    pauses_together = True
    touching = Vllm0_20.touching | {"start_weight_update"}

    def is_updating(self, worker: Any) -> bool:
        return bool(worker._weight_update_active)

    def is_aborted(self, request: Any) -> bool:
        return bool(request.abort_immediately)


class Vllm0_25(Vllm0_21):
    """Sleep-mode backends have names."""

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
    """Saved buffers are restored with the weights."""

    since = (0, 27, 0)
    saved = Vllm0_25.saved | {"_sleep_saved_draft_buffers"}
    restores_at_any_wake = False


class Vllm0_29(Vllm0_27):
    """The cache's pool holds only the cache."""

    since = (0, 29, 0)
    resets_scales = False

    def layers_of(self, tensor: Any) -> Sequence[str]:
        names: Sequence[str] = tensor.layers
        return names

    def block_dimension(self, layer: Any) -> int:
        # Of all layouts, blocks come first in a layer's view.
        return 0

    def block_step(self, tensor: Any) -> int | None:
        return int(tensor.block_stride)

    def cache_makers(self, runner: Any) -> list[Maker]:
        return []


class Vllm0_30(Vllm0_29):
    """The backend is an attribute of the worker, and NCCL's communicators may sleep."""

    since = (0, 30, 0)

    def suspend(self, worker: Any, level: int) -> None:
        worker.sleep_mode_backend.suspend(level)

    def resumes_communicators(self, worker: Any) -> bool:
        return bool(worker.vllm_config.model_config.enable_nccl_comm_suspend)


class Vllm0_31(Vllm0_30):
    """Tags alone define what sleeps, and the cache can be released alone."""

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
    """Adapters have a pool, too, and a refused request gets the reason."""

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


class Extended(Vllm0_33):
    """0.33 with extension points that ours is named at, as far as it has them (`_versions.EXTENSIONS`)."""

    def __init__(self, extensions: Iterable[str]) -> None:
        self.extensions = frozenset(extensions)

    def replaced(self) -> list[Any]:
        # It asks the backend's class.
        return [] if _versions.ALLOCATOR in self.extensions else super().replaced()

    def allocator_class(self) -> Any:
        if self.replaced():
            return super().allocator_class()
        # Others may have it by name.
        return getattr(sys.modules.get(_CUMEM), "CuMemAllocator", None)


Generation = Vllm0_20

OFFERED = frozenset({_versions.ALLOCATOR, _versions.OFFLOADERS, _versions.DESCRIPTIONS})
"""The extension points that an adapter is for."""

ALL: Sequence[type[Generation]] = (
    *(Vllm0_20, Vllm0_21, Vllm0_25, Vllm0_26, Vllm0_27, Vllm0_29, Vllm0_30, Vllm0_31, Vllm0_32, Vllm0_33),
)
"""Sorted by version."""


@functools.cache
def of(version: str) -> Generation:
    """The adapter for this version. Raises UnsupportedVllmError for one that is not known."""
    release = _versions.known(version)
    return max((each for each in ALL if each.since <= release), key=lambda each: each.since)()


def chosen() -> Generation:
    """The adapter for the vLLM of this process."""
    adapter = of(_versions.running())
    if isinstance(adapter, Vllm0_33):
        # What says so has to be imported.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("vllm.device_allocator.sleep_mode_backend")
        if found := _versions.extensions(_versions.imported) & OFFERED:
            return Extended(found)
    return adapter
