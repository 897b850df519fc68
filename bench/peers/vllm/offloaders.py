#!/usr/bin/env python3
"""Time forward passes over layers whose weights are in host memory, and print JSON lines.

These are vLLM's offloaders or Poorwill's on the same layers, beside the resident layers and the bare copies.

    offloaders.py --whose poorwill --way prefetch            # tokens that take as long as the copies
    offloaders.py --whose vllm --way prefetch --tokens 64
    offloaders.py --whose poorwill --way uva --tokens 64
    offloaders.py --whose poorwill --way prefetch --graphs   # forwards are replays of a CUDA graph
    offloaders.py --whose poorwill-in-vllm --way prefetch    # vLLM's offloader with Poorwill's memory

The weights are made up, and the same each time. Every forward is compared, bit for bit, with the one of the
resident layers. vLLM's classes are used by themselves: no engine is started. Without a GPU, `--device host
--gib 0.25` tries out what is here with PyTorch on the CPU, for Poorwill's own offloaders.
"""

import argparse
import contextlib
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from common import GIB, MIB, adopt, conclude, difference, emit, environment, every_line_says, gib, host_memory

LINK_BYTES = (
    512 * MIB
)  # of one copy: a power of two, so that PyTorch's page-locked memory is of that size, too
TOKENS_STEP = 256
TOGETHER = 4  # forwards one after the other, with no wait between
WHOSE = ["poorwill", "poorwill-in-vllm", "vllm"]


