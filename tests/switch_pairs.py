"""Of all legal configurations a few in which any two switches meet in each pair of positions that the rules allow."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import TypeVar

from fa_common.switches import switches

Config = TypeVar("Config")


def covering(base: Config) -> list[Config]:
    """Such configurations, with the base's other fields; chosen one by one, each for most pairs that are new."""
    pairs = {config: pairs_of(config) for config in legal(base)}
    chosen, missing = [], set().union(*pairs.values())
    while missing:
        chosen.append(max(pairs, key=lambda config: len(pairs[config] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def legal(base: Config) -> Iterator[Config]:
    """Every one, with the base's other fields."""
    names = [switch.name for switch in switches(base)]
    for positions in product((True, False), repeat=len(names)):
        try:
            yield replace(base, **dict(zip(names, positions, strict=True)))
        except ValueError:  # a switch lacks what it stands on
            continue


def pairs_of(config: Config) -> set[tuple]:
    """Each two of its switches in their positions."""
    return set(combinations([(switch.name, getattr(config, switch.name)) for switch in switches(config)], 2))
