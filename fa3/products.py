"""One warpgroup's two products, S = Q K^T and O += P V, as WGMMAs that run by themselves once issued."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from fa3.sync import THREADS_PER_WARPGROUP, NamedBarrier
from fa_common.tiles import as_operand_a, round_to_operand_a

ROWS = 64  # of one WGMMA: the queries of one consumer warpgroup


@dataclass(frozen=True)
class Products:
    """The instructions, their operands and their accumulators: this thread's shares."""

    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_K) descriptors
    tSrK: cute.Tensor  # (MMA, MMA_N, MMA_K, stages) descriptors
    tOrV: cute.Tensor  # (MMA, MMA_N, MMA_K, stages) descriptors
    acc_S: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32
    rP: cute.Tensor  # (MMA, MMA_M, MMA_K) 16-bit, the same thread's share of acc_S
    sP: cute.Tensor | None  # (64, tile_n) of shared memory, unless P stays in registers
    tOsP: cute.Tensor | None  # (MMA, MMA_M, MMA_K) descriptors of sP
    acc_O: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32
    tScS: cute.Tensor  # (MMA, MMA_M, MMA_N) coordinates (query, key) of acc_S inside the warpgroup's tile
    tScO: cute.Tensor  # (MMA, MMA_M, MMA_N) coordinates (query, column) of acc_O
    warpgroup: Int32

    @staticmethod
    def of(mmas: tuple, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, sP, warpgroup_index: Int32) -> "Products":
        """sK (tile_n, width, stages), sV (width, tile_n, stages); of sQ and sP this warpgroup's 64 rows."""
        mma_qk, mma_pv = mmas
        thread = cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP
        thread_qk, thread_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
        tile_n, width = cute.size(sK, mode=[0]), cute.size(sV, mode=[0])
        acc_S = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, tile_n)), Float32)
        acc_O = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, width)), Float32)
        acc_O.fill(0.0)
        return Products(
            mma_qk=mma_qk,
            mma_pv=mma_pv,
            tSrQ=mma_qk.make_fragment_A(thread_qk.partition_A(sQ)),
            tSrK=mma_qk.make_fragment_B(thread_qk.partition_B(sK)),
            tOrV=mma_pv.make_fragment_B(thread_pv.partition_B(sV)),
            acc_S=acc_S,
            rP=cute.make_rmem_tensor(as_operand_a(acc_S.layout), sK.element_type),
            sP=sP,
            tOsP=None if sP is None else mma_pv.make_fragment_A(thread_pv.partition_A(sP)),
            acc_O=acc_O,
            tScS=thread_qk.partition_C(cute.make_identity_tensor((ROWS, tile_n))),
            tScO=thread_pv.partition_C(cute.make_identity_tensor((ROWS, width))),
            warpgroup=warpgroup_index,
        )

    def issue_scores(self, stage: Int32) -> None:
        """Starts S = Q K^T and commits it as one group; nobody may touch acc_S before the group is waited for."""
        self.issue(self.mma_qk, self.acc_S, self.tSrQ, self.tSrK[None, None, None, stage], accumulate=False)

    def issue_output(self, stage: Int32) -> None:
        """Starts O += P V and commits it as one group; nobody may touch P or acc_O before the group is waited for."""
        P = self.rP if self.tOsP is None else self.tOsP
        self.issue(self.mma_pv, self.acc_O, P, self.tOrV[None, None, None, stage], accumulate=True)

    def issue(self, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: bool) -> None:
        # Registers written by ordinary instructions (acc, rP) are visible to the WGMMAs that follow.
        warpgroup.fence()
        # A fresh atom each time: ACCUMULATE is set on the Python object; of one made outside a loop, the loop's value
        # would not dominate its later uses.
        atom = cute.make_mma_atom(mma.op)
        for k_step in range(cute.size(a, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, accumulate or k_step > 0)
            cute.gemm(atom, acc, a[None, None, k_step], b[None, None, k_step], acc)
        warpgroup.commit_group()

    def round_scores(self) -> None:
        """P, 16-bit, from what the softmax left in acc_S: in registers, or through them to shared memory."""
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
