"""The ablation, on problems that a CPU solves at once and with a timer that only pretends."""

from dataclasses import dataclass, replace
from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

import benchmarks.without_gpu
from benchmarks import ablate, compare, comparison, report, rows
from benchmarks.__main__ import app
from benchmarks.contenders import Ours
from benchmarks.peers import GEMM
from benchmarks.timing import Budget
from fa import GENERATIONS
from fa_common.isolated import IsolatedFailure
from fa_common.switches import label, ladder, switch, switches

FA3 = GENERATIONS["fa3"]
FULL = FA3.default_config(ablate.DEFAULT)
SECOND = label(ladder(FULL)[1][1])  # the configuration of the second rung
RUN = "20260301T000000Z-cccccc"


@dataclass(frozen=True)
class Config:
    stages: int = 2
    a: bool = switch("idea A", "1")
    b: bool = switch("idea B", "2", requires=("a",))
    c: bool = switch("idea C", "3", default=False)
    d: bool = switch("idea D", "4", requires=("c",), default=False)


def views(full) -> list[tuple[str, str]]:
    return [(line.text, label(line.config)) for line in ablate.lines(full)]


def test_the_lines_are_the_ladder_then_one_off_then_one_more():
    assert views(Config()) == [
        ("all off", "all off"),
        ("+ idea A", "without idea B"),
        ("+ idea B = all on", "all on"),
        ("without idea A, idea B", "all off"),  # B stands on A
        ("without idea B", "without idea B"),
        ("with idea C", "all on, with idea C"),  # D stands on C, which is off
    ]


def test_a_switch_that_the_default_turns_on_is_a_rung():
    texts = [text for text, _ in views(Config(c=True))]
    assert texts[:4] == ["all off", "+ idea A", "+ idea B", "+ idea C = all on, with idea C"]
    assert texts[-2:] == ["without idea C", "with idea D"]


def test_every_line_has_what_it_is_compared_with():
    foot, *shown = ablate.lines(FULL)
    assert (foot.before, foot.full) == (None, None)
    rungs = [line for line in shown if line.before is not None]
    assert [line.before for line in rungs] == [config for _, config in ladder(FULL)[:-1]]
    assert all(line.full == FULL for line in shown if line.before is None)
    assert {line.config.tile_n for line in shown} == {FULL.tile_n}


@dataclass(frozen=True)
class Ruled:
    """A Config with rules beside those of its switches."""

    way: str = "plain"
    a: bool = switch("idea A", "1")
    b: bool = switch("idea B", "2")

    def __post_init__(self):
        if self.b and not self.a:
            raise ValueError("b=True needs a=True; got a=False")
        if self.way == "fancy" and not self.b:
            raise ValueError("way='fancy' needs b=True; got b=False")


def test_a_configuration_that_there_cannot_be_has_its_rule():
    impossible = [line for line in ablate.lines(Ruled()) if line.why_not]
    assert [(line.text, line.config, line.why_not) for line in impossible] == [
        ("without idea A", None, "b=True needs a=True; got a=False")
    ]


def test_a_named_choice_gives_way_to_the_switches_that_rule_it_out():
    shown = {line.text: line.config for line in ablate.lines(Ruled("fancy"))}
    assert shown["all off"] == Ruled("plain", False, False)
    assert shown["+ idea B = all on"] == Ruled("fancy")
    assert shown["without idea B"] == Ruled("plain", True, False)


def test_the_generation_before_stands_beside_the_ladder():
    old, new = ablate.references("fa2", ablate.DEFAULT)
    assert (old.text, old.config.q_splits) == ("fa1, q_splits 1", 1)
    assert new.config == GENERATIONS["fa1"].default_config(ablate.DEFAULT)
    assert new.text == f"fa1, its default: q_splits {new.config.q_splits}"
    assert new.config.q_splits > 1
    old, new = ablate.references("fa3", ablate.DEFAULT)
    assert (old.text, label(old.config)) == ("fa2, all off", "all off")
    assert (new.text, new.config) == ("fa2, its default", GENERATIONS["fa2"].default_config(ablate.DEFAULT))
    assert ablate.references("fa1", ablate.DEFAULT) == []