class Machine:
    """What differs between a GPU and the host device."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch = torch
        self.name = device
        self.is_gpu = device != "host"
        self.device = torch.device(device if self.is_gpu else "cpu")

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        self.finish()
        start = time.perf_counter()
        result = work()
        self.finish()
        return time.perf_counter() - start, result

    def finish(self) -> None:
        if self.is_gpu:
            self.torch.cuda.synchronize()

    def used_bytes(self) -> int | None:
        if not self.is_gpu:
            return None
        free, total = self.torch.cuda.mem_get_info()
        return total - free

    def transfer_s(self, nbytes: int) -> float:
        """How long it takes to copy so many bytes to the device from page-locked memory, on one stream."""
        torch, piece = self.torch, min(LINK_BYTES, nbytes)
        pieces = -(-nbytes // piece)

        def copies(source: Any, target: Any) -> None:
            for _ in range(pieces):
                target.copy_(source, non_blocking=True)

        def measured() -> float:
            source = torch.ones(piece, dtype=torch.uint8, pin_memory=self.is_gpu)
            target = torch.empty(piece, dtype=torch.uint8, device=self.device)
            self.timed(lambda: copies(source, target))
            return statistics.median(self.timed(lambda: copies(source, target))[0] for _ in range(3))

        seconds = measured() * nbytes / (pieces * piece)
        if self.is_gpu:
            torch._C._host_emptyCache()  # its memory is not to be counted for what comes
        return seconds


def make_layers(machine: Machine, count: int, nbytes: int, hidden: int) -> Any:
    """Layers of two matrices each, which have `nbytes` together, with weights that keep numbers in bounds."""
    torch = machine.torch
    nn = torch.nn
    inner = nbytes // (2 * 2 * hidden)  # two matrices of two bytes an element
    if inner < 1:
        raise ValueError(f"layers of {nbytes} bytes have no room for a hidden size of {hidden}")

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(hidden, inner, bias=False, device=machine.device, dtype=torch.bfloat16)
            self.down = nn.Linear(inner, hidden, bias=False, device=machine.device, dtype=torch.bfloat16)

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.relu(self.up(x)))

    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(count))
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 / 4)
    return layers.requires_grad_(False)


def forward(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def inputs(machine: Machine, tokens: int, hidden: int) -> Any:
    torch = machine.torch
    generator = torch.Generator(machine.device).manual_seed(1)
    made = torch.randn(tokens, hidden, generator=generator, device=machine.device)
    return made.to(torch.bfloat16)


def balanced_tokens(machine: Machine, layers: Any, hidden: int, transfer_s: float) -> int:
    """How many tokens take about as long to compute as the copies take: a whole number of steps."""
    tokens = 16 * TOKENS_STEP
    for _ in range(4):
        x = inputs(machine, tokens, hidden)
        machine.timed(lambda x=x: forward(layers, x))
        compute_s = statistics.median(machine.timed(lambda x=x: forward(layers, x))[0] for _ in range(3))
        tokens = max(1, round(tokens * transfer_s / compute_s / TOKENS_STEP)) * TOKENS_STEP
    return tokens


class Offloaded:
    """Layers in host memory: `forward` is what runs them, and `around` what a capture needs besides."""

    def __init__(self, options: argparse.Namespace, machine: Machine, layers: Any) -> None:
        self.layers = layers
        self._keep: Any = None
        getattr(self, f"_{options.whose.replace('-', '_')}_{options.way}")(options, machine)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """In a capture, around the forward."""
        yield

    def before(self) -> None:
        """Before a capture, and before each replay."""

    def _poorwill_uva(self, options: argparse.Namespace, machine: Machine) -> None:
        from poorwill import offload

        self._keep = offload.UvaOffloader(max_bytes=1 << 60, device=machine.name)
        self._keep.offload(self.layers)

    def _poorwill_prefetch(self, options: argparse.Namespace, machine: Machine) -> None:
        from poorwill import offload

        self._keep = offload.PrefetchOffloader(self.layers, ahead=options.ahead, device=machine.name)
        self.before = self._keep.settle

    def _vllm_uva(self, options: argparse.Namespace, machine: Machine) -> None:
        from vllm.model_executor import offloader

        self._in_vllm(offloader.UVAOffloader(cpu_offload_max_bytes=1 << 60))

    def _vllm_prefetch(self, options: argparse.Namespace, machine: Machine) -> None:
        from vllm.model_executor import offloader

        self._in_vllm(offloader.PrefetchOffloader(1, 1, options.ahead))

    def _poorwill_in_vllm_uva(self, options: argparse.Namespace, machine: Machine) -> None:
        self._created("uva", {"cpu_offload_gb": 1 << 20}, {})

    def _poorwill_in_vllm_prefetch(self, options: argparse.Namespace, machine: Machine) -> None:
        figures = {"offload_group_size": 1, "offload_num_in_group": 1, "offload_prefetch_step": options.ahead}
        self._created("prefetch", {}, figures)

    def _created(self, backend: str, uva: dict, prefetch: dict) -> None:
        """What vLLM makes of a configuration with the plugin's switch on."""
        from vllm.config.offload import OffloadConfig
        from vllm.model_executor import offloader
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        made = offloader.create_offloader(OffloadConfig(offload_backend=backend, uva=uva, prefetch=prefetch))
        if not type(made).__module__.startswith("poorwill."):
            raise RuntimeError(
                f"vLLM made a {type(made).__module__}.{type(made).__qualname__}: nothing of poorwill's"
            )
        self._in_vllm(made)

    def _in_vllm(self, made: Any) -> None:
        from vllm.model_executor import offloader

        offloader.set_offloader(made)
        made.wrap_modules(layer for layer in self.layers)
        made.post_init()
        self.before = made.sync_prev_onload

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            yield
            made.join_after_forward()

        self.around = around


def captured(machine: Machine, offloaded: Offloaded, x: Any) -> Callable[[], Any]:
    """A forward as a CUDA graph."""
    torch = machine.torch
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward(offloaded.layers, x)
    torch.cuda.current_stream().wait_stream(stream)
    offloaded.before()
    machine.finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), offloaded.around():
        output = forward(offloaded.layers, x)

    def replay() -> Any:
        offloaded.before()
        graph.replay()
        return output

    return replay


