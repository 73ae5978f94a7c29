"""FA3 split keys: one result from those of the splits.

A few queries against a long cache are too few tiles to fill a GPU, so each tile's keys are split among CTAs
(kvcache.py). Each split has its own O, normalised, and LSE; of the whole row sum it holds the share exp(LSE_s - LSE):

    LSE = log sum_s exp(LSE_s)        O = sum_s exp(LSE_s - LSE) O_s

One CTA a row (sequence, query, head). It is launched while the attention kernel still runs (programmatic dependent
launch). What it then takes is the latency of its loads, so those of O_s are on their way before the first LSE is looked
at. head_dim 128, four groups of 32 threads:

    group 0   O_0  O_4  O_8  O_12 ..     a thread has 16 bytes, 4 columns, of each of its group's splits; every warp
    group 1   O_1  O_5  O_9  O_13 ..     has all of the row's LSE_s, a lane a split, and makes them weights. The groups'
    group 2   O_2  O_6  O_10 ..          sums meet in shared memory (NUM_THREADS * 16 bytes) and are added up in the
    group 3   O_3  O_7  O_11 ..          groups' order: the same bits at every run
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import WARP_SIZE
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from fa_common.compile import KernelKey
from fa_common.tiles import DTYPES, fake_rows, fake_sequences

NUM_THREADS = 128
MAX_SPLITS = 128
VECTOR = 4  # fp32 in 16 bytes
NUM_AHEAD = 8  # splits of a group in flight at once: at head_dim 128, 32 in all


@dataclass(frozen=True)
class Row:
    """One CTA's row, and this thread's place in it."""

    place: tuple  # (batch, query, head)
    num_splits: Int32
    O_split: cute.Pointer  # this thread's columns of the first split
    split_stride: Int64  # elements from one split's O to the next one's
    group: Int32  # takes every num_groups-th split, from this one on
    column: Int32  # the first of VECTOR


class Merge:
    """The kernel for one KernelKey."""

    def __init__(self, key: KernelKey):
        self.dtype = DTYPES[key.dtype]
        self.head_dim = key.head_dim
        # A power of two, so that groups share out the CTA's threads; those past head_dim repeat the last columns. Four
        # at least: then a warp has no more than one group for each lane.
        self.threads_of_group = max(4, 2 ** math.ceil(math.log2(key.head_dim // VECTOR)))
        self.num_groups = NUM_THREADS // self.threads_of_group
        self.num_ahead = min(NUM_AHEAD, MAX_SPLITS // self.num_groups)

    @cute.jit
    def __call__(self, mO_split: cute.Tensor, mLSE_split: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor, stream):
        """O_split (splits, batch, seqlen_q, heads, head_dim) and LSE_split (splits, batch, heads, seqlen_q), fp32 and
        contiguous; O (batch, seqlen_q, heads, head_dim), 16-bit; LSE (batch, heads, seqlen_q), fp32."""
        batch, seqlen_q, heads, _ = mO.shape
        self.kernel(mO_split, mLSE_split, mO, mLSE).launch(
            grid=(batch * seqlen_q, heads, 1), block=[NUM_THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mO_split: cute.Tensor, mLSE_split: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor):
        row = self.row(mO_split)
        # The attention kernel, beside whose last CTAs this one starts, has ended: O_split and LSE_split are complete.
        cute.arch.griddepcontrol_wait()
        first_O = self.load(row, 0)
        weights, lse = self.weigh(row, mLSE_split)
        O = self.attend(row, first_O, weights)
        self.store(row, O, lse, mO, mLSE)

    @cute.jit
    def row(self, mO_split: cute.Tensor) -> Row:
        number, head, _ = cute.arch.block_idx()
        num_splits, batch, seqlen_q, heads, head_dim = mO_split.shape
        thread = cute.arch.thread_idx()[0]
        column = cutlass.min(thread % self.threads_of_group * VECTOR, head_dim - VECTOR)
        return Row(
            place=(number // seqlen_q, number % seqlen_q, head),
            num_splits=num_splits,
            O_split=mO_split.iterator + ((Int64(number) * heads + head) * head_dim + column),
            split_stride=Int64(batch * seqlen_q) * (heads * head_dim),
            group=thread // self.threads_of_group,
            column=column,
        )

    @cute.jit
    def load(self, row: Row, first: cutlass.Constexpr) -> cute.Tensor:
        """This thread's columns of `num_ahead` of its group's splits, from the group's `first` on; 0 past the last."""
        O_split = cute.make_rmem_tensor((VECTOR, self.num_ahead), Float32)
        O_split.fill(0.0)
        for i in cutlass.range_constexpr(self.num_ahead):
            split = (first + i) * self.num_groups + row.group
            if split < row.num_splits:
                source = row.O_split + split * row.split_stride
                source = cute.make_ptr(Float32, source.toint(), cute.AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), O_split[None, i])
        # For the compiler: no load moves across. Without, ptxas moves each down to where its O is used, one latency
        # behind the other, to save registers.
        cute.arch.sync_warp()
        return O_split

    @cute.jit
    def weigh(self, row: Row, mLSE_split: cute.Tensor):
        """(weights, LSE): this lane's are those of splits lane, lane + 32, ..., no split's being 0. For whole warps."""
        batch, query, head = row.place
        lane = cute.arch.lane_idx()
        lses = cute.make_rmem_tensor(MAX_SPLITS // WARP_SIZE, Float32)
        for i in cutlass.range_constexpr(MAX_SPLITS // WARP_SIZE):
            lses[i] = -Float32.inf
            if lane + i * WARP_SIZE < row.num_splits:
                lses[i] = mLSE_split[lane + i * WARP_SIZE, batch, head, query]
        row_max = cute.arch.warp_reduction_max(lses.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
        # A row without keys: -inf - 0 is -inf, where -inf - -inf would be NaN.
        row_max = Float32(0.0) if row_max == -Float32.inf else row_max
        shares = cute.math.exp2((lses.load() - row_max) * math.log2(math.e), fastmath=True)
        row_sum = cute.arch.warp_reduction_sum(shares.reduce(cute.ReductionOp.ADD, Float32(0.0), 0))
        lse = row_max + cute.math.log2(row_sum, fastmath=True) * math.log(2)
        weights = cute.make_rmem_tensor(MAX_SPLITS // WARP_SIZE, Float32)
        # A row with keys has a row_sum of at least its largest share, 1.
        weights.store(shares * cute.arch.rcp_approx(cute.arch.fmax(row_sum, Float32(1.0))))
        return weights, lse

    @cute.jit
    def attend(self, row: Row, first_O: cute.Tensor, weights: cute.Tensor) -> cute.Tensor:
        """This group's share of O, (VECTOR,)."""
        O = cute.make_rmem_tensor(VECTOR, Float32)
        O.fill(0.0)
        self.add(row, O, first_O, weights, 0)
        for first in cutlass.range_constexpr(self.num_ahead, MAX_SPLITS // self.num_groups, self.num_ahead):
            if first * self.num_groups < row.num_splits:
                self.add(row, O, self.load(row, first), weights, first)
        return O

    @cute.jit
    def add(self, row: Row, O: cute.Tensor, O_split: cute.Tensor, weights: cute.Tensor, first: cutlass.Constexpr):
        """O += what `load` of the same `first` gave, each split by its weight, which some lane has."""
        for i in cutlass.range_constexpr(self.num_ahead):
            # num_groups divides 32, so the group's own number never leads to another register.
            split = (first + i) * self.num_groups
            weight = cute.arch.shuffle_sync(weights[split // WARP_SIZE], split % WARP_SIZE + row.group)
            for c in cutlass.range_constexpr(VECTOR):
                O[c] = O[c] + weight * O_split[c, i]

    @cute.jit
    def store(self, row: Row, O: cute.Tensor, lse: Float32, mO: cute.Tensor, mLSE: cute.Tensor):
        """Adds up the groups' shares of O, rounds, and writes O and LSE."""
        thread = cute.arch.thread_idx()[0]
        sO = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((VECTOR, self.threads_of_group, self.num_groups)), byte_alignment=16
        )
        cute.autovec_copy(O, sO[None, thread % self.threads_of_group, row.group])
        # Every group has written its share.
        cute.arch.sync_threads()
        if (thread < self.threads_of_group) & (thread * VECTOR < self.head_dim):
            total = cute.make_rmem_tensor(VECTOR, Float32)
            total.fill(0.0)
            for group in cutlass.range_constexpr(self.num_groups):
                total.store(total.load() + sO[None, thread, group].load())
            batch, query, head = row.place
            rO = cute.make_rmem_tensor(VECTOR, self.dtype)
            rO.store(total.load().to(self.dtype))
            destination = mO[batch, query, head, None].iterator + row.column
            destination = cute.make_ptr(self.dtype, destination.toint(), cute.AddressSpace.gmem, assumed_align=8)
            cute.autovec_copy(rO, cute.make_tensor(destination, cute.make_layout(VECTOR)))
            if thread == 0:
                mLSE[batch, head, query] = lse


def compile_merge(key: KernelKey, options: str = ""):
    """Compiles the kernel of `key` for sm_90a; called as (out_split, lse_split, out, lse), see Merge.__call__."""
    num_splits, batch, seqlen_q, heads = (cute.sym_int() for _ in range(4))
    rows = (batch, seqlen_q, heads, key.head_dim)
    return cute.compile(
        Merge(key),
        make_fake_compact_tensor(Float32, (num_splits, *rows), stride_order=(4, 3, 2, 1, 0), assumed_align=16),
        fake_rows((num_splits, batch, heads, seqlen_q)),
        fake_sequences(DTYPES[key.dtype], rows),
        fake_rows((batch, heads, seqlen_q)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )
