"""`attn_implementation="headwise"`: transformers' attention on headwise's kernels.

transformers is not imported for it: where that comes later, it is told when its models' base class
is loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "headwise"
_MODELS = "transformers.modeling_utils"


def register() -> None:
    """Register `attn_implementation="headwise"` with transformers, which is imported for it.

    Not needed where headwise was imported: the name is then known as soon as transformers is. What
    the kernel does not serve goes to transformers' own `sdpa`; calls with softcap or sinks, which
    that cannot compute, to the backend that `attend()` takes. `accelerate(model)` around such a
    model gives an account of it.

    Raises:
        ImportError: transformers is not installed, or has no `AttentionInterface`.

    >>> import headwise as hw
    >>> hw.register()
    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = dict(hidden_size=24, num_attention_heads=4, num_key_value_heads=2)
    >>> config = LlamaConfig(**sizes, intermediate_size=32, num_hidden_layers=1, vocab_size=9)
    >>> LlamaModel._from_config(config, attn_implementation="headwise").config._attn_implementation
    'headwise'
    """
    _tell(importlib.import_module(_MODELS))


def register_when_imported() -> None:
    """Register as soon as transformers' models are there: now, or when they are imported."""
    loaded = sys.modules.get(_MODELS)
    if loaded is not None and hasattr(loaded, "AttentionInterface"):
        _tell(loaded)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _tell(models: ModuleType) -> None:
    from .adapters.transformers_implementation import headwise_attention

    masks: Any = importlib.import_module("transformers.masking_utils").AttentionMaskInterface
    interface: Any = models.AttentionInterface
    interface.register(_NAME, headwise_attention)
    masks.register(_NAME, masks()["sdpa"])


class _Finder(MetaPathFinder):
    """Finds nothing itself: lets transformers' models be loaded as they are, then registers."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _MODELS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self)
        return spec


class _Then(Loader):
    """A loader that registers when the module is there."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        sys.meta_path.remove(self._finder)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        if hasattr(module, "AttentionInterface"):
            _tell(module)
