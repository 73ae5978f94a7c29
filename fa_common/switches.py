"""Ablation switches: boolean Config fields that carry their label, their source in the paper and what they stand on.

    @dataclass(frozen=True)
    class Config:
        stages: int = 2
        warp_specialized: bool = switch("warp specialization", "FA3 3.1")
        pingpong: bool = switch("ping-pong", "FA3 3.1", requires=("warp_specialized",))

        def __post_init__(self):
            check(self)

From such fields alone come the ladder (all off, then one idea more a rung), the leave-one-out configurations and the
labels of benchmark rows and tables. Switches are declared in the order of the story: what one stands on comes first.
"""

from dataclasses import Field, field, fields, replace
from typing import Any, TypeVar

Config = TypeVar("Config")


def switch(label: str, source: str, requires: tuple[str, ...] = (), default: bool = True) -> Any:
    """A boolean dataclass field for one idea: its label in tables, the paper's section, the switches it stands on."""
    return field(default=default, metadata={"label": label, "source": source, "requires": requires})


def switches(config: Any) -> list[Field]:
    """The switches of a Config (class or instance) in their declared order."""
    return [f for f in fields(config) if "label" in f.metadata]


def check(config: Any) -> None:
    """Raises ValueError when a switch is on without one that it stands on, TypeError when a switch is not a bool."""
    declared = set()
    for f in switches(config):
        if not isinstance(getattr(config, f.name), bool):
            raise TypeError(f"{f.name} must be True or False; got {getattr(config, f.name)!r}")
        for need in f.metadata["requires"]:
            if need not in declared:
                raise TypeError(f"{f.name} requires {need!r}, which must be a switch declared before it")
            if getattr(config, f.name) and not getattr(config, need):
                raise ValueError(
                    f"{f.name}=True needs {need}=True; got {need}=False; "
                    f"switch {f.name} off too, as `without(config, {need!r})` does"
                )
        declared.add(f.name)


def without(config: Config, name: str) -> Config:
    """`config` with one switch off, and with it every switch that stands on it. Raises ValueError for another name."""
    names = [f.name for f in switches(config)]
    if name not in names:
        raise ValueError(f"{name!r} is no switch of {type(config).__name__}; choose from {', '.join(names) or 'none'}")
    off = {name}
    for f in switches(config):
        if off.intersection(f.metadata["requires"]):
            off.add(f.name)
    return replace(config, **dict.fromkeys(off, False))


def ladder(config: Config) -> list[tuple[str, Config]]:
    """(label, config) from every switch off to `config` itself, one switch more a rung."""
    rung = replace(config, **{f.name: False for f in switches(config)})
    rungs = [("all off", rung)]
    for f in switches(config):
        if getattr(config, f.name):
            rung = replace(rung, **{f.name: True})
            rungs.append((f"+ {f.metadata['label']}", rung))
    return rungs


def label(config: Any) -> str:
    """Which switches are on, for a row of a table: "all on", "all off", "without ping-pong", "only TMA loads".

    "All" are those on by default; one that is off by default is mentioned when it is on: "all on, with multicast".
    """
    usual = [f for f in switches(config) if f.default]
    on = [f.metadata["label"] for f in usual if getattr(config, f.name)]
    off = [f.metadata["label"] for f in usual if not getattr(config, f.name)]
    extra = [f.metadata["label"] for f in switches(config) if not f.default and getattr(config, f.name)]
    if not off:
        text = "all on"
    elif not on:
        text = "all off"
    else:
        text = f"without {', '.join(off)}" if len(off) <= len(on) else f"only {', '.join(on)}"
    return f"{text}, with {', '.join(extra)}" if extra else text
