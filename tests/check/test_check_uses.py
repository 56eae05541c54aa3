"""Arguments of constructors whose names tell nothing: what the code takes them for."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check
from headwise.check.target.resolve import resolve
from headwise.check.target.signatures import signature
from headwise.check.target.sizes import Unknown
from headwise.check.target.uses import documented, use_of, use_of_field


class Base(nn.Module):
    """Right attention; each subclass builds it from arguments under names of its own."""

    def build(self, wide: int, heads: int, size: int, bias: bool = True) -> None:
        self.many, self.last = heads, nn.Linear(heads * size, wide, bias=bias)
        self.q, self.k, self.v = (nn.Linear(wide, heads * size, bias=bias) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = (f(x).unflatten(-1, (self.many, -1)) for f in (self.q, self.k, self.v))
        q, k, v = (one.transpose(1, 2) for one in rows)
        heads = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.last(heads.transpose(1, 2).flatten(2))


class Taken(Base):
    """Its width goes into a Linear, and is shared by heads under a name as odd."""

    def __init__(self, nodes: int, crew: int, forget: float, plain: bool) -> None:
        super().__init__()
        self.nodes = nodes
        self.mixed, self.lose = nn.Linear(nodes, nodes), nn.Dropout(forget)
        self.build(*(nodes, crew, nodes // crew))


class Counted(Base):
    def __init__(self, dim: int, crew: int) -> None:
        super().__init__()
        assert dim % crew == 0
        self.build(dim, crew, dim // crew)


class Method(Base):
    """What a method of its own takes for heads is heads."""

    def __init__(self, dim: int, crew: int) -> None:
        super().__init__()
        self.build(dim, crew, dim // crew)


class PerHead(Base):
    def __init__(self, dim: int, n_heads: int, p_query: int, lean: Any) -> None:
        super().__init__()
        self._heads = n_heads
        self.build(dim, n_heads, p_query * self._heads // n_heads, bias=not lean)


class Whole(Base):
    """What is usually one head's width is that of all heads here."""

    def __init__(self, dim: int, n_heads: int, key_dim: int) -> None:
        super().__init__()
        self.size = key_dim
        self.build(dim, n_heads, self.size // n_heads)


class Letters(Base):
    """As a paper writes them: H is the hidden size, and A counts the heads."""

    def __init__(self, H: int, A: int) -> None:
        super().__init__()
        self.d_k = H // A
        self.build(H, A, self.d_k)


class Kept(nn.Module):
    def __init__(self, size: int, slow: float | None = 0.1, *, quick: bool = False) -> None:
        super().__init__()
        self.size, self.slow, self.quick = size, slow, quick


class HandsOn(Base):
    def __init__(self, dim: int, n_heads: int, pace: Any, place: Any) -> None:
        super().__init__()
        self.kept = Kept(dim, slow=pace)
        self.table = torch.zeros(3, device=place)
        self.build(dim, n_heads, dim // n_heads)


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (Taken, "nodes", "width"),
        (Taken, "crew", ""),
        (Taken, "forget", "dropout"),
        (Counted, "crew", "heads"),
        (Method, "crew", "heads"),
        (PerHead, "p_query", "head_dim"),
        (PerHead, "lean", "flag"),
        (Whole, "key_dim", "width"),
        (Letters, "H", "width"),
        (Letters, "A", "heads"),
        (HandsOn, "place", "device"),
        (nn.Linear, "in_features", ""),
    ],
)
def test_the_code_tells_what_an_argument_is_for(kind: type, name: str, said: str) -> None:
    use = use_of(kind, name)
    assert ("" if use is None else use.role) == said


def test_what_is_handed_on_gets_what_the_next_one_would_take() -> None:
    use = use_of(HandsOn, "pace")
    assert use is not None
    assert (use.role, use.value) == ("", 0.1)


@pytest.mark.parametrize("kind", [Counted, PerHead, Whole, Letters, HandsOn])
def test_such_layers_are_built_and_judged_without_a_word(kind: type[nn.Module]) -> None:
    verdict = check(kind)
    assert verdict["definition"].severity == "passed"
    assert not verdict.errors


def test_sizes_that_are_given_under_such_names_are_understood() -> None:
    assert "dim=25, crew=5" in check(Counted, crew=5, dim=25).subject
    assert check(Counted, crew=5).subject == "Counted(dim=40, crew=5)"


def test_what_no_code_tells_is_still_a_guess() -> None:
    assert [*resolve(Taken).made_up] == ["crew"]


def test_a_function_that_gives_a_mask_is_no_broken_layer() -> None:
    def later(size: int, device: Any = None) -> Tensor:
        return torch.ones(size, size, device=device).triu(1)

    with pytest.raises(ValueError, match="it gives a Tensor for sizes"):
        check(later)