def run(options: argparse.Namespace) -> bool:
    machine = Machine(options.device)
    torch = machine.torch
    layer_bytes = int(options.gib * GIB) // options.layers
    with torch.inference_mode(False), torch.no_grad():
        transfer_s = machine.transfer_s(layer_bytes * options.layers)
        layers = make_layers(machine, options.layers, layer_bytes, options.hidden)
        nbytes = sum(parameter.nbytes for parameter in layers.parameters())
        tokens = options.tokens or balanced_tokens(machine, layers, options.hidden, transfer_s)
        x = inputs(machine, tokens, options.hidden)
        resident = [machine.timed(lambda: forward(layers, x)) for _ in range(options.rounds + 2)]
        compute_s, expected = (
            statistics.median(seconds for seconds, _ in resident[2:]),
            resident[0][1].clone(),
        )
        del resident
        if options.whose != "poorwill":
            importlib.import_module("vllm.model_executor.offloader")  # takes seconds that are not to count
        used_before, host_before = machine.used_bytes(), host_memory()
        seconds, offloaded = machine.timed(lambda: Offloaded(options, machine, layers))
        if machine.is_gpu:
            torch.cuda.empty_cache()
        used = machine.used_bytes()
        emit(
            "offloaded",
            seconds=round(seconds, 3),
            host_added_gib=difference(host_memory(), host_before),
            device_given_back_gib=gib(None if used is None else used_before - used),
        )
        work = captured(machine, offloaded, x) if options.graphs else lambda: forward(layers, x)
        equal, times = True, []
        for _ in range(options.rounds + 2):
            seconds, output = machine.timed(work)
            times.append(seconds)
            equal = bool(torch.equal(output, expected)) and equal
        counted = times[2:]
        steady = []
        for _ in range(options.rounds):
            seconds, output = machine.timed(lambda: [work() for _ in range(TOGETHER)][-1])
            steady.append(seconds / TOGETHER)
            equal = bool(torch.equal(output, expected)) and equal
        steady_s, longer_s = statistics.median(steady), max(compute_s, transfer_s)
        forward_s = statistics.median(counted)
        emit(
            "forward",
            layers=options.layers,
            weights_gib=gib(nbytes),
            tokens=tokens,
            compute_s=round(compute_s, 5),
            transfer_s=round(transfer_s, 5),
            forward_s=round(forward_s, 5),
            forward_least_s=round(min(counted), 5),
            forward_most_s=round(max(counted), 5),
            steady_s=round(steady_s, 5),
            over_the_longer=round(forward_s / longer_s, 4),
            steady_over_the_longer=round(steady_s / longer_s, 4),
            gib_per_s=round(nbytes / GIB / forward_s, 2),
            equal=equal,
        )
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--whose", choices=WHOSE, required=True)
    parser.add_argument("--way", choices=["uva", "prefetch"], required=True)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or host to try poorwill's on the CPU")
    parser.add_argument("--gib", type=float, default=24, help="weights of all layers")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument(
        "--tokens", type=int, help="of a forward; as many as take as long as the copies, if not said"
    )
    parser.add_argument("--ahead", type=int, default=2, help="layers that are copied ahead")
    parser.add_argument("--rounds", type=int, default=5, help="forwards that count, behind two that do not")
    parser.add_argument("--graphs", action="store_true", help="forwards are replays of a CUDA graph")
    options = parser.parse_args()
    if options.device == "host" and (options.whose != "poorwill" or options.graphs):
        parser.error("the host device has poorwill's own offloaders, and no graphs")
    if min(options.layers, options.hidden, options.ahead, options.rounds, options.tokens or 1) < 1:
        parser.error("--layers, --hidden, --ahead, --rounds and --tokens are 1 or more")
    in_vllm = {"POORWILL_OFFLOAD": "1"} if options.whose == "poorwill-in-vllm" else {}
    adopt(environment("none", dict(os.environ), **in_vllm))
    every_line_says(whose=options.whose, way=options.way, graphs=options.graphs)
    conclude(lambda: run(options))


if __name__ == "__main__":
    main()
