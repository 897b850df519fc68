"""Whether one definition can stand in another's place."""

import inspect

from poorwill.vllm._versions import Found

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def replacing(ours: Found, theirs: Found) -> str | None:
    """What a caller of theirs could do that ours does not take."""
    if ours.kind != theirs.kind or ours.is_async != theirs.is_async:
        return f"is {_described(ours)}, and theirs is {_described(theirs)}"
    kinds = {parameter.kind for parameter in ours.parameters}
    named = {parameter.name: parameter for parameter in ours.parameters}
    takes_all = set(_STARRED) <= kinds
    places = [p.name for p in ours.parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    for place, parameter in enumerate(theirs.parameters):
        own = named.get(parameter.name)
        if parameter.kind in _STARRED:
            if parameter.kind not in kinds:
                return f"does not take {parameter}"
        elif own is None:
            if not takes_all:
                return f"does not take {parameter.name}"
        elif own.default is own.empty and parameter.default is not parameter.empty:
            return f"demands {own.name}"
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and places[place : place + 1] != [own.name]:
            return f"does not take {own.name} in its place"
    theirs_by_name = {parameter.name for parameter in theirs.parameters}
    for parameter in ours.parameters:
        if (
            parameter.default is parameter.empty
            and parameter.kind not in _STARRED
            and parameter.name not in theirs_by_name
        ):
            return f"demands {parameter.name}"
    return None


def _described(found: Found) -> str:
    parameters = ", ".join(
        str(parameter) if parameter.default is parameter.empty else f"{parameter.name}={parameter.default}"
        for parameter in found.parameters
    )
    return f"{'an async ' if found.is_async else 'a '}{found.kind} ({parameters})"
