import dataclasses
from collections import Counter

import pytest

import fa_common.report as reporting
from fa_common.compile import KernelKey
from fa_common.isolated import IsolatedFailure
from fa_common.report import SHARED_MEMORY_LIMIT, KernelReport, report
from tests.fa_common.toy.config import Config
from tests.fa_common.toy.forward import compile_forward

GOOD = KernelReport(
    registers=168, shared_memory=SHARED_MEMORY_LIMIT, stack=0, spill_stores=0, spill_loads=0, barriers=4
)


def toy(**config) -> KernelKey:
    return KernelKey("tests.fa_common.toy", "forward", "float32", 64, False, Config(**config))


def never_build(key, options):
    raise AssertionError(f"compiled again: {key}")


@pytest.fixture
def no_report_yet(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report.cache_clear()
    yield
    report.cache_clear()


def test_a_good_kernel():
    kernel = report(toy(), compile_forward)
    assert kernel.problems() == []
    assert 0 < kernel.registers <= 255
    assert (kernel.shared_memory, kernel.stack, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0, 0)
    assert {"LDG", "FMUL", "STG", "EXIT"} <= set(kernel.instructions)
    assert kernel.why_no_instructions is None


def test_dynamic_shared_memory_is_what_the_launch_asks_for():
    kernel = report(toy(shared_floats=30_000), compile_forward)
    assert 4 * 30_000 <= kernel.shared_memory < 4 * 30_000 + 2048
    assert kernel.instructions["STS"]
    assert kernel.problems() == []


def test_too_much_shared_memory_compiles_and_is_found():
    kernel = report(toy(shared_floats=60_000), compile_forward)
    [problem] = kernel.problems()
    assert problem == f"needs {kernel.shared_memory} bytes of shared memory, sm_90 has 232448"


def test_local_memory_is_found():
    kernel = report(toy(local_floats=40), compile_forward)
    assert kernel.stack >= 4 * 40
    assert kernel.instructions["LDL"]
    assert kernel.instructions["STL"]
    assert [problem.split()[0] for problem in kernel.problems()] == ["keeps", "has"]


def test_a_remark_on_wgmma_is_found():
    kernel = report(toy(accumulator_in_flight=True), compile_forward)
    assert kernel.instructions["HGMMA"] == 1
    [remark] = kernel.problems()
    assert remark.startswith("(C75")
    assert "in function" not in remark


@pytest.mark.usefixtures("no_report_yet")
def test_a_report_is_kept_on_disk():
    made = report(toy(accumulator_in_flight=True), compile_forward)
    report.cache_clear()
    assert report(toy(accumulator_in_flight=True), never_build) == made


@pytest.mark.usefixtures("no_report_yet")
def test_a_kernel_that_does_not_compile_says_why():
    with pytest.raises(IsolatedFailure, match="AssertionError: compiled again"):
        report(toy(), never_build)


@pytest.mark.usefixtures("no_report_yet")
@pytest.mark.parametrize(
    ("nvdisasm", "reason"),
    [(None, "pip install nvidia-cuda-nvdisasm"), ("/bin/false", "/bin/false cannot read this cubin")],
)
def test_without_a_disassembler_the_rest_is_there(monkeypatch, nvdisasm, reason):
    monkeypatch.setattr(reporting, "find_nvdisasm", lambda: nvdisasm)
    without = report(toy(), compile_forward)
    assert without.registers
    assert without.instructions == {}
    assert reason in without.why_no_instructions
    monkeypatch.undo()
    report.cache_clear()
    assert report(toy(), compile_forward).instructions  # the reason was not kept on disk


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, []),
        ({"spill_stores": 584, "spill_loads": 712}, ["spills 584 bytes and reads 712 back"]),
        ({"stack": 304}, ["keeps 304 bytes a thread in local memory"]),
        ({"instructions": Counter(LDL=2, STL=1, HGMMA=8)}, ["has 3 local memory instructions (LDL, STL)"]),
        ({"shared_memory": 232_449}, ["needs 232449 bytes of shared memory, sm_90 has 232448"]),
        ({"remarks": ("(C7514) serialized",)}, ["(C7514) serialized"]),
    ],
)
def test_problems(changes, problems):
    assert dataclasses.replace(GOOD, **changes).problems() == problems


PLAIN = """\x1b[96mremark[ptxas info]:\x1b[0m ptxas output: ptxas info    : (C7514) Potential Performance Loss: \
wgmma.mma_async instructions are serialized due to non wgmma instructions in the function 'first' in line 0
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 154 registers, used 1 barriers
"""
WRAPPED = """
          ptxas output:
          ptxas info    : (C7508) setmaxnreg
          ignored
          ptxas info    : Compiling entry function
          'second' for 'sm_90a'
          ptxas         .     304 bytes stack frame, 584 bytes
          spill stores, 712 bytes spill loads
          ptxas info    : Used 168 registers, used 16 barriers, 304 bytes cumulative stack size
"""
C7514 = "(C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma instructions"


def test_ptxas_output_is_read_in_either_layout():
    plain, wrapped = map(reporting.parse_ptxas, (PLAIN, WRAPPED))
    assert plain == {"spill_stores": 0, "spill_loads": 0, "barriers": 1, "remarks": (C7514,)}
    assert wrapped == {
        "spill_stores": 584,
        "spill_loads": 712,
        "barriers": 16,
        "remarks": ("(C7508) setmaxnreg ignored",),
    }


def test_of_several_kernels_the_worst_counts():
    both = reporting.parse_ptxas(PLAIN + WRAPPED + PLAIN)
    assert (both["spill_stores"], both["barriers"]) == (584, 16)
    assert both["remarks"] == (C7514, "(C7508) setmaxnreg ignored")


@pytest.mark.parametrize("output", ["", "ptxas info : Used 8 registers"])
def test_silence_is_not_a_clean_bill(output):
    with pytest.raises(ValueError, match="lines on spills and barriers are needed"):
        reporting.parse_ptxas(output)


CONFIG = "!llvm.ptr, !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"


def launch(size: str) -> str:
    return f"""
  llvm.func @launch(%arg0: i64) -> i32 {{
    {size}
    %5 = llvm.getelementptr %4[0, 2] : (!llvm.ptr) -> {CONFIG}
    llvm.store %1, %5 : i64, !llvm.ptr
"""


@pytest.mark.parametrize(
    ("host_code", "size"),
    [
        (launch("%1 = llvm.mlir.constant(214016 : i64) : i64"), 214_016),
        (launch("%1 = llvm.mlir.constant(0 : i64) : i64"), 0),
        (launch("%1 = llvm.mlir.constant(512 : i64) : i64") + launch("%1 = llvm.mlir.constant(64 : i64) : i64"), 512),
    ],
)
def test_dynamic_shared_memory(host_code, size):
    assert reporting.parse_dynamic_shared_memory(host_code) == size


@pytest.mark.parametrize("host_code", ["", launch("%1 = llvm.add %arg0, %arg0 : i64")])
def test_a_launch_of_unknown_size_is_an_error(host_code):
    with pytest.raises(ValueError, match="a launch with a constant size of shared memory is needed"):
        reporting.parse_dynamic_shared_memory(host_code)


def test_what_is_no_cubin_is_an_error():
    with pytest.raises(ValueError, match="a 64-bit ELF file is needed, got bytes that start with b'fatbin'"):
        reporting.parse_cubin(b"fatbinary")
