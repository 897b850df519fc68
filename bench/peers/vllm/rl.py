#!/usr/bin/env python3
"""The calls of verl, TRL and OpenRLHF in steps of training: sleep, wake by tag, write new weights, generate.
With poorwill nothing of poorwill's is called.

    rl.py --kind small                              # all three, with poorwill and with vLLM's own allocator
    rl.py --kind small-moe --flows trl --levels 2
    rl.py --kind small --expandable                 # PyTorch's expandable segments, as in training images

First an engine that never sleeps gets the weights of every step and says its tokens. Then each framework's
calls are made in a process of their own, with each allocator: the tokens of every step have to be the same.
The trainer is this script: its weights change in every step. While the engine sleeps a small model is trained
beside it, whose losses have to be the same, too.

TRL has its engine in its own process and writes to the model itself. The engines of verl and OpenRLHF are in
another one, and their weights go there through memory of the GPU. Prints JSON lines: `trained` for each
step, a `flow` for each framework, allocator and level, and `beside` with both allocators. What fails with
vLLM's own allocator is reported, and is no failure of the run.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rank_worker
import rl_worker
from common import (
    EXPANDABLE,
    GIB,
    MIB,
    adopt,
    conclude,
    conclude_in_a_folder,
    emit,
    environment,
    every_line_says,
    gib,
)
from models import bound, configuration, elements, tensor_shapes, write_model
from plans import Run
from visit import execute, tail
from web import free_port

FLOWS = ["trl", "verl", "openrlhf"]
NEVER_SLEEPS = "trl-none"  # the run that the others are compared with
COMPARED = ("tokens", "losses")  # of every step
GIVEN_BACK = 0.9  # of weights and KV cache, the share that a sleep has to give back
BUCKET_BYTES = 64 * MIB  # verl's default is 2 GiB, which all of these weights would fit in
TRAINED = 1024  # width of the small model that is trained
TRAINED_STEPS = 5  # in each sleep


class Trainer:
    """Whose weights the engine gets, in memory of the GPU; and what it trains meanwhile."""

    def __init__(self, settings: dict):
        import torch

        self.torch = torch
        shapes = tensor_shapes(settings)
        self.tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16, device="cuda") for name, shape in shapes.items()
        }
        self.weight_bytes = 2 * sum(map(elements, shapes.values()))
        self.random = torch.Generator(device="cuda")
        self.random.manual_seed(1)
        sides = [(TRAINED, 4 * TRAINED), (4 * TRAINED, TRAINED)]
        self.layers = [
            torch.empty(side, device="cuda").normal_(std=0.02, generator=self.random).requires_grad_()
            for side in sides
        ]
        self.initial = [layer.detach().clone() for layer in self.layers]
        self.optimizer = torch.optim.Adam(self.layers, lr=1e-3)

    def begin(self) -> None:
        """Has the small model as it was at first."""
        for layer, was in zip(self.layers, self.initial, strict=True):
            layer.data.copy_(was)
        self.optimizer.state.clear()

    def weights(self, step: int) -> list[tuple[str, Any]]:
        """The weights of a step, by the names that a checkpoint has for them."""
        self.random.manual_seed(1000 + step)
        for name, tensor in self.tensors.items():
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                most = bound(name, tuple(tensor.shape))
                tensor.uniform_(-most, most, generator=self.random)
        self.synchronize()
        return list(self.tensors.items())

    def train(self, step: int) -> list[float]:
        """The losses of a few steps of the small model."""
        self.random.manual_seed(step)
        losses = []
        for _ in range(TRAINED_STEPS):
            given = self.torch.randn((256, TRAINED), device="cuda", generator=self.random)
            wanted = given.roll(1, dims=1)
            loss = ((given @ self.layers[0]).relu() @ self.layers[1] - wanted).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def handle(self, tensor: Any) -> Any:
        """What another process gets at the tensor's memory by."""
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(tensor)

    def set_expandable(self, is_expandable: bool) -> None:
        self.torch.cuda.memory._set_allocator_settings(f"expandable_segments:{is_expandable}")

    def empty_cache(self) -> None:
        self.torch.cuda.empty_cache()

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def used_bytes(self) -> int:
        """Used bytes of the card, by the driver's figure, of all processes."""
        free, total = self.torch.cuda.mem_get_info()
        return total - free


