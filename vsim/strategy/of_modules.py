"""Strategies that consist of communication modules, and take the modules' arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

from vsim.arguments import renaming


def init_of(
    modules: Sequence[Callable[..., Any]],
    names: Mapping[str, str | None],
    positions: Sequence[str],
    options: Sequence[Parameter],
    compose: Callable[..., None],
) -> Callable[..., None]:
    """Return the `__init__` of a strategy: its arguments are inner_optim, the modules' arguments and `options`.

    An argument of several modules is passed to all of them; its default is the last module's.

    Args:
        names: a module's name of an argument → the strategy's name for it; None if the strategy does not take it.
        positions: arguments that may be given by position, in this order.
        compose: called with the strategy, its modules, inner_optim, and the options by name.
    """
    known = {"inner_optim": Parameter("inner_optim", Parameter.KEYWORD_ONLY, default=None, annotation="Optim")}
    taken: list[dict[str, str]] = []  # per module: its name of an argument → the strategy's
    for module in modules:
        own = inspect.signature(module).parameters
        taken.append({theirs: name for theirs in own if (name := names.get(theirs, theirs)) is not None})
        for theirs, name in taken[-1].items():
            known[name] = own[theirs].replace(name=name, kind=Parameter.KEYWORD_ONLY)
    parameters = [
        *(known.pop(name).replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for name in positions),
        *known.values(),
        *options,
    ]
    signature = inspect.Signature([Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *parameters])

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        parts = []
        for module, own in zip(modules, taken, strict=True):
            with renaming(own):
                parts.append(module(**{theirs: given[name] for theirs, name in own.items()}))
        compose(self, parts, given["inner_optim"], {option.name: given[option.name] for option in options})

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return __init__


def docstring_of(own: str, modules: Sequence[type], names: Mapping[str, str | None]) -> str:
    """Return the docstring of a strategy: the strategy's text, and the arguments and sections of its modules.

    A single module adds its text except the first paragraph; several modules add no text. A section, such as
    `Payload:`, is the strategy's own if present, otherwise the last module's.
    """
    text, sections = _parts(own)
    entries: list[str] = []
    for module in modules:
        more, theirs = _parts(module.__doc__ or "")
        text += more[1:] if len(modules) == 1 else []
        entries += _entries(theirs.pop("Args", ""), names)
        sections = theirs | sections
    entries.append("    inner_optim, lr, …: the options of all strategies; see `Algorithm`.")
    return "\n\n".join([*text, "\n".join(["Args:", *entries]), *sections.values()])


def _parts(docstring: str) -> tuple[list[str], dict[str, str]]:
    """Return a docstring's paragraphs before its sections, and a dict of its sections: first word → text."""
    text: list[str] = []
    sections: dict[str, str] = {}
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        if header := re.match(r"(Args|Payload|Raises|Deviation)s?\b.*?:", paragraph):
            sections[header[1]] = paragraph
        elif sections:
            sections[next(reversed(sections))] += f"\n\n{paragraph}"
        else:
            text.append(paragraph)
    return text, sections


def _entries(args: str, names: Mapping[str, str | None]) -> list[str]:
    """Return the entries of an Args section, each argument renamed to the strategy's name for it."""
    found = []
    for entry in re.split(r"\n(?= {4}\S)", args)[1:]:
        heads, colon, text = entry.strip().partition(":")
        known = [names.get(head, head) for head in heads.split(", ")]
        if None not in known:
            found.append(f"    {', '.join(map(str, known))}{colon}{text}")
    return found
