#!/usr/bin/env python3
"""Holds slices.py to what it says, with programs that stand in for the compiler and the daemon of MPS."""

# There may be no pytest where this runs.
# ruff: noqa: PT009, PT027

import contextlib
import io
import json
import os
import subprocess
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import common  # noqa: E402
import slices  # noqa: E402
from test_scripts import Folder, printed  # noqa: E402


class Slices(Folder):
    def program(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def sources(self) -> Path:
        sources = self.folder / "hami"
        for name in ["libvgpu.c", "cuda/memory.c", "multiprocess/shrreg_tool.c"]:
            file = sources / "src" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        return sources

    def headers(self, *names: str) -> Path:
        folder = self.folder / "headers"
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / name).touch()
        return folder

    def test_hami_is_built_as_it_builds_itself(self):
        said = self.folder / "said"
        compiler = self.program("cc", f'echo "$@" > {said}; while [ "$1" != -o ]; do shift; done; touch "$2"')
        headers = self.headers("cuda.h", "nvml.h")
        with mock.patch.dict(os.environ, {"CC": str(compiler)}):
            library = slices.build_hami(self.sources(), [headers], self.folder)
        self.assertEqual(library.name, "libvgpu.so")  # by which poorwill knows it
        words = said.read_text().split()
        self.assertEqual(next(word for word in words if word.endswith(".c")).rpartition("/")[2], "memory.c")
        self.assertFalse([word for word in words if "shrreg_tool" in word])
        self.assertIn(str(headers), words)
        config = (self.folder / "static_config.h").read_text()
        self.assertIn("#define HOOK_MEMINFO_ENABLE\n", config)

    def prevented(self, sources: Path | None, folders: list[Path], compiler: str) -> str:
        with (
            mock.patch.dict(os.environ, {"CC": compiler}),
            self.assertRaises(slices.PreventedError) as raised,
        ):
            slices.build_hami(sources, folders, self.folder)
        return str(raised.exception)

    def test_what_prevents_hami_is_said(self):
        headers, sources = self.headers("cuda.h"), self.sources()
        self.assertIn("--hami", self.prevented(None, [headers], "cc"))
        self.assertIn("no checkout", self.prevented(self.folder / "nowhere", [headers], "cc"))
        self.assertIn("no C compiler", self.prevented(sources, [headers], str(self.folder / "nocc")))
        good = str(self.program("good", ""))
        self.assertIn(f"no nvml.h in {headers}", self.prevented(sources, [headers], good))
        headers = self.headers("cuda.h", "nvml.h")
        bad = str(self.program("bad", "echo 'memory.c:7: error: what is this' >&2; exit 1"))
        self.assertIn("memory.c:7: error", self.prevented(sources, [headers], bad))

    def test_headers_are_looked_for_where_they_may_be(self):
        with mock.patch.dict(os.environ, {"CUDA_HOME": "/opt/cuda"}):
            folders = slices.header_folders([Path("/mine")])
        self.assertEqual(folders[:2], [Path("/mine"), Path("/opt/cuda/include")])

    def daemon(self, begins: str) -> Path:
        asked = self.folder / "asked"
        text = f'if [ "$1" = -d ]; then echo "$CUDA_MPS_PIPE_DIRECTORY" >> {asked}; {begins}; fi\n'
        return self.program(slices.CONTROL, f"{text}cat >> {asked}")

    @contextlib.contextmanager
    def mps(self, begins: str):
        options = slices.parsed(["--limit-gib", "4"])
        self.daemon(begins)
        own = self.folder / "own"
        own.mkdir()
        with mock.patch.dict(os.environ, {"PATH": f"{self.folder}:{os.environ['PATH']}"}):
            with contextlib.redirect_stderr(io.StringIO()), slices.mps(options, own) as environment:
                yield environment

    def test_the_daemon_of_mps_has_folders_of_its_own_and_ends(self):
        with self.mps("exit 0") as environment:
            self.assertEqual(environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], "0=4096M")
            pipe = environment["CUDA_MPS_PIPE_DIRECTORY"]
            self.assertTrue(Path(pipe).is_dir() and pipe.startswith(str(self.folder)))
            self.assertEqual((self.folder / "asked").read_text(), f"{pipe}\n")
        self.assertEqual((self.folder / "asked").read_text(), f"{pipe}\nquit\n")

    def test_the_daemon_ends_whatever_happens_in_its_slice(self):
        with contextlib.suppress(KeyError), self.mps("exit 0"):
            raise KeyError
        self.assertTrue((self.folder / "asked").read_text().endswith("quit\n"))

    def test_a_daemon_that_does_not_start_says_why(self):
        begins = 'echo "cannot run here" > $CUDA_MPS_LOG_DIRECTORY/control.log; exit 3'
        with self.assertRaisesRegex(slices.PreventedError, "(?s)ends with code 3.*cannot run here"):
            with self.mps(begins):
                pass

    def test_no_daemon_is_said_with_where_it_was_looked_for(self):
        nothing = mock.patch.object(slices.shutil, "which", return_value=None)
        said = f"no {slices.CONTROL}.*/usr/local/nvidia"
        with nothing, self.assertRaisesRegex(slices.PreventedError, said):
            with slices.mps(slices.parsed([]), self.folder):
                pass

    def run_with(self, *ended: bool) -> tuple[bool, list[dict]]:
        """Two slices, of which one without an end is prevented."""
        results, ends = [], list(ended)

        @contextlib.contextmanager
        def cut(options, folder):
            if len(ends) == 0:
                raise slices.PreventedError("there is none")
            yield {}

        def in_slice(*_):
            return ends.pop(0)

        options = slices.parsed(["--only", "hami,mps"])
        patches = {"hami": cut, "mps": cut, "in_slice": in_slice}
        with contextlib.ExitStack() as stack:
            for name, instead in patches.items():
                stack.enter_context(mock.patch.object(slices, name, instead))
            lines = printed(lambda: results.append(slices.run(options, self.folder)))
        return results[0], lines

    def test_what_is_prevented_is_no_failure_and_what_is_wrong_is_one(self):
        good, lines = self.run_with(True)
        self.assertTrue(good)
        self.assertEqual([line["event"] for line in lines], ["slice", "prevented"])
        self.assertEqual(lines[1]["why"], "there is none")

    def test_what_is_wrong_is_a_failure(self):
        good, lines = self.run_with(False, True)
        self.assertFalse(good)
        self.assertEqual([line["ok"] for line in lines], [False, True])

    def test_a_budget_is_that_of_the_slice(self):
        limit = 8 * common.GIB
        for size, good in {limit: True, limit + 1: False, limit - 2 * slices.SLACK_BYTES: False}.items():
            budget = types.SimpleNamespace(budget_bytes=size, as_dict=lambda: {"winner": "memory_limit"})
            self.assertEqual(slices.budget_figures(budget, limit)["ok"], good)
            self.assertTrue(slices.budget_figures(budget, None)["ok"])

    def test_what_cannot_be_cut_is_refused(self):
        cases = {"--only mig": "no mig: there are whole, hami, mps", "--limit-gib 2": "more than 2"}
        for words, said in cases.items():
            with contextlib.redirect_stderr(io.StringIO()) as printed_, self.assertRaises(SystemExit):
                slices.parsed(words.split())
            self.assertIn(said, printed_.getvalue())


