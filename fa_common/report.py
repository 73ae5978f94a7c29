"""What the compiler made of a kernel: registers, shared memory, spills, barriers, instructions. Needs no GPU.

Three witnesses, each asked for what it alone knows for sure:
- the cubin: registers, stack and static shared memory, where the driver reads them; instructions, through nvdisasm;
- ptxas' remarks: spilled bytes, barriers, and the `(C75..)` lines on WGMMA and setmaxnreg;
- the host code: dynamic shared memory, which only the launch knows.
"""

import functools
import importlib.metadata
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa_common.compile import Build, KernelKey, cache_entry, options
from fa_common.disk_cache import warn_memory_only
from fa_common.isolated import run_isolated

SHARED_MEMORY_LIMIT = 232_448  # bytes a CTA can have on sm_90: the SM's 228 KiB less 1 KiB that the system keeps
RESERVED_SHARED_MEMORY = 1024  # that 1 KiB; a cubin's section of static shared memory counts it

_SPILLS = re.compile(r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_BARRIERS = re.compile(r"Used \d+ registers, used (\d+) barriers")
_REMARK = re.compile(r"\(C75\d\d\).*?(?= in (?:the )?function | ptxas info|$)")
# address, predicate, class; the class's suffixes (.64x128x16.F32.BF16) are not wanted
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
# cudaLaunchConfig_t, as the host code fills it in: grid, block, bytes of dynamic shared memory, stream, attributes
_LAUNCH_CONFIG = re.escape("!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")
_LAUNCH_SHARED_MEMORY = re.compile(r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] .*" + _LAUNCH_CONFIG)

_SHT_NOBITS = 8
_EIFMT_SVAL, _EIATTR_FRAME_SIZE, _EIATTR_REGCOUNT = 0x04, 0x11, 0x2F


@dataclass(frozen=True)
class KernelReport:
    """One compiled kernel."""

    registers: int  # a thread's at launch; setmaxnreg moves them between warpgroups later
    shared_memory: int  # a CTA's bytes, static and dynamic
    stack: int  # a thread's bytes of local memory: spills, and arrays indexed at run time
    spill_stores: int  # bytes
    spill_loads: int  # bytes
    barriers: int  # named barriers, of a CTA's 16
    remarks: tuple[str, ...] = ()  # "(C7514) ...": a WGMMA was serialised or waited for, a setmaxnreg dropped
    instructions: Counter[str] = field(default_factory=Counter)  # by class: HGMMA, UTMALDG, MUFU, ...
    why_no_instructions: str | None = None

    def problems(self) -> list[str]:
        """What a fast kernel must not have, one clause each; empty if it has none of it."""
        found = []
        if self.spill_stores or self.spill_loads:
            found.append(f"spills {self.spill_stores} bytes and reads {self.spill_loads} back")
        if self.stack:
            found.append(f"keeps {self.stack} bytes a thread in local memory")
        if local := self.instructions["LDL"] + self.instructions["STL"]:
            found.append(f"has {local} local memory instructions (LDL, STL)")
        if self.shared_memory > SHARED_MEMORY_LIMIT:
            found.append(f"needs {self.shared_memory} bytes of shared memory, sm_90 has {SHARED_MEMORY_LIMIT}")
        return found + list(self.remarks)


@functools.cache
def report(key: KernelKey, build: Build) -> KernelReport:
    """Compiles the kernel verbosely, in an interpreter of its own, and keeps the report beside the kernel on disk.

    Raises IsolatedFailure if it does not compile, ValueError if the compiler's output is not what this module can read.
    """
    entry = cache_entry(key)
    record = entry and entry.read(".report.json")
    if record:
        return _from_json(record["report"])
    compiled = run_isolated(_compile_verbosely, key, build)
    cubin, host_code = compiled.value
    registers, stack, static_shared_memory = parse_cubin(cubin)
    instructions, why_no_instructions = count_instructions(cubin)
    made = KernelReport(
        registers=registers,
        shared_memory=static_shared_memory + parse_dynamic_shared_memory(host_code),
        stack=stack,
        **parse_ptxas(compiled.output),
        instructions=instructions,
        why_no_instructions=why_no_instructions,
    )
    if entry and instructions:  # without them, ask again once there is an nvdisasm
        try:
            entry.write(".report.json", {"report": vars(made)})
        except OSError as error:
            warn_memory_only(error)
    return made


def _compile_verbosely(key: KernelKey, build: Build) -> tuple[bytes, str]:
    compiled = build(key, f"{options(key)} --keep-cubin remarks{{ptx}}")
    return compiled.artifacts.CUBIN, str(compiled.ir_module)


def _from_json(record: dict[str, Any]) -> KernelReport:
    lists = {"remarks": tuple(record["remarks"]), "instructions": Counter(record["instructions"])}
    return KernelReport(**record | lists)


def parse_ptxas(output: str) -> dict[str, Any]:
    """Spills, barriers and remarks, as fields of a KernelReport, from what ptxas printed.

    Of several kernels, the spills are added up and the most barriers count. Raises ValueError if nothing was printed on
    them: a kernel is never taken for good because nobody said that it is bad.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", output)  # colours
    text = " ".join(text.split())  # lines, which are broken at some width
    spills = [(int(stores), int(loads)) for stores, loads in _SPILLS.findall(text)]
    barriers = [int(count) for count in _BARRIERS.findall(text)]
    if not spills or not barriers:
        raise ValueError(f"ptxas' lines on spills and barriers are needed; the compiler printed {text[-2000:]!r}")
    return {
        "spill_stores": sum(stores for stores, _ in spills),
        "spill_loads": sum(loads for _, loads in spills),
        "barriers": max(barriers),
        "remarks": tuple(dict.fromkeys(_REMARK.findall(text))),
    }


def parse_dynamic_shared_memory(host_code: str) -> int:
    """The bytes that the launch asks for, from the host's LLVM code; of several launches the most.

    Raises ValueError if there is no launch, or one whose size is not a constant.
    """
    sizes = []
    for function in host_code.split("llvm.func "):  # SSA names count within one function
        for target in _LAUNCH_SHARED_MEMORY.findall(function):
            stored = re.search(rf"llvm\.store (%\w+), {target} : i64", function)
            constant = stored and re.search(rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", function)
            sizes.append(constant and int(constant[1]))
    if not sizes or None in sizes:
        raise ValueError(f"a launch with a constant size of shared memory is needed, the host code has {sizes}")
    return max(sizes)


def parse_cubin(cubin: bytes) -> tuple[int, int, int]:
    """(registers, stack bytes, static shared memory bytes), of several kernels the most of each.

    Raises ValueError for bytes that are no cubin with a kernel in it.
    """
    registers, stacks, shared = [], [], [0]
    for name, kind, content, size in _sections(cubin):
        if name == ".nv.info":
            for attribute, value in _attributes(content):
                if attribute == _EIATTR_REGCOUNT:
                    registers.append(value)
                elif attribute == _EIATTR_FRAME_SIZE:
                    stacks.append(value)
        elif name.startswith(".nv.shared.") and kind == _SHT_NOBITS and "reserved" not in name:
            shared.append(max(0, size - RESERVED_SHARED_MEMORY))
    if not registers or not stacks:
        raise ValueError("a cubin with a kernel is needed: this one has no .nv.info on registers and stack")
    return max(registers), max(stacks), max(shared)


def _sections(elf: bytes) -> Iterator[tuple[str, int, bytes, int]]:
    """(name, type, content, size) of each section of a 64-bit little-endian ELF file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"a 64-bit ELF file is needed, got bytes that start with {elf[:6]!r}")
    [table] = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<3H", elf, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    headers = [struct.unpack_from("<2I4Q2I2Q", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size, *_ in headers:
        end = elf.index(b"\0", names + name)
        content = b"" if kind == _SHT_NOBITS else elf[offset : offset + size]
        yield elf[names + name : end].decode(), kind, content, size


def _attributes(nv_info: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of each (symbol, value) record in `.nv.info`; records of other forms are passed over."""
    position = 0
    while position < len(nv_info):
        form, attribute, size = struct.unpack_from("<2BH", nv_info, position)
        position += 4
        if form != _EIFMT_SVAL:  # the value stands in the place of the size
            continue
        if size == 8:
            _, value = struct.unpack_from("<2I", nv_info, position)
            yield attribute, value
        position += size


def count_instructions(cubin: bytes) -> tuple[Counter[str], str | None]:
    """Instructions by class ("HGMMA", whatever its suffixes), or none and the reason, as one clause."""
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        return Counter(), "there is no nvdisasm: `pip install nvidia-cuda-nvdisasm`"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=False)
    if listing.returncode:
        return Counter(), f"{nvdisasm} cannot read this cubin: {listing.stderr.strip()}"
    return Counter(_INSTRUCTION.findall(listing.stdout)), None


def find_nvdisasm() -> str | None:
    """The disassembler of the wheel `nvidia-cuda-nvdisasm`, else the one on PATH, else None."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    wheel = next((Path(file.locate()) for file in files if file.name == "nvdisasm"), None)
    return str(wheel) if wheel and wheel.exists() else shutil.which("nvdisasm")
