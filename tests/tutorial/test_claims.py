"""The claims page: each experiment at toy size, and the page as the runs on record have it."""

from __future__ import annotations

import doctest
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no part of the installed package

from benchmarks.claims import (  # noqa: E402
    learn,
    page,
    paths,
    runs,
    shared,
    sixteenth,
    specialise,
    words,
    wrapper,
)
from benchmarks.claims.__main__ import main  # noqa: E402


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of every experiment at toy size."""
    folder = tmp_path_factory.mktemp("claims")
    for name, experiment in page.EXPERIMENTS.items():
        found = experiment.measure(experiment.TOY, lambda line: None)
        runs.write(name, experiment.TOY, found, folder)
    return folder


def test_the_page_is_what_the_runs_on_record_say() -> None:
    for name, text in page.render().items():
        assert (page.DOCS / name).read_text() == text, f"{name}: render it again"


@pytest.mark.parametrize("name", page.EXPERIMENTS)
def test_the_runs_on_record_have_the_settings_in_the_code(name: str, tmp_path: Path) -> None:
    runs.write(name, page.EXPERIMENTS[name].Settings(), {}, tmp_path)
    now, then = runs.read(name, tmp_path)["settings"], runs.read(name)["settings"]
    # a training setting that came later leaves an earlier run as it was
    config = now.pop("config", {})
    assert all(config[key] == value for key, value in then.pop("config", {}).items())
    assert now == then


@pytest.mark.slow
def test_every_experiment_gives_a_section_with_a_verdict(toy: Path) -> None:
    files = page.render(toy)
    text = files[page.PAGE]
    assert text.count('\n## "') == text.count("**Verdict.**") == len(page.EXPERIMENTS)
    for name, drawn in files.items():
        if name.endswith(".svg"):
            assert f"({name})" in text
            assert drawn.startswith("<svg")
            assert "nan" not in drawn
            assert len(drawn) < 300_000


def test_another_figure_is_another_page(toy: Path) -> None:
    before = page.render(toy)[page.PAGE]
    run = runs.read("learn", toy)
    run["runs"][0]["curve"][-1][1] += 0.25
    assert learn.section(run) not in before


def test_the_command_writes_the_page(tmp_path: Path, toy: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.claims", "--render"]
        + ["--results", str(toy), "--docs", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / page.PAGE).read_text() == page.render(toy)[page.PAGE]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--toy", "--only", "shared"], "--results"),
        (["--render", "--results", "nowhere", "--docs", "nowhere"], "wrapper"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_loop_and_split_heads_differ_when_a_weight_does() -> None:
    layers = wrapper.pair(6, 3, 5)
    x, pull = torch.randn(2, 2, 5, 6)
    wrapper.assert_same(layers, x, pull)
    with torch.no_grad():
        next(layers[wrapper.WRAPPER].parameters())[0, 0] += 0.1
    with pytest.raises(AssertionError):
        wrapper.assert_same(layers, x, pull)


def test_operators_count_a_product_and_not_a_view() -> None:
    a = torch.ones(2, 3)
    assert wrapper.operators(lambda: a.T) == 0
    assert wrapper.operators(lambda: a.T @ a) == 1


def test_a_past_token_costs_what_the_hand_says() -> None:
    for name, layer in sixteenth.layers(10, 5).items():
        assert sixteenth.count(layer, 3) == sixteenth.expected(10, layer.num_heads, layer.head_dim)
        one_head = {sixteenth.FULL: 100, sixteenth.SPLIT: 20, sixteenth.WIDE: 20}
        assert sixteenth.count(layer, 7)["past"] == one_head[name]


def test_rows_of_another_head_have_no_gradient_and_shared_rows_have() -> None:
    found = shared.measure(shared.TOY, lambda line: None)
    for rows in found["split"].values():
        assert torch.equal(torch.tensor(rows) != 0, torch.eye(3, dtype=torch.bool))
    assert all(row[3] > 0 and row[4] > 0 for row in found["one_kv"])
    shared_rows = {**found, "settings": {"sizes": [[6, 3]]}}
    shared_rows["split"] = {"W_key": [[1.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]}
    with pytest.raises(AssertionError):
        shared.verdict(shared_rows)


def _made(ends: dict[int, list[float]]) -> dict[str, Any]:
    """A run of `learn` with these final losses by number of heads."""
    return {
        "settings": {"rates": [0.1], "heads": list(ends)},
        "runs": [
            {"rate": 0.1, "seed": seed, "heads": heads, "curve": [[0, 9.0], [4, loss]]}
            for heads, losses in ends.items()
            for seed, loss in enumerate(losses)
        ],
    }


def test_what_the_seeds_say_is_in_words() -> None:
    found = learn.outcomes(
        _made({1: [3.0, 3.1, 3.2], 2: [2.5, 2.61, 2.7], 4: [3.3, 3.41, 3.5], 8: [3.2, 3.0, 3.1]}),
        0.1,
    )
    assert [found[n].word for n in (2, 4, 8)] == ["better", "worse", "no difference shown"]
    assert found[2].gain == pytest.approx((0.5 + 0.49 + 0.5) / 3)
    # by hand: deviation of (0.5, 0.49, 0.5) is 0.01 / sqrt(3), Student's t with 2 degrees 4.303
    assert found[2].margin == pytest.approx(4.303 * 0.01 / 3, rel=1e-3)
    assert found[2].wins == 3


def test_looking_on_the_way_leaves_the_losses_alone() -> None:
    from headwise.models.run import Run

    config = specialise.TOY.config
    plain = Run(replace(config, seed=0))
    losses = [plain.advance() for _ in range(3)]
    watched, seen = Run(replace(config, seed=0)), []
    for _ in range(3):
        specialise.seen(watched)
        seen.append(watched.advance())
    assert losses == seen


def test_heads_that_look_alike_are_not_apart() -> None:
    maps = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]])
    assert specialise.total_variation(maps) == pytest.approx(0.25)
    assert specialise.total_variation(maps[:1].repeat(3, 1, 1)) == 0


def test_a_one_hot_head_is_dead_and_the_others_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = paths.Layer.draw(6, generator)
    x, pull = torch.randn(2, 7, 6, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    plain, _ = paths.score_and_value_gradients(layer, x, pull, 2, None)
    factors = torch.tensor([1e9, 1.0], dtype=torch.float64)
    sharp, through_values = paths.score_and_value_gradients(layer, x, pull, 2, factors)
    assert plain.min() > 0
    assert sharp[0].max() == 0
    assert torch.allclose(sharp[1], plain[1], rtol=1e-12)
    assert through_values > 0


def test_effective_rank_of_an_orthogonal_map_is_its_size() -> None:
    q, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    assert paths.effective_rank(torch.linalg.svdvals(q)) == pytest.approx(5)


@pytest.mark.parametrize("module", [learn, paths, sixteenth, specialise, words, wrapper])
def test_examples_in_the_code_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
