"""vLLM's sleep mode and its offloaded weights with Poorwill, as a plugin: nothing has to be imported or
patched by hand.

vLLM finds `register` by its entry point and calls it in every process of an engine. Where vLLM has a
registry of sleep-mode backends (0.25 and later), `--enable-sleep-mode --sleep-mode-backend poorwill` chooses
it; before that, `--enable-sleep-mode` with `POORWILL_SLEEP_MODE=1` in the environment. Whoever chooses
neither has vLLM as it is.

How the parts fit: the engine's configuration gets our worker in the place of vLLM's (`_platform`), and the
worker an allocator in the place of `CuMemAllocator` (`worker`, `allocator`). What only the engine's core or
its frontend can do (refusing what cannot be done, taking a failed sleep back, saying that the weights are not
there yet, metrics) is hooked where those are defined (`_engine`, `_frontend`, `_metrics`). What is hooked was
held against what we need of it before (`_versions`).

With `POORWILL_OFFLOAD=1`, whether or not the engine sleeps, weights that vLLM offloads are in host memory of
Poorwill's (`_offload`, and the offloaders in `_offload_uva` and `_offload_prefetch`). With
`POORWILL_TRITON=1`, in the same way, kernels are tuned within the GPU's shared memory (`_triton`).
"""

from poorwill.vllm import _environment, _hooks

__all__ = ["register"]


def register() -> None:
    """What vLLM calls, at least once in every process: cheap, and the same as called once.

    Imports neither vLLM nor PyTorch: what is hooked is hooked when vLLM imports it.
    """
    for hook in _hooks.HOOKS:
        hook.wait()
    if _environment.may_want_offload():
        for hook in _hooks.OFFLOAD_HOOKS:
            hook.wait()
    if _environment.may_want_triton():
        for hook in _hooks.TRITON_HOOKS:
            hook.wait()
