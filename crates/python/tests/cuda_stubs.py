"""Lets PyTorch's build for CUDA start where CUDA is not: `python cuda_stubs.py`, with PyTorch on the path.

The index has PyTorch for x86-64 with CUDA only, which asks for more than 2 GB of NVIDIA's libraries. Of these
the CUDA runtime and CUPTI have to be installed. The others are never called without a GPU: libraries of their
names take their places beside PyTorch's own, in which each function ends the process. Needs `cc`, `readelf`.
"""

import importlib.util
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# The libraries, and the version of their functions: of most it is the library's name.
VERSIONS = {
    **{name: name for name in ("libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libcufft.so.12")},
    **{name: name for name in ("libcusolver.so.12", "libcusparse.so.12", "libnvrtc.so.13")},
    "libnvshmem_host.so.3": "NVSHMEM",
    # What their functions begin with, as they have no version.
    **{"libcufile.so.0": "cuFile", "libcurand.so.10": "curand"},
    **{"libcusparseLt.so.0": "cusparseLt", "libnccl.so.2": "nccl"},
}


def wanted(folder: Path) -> dict[str, list[str]]:
    """The functions that PyTorch's libraries expect of others, by version."""
    command = ["readelf", "--dyn-syms", "--wide", *map(str, folder.glob("libtorch*.so"))]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = defaultdict(set)
    for line in said.splitlines():
        words = line.split()
        if len(words) > 7 and words[6] == "UND":
            name, _, version = words[7].partition("@")
            for key in [version] if version else filter(name.startswith, VERSIONS.values()):
                found[key].add(name)
    return {version: sorted(found[version]) for version in VERSIONS.values()}


def make(library: Path, version: str, functions: list[str]) -> None:
    source = "".join(f"void {function}(void) {{ __builtin_trap(); }}\n" for function in functions)
    script = library.with_suffix(".map")
    script.write_text(f"{version} {{ global: *; }};\n")
    linked = f"-Wl,-soname,{library.name},--version-script,{script}"
    command = ["cc", "-shared", "-nostdlib", "-fno-builtin", "-x", "c", "-", linked, "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    script.unlink()


if __name__ == "__main__":
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("cuda_stubs.py: there is no PyTorch here")
    folder = Path(spec.origin).parent / "lib"
    functions = wanted(folder)
    for name, version in VERSIONS.items():
        make(folder / name, version, functions[version])
    subprocess.run([sys.executable, "-c", "import torch; torch.ones(2, 2) @ torch.ones(2, 2)"], check=True)
