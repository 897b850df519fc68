"""vLLM finds the plugin in a fresh interpreter, and finding it costs nothing that others would notice."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from vllm_sources import VARIABLE, sources_of
from vllm_sources.versions import held

GROUP = "vllm.general_plugins"


def ran(script: str, *arguments: str) -> Any:
    """What a script in a process of its own prints last, which is one JSON value."""
    scrubbed = ("POORWILL_", "VLLM_")
    kept = {n: value for n, value in os.environ.items() if not n.startswith(scrubbed) or n == VARIABLE}
    command = [sys.executable, "-B", "-c", script, *arguments]
    done = subprocess.run(command, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_registered_once() -> None:
    [plugin] = entry_points(group=GROUP, name="poorwill")
    assert plugin.value == "poorwill.vllm:register"


LOADED = """
import json, sys, types
from importlib.metadata import entry_points
from pathlib import Path
version = types.ModuleType("vllm.version")
version.__version__ = "0.20.2"
[plugin] = entry_points(group="vllm.general_plugins", name="poorwill")
register = plugin.load()
roots = sorted({name.split(".")[0] for name in sys.modules})
if "call" in sys.argv:
    # vLLM is what calls it, so that there is one.
    sys.modules.update({"vllm": types.ModuleType("vllm"), "vllm.version": version})
    register()
    register()
    roots = sorted({name.split(".")[0] for name in sys.modules} - {"vllm"})
mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
drivers = sorted(path for path in mapped if "libcuda" in path or "libnvidia" in path)
print(json.dumps([roots, drivers, callable(register)]))
"""


@pytest.mark.parametrize("what", ["load", "call"])
def test_it_imports_no_engine_and_opens_no_gpu(what: str) -> None:
    roots, drivers, is_callable = ran(LOADED, what)
    assert is_callable
    assert "poorwill" in roots
    assert not {"torch", "vllm", "numpy", "triton", "prometheus_client"} & set(roots)
    assert drivers == []


# vLLM's own loader of plugins, from its sources.
BY_VLLM = """
import json, os, sys
[_, tests, version, allowed] = sys.argv
sys.path.insert(0, tests)
from fake_vllm.loader import Loader
loader = Loader(version, ["vllm.plugins"], ["poorwill"])
loader.give("vllm.envs", VLLM_PLUGINS=json.loads(allowed))
sys.modules["vllm.version"] = loader.module("vllm.version")

import poorwill.vllm
calls = []
real = poorwill.vllm.register
def counted():
    calls.append(os.getpid())
    return real()
poorwill.vllm.register = counted
for _ in range(2):
    loader.module("vllm.plugins").load_general_plugins()
print(json.dumps([len(calls), "torch" in sys.modules]))
"""


@pytest.mark.parametrize("version", held())
@pytest.mark.parametrize(("allowed", "times"), [(None, 1), (["poorwill"], 1), (["another"], 0)])
def test_vllms_own_loader_finds_and_calls_it(version: str, allowed: list[str] | None, times: int) -> None:
    sources_of(version)
    assert ran(BY_VLLM, str(Path(__file__).parent), version, json.dumps(allowed)) == [times, False]
