"""Configurations that a constructor is handed: their classes, and how one is made."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

from .names import building_role
from .sizes import fields_of


def config_classes(factory: Callable[..., Any], name: str) -> tuple[bool, list[type]]:
    """Whether an argument is annotated with classes, and those that it may be of: these, else the
    configurations that its file speaks of."""
    try:
        target = factory.__init__ if inspect.isclass(factory) else factory
        kind = typing.get_type_hints(target).get(name)
    except Exception:  # an annotation that cannot be read is no annotation
        kind = None
    said = [one for one in (kind, *typing.get_args(kind)) if inspect.isclass(one)]
    home = vars(sys.modules.get(factory.__module__, typing))
    kinds = [one for key, one in home.items() if inspect.isclass(one) and key.endswith("Config")]
    own = [_of_text(one) for one in said if _can_be_built(one)]
    if not own or getattr(own[0], "model_type", None):  # which may hold the one that is meant
        own += [one for one in kinds if getattr(one, "model_type", None) and one not in own]
    return bool(said), own


def configured(kind: type, fields: Mapping[str, Any], code: str) -> Any:
    """A configuration with such fields; one that refuses them is made by itself, and gets those
    that some code reads."""
    try:
        return kind(**fields)
    except Exception as refused:
        try:
            config = kind()
        except Exception:  # it wants fields that nobody knows
            raise refused from None
    for name in (name for name in fields if re.search(rf"\b{name}\b", code)):
        setattr(config, name, fields[name])
    return config


def _of_text(kind: type) -> type:
    """The class of the configuration within that speaks of heads, where this one does not."""
    if not getattr(kind, "sub_configs", None):
        return kind
    try:
        whole = kind()
        heads = any(building_role(name) == "heads" for name in fields_of(whole))
        return kind if heads else type(whole.get_text_config())
    except Exception:  # it cannot be made without a word
        return kind


def _can_be_built(kind: type) -> bool:
    """Whether an annotation names a class of its own, not a dictionary or a protocol."""
    known = kind.__module__ in ("builtins", "typing") or issubclass(kind, Mapping)
    return not known and not getattr(kind, "_is_protocol", False)