FAKE = os.environ.get("POORWILL_FAKE_LIBCUDA", "")
IN_THE_SLICE = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import argparse, slices
slices.WEIGHTS_BYTES, slices.SPARE_BYTES, slices.SLACK_BYTES = 4 << 20, 8 << 20, 4 << 20
good = slices.child(argparse.Namespace(child=sys.argv[1], limit_gib=1 / 16))
sys.exit(0 if good else 1)
"""


@unittest.skipUnless(FAKE, "POORWILL_FAKE_LIBCUDA names no library that stands in for the driver")
class InTheSlice(Folder):
    """What is done in a slice, over a driver that stands in for NVIDIA's and plays the slice."""

    def child(self, mechanism: str, **environment: str) -> tuple[int, dict[str, list[dict]], str]:
        library = self.folder / "libcuda.so.1"
        if not library.exists():
            library.symlink_to(Path(FAKE).resolve())
        ran = subprocess.run(
            [sys.executable, "-B", "-c", IN_THE_SLICE, mechanism],
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(self.folder),
                "POORWILL_FAKE_CUDA_DEVICES": "1GiB",
                **environment,
            },
            capture_output=True,
            text=True,
        )
        lines: dict[str, list[dict]] = {}
        for line in map(json.loads, ran.stdout.splitlines()):
            lines.setdefault(line["event"], []).append(line)
        return ran.returncode, lines, ran.stderr

    def test_hami_and_mps(self):
        limits = {
            "hami": {"CUDA_DEVICE_MEMORY_LIMIT": "64m", "POORWILL_FAKE_CUDA_SIMULATE": "0:hami=64MiB"},
            "mps": {
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=64M",
                "POORWILL_FAKE_CUDA_SIMULATE": "0:mps=64MiB",
            },
        }
        for mechanism, environment in limits.items():
            code, lines, said = self.child(mechanism, **environment)
            self.assertEqual(code, 0, said)
            [budget], [beyond] = lines["budget"], lines["beyond"]
            self.assertEqual((budget["budget_bytes"], budget["limit_bytes"]), (64 << 20, 64 << 20))
            self.assertTrue(beyond["ok"] and budget["ok"])
            self.assertEqual([line["ok"] for line in lines["cycle"]], [True] * slices.CYCLES)

    def test_a_budget_that_does_not_know_of_the_slice_is_found(self):
        code, lines, _ = self.child("mps")
        self.assertEqual((code, lines["budget"][0]["ok"], lines["beyond"][0]["ok"]), (1, False, False))

    def test_the_whole_card_has_no_limit(self):
        code, lines, said = self.child("whole")
        self.assertEqual(code, 0, said)
        self.assertEqual((lines["budget"][0]["limit_bytes"], "beyond" in lines), (None, False))


if __name__ == "__main__":
    unittest.main()
