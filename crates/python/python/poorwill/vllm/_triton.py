"""vLLM's gated delta rule kernels, tuned within the shared memory of their GPU.

vLLM tunes them over a list of configurations, of which some exceed many GPUs' shared memory. Those are
compiled, fail to launch, and are skipped. With `POORWILL_TRITON=1` our pruner (`poorwill.triton`) runs in
each kernel's autotuner, after vLLM's own pruner if there is one. It drops what would not fit before it is
compiled; if nothing fits, the smallest stays. No file of vLLM's is changed.
"""

import importlib
import logging
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from poorwill import triton as pruning
from poorwill.vllm import _environment, _versions
from poorwill.vllm._platform import ConfigurationError

# Below vLLM's logger, for its handlers.
_log = logging.getLogger("vllm.poorwill.triton")


@dataclass(frozen=True)
class Output:
    """Estimates `chunk_fwd_kernel_o` for every Triton that vLLM pins.

    Where one tile holds all keys there is no loop, and Triton 3.7 and 3.8 take more than 3.6, the source of
    the estimate. The difference is less than the tiles of all three operands.
    """

    looped: pruning.Estimator

    def estimate_bytes(self, launch: pruning.Launch) -> int:
        taken_bytes = self.looped.estimate_bytes(launch)
        given = launch.parameters
        if given["K"] > given["BK"]:
            return taken_bytes
        elements = given["BK"] * (2 * given["BT"] + given["BV"])
        return max(taken_bytes, operator.index(elements * given["q"].element_size()))


# vLLM always stores the state's tiles with values as rows.
ESTIMATES: dict[str, pruning.Estimator] = {
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": pruning.chunk_gated_delta_rule_fwd_h(
        state_v_first=True
    ),
    "chunk_fwd_kernel_o": Output(pruning.chunk_fwd_o(state_v_first=True)),
}
"""Estimators of the pruned kernels, by name."""

Prune = Callable[..., list[Any]]


def is_compiling() -> bool:
    """Whether this process has Triton. Without it vLLM's kernels cannot be launched."""
    return bool(getattr(sys.modules.get("vllm.triton_utils"), "HAS_TRITON", True))


def install(module: ModuleType) -> None:
    """Adds a pruner to the autotuner of each kernel of the module that has an estimate.

    Raises ValueError for unreadable settings, and ConfigurationError without an NVIDIA GPU.
    """
    if not _environment.wants_triton():
        return
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cuda():
        raise ConfigurationError(
            f"{_environment.TRITON}=1 is for kernels on NVIDIA's GPUs, and this vLLM runs on "
            f"{platform.device_name}: unset it"
        )
    budget_bytes = _environment.triton_shared_memory_bytes()
    for kernel, estimate in ESTIMATES.items():
        tuner = _versions.tuner_of(getattr(module, kernel, None))
        if tuner is None or isinstance(tuner.early_config_prune, Fitting):
            continue
        pruner = pruning.shared_memory_pruner(estimate, budget_bytes=budget_bytes)
        tuner.early_config_prune = Fitting(kernel, pruner, tuner.early_config_prune)


@dataclass
class Fitting:
    """The pruner of a kernel's autotuner: keeps what fits of what the kernel's own keeps."""

    kernel: str
    pruner: pruning.Pruner
    stock: Prune | None
    _logged: set[tuple[int, int]] = field(default_factory=set, repr=False)

    def __call__(self, configs: Sequence[Any], named_args: Any, /, **options: Any) -> list[Any]:
        given = list(configs) if self.stock is None else self.stock(configs, named_args, **options)
        kept = self.pruner(given, named_args, **options)
        if len(kept) < len(given) and (len(kept), len(given)) not in self._logged:
            self._logged.add((len(kept), len(given)))
            _log.info("%s is tuned among %d of %d configurations", self.kernel, len(kept), len(given))
        return kept
