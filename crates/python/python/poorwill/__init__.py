"""GPU memory runtime for language-model engines: sleep, wake, and verified bytes.

Importing it opens nothing, and needs neither a GPU nor PyTorch. A name's module is imported on its first use:
processes of engines that do not use Poorwill import this, too.
"""

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from poorwill import triton
    from poorwill._native import (
        Arena,
        BackupView,
        Block,
        Budget,
        BudgetError,
        BudgetWarning,
        Claim,
        Claimed,
        ClosedError,
        Decision,
        Disk,
        HeldMemory,
        HibernatedProcess,
        HibernateError,
        HibernateReport,
        Hibernation,
        Hold,
        LostRange,
        OutOfMemoryError,
        PoorwillError,
        Preparation,
        PrepareReport,
        ResumedProcess,
        ResumeReport,
        SleepError,
        SleepPhases,
        SleepReport,
        Source,
        Stats,
        TagError,
        TagStats,
        UndoneError,
        WakeError,
        WakePhases,
        WakeReport,
        __version__,
        arena,
        budget,
        discard,
        drop_backups,
        graph_pool,
        hibernate,
        hibernation,
        mark_restored,
        parse_bytes,
        pool,
        prepare_sleep,
        resume,
        sleep,
        state,
        stats,
        trim,
        wake,
    )
    from poorwill._record import Record, record

__all__ = [
    "Arena",
    "BackupView",
    "Block",
    "Budget",
    "BudgetError",
    "BudgetWarning",
    "Claim",
    "Claimed",
    "ClosedError",
    "Decision",
    "Disk",
    "HeldMemory",
    "HibernateError",
    "HibernateReport",
    "HibernatedProcess",
    "Hibernation",
    "Hold",
    "LostRange",
    "OutOfMemoryError",
    "PoorwillError",
    "Preparation",
    "PrepareReport",
    "Record",
    "ResumeReport",
    "ResumedProcess",
    "SleepError",
    "SleepPhases",
    "SleepReport",
    "Source",
    "Stats",
    "TagError",
    "TagStats",
    "UndoneError",
    "WakeError",
    "WakePhases",
    "WakeReport",
    "__version__",
    "arena",
    "budget",
    "discard",
    "drop_backups",
    "graph_pool",
    "hibernate",
    "hibernation",
    "mark_restored",
    "parse_bytes",
    "pool",
    "prepare_sleep",
    "record",
    "resume",
    "sleep",
    "state",
    "stats",
    "trim",
    "triton",
    "wake",
]

_ELSEWHERE = {"Record": "poorwill._record", "record": "poorwill._record"}
"""Modules of names that are not of the native one."""

# Type checkers would take it for a promise that every name is there.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "triton":
            return importlib.import_module("poorwill.triton")
        value = getattr(importlib.import_module(_ELSEWHERE.get(name, "poorwill._native")), name)
        # The next use finds it without this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
