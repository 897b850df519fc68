"""A vLLM plugin: sleep mode and offloaded weights with Poorwill, without imports or patches by hand.

vLLM finds `register` by its entry point and calls it in every process of an engine. vLLM 0.25 and later has
a registry of sleep-mode backends: `--enable-sleep-mode --sleep-mode-backend poorwill`. Earlier ones take
`--enable-sleep-mode` with `POORWILL_SLEEP_MODE=1` in the environment. Without either, vLLM is unchanged.

How the parts fit:

- `_platform` puts our worker into the engine's configuration, and `worker` replaces `CuMemAllocator` by
  `allocator`.
- `_engine`, `_frontend` and `_metrics` hook the engine's core and frontend. They refuse what cannot work,
  undo a failed sleep, report missing weights, and export metrics.
- `_keep` chooses what a sleep keeps of the KV cache, and `_blocks` finds it in a rank's memory. `_routes`
  takes what the caller of `/sleep` wants of it.
- `_hibernation` adds the routes that take an engine off its GPUs; `_processes` asks
  whether it is, by `_driver`.
- `_versions` first checks that this vLLM has what the hooks need.

With `POORWILL_OFFLOAD=1`, weights that vLLM offloads are in Poorwill's host memory (`_offload`,
`_offload_uva`, `_offload_prefetch`). With `POORWILL_TRITON=1`, kernels are tuned within the GPU's shared
memory (`_triton`). With `POORWILL_RECORD`, each rank records its start (`_recording`). All of them work with
and without sleep mode.
"""

from poorwill.vllm import _hooks

__all__ = ["register"]


def register() -> None:
    """Installs the hooks. vLLM calls it at least once in every process; repeating it does nothing.

    Imports neither vLLM nor PyTorch nor the rest of us: a hook acts when vLLM imports its module.
    """
    for hook in _hooks.ALL:
        if hook.is_wanted():
            hook.wait()
