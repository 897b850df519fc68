"""Differences between SGLang's versions that concern a release and a resume: one adapter for each generation.

SGLang changes these in each release, so an adapter stands for its release alone; a subclass inherits what it
does not override. Only this module depends on the version. The contract (`_versions`) checks that an SGLang
is what its version says, and the tests check the adapters against each version's sources.
"""

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from poorwill._contract import Version
from poorwill.sglang._answers import REQUESTS

CONTEXT = "sglang.srt.runtime_context"
"""SGLang's module with what a process knows of its ranks, from 0.5.15 on."""


class Pipeline(NamedTuple):
    """How many stages a pipeline has, and which of them this is."""

    stages: int
    stage: int


class Sglang0_5_12:
    """The scheduler itself releases and resumes, and pickles its answers."""

    release: ClassVar[Version] = (0, 5, 12)

    manager: ClassVar[str] = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
    """The class that releases and resumes."""
    has_queues: ClassVar[bool] = False
    """Whether a disaggregated server takes its caches out of use for a release."""

    def scheduler(self, manager: Any) -> Any:
        """The scheduler that a manager is of."""
        return manager

    def pipeline(self, scheduler: Any) -> Pipeline:
        """The pipeline that a scheduler is in."""
        return Pipeline(int(scheduler.pp_size), int(scheduler.pp_rank))

    def reaches_late(self, scheduler: Any) -> bool:
        """Whether some tensor parallel ranks get a request later than others, which may not wait for them."""
        arguments = scheduler.server_args
        return bool(arguments.enable_dp_attention and arguments.enable_dp_attention_local_control_broadcast)

    def is_idle(self, manager: Any) -> bool:
        """Whether SGLang would release now."""
        return bool(manager.is_fully_idle())

    def answer(self, scheduler: Any, output: Any, request: Any) -> None:
        """Sends an answer as `process_input_requests` does."""
        if not isinstance(output, importlib.import_module(REQUESTS).RpcReqOutput):
            scheduler.send_to_tokenizer.send_output(output, request)
        elif scheduler.recv_from_rpc is not None:
            scheduler.recv_from_rpc.send_pyobj(output)


class Sglang0_5_15(Sglang0_5_12):
    """A manager releases and resumes, and takes caches out of use."""

    release = (0, 5, 15)
    manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    has_queues = True

    def scheduler(self, manager: Any) -> Any:
        return manager.scheduler

    def pipeline(self, scheduler: Any) -> Pipeline:
        parallel = importlib.import_module(CONTEXT).get_parallel()
        return Pipeline(int(parallel.pp_size), int(parallel.pp_rank))

    def answer(self, scheduler: Any, output: Any, request: Any) -> None:
        requests, channels = importlib.import_module(REQUESTS), scheduler.ipc_channels
        if not isinstance(output, requests.RpcReqOutput):
            channels.send_to_tokenizer.send_output(output, request)
        elif channels.recv_from_rpc is not None:
            requests.sock_send(channels.recv_from_rpc, output)


class Sglang0_5_20(Sglang0_5_15):
    """Settings are the context's, experts may join, and a server in Rust has all answers."""

    release = (0, 5, 20)

    def reaches_late(self, scheduler: Any) -> bool:
        context = importlib.import_module(CONTEXT)
        parallel = context.get_parallel()
        return self.splits_requests(parallel) and bool(
            parallel.enable_dp_attention_local_control_broadcast or context.get_exec().moe.is_ep_scale_joiner
        )

    def splits_requests(self, parallel: Any) -> bool:
        """Whether the ranks of a tensor parallel group have requests of their own."""
        return bool(parallel.enable_dp_attention)

    def answer(self, scheduler: Any, output: Any, request: Any) -> None:
        if scheduler.rust_server is not None:
            scheduler.rust_server.push_control_output(request, output)
        else:
            super().answer(scheduler, output, request)


class Sglang0_5_21(Sglang0_5_20):
    """A server that is paused may have requests that wait."""

    release = (0, 5, 21)

    def is_idle(self, manager: Any) -> bool:
        return bool(manager.is_fully_idle(ignore_waiting=manager.scheduler._engine_paused))


class Sglang0_5_22(Sglang0_5_21):
    """Attention is data parallel by its width, whatever the option says."""

    release = (0, 5, 22)

    def splits_requests(self, parallel: Any) -> bool:
        return bool(parallel.attn_dp_enabled)


class Sglang0_5_23(Sglang0_5_22):
    """The scheduler has a function for its answers."""

    release = (0, 5, 23)

    def answer(self, scheduler: Any, output: Any, request: Any) -> None:
        requests = importlib.import_module(REQUESTS)
        if scheduler.rust_server is None and isinstance(output, requests.RpcReqOutput):
            if scheduler.ipc_channels.recv_from_rpc is not None:
                requests.sock_send(scheduler.ipc_channels.recv_from_rpc, output)
        else:
            scheduler.send_control_output(output, request)


Generation = Sglang0_5_12

ALL: Mapping[Version, type[Generation]] = {
    each.release: each
    for each in (Sglang0_5_12, Sglang0_5_15, Sglang0_5_20, Sglang0_5_21, Sglang0_5_22, Sglang0_5_23)
}
"""By release."""
