"""Build of the optional extension with native kernels; everything else is in pyproject.toml."""

import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

FOLDER = "src/coterie/train/native"
FLAGS = ["-O3", "-g0", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-w", "-Wno-psabi"]
# GCC would move sums out of registers, and in these loops they would meet memory again
TUNING = ["-fno-tree-loop-distribute-patterns", "-fno-predictive-commoning"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512"]
X86 = {"baseline": [], "avx2": AVX2, "avx512": AVX512}


def instruction_sets() -> dict[str, list[str]]:
    """Return the compiler's options for each instruction set that this machine's family may have."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return X86
    return {"neon": []} if machine in ("aarch64", "arm64") else {"baseline": []}


class BuildKernels(build_ext):
    """Compile kernels.c once for each instruction set; the processor decides at run time which one is used."""

    def build_extension(self, ext: Extension) -> None:
        if not (self.force or newer_group(ext.depends, self.get_ext_fullpath(ext.name))):
            return
        objects = []
        for name, options in instruction_sets().items():
            objects += self.compiler.compile(
                [f"{FOLDER}/kernels.c"],
                output_dir=str(Path(self.build_temp) / name),
                macros=[("ISA", name), (f"ISA_{name.upper()}", None)],
                extra_postargs=[*FLAGS, *TUNING, *options],
                depends=ext.depends,
            )
        ext.extra_objects = objects
        force, self.force = self.force, True  # objects are not among the sources, whose dates would be compared
        super().build_extension(ext)
        self.force = force

    def run(self) -> None:
        super().run()
        if any(not Path(self.get_ext_fullpath(ext.name)).exists() for ext in self.extensions):
            self.warn(
                "the native kernels were not built (is there a C compiler?); PyTorch's operations are used instead"
            )


setup(
    ext_modules=[
        Extension(
            "coterie.train.native._kernels",
            [f"{FOLDER}/module.c"],
            depends=["setup.py", *map(str, sorted(Path(FOLDER).glob("*.c")))],
            define_macros=[("Py_LIMITED_API", "0x030b0000")],
            extra_compile_args=["-fvisibility=hidden"],
            libraries=["m"],
            py_limited_api=True,
            # without a compiler the installation succeeds, unless it makes the wheels of a release
            optional=os.environ.get("COTERIE_REQUIRE_KERNELS") != "1",
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
