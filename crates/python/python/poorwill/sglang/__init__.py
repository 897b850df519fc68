"""An SGLang plugin: `--enable-memory-saver` with Poorwill, without a line changed.

SGLang finds `register` by its entry point (`sglang.srt.plugins`) and calls it in every process. With
`POORWILL_SLEEP_MODE=1` its adapter then makes our memory saver in the place of torch_memory_saver's. A
release or resume may be repeated, and all ranks carry it out, or none. Without the variable, without
`--enable-memory-saver`, and in an SGLang that is not known, nothing changes.

- `_hooks` puts all hooks in their places, or none.
- `_versions` first checks that this SGLang has what they need, and `_generations` has its differences.
- `_adapter` is our memory saver behind SGLang's interface. `_occupation` and `_together` release and resume,
  `_answers` tells errors, and `_group`, `_stages` and `_queues` are what that takes with several ranks.
"""

import logging

from poorwill._environment import SLEEP_MODE, wants_sleep_mode

__all__ = ["register"]

_log = logging.getLogger(__name__)
_said: set[str] = set()


def register() -> None:
    """Hooks SGLang if `POORWILL_SLEEP_MODE=1`, and if this SGLang is known. Repeating it is harmless.

    A process that does not want it, or cannot have it, goes on with SGLang's own memory saver. SGLang would
    log an error that is raised here, and go on likewise.
    """
    try:
        if not wants_sleep_mode():
            return
    except ValueError as error:
        _say_once(
            logging.ERROR, f"{error}; SGLang's own memory saver is used: set {SLEEP_MODE}=1 or unset it"
        )
        return
    # Imports what compares and hooks only where it is wanted.
    from poorwill.sglang import _hooks, _versions

    try:
        fit = _versions.check()
    except _versions.UnsupportedSglangError as unsupported:
        _say_once(
            logging.WARNING,
            f"{unsupported}; SGLang's own memory saver is used: unset {SLEEP_MODE} to want it",
        )
        return
    _hooks.install(fit)


def _say_once(level: int, sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        _log.log(level, "%s", sentence)
