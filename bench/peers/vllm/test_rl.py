#!/usr/bin/env python3
"""Holds rl.py and rl_worker.py to what they say, as far as no GPU, no PyTorch and no vLLM are needed."""

# There may be no pytest where this runs.
# ruff: noqa: PT009, PT027

import contextlib
import io
import queue
import sys
import threading
import types
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import common  # noqa: E402
import models  # noqa: E402
import rl  # noqa: E402
import rl_worker  # noqa: E402
from test_scripts import Folder, printed  # noqa: E402

WEIGHTS_BYTES = 1000
NAMES = ("a", "b")


class Tensor:
    """As much of a tensor as the flows touch."""

    dtype, shape = "bfloat16", (2, 3)

    def __init__(self, step: int):
        self.step = step

    def clone(self):
        return self


class Trainer:
    """In the place of the trainer: its weights are the number of the step."""

    def __init__(self, calls: list):
        self.calls, self.used = calls, 5000
        self.weight_bytes = WEIGHTS_BYTES

    def weights(self, step):
        return [(name, Tensor(step)) for name in NAMES]

    def train(self, step):
        self.calls.append("train")
        return [step / 2]

    def handle(self, tensor):
        return ("handle", tensor.step)

    def set_expandable(self, is_expandable):
        self.calls.append(f"expandable {is_expandable}")

    def empty_cache(self):
        self.calls.append("empty_cache")

    def synchronize(self):
        pass

    def used_bytes(self):
        return self.used


class Llm:
    """An engine that has what is written to it, in whatever way that is done, and loses it at level 2."""

    def __init__(self, calls: list, trainer: Trainer, keeps_memory: bool = False):
        self.calls, self.trainer, self.keeps_memory = calls, trainer, keeps_memory
        self.held: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.asleep: set[str] = set()
        model = types.SimpleNamespace(load_weights=self.load_weights)
        runner = types.SimpleNamespace(model=model)
        executor = types.SimpleNamespace(driver_worker=types.SimpleNamespace(model_runner=runner))
        self.llm_engine = types.SimpleNamespace(
            model_executor=executor,
            reset_encoder_cache=lambda: calls.append("reset_encoder_cache"),
            reset_mm_cache=lambda: calls.append("reset_mm_cache"),
        )

    def load_weights(self, weights):
        assert "weights" not in self.asleep
        for name, tensor in weights:
            self.calls.append(f"load {name}")
            self.held[name] = tensor.step

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            self.held = dict.fromkeys(NAMES, -1)
        if not self.keeps_memory:
            self.trainer.used = 100

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")
        self.asleep -= set(tags)
        self.trainer.used = 5000

    def reset_prefix_cache(self, reset_connector=False):
        self.calls.append("reset_prefix_cache")
        return True

    def collective_rpc(self, method, args=(), kwargs=None):
        self.calls.append(method)
        if method == "update_weight_cuda_ipc":
            name, _, shape, handles, _ = args
            assert type(shape) is tuple
            self.held[name] = handles["0"][1]

    def generate(self):
        assert not self.asleep
        return [list(self.held.values())]


