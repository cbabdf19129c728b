"""TileLang's generated code on the CPU: a kernel's CUDA C++, compiled with emulated_tilelang.h for threads that are fibers, behind the
very function of positional arguments that the package launches. What TileLang's host code makes of the arguments (sizes, tensor maps,
the launch) is read off its host module.
"""

import ctypes
import hashlib
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).parent
MAP = "__tvm_tensormap_create_tiled"
SCALARS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


class Map(ctypes.Structure):
    """CUtensorMap of emulated_tilelang.h."""

    _fields_ = [("at", ctypes.c_void_p), ("dims", ctypes.c_int64 * 5), ("strides", ctypes.c_int64 * 5)]
    _fields_ += [("box", ctypes.c_int * 5)] + [(x, ctypes.c_int) for x in ("size", "swizzle", "rank")]


def tensor_map(_, rank, at, *rest):
    dims, strides, box = rest[:rank], rest[rank : 2 * rank], rest[2 * rank : 3 * rank]
    swizzle = rest[4 * rank + 1]
    assert swizzle in (0, 3), "no swizzle, or that of 128 bytes"
    array = lambda kind, x: (kind * 5)(*map(int, x), *[1] * (5 - rank))  # noqa: E731
    sizes = array(ctypes.c_int64, dims), array(ctypes.c_int64, strides), array(ctypes.c_int, box)
    return Map(at, *sizes, int(strides[0]), swizzle == 3, rank)


# What host modules say, for Python's eval.
T = SimpleNamespace(
    Cast=lambda kind, x: x,
    int32=int,
    int64=int,
    float32=float,
    bool=bool,
    if_then_else=lambda x, a, b: a if x else b,
    Div=lambda a, b: int(a / b),
    truncdiv=lambda a, b: int(a / b),
    Select=lambda x, a, b: a if x else b,
    min=min,
    max=max,
)


def split(text):
    """The arguments of a call."""
    depth, out = 0, [""]
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            out.append("")
        else:
            out[-1] += c
    return [x.strip() for x in out]


class Kernel:
    """A builder's kernel for given arguments, as the function that ``target.launcher`` returns."""

    def __init__(self, build, args, folder):
        import tilelang
        from tilelang import tvm

        from flash_qla_tl.kernels.common import gates
        from flash_qla_tl.kernels.common.target import TARGET

        function = build.get_tir(*args)
        with tvm.target.Target(TARGET), tvm.transform.PassContext(opt_level=3, config=build.pass_configs):
            lowered = tilelang.lower(function, target=tvm.target.Target(TARGET), enable_device_compile=False)
        self._read_host(str(lowered.host_mod))
        source = lowered.kernel_source.replace((Path(gates.__file__).parent / "ptx.cuh").read_text(), "")
        source = (
            re.sub(r"^#include .*$", "", source, flags=re.M)
            .replace("#pragma once", "")
            .replace("#pragma unroll", "// unroll")
        )
        declared = re.search(
            r'extern "C" __global__ void(?: __launch_bounds__\([^)]*\))? (\w+)\((.*?)\);', source, re.S
        )
        entry, parameters = declared[1], split(declared[2])
        source = source.replace(declared[0], "")
        source = re.sub(r"extern __shared__ __align__\(1024\) (\w+) (\w+)\[\];", r"\1* \2 = (\1*)shared;", source)
        # Static shared memory lies behind the dynamic.
        at = self.shared

        def place(m):
            nonlocal at
            begin = at = -(-at // 128) * 128
            at += int(m[3]) * {"uint64_t": 8, "float": 4, "uint": 4, "int": 4, "uchar": 1}[m[1]]
            return f"{m[1]}* {m[2]} = ({m[1]}*)(shared + {begin});"

        source = re.sub(r"__shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[(\d+)\];", place, source)
        assert "__shared__" not in source
        names = [x.split()[-1].lstrip("*") for x in parameters]
        kinds = [
            Map if "CUtensorMap" in x else ctypes.c_void_p if "*" in x else SCALARS[x.split()[-2]] for x in parameters
        ]
        fields = [
            x.replace("const ", "").replace("__grid_constant__ ", "").replace("__restrict__ ", "") for x in parameters
        ]
        if "QLA_BF16" not in source:
            source = "#define QLA_BF16 1\n" + source
        bf16 = re.search(r"#define QLA_BF16 (\d)", source)[0]
        code = "\n".join(
            [
                f"#define EMULATED_THREADS {self.threads}",
                bf16,
                (HERE / "emulated_ptx.h").read_text().replace("#pragma once", ""),
                (HERE / "emulated_tilelang.h").read_text().replace("#pragma once", ""),
                source.replace(bf16, "", 1).replace('extern "C" __global__', "static"),
                "struct Arguments {",
                *(f"  {x};" for x in fields),
                "  int grid;\n};\nstatic Arguments given;",
                f"static void cta() {{ {entry}({', '.join('given.' + x for x in names)}); }}",
                'extern "C" __attribute__((visibility("default"))) void run(const Arguments* x) {\n  given = *x;\n  for (int i = 0; i < given.grid; i++) {',
                "    blockIdx.x = i, spins = 0, memset(shared, 0xff, sizeof shared);\n    run_threads(cta);\n  }\n}",
            ]
        )
        file = folder / f"{entry}_{hashlib.sha256(code.encode()).hexdigest()[:12]}"
        if not file.with_suffix(".so").exists():
            file.with_suffix(".cpp").write_text(code)
            options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-w"]
            subprocess.run(
                ["g++", *options, "-o", str(file.with_suffix(".so")), str(file.with_suffix(".cpp"))], check=True
            )
        self.run = ctypes.CDLL(str(file.with_suffix(".so"))).run
        self.arguments = type(
            "Arguments", (ctypes.Structure,), {"_fields_": [*zip(names, kinds, strict=True), ("grid", ctypes.c_int)]}
        )

    def _read_host(self, text):
        read = re.findall(r"^ +(\w+): T\.\w+ = .*?T\.tvm_struct_get\(args, (\d+), 15, ", text, re.M)
        self.scalars = {int(i): name for name, i in read}
        self.buffers = [
            (m[2], split(m[1]), split(m[3]))
            for m in re.finditer(r"^ +\w+ = T\.decl_buffer\(\((.*?)\),.*?data=(\w+), strides=\((.*?)\)\)$", text, re.M)
        ]
        self.maps = re.findall(rf'T\.call_packed\("{MAP}", (\w+), (.*)\)$', text, re.M)
        (launch,) = re.findall(r'T\.call_packed\("\w+_kernel_kernel", (.*)\)$', text, re.M)
        # Arguments of the kernel, grid, threads (three numbers) and shared memory.
        *self.passed, self.grid, threads, _, _, shared = split(launch)
        self.threads, self.shared = int(threads), int(shared)

    def __call__(self, *args):
        names = {"T": T} | {name: args[i] for i, name in self.scalars.items()}
        tensors = [x for x in args if torch.is_tensor(x)]
        for (name, shape, strides), x in zip(self.buffers, tensors, strict=True):
            names[name] = x.data_ptr()
            for expressions, numbers in ((shape, x.shape), (strides, x.stride())):
                names |= {e: n for e, n in zip(expressions, numbers, strict=True) if e.isidentifier()}
        for name, arguments in self.maps:
            names[name] = tensor_map(*(eval(x, names) for x in split(arguments)))
        values = [eval(x, names) for x in self.passed]
        given = self.arguments(*values, eval(self.grid, names))
        self.run(ctypes.byref(given))
