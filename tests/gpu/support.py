"""Fresh processes for these tests: they see the GPU, which is hidden from pytest's own jax."""

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        shutil.which("nvidia-smi") is None,
        reason="needs an NVIDIA GPU (nvidia-smi is not on the PATH) and `pip install 'cyxjax[gpu]'`",
    ),
]


def python(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with `arguments` in a process that may use the GPU and shares its memory with others."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "NPROC")}
    # TF32 would round matrix products to 10 bits; the reference is float32 on a CPU.
    shared = {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command: list[Any] = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env={**env, **shared, **variables}, capture_output=True, text=True, timeout=300
    )
