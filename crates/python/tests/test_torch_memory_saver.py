"""Our module under torch_memory_saver's name, and all memory of a process, by a library played here."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from helpers import run

HERE = Path(__file__).resolve().parent
INSTALLED = HERE.parent / "data" / "purelib"
SWITCH = "POORWILL_TORCH_MEMORY_SAVER"


def said(script: str, folder: Path, by: str = "poorwill.pth", **environment: str) -> tuple[Any, str]:
    """The JSON value that a script prints, and its errors. Python starts as with our wheel installed."""
    shutil.copy(INSTALLED / by, folder)
    if by == "poorwill.start" and sys.version_info < (3, 15):
        # As Python 3.15 does it (PEP 829).
        lines = [line.strip() for line in (folder / by).read_text("utf-8-sig").splitlines()]
        entries = [line for line in lines if line and not line.startswith("#")]
        start = f"import pkgutil\nfor entry in {entries!r}: pkgutil.resolve_name(entry)()\n{script}"
    else:
        # As the installation's own folder is.
        start = f"import site; site.addsitedir({str(folder)!r})\n{script}"
    kept = {name: value for name, value in os.environ.items() if name != SWITCH}
    done = subprocess.run(
        [sys.executable, "-B", "-c", start], env={**kept, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


WHO = """
import json, sys
from pathlib import Path
sys.path.insert(0, {other!r})
import torch_memory_saver
from torch_memory_saver import utils
print(json.dumps([
    torch_memory_saver.__name__,
    utils.__name__,
    str(Path(torch_memory_saver.__file__).parents[1]),
    "torch" in sys.modules,
]))
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with a package of that name."""
    folder = tmp_path / "other"
    package = folder / "torch_memory_saver"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "utils.py").write_text("")
    return folder


BY = pytest.mark.parametrize("by", ["poorwill.pth", "poorwill.start"])
OFF = [None, "", " ", "0", " 0 ", "no", "off", "False"]


@BY
@pytest.mark.parametrize("value", ["1", "true", "Yes", " on "])
def test_it_stands_in_where_the_switch_is_on(tmp_path: Path, other: Path, value: str, by: str) -> None:
    environment = {SWITCH: value}
    (name, utils, folder, has_torch), errors = said(WHO.format(other=str(other)), tmp_path, by, **environment)
    assert name == "poorwill.compat.torch_memory_saver"
    assert utils == "poorwill.compat.torch_memory_saver.utils"
    # Code that looks beside the package for the library finds ours.
    assert folder.endswith("poorwill/compat")
    assert not has_torch
    assert errors == ""


@BY
@pytest.mark.parametrize("value", OFF)
def test_it_does_not_where_it_is_off(tmp_path: Path, other: Path, value: str | None, by: str) -> None:
    environment = {} if value is None else {SWITCH: value}
    (name, utils, folder, _), errors = said(WHO.format(other=str(other)), tmp_path, by, **environment)
    assert (name, utils) == ("torch_memory_saver", "torch_memory_saver.utils")
    assert folder == str(other)
    assert errors == ""


OURS = """
import json, sys
ours = sorted(name for name in sys.modules if name.partition(".")[0] == "poorwill")
print(json.dumps([ours, len(sys.meta_path)]))
"""
HOOK = ["poorwill", "poorwill.compat", "poorwill.compat._import_hook"]


@pytest.mark.parametrize("value", OFF)
def test_a_process_that_does_without_it_imports_nothing(tmp_path: Path, value: str | None) -> None:
    environment = {} if value is None else {SWITCH: value}
    (by_line, finders), _ = said(OURS, tmp_path, **environment)
    assert by_line == []
    # An entry point is a function of a module, and that is all.
    (by_entry, still), _ = said(OURS, tmp_path, "poorwill.start", **environment)
    assert by_entry == HOOK
    assert finders == still


@BY
@pytest.mark.parametrize("value", ["1", "maybe"])
def test_the_rest_is_imported_with_the_name(tmp_path: Path, value: str, by: str) -> None:
    assert said(OURS, tmp_path, by, **{SWITCH: value})[0][0] == HOOK


IMPORTED = """
import json, sys
sys.path.insert(0, {other!r})
reported = []
for module in ("torch_memory_saver", "torch_memory_saver.utils", "torch_memory_saver"):
    try:
        __import__(module)
    except ImportError as error:
        reported.append([type(error).__name__, str(error), error.name])
