"""The build backend: maturin, with two files that it does not build.

A wheel of maturin has one library. Cargo builds the `poorwill` command and the library to preload before it.
Maturin packs them from this folder, where they lie only meanwhile. `cargo xtask dist` does the same by zig.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import maturin
from maturin import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, Any] | None

# Where maturin packs them from, below the folder of pyproject.toml. It installs the first as a program.
COMMAND = Path("data/scripts/poorwill")
PRELOAD = Path("python/poorwill/compat/torch_memory_saver_hook_mode_preload.abi3.so")

# One build of both.
BUILD = ["build", "--package", "poorwill-cli", "--bin", "poorwill"]
BUILD += ["--package", "poorwill-preload", "--lib", "--message-format", "json-render-diagnostics"]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    with packed(built(config_settings), [COMMAND, PRELOAD]):
        return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """The library to preload stays: such an installation reads the package from the tree."""
    with packed(built(config_settings), [COMMAND]):
        return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def built(config_settings: Settings) -> dict[Path, Path]:
    """Builds both, and returns the file of each."""
    cargo = ["cargo", *BUILD, *options(maturin.get_maturin_pep517_args(config_settings))]
    print(f"Running `{' '.join(cargo)}`", flush=True)
    ran = subprocess.run(cargo, stdout=subprocess.PIPE, env=maturin._get_env(), check=False)
    if ran.returncode != 0:
        sys.exit(f"poorwill: `{' '.join(cargo)}` failed with status {ran.returncode}; its messages are above")
    files = artifacts(ran.stdout.decode())
    missing = [path.name for path in (COMMAND, PRELOAD) if path not in files]
    if missing:
        made = f"`{' '.join(cargo)}` succeeded without {' and '.join(missing)}"
        sys.exit(f"poorwill: {made}; Poorwill is for Linux, so build it there or for it")
    return files


def options(maturin_args: list[str]) -> list[str]:
    """Those of maturin's arguments that are also for this build."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--profile", default=maturin.get_config()["profile"])
    parser.add_argument("--target")
    for switch in ("--offline", "--locked", "--frozen"):
        parser.add_argument(switch, action="store_const", const=switch)
    chosen, _ = parser.parse_known_args(maturin_args)
    switches = [switch for switch in (chosen.offline, chosen.locked, chosen.frozen) if switch]
    target = ["--target", chosen.target] if chosen.target else []
    return ["--profile", chosen.profile, *target, *switches]


def artifacts(messages: str) -> dict[Path, Path]:
    """What cargo made, of the two files, by its messages."""
    files = {}
    for line in messages.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("reason") != "compiler-artifact":
            continue
        name, kinds = message["target"]["name"], message["target"]["kind"]
        if name == "poorwill" and "bin" in kinds:
            files[COMMAND] = Path(message["executable"])
        elif name == "poorwill_preload":
            files.update((PRELOAD, Path(file)) for file in message["filenames"] if file.endswith(".so"))
    return files


@contextmanager
def packed(files: dict[Path, Path], leaving: list[Path]) -> Iterator[None]:
    """Copies the files to where maturin finds them. At the end those of `leaving` are as they were.

    An editable installation has its library to preload there.
    """
    before = {place: place.read_bytes() for place in leaving if place != COMMAND and place.is_file()}
    try:
        for place, file in files.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
        yield
    finally:
        for place in leaving:
            place.unlink(missing_ok=True)
        for place, library in before.items():
            place.write_bytes(library)
