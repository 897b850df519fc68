#!/usr/bin/env python3
"""Holds connectors.py to what it says, over a simulated pair."""

# There may be no pytest where this runs.
# ruff: noqa: PT009, PT027

import json
import sys
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import connectors  # noqa: E402
import web  # noqa: E402
from test_scripts import printed  # noqa: E402


class Connectors(unittest.TestCase):
    """A simulated pair: what one has computed the other reads, unless a test prevents it."""

    def setUp(self):
        self.read, self.asked, self.moves, self.params = 0.0, [], True, {"remote_engine_id": "a"}

    complete = web.Client.complete

    def ask(self, path: str, body: dict, limit_s: float) -> web.Answer:
        self.asked.append(body)
        params = body.get("kv_transfer_params", {})
        if params.get("do_remote_decode"):
            said = {"choices": [{"token_ids": [1]}], "kv_transfer_params": self.params}
        else:
            self.read += 64.0 if self.moves and params else 0.0
            said = {"choices": [{"token_ids": [1, 2]}]}
        return web.Answer(200, json.dumps(said), 0.1)

    def get(self, path: str) -> web.Answer:
        lines = [f'{connectors.HITS}_total{{engine="0"}} {self.read}', f"{connectors.HITS}_created 5"]
        return web.Answer(200, "\n".join(lines), 0.1)

    def passed(self, reference: list[int]) -> tuple[bool, dict]:
        return connectors.passed(self, self, reference)  # type: ignore[arg-type]

    def test_a_prompt_passes_from_one_to_the_other(self):
        ok, seen = self.passed([1, 2])
        self.assertTrue(ok)
        self.assertEqual((seen["read_tokens"], seen["tokens_equal"]), (64.0, True))
        self.assertEqual([body["max_tokens"] for body in self.asked], [1, web.NEW_TOKENS])
        self.assertEqual(self.asked[1]["kv_transfer_params"], {"remote_engine_id": "a"})

    def test_other_tokens_and_tokens_that_were_computed_anew_do_not_count(self):
        self.assertFalse(self.passed([1, 3])[0])
        self.moves = False
        self.assertFalse(self.passed([1, 2])[0])
        self.params = None
        ok, seen = self.passed([1, 2])
        self.assertFalse(ok)
        self.assertEqual(seen["prefill"]["status"], 200)

    def test_without_nixl_it_says_so(self):
        def main() -> None:
            with self.assertRaises(SystemExit) as ended:
                connectors.main()
            self.assertEqual(ended.exception.code, connectors.NO_NIXL)

        nothing = mock.patch.object(connectors.importlib.util, "find_spec", return_value=None)
        with nothing, mock.patch.object(sys, "argv", ["connectors.py"]):
            [line] = printed(main)
        self.assertEqual(line["event"], "skipped")
        self.assertIn("pip install nixl", line["why"])


if __name__ == "__main__":
    unittest.main()