print(json.dumps([reported, "torch_memory_saver" in sys.modules]))
"""


@BY
def test_an_import_fails_for_a_switch_that_cannot_be_read(tmp_path: Path, other: Path, by: str) -> None:
    (reported, was_imported), errors = said(
        IMPORTED.format(other=str(other)), tmp_path, by, **{SWITCH: "maybe"}
    )
    assert [[kind, name] for kind, _, name in reported] == [["StandInError", "torch_memory_saver"]] * 3
    for _, message, _ in reported:
        assert f"{SWITCH}='maybe' is neither on nor off" in message
        assert "set it to 1 for Poorwill's, or to 0" in message
    assert not was_imported
    # Other processes go on without a word.
    assert errors == ""


WITH_TORCH = """
import json, sys
sys.path.insert(0, {folder!r})
try:
    import torch_memory_saver
except ImportError as error:
    print(json.dumps([type(error).__name__, str(error), "torch_memory_saver" in sys.modules]))
else:
    print(json.dumps(torch_memory_saver.__name__))
"""


def with_torch(folder: Path, version: str) -> Any:
    """What a process says of the import where this PyTorch is installed, which no one imports."""
    info = folder / "metadata" / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return said(WITH_TORCH.format(folder=str(info.parent)), folder, **{SWITCH: "1"})[0]


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0+cu128"])
def test_an_older_pytorch_is_refused_by_the_import(tmp_path: Path, version: str) -> None:
    """AReaL 1.0 pins one, and does without torch_memory_saver only where its import fails."""
    kind, message, is_there = with_torch(tmp_path, version)
    assert kind == "UnsupportedTorchError"
    assert message == (
        f"PyTorch {version} is too old for poorwill's pools: install torch 2.11 or later, "
        f"or unset {SWITCH} to have torch_memory_saver's own package"
    )
    assert not is_there


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.15.0", "3.0.0a0+git1234"])
def test_a_newer_one_is_not(tmp_path: Path, version: str) -> None:
    assert with_torch(tmp_path, version) == "poorwill.compat.torch_memory_saver"


SCRIPTS = {
    "too late": """
import torch_memory_saver
from poorwill.compat import stand_in
try:
    stand_in()
except ImportError as error:
    print(json.dumps(str(error)))
""",
    "and back": """
from poorwill.compat import stand_in
from poorwill.compat._import_hook import step_back
stand_in()
stand_in()
import torch_memory_saver as first
step_back()
import torch_memory_saver as second
print(json.dumps([first.__name__, second.__name__, first.__spec__.name]))
""",
}


def test_it_cannot_stand_in_for_what_was_imported(tmp_path: Path, other: Path) -> None:
    script = f"import json, sys\nsys.path.insert(0, {str(other)!r})\n{SCRIPTS['too late']}"
    message, _ = said(script, tmp_path)
    assert "was imported from" in message
    assert f"set {SWITCH}=1" in message


def test_it_steps_back(tmp_path: Path, other: Path) -> None:
    script = f"import json, sys\nsys.path.insert(0, {str(other)!r})\n{SCRIPTS['and back']}"
    names, _ = said(script, tmp_path)
    ours = "poorwill.compat.torch_memory_saver"
    assert names == [ours, "torch_memory_saver", ours]


def test_sglang_finds_its_plugin() -> None:
    [plugin] = entry_points(group="sglang.srt.plugins", name="poorwill")
    assert plugin.value == "poorwill.sglang:register"


PLUGIN = """
import json, sys
sys.path.insert(0, {tests!r})
import fake_sglang
adapter = fake_sglang.install()
from importlib.metadata import entry_points
[plugin] = entry_points(group="sglang.srt.plugins", name="poorwill")
assert callable(plugin.load())
fake_sglang.load_plugins()
noop = adapter.TorchMemorySaverAdapter.create(enable=False)
print(json.dumps([noop.enabled, sorted(name for name in sys.modules if name in ("torch", "numpy", "vllm"))]))
"""


def test_the_plugin_imports_no_pytorch_until_memory_is_to_be_saved(tmp_path: Path) -> None:
    assert said(PLUGIN.format(tests=str(HERE)), tmp_path)[0] == [False, []]


def test_a_mode_is_offered_where_modes_are_taken(tmp_path: Path, other: Path) -> None:
    (other / "torch_memory_saver" / "__init__.py").write_text(
        "modes = {}\n"
        "def register_hook_mode(name, factory, *, uses_preload):\n"
        "    if name in modes:\n"
        "        raise ValueError(f'the mode {name} is there')\n"
        "    modes[name] = (factory, uses_preload)\n"
    )
    script = f"""