def test_a_default_without_ideas_of_its_own_is_one_line():
    crowded = replace(ablate.DEFAULT, batch=64)
    assert [line.text for line in ablate.references("fa2", crowded)] == ["fa1, q_splits 1"]


def test_a_generation_before_that_cannot_run_is_no_line(monkeypatch):
    monkeypatch.setattr(type(FA3), "why_not", lambda self, problem: "it has no such head_dim")
    assert ablate.references("fa3", ablate.DEFAULT) == []


def test_without_a_gpu_a_rule_is_shown_too(compiled, monkeypatch):
    line = ablate.Line("without idea A", None, full=FULL, why_not="b=True needs a=True")
    monkeypatch.setattr(ablate, "lines", lambda full: [ablate.Line("all on", FULL), line])
    code, output = command()
    assert code == 0
    assert "bfloat16 d=128 full 4 x 8448 x 16, without idea A: b=True needs a=True" in output


def test_a_rule_stands_under_the_table(add_run, tmp_path, monkeypatch):
    add_run()
    whole = ablate.lines
    line = ablate.Line("without idea A", None, full=FULL, why_not="b=True needs a=True")
    monkeypatch.setattr(ablate, "lines", lambda full: [*whole(full), line])
    run = read_run(tmp_path)
    [table] = ablate.tables(run)
    assert table.rows[-1] == ("without idea A", "-", "-", "-", "-")
    assert "without idea A: b=True needs a=True." in table.notes
    assert ablate.missing(run) == []
    ablate.draw(run, tmp_path / "picture.svg")


def test_each_configuration_is_measured_once_on_each_problem(cpu_problem):
    problems = [ablate.DEFAULT, replace(ablate.DEFAULT, head_dim=256)]  # with the same switches on
    contenders = ablate.contenders("fa3", problems)
    num_on = sum(getattr(FULL, field.name) for field in switches(FULL))
    names = [one.name for one in contenders]
    assert names[0] == "all off"
    assert names[num_on] == label(FULL)
    assert len(set(names)) == len(names) == len({line.config for line in ablate.lines(FULL)})
    for problem in problems:
        default = FA3.default_config(problem)
        for one in contenders:
            config = one.config(problem)
            assert label(config) == one.name
            assert (config.tile_m, config.tile_n, config.stages) == (default.tile_m, default.tile_n, default.stages)
            assert one.kernel(problem)[0].config == config


def test_a_problem_with_other_switches_on_brings_its_own_lines():
    without_pingpong = replace(ablate.DEFAULT, head_dim=64)
    assert not FA3.default_config(without_pingpong).pingpong
    alone, both = (
        {one.name for one in ablate.contenders("fa3", problems)}
        for problems in ([ablate.DEFAULT], [ablate.DEFAULT, without_pingpong])
    )
    assert alone < both
    assert label(FA3.default_config(without_pingpong)) in both


def test_chosen_tiles_are_those_of_every_line():
    chosen = {"tile_m": 128, "tile_n": 64}
    for one in ablate.contenders("fa3", [ablate.DEFAULT], chosen):
        config = one.config(ablate.DEFAULT)
        assert (config.tile_m, config.tile_n, config.stages) == (128, 64, FULL.stages)
        assert label(config) == one.name


def test_switches_that_do_not_go_with_a_problems_tiles_are_a_reason(cpu_problem):
    one = Ours("fa3", "odd", {"pingpong": True})
    one.generation = replace_default(FA3, FA3.config_type(tile_m=64, pingpong=False))
    assert "pingpong=True needs at least two consumer warpgroups" in one.why_not(cpu_problem())


def replace_default(generation, config):
    class Other:
        why_not = staticmethod(lambda problem: None)
        default_config = staticmethod(lambda problem: config)

    return Other