class Flows(unittest.TestCase):
    def ran(
        self, flow, mode="poorwill", level=2, steps=2, **flaws
    ) -> tuple[list[str], list[dict], rl.Engine]:
        calls: list[str] = []
        trainer = Trainer(calls)
        llm = Llm(calls, trainer, **flaws)
        engine = rl.Engine(llm, mode, trainer)
        if isinstance(flow, rl.Verl):

            def send(address, weights, bucket_bytes):
                llm.load_weights(weights)

            flow = rl.Verl(send)
        return calls, rl.steps_of(flow, engine, trainer, level, steps, llm.generate), engine

    def calls_of_one_step(self, flow) -> list[str]:
        calls, _, engine = self.ran(flow, steps=1)
        self.assertEqual(engine.manual_calls, 0)
        return calls

    def test_trl(self):
        calls = ["empty_cache", "sleep 2", "train", "empty_cache", "wake weights", "load a", "load b"]
        self.assertEqual(self.calls_of_one_step(rl.Trl()), [*calls, "reset_prefix_cache", "wake kv_cache"])

    def test_verl(self):
        calls = self.calls_of_one_step(rl.Verl())
        # Whether the sender or the worker comes first is up to the threads.
        written = {"update_weights_from_ipc", "load a", "load b"}
        self.assertEqual(written - set(calls), set())
        first = ["empty_cache", "sleep 2", "reset_encoder_cache", "train"]
        first += ["expandable False", "empty_cache", "wake weights", "reset_prefix_cache"]
        then = ["reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "empty_cache"]
        then += ["wake kv_cache", "reset_prefix_cache", "expandable True"]
        self.assertEqual([call for call in calls if call not in written], [*first, *then])

    def test_openrlhf(self):
        calls = ["empty_cache", "sleep 2", "train", "wake weights", "reset_prefix_cache", "empty_cache"]
        calls += ["update_weight_cuda_ipc"] * 2 + ["empty_cache", "wake weights", "wake kv_cache"]
        self.assertEqual(self.calls_of_one_step(rl.OpenRlhf()), calls)

    def reference(self, steps: int) -> list[dict]:
        calls, records, _ = self.ran(rl.Trl(), mode="none", level=0, steps=steps)
        self.assertFalse({"sleep 0", "wake weights", "wake kv_cache"} & set(calls))
        return records

    def test_every_step_is_compared_with_an_engine_that_never_sleeps(self):
        reference = self.reference(3)
        self.assertEqual([record["tokens"] for record in reference], [[[1, 1]], [[2, 2]], [[3, 3]]])
        for flow in (rl.Trl(), rl.Verl(), rl.OpenRlhf()):
            for level in (1, 2):
                _, records, engine = self.ran(flow, level=level, steps=3)
                figures = rl.summary(records, reference, WEIGHTS_BYTES, engine)
                self.assertTrue(figures["ok"], figures)
                self.assertEqual(
                    (figures["tokens_equal"], figures["losses_equal"], figures["steps"]), (3, 3, 3)
                )
                for name in ("sleep_ms", "wake_weights_ms", "wake_kv_cache_ms"):
                    self.assertGreaterEqual(figures[name]["max"], figures[name]["median"])

    def test_what_is_wrong_is_found(self):
        reference = self.reference(2)
        _, records, engine = self.ran(rl.Trl(), keeps_memory=True)
        self.assertFalse(rl.summary(records, reference, WEIGHTS_BYTES, engine)["ok"])
        _, records, engine = self.ran(rl.Trl())
        self.assertTrue(rl.summary(records, reference, WEIGHTS_BYTES, engine)["ok"])
        for name in ("manual_calls", "failed_resets"):
            with mock.patch.object(engine, name, 1):
                self.assertFalse(rl.summary(records, reference, WEIGHTS_BYTES, engine)["ok"])
        for name, wrong in {"tokens": [[7]], "losses": [0.1]}.items():
            changed = [records[0], {**records[1], name: wrong}]
            figures = rl.summary(changed, reference, WEIGHTS_BYTES, engine)
            self.assertEqual((figures["ok"], figures[f"{name}_equal"]), (False, 1))

    def test_a_prefix_cache_that_cannot_be_reset_is_counted(self):
        llm = mock.Mock()
        engine = rl.Engine(llm, "poorwill", Trainer([]))
        for answer, connector, failed in [(True, False, 0), (False, True, 0), (False, False, 1)]:
            llm.reset_prefix_cache.return_value = answer
            engine.reset_prefix_cache(reset_connector=connector)
            self.assertEqual(engine.failed_resets, failed)

    def test_what_only_poorwill_has_is_counted(self):
        engine = rl.Engine(mock.Mock(), "poorwill", Trainer([]))
        engine.rpc("poorwill_mark_restored")
        engine.rpc("update_weight")
        self.assertEqual(engine.manual_calls, 1)


class Child(Folder):
    """One process of the whole, over a vLLM that stands in."""

    def child(self, name: str, forgets: bool = False, *words: str) -> tuple[bool, list[dict]]:
        calls: list[str] = []
        made: list[Llm] = []

        class Both(Trainer):
            def __init__(self, settings):
                super().__init__(calls)
                self.begun = 0
                # So much as the fake engine gives back.
                self.weight_bytes = 0

            def begin(self):
                self.begun += 1

        class Engine(Llm):
            def __init__(self, **chosen):
                super().__init__(calls, trainers[-1])
                self.chosen = chosen
                made.append(self)

            def collective_rpc(self, method, args=(), kwargs=None):
                if method is rl.rank_worker.begin:
                    return [{"allocator": "some", "used_bytes": 1}]
                return super().collective_rpc(method, args, kwargs)

        trainers: list[Both] = []

        def trainer(settings):
            trainers.append(Both(settings))
            return trainers[-1]

        engine = types.ModuleType("engine")
        engine.PROMPTS = [[1], [2]]
        engine.settings = lambda path, **chosen: {"model": path, **chosen}
        engine.generated = lambda llm, prompts: [[*prompts[0], *llm.generate()[0], -forgets]]
        vllm = types.ModuleType("vllm")
        vllm.LLM = Engine
        reference = self.folder / "reference.json"
        options = rl.parsed([*words, "--child", name, "--reference", str(reference), "--kv-gib", "0"])
        results: list[bool] = []
        with (
            mock.patch.dict(sys.modules, {"engine": engine, "vllm": vllm}),
            mock.patch.object(rl, "Trainer", trainer),
        ):
            lines = printed(lambda: results.append(rl.child(options, self.folder)))
        self.chosen = made[0].chosen
        self.begun = trainers[0].begun
        return results[0], lines

    def test_the_tokens_of_the_engine_that_never_sleeps_are_those_of_the_others(self):
        good, lines = self.child("trl-none")
        self.assertTrue(good)
        self.assertEqual(
            (lines[-1]["event"], lines[-1]["steps"], lines[-1]["distinct"]), ("reference", 10, 10)
        )
        good, lines = self.child("openrlhf-poorwill")
        self.assertTrue(good, lines)
        self.assertEqual([line["event"] for line in lines], ["start", *(["trained"] * 10 + ["flow"]) * 2])
        flows = [line for line in lines if line["event"] == "flow"]
        self.assertEqual(
            [(line["level"], line["tokens_equal"], line["ok"]) for line in flows],
            [(2, 10, True), (1, 10, True)],
        )
        self.assertTrue(all(line["tokens_equal"] for line in lines if line["event"] == "trained"))
        self.assertEqual((self.chosen["worker_extension_cls"], self.begun), ("rl_worker.OpenRlhf", 2))
        self.assertTrue(self.chosen["enable_prefix_caching"])
        good, lines = self.child("trl-poorwill", True, "--levels", "1")
        self.assertFalse(good)
        self.assertFalse(any(line["tokens_equal"] for line in lines if line["event"] == "trained"))
        self.assertEqual(self.chosen["distributed_executor_backend"], "external_launcher")

    def test_an_engine_whose_tokens_are_the_same_whatever_is_written_says_nothing(self):
        with mock.patch.object(Trainer, "weights", return_value=[(name, Tensor(7)) for name in NAMES]):
            good, lines = self.child("trl-none")
        self.assertEqual((good, lines[-1]["distinct"]), (False, 1))


class Options(unittest.TestCase):
    def test_what_is_not_known_is_named(self):
        for words, said in {
            "--flows trl,slime": "no slime: there are trl, verl, openrlhf",
            "--levels 0": "no 0: there are 1, 2",
            "--levels one": "invalid list value: 'one'",
            "--modes none": "no none",
            "--steps 0": "--steps is 0; it is 1 or more",
            "--kind huge": "huge",
        }.items():
            with contextlib.redirect_stderr(io.StringIO()) as printed_, self.assertRaises(SystemExit):
                rl.parsed(words.split())
            self.assertIn(said, printed_.getvalue())
        options = rl.parsed("--flows verl --levels 1,2 --modes cumem".split())
        self.assertEqual((options.flows, options.levels, options.modes), (["verl"], [1, 2], ["cumem"]))

    def test_the_environment_is_the_frameworks(self):
        def of(words: str) -> dict[str, str]:
            return rl.surroundings(rl.parsed(words.split()))

        inside, beside = of("--child trl-poorwill"), of("--child verl-cumem --expandable")
        self.assertEqual((inside["VLLM_ENABLE_V1_MULTIPROCESSING"], inside["WORLD_SIZE"]), ("0", "1"))
        self.assertEqual(beside["VLLM_ENABLE_V1_MULTIPROCESSING"], "1")
        self.assertEqual(beside["PYTORCH_CUDA_ALLOC_CONF"], "expandable_segments:True")
        self.assertNotIn("PYTORCH_CUDA_ALLOC_CONF", inside)
        self.assertEqual(set(rl.KINDS_OF_FLOW), set(rl.FLOWS))

    def test_weights_have_the_names_of_a_checkpoint(self):
        shapes = models.tensor_shapes(models.configuration("small-moe", 1))
        self.assertEqual(shapes["model.layers.0.mlp.experts.15.down_proj.weight"], (1024, 512))
        self.assertEqual(shapes["model.layers.0.mlp.gate.weight"], (16, 1024))
        self.assertNotIn("model.layers.0.mlp.gate_proj.weight", shapes)


class Run(Folder):
    """The whole, with processes that only say what they would."""

    def run_with(self, said: dict[str, list[dict] | str], *words: str) -> tuple[bool, list[dict], list[str]]:
        asked, results = [], []

        def execute(run, limit_s, keep, log):
            name = run.arguments[run.arguments.index("--child") + 1]
            asked.append(name)
            log.write_text("what it complained of")
            flow, mode = name.split("-")
            lines = said.get(name, [{"event": "flow", "level": 2, "steps": 1, "tokens_equal": 1, "ok": True}])
            if isinstance(lines, str):
                return {"failed": lines, "seconds": 1.0}
            for line in lines:
                keep({"run": name, "line": {"flow": flow, "mode": mode, **line}})
            bad = any(not line.get("ok", True) or line["event"] == "failed" for line in lines)
            return {"failed": "exit code 1" if bad else None, "seconds": 1.0}

        options = rl.parsed([*words, "--flows", "trl", "--levels", "2"])
        with (
            mock.patch.object(rl, "execute", execute),
            mock.patch.dict(common._fields),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            lines = printed(lambda: results.append(rl.run(options, self.folder, list(words))))
        return results[0], lines, asked

    def test_each_allocator_has_a_process_and_both_are_compared(self):
        good, lines, asked = self.run_with({})
        self.assertTrue(good)
        self.assertEqual(asked, ["trl-none", "trl-poorwill", "trl-cumem"])
        [beside] = [line for line in lines if line["event"] == "beside"]
        self.assertEqual((beside["flow"], beside["level"]), ("trl", 2))
        self.assertEqual(beside["poorwill"], {"steps": 1, "tokens_equal": 1, "ok": True})

    def test_limits_of_vllms_own_are_reported_and_no_failure(self):
        failed = [{"event": "failed", "error": "AssertionError: expandable segments"}]
        good, lines, _ = self.run_with({"trl-cumem": failed})
        self.assertTrue(good)
        self.assertIn("expandable segments", lines[-1]["cumem"]["failed"])
        good, lines, _ = self.run_with({"trl-poorwill": failed})
        self.assertFalse(good)
        self.assertIn("expandable segments", lines[-1]["poorwill"]["failed"])

    def test_a_process_that_ends_without_a_word(self):
        good, lines, _ = self.run_with({"trl-poorwill": "still running after 120 s"})
        self.assertFalse(good)
        self.assertEqual(lines[-1]["poorwill"], {"ok": False, "failed": "still running after 120 s"})

    def test_nothing_is_compared_with_nothing(self):
        good, _, asked = self.run_with({"trl-none": [{"event": "reference", "ok": False}]})
        self.assertEqual((good, asked), (False, ["trl-none"]))


class Buckets(unittest.TestCase):
    def test_tensors_lie_beside_each_other_until_the_buffer_is_full(self):
        sizes = {"a": 40, "b": 16, "c": 8, "d": 100, "e": 64, "f": 1}
        plan = rl_worker.buckets(sizes, 64)
        self.assertEqual(plan, [{"a": 0, "b": 48}, {"c": 0}, {"d": None}, {"e": 0}, {"f": 0}])
        self.assertEqual(rl_worker.buckets({}, 64), [])
        self.assertEqual(rl_worker.buckets({"a": 65}, 64), [{"a": None}])
        for bucket in rl_worker.buckets(dict.fromkeys(map(str, range(99)), 7), 64):
            self.assertTrue(all(begin % rl_worker.ALIGNED_BYTES == 0 for begin in bucket.values()))
            self.assertLessEqual(max(bucket.values()) + 7, 64)

    def test_what_is_sent_arrives(self):
        sent = [("a", b"1234"), ("b", b"567"), ("large", bytes(range(100))), ("c", b"8")]
        received: list[tuple[str, bytes]] = []
        with pretended():
            weights = [(name, Memory(bytearray(raw))) for name, raw in sent]
            sender = threading.Thread(target=rl_worker.send, args=("ipc://x", weights, 32), daemon=True)
            sender.start()
            for bucket in rl_worker._received("ipc://x", 0):
                received += [(name, bytes(tensor.raw)) for name, tensor in bucket]
            sender.join(60)
            self.assertFalse(sender.is_alive())
        self.assertEqual(received, sent)


class Memory:
    """A tensor of bytes."""

    dtype = types.SimpleNamespace(itemsize=1)

    def __init__(self, raw):
        self.raw = memoryview(raw)

    @property
    def nbytes(self):
        return len(self.raw)

    @property
    def shape(self):
        return types.SimpleNamespace(numel=lambda: len(self.raw))

    def __getitem__(self, part):
        return Memory(self.raw[part])

    def view(self, _):
        return self

    def copy_(self, other):
        self.raw[:] = other.raw


def pretended() -> contextlib.AbstractContextManager:
    """PyTorch and ZeroMQ, within this process."""
    ends: dict[str, tuple[queue.Queue, queue.Queue]] = {}

    class Socket:
        """Asks and answers in turns, as its kind does."""

        def __init__(self, kind):
            self.may_send = kind == "REQ"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def bind(self, address):
            self.out, self.into = ends.setdefault(address, (queue.Queue(), queue.Queue()))

        def connect(self, address):
            self.into, self.out = ends.setdefault(address, (queue.Queue(), queue.Queue()))

        def send_pyobj(self, message):
            assert self.may_send
            self.may_send = False
            self.out.put(message)

        def recv_pyobj(self):
            assert not self.may_send
            self.may_send = True
            return self.into.get(timeout=60)

        send, recv = send_pyobj, recv_pyobj

    context = types.SimpleNamespace(socket=Socket)
    zmq = types.ModuleType("zmq")
    zmq.Context = types.SimpleNamespace(instance=lambda: context)
    zmq.REQ, zmq.REP = "REQ", "REP"

    def reduce_tensor(tensor):
        return (lambda *arguments: arguments[0]), (tensor, *range(9))

    reductions = types.ModuleType("torch.multiprocessing.reductions")
    reductions.reduce_tensor = reduce_tensor
    torch = types.ModuleType("torch")
    torch.uint8 = "uint8"
    torch.empty = lambda size, dtype, device: Memory(bytearray(size))
    torch.cuda = types.SimpleNamespace(synchronize=lambda: None)
    names = {"zmq": zmq, "torch": torch, "torch.multiprocessing.reductions": reductions}
    names["torch.multiprocessing"] = types.ModuleType("torch.multiprocessing")
    return mock.patch.dict(sys.modules, names)


if __name__ == "__main__":
    unittest.main()
