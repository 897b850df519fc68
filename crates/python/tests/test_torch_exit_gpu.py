"""How processes end that have pools, on a GPU: in any order, without a crash and without a word."""

import os
import subprocess
import sys
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch finds no GPU", allow_module_level=True)

BEGIN = """
import gc, os, sys, threading
import torch
import poorwill

MIB = 1 << 20
arena = poorwill.arena("cuda:0", limit="2GiB")


def filled(value, nbytes=32 * MIB):
    return torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")


def captured():
    x = filled(1, MIB)
    graph, pool = torch.cuda.CUDAGraph(), poorwill.graph_pool()
    with torch.cuda.graph(graph, pool=pool):
        y = x + 1
    return x, y, graph, pool


"""

ENDINGS = {
    "tensors alive": "with poorwill.pool():\n    kept = filled(1)",
    "asleep": "with poorwill.pool():\n    kept = filled(1)\npoorwill.sleep()",
    "prepared": "with poorwill.pool():\n    kept = filled(1, 1 << 30)\npreparing = poorwill.prepare_sleep()",
    "graphs alive": "kept = captured()\nkept[2].replay()",
    "graphs asleep": "kept = captured()\npoorwill.sleep()",
    "pools alive": "pool = poorwill.pool()\nwith pool:\n    kept = filled(1)\ncycle = [pool]\ncycle.append(cycle)",
    "inside a scope": "pool = poorwill.pool()\npool.__enter__()\nkept = filled(1)",
    "an exception in a scope": "try:\n    with poorwill.pool():\n        kept = filled(1)\n        raise KeyError\n"
    "except KeyError:\n    pass",
    "exit in a scope": "with poorwill.pool():\n    kept = filled(1)\n    sys.exit(0)",
    "arena closed first": "with poorwill.pool():\n    kept = filled(1)\ntorch.cuda.synchronize()\narena.close()",
    "arena closed, then freed": "with poorwill.pool():\n    kept = filled(1)\ntorch.cuda.synchronize()\narena.close()\n"
    "del kept\ngc.collect()\ntorch.cuda.empty_cache()",
    "a thread at work": "def work():\n    with poorwill.pool('t'):\n        for n in range(10_000):\n"
    "            filled(n % 256, 3 * MIB)\nthreading.Thread(target=work, daemon=True).start()",
    "generations in a cycle": "class Box: pass\nbox = Box()\nbox.box = box\nwith poorwill.pool():\n"
    "    box.kept = filled(1)\n    gone = filled(2, 256 * MIB)\n    del gone\n    box.more = filled(3)\ndel box",
    "a fork": "with poorwill.pool():\n    kept = filled(1)\npid = os.fork()\nif pid == 0:\n    del arena\n"
    "    gc.collect()\n    sys.exit(0)\nassert os.waitpid(pid, 0)[1] == 0",
    "a fork that calls": "with poorwill.pool():\n    kept = filled(1)\npid = os.fork()\nif pid == 0:\n    try:\n"
    "        arena.sleep()\n    except poorwill.PoorwillError as error:\n"
    "        os._exit(0 if 'fork' in str(error) else 1)\n    os._exit(2)\nassert os.waitpid(pid, 0)[1] == 0\n"
    "poorwill.sleep()\npoorwill.wake()\nassert bool((kept == 1).all())",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_process_ends_quietly(ending: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", BEGIN + ending],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_pools_work_with_expandable_segments_elsewhere(name: str) -> None:
    script = """
with poorwill.pool():
    kept = filled(7)
slept = poorwill.sleep()
assert slept.released_bytes >= kept.numel(), slept
poorwill.wake()
assert bool((kept == 7).all())
"""
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + script],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, name: "expandable_segments:True"},
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
