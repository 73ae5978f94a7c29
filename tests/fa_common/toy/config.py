from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """A good kernel by default; each switch adds one thing that a report must find."""

    threads: int = 128
    shared_floats: int = 0  # dynamic shared memory
    local_floats: int = 0  # an array indexed at run time, which only local memory can hold
    accumulator_in_flight: bool = False  # an accumulator touched while a WGMMA writes it
