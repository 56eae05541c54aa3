"""`prune_(model, heads)`: remove heads from a model's weights permanently."""

from __future__ import annotations

import copy
import inspect
import re
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.attention import MultiHeadAttention
from ..layers.torch_attention import TorchMultiHeadAttention, replace_attention_
from ..weights.convert import stored_tensors
from ..weights.detect import LayerTensors, detect_layers
from ..weights.layout_types import LayerSizes
from ..weights.packing import per_head, sizes_of, subset
from .ablate import Heads, heads_by_layer
from .head_address import Layer, as_written
from .modules import attending, check_model
from .ranks import HEADS, number_of_heads

_NUM_HEADS = (*HEADS, "n_local_heads")
_KV_HEADS = "num_kv_heads num_key_value_heads n_kv_heads n_local_kv_heads kv_heads".split()
_SHARED = "num_key_value_groups n_rep".split()
_WIDTHS = "all_head_size inner_dim split_size attn_dim q_size embed_dim".split()
_KV_WIDTHS = "inner_kv_dim kv_dim kv_size".split()
_HEAD_WIDTHS = "head_dim attention_head_size dim_head head_size key_value_proj_dim".split()
"""Module attributes for the numbers of heads, key/value heads, and heads per key/value head, and
for the widths of all heads, all key/value heads, and one head."""

_OF_HEADS = re.compile(
    r"(^|\.)(sinks|relative_attention_bias\.weight|relative_position_bias_table)$"
)
"""Parameters within attention modules whose last axis is the heads."""


@torch.no_grad()
def prune_(model: nn.Module, heads: Heads) -> dict[str, int]:
    """Remove heads from a model: their rows of q, k and v, and their columns of the output.

    The pruned model gives the same outputs as `ablate(model, heads)`, with fewer weights and less
    work. Parameters are replaced, so create the optimizer afterwards. The remaining heads are
    renumbered from 0. Layers of `nn.MultiheadAttention`, which cannot have fewer heads, are
    replaced by headwise's (`hw.replace_attention_`).

    If several heads share a key and a value (grouped heads), remove all heads of a group, or the
    same number from each group.

    For models of transformers, the config gets the new sizes if it can express them (Llama's
    `num_attention_heads` with `head_dim`, the same in every layer), and `save_pretrained` and
    `from_pretrained` keep working. Otherwise, `config.pruned_heads` has the removed heads by module
    name, in the numbering of the original model, and `save_pretrained` saves the smaller weights;
    to load them, build the model from its config, prune it accordingly, then load the weights.

    Args:
        model: a model whose attention weights have a layout that `convert` supports.
        heads: the heads, as in `ablate`: `"L2H9"`, `(2, 9)`, `("h.2.attn", 9)`, several, or a dict
            of layers and their heads. Layer numbers are those of `watch` if the order of the calls
            is known: for one stack of layers, and encoders with a decoder.

    Returns:
        The number of remaining heads, by the names of the pruned modules.

    Raises:
        ValueError: an unknown layout, layer or head; all heads of a layer; groups of different
            sizes would remain; a layer without an output projection; position biases per head that
            come from another module (ALiBi, T5's first layer); weights that are shared, quantized
            or sharded; a module that does not store the number or the width of its heads. The model
            is not changed in these cases.

    Source: Michel et al. 2019; Voita et al. 2019.

    >>> import headwise as hw
    >>> layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)
    >>> with hw.ablate(layer, ["L0H0"]):
    ...     wanted = layer(x)
    >>> prune_(layer, ["L0H0"])
    {'': 2}
    >>> torch.allclose(layer(x), wanted, atol=1e-6), layer.qkv.weight.shape
    (True, torch.Size([48, 24]))
    """
    check_model("prune_", model)
    call = f"prune_({type(model).__name__}, {reprlib.repr(heads)})"
    layers = _attention_of(model, call)
    chosen = _chosen(model, layers, heads_by_layer(model, heads, call), call)
    for one in chosen:
        one.choose(call)
    _check_together(layers, chosen, call)
    config = _config_after(model, chosen)
    for one in chosen:
        one.check(config is not None, call)
    if any(isinstance(one.owner, nn.MultiheadAttention) for one in chosen):
        replace_attention_(model)
    modules = _modules(model)
    for one in chosen:
        one.apply(modules[one.place])
    if config is not None:
        model.config.__dict__.update(config.__dict__)  # type: ignore[union-attr]
        vars(model.config).pop("pruned_heads", None)
    elif hasattr(getattr(model, "config", None), "to_dict"):
        gone = {name: vars(module).get("pruned_heads") for name, module in modules.items()}
        model.config.pruned_heads = {name: one for name, one in gone.items() if one}  # type: ignore[union-attr]
    return {one.name: len(one.left) for one in chosen}