@pytest.fixture
def measure(monkeypatch, fake_timer, small_gemm, tmp_path):
    """Runs the whole command; returns its exit status and what it printed."""

    def run(problems, unfit=(), chosen=()):
        facts = {"gpu": "NVIDIA H200", "torch": "2.11.0", "dsl": "4.8.1", "driver": "580.1"}
        monkeypatch.setattr(compare.machine, "facts", lambda: facts)
        monkeypatch.setattr(compare, "DeviceTimer", lambda telemetry: fake_timer())
        monkeypatch.setattr(compare, "Gemm", lambda: small_gemm)
        monkeypatch.setattr(compare.probe, "unfit", lambda ours, problems: dict(unfit))
        output = Console(file=StringIO(), width=200)
        picture = tmp_path / "picture.svg"
        status = ablate.ablate("fa3", problems, dict(chosen), Budget(rounds=1), tmp_path / "results", picture, output)
        return status, output.file.getvalue()

    return run


def kept(tmp_path) -> list:
    return list(rows.read(tmp_path / "results" / "h200" / "ablate.jsonl"))


def test_the_whole_command(measure, cpu_problem, tmp_path):
    problem = cpu_problem(64)
    status, output = measure([problem])
    assert status == 0, output
    gemm, old, new, *measured = kept(tmp_path)
    assert gemm.version == GEMM
    assert (old.version, new.version) == ("fa2", "fa2")
    assert (old.switches_label, new.switches_label) == ("all off", "all on")
    assert old.source_sha == rows.source_sha("fa2")
    assert [row.switches_label for row in measured] == [one.name for one in ablate.contenders("fa3", [problem])]
    for row in measured:
        config = FA3.config_type(**row.config)
        assert (row.suite, row.version, row.switches_label) == ("ablate", "fa3", label(config))
        assert row.source_sha == rows.source_sha("fa3")
        assert 0 < row.rel_err < 1e-2
    assert len({row.run for row in kept(tmp_path)}) == 1
    assert f"fa2, all off 0  fa2, its default 0  all off 0  {SECOND} 0" in output
    for text in ("Lines of fa2: the generation before", '"fa2, all off" has its own ideas off'):
        assert text in output
    for text in ("fa3 one idea at a time, forward, bfloat16 d=64 full 1 x 64 x 1", "to the rung before", "+0.0%"):
        assert text in output
    assert f"{len(measured) + 3} rows of run {gemm.run}" in output
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_chosen_tiles_stand_under_the_table(measure, cpu_problem, tmp_path):
    status, output = measure([cpu_problem(64)], chosen={"tile_m": 128})
    assert status == 0, output
    assert {row.config["tile_m"] for row in kept(tmp_path)[3:]} == {128}
    assert "Every line has tile_m 128, tile_n 64, stages 3, q_register_steps 1; the default" in " ".join(output.split())


def test_a_configuration_that_hangs_costs_only_its_own_line(measure, cpu_problem, tmp_path):
    problem = cpu_problem(64)
    culprit = SECOND
    status, output = measure([problem], {(culprit, problem): "no answer within 30 s"})
    assert status == 1
    assert f"{culprit} is missing in every problem: no answer within 30 s" in output
    names = [one.name for one in ablate.contenders("fa3", [problem])]
    assert [row.switches_label for row in kept(tmp_path)[3:]] == [one for one in names if one != culprit]


def test_each_problem_has_a_table(measure, cpu_problem):
    status, output = measure([cpu_problem(64), cpu_problem(128, causal=True)])
    assert status == 0
    assert output.count("to the rung before") == 2


@pytest.fixture
def add_run(make_row, gemm_row, tmp_path):
    """Appends one run of suite `ablate`: each configuration, in order, 50 TFLOP/s faster than the one before.

    The generation before reaches 300 and 350 TFLOP/s.
    """

    def add(run: str = RUN, problem=ablate.DEFAULT, without=(), version="fa3", **changed):
        rows.append(rows.Row(**vars(gemm_row) | {"run": run, "suite": "ablate"}), tmp_path / "results")
        everyone = [*ablate.reference_contenders(version), *ablate.contenders(version, [problem])]
        for i, one in enumerate(everyone):
            if one.name not in without:
                columns = one.columns(problem) | {"suite": "ablate", "run": run, "tflops": 300.0 + 50 * i}
                columns |= changed if one.version == version else {}
                rows.append(make_row(problem=problem, **columns), tmp_path / "results")

    return add


