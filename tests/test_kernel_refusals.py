"""What a compiled kernel refuses by itself, before it launches anything: prepared runs leave it to that.

Needs no GPU: the tensors are addresses that nobody follows, in the form in which kernels take those of any library.
"""

import ctypes
from collections.abc import Callable
from importlib import import_module

import pytest
import torch

from fa3 import fp8_launch
from fa3.config import default_fp8_config
from fa_common.compile import KernelKey, load
from fa_common.problem import Problem

CUDA = 2  # DLPack's number
TYPES = {
    "bfloat16": (4, 16),
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "int32": (0, 32),
    "int64": (0, 64),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
}
SOMEWHERE = 0x7F00_0000_0000


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),  # DLManagedTensor goes on with these two
        ("deleter", ctypes.c_void_p),
    )


class GpuTensor:
    """A tensor at an address of a GPU, as DLPack describes it; contiguous unless strides are given."""

    def __init__(
        self,
        dtype: str,
        *shape: int,
        address: int = SOMEWHERE,
        last_stride: int = 1,
        strides: tuple[int, ...] | None = None,
    ):
        if strides is None:
            strides = (last_stride,)
            for size in reversed(shape[1:]):
                strides = (strides[0] * size, *strides)
        sizes = ctypes.c_int64 * len(shape)
        self._shape, self._strides = sizes(*shape), sizes(*strides)
        code, bits = TYPES[dtype]
        self._tensor = DLTensor(address, CUDA, 0, len(shape), code, bits, 1, self._shape, self._strides, 0, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **options: object) -> object:
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)


REFUSED = {
    "q off by one": ("Misaligned", 0, GpuTensor("bfloat16", 2, 256, 4, 64, address=SOMEWHERE + 2)),
    "k off by one": ("Misaligned", 1, GpuTensor("bfloat16", 2, 256, 2, 64, address=SOMEWHERE + 2)),
    "v off by one": ("Misaligned", 2, GpuTensor("bfloat16", 2, 256, 2, 64, address=SOMEWHERE + 8)),
    "out off by one": ("Misaligned", 3, GpuTensor("bfloat16", 2, 256, 4, 64, address=SOMEWHERE + 2)),
    "k of another type": ("dtype=bfloat16", 1, GpuTensor("float16", 2, 256, 2, 64)),
    "v of another type": ("dtype=bfloat16", 2, GpuTensor("float32", 2, 256, 2, 64)),
    "out of another type": ("dtype=bfloat16", 3, GpuTensor("float32", 2, 256, 4, 64)),
    "lse of another type": ("dtype=float32", 4, GpuTensor("float64", 2, 4, 256)),
    "v of another batch": ("to match", 2, GpuTensor("bfloat16", 1, 256, 2, 64)),
    "v of another length": ("to match", 2, GpuTensor("bfloat16", 2, 255, 2, 64)),
    "v of other heads": ("to match", 2, GpuTensor("bfloat16", 2, 256, 1, 64)),
    "v of another head_dim": ("to be 64", 2, GpuTensor("bfloat16", 2, 256, 2, 128)),
    "out of other heads": ("to match", 3, GpuTensor("bfloat16", 2, 256, 2, 64)),
    "lse of other heads": ("to match", 4, GpuTensor("float32", 2, 2, 256)),
    "out in every other column": ("to be 1", 3, GpuTensor("bfloat16", 2, 256, 4, 64, last_stride=2)),
    "lse in every other column": ("to be 1", 4, GpuTensor("float32", 2, 4, 256, last_stride=2)),
    "v packed": ("ndim=4", 2, GpuTensor("bfloat16", 512, 2, 64)),
    "no v": ("expected Tensor", 2, None),
}
REFUSED_PACKED = {
    "lengths of 64 bits": ("dtype=int32", 6, GpuTensor("int64", 3)),
    "lengths of another batch": ("to match", 6, GpuTensor("int32", 4)),
    "every other length": ("to be 1", 5, GpuTensor("int32", 3, last_stride=2)),
    "v off by one": ("Misaligned", 2, GpuTensor("bfloat16", 512, 2, 64, address=SOMEWHERE + 2)),
    "v of other heads": ("to match", 2, GpuTensor("bfloat16", 512, 1, 64)),
}


REFUSED_FP8 = {
    "q off by eight": ("Misaligned", 0, GpuTensor("float8_e4m3fn", 2, 256, 4, 64, address=SOMEWHERE + 8)),
    "k of 16 bits": ("dtype=float8_e4m3fn", 1, GpuTensor("bfloat16", 2, 256, 2, 64)),
    "v of another byte": ("dtype=float8_e4m3fn", 2, GpuTensor("float8_e5m2", 2, 256, 2, 64)),
    "v of other heads": ("to match", 2, GpuTensor("float8_e4m3fn", 2, 256, 1, 64)),
    "v of another length": ("to match", 2, GpuTensor("float8_e4m3fn", 2, 255, 2, 64)),
    "v packed": ("ndim=4", 2, GpuTensor("float8_e4m3fn", 512, 2, 64)),
    "a scale of another type": ("dtype=float32", 6, GpuTensor("float64", 2, 2, 2)),
    "no scale": ("expected Tensor", 5, None),
}
BY_COLUMNS = (32768, 1, 16384, 256)  # strides of V (2, 256, 2, 64) whose keys lie next to each other
REFUSED_BY_COLUMNS = {
    "v by rows": ("to be 1", 2, GpuTensor("float8_e4m3fn", 2, 256, 2, 64)),
    "v off by eight": (
        "Misaligned",
        2,
        GpuTensor("float8_e4m3fn", 2, 256, 2, 64, address=SOMEWHERE + 8, strides=BY_COLUMNS),
    ),
    "columns 264 apart": (
        "divisible by 16",
        2,
        GpuTensor("float8_e4m3fn", 2, 256, 2, 64, strides=(33792, 1, 16896, 264)),
    ),
    "v of another length": ("to match", 2, GpuTensor("float8_e4m3fn", 2, 240, 2, 64, strides=BY_COLUMNS)),
}
REFUSED_QUANTIZING = {
    "k of another type": ("dtype=bfloat16", 1, GpuTensor("float16", 2, 256, 2, 64)),
    "v of another type": ("dtype=bfloat16", 2, GpuTensor("float32", 2, 256, 2, 64)),
    "v of another batch": ("to match", 2, GpuTensor("bfloat16", 1, 256, 2, 64)),
    "v of other heads": ("to match", 2, GpuTensor("bfloat16", 2, 256, 1, 64)),
    "v of another length": ("to match", 2, GpuTensor("bfloat16", 2, 255, 2, 64)),
    "v packed": ("ndim=4", 2, GpuTensor("bfloat16", 512, 2, 64)),
}


