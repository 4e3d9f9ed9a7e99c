# SPDX-License-Identifier: Apache-2.0
"""Builds the extension ``unirl._C`` with CMake and ninja; everything else is in pyproject.toml.

Neither torch nor a GPU is needed. Environment:
    UNIRL_BUILD_CUDA  auto (default: when nvcc is found), 0 or 1
    UNIRL_CUDA_ARCHS  default "90a;90+PTX"
    MAX_JOBS          parallel compiler processes, default: the number of CPUs
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).resolve().parent / "csrc"
RECIPES = Path(__file__).resolve().parent / "examples" / "diffusion"


def find_nvcc() -> str | None:
    """Return the path of nvcc: CUDACXX, then CUDA_HOME, PATH and /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [
        os.environ.get("CUDACXX"),
        f"{home}/bin/nvcc" if home else None,
        "nvcc",
        "/usr/local/cuda/bin/nvcc",
    ]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def cuda_options() -> list[str]:
    """Return the CMake options that UNIRL_BUILD_CUDA and UNIRL_CUDA_ARCHS ask for."""
    wanted = os.environ.get("UNIRL_BUILD_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"UNIRL_BUILD_CUDA is {wanted!r}; allowed: auto, 0, 1")
    nvcc = None if wanted == "0" else find_nvcc()
    if nvcc is None:
        if wanted == "1":
            raise SystemExit(
                "UNIRL_BUILD_CUDA=1, but nvcc is not found: set CUDACXX or CUDA_HOME, or use 0 or auto"
            )
        return ["-DUNIRL_WITH_CUDA=OFF"]
    archs = os.environ.get("UNIRL_CUDA_ARCHS", "90a;90+PTX")
    return ["-DUNIRL_WITH_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DUNIRL_CUDA_ARCHS={archs}"]


class BuildWithRecipes(build_py):
    """Takes the recipes along, as ``unirl/recipes``: an installed package has no ``examples`` folder beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "unirl" / "recipes" / "diffusion"
            shutil.copytree(
                RECIPES,
                target,
                dirs_exist_ok=True,
                ignore=lambda _, names: [n for n in names if n.endswith(".py")],
            )


class CMakeBuild(build_ext):
    """Hands the one extension to CMake."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        work = Path(self.build_temp).resolve() / "cmake"
        work.mkdir(parents=True, exist_ok=True)
        output = work / "out"
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        subprocess.run(
            [
                "cmake",
                "-S",
                str(SOURCE),
                "-B",
                str(work),
                *generator,
                "-DCMAKE_BUILD_TYPE=Release",
                f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                *cuda_options(),
            ],
            check=True,
        )
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", str(work), "--target", "_C", "--parallel", jobs], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        # A running process may have the old file mapped: put the new one beside it and rename.
        fresh = target.with_suffix(".tmp")
        shutil.copy2(next(output.glob("_C.*")), fresh)
        os.replace(fresh, target)


setup(
    ext_modules=[Extension("unirl._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildWithRecipes},
)