def read_run(tmp_path):
    return comparison.newest_run(comparison.frame(kept(tmp_path)), ablate.missing)


def test_rows_become_the_table(add_run, tmp_path):
    add_run()
    [table] = ablate.tables(read_run(tmp_path))
    assert len(table.rows) == 2 + len(ablate.lines(FULL))
    old, new, off, first, *_ = table.rows
    top = 400.0 + 50 * (len(ladder(FULL)) - 1)
    assert old == ("fa2, all off", "300", "273 to 333", "-", f"{300 / top - 1:+.1%}")
    assert new == ("fa2, its default", "350", "318 to 389", "-", f"{350 / top - 1:+.1%}")
    assert off == ("all off", "400", "364 to 444", "-", "-")
    assert first[1:] == ("450", "409 to 500", "+12.5%", "-")
    loss = next(row for row in table.rows if row[0] == f"without {switches(FULL)[0].metadata['label']}")
    assert loss[3] == "-"
    assert loss[4] == f"{float(loss[1]) / top - 1:+.1%}"


def test_what_was_not_measured_is_a_dash(add_run, tmp_path):
    add_run(without=[SECOND])
    [table] = ablate.tables(read_run(tmp_path))
    assert table.rows[3][1:] == ("-", "-", "-", "-")
    assert table.rows[4][3] == "-", "the rung before is unknown"
    assert ablate.missing(read_run(tmp_path)) == [f"+ {switches(FULL)[0].metadata['label']}"]


def test_a_run_without_the_generation_before_lacks_it(add_run, tmp_path):
    add_run(without=["fa2, all off", "fa2, its default"])
    run = read_run(tmp_path)
    assert ablate.missing(run) == ["fa2, all off", "fa2, its default"]
    [table] = ablate.tables(run)
    assert [row[1:] for row in table.rows[:2]] == [("-", "-", "-", "-")] * 2
    ablate.draw(run, tmp_path / "picture.svg")


def test_the_default_before_is_known_whatever_it_was_then(add_run, tmp_path):
    add_run(version="fa2")
    path = tmp_path / "results" / "h200" / "ablate.jsonl"
    then, now = ('"q_splits": 8', f'"q_splits": {ablate.references("fa2", ablate.DEFAULT)[1].config.q_splits}')
    path.write_text(path.read_text().replace(now, then))
    [table] = ablate.tables(read_run(tmp_path))
    assert [row[1] for row in table.rows[:2]] == ["300", "350"]


def test_the_papers_figures_stand_under_the_papers_problem_alone(add_run, tmp_path):
    add_run(problem=replace(ablate.DEFAULT, causal=True))
    add_run()
    other, papers = ablate.tables(read_run(tmp_path))
    assert ablate.PAPER in papers.notes
    assert ablate.PAPER not in other.notes


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "docs" / "page.md"
    path.parent.mkdir()
    path.write_text("before\n\n<!-- generated: ablate -->\nold text\n<!-- end -->\n\nafter\n")
    return path


def regenerate(document):
    root = document.parent.parent
    return report.regenerate([document], root / "results", root / "docs")


def test_the_report_has_the_table_and_the_picture(document, add_run):
    add_run()
    picture = document.parent / "ablate-h200.svg"
    assert regenerate(document) == [picture, document]
    text = document.read_text()
    assert "| all off | 400 | 364 to 444 | - | - |" in text
    assert "![what each switch is worth](ablate-h200.svg)" in text
    assert f"run {RUN}, 2026-01-01." in text
    assert ablate.PAPER in text
    assert comparison.STALE not in text
    labels = {label.strip() for label in ElementTree.parse(picture).getroot().itertext()}
    rung = f"+ {switches(FULL)[0].metadata['label']}"
    assert rung in labels or f"<!-- {rung} -->" in picture.read_text()
    assert regenerate(document) == []