import json, sys
sys.path[:0] = [{str(HERE)!r}, {str(other)!r}]
import fake_torch
fake_torch.install(fake_torch.machine.Paper())
import torch_memory_saver
from poorwill.sglang import _hooks
offered = [_hooks.offer_hook_mode() for _ in range(2)]
[(name, (factory, uses_preload))] = torch_memory_saver.modes.items()
print(json.dumps([offered, name, factory.__name__, uses_preload]))
"""
    assert said(script, tmp_path)[0] == [[True, False], "poorwill", "Pools", False]


# All memory of a process. The library is played: `crates/preload` tests the real one.

PROCESS = """
import ctypes
import fake_torch
world = fake_torch.install(fake_torch.Driver())
import torch
from poorwill.compat.torch_memory_saver import SaverError, TorchMemorySaver, _preload

class Played:
    def __init__(self):
        self.flags = dict(current_tag=b"default", interesting_region=True, enable_cpu_backup=True,
                          cpu_backup_backend=b"pinned", enable_disk_backup=False, retain_cpu_backup=False)
        self.calls, self.error, self.code, self.stored = [], None, 0, None
        for name in self.flags:
            setattr(self, f"tms_get_{name}", lambda name=name: self.flags[name])
            setattr(self, f"tms_set_{name}", lambda value, name=name: self.flags.update({name: value}))
        def call(name, result=lambda *_: self.code):
            def function(*given):
                self.calls.append((name, *given))
                return result(*given)
            return function
        for name in ("tms_pause", "tms_resume", "set_memory_margin_bytes", "tms_set_disk_backup_dir"):
            setattr(self, name, call(name))
        self.poorwill_tms_last_error = lambda: self.error
        self.poorwill_tms_set_unused = call("unused", lambda pairs, count: self.keep(pairs, count))
        text = b'{"pause": [], "resume": [{"device": 0, "wake": {"copied_bytes": 7}}]}'
        def report(buffer, size):
            if buffer is not None:
                buffer.value = text[: size - 1]
            return len(text)
        self.poorwill_tms_report = report
        self.tms_get_cpu_backup_pointer = lambda address, size: self.stored
    def keep(self, pairs, count):
        self.unused = [(pairs[2 * n], pairs[2 * n + 1]) for n in range(count)]
        return self.code
    def __setattr__(self, name, value):
        if callable(value) and not isinstance(value, type):
            function = value
            value = lambda *given: function(*given)
        object.__setattr__(self, name, value)

played = Played()
_preload.loaded = lambda: played
import os
os.environ["TMS_INIT_ENABLE"] = "1"
saver = TorchMemorySaver()
MIB = 1 << 20
"""

CASES = {
    "what lives is not unused, and what is cached is": """
keep = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
gone = torch.empty(12 * MIB, dtype=torch.uint8, device="cuda")
small = torch.empty(1000, dtype=torch.uint8, device="cuda")
with saver.region("grads", enable_cpu_backup=False):
    assert played.flags["current_tag"] == b"grads" and not played.flags["enable_cpu_backup"]
    grads = torch.empty(6 * MIB, dtype=torch.uint8, device="cuda")
