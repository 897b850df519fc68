"""The options of the allocator: what PyTorch 2.11 makes of a text of settings, and what its snapshot tells.

A text resets four options before anything in it is looked at, and only one of the four is in no snapshot.
"""

import re
from collections.abc import Callable
from typing import Any

MIB = 1 << 20
NO_LIMIT = (1 << 64) - 1
INTERVALS = [str(1 << power) for power in range(16)]

_TOKEN = re.compile(r"[,:\[\]]|[^,:\[\]]+")


class AllocatorSettings:
    """The process's options; `conf` is what the environment held."""

    def __init__(self, conf: str | None = None) -> None:
        self.large_segment_bytes = 20 * MIB
        self.expandable_segments = False
        self.pinned_num_register_threads = 1
        self.flags = {
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "graph_capture_record_stream_reuse": False,
        }
        self.pinned_use_background_threads = False
        self.per_process_memory_fraction = 1.0
        self.last_text = ""
        self._reset()
        if conf is not None:
            self.parse(conf)

    def _reset(self) -> None:
        self.max_split_bytes = NO_LIMIT
        self.garbage_collection_threshold = 0.0
        self.roundup_power2_divisions = [0] * len(INTERVALS)
        self.max_non_split_rounding_bytes = self.large_segment_bytes

    def parse(self, text: str) -> None:
        """`torch._C._accelerator_setAllocatorSettings`."""
        self._reset()
        self.last_text = text
        entries = list(_entries(text))
        for key, value in entries:  # this one first, as others are held against it
            if key == "large_segment_size_mb":
                self.large_segment_bytes = int(_one(value)) * MIB
        self.max_non_split_rounding_bytes = self.large_segment_bytes
        for key, value in entries:
            self._take(key, value)

    def _take(self, key: str, value: list[str]) -> None:
        takers: dict[str, Callable[[list[str]], None]] = {
            "large_segment_size_mb": lambda value: None,
            "max_split_size_mb": self._max_split,
            "max_non_split_rounding_mb": self._max_non_split_rounding,
            "garbage_collection_threshold": self._garbage_collection,
            "roundup_power2_divisions": self._roundup,
            "backend": self._backend,
        }
        if key in takers:
            takers[key](value)
        elif key in self.flags:
            self.flags[key] = _flag(value)
        elif key in ("expandable_segments", "pinned_use_background_threads"):
            setattr(self, key, _flag(value))
        elif key == "pinned_num_register_threads":
            self.pinned_num_register_threads = int(_one(value))
        elif key == "per_process_memory_fraction":
            self.per_process_memory_fraction = float(_one(value))
        else:
            raise ValueError(f"Unrecognized key '{key}' in Accelerator allocator config.")

    def _at_least_a_segment(self, key: str, value: list[str]) -> int:
        mib, least = int(_one(value)), self.large_segment_bytes // MIB
        if mib < least:
            raise ValueError(f"CachingAllocator option {key} too small, must be >= {least}")
        return min(mib, NO_LIMIT // MIB) * MIB

    def _max_split(self, value: list[str]) -> None:
        self.max_split_bytes = self._at_least_a_segment("max_split_size_mb", value)

    def _max_non_split_rounding(self, value: list[str]) -> None:
        self.max_non_split_rounding_bytes = self._at_least_a_segment("max_non_split_rounding_mb", value)

    def _garbage_collection(self, value: list[str]) -> None:
        threshold = float(_one(value))
        if not 0 < threshold < 1:
            raise ValueError("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
        self.garbage_collection_threshold = threshold

    def _roundup(self, value: list[str]) -> None:
        if value[0] != "[":
            self.roundup_power2_divisions = [_power_of_two(value[0])] * len(INTERVALS)
            return
        last = None
        for size, _colon, divisions in _groups(value[1:-1]):
            count = int(divisions) and _power_of_two(divisions)
            if size == ">":
                after = 0 if last is None else last
                self.roundup_power2_divisions[after + 1 :] = [count] * (len(INTERVALS) - after - 1)
                continue
            index = min(_power_of_two(size).bit_length(), len(INTERVALS)) - 1
            if last is None:
                self.roundup_power2_divisions[:index] = [count] * index
            self.roundup_power2_divisions[index] = count
            last = index

    def _backend(self, value: list[str]) -> None:
        if _one(value) != "native":
            raise ValueError("Allocator backend parsed at runtime != allocator backend parsed at load time")

    def snapshot(self) -> dict[str, Any]:
        """`allocator_settings` of a snapshot."""
        signed = self.max_split_bytes - (1 << 64) if self.max_split_bytes >> 63 else self.max_split_bytes
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self.last_text,
            "max_split_size": signed,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "expandable_segments": self.expandable_segments,
            "pinned_num_register_threads": self.pinned_num_register_threads,
            **self.flags,
            "roundup_power2_divisions": dict(zip(INTERVALS, self.roundup_power2_divisions, strict=True)),
        }

    def everything(self) -> dict[str, Any]:
        """All options, those too that no snapshot tells; not the text."""
        return {name: value for name, value in vars(self).items() if name != "last_text"}


def _entries(text: str) -> list[tuple[str, list[str]]]:
    """The keys of a text, each with the tokens of its value."""
    tokens = _TOKEN.findall("".join(text.split()))
    entries, at = [], 0
    while at < len(tokens):
        if tokens[at + 1 : at + 2] != [":"] or at + 2 >= len(tokens):
            raise ValueError(f"Expected ':' and a value after {tokens[at]!r}")
        end = at + 3
        if tokens[at + 2] == "[":
            end = tokens.index("]", at) + 1
        entries.append((tokens[at], tokens[at + 2 : end]))
        if tokens[end : end + 1] not in ([], [","]):
            raise ValueError(f"Expected ',' instead of {tokens[end]!r}")
        at = end + 1
    return entries


def _groups(tokens: list[str]) -> list[list[str]]:
    """The members of a list, of three tokens each, that stand between commas."""
    return [tokens[at : at + 3] for at in range(0, len(tokens), 4)]


def _one(value: list[str]) -> str:
    [token] = value
    return token


def _flag(value: list[str]) -> bool:
    token = _one(value)
    if token not in ("True", "False"):
        raise ValueError(f"Expected 'True' or 'False' in ConfigTokenizer but got '{token}'")
    return token == "True"


def _power_of_two(token: str) -> int:
    number = int(token)
    if number < 1 or number & (number - 1):
        raise ValueError("For roundups, the intervals and divisions have to be power of 2")
    return number
