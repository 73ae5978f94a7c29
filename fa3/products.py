"""One warpgroup's two products, S = Q K^T and O += P V, as WGMMAs that run by themselves once issued."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.arch import WARP_SIZE
from cutlass.cute.nvgpu import warp, warpgroup

from fa3.e4m3 import load_bytes, round_to_e4m3
from fa3.scheduler import Facts
from fa3.softmax import rescale_rows
from fa3.sync import THREADS_PER_WARPGROUP, NamedBarrier
from fa_common.tiles import QUAD, as_operand_a, as_rows_and_columns, round_to_operand_a

STEP_BITS = 256  # of a row of A, and of a column of B, that one WGMMA multiplies: 16 columns, or 32 of 8 bits
WIDEST_OF_TWO = 128  # columns of O of which the registers hold two
ROWS = 64  # of one WGMMA: the queries of one consumer warpgroup


@dataclass(frozen=True)
class Products:
    """The instructions, their operands and their accumulators: this thread's shares."""

    mma_qk: cute.TiledMma
    mma_rqk: cute.TiledMma  # with Q from registers
    mma_pv: cute.TiledMma
    mma_piece: cute.TiledMma  # of as many columns of O as leave at once
    sQ: cute.Tensor  # (64, width)
    sK: cute.Tensor  # (tile_n, width, stages)
    rQ: cute.Tensor | None  # (MMA, MMA_M, q_register_steps) 16-bit: this thread's share of Q's first columns
    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_K) descriptors
    tSrK: cute.Tensor  # (MMA, MMA_N, MMA_K, stages) descriptors
    tOrV: cute.Tensor  # (MMA, MMA_N, MMA_K, stages) descriptors
    acc_S: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32
    rP: cute.Tensor  # (MMA, MMA_M, MMA_K) of the operands' type, the same thread's share of acc_S
    sP: cute.Tensor | None  # (64, tile_n) of shared memory, unless P stays in registers
    tOsP: cute.Tensor | None  # (MMA, MMA_M, MMA_K) descriptors of sP
    acc_O: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32
    acc_PV: cute.Tensor | None  # of one block alone, with two_level_accumulation
    v_by_columns: bool  # and keys in the order of queries_and_keys
    tScS: cute.Tensor  # (MMA, MMA_M, MMA_N) coordinates (query, key) of acc_S inside the warpgroup's tile
    tScO: cute.Tensor  # (MMA, MMA_M, MMA_N) coordinates (query, column) of acc_O
    row_scales: cute.Tensor | None  # (rows,) what this thread's rows of S are to be multiplied by, if they differ in it
    warpgroup: Int32

    @staticmethod
    def of(mmas: tuple, operands: tuple, row_scales: cute.Tensor | None, warpgroup_index: Int32, facts: Facts):
        """`operands` is sQ, sK (tile_n, width, stages), sV (width, tile_n, stages), sP; of sQ and sP this warpgroup's
        64 rows."""
        (mma_qk, mma_rqk, mma_pv, mma_piece), (sQ, sK, sV, sP), config = mmas, operands, facts.config
        thread = cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP
        thread_qk, thread_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
        tile_n, width = cute.size(sK, mode=[0]), cute.size(sV, mode=[0])
        acc_S = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, tile_n)), Float32)
        acc_O = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, width)), Float32)
        acc_O.fill(0.0)
        if config.two_level_accumulation and width > WIDEST_OF_TWO:
            raise ValueError(f"two_level_accumulation needs head_dim up to {WIDEST_OF_TWO}: beyond, two O would spill")
        acc_PV = cute.make_rmem_tensor_like(acc_O) if config.two_level_accumulation else None
        rQ = None
        if config.q_register_steps:
            step = STEP_BITS // sQ.element_type.width
            if step * config.q_register_steps > width:
                raise ValueError(
                    f"q_register_steps must be at most {width // step}, all of Q's {width} columns; "
                    f"got {config.q_register_steps}"
                )
            shape = mma_rqk.partition_shape_A((ROWS, step * config.q_register_steps))
            rQ = cute.make_rmem_tensor(shape, sQ.element_type)
        is_16_bit = sK.element_type.width == 16
        layout_P = as_operand_a(acc_S.layout) if is_16_bit else mma_pv.partition_shape_A((ROWS, tile_n))
        return Products(
            mma_qk=mma_qk,
            mma_rqk=mma_rqk,
            mma_pv=mma_pv,
            mma_piece=mma_piece,
            sQ=sQ,
            sK=sK,
            rQ=rQ,
            tSrQ=mma_qk.make_fragment_A(thread_qk.partition_A(sQ)),
            tSrK=mma_qk.make_fragment_B(thread_qk.partition_B(sK)),
            tOrV=mma_pv.make_fragment_B(thread_pv.partition_B(sV)),
            acc_S=acc_S,
            rP=cute.make_rmem_tensor(layout_P, sK.element_type),
            sP=sP,
            tOsP=None if sP is None else mma_pv.make_fragment_A(thread_pv.partition_A(sP)),
            acc_O=acc_O,
            acc_PV=acc_PV,
            v_by_columns=facts.v_by_columns,
            tScS=thread_qk.partition_C(queries_and_keys(tile_n, facts.v_by_columns)),
            tScO=thread_pv.partition_C(cute.make_identity_tensor((ROWS, width))),
            row_scales=row_scales,
            warpgroup=warpgroup_index,
        )

    def load_queries(self) -> None:
        """Q's first columns from shared memory to registers, if S takes them from there."""
        if self.rQ is None:
            return
        thread, num_steps = cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP, cute.size(self.rQ, mode=[2])
        if self.rQ.element_type.width == 8:
            load_bytes(self.sQ, self.rQ, num_steps, thread)
            return
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.rQ.element_type)
        copy = cute.make_tiled_copy_A(ldmatrix, self.mma_rqk).get_slice(thread)
        columns = cute.local_tile(self.sQ, (ROWS, STEP_BITS // 16 * num_steps), (0, 0))
        cute.copy(ldmatrix, copy.partition_S(columns), copy.retile(self.rQ))

    def issue_scores(self, stage: Int32) -> None:
        """Starts S = Q K^T and commits it as one group; nobody may touch acc_S before the group is waited for."""
        in_registers = 0 if self.rQ is None else cute.size(self.rQ, mode=[2])
        steps = [
            (self.mma_rqk, self.rQ) if k_step < in_registers else (self.mma_qk, self.tSrQ)
            for k_step in range(cute.size(self.tSrQ, mode=[2]))
        ]
        self.issue(steps, self.acc_S, self.tSrK[None, None, None, stage], accumulate=False)

    def scale_rows(self) -> None:
        """S, once it is done, times the scales of its rows."""
        if self.row_scales is not None:
            rescale_rows(self.acc_S, self.row_scales)

    @cute.jit
    def scores_again(self, stage: Int32):
        """S once more, number by number, for a warp that needs it when the other three may not: slow, and rare."""
        thread = self.mma_qk.get_slice(cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP)
        places = thread.partition_C(cute.make_identity_tensor((ROWS, cute.size(self.sK, mode=[0]))))
        rows_and_columns, S = (as_rows_and_columns(t) for t in (places, self.acc_S))
        num_rows, num_columns = (cute.size(S, mode=[mode]) for mode in (0, 1))
        pairs_of_Q, pairs_of_K = (cute.flat_divide(t, (1, 2)) for t in (self.sQ, self.sK[None, None, stage]))
        self.acc_S.fill(0.0)
        for pair in cutlass.range(cute.size(self.sQ, mode=[1]) // 2, unroll=1):
            Q = [pairs_of_Q[0, None, rows_and_columns[r, 0][0], pair].load().to(Float32) for r in range(num_rows)]
            for c in cutlass.range_constexpr(num_columns):
                K = pairs_of_K[0, None, rows_and_columns[0, c][1], pair].load().to(Float32)
                for r in cutlass.range_constexpr(num_rows):
                    S[r, c] = S[r, c] + (Q[r][0] * K[0] + Q[r][1] * K[1])
        self.scale_rows()

    def issue_output(self, stage: Int32) -> None:
        """Starts O += P V and commits it as one group; nobody may touch P or acc_O before the group is waited for.

        With two_level_accumulation it is P V alone, which `add_block` adds up.
        """
        P = self.rP if self.tOsP is None else self.tOsP
        steps = [(self.mma_pv, P)] * cute.size(P, mode=[2])
        acc = self.acc_O if self.acc_PV is None else self.acc_PV
        self.issue(steps, acc, self.tOrV[None, None, None, stage], accumulate=self.acc_PV is None)

    def add_block(self) -> None:
        """O += P V of the block that has just arrived, in fp32; the tensor cores keep fewer bits of 8-bit products."""
        if self.acc_PV is not None:
            self.acc_O.store(self.acc_O.load() + self.acc_PV.load())

    def rescale(self, factors: cute.Tensor) -> None:
        """O, and what is still to be added to it, times factors, (rows,)."""
        for acc in (self.acc_O, self.acc_PV):
            if acc is not None:
                rescale_rows(acc, factors)

    def issue(self, steps: list, acc: cute.Tensor, b: cute.Tensor, accumulate: bool) -> None:
        """One WGMMA for each step: the instruction, and the A operand of all steps."""
        # Registers written by ordinary instructions (acc, rQ, rP) are visible to the WGMMAs that follow.
        warpgroup.fence()
        for k_step, (mma, a) in enumerate(steps):
            # A fresh atom each time: ACCUMULATE is set on the Python object; of one made outside a loop, the loop's
            # value would not dominate its later uses.
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, accumulate or k_step > 0)
            cute.gemm(atom, acc, a[None, None, k_step], b[None, None, k_step], acc)
        warpgroup.commit_group()

    def round_scores(self) -> None:
        """P, as an operand, from what the softmax left in acc_S: in registers, or through them to shared memory."""
        if self.rP.element_type.width == 8:
            round_to_e4m3(self.acc_S, self.rP, in_halves=self.v_by_columns)
        else:
            round_to_operand_a(self.acc_S, self.rP)
        if self.sP is None:
            return
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.rP.element_type)
        thread = cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP
        copy = cute.make_tiled_copy_C(stmatrix, self.mma_qk).get_slice(thread)
        rP = cute.make_tensor(self.rP.iterator, self.acc_S.layout)
        cute.copy(stmatrix, copy.retile(rP), copy.partition_D(self.sP))
        # What these threads wrote becomes visible to WGMMA; then all four warps of the warpgroup have written.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NamedBarrier.ROWS + self.warpgroup, number_of_threads=THREADS_PER_WARPGROUP)


def row_of_thread(r: int) -> Int32:
    """Which of its warpgroup's 64 rows this thread's row r is: each warp has 16, see fa_common/tiles.py."""
    thread = cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP
    return thread // WARP_SIZE * 16 + cute.arch.lane_idx() // QUAD + 8 * r


def queries_and_keys(tile_n: int, in_halves: bool) -> cute.Tensor:
    """Coordinates (query, key) of S: of each column its own number, or the key that its row of sK has.

    In halves, key 4i + e of a block is column 2i + e, and key 4i + 2 + e column tile_n / 2 + 2i + e.
    """
    coordinates = cute.make_identity_tensor((ROWS, tile_n))
    if not in_halves:
        return coordinates
    keys = cute.make_layout((2, tile_n // 4, 2), stride=(1, 4, 2))
    layout = cute.composition(coordinates.layout, (cute.make_layout(ROWS), keys))
    return cute.make_tensor(coordinates.iterator, layout)