def assert_refused(version: str, sequences: str, tensors: list, wrong: dict) -> None:
    interface = import_module(f"{version}.interface")
    problem = Problem(batch=2, seqlen_q=256, seqlen_k=256, heads_q=4, heads_kv=2, head_dim=64)
    config = interface.default_config(problem)
    key = KernelKey(version, "forward", "bfloat16", 64, False, config, sequences=sequences)
    numbers = {"fa1": (0.1, 0.0, 0, 0), "fa2": (0.1, 0.0, 0, 0, 256), "fa3": (None, 0.1, 0.0, 0, 0, 132, 1)}[version]
    assert_each_refused(load(key, interface.build_forward), tensors, numbers, wrong)


def assert_each_refused(kernel: Callable, tensors: list, numbers: tuple, wrong: dict) -> None:
    for message, position, tensor in wrong.values():
        given = [*tensors]
        given[position] = tensor
        with pytest.raises((TypeError, ValueError), match=message):
            kernel(*given, *numbers)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["fa1", "fa2", "fa3"])
def test_what_a_kernel_refuses(version):
    q, out = (GpuTensor("bfloat16", 2, 256, 4, 64) for _ in range(2))
    k, v = (GpuTensor("bfloat16", 2, 256, 2, 64) for _ in range(2))
    others = {
        "fa1": [None, None, GpuTensor("float32", 4, 32, 1, 8, 32, 4), GpuTensor("float32", 4, 32, 16, 2)],
        "fa2": [None, None],
        "fa3": [None, None],
    }
    tensors = [q, k, v, out, GpuTensor("float32", 2, 4, 256), *others[version]]
    assert_refused(version, "dense", tensors, REFUSED)


@pytest.mark.slow
def test_what_a_kernel_of_packed_sequences_refuses():
    q, out = (GpuTensor("bfloat16", 512, 4, 64) for _ in range(2))
    k, v = (GpuTensor("bfloat16", 512, 2, 64) for _ in range(2))
    lengths = [GpuTensor("int32", 3, address=SOMEWHERE + 4) for _ in range(2)]
    assert_refused("fa3", "packed", [q, k, v, out, GpuTensor("float32", 4, 512), *lengths], REFUSED_PACKED)


@pytest.mark.slow
@pytest.mark.parametrize("v_by_columns", [False, True], ids=["V by rows", "V by columns"])
def test_what_the_fp8_kernel_refuses(v_by_columns):
    """Not a scale of another shape: `fa3/fp8.py` finds a run by the shapes of the scales too."""
    problem = Problem(
        batch=2, seqlen_q=256, seqlen_k=256, heads_q=4, heads_kv=2, head_dim=64, dtype=torch.float8_e4m3fn
    )
    config = default_fp8_config(problem, v_by_columns)
    key = fp8_launch.forward_key(problem, config, torch.bfloat16, v_by_columns)
    q, out = (GpuTensor(dtype, 2, 256, 4, 64) for dtype in ("float8_e4m3fn", "bfloat16"))
    k = GpuTensor("float8_e4m3fn", 2, 256, 2, 64)
    v = GpuTensor("float8_e4m3fn", 2, 256, 2, 64, strides=BY_COLUMNS if v_by_columns else None)
    scales = [GpuTensor("float32", 2, heads, blocks) for heads, blocks in ((4, 4), (2, 2), (2, 2))]
    tensors = [q, k, v, out, GpuTensor("float32", 2, 4, 256), *scales, None, None, None]
    wrong = REFUSED_FP8 | (REFUSED_BY_COLUMNS if v_by_columns else {})
    assert_each_refused(load(key, fp8_launch.build_forward), tensors, (0.1, 0.0, 0, 0, 132, 1), wrong)


@pytest.mark.slow
def test_what_the_quantizing_kernel_refuses():
    quantize = import_module("fa3.quantize")
    key = KernelKey("fa3", "quantize", "bfloat16", 64, causal=False, config=quantize.QuantizeConfig("block", False))
    inputs, values = (
        [GpuTensor(dtype, 2, 256, 4, 64), *(GpuTensor(dtype, 2, 256, 2, 64) for _ in range(2))]
        for dtype in ("bfloat16", "float8_e4m3fn")
    )
    scales = [GpuTensor("float32", 2, heads, blocks) for heads, blocks in ((4, 4), (2, 2), (2, 2))]
    tensors = [*inputs, *values, *scales, None, None, None, None]
    assert_each_refused(load(key, quantize.build_quantize), tensors, (256, 256), REFUSED_QUANTIZING)