@dataclass(eq=False)
class _PrunedAttention:
    """An attention module: its name in tables, its path, its streams and the heads to remove."""

    name: str
    place: str
    owner: nn.Module
    layers: list[LayerTensors]
    sizes: list[LayerSizes] = field(default_factory=list)
    patterns: list[Mapping[str, tuple[str, str]]] = field(default_factory=list)
    remove: set[int] = field(default_factory=set)
    left: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The path without numbers."""
        return re.sub(r"\d+", "#", self.place)

    def choose(self, call: str) -> None:
        """Determine the sizes of the layer; raise ValueError if it cannot be pruned."""
        at = f"{call}: in {self.name!r} ({type(self.owner).__name__})"
        self._check_weights(at)
        state = dict(self.owner.named_parameters())
        count = number_of_heads(*self.owner.modules())
        for layer in self.layers:
            held, patterns = stored_tensors(layer, lambda name: state[self._inside(name)])
            if not any(parts == "out.weight" for parts, _ in patterns.values()):
                raise ValueError(
                    f"{at}: it has no output projection, so its heads are columns of its output"
                )
            self.patterns.append(patterns)
            self.sizes.append(sizes_of(held, patterns, count, None, at))
        sizes = self.sizes[0]
        lacking = sorted(self.remove - set(range(sizes.num_heads)))
        if lacking:
            last = sizes.num_heads - 1
            raise ValueError(f"{at}: it has the heads 0 to {last}, and no {lacking[0]}.")
        share = sizes.num_heads // sizes.num_kv_heads
        by_group: dict[int, list[int]] = {}
        for head in sorted(set(range(sizes.num_heads)) - self.remove):
            turns = self.layers[0].layout.turns
            group = head % sizes.num_kv_heads if turns else head // share
            by_group.setdefault(group, []).append(head)
        if not by_group:
            raise ValueError(f"{at}: all of its {sizes.num_heads} heads; keep at least one.")
        self.groups = sorted(by_group)
        left = [by_group[group] for group in self.groups]
        if len({len(one) for one in left}) > 1:
            raise ValueError(
                f"{at}: {share} heads share a key and a value each, and of their groups "
                f"{', '.join(str(len(one)) for one in left)} heads would be left; remove whole "
                f"groups, or as many heads of each."
            )
        columns = zip(*left, strict=True) if self.layers[0].layout.turns else left
        self.left = [head for one in columns for head in one]
        if not any(_numbers(self.owner, _NUM_HEADS, sizes.num_heads)) and not any(
            _numbers(self.owner, _HEAD_WIDTHS, sizes.head_dim)
        ):
            raise ValueError(
                f"{at}: none of its attributes is known to hold the number of its heads "
                f"({sizes.num_heads}) or their width ({sizes.head_dim}), so that it would go on "
                f"with the old one."
            )

    def _check_weights(self, at: str) -> None:
        names = Counter(id(x) for _, x in self.owner.named_parameters(remove_duplicate=False))
        for name, x in self.owner.named_parameters():
            if names[id(x)] > 1:
                raise ValueError(f"{at}: {name} is shared between two of its parts.")
            if not x.is_floating_point() or hasattr(x, "device_mesh") or hasattr(x, "ds_id"):
                raise ValueError(f"{at}: {name} is quantized or sharded; prune the whole weights.")

    def _inside(self, name: str) -> str:
        """Return the name of a parameter within the module."""
        return as_written(name).removeprefix(f"{self.place}." if self.place else "")

    def smaller(self) -> dict[str, Tensor]:
        """Return the parameters of the remaining heads, by their names in the module."""
        state, new = dict(self.owner.named_parameters()), {}
        for layer, sizes, patterns in zip(self.layers, self.sizes, self.patterns, strict=True):
            for name, (full,) in layer.where.items():
                short = self._inside(full)
                heads, groups = (
                    torch.tensor(index, device=state[short].device)
                    for index in (self.left, self.groups)
                )
                new[short] = subset(*patterns[name], state[short], sizes, heads, groups)
        ours = [name for name in state if _OF_HEADS.search(name)]
        return new | {name: state[name][..., self.left].clone() for name in ours}

    def check(self, config_fits: bool, call: str) -> None:
        """Compare the pruned module with one with zeroed heads, if it can be called alone.

        Raises:
            ValueError: the call fails, or the outputs differ.
        """
        at = f"{call}: in {self.name!r} ({type(self.owner).__name__})"
        if not config_fits and _reads_config(self.owner):
            raise ValueError(
                f"{at}: it reads the number of its heads from the config, which holds for all "
                f"layers; remove as many heads of every layer."
            )
        owner = self.owner
        if isinstance(owner, nn.MultiheadAttention):
            owner = TorchMultiHeadAttention(owner)
        zeroed, pruned = (copy.deepcopy(owner).eval() for _ in range(2))
        for layer, sizes, patterns in zip(self.layers, self.sizes, self.patterns, strict=True):
            for name, (full,) in layer.where.items():
                if patterns[name][0] == "out.weight":
                    weight, mask = (
                        zeroed.get_parameter(self._inside(full)),
                        torch.ones(sizes.num_heads),
                    )
                    mask[[*self.remove]] = 0
                    weight.mul_(per_head(*patterns[name], {"out": mask}, sizes).to(weight))
        self.apply(pruned)
        weight = next(self.owner.parameters())
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, 3, self.sizes[0].embed_dim, generator=generator).to(weight)
        attempts: list[Any] = [(x,), (x, x, x)]
        for given in attempts:
            try:
                want = _first(zeroed.forward(*given))
            except Exception:  # it needs other arguments, which only its model knows
                continue
            try:
                got = _first(pruned.forward(*given))
            except Exception as error:
                raise ValueError(
                    f"{at}: with fewer heads its forward fails ({error!r:.90}), as it may take "
                    f"the width of its heads from its input's; they can be ablated, not pruned."
                ) from None
            if not torch.allclose(got, want, rtol=1e-2, atol=1e-3 * float(want.abs().max())):
                raise ValueError(
                    f"{at}: without the heads, its output differs from that with zeros."
                )
            return

    def apply(self, owner: nn.Module) -> None:
        """Replace the parameters of a module and its size attributes."""
        sizes, heads, groups = self.sizes[0], len(self.left), len(self.groups)
        changes = [
            (_WIDTHS, sizes.num_heads * sizes.head_dim, heads * sizes.head_dim),
            (_KV_WIDTHS, sizes.num_kv_heads * sizes.head_dim, groups * sizes.head_dim),
            (_KV_HEADS, sizes.num_kv_heads, groups),
            (_SHARED, sizes.num_heads // sizes.num_kv_heads, heads // groups),
            (_NUM_HEADS, sizes.num_heads, heads),
        ]
        places = [([*_numbers(owner, names, old)], new) for names, old, new in changes]
        for name, tensor in self.smaller().items():
            _put(owner, name, tensor)
        for found, new in places:
            for module, name in found:
                if not isinstance(module, MultiHeadAttention) or name.endswith("heads"):
                    setattr(module, name, new)
        owner.num_heads = heads  # type: ignore[assignment]  # its config may hold that of other layers
        if hasattr(owner, "sections"):  # headwise's layer
            rows = groups * sizes.head_dim
            owner.sections = (heads * sizes.head_dim, rows, rows)[-len(owner.sections) :]  # type: ignore
        before: list[int] = getattr(owner, "pruned_heads", [])  # type: ignore[assignment]
        first = [n for n in range(sizes.num_heads + len(before)) if n not in before]
        owner.pruned_heads = sorted({*before, *(first[head] for head in self.remove)})  # type: ignore


def _numbers(owner: nn.Module, names: Sequence[str], value: int) -> Iterator[tuple[nn.Module, str]]:
    """Yield the attributes of a module and its parts that have one of the names and this value."""
    for module in owner.modules():
        for name in names:
            if type(vars(module).get(name)) is int and vars(module)[name] == value:
                yield module, name


def _reads_config(module: nn.Module) -> bool:
    """Return True if a forward reads the number of heads from the config."""
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False
    names = "|".join((*_NUM_HEADS, *_KV_HEADS))
    return re.search(rf"config\.({names})\b", source) is not None


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _put(owner: nn.Module, name: str, new: Tensor) -> None:
    """Replace a parameter, and the sizes in its module."""
    place, _, last = name.rpartition(".")
    module: Any = owner.get_submodule(place)
    module._parameters[last] = nn.Parameter(new, module._parameters[last].requires_grad)
    if last != "weight" or new.dim() != 2:
        return
    for names in (
        ("out_features", "in_features"),
        ("nx", "nf"),
        ("num_embeddings", "embedding_dim"),
    ):
        if all(hasattr(module, one) for one in names):
            for one, size in zip(names, new.shape, strict=True):
                setattr(module, one, size)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {as_written(name): module for name, module in model.named_modules()}


def _attention_of(model: nn.Module, call: str) -> list[_PrunedAttention]:
    """Return every attention module of a known layout, in the order of the model's parts.

    Raises:
        ValueError: no known layout.
    """
    shapes = {
        as_written(name): tuple(x.shape)
        for name, x in model.named_parameters()
        if not name.endswith("sinks")
    }
    grouped = any("GPTBigCode" in type(one).__name__ for one in model.modules())
    try:
        layers = detect_layers(shapes, "gpt_bigcode" if grouped else "nanogpt")
    except ValueError as error:
        raise ValueError(f"{call}: {str(error).removeprefix('detect_layout(…): ')}") from None
    modules, names = _modules(model), attending(model)
    found: dict[str, _PrunedAttention] = {}
    for layer in layers:
        place = layer.prefix.rstrip("./")
        if place not in modules:  # the second stream of one module
            place = place.rpartition(".")[0]
        inside = [name for name in names if f"{name}.".startswith(f"{place}." if place else "")]
        name = inside[0] if len(inside) == 1 else place
        found.setdefault(place, _PrunedAttention(name, place, modules[place], [])).layers.append(
            layer
        )
    order = {name: number for number, name in enumerate(modules)}
    return sorted(found.values(), key=lambda one: order[one.place])


def _chosen(
    model: nn.Module,
    layers: list[_PrunedAttention],
    given: Mapping[Layer, tuple[int, ...]],
    call: str,
) -> list[_PrunedAttention]:
    """Return the modules whose heads are given, with these heads."""
    for layer, heads in given.items():
        if isinstance(layer, int):
            _check_numbers(model, layers, layer, call)
        matching = [
            one
            for number, one in enumerate(layers)
            if layer == number
            or (
                isinstance(layer, str)
                and (fnmatchcase(one.name, layer) or fnmatchcase(one.place, layer))
            )
        ]
        if not matching:
            names = ", ".join(repr(one.name) for one in layers[:6])
            raise ValueError(
                f"{call}: no attention of a known layout is {layer!r}; there are {len(layers)}: "
                f"{names}."
            )
        for one in matching:
            one.remove |= set(heads)
    return [one for one in layers if one.remove]


def _check_numbers(model: nn.Module, layers: list[_PrunedAttention], layer: int, call: str) -> None:
    """Raise ValueError if the order of the first calls of a model's layers is not known."""
    config = getattr(model, "config", None)
    unknown = set(attending(model)) - {one.name for one in layers} - {one.place for one in layers}
    several = len({one.kind for one in layers}) > 1
    if unknown or (several and not getattr(config, "is_encoder_decoder", False)):
        why = f"{min(unknown)!r} has no known layout" if unknown else "it has several stacks"
        raise ValueError(
            f"{call}: layers are numbered by their first calls, which are not known for this "
            f"model ({why}); give names of modules instead of {layer}."
        )


