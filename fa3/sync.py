"""Who waits for whom in FA3: warp roles, named barriers and register budgets."""

import functools
from dataclasses import dataclass
from enum import IntEnum

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr
from cutlass.cute.arch import WARP_SIZE

from fa3.config import Config
from fa3.scheduler import TileRing

THREADS_PER_WARPGROUP = 128
WARPS_PER_WARPGROUP = 4
PRODUCER_WARP = 0  # of warpgroup 0; the other three warps of the producer warpgroup only give up registers


class NamedBarrier(IntEnum):
    """Hardware barriers 1 to 15; 0 is `__syncthreads`.

    GATE + w: ping-pong. Warpgroup w waits here before it issues its products; the warpgroup before it (in a ring)
        arrives when it has issued its own. 256 threads: the waiting and the arriving warpgroup.
    ROWS + w: the four warps of consumer warpgroup w have written, or have done with, their 64 rows of Q, P or O in
        shared memory. 128 threads.
    VALUES: the four producer warps have read a panel of V, which they are about to overwrite with V^T. 128 threads.
    """

    GATE = 1
    ROWS = 5
    VALUES = 9


# (producer, consumer) registers a thread after setmaxnreg, by the number of consumer warpgroups: multiples of 8, at
# most 256, the consumers as many as the producer's few leave. A copying producer uses cp.async, and keeps an address
# for each copy; a transposing one holds V between reading and writing it.
REGISTERS = {1: (56, 256), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
REGISTERS_COPYING = {1: (56, 256), 2: (56, 224), 3: (56, 152), 4: (64, 104)}
REGISTERS_TRANSPOSING = {1: (72, 256), 2: (72, 216), 3: (56, 152), 4: (64, 104)}
REGISTER_FILE = 65536


def register_budget(num_consumers: int, registers: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """(producer, consumer) registers a thread, by the consumer warpgroups, from one of the tables above.

    setmaxnreg moves registers within what the CTA was given at launch, the same for every thread, a multiple of 8;
    asked for more it waits for ever.
    """
    producer, consumer = registers[num_consumers]
    num_threads = THREADS_PER_WARPGROUP * (1 + num_consumers)
    at_launch = REGISTER_FILE // num_threads // 8 * 8 * num_threads
    in_use = THREADS_PER_WARPGROUP * (producer + num_consumers * consumer)
    assert in_use <= at_launch, f"setmaxnreg would wait for ever: {in_use} registers asked, {at_launch} at launch"
    return producer, consumer


@dataclass(frozen=True)
class TransposedPipe:
    """V's barriers where the producer's warps turn each block around once TMA has brought it.

    landed: full when the bytes of TMA have come; empty when every consumer warp has read V^T.
    transposed: full when the four warps of the producer warpgroup have written V^T.
    """

    landed: pipeline.PipelineTmaAsync
    transposed: pipeline.PipelineAsync

    @staticmethod
    def of(landed: pipeline.PipelineTmaAsync, barriers, num_stages: int) -> "TransposedPipe":
        transposed = pipeline.PipelineAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=num_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPS_PER_WARPGROUP),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPS_PER_WARPGROUP),
            defer_sync=True,
        )
        return TransposedPipe(landed, transposed)

    def producer_acquire(self, state: pipeline.PipelineState) -> None:
        self.landed.producer_acquire(state)

    def producer_get_barrier(self, state: pipeline.PipelineState) -> cute.Pointer:
        return self.landed.producer_get_barrier(state)

    def consumer_wait(self, state: pipeline.PipelineState) -> None:
        self.transposed.consumer_wait(state)

    def consumer_release(self, state: pipeline.PipelineState) -> None:
        self.landed.consumer_release(state)


