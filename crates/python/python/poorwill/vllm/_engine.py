"""Hooks on vLLM's EngineCore: a failed sleep leaves the engine awake, and nothing runs without its memory.

A request that comes while anything sleeps is refused with the names of what sleeps, since only a wake would
end its wait. One that was there before waits for that wake.

The hooks act only with poorwill's worker. vLLM's own methods still do the work; a hook checks before and
after them.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn

from poorwill import PoorwillError, UndoneError
from poorwill.vllm import _connectors, _environment, _generations, _keep
from poorwill.vllm._keep import KeepUnsupportedError
from poorwill.vllm._platform import WORKER, is_active
from poorwill.vllm._together import RESUMED, Part, Ranks

__all__ = ["NotReadyError", "attempt", "install_core"]

TAGS = ("weights", "kv_cache")
"""Tags that vLLM can put to sleep and wake on its own."""

LEVELS = (0, 1, 2)

RESTORING = frozenset(
    {"reload_weights", "update_weights", "finish_weight_update", "poorwill_mark_restored", "poorwill_prepare"}
)
"""Methods of the worker that may change the state of the memory."""

# Calls that write no weights. Any other may, by an extension of the worker say.
_READING = frozenset(
    {"sleep", "wake_up", "synchronize_device", "check_health", "get_kv_connector_handshake_metadata"}
)

SCHEDULING = "scheduling"
"""The tag of level 0: no memory, but the scheduler."""

# Calls for which each rank answers, also with an error. vLLM's own way stops at the first rank that fails. It
# then takes the other ranks' answers for those of the next call.
_ANSWERED = RESTORING | {"sleep", "wake_up", "discard", "poorwill_status", "poorwill_drop_backups"}

# What a sleep of the worker is given besides the level.
_KEPT = "kept"

_ENDED = "the process of a rank has ended, and the engine ends with it: start it again"
_ALL_WAKE = "call wake_up, in which all data parallel ranks take part"

_ENGINE = "_poorwill"
_HOOK = "_poorwill_hook"

_log = logging.getLogger(__name__)


class NotReadyError(PoorwillError):
    """The engine cannot serve: its weights were dropped, or it sleeps."""


def check_level(level: object) -> None:
    """Raises for anything that is no sleep level."""
    if isinstance(level, bool) or level not in LEVELS:
        raise ValueError(
            f"sleep: level is {level!r}; it is 0 (only the scheduler pauses), 1 (the weights go to the host) "
            "or 2 (the weights are dropped)"
        )


def check_tags(tags: Iterable[object] | None) -> None:
    """Raises for tags that nothing sleeps under."""
    known = (*TAGS, SCHEDULING)
    for tag in tags or ():
        if tag not in known:
            raise ValueError(
                f"wake_up: no tag {tag!r}; there are {', '.join(known)}, and no tags at all wake all"
            )


def replace(of: type, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replaces a method of vLLM's by a hook. Repeating it does nothing."""
    stock = vars(of).get(name)
    if stock is None:
        raise PoorwillError(
            f"installing poorwill's hooks: vLLM's {of.__name__} has no {name} of its own; this version of "
            "vLLM is not one that poorwill knows"
        )
    if not hasattr(stock, _HOOK):
        hook = functools.wraps(stock)(make(stock))
        setattr(hook, _HOOK, True)
        setattr(of, name, hook)


