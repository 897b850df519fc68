"""Whether an installed poorwill is whole, is found by vLLM and SGLang, and does without PyTorch and without a GPU.

`cargo xtask dist` runs this in a fresh environment; the argument is the version that should be there.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

# What a wheel holds beside its libraries: all of this folder.
SOURCES = Path(__file__).parents[3] / "crates/python/python/poorwill"
LIBRARIES = ["_native.abi3.so", "compat/torch_memory_saver_hook_mode_preload.abi3.so"]
# Python reads the second from 3.15 on, and the first before.
START_FILES = ["poorwill.pth", "poorwill.start"]
LICENSES = ["LICENSE-APACHE", "LICENSE-MIT", "LICENSE-THIRD-PARTY"]
PLUGIN = ("vllm.general_plugins", "poorwill.vllm:register")


def main(version: str) -> None:
    expect(importlib.util.find_spec("torch") is None, "PyTorch is here, so this would show nothing")
    import poorwill

    folder = Path(poorwill.__file__).parent
    expect(Path(sys.prefix) in folder.parents, f"it comes from {folder}")
    versions = (poorwill.__version__, importlib.metadata.version("poorwill"))
    expect(versions == (version, version), f"its versions are {versions}")

    files = {str(path) for path in importlib.metadata.files("poorwill") or []}
    ours = {path for path in files if path.startswith("poorwill/") and "__pycache__" not in path}
    sources = {path.relative_to(SOURCES) for path in SOURCES.rglob("*") if is_source(path)}
    wanted = {f"poorwill/{name}" for name in (*sources, *LIBRARIES)}
    expect(ours == wanted, f"it lacks {sorted(wanted - ours)} and holds {sorted(ours - wanted)}")
    expect(files.issuperset(START_FILES), f"of {START_FILES} it lacks {sorted(set(START_FILES) - files)}")
    names = {Path(path).name for path in files if "/licenses/" in path}
    expect(names == set(LICENSES), f"its licences are {names}")

    expect(poorwill.parse_bytes(" 1.5 GiB ") == 3 << 29, "it reads sizes wrongly")
    try:
        poorwill.parse_bytes("12q")
    except ValueError as error:
        expect("12q" in str(error), f"it says of a wrong size: {error}")
    else:
        expect(False, "it takes what is no size")

    group, value = PLUGIN
    plugins = list(importlib.metadata.entry_points(group=group, name="poorwill"))
    expect([plugin.value for plugin in plugins] == [value], f"vLLM's loader would find {plugins}")
    # As every process of vLLM's does; what it hooks is not imported here.
    plugins[0].load()()
    found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="poorwill")
    expect(len(found) == 1 and callable(next(iter(found)).load()), f"SGLang's loader would find {found}")

    # Both are one program; it ends in the place of the interpreter.
    for command in ([str(Path(sys.prefix) / "bin/poorwill")], [sys.executable, "-I", "-m", "poorwill"]):
        for words, wanted in ((["--version"], (0, f"poorwill {version}\n")), (["replay"], (2, ""))):
            ran = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
            expect((ran.returncode, ran.stdout) == wanted, f"{[*command, *words]} gives {ran}")
    from poorwill.compat.torch_memory_saver import configure_subprocess

    with configure_subprocess():
        expect("hook_mode_preload" in os.environ["LD_PRELOAD"], "processes do not get the library to preload")

    opened = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    gpu = [path for path in opened if "libcuda" in path or "/dev/nvidia" in path]
    expect(not gpu, f"importing it opens {gpu}")


def is_source(path: Path) -> bool:
    return path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts


def expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        sys.exit(f"poorwill, as it was installed: {otherwise}")


if __name__ == "__main__":
    main(sys.argv[1])
