"""Who waits for whom in FA3: warp roles, named barriers and register budgets."""

from enum import IntEnum

THREADS_PER_WARPGROUP = 128
WARPS_PER_WARPGROUP = 4
PRODUCER_WARP = 0  # of warpgroup 0; the other three warps of the producer warpgroup only give up registers


class NamedBarrier(IntEnum):
    """Hardware barriers 1 to 15; 0 is `__syncthreads`.

    GATE + w: ping-pong. Warpgroup w waits here before it issues its products; the warpgroup before it (in a ring)
        arrives when it has issued its own. 256 threads: the waiting and the arriving warpgroup.
    OUTPUT + w: the four warps of consumer warpgroup w have written their rows of O to shared memory. 128 threads.
    """

    GATE = 1
    OUTPUT = 4


# (producer, consumer) registers a thread after setmaxnreg, by the number of consumer warpgroups: multiples of 8, at
# most 256, the consumers as many as the producer's few leave. setmaxnreg waits for ever when the sum exceeds the
# register file, so the sum is checked where the kernel is built.
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
REGISTER_FILE = 65536


def register_budget(num_consumer_warpgroups: int) -> tuple[int, int]:
    """(producer, consumer) registers a thread."""
    producer, consumer = REGISTERS[num_consumer_warpgroups]
    in_use = THREADS_PER_WARPGROUP * (producer + num_consumer_warpgroups * consumer)
    assert in_use <= REGISTER_FILE, f"setmaxnreg would wait for ever: {in_use} registers asked of {REGISTER_FILE}"
    return producer, consumer