@dataclass
class Engine:
    """A `vllm.LLM` as a trainer calls it. Takes the time of what sleeps and wakes, and counts what only
    poorwill has; an engine that never sleeps is left awake."""

    llm: Any
    mode: str
    trainer: Any
    manual_calls: int = 0
    failed_resets: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    given_back_bytes: int = 0

    def _timed(self, name: str, action: Callable[[], Any]) -> None:
        self.trainer.synchronize()
        start = time.perf_counter()
        action()
        self.trainer.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def sleep(self, level: int) -> None:
        if self.mode == "none":
            return
        self.trainer.empty_cache()
        awake = self.trainer.used_bytes()
        self._timed("sleep", lambda: self.llm.sleep(level=level))
        self.given_back_bytes = awake - self.trainer.used_bytes()

    def wake(self, tag: str) -> None:
        if self.mode != "none":
            self._timed(f"wake_{tag}", lambda: self.llm.wake_up(tags=[tag]))

    def reset_prefix_cache(self, reset_connector: bool = False) -> None:
        """Where it fails what was computed with other weights stays, and tokens say nothing."""
        was_reset = self.llm.reset_prefix_cache(reset_connector=reset_connector)
        # vLLM 0.20 calls it a failure as well that there is no connector.
        self.failed_resets += not was_reset and not reset_connector

    def rpc(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.manual_calls += method.startswith("poorwill")
        return self.llm.collective_rpc(method, args=arguments, kwargs=named)

    def taken(self) -> dict[str, float]:
        """Milliseconds by operation since this was asked last."""
        taken, self.seconds = self.seconds, {}
        return {f"{name}_ms": round(1000 * seconds, 2) for name, seconds in taken.items()}


# What each framework calls. `sleep` is how its engine is put to sleep, `refresh` what comes between that and
# the next request.


class Trl:
    """TRL 1.16, colocated."""

    extension = ""
    is_in_process = True

    def sleep(self, engine: Engine, level: int) -> None:
        engine.sleep(level)

    def refresh(self, engine: Engine, trainer: Any, step: int) -> None:
        trainer.empty_cache()
        engine.wake("weights")
        for name, tensor in trainer.weights(step):
            model = engine.llm.llm_engine.model_executor.driver_worker.model_runner.model
            model.load_weights([(name, tensor)])
        engine.reset_prefix_cache()
        engine.wake("kv_cache")


class Verl:
    """verl 0.9, hybrid: trainer and engine share the GPU."""

    extension = "rl_worker.Verl"
    is_in_process = False

    def __init__(self, send: Callable[..., None] = rl_worker.send):
        self.send = send
        self.address = f"ipc:///tmp/poorwill-bench-rl-{os.getpid()}"

    def sleep(self, engine: Engine, level: int) -> None:
        engine.sleep(level)
        engine.llm.llm_engine.reset_encoder_cache()

    def refresh(self, engine: Engine, trainer: Any, step: int) -> None:
        weights = trainer.weights(step)
        trainer.set_expandable(False)
        trainer.empty_cache()
        engine.wake("weights")
        engine.reset_prefix_cache(reset_connector=True)
        sending = threading.Thread(target=self.send, args=(self.address, weights, BUCKET_BYTES), daemon=True)
        sending.start()
        engine.rpc(
            "update_weights_from_ipc",
            peft_config=None,
            base_sync_done=True,
            use_shm=False,
            address=self.address,
        )
        sending.join()
        engine.reset_prefix_cache(reset_connector=True)
        engine.llm.llm_engine.reset_mm_cache()
        engine.llm.llm_engine.reset_encoder_cache()
        trainer.empty_cache()
        engine.wake("kv_cache")
        engine.reset_prefix_cache(reset_connector=True)
        trainer.set_expandable(True)


class OpenRlhf:
    """OpenRLHF 0.11, hybrid."""

    extension = "rl_worker.OpenRlhf"
    is_in_process = False

    def sleep(self, engine: Engine, level: int) -> None:
        engine.sleep(level)

    def refresh(self, engine: Engine, trainer: Any, step: int) -> None:
        engine.wake("weights")
        engine.reset_prefix_cache()
        trainer.empty_cache()
        weights = trainer.weights(step)
        for number, (name, tensor) in enumerate(weights, 1):
            weight = tensor.clone()
            handles = {"0": trainer.handle(weight)}
            last = number == len(weights)
            engine.rpc("update_weight_cuda_ipc", name, weight.dtype, tuple(weight.shape), handles, last)
            trainer.synchronize()
        trainer.empty_cache()
        # Before it generates it wakes all, and the weights are awake by then.
        engine.wake("weights")
        engine.wake("kv_cache")


KINDS_OF_FLOW: dict[str, type] = {"trl": Trl, "verl": Verl, "openrlhf": OpenRlhf}


def steps_of(
    flow: Any, engine: Engine, trainer: Any, level: int, steps: int, generate: Callable[[], list]
) -> list[dict]:
    """The steps of one level, awake at its beginning and its end; what each came to."""
    records = []
    for step in range(1, steps + 1):
        flow.sleep(engine, level)
        losses = trainer.train(step)
        flow.refresh(engine, trainer, step)
        records.append(
            {
                "step": step,
                "tokens": generate(),
                "losses": losses,
                "given_back_bytes": engine.given_back_bytes,
                **engine.taken(),
            }
        )
    return records


def summary(records: list[dict], reference: list[dict], least_bytes: int, engine: Engine) -> dict:
    """What the steps of one level came to beside those of an engine that never sleeps."""
    pairs = list(zip(records, reference, strict=True))
    figures: dict = {
        "steps": len(records),
        **{f"{what}_equal": sum(record[what] == known[what] for record, known in pairs) for what in COMPARED},
        "given_back_gib": gib(min(record["given_back_bytes"] for record in records)),
        "manual_calls": engine.manual_calls,
        "failed_resets": engine.failed_resets,
    }
    for name in ["sleep_ms", "wake_weights_ms", "wake_kv_cache_ms"]:
        took = [record[name] for record in records if name in record]
        if took:
            figures[name] = {"median": statistics.median(took), "max": max(took)}
    figures["ok"] = (
        figures["tokens_equal"] == figures["losses_equal"] == figures["steps"]
        and not engine.manual_calls
        and not engine.failed_resets
        and all(record["given_back_bytes"] >= least_bytes for record in records)
    )
    return figures


def settings_of(options: argparse.Namespace, folder: Path, mode: str, flow: Any) -> dict:
    """What vllm.LLM is given."""
    import engine as engines

    chosen = engines.settings(
        write_model(folder, options.kind, options.layers), mode=mode, kv_gib=options.kv_gib, utilization=0.5
    )
    # Trainers leave it on, and reset it; a request is made once with the weights of a step.
    chosen["enable_prefix_caching"] = True
    if flow.extension:
        chosen["worker_extension_cls"] = flow.extension
    if flow.is_in_process:
        chosen["distributed_executor_backend"] = "external_launcher"
    return chosen


def child(options: argparse.Namespace, folder: Path) -> bool:
    """One framework with one allocator; the engine that never sleeps writes what the others compare with."""
    import engine as engines
    from vllm import LLM

    name, mode = options.child.split("-")
    flow = KINDS_OF_FLOW[name]()
    trainer = Trainer(configuration(options.kind, options.layers))
    begin = time.perf_counter()
    llm = LLM(**settings_of(options, folder, mode, flow))
    about = llm.collective_rpc(rank_worker.begin, args=(mode,))[0]
    emit("start", start_s=round(time.perf_counter() - begin, 2), **about)
    engine = Engine(llm, mode, trainer)
    least = int(GIVEN_BACK * (trainer.weight_bytes + options.kv_gib * GIB))

    def generate() -> list[list[int]]:
        # One request at a time: what is computed together changes the last bits.
        return [tokens for prompt in engines.PROMPTS for tokens in engines.generated(llm, [prompt])]

    good = True
    for level in [0] if mode == "none" else options.levels:
        trainer.begin()
        records = steps_of(flow, engine, trainer, level, options.steps, generate)
        if mode == "none":
            options.reference.write_text(json.dumps(records))
            distinct = len({json.dumps(record["tokens"]) for record in records})
            # Tokens that do not depend on the weights say nothing of them.
            good = distinct == len(records) and not engine.failed_resets
            figures = {"steps": len(records), "distinct": distinct, "failed_resets": engine.failed_resets}
            emit("reference", **figures, ok=good)
            return good
        reference = json.loads(options.reference.read_text())
        for record, known in zip(records, reference, strict=True):
            equal = {f"{what}_equal": record[what] == known[what] for what in COMPARED}
            emit("trained", level=level, **record, **equal)
        figures = summary(records, reference, least, engine)
        emit("flow", level=level, **figures)
        good = good and figures["ok"]
    return good


def beside(lines: list[dict], flows: list[str], modes: list[str], levels: list[int]) -> list[dict]:
    """What there is to compare: for each framework and level what came of it with each allocator, or why
    nothing did."""
    compared = []
    for flow in flows:
        for level in levels:
            record: dict = {"flow": flow, "level": level}
            for mode in modes:
                own = [line for line in lines if line.get("flow") == flow and line.get("mode") == mode]
                ended = [line for line in own if line["event"] == "flow" and line["level"] == level]
                failed = [line["error"] for line in own if line["event"] == "failed"]
                figures = {name: value for name, value in (ended or [{}])[-1].items() if name not in SAID}
                record[mode] = figures or {"ok": False, "failed": (failed or ["it ended without a word"])[-1]}
            compared.append(record)
    return compared


SAID = ("event", "flow", "mode", "label", "level")  # of a line, and of what it is compared in


def run_child(
    options: argparse.Namespace, name: str, folder: Path, given: list[str]
) -> tuple[list[dict], bool]:
    """The lines of one process, which are passed on as they come, and whether it ended well."""
    lines: list[dict] = []

    def keep(record: dict) -> None:
        if isinstance(line := record.get("line"), dict):
            lines.append(line)
            print(json.dumps(line), flush=True)

    log = folder / f"{name}.log"
    words = [*given, "--child", name, "--reference", str(folder / "reference.json")]
    ended = execute(Run(name, "rl.py", words, options.limit_s), options.limit_s, keep, log)
    said = tail(log) if ended["failed"] else ""  # of all that went well little would be kept of what did not
    print(f"---- {name}: {ended}\n{said}", file=sys.stderr, flush=True)
    if ended["failed"] and not any(line["event"] == "failed" for line in lines):
        flow, mode = name.split("-")
        lines.append({"event": "failed", "flow": flow, "mode": mode, "error": ended["failed"]})
        emit(**lines[-1])
    return lines, not ended["failed"]


def run(options: argparse.Namespace, folder: Path, given: list[str]) -> bool:
    _, good = run_child(options, NEVER_SLEEPS, folder, given)
    if not good:
        return False
    lines: list[dict] = []
    for flow in options.flows:
        for mode in options.modes:
            own, ended = run_child(options, f"{flow}-{mode}", folder, given)
            lines += own
            good = good and (ended or mode != "poorwill")
    for record in beside(lines, options.flows, options.modes, options.levels):
        emit("beside", **record)
    return good


def listed(allowed: list) -> Callable[[str], list]:
    """A reader of words with commas between, of which there are only these."""

    def read(text: str) -> list:
        chosen = [type(allowed[0])(word) for word in text.split(",")]
        if wrong := [str(word) for word in chosen if word not in allowed]:
            there_are = ", ".join(map(str, allowed))
            raise argparse.ArgumentTypeError(f"no {', '.join(wrong)}: there are {there_are}")
        return chosen

    read.__name__ = "list"  # as argparse calls what it cannot read
    return read


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--kind", choices=["small", "small-moe"], default="small")
    arguments.add_argument("--layers", type=int, default=0, help="0: as many as the kind has")
    arguments.add_argument("--flows", type=listed(FLOWS), default=FLOWS, help="which, with commas between")
    arguments.add_argument(
        "--modes", type=listed(["poorwill", "cumem"]), default=["poorwill", "cumem"], help="the same"
    )
    arguments.add_argument("--levels", type=listed([1, 2]), default=[2, 1], help="the same")
    arguments.add_argument("--steps", type=int, default=10, help="of training, at each level")
    arguments.add_argument("--kv-gib", type=float, default=2)
    arguments.add_argument("--expandable", action="store_true", help="with PyTorch's expandable segments")
    arguments.add_argument("--limit-s", type=float, default=120, help="the longest a framework may take")
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    arguments.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args(given)
    if options.steps < 1:
        arguments.error(f"--steps is {options.steps}; it is 1 or more")
    return options


def surroundings(options: argparse.Namespace) -> dict[str, str]:
    """What the environment has beside poorwill's switch, as it is under the framework."""
    more = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # so that the losses of two runs are the same
    if options.expandable:
        more |= EXPANDABLE
    if KINDS_OF_FLOW[options.child.split("-")[0]].is_in_process:
        more |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    else:
        more |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    # What is passed to a worker by name, and the handles of memory.
    return {**more, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def main() -> None:
    options = parsed()
    if options.child:
        flow, mode = options.child.split("-")
        adopt(environment(mode, dict(os.environ), **surroundings(options)))
        every_line_says(flow=flow, mode=mode, label=f"rl-{options.kind}")

        def whole() -> bool:
            with tempfile.TemporaryDirectory(prefix="poorwill-bench-") as folder:
                return child(options, Path(folder))

        conclude(whole)
    every_line_says(label=f"rl-{options.kind}")
    conclude_in_a_folder(lambda folder: run(options, folder, sys.argv[1:]))


if __name__ == "__main__":
    main()