@dataclass(frozen=True)
class Pipes:
    """Full and empty barriers between those who load and the consumer warpgroups.

    Each stage has a full barrier, which the bytes of TMA complete (or the copies of all loading threads), and an empty
    one, at which the consumers arrive who have read it: of Q's stages those of one warpgroup, of K's and V's all, of
    all CTAs in a cluster, since TMA writes a block into all of them.
    """

    q: pipeline.PipelineAsync  # one stage for each warpgroup's 64 rows
    k: pipeline.PipelineAsync
    v: "pipeline.PipelineAsync | TransposedPipe"
    ring: TileRing  # tile numbers, with the dynamic schedule
    tma: bool

    @staticmethod
    def of(config: Config, storage, dtype: type, layouts: tuple, turns_values: bool) -> "Pipes":
        """Makes the barriers in shared memory and waits until every thread of the cluster sees them."""
        num_consumers, cluster_size = config.num_consumer_warpgroups, 2 if config.cluster else 1
        num_threads = num_consumers * THREADS_PER_WARPGROUP
        threads = functools.partial(pipeline.CooperativeGroup, pipeline.Agent.Thread)

        def of_tma(barriers, layout, num_stages: int, num_consumer_threads: int, num_ctas: int):
            # Told threads, it counts one arrival a warp and CTA of the cluster, which lies along M of its (V, M, N, K)
            # layout: B operands, K and V, are what CTAs along M share.
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=num_stages,
                producer_group=threads(),
                consumer_group=threads(num_consumer_threads),
                tx_count=cute.size_in_bytes(dtype, cute.select(layout, mode=[0, 1])),
                cta_layout_vmnk=cute.make_layout((1, num_ctas, 1, 1)),
                mcast_mode_mn=(0, 1),
                enable_multicast_signaling=True,
                defer_sync=True,
            )

        def of_cp_async(barriers, _layout, num_stages: int, num_consumer_threads: int, _num_ctas: int):
            return pipeline.PipelineCpAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=num_stages,
                producer_group=threads(THREADS_PER_WARPGROUP if config.warp_specialized else num_threads),
                consumer_group=threads(num_consumer_threads),
                defer_sync=True,
            )

        layout_Q, layout_K, layout_V = layouts
        of_blocks = of_tma if config.tma else of_cp_async
        pipe_v = of_blocks(storage.v_barriers, layout_V, config.stages, num_threads, cluster_size)
        num_listeners = num_threads
        if turns_values:
            pipe_v = TransposedPipe.of(pipe_v, storage.transposed_barriers, config.stages)
            # The producer's other three warps hear the numbers that the loading one draws.
            num_listeners += THREADS_PER_WARPGROUP - WARP_SIZE
        pipes = Pipes(
            q=of_tma(storage.q_barriers, layout_Q, num_consumers, THREADS_PER_WARPGROUP, 1),
            k=of_blocks(storage.k_barriers, layout_K, config.stages, num_threads, cluster_size),
            v=pipe_v,
            ring=TileRing.of(storage, num_listeners),
            tma=config.tma,
        )
        # Every barrier is initialised, in all CTAs of the cluster, before anyone waits or copies.
        cluster_layout = cute.make_layout((1, cluster_size, 1, 1))
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster_layout, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster_layout)
        return pipes

    def wait(self, pipe: pipeline.PipelineAsync, state: pipeline.PipelineState) -> None:
        """Until a stage of K or V has been filled."""
        # Whoever loads has filled it: TMA has counted down its bytes, or every loading thread has arrived.
        pipe.consumer_wait(state)
        if not self.tma:
            # cp.async wrote it as ordinary stores do: what this thread has seen of them becomes visible to WGMMA.
            cute.arch.fence_proxy("async.shared", space="cta")

    def q_state(self, warpgroup: Int32, phase: Int32) -> pipeline.PipelineState:
        """Of a warpgroup's stage of Q, which turns around once a tile."""
        return pipeline.PipelineState(self.q.num_stages, Int32(0), Int32(warpgroup), phase)


@dataclass(frozen=True)
class Gates:
    """Ping-pong: the consumer warpgroups issue their products in turn (a ring). Without it all gates stand open."""

    pingpong: bool
    num_warpgroups: int
    warpgroup: Int32

    @cute.jit
    def open_first(self):
        """The last warpgroup lets the first one through; from then on each lets the next one through.

        Its last opening of gate 0 finds nobody waiting; barriers end with the CTA.
        """
        if const_expr(self.pingpong) and self.warpgroup == self.num_warpgroups - 1:
            self.open_next()

    @cute.jit
    def wait(self):
        """Until the warpgroup before this one, in the ring, has issued its products."""
        if const_expr(self.pingpong):
            cute.arch.barrier(
                barrier_id=NamedBarrier.GATE + self.warpgroup, number_of_threads=2 * THREADS_PER_WARPGROUP
            )

    @cute.jit
    def open_next(self):
        """This warpgroup's products are issued: the next one, in the ring, may issue its own behind them."""
        if const_expr(self.pingpong):
            following = (self.warpgroup + 1) % self.num_warpgroups
            cute.arch.barrier_arrive(
                barrier_id=NamedBarrier.GATE + following, number_of_threads=2 * THREADS_PER_WARPGROUP
            )
