"""Triton kernels without a GPU: in the interpreter, and through the compiler."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def interpreted(*arguments):
    """Return the output of Python, as words, for these arguments with interpreted kernels.

    In a process of its own: Triton decides when it is imported whether it interprets.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def compiles_for_a_gpu(kernel, folder, monkeypatch, *, constants, types, other="i32", **options):
    """Whether a kernel compiles for a GPU, which need not be there; the compiler wants types, the interpreter does not.

    `types` are those of its arguments by name, `other` is that of the rest.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder))  # what was compiled before is no test
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature = dict.fromkeys(kernel.arg_names, other) | types | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values)
    return "ptx" in triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options or None).asm