assert played.flags["current_tag"] == b"default" and played.flags["enable_cpu_backup"]
start = gone.data_ptr()
del gone
saver.pause()
unused = played.unused
live = [(t.data_ptr(), t.nbytes) for t in (keep, small, grads)]
assert all(a + n <= b or b + m <= a for a, n in unused for b, m in live), (unused, live)
assert any(a <= start and start + 12 * MIB <= a + n for a, n in unused)
reserved = torch.cuda.memory_reserved()
assert sum(n for _, n in unused) + torch.cuda.memory_allocated() == reserved
assert [call[0] for call in played.calls] == ["unused", "tms_pause"]
assert played.calls[-1] == ("tms_pause", None)
saver.resume("weights")
assert played.calls[-1] == ("tms_resume", b"weights")
assert saver.last_report() == [{"copied_bytes": 7}]
""",
    "free parts of graphs' pools are left alone": """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    temporary = torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
    start = temporary.data_ptr()
    del temporary
saver.pause()
assert not any(a < start + 24 * MIB and start < a + n for a, n in played.unused), played.unused
""",
    "expandable segments are refused": """
keep = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
from poorwill.compat.torch_memory_saver import _process
snapshot = _process.snapshot_segments
_process.snapshot_segments = lambda: [{**segment, "is_expandable": True} for segment in snapshot()]
try:
    saver.pause()
except SaverError as error:
    assert "expandable_segments:True" in str(error), error
else:
    raise AssertionError("it was not refused")
assert not played.calls
""",
    "errors are raised with the library's words": """
played.code, played.error = 2, b"cannot pause: no host memory"
for call in (saver.pause, saver.resume):
    try:
        call()
    except SaverError as error:
        assert str(error) == "cannot pause: no host memory"
    else:
        raise AssertionError("no error")
try:
    saver.set_disk_backup_dir(os.environ["TMPDIR"])
except SaverError:
    pass
else:
    raise AssertionError("no error")
""",
    "backups are read where the library has them": """
tensor = torch.empty(1000, dtype=torch.uint8, device="cuda")
assert saver.get_cpu_backup(tensor) is None
stored = (ctypes.c_uint8 * 1000)(*([5] * 1000))
played.stored = ctypes.addressof(stored)
copy, view = saver.get_cpu_backup(tensor), saver.get_cpu_backup(tensor, zero_copy=True)
stored[0] = 6
assert copy.numpy_bytes() == bytes([5] * 1000)
assert view.numpy_bytes() == bytes([6] + [5] * 999)
saver.retain_cpu_backup = True
assert saver.retain_cpu_backup
saver.memory_margin_bytes = 7
assert played.calls[-1] == ("set_memory_margin_bytes", 7)
""",
    "disable leaves for a while": """
with saver.disable():
    assert not played.flags["interesting_region"]
    assert saver._impl._binary_wrapper.cdll is played
    outside = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    try:
        with saver.disable():
            raise AssertionError("entered")
    except AssertionError as error:
        assert "enter region" in str(error), error
assert played.flags["interesting_region"]
del outside
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
""",
    "a mode of regions never takes the process": """
saver.hook_mode = "torch"
saver._ensure_initialized()
assert type(saver._impl).__name__ == "Pools"
""",
}


@pytest.mark.parametrize("case", CASES)
def test_a_whole_process(environment: dict[str, str], tmp_path: Path, case: str) -> None:
    run(f"{PROCESS}\n{CASES[case]}\nassert world.terminations == []\n", **environment, TMPDIR=str(tmp_path))


def test_a_missing_library_is_named_with_what_builds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from poorwill.compat.torch_memory_saver import SaverError, configure_subprocess, utils

    monkeypatch.setattr(utils, "__file__", str(tmp_path / "compat/torch_memory_saver/utils.py"))
    with pytest.raises(SaverError, match=r"pip install \./crates/python") as raised, configure_subprocess():
        raise AssertionError("it has no library")
    # It was said of wheels, too.
    assert "from a wheel" not in str(raised.value)
    assert str(tmp_path / "compat") in str(raised.value)
