"""Compiles a kernel in CUDA C to PTX, by NVRTC, and writes the PTX to standard output. No GPU is needed.

`cargo xtask ptx` runs this; the arguments are the kernel's source and the headers that it includes. NVRTC
writes the version of PTX that its own CUDA has. That line is replaced by the version of the oldest driver
that the project supports. `ptxas`, which refuses what is newer than that line, has to assemble the result.
"""

import ctypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nvidia.cuda_nvcc
import nvidia.cuda_nvrtc

NVRTC = Path(nvidia.cuda_nvrtc.__path__[0]) / "lib/libnvrtc.so.11.2"
PTXAS = Path(nvidia.cuda_nvcc.__path__[0]) / "bin/ptxas"

OPTIONS = [b"--gpu-architecture=compute_70", b"--std=c++17"]
# Of CUDA 10.2, which driver 440.33 came with.
PTX_VERSION = "6.5"
ARCHITECTURES = ["sm_70", "sm_80", "sm_90"]


def main(source: str, headers: list[str]) -> None:
    ptx = plain(compiled(Path(source), [Path(header) for header in headers]))
    for architecture in ARCHITECTURES:
        assemble(ptx, architecture)
    sys.stdout.write(ptx)


def compiled(source: Path, headers: list[Path]) -> str:
    """What NVRTC makes of it. Ends with the compiler's messages where that fails."""
    nvrtc = ctypes.CDLL(str(NVRTC))
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*[header.read_bytes() for header in headers])
    names = (ctypes.c_char_p * len(headers))(*[header.name.encode() for header in headers])
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    expect(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
        ),
        "nvrtcCreateProgram",
    )
    outcome = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    log = text(nvrtc, program, "ProgramLog")
    if log.strip():
        sys.exit(f"{source}:\n{log}")
    expect(outcome, "nvrtcCompileProgram")
    return text(nvrtc, program, "PTX")


def text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, name: str) -> str:
    size = ctypes.c_size_t()
    expect(nvrtc[f"nvrtcGet{name}Size"](program, ctypes.byref(size)), f"the size of {name}")
    buffer = ctypes.create_string_buffer(size.value)
    expect(nvrtc[f"nvrtcGet{name}"](program, buffer), name)
    return buffer.value.decode()


def expect(outcome: int, what: str) -> None:
    if outcome != 0:
        sys.exit(f"{what}: NVRTC returned {outcome}")


def plain(ptx: str) -> str:
    """Without comments, and with the older version."""
    lines = [line.split("//")[0].rstrip() for line in ptx.splitlines()]
    code, versions = re.subn(
        r"^\.version \S+$", f".version {PTX_VERSION}", "\n".join(lines), flags=re.MULTILINE
    )
    if versions != 1:
        sys.exit(f"the PTX has {versions} lines with a version, not one")
    return re.sub(r"\n\n+", "\n\n", code.strip()) + "\n"


def assemble(ptx: str, architecture: str) -> None:
    """Prints registers and spills, to be compared."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [PTXAS, "-v", "-arch", architecture, "-o", path.with_suffix(".cubin"), path]
        assembled = subprocess.run(command, capture_output=True, text=True)
    if assembled.returncode != 0:
        sys.exit(f"ptxas for {architecture}: {assembled.stderr}")
    for line in assembled.stderr.splitlines():
        if "Used" in line or "spill" in line or "Compiling" in line:
            print(line.replace("ptxas info    : ", "").strip(), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