def attempt(worker: Any, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Calls a worker's method in the worker's process; an error is an answer, too."""
    try:
        return {"value": getattr(worker, method)(*args, **kwargs), "error": None, "is_undone": False}
    except UndoneError as error:
        return {"value": None, "error": str(error), "is_undone": True}
    except Exception as error:
        _log.exception("%s failed", method)
        words = str(error)
        if not isinstance(error, PoorwillError):
            words = f"{type(error).__name__}: {words}" if words else type(error).__name__
        return {"value": None, "error": words, "is_undone": False}


def _sentence(undefined: Sequence[str], unwritten: Sequence[dict[str, Any]]) -> str:
    """Why the engine is not ready; `unwritten` lists the missing weights of each rank."""
    dropped = " and ".join(undefined)
    said = f"the {dropped} were dropped by a level 2 sleep and have not been written again since"
    most = max(unwritten, key=lambda missing: int(missing["tensors"]), default=None)
    if most is not None and not most["tensors"]:
        if most["is_updating"]:
            return f"{said}: an update of them has begun and not ended; call finish_weight_update"
        return (
            f"{said}, as far as that can be seen: some are tensors whose memory is hidden; call "
            "reload_weights, or poorwill_mark_restored by collective_rpc once they are written"
        )
    if most is not None:
        at_least = "" if most["is_all"] else "at least "
        names = ", ".join(most["names"]) + (", ..." if most["tensors"] > len(most["names"]) else "")
        said += (
            f" ({at_least}{most['tensors']} of {most['of_tensors']} tensors and {most['bytes']} of "
            f"{most['of_bytes']} bytes are missing: {names})"
        )
    return (
        f"{said}: write them in any way, by reload_weights say, or call poorwill_mark_restored by "
        "collective_rpc if nothing is missing"
    )


def _list(tags: Iterable[str]) -> str:
    return ", ".join(sorted(tags))


def sleeps(tags: Iterable[str]) -> str:
    """Why nothing can be computed while these tags sleep, and what ends it."""
    return f"the engine sleeps ({_list(tags)}): call wake_up"


@dataclass
class _Before:
    """State of an engine before a sleep, to restore after a failure."""

    asleep: frozenset[str]
    is_paused: bool
    is_held: bool
    level: int
    """The level of that sleep."""
    was_committed: bool = False
    """Whether that sleep has come so far that ranks may have released memory."""
    was_resumed: bool = False
    """Whether the engine was resumed since."""


class _Engine:
    """State and actions of the hooks on one EngineCore."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.executor = core.model_executor
        self.vllm: _generations.Generation = core.poorwill_vllm
        self.level: int | None = None
        """The level at which the weights sleep."""
        self.not_ready: str | None = None
        """Why nothing may be computed although the memory is awake, from the ranks' last report."""
        self.is_resuming = False
        self._draining: tuple[int, Future[Any]] | None = None
        self._is_waking = False
        self._is_half_awake = False
        # Whether a wake by tag has left only the weights asleep.
        self._is_woken_by_tag = False
        # Whether only the missing weights hold the scheduler.
        self._is_held = False
        self._events: dict[Any, list[Any]] = {}
        self._processes: list[dict[str, Any]] | None = None
        self.is_grouped = False
        """Whether other engines wake at the same time."""
        self.before: _Before | None = None
        """That of the last sleep."""
        self.part = Part(self)
        self.keeper = _keep.Keeper(core, self._ask)
        # Whether blocks sleep of which other weights were written since.
        self._is_outdated = False
        # The runs of blocks that the sleep in progress keeps.
        self._kept: list[tuple[int, int]] | None = None
        self.ranks = Ranks(
            int(core.vllm_config.parallel_config.world_size),
            lambda path: self._ask("poorwill_reaches", args=(path,)),
        )
        self._stock_rpc = self.executor.collective_rpc
        self.executor.collective_rpc = self._collective_rpc
        self._stock_sleep = self.executor.sleep
        self.executor.sleep = self._sleep

    @property
    def asleep(self) -> frozenset[str]:
        """The tags that the executor believes to be asleep."""
        return frozenset(self.executor.sleeping_tags)

    @property
    def is_short(self) -> bool:
        """Whether weights were missing at the last check, or hold the scheduler."""
        return self.not_ready is not None or self._is_held

    # Sleeping

    def sleep(self, stock: Callable[..., Any], level: int, mode: str, keep_tags: Sequence[str] = ()) -> Any:
        """Pauses, drains and sleeps. On failure it restores the engine and says why."""
        check_level(level)
        mode, tags = _keep.decoded(mode)
        wanted = _keep.Wanted.of(level, mode, (*tags, *_keep.named(keep_tags)))
        if self._draining is not None and self._draining[0] == level:
            return self._draining[1]
        if not self.has_to_sleep(level):
            return None
        self.keep_with(wanted)
        self.before = before = self.state(level)
        try:
            with self.keeper.pausing():
                result = stock(level, mode)
        except Exception as error:
            self._go_back(error, before)
        if level == 0:
            return result
        if isinstance(result, Future):
            return self._when_drained(result, before)
        self.is_down(level)
        return result

    def keep_with(self, wanted: _keep.Wanted | None) -> None:
        """What the next sleep keeps. Raises KeepUnsupportedError, with nothing changed, if it cannot."""
        if wanted is not None and (cause := self.cannot_keep()) is not None:
            raise KeepUnsupportedError.because(cause)
        self.keeper.set(wanted)

    def cannot_keep(self) -> str | None:
        """Why no sleep can keep requests and prefixes."""
        return _keep.problem(self.core, goes_on=self.goes_on())

    def state(self, level: int) -> _Before:
        """As it is before a sleep at this level."""
        return _Before(self.asleep, bool(self.core.is_scheduler_paused()), self._is_held, level)

    def has_to_sleep(self, level: int) -> bool:
        """Raises for a sleep that cannot work, before any change; returns whether there is anything to do."""
        check_level(level)
        if self._draining is not None:
            raise PoorwillError(
                f"sleep: the engine is about to sleep at level {self._draining[0]} and waits for its "
                f"requests; wait for that, or call wake_up before it sleeps at level {level}"
            )
        if self._is_half_awake:
            raise PoorwillError(
                "sleep: the last wake_up failed once memory was awake: call wake_up again before the engine "
                "sleeps"
            )
        if "weights" not in self.asleep:
            return True
        if level != self.level:
            raise PoorwillError(
                f"sleep: the engine sleeps at level {self.level} already; wake it up before it sleeps "
                f"at level {level}"
            )
        awake = set(TAGS) - self.asleep
        if awake and self._is_woken_by_tag:
            # As in vLLM. The next wake of the weights would leave behind what a second sleep had taken.
            _log.warning(
                "sleep: the engine sleeps already, and %s stays awake: wake_up ends that", _list(awake)
            )
            return False
        # What a failed sleep could not wake again.
        return bool(awake)

    def _commit_sleep(self) -> None:
        """The last check before the ranks release memory."""
        self._refuse_resumed()
        if self.before is not None:
            self.before.was_committed = True

    def _refuse_resumed(self) -> None:
        # It may have been paused anew.
        was_resumed = self.before is not None and self.before.was_resumed
        if was_resumed or not self.core.is_scheduler_paused():
            raise PoorwillError(RESUMED)

    def _when_drained(self, drained: Future[Any], before: _Before) -> Future[Any]:
        slept: Future[Any] = Future()
        self._draining = (before.level, slept)

        def finish(done: Future[Any]) -> None:
            self._draining = None
            try:
                try:
                    result = done.result()
                except Exception as error:
                    self._go_back(error, before)
            except Exception as error:
                slept.set_exception(error)
            else:
                self.is_down(before.level)
                slept.set_result(result)

        drained.add_done_callback(finish)
        return slept

    def is_down(self, level: int) -> None:
        """The ranks sleep."""
        self.level = level
        self.not_ready = None
        self._is_held = self._is_woken_by_tag = False

    @property
    def _has_ended(self) -> bool:
        """Whether a rank's process has, after which vLLM ends the others."""
        return bool(getattr(self.executor, "is_failed", False))

    def _go_back(self, error: Exception, before: _Before) -> NoReturn:
        """After a failed sleep: raises with the state that the engine is in."""
        state = self.restored(before)
        if state is None:
            raise error
        raise PoorwillError(f"{error}; {state}") from error

    def restored(self, before: _Before, *, is_grouped: bool = False) -> str | None:
        """Wakes what has slept since then, and resumes if that is safe. Returns the state, if that is new."""
        if self._has_ended:
            return _ENDED
        self.keeper.set(None)
        paused = self.core.is_scheduler_paused() and not before.is_paused
        # Its pause has ended that.
        self._is_held = before.is_held
        if not before.was_committed:
            return self._gone_on("nothing sleeps", is_grouped=is_grouped) if paused else None
        asleep, reason = self._wake_again(before)
        self._hold_for_asleep(asleep | before.asleep)
        if asleep:
            self.level = before.level
            self._is_woken_by_tag = False
            return (
                f"{_list(asleep)} could not be woken again{reason}, so the engine counts as asleep at level "
                f"{before.level}: call wake_up to try again"
            )
        if self.not_ready is not None:
            self._is_held = before.is_held or not before.is_paused
            return f"all ranks are awake, but {self.not_ready}"
        if not paused:
            return "all ranks are awake again, and the engine is as it was"
        return self._gone_on("all ranks are awake again", is_grouped=is_grouped)

    def _gone_on(self, state: str, *, is_grouped: bool) -> str:
        """Resumes the scheduler, unless other engines have to do it at the same time."""
        if self.goes_on():
            self._resume()
            return f"{state} and the engine serves"
        if is_grouped:
            # Their frontend has all of them go on.
            self._is_held = True
            return state
        return f"{state}, but the scheduler is paused: {_ALL_WAKE}"

    def _wake_again(self, before: _Before) -> tuple[frozenset[str], str]:
        """Wakes what was awake before a sleep. Returns what sleeps nevertheless, and why."""
        tags = [tag for tag in TAGS if tag not in before.asleep]
        reason = ""
        try:
            self._ask("wake_up", kwargs={"tags": tags if before.asleep else None})
        except Exception as error:
            reason = f" ({error})"
        try:
            asleep = self._sleeping(self.look()) - before.asleep
            if "kv_cache" in tags and "kv_cache" not in asleep:
                _connectors.announce(self.core)
        except Exception as error:
            return frozenset(tags), reason or f" ({error})"
        return asleep, reason

    def goes_on(self) -> bool:
        """Whether its scheduler resumes without those of other engines."""
        # Data parallel schedulers run together. One that resumes alone would wait for the others before its
        # client has an answer (from 0.21 on), or make them compute while asleep.
        return getattr(self.core, "dp_group", None) is None

    def _resume(self) -> None:
        self.core.resume_scheduler()

    def _sleep(self, level: int = 1) -> Any:
        """Replaces the executor's sleep, which cannot sleep when half awake. The ranks skip what sleeps."""
        asleep = self.asleep
        self._refuse_resumed()
        self._kept = self.keeper.take(asleep)
        self._hold_for_asleep(frozenset())
        try:
            result = self._stock_sleep(level)
        except BaseException:
            self._hold_for_asleep(asleep)
            raise
        finally:
            self._kept = None
        if kept := self.asleep.intersection(_environment.read().keep_awake):
            self._hold_for_asleep(self.asleep - kept)
        return result

    def _hold_for_asleep(self, tags: frozenset[str]) -> None:
        self.vllm.tell_asleep(self.executor, tags)

    # Waking

    def wake_up(self, stock: Callable[..., Any], tags: Sequence[str] | None) -> Any:
        """Wakes the named tags. The scheduler resumes once nothing sleeps or is undefined."""
        check_tags(tags)
        if tags is not None:
            # vLLM wakes nothing if one of the tags is awake already.
            tags = [tag for tag in dict.fromkeys(tags) if tag == SCHEDULING or tag in self.asleep]
        self._is_waking = True
        self.part.forget()
        try:
            result = stock(tags)
            self._is_half_awake = False
            if "weights" not in self.asleep:
                self._is_woken_by_tag = False
            elif "kv_cache" in (tags or ()):
                self._is_woken_by_tag = True
            if self.executor.is_sleeping:
                self.look()
            else:
                self.level = None
        except Exception as error:
            with contextlib.suppress(Exception):
                # Behind the commit ranks may be awake, and something else of theirs may not.
                self._is_half_awake = any(not self.asleep <= set(rank["sleeping"]) for rank in self.look())
            if self._has_ended:
                raise PoorwillError(f"wake_up: {_ENDED}") from error
            raise PoorwillError(f"{error}; {self._stays()}: call wake_up to try again") from error
        finally:
            self._is_waking = False
        return result

    def _stays(self) -> str:
        if self.asleep:
            return f"{_list(self.asleep)} count as asleep, and nothing is computed"
        return "the memory is awake, but the scheduler is paused"

    def resume(self, stock: Callable[[], Any]) -> Any:
        """Resumes the scheduler if the memory has what it computes with."""
        if not self._may_run():
            return None
        if self._is_outdated:
            # Keys of other weights answer for nothing: requests are computed again, as in vLLM.
            if not self.core.reset_prefix_cache(reset_running_requests=True):
                raise PoorwillError(
                    "resume: keys of the weights before are still in use; pause with mode=abort, then resume"
                )
            self.core.reset_encoder_cache()
            self._is_outdated = False
        self.is_resuming = True
        try:
            result = stock()
        finally:
            self.is_resuming = False
        self.part.forget()
        if self.before is not None:
            self.before.was_resumed = True
        self._is_held = False
        return result

    def pause(self) -> None:
        """A pause by the user also ends only by the user."""
        self._is_held = False

    def _may_run(self) -> bool:
        if self._is_waking:
            return not self.executor.is_sleeping and self._is_whole()
        if self.executor.is_sleeping:
            raise NotReadyError(f"resume: {sleeps(self.asleep)}, which resumes it")
        if self.not_ready is not None:
            self.look()
        if self.not_ready is not None:
            raise NotReadyError(f"resume: {self.not_ready}")
        return True

    def _is_whole(self) -> bool:
        """After a wake of all tags: whether the ranks have them with their bytes."""
        asleep = self._sleeping(self.look())
        if asleep:
            self._hold_for_asleep(asleep)
            raise PoorwillError(f"wake_up: {_list(asleep)} still sleep on some rank")
        # Another data parallel rank may miss weights that this one has.
        may_wait = self._is_held or self.is_grouped or self.level == 2
        self._is_held = self.not_ready is not None or (may_wait and not self.goes_on())
        return not self._is_held

    # Ranks

    def look(self) -> list[dict[str, Any]]:
        """Asks the ranks for their status. Keeps their events for the next frontend."""
        statuses: list[dict[str, Any]] = self._ask("poorwill_status")
        self.keep_events(statuses)
        undefined, unwritten = set(), []
        for status in statuses:
            del status["events"]
            undefined |= set(status["undefined"]) - set(status["sleeping"])
            if status["unwritten"] is not None:
                unwritten.append(status["unwritten"])
        self.not_ready = _sentence(sorted(undefined, reverse=True), unwritten) if undefined else None
        return statuses

    def processes(self) -> list[dict[str, Any]]:
        """The ranks' processes, which stay the same, while anything sleeps: no others are taken off."""
        if not self.asleep:
            return []
        if self._processes is None:
            self._processes = self._ask("poorwill_process")
        return self._processes

    def keep_events(self, statuses: list[dict[str, Any]]) -> None:
        """Keeps events for the next frontend that asks."""
        for status in statuses:
            self._events.setdefault(status["rank"], []).extend(status["events"])

    @staticmethod
    def _sleeping(statuses: list[dict[str, Any]]) -> frozenset[str]:
        """The tags that sleep and that vLLM can wake."""
        sleeping = {tag for status in statuses for tag in status["sleeping"]}
        return frozenset(sleeping if sleeping <= set(TAGS) else TAGS)

    def look_again(self) -> None:
        """After a call that may have written weights: resumes the scheduler if only they were missing."""
        self.look()
        # Data parallel ranks resume together: their frontend resumes all once all are ready.
        if self.goes_on():
            self.go_on()

    def waits_for(self) -> str | None:
        """Why nothing is computed, as far as weights are the reason."""
        if self.not_ready is None and self._is_held and not self.executor.is_sleeping:
            return (
                "the weights are there, and the engine waits for other data parallel engines to have theirs"
            )
        return self.not_ready

    def go_on(self) -> None:
        """Resumes the scheduler if it was held for weights that are there now.

        Once for each hold, whichever frontend asks, since data parallel ranks meet in it.
        """
        if self._is_held and self.not_ready is None and not self.executor.is_sleeping:
            self._is_held = False
            self._resume()

    def status(self) -> dict[str, Any]:
        """The ranks' memory, and the events since a frontend asked last.

        `is_held` asks the frontend to resume the scheduler once all its engines are ready, since they resume
        together.
        """
        ranks = self.look()
        if self.goes_on():
            self.go_on()
        for status in ranks:
            status["events"] = self._events.pop(status["rank"], [])
        return {
            "engine": getattr(self.core, "engine_index", 0),
            "not_ready": self.not_ready,
            "refusal": self.refusal,
            "is_paused": bool(self.core.is_scheduler_paused()),
            "is_held": self._is_held and not self.executor.is_sleeping,
            "ranks": ranks,
        }

    def _collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *others: Any,
        **options: Any,
    ) -> Any:
        """Replaces the executor's own."""
        if _keep.CACHE in self.asleep and self.keeper.has_kept and not _only_reads(method):
            # Also if it fails in the middle.
            self._is_outdated = True
        if others or options or not isinstance(method, str) or not self._is_answered(method):
            return self._stock_rpc(method, timeout, args, kwargs, *others, **options)
        if method == "sleep":
            self._commit_sleep()
            if self._kept is not None:
                kwargs = {**(kwargs or {}), _KEPT: self._kept}
        return self._ask(method, timeout, args, kwargs)

    def _is_answered(self, method: str) -> bool:
        return method in _ANSWERED or (method in self.vllm.touching and bool(self.asleep))

    def _ask(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """The result of each rank, or one error of all that failed."""
        with self.ranks.deciding(method, tuple(args), kwargs or {}) as call:
            answers = self._stock_rpc(attempt, timeout, call, None)
        errors = {rank: answer["error"] for rank, answer in enumerate(answers) if answer["error"] is not None}
        # Those that are as they were for the sake of another have no reason of their own.
        of_their_own = {rank: words for rank, words in errors.items() if not answers[rank]["is_undone"]}
        kind, errors = (PoorwillError, of_their_own) if of_their_own else (UndoneError, errors)
        if errors:
            if len(answers) == 1:
                raise kind(errors[0])
            failures = "; ".join(f"rank {rank}: {words}" for rank, words in errors.items())
            raise kind(f"{method}: {len(errors)} of {len(answers)} ranks failed: {failures}")
        return [answer["value"] for answer in answers]

    # Requests

    @property
    def refusal(self) -> str | None:
        """Why no request can be computed, except a pause."""
        reasons = [sleeps(self.asleep)] if self.asleep else []
        if self.not_ready is not None:
            reasons.append(self.not_ready)
        return "; ".join(reasons) or None

    def refuses(self, request: Any) -> bool:
        """Whether a request would wait for a wake, or be computed with missing weights."""
        if self.refusal is None or self.vllm.is_aborted(request):
            return False
        # A request that continues one from before the sleep waits with it.
        return not self.vllm.is_known(self.core.scheduler, request)

    def refuse(self, module: Any, stock: Callable[..., Any], request: Any, wave: int) -> None:
        """Answers a request with the reason. In a process of its own an exception would end the core."""
        core, refusal = self.core, self.refusal
        assert refusal is not None
        if not hasattr(core, "output_queue"):
            raise NotReadyError(refusal)
        _log.warning("request %s is refused: %s", request.request_id, refusal)
        if self.vllm.answer_refused(module, core, request, refusal):
            request.abort_immediately = True
            stock(request, wave)


def _only_reads(method: Any) -> bool:
    return isinstance(method, str) and (method in _READING or method.startswith("poorwill_"))


def _engine_of(core: Any) -> _Engine | None:
    engine: _Engine | None = vars(core).get(_ENGINE)
    if engine is None and is_active(core.vllm_config):
        engine = _Engine(core)
        setattr(core, _ENGINE, engine)
    return engine


def install_core(module: Any, vllm: _generations.Generation | None = None) -> None:
    """Installs the hooks on the EngineCore classes of `vllm.v1.engine.core`.

    `vllm` is the adapter; None is that of this process's vLLM.
    """
    base = module.EngineCore
    base.poorwill_vllm = vllm = vllm or _generations.chosen()
    replace(base, "sleep", _sleep)
    replace(base, "wake_up", _wake_up)
    replace(base, "collective_rpc", _collective_rpc)
    replace(base, "add_request", functools.partial(_add_request, module))
    if vllm.releases_cache:
        replace(base, "release_kv_cache_memory", _release_kv_cache_memory)
    for of in list(vars(module).values()):
        # Each class with its own method, since they act before they call the parent's.
        for name, make in (("resume_scheduler", _resume_scheduler), ("pause_scheduler", _pause_scheduler)):
            if isinstance(of, type) and issubclass(of, base) and name in vars(of):
                replace(of, name, make)
    base.poorwill_status = _poorwill_status
    base.poorwill_not_ready = _poorwill_not_ready
    base.poorwill_go_on = _poorwill_go_on
    base.poorwill_processes = _poorwill_processes
    base.poorwill_part = _poorwill_part
    base.poorwill_cannot_keep = _poorwill_cannot_keep


def _sleep(stock: Any) -> Callable[..., Any]:
    def sleep(self: Any, level: int = 1, mode: str = "abort", keep_tags: Sequence[str] = ()) -> Any:
        engine = _engine_of(self)
        if engine is None:
            _keep.refuse_tags(keep_tags)
            return stock(self, level, mode)
        return engine.sleep(functools.partial(stock, self), level, mode, keep_tags)

    return sleep


def _wake_up(stock: Any) -> Callable[..., Any]:
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        engine = _engine_of(self)
        if engine is None:
            return stock(self, tags)
        return engine.wake_up(functools.partial(stock, self), tags)

    return wake_up


def _release_kv_cache_memory(stock: Any) -> Callable[..., Any]:
    def release_kv_cache_memory(self: Any) -> Any:
        # From here on each rank answers.
        _engine_of(self)
        return stock(self)

    return release_kv_cache_memory


def _resume_scheduler(stock: Any) -> Callable[..., Any]:
    def resume_scheduler(self: Any) -> Any:
        engine = _engine_of(self)
        if engine is None or engine.is_resuming:
            return stock(self)
        return engine.resume(functools.partial(stock, self))

    return resume_scheduler


def _pause_scheduler(stock: Any) -> Callable[..., Any]:
    def pause_scheduler(self: Any, mode: str = "abort", clear_cache: bool = True) -> Any:
        engine = _engine_of(self)
        result = stock(self, mode, clear_cache and (engine is None or engine.keeper.clears))
        if engine is not None:
            engine.pause()
        return result

    return pause_scheduler


def _collective_rpc(stock: Any) -> Callable[..., Any]:
    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        engine = _engine_of(self)
        result = stock(self, method, timeout, args, kwargs)
        if engine is not None and method == "poorwill_status":
            # The caller has taken the events, and the metrics need them, too.
            engine.keep_events(result)
        # Any other method may also write weights.
        if engine is not None and engine.is_short:
            engine.look_again()
        return result

    return collective_rpc


def _add_request(module: Any, stock: Any) -> Callable[..., Any]:
    def add_request(self: Any, request: Any, request_wave: int = 0) -> Any:
        engine = _engine_of(self)
        if engine is None or not engine.refuses(request):
            return stock(self, request, request_wave)
        return engine.refuse(module, functools.partial(stock, self), request, request_wave)

    return add_request


def _poorwill_status(self: Any) -> dict[str, Any]:
    """For frontends: the ranks' memory, and the events since one asked last."""
    return _poorwills(self, "poorwill_status").status()


def _poorwill_not_ready(self: Any) -> str | None:
    """For frontends: why nothing can be computed, without asking the ranks."""
    engine = _engine_of(self)
    return None if engine is None else engine.waits_for()


def _poorwill_go_on(self: Any) -> None:
    """For frontends whose engines are all ready."""
    engine = _engine_of(self)
    if engine is not None:
        engine.go_on()


def _poorwill_processes(self: Any) -> list[dict[str, Any]]:
    """For frontends: the processes that hold the GPUs."""
    engine = _engine_of(self)
    return [] if engine is None else engine.processes()


def _poorwill_cannot_keep(self: Any) -> str | None:
    """For frontends: why no sleep can keep requests and prefixes."""
    engine = _engine_of(self)
    return None if engine is None else engine.cannot_keep()


def _poorwill_part(self: Any, act: str, args: Any) -> Any:
    """For frontends of shared engines: what this one does in their sleep or wake, by a method of `Part`."""
    return getattr(_poorwills(self, act).part, act)(*args)


def _poorwills(core: Any, asked: str) -> _Engine:
    engine = _engine_of(core)
    if engine is None:
        raise PoorwillError(f"{asked}: the workers are not poorwill's; worker_cls is not {WORKER}")
    return engine
