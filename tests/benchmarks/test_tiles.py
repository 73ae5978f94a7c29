"""The search for tiles: which candidates there are, what is kept and shown, on a GPU that only pretends."""

from dataclasses import asdict
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

import benchmarks.without_gpu
from benchmarks import rows, tiles
from benchmarks.__main__ import app
from benchmarks.peers import GEMM
from benchmarks.timing import Budget
from fa import GENERATIONS
from fa2.config import Config, default_config
from fa_common.problem import Problem

PROBLEM = Problem(1, 4096, 4096, 16, 16, 128)
SPACE = {"tile_n": (32, 40, 64), "stages": (1, 2)}


@pytest.mark.parametrize("version", GENERATIONS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_generation_has_something_to_search(version, head_dim):
    problem = Problem(1, 4096, 4096, 16, 16, head_dim)
    found = tiles.candidates(version, problem, tiles.SPACES[version])
    configs = [one.config(problem) for one in found]
    assert configs[0] == GENERATIONS[version].default_config(problem)
    assert len(set(configs)) == len(configs) > 1
    assert len({one.name for one in found}) == len(found)


def test_a_candidate_is_the_default_with_other_numbers():
    found = tiles.candidates("fa2", PROBLEM, SPACE)
    default = default_config(PROBLEM)
    assert found[0].name == f"tile_n {default.tile_n}, stages {default.stages}"
    for one in found[1:]:
        config = one.config(PROBLEM)
        assert (config.tile_m, config.num_warps) == (default.tile_m, default.num_warps)
        assert one.kernel(PROBLEM)[0].config == config
    assert 40 not in {one.config(PROBLEM).tile_n for one in found}, "no multiple of 16"


def test_a_short_search_stays_near_the_default():
    found = tiles.candidates("fa2", PROBLEM, tiles.SPACES["fa2"])
    default = asdict(default_config(PROBLEM))
    near = tiles.nearest(found, PROBLEM, 5)
    changes = [sum(default[f] != v for f, v in asdict(one.config(PROBLEM)).items()) for one in near]
    assert changes == [0, 1, 1, 1, 1]
    assert {one.name for one in tiles.nearest(found, PROBLEM, None)} == {one.name for one in found}


def test_a_field_that_there_is_not_is_named():
    with pytest.raises(ValueError, match=r"^tile_k: fa2.Config has no such field; choose from tile_m, "):
        tiles.candidates("fa2", PROBLEM, {"tile_k": (1,)})


def test_the_whole_search(pretend_gpu, cpu_problem, tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "report", lambda key, build: pytest.fail("the table alone compiles nothing here"))
    monkeypatch.setattr(tiles, "_compiled", lambda row, problem: ("255", "64", "0"))
    output = Console(file=StringIO(), width=200)
    problems = [cpu_problem(64), cpu_problem(64, causal=True)]
    status = tiles.search("fa2", problems, {"tile_n": (32, 96)}, Budget(rounds=1), tmp_path, output)
    text = output.file.getvalue()
    assert status == 0, text
    kept = list(rows.read(tmp_path / "h200" / "tiles.jsonl"))
    ours = [row for row in kept if row.version != GEMM]
    assert [(row.causal, row.config["tile_n"]) for row in ours] == [(c, n) for c in (False, True) for n in (96, 32)]
    assert {row.suite for row in kept} == {"tiles"}
    assert len({row.run for row in kept}) == 1
    assert all(Config(**row.config) for row in ours)
    assert "fa2 tiles, forward, bfloat16 d=64 full 1 x 64 x 1" in text
    assert "default" in text
    assert "tile_n 32 0" in text


def test_a_short_search_keeps_so_many_rows(pretend_gpu, cpu_problem, tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "_compiled", lambda row, problem: ("255", "64", "0"))
    output = Console(file=StringIO(), width=200)
    space = {"tile_n": (32, 48, 64, 96), "stages": (1, 2)}
    assert tiles.search("fa2", [cpu_problem(64)], space, Budget(rounds=1), tmp_path, output, at_most=3) == 0
    assert len([row for row in rows.read(tmp_path / "h200" / "tiles.jsonl") if row.version != GEMM]) == 3


def command(*arguments: str):
    result = CliRunner().invoke(app, ["tiles", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--version", "fa9"], "fa9: choose from fa1, fa2, fa3"),
        (["--pass", "sideways"], "sideways: choose from fwd"),
        (["--set", "tile_k=1"], "tile_k: fa2.Config has no such field"),
        (["--set", "tile_n=wide"], "FIELD=VALUE,VALUE is needed"),
        (["--at-most", "0"], "at-most"),
        (["--head-dim", "60"], "head_dim must be a multiple of 8"),
    ],
)
def test_wrong_options_are_refused(arguments, message):
    code, output = command(*arguments)
    assert code == 2
    assert message in output


def test_without_a_gpu_it_shows_what_each_candidate_is_compiled_to(no_hopper, clean_report, monkeypatch):
    monkeypatch.setattr(
        benchmarks.without_gpu,
        "kernel_reports",
        lambda ours, kinds, console: {(kind, one.name): clean_report for kind in kinds for one in ours},
    )
    code, output = command("--set", "tile_n=32,64", "--set", "q_in_registers=false,true")
    assert code == 0, output
    assert "No speed is measured here: torch sees no CUDA device" in output
    assert "tile_n 64, q_in_registers True" in output
    code, output = command("--set", "tile_n=32,64", "--set", "q_in_registers=false,true", "--at-most", "2")
    assert code == 0, output
    assert output.count("168 164 0") == 2
