import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.tensor_utils import LayoutEnum

from fa_common.compile import KernelKey
from tests.fa_common.toy.config import Config

TILE = (64, 64, 64)  # m, n, k of the product


class Forward:
    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def __call__(self, mX: cute.Tensor, scale: Float32, stream):
        operand = OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(BFloat16, BFloat16, operand, operand, Float32, (1, 1, 1), TILE[:2])
        layout_A = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, TILE, BFloat16, 1)
        layout_B = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, TILE, BFloat16, 1)
        grid = [cute.ceil_div(mX.shape[0], self.config.threads), 1, 1]
        self.kernel(mX, scale, mma, layout_A, layout_B).launch(
            grid=grid, block=[self.config.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        scale: Float32,
        mma: cute.TiledMma,
        layout_A: cute.ComposedLayout,
        layout_B: cute.ComposedLayout,
    ):
        index = cute.arch.block_idx()[0] * self.config.threads + cute.arch.thread_idx()[0]
        if const_expr(self.config.shared_floats):
            shared = cutlass.memory.SmemAllocator().allocate_array(Float32, self.config.shared_floats)
            shared[cute.arch.thread_idx()[0]] = scale
        if const_expr(self.config.local_floats):
            scale = self.sum_by_index(mX, scale)
        if const_expr(self.config.accumulator_in_flight):
            scale = self.touch_accumulator_in_flight(mX, scale, mma, layout_A, layout_B)
        if index < mX.shape[0]:
            mX[index] = mX[index] * scale

    @cute.jit
    def sum_by_index(self, mX: cute.Tensor, scale: Float32):
        values = cute.make_rmem_tensor(self.config.local_floats, Float32)
        values.fill(0.0)
        for i in cutlass.range(mX.shape[0], unroll=1):
            values[i % self.config.local_floats] = values[(i + 1) % self.config.local_floats] + scale
        return values[mX.shape[0] % self.config.local_floats]

    @cute.jit
    def touch_accumulator_in_flight(self, mX, scale: Float32, mma, layout_A, layout_B):
        allocator = cutlass.memory.SmemAllocator()
        sA = allocator.allocate_tensor(BFloat16, layout_A.outer, byte_alignment=1024, swizzle=layout_A.inner)
        sB = allocator.allocate_tensor(BFloat16, layout_B.outer, byte_alignment=1024, swizzle=layout_B.inner)
        thread = mma.get_slice(cute.arch.thread_idx()[0])
        rA = mma.make_fragment_A(thread.partition_A(sA))
        rB = mma.make_fragment_B(thread.partition_B(sB))
        accumulator = cute.make_rmem_tensor(mma.partition_shape_C(TILE[:2]), Float32)
        accumulator.fill(0.0)
        for _ in cutlass.range(mX.shape[0], unroll=1):
            warpgroup.fence()
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, True)
            cute.gemm(atom, accumulator, rA[None, None, 0, 0], rB[None, None, 0, 0], accumulator)
            warpgroup.commit_group()
            accumulator[0] = accumulator[0] * scale
            warpgroup.wait_group(0)
        return accumulator[0]


def compile_forward(key: KernelKey, options: str = ""):
    x = make_fake_compact_tensor(Float32, (cute.sym_int(),))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Forward(key.config), x, Float32(1.0), stream, options="--enable-tvm-ffi " + options)