def _check_together(
    layers: list[_PrunedAttention], chosen: list[_PrunedAttention], call: str
) -> None:
    """Raise ValueError for heads whose position biases come from elsewhere."""
    for one in chosen:
        config, kind = getattr(one.owner, "config", None), type(one.owner).__name__
        if getattr(config, "alibi", False) or kind.startswith(("Bloom", "Mpt")):
            raise ValueError(
                f"{call}: {one.name!r} takes ALiBi biases of each head, which the model makes for "
                f"all layers together; its heads can be ablated, not pruned."
            )
        if one.layers[0].layout.name != "t5":
            continue
        others = [other for other in layers if other.kind == one.kind]
        if any(other.remove != one.remove for other in others):
            raise ValueError(
                f"{call}: the layers of {one.kind!r} share the position biases of the first, one a "
                f"head; remove the same heads of all {len(others)} layers."
            )


def _config_after(model: nn.Module, chosen: list[_PrunedAttention]) -> Any:
    """Return a config from which transformers builds the pruned model; None if there is none."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(model, "save_pretrained") or not chosen:
        return None
    sizes, heads, groups = chosen[0].sizes[0], len(chosen[0].left), len(chosen[0].groups)
    shapes = {as_written(name): x.shape for name, x in model.named_parameters()}
    for one in chosen:
        start = f"{one.place}." if one.place else ""
        shapes |= {start + name: x.shape for name, x in one.smaller().items()}
    new = copy.deepcopy(config)
    vars(new).pop("pruned_heads", None)
    for names, old, size in (
        (_NUM_HEADS, sizes.num_heads, heads),
        (_KV_HEADS, sizes.num_kv_heads, groups),
    ):
        for name in names:
            if getattr(new, name, None) == old:
                setattr(new, name, size)
    try:
        new.head_dim = sizes.head_dim
        with torch.device("meta"):
            built = type(model)(new)  # type: ignore[call-arg]
    except Exception:  # a config that does not fit may raise anything
        return None
    return new if {as_written(n): x.shape for n, x in built.named_parameters()} == shapes else None
