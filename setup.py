"""Builds the one optional extension, logcore.kernels._compiled; all else is in
pyproject.toml.

Rules:
- An install never fails because of it. No compiler, no Cython, no Python headers, an
  error in the .pyx: each ends in an install on the plain kernels and one clear line,
  which is also left in build/kernels.txt for the Makefile to show.
- No stale binary stays: where compiling fails, an older one beside the source is
  removed, for it would still be imported and might disagree with the plain kernels.
- LOGCORE_PLAIN=1 at build time leaves the extension out, so that the wheel fits every
  platform (py3-none-any).
"""

import os
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCE = Path("src/logcore/kernels/_compiled.pyx")
INCLUDED = [
    Path("src/logcore/kernels/_appending.pxi"),
    Path("src/logcore/kernels/_getting.pxi"),
    Path("src/logcore/kernels/_sending.pxi"),
]
OUTCOME = Path("build/kernels.txt")
ON_PLAIN_KERNELS = "logcore runs on its plain kernels (slower, same results)"
PLAIN = os.environ.get("LOGCORE_PLAIN") == "1"


def answers(compiler: str) -> bool:
    try:
        return (
            subprocess.run(
                [compiler, "--version"], capture_output=True, check=False
            ).returncode
            == 0
        )
    except OSError:
        return False


def report(line: str) -> None:
    print(line)
    OUTCOME.parent.mkdir(exist_ok=True)
    OUTCOME.write_text(line + "\n")


class BuildPlain(build_py):
    """Stands in for BuildKernels, which does not run where there is no extension to
    build.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            for pattern in ("_compiled.*.so", "_compiled.*.pyd"):
                for stale in SOURCE.parent.glob(pattern):
                    stale.unlink()
        report(f"LOGCORE_PLAIN=1: {ON_PLAIN_KERNELS}")


class BuildKernels(build_ext):
    def build_extension(self, ext: Extension) -> None:
        built = Path(self.get_ext_fullpath(ext.name))
        installed = SOURCE.with_name(
            built.name
        )  # an editable install is imported from here
        if self.editable_mode and is_newer(
            installed, SOURCE, *INCLUDED, Path(__file__)
        ):
            # `make demo` and then `make test` install twice; one compile is enough.
            built.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(installed), str(built))
            failure = None
        else:
            failure = self.compile(ext)
        if failure:
            built.unlink(missing_ok=True)
            if self.editable_mode:
                installed.unlink(missing_ok=True)
        report(
            f"{failure}: {ON_PLAIN_KERNELS}" if failure else "compiled kernels: built"
        )

    def compile(self, ext: Extension) -> str | None:
        """Compiles, or says in a few words why not."""
        if not answers(getattr(self.compiler, "compiler_so", ["cl"])[0]):
            return "no C compiler"
        try:
            from Cython.Build import cythonize

            # The .c file goes below build/, which git ignores, and not beside its
            # source.
            ext.sources = cythonize(
                [ext], build_dir="build/cython", language_level=3, quiet=True
            )[0].sources
            ext.extra_compile_args = (
                ["/O2"] if self.compiler.compiler_type == "msvc" else ["-O3", "-g0"]
            )
            super().build_extension(ext)
        except ImportError as error:
            return f"no Cython ({error})"
        except (
            Exception
        ) as error:  # Cython's and the compiler drivers' errors have no common root
            words = " ".join(str(error).split())
            return f"compiling failed ({words[:200]}; on Debian the headers come with `apt install python3-dev`)"
        return None


def is_newer(target: Path, *inputs: Path) -> bool:
    return target.exists() and all(
        target.stat().st_mtime_ns > path.stat().st_mtime_ns for path in inputs
    )


if PLAIN or not SOURCE.exists():
    setup(cmdclass={"build_py": BuildPlain} if PLAIN else {})
else:
    kernels = Extension("logcore.kernels._compiled", [str(SOURCE)], optional=True)
    setup(ext_modules=[kernels], cmdclass={"build_ext": BuildKernels})
