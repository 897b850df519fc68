"""The build backend, up to the calls of cargo and of maturin."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    path = FOLDER / "backend/poorwill_backend.py"
    spec = importlib.util.spec_from_file_location("poorwill_backend", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def artifact(name: str, kind: str, files: list[str], executable: str | None = None) -> str:
    target = {"name": name, "kind": [kind]}
    message = {"reason": "compiler-artifact", "target": target, "filenames": files, "executable": executable}
    return json.dumps(message)


MESSAGES = [
    artifact("poorwill", "lib", ["/t/libpoorwill.rlib"]),
    artifact("poorwill_preload", "cdylib", ["/t/libpoorwill_preload.rlib", "/t/libpoorwill_preload.so"]),
    artifact("poorwill", "bin", ["/t/poorwill"], "/t/poorwill"),
    '{"reason":"build-finished","success":true}',
]


def test_the_two_files_are_found_in_cargos_messages(backend: ModuleType) -> None:
    files = backend.artifacts("\n".join(["a line of a build script", *MESSAGES]))
    assert files == {
        backend.COMMAND: Path("/t/poorwill"),
        backend.PRELOAD: Path("/t/libpoorwill_preload.so"),
    }
    assert backend.artifacts(MESSAGES[0]) == {}


def test_maturins_arguments_for_cargo_are_passed_on(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    profile = ["--profile", "release"]
    passed = backend.options(
        ["--target", "aarch64-unknown-linux-gnu", "--strip", "-i", "python3", "--locked"]
    )
    assert passed == [*profile, "--target", "aarch64-unknown-linux-gnu", "--locked"]
    assert backend.options(["--offline", "--target=x"]) == [*profile, "--target", "x", "--offline"]
    assert backend.options([]) == profile
    assert backend.options(["--profile", "dev"]) == ["--profile", "dev"]


def seen_by_maturin(backend: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[list[str]]:
    """The files that lie in the tree while maturin packs."""
    built = {place: folder / place.name for place in (backend.COMMAND, backend.PRELOAD)}
    for file in built.values():
        file.write_text("of a test")
        file.chmod(0o755)
    seen = []

    def see(*_: Any) -> str:
        seen.append([str(place) for place in built if place.stat().st_mode & 0o100])
        return "a.whl"

    monkeypatch.chdir(folder)
    monkeypatch.setattr(backend, "built", lambda _: built)
    monkeypatch.setattr(backend.maturin, "build_wheel", see)
    monkeypatch.setattr(backend.maturin, "build_editable", see)
    return seen


def test_they_lie_in_the_tree_only_while_maturin_packs(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = seen_by_maturin(backend, monkeypatch, tmp_path)
    assert backend.build_wheel("out") == "a.whl"
    assert seen == [[str(backend.COMMAND), str(backend.PRELOAD)]]
    assert not backend.COMMAND.exists()
    assert not backend.PRELOAD.exists()


def test_an_editable_installation_keeps_the_library(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = seen_by_maturin(backend, monkeypatch, tmp_path)
    backend.build_editable("out")
    assert seen == [[str(backend.COMMAND), str(backend.PRELOAD)]]
    assert not backend.COMMAND.exists()
    library = backend.PRELOAD.read_text()
    backend.PRELOAD.write_text("of this installation")
    backend.build_wheel("out")
    assert library == "of a test"
    assert backend.PRELOAD.read_text() == "of this installation"


def test_a_failed_build_packs_nothing(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(FOLDER)
    (tmp_path / "cargo").write_text("#!/bin/sh\nexit 101\n")
    (tmp_path / "cargo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"cargo build .* failed with status 101"):
        backend.built(None)
    (tmp_path / "cargo").write_text("#!/bin/sh\n")
    with pytest.raises(SystemExit, match=r"without poorwill and torch_memory_saver_hook_mode_preload"):
        backend.built(None)


def test_pip_calls_it(backend: ModuleType) -> None:
    project = (FOLDER / "pyproject.toml").read_text()
    assert f'build-backend = "{backend.__name__}"\nbackend-path = ["backend"]\n' in project
    hooks = {"build_wheel", "build_sdist", "build_editable", "prepare_metadata_for_build_wheel"}
    assert hooks <= {name for name in backend.__all__ if callable(getattr(backend, name))}