class TwoStreams(nn.Module):
    """Two outputs, each with a dropout of its own."""

    def __init__(self, dim: int = 24, heads: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.one, self.drop = Counted(dim, heads), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.drop(self.one(x)), self.drop(self.one(x.flip(1)))


def test_dropout_on_a_second_output_is_not_lost() -> None:
    assert check(TwoStreams).passed


class Remembers(Base):
    """Keys of earlier calls are kept in a plain tensor, which is written to in place."""

    def __init__(self, dim: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.build(dim, heads, dim // heads)
        self.before = torch.zeros(8, 64, dim)

    def forward(self, x: Tensor) -> Tensor:
        self.before[: len(x), : x.shape[1]] = x.detach()
        return super().forward(x)


def test_a_cache_that_is_written_to_is_no_weight() -> None:
    assert check(Remembers)["registered"].severity == "passed"


class Documented(Base):
    """Right attention.

    K:      number of attention heads
    d:      dimension of each attention output
    """

    def __init__(
        self,
        K: int,
        d: int,
        lost: float = 0.5,  # share of the dropout
    ) -> None:
        super().__init__()
        self.drop = nn.Dropout(lost)
        self.build(K * d, K, d)


def test_what_is_written_of_an_argument_tells_what_it_is() -> None:
    told = {name: documented(Documented, name) for name in ("K", "d", "lost", "none")}
    assert [use and use.role for use in told.values()] == ["heads", "head_dim", "dropout", None]
    subject = resolve(Documented)
    assert (subject.num_heads, subject.embed_dim) == (3, 24)
    assert check(Documented).passed, str(check(Documented))


class WithASchema(Base):
    """An attribute by a name that scripts of PyTorch have as well."""

    schema: ClassVar[dict[str, str]] = {"width": "int"}

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.build(width, num_heads, width // num_heads)


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")
def test_only_a_script_is_taken_for_one() -> None:
    script = torch.jit.script(nn.MultiheadAttention(24, 3))
    names = [one.name for one in signature(script.forward)]
    assert names[:5] == ["query", "key", "value", "key_padding_mask", "need_weights"]
    assert check(WithASchema).passed, str(check(WithASchema))


class OfFields(Base):
    """Fields of a configuration that only the code tells: handed on, tested, and compared."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, elementwise_affine=config.learn_ln)
        self.small = "32" in config.precision
        if config.narrow_one:
            raise ValueError("too narrow")
        self.build(config.hidden_size, config.crew, config.hidden_size // config.crew)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@pytest.mark.parametrize(
    ("name", "role", "value"),
    [
        ("learn_ln", "", True),
        ("precision", "", "32"),
        ("narrow_one", "flag", Unknown),
        ("crew", "heads", Unknown),
        ("none", None, None),
    ],
)
def test_the_code_tells_what_a_field_is_for(name: str, role: str | None, value: Any) -> None:
    use = use_of_field(OfFields, name)
    assert (use and use.role, use and use.value) == (role, value)


def test_fields_that_the_code_tells_are_not_asked_for() -> None:
    assert check(OfFields).passed, str(check(OfFields))


class Turned(Base):
    """What turns queries and keys is handed in."""

    def __init__(self, dim: int, num_heads: int, turn: nn.Module, mode: Any) -> None:
        super().__init__()
        self.turn = turn
        self.build(dim, num_heads, dim // num_heads)
        if mode == 2:
            self.q = nn.Linear(dim, dim)
        elif mode != "plain":
            raise ValueError(mode)

    def forward(self, x: Tensor) -> Tensor:
        rows = (f(x).unflatten(-1, (self.many, -1)) for f in (self.q, self.k, self.v))
        q, k, v = (one.transpose(1, 2) for one in rows)
        q, k = self.turn(q), self.turn(k)
        heads = (q @ k.mT / q.shape[-1] ** 0.5).softmax(self.over) @ v
        return self.last(heads.transpose(1, 2).flatten(2))

    over = -1


class TurnedAstray(Turned):
    over = -2


def test_a_module_that_is_handed_in_changes_nothing() -> None:
    subject = resolve(Turned)
    assert isinstance(subject.arguments["turn"], nn.Identity)
    assert subject.arguments["mode"] == "plain"
    assert check(Turned).passed, str(check(Turned))
    assert check(TurnedAstray).errors[0].rule == "softmax"


class Grouped(Base):
    """A norm of 36 groups."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(36, dim)
        self.build(dim, num_heads, dim // num_heads)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.flatten(0, 1)).view(x.shape))


def test_a_norm_gets_as_many_channels_as_its_groups_want() -> None:
    assert resolve(Grouped).embed_dim == 72
    assert check(Grouped).passed, str(check(Grouped))


class KeyOfNothing(Base):
    def __init__(self, width: int) -> None:
        super().__init__()
        raise KeyError


def test_an_error_that_says_nothing_is_asked_about() -> None:
    with pytest.raises(ValueError, match="I do not know how to build this"):
        check(KeyOfNothing)