def test_the_report_tells_the_ablations_apart(document, add_run):
    document.write_text(document.read_text() + "\n<!-- generated: ablate-fa2 -->\n<!-- end -->\n")
    add_run(version="fa2")
    add_run("20260401T000000Z-dddddd")
    regenerate(document)
    fa3, fa2 = document.read_text().split("<!-- generated: ablate-fa2 -->")
    assert "| fa2, its default | 350 | 318 to 389 | - |" in fa3
    assert "| fa1, q_splits 1 | 300 | 273 to 333 | - |" in fa2
    assert "fa3 one idea at a time" in fa3
    assert "fa2 one idea at a time" in fa2
    assert ablate.PAPER not in fa2


def test_the_report_takes_the_newest_complete_run(document, add_run):
    add_run("20260201T000000Z-bbbbbb")
    add_run("20260401T000000Z-dddddd", problem=replace(ablate.DEFAULT, head_dim=64))
    add_run("20260501T000000Z-eeeeee", without=["all off"])
    regenerate(document)
    assert "run 20260201T000000Z-bbbbbb" in document.read_text()


def test_rows_of_other_code_are_marked(document, add_run):
    add_run(source_sha="0" * 64)
    regenerate(document)
    text = document.read_text()
    assert "| configuration | TFLOP/s† |" in text
    assert "† measured on other code than this checkout's." in text


def test_rows_of_a_config_with_other_fields_are_still_read(document, add_run):
    add_run(config={"gone": True, "tile_m": 128})
    regenerate(document)
    assert "| all off | - | - | - | - |" in document.read_text()


def command(*arguments: str):
    result = CliRunner().invoke(app, ["ablate", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--version", "fa1"], "fa1 has no switches: choose from fa2, fa3"),
        (["--version", "fa9"], "fa9: choose from fa2, fa3"),
        (["--head-dim", "60"], "head_dim must be a multiple of 8"),
        (["--batch", "0"], "batch"),
        (["--set", "tile_k=64"], "tile_k: fa3.Config has no such number"),
        (["--set", "tile_n=64,80"], "tile_n: one value is needed; `tiles` searches among several"),
        (["--set", "tile_n=60"], "tile_n must be a multiple of 16"),
        (["--set", "tile_n"], "FIELD=VALUE,VALUE is needed"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str):
    code, output = command(*arguments)
    assert code == 2
    assert message in output


@pytest.fixture
def compiled(no_hopper, clean_report, monkeypatch):
    """What the compiler is said to have made of each configuration, clean unless a test says otherwise."""
    everyone = [*ablate.reference_contenders("fa3"), *ablate.contenders("fa3", [ablate.DEFAULT])]
    made = {one.name: clean_report for one in everyone}
    monkeypatch.setattr(
        benchmarks.without_gpu,
        "kernel_reports",
        lambda ours, kinds, console: {(kind, one.name): made[one.name] for kind in kinds for one in ours},
    )
    return made


def test_without_a_gpu_it_shows_what_each_configuration_is_compiled_to(compiled):
    code, output = command()
    assert code == 0, output
    assert "No speed is measured here: torch sees no CUDA device" in output
    for name in compiled:
        assert f"bfloat16 128 full {' '.join(name.split()[:2])}" in output, "the first line of a cell"
    assert output.count(" 168 164 0 ") == len(compiled)


def test_without_a_gpu_a_configuration_that_does_not_compile_is_a_failure(compiled):
    compiled[SECOND] = IsolatedFailure("ValueError: tile_n")
    code, output = command()
    assert code == 1
    assert f"{SECOND} d=128 full does not compile: ValueError: tile_n" in output


def test_without_a_gpu_a_problem_that_it_lacks_has_a_reason(compiled, monkeypatch):
    monkeypatch.setattr(type(FA3), "why_not", lambda self, problem: "it has no such head_dim")
    code, output = command("--head-dim", "96")
    assert code == 0
    assert "fa3 is missing in bfloat16 d=96 full 4 x 8448 x 16: it has no such head_dim" in output
