"""Switches: the ladder, leaving one out, the labels and the rules, all from the fields alone."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_common.switches import check, label, ladder, switch, switches, without
from tests.switch_pairs import covering, legal, pairs_of


@dataclass(frozen=True)
class Toy:
    tile: int = 64
    loads: bool = switch("TMA loads", "paper 1")
    roles: bool = switch("warp specialization", "paper 2", requires=("loads",))
    turns: bool = switch("ping-pong", "paper 3", requires=("roles",))
    overlap: bool = switch("overlap", "paper 4")
    risky: bool = switch("risky", "paper 5", default=False)

    def __post_init__(self):
        check(self)


@dataclass(frozen=True)
class Plain:
    tile: int = 64


NAMES = [f.name for f in switches(Toy)]


def on(config):
    return [name for name in NAMES if getattr(config, name)]


def test_switches_are_the_fields_that_declare_themselves():
    assert NAMES == ["loads", "roles", "turns", "overlap", "risky"]
    assert switches(Toy())[1].metadata == {"label": "warp specialization", "source": "paper 2", "requires": ("loads",)}
    assert on(Toy()) == ["loads", "roles", "turns", "overlap"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loads": False}, ValueError, r"roles=True needs loads=True; got loads=False; .*without\(config, 'loads'\)"),
        ({"roles": False}, ValueError, "turns=True needs roles=True"),
        ({"overlap": 1}, TypeError, "overlap must be True or False; got 1"),
    ],
)
def test_illegal_combinations_name_the_rule(arguments, error, message):
    with pytest.raises(error, match=message):
        Toy(**arguments)


def test_a_switch_stands_only_on_earlier_ones():
    @dataclass(frozen=True)
    class Upside:
        roof: bool = switch("roof", "", requires=("wall",))
        wall: bool = switch("wall", "")

    with pytest.raises(TypeError, match="roof requires 'wall', which must be a switch declared before it"):
        check(Upside())


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("loads", ["overlap"]),
        ("roles", ["loads", "overlap"]),
        ("turns", ["loads", "roles", "overlap"]),
        ("overlap", ["loads", "roles", "turns"]),
        ("risky", ["loads", "roles", "turns", "overlap"]),
    ],
)
def test_without_takes_along_what_stands_on_it(name, left):
    config = without(Toy(tile=32), name)
    assert on(config) == left
    assert config.tile == 32


@pytest.mark.parametrize("name", ["tile", "typo"])
def test_without_names_the_choices(name):
    with pytest.raises(ValueError, match=f"'{name}' is no switch of Toy; choose from loads, roles"):
        without(Toy(), name)
    with pytest.raises(ValueError, match="no switch of Plain; choose from none"):
        without(Plain(), name)


def test_the_ladder_adds_one_idea_a_rung():
    rungs = ladder(Toy(tile=32))
    assert [text for text, _ in rungs] == [
        "all off",
        "+ TMA loads",
        "+ warp specialization",
        "+ ping-pong",
        "+ overlap",
    ]
    assert [len(on(config)) for _, config in rungs] == [0, 1, 2, 3, 4]
    assert rungs[-1][1] == Toy(tile=32)
    assert ladder(Plain()) == [("all off", Plain())]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Toy(), "all on"),
        (Toy(risky=True), "all on, with risky"),
        (without(Toy(), "overlap"), "without overlap"),
        (without(Toy(risky=True), "roles"), "without warp specialization, ping-pong, with risky"),
        (without(Toy(), "loads"), "only overlap"),
        (replace(without(Toy(), "loads"), overlap=False), "all off"),
        (replace(without(Toy(), "loads"), overlap=False, risky=True), "all off, with risky"),
        (Plain(), "all on"),
    ],
)
def test_labels(config, text):
    assert label(config) == text


@given(st.sets(st.sampled_from(NAMES)))
def test_any_legal_config_is_reached_by_its_ladder_and_told_by_its_label(names):
    try:
        config = Toy(**{name: name in names for name in NAMES})
    except ValueError:
        return
    assert ladder(config)[-1][1] == config
    others = [Toy(**dict.fromkeys(NAMES, False)), Toy(), *(without(config, name) for name in NAMES)]
    assert all((label(other) == label(config)) == (other == config) for other in others)


def test_few_configs_hold_each_two_switches_in_every_legal_pair_of_positions():
    # loads, roles and turns stand on one another: 000, 100, 110 or 111.
    assert len(set(legal(Toy(tile=32)))) == 4 * 2 * 2
    chosen = covering(Toy(tile=32))
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, legal(Toy())))
    assert len(chosen) < 8
    assert all(config.tile == 32 for config in chosen)
