"""Builds the optional extension logcore.kernels._compiled, and the text of the package's
page on PyPI. All other settings are in pyproject.toml.

Rules:
- An install never fails because the extension cannot be built. Without a compiler,
  Cython or the Python headers, or after an error in the .pyx, the library uses its plain
  kernels. One line states the reason. The Makefile prints it from build/kernels.txt.
- If compiling fails, an older binary beside the source is deleted. Python would import
  it, and its results could differ from the plain kernels.
- LOGCORE_PLAIN=1 at build time omits the extension, so that the wheel fits every
  platform (py3-none-any).
- Links on the page of the package must be absolute. LOGCORE_REPOSITORY at build time is
  the address of the repository, such as https://github.com/OWNER/NAME. Without it, the
  page contains no links.
"""

import os
import re
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCE = Path("src/logcore/kernels/_compiled.pyx")
INCLUDED = [
    Path("src/logcore/kernels/_appending.pxi"),
    Path("src/logcore/kernels/_getting.pxi"),
    Path("src/logcore/kernels/_iterating.pxi"),
    Path("src/logcore/kernels/_requests.pxi"),
    Path("src/logcore/kernels/_sending.pxi"),
]
OUTCOME = Path("build/kernels.txt")
ON_PLAIN_KERNELS = "logcore runs on its plain kernels (slower, same results)"
PLAIN = os.environ.get("LOGCORE_PLAIN") == "1"
REPOSITORY = os.environ.get("LOGCORE_REPOSITORY", "").rstrip("/")
#: Name of a link on the package's page, and its path in the repository.
PROJECT_URLS = {
    "Documentation": "blob/{tag}/docs/guide.md",
    "Repository": "",
    "Issues": "issues",
    "Changelog": "blob/{tag}/CHANGELOG.md",
    "Benchmarks": "blob/{tag}/docs/benchmarks.md",
}


def is_installed(compiler: str) -> bool:
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
    """Reports the plain kernels and deletes stale binaries. Without an extension,
    setuptools does not run BuildKernels.
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
        """Compile the extension. Returns the reason if this fails, otherwise None."""
        if not is_installed(getattr(self.compiler, "compiler_so", ["cl"])[0]):
            return "no C compiler"
        try:
            from Cython.Build import cythonize

            # The .c file is written to build/, which git ignores.
            ext.sources = cythonize(
                [ext], build_dir="build/cython", language_level=3, quiet=True
            )[0].sources
            ext.extra_compile_args = (
                ["/O2"] if self.compiler.compiler_type == "msvc" else ["-O3", "-g0"]
            )
            super().build_extension(ext)
        except ImportError as error:
            return f"no Cython ({error})"
        # The errors of Cython and of the compilers have no common base class.
        except Exception as error:
            words = " ".join(str(error).split())
            return f"compiling failed ({words[:200]}; on Debian the headers come with `apt install python3-dev`)"
        return None


def tag() -> str:
    source = Path("src/logcore/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"', source, re.MULTILINE)
    return f"v{version}"


def package_page(readme: str, repository: str) -> str:
    """The README with absolute links, or without links if there is no repository."""

    def linked(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if not repository:
            return "" if mark else words
        kind = "raw" if mark else "blob"
        return f"{mark}[{words}]({repository}/{kind}/{tag()}/{target})"

    parts = re.split(r"(^```.*?^```$)", readme, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [
        re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", linked, text) for text in parts[::2]
    ]
    return "".join(parts)


def project_urls(repository: str) -> dict[str, str]:
    if not repository:
        return {}
    return {
        name: f"{repository}/{path.format(tag=tag())}".rstrip("/")
        for name, path in PROJECT_URLS.items()
    }


def is_newer(target: Path, *inputs: Path) -> bool:
    return target.exists() and all(
        target.stat().st_mtime_ns > path.stat().st_mtime_ns for path in inputs
    )


PAGE = {
    "long_description": package_page(
        Path("README.md").read_text(encoding="utf-8"), REPOSITORY
    ),
    "long_description_content_type": "text/markdown",
    "project_urls": project_urls(REPOSITORY),
}

if PLAIN or not SOURCE.exists():
    setup(cmdclass={"build_py": BuildPlain} if PLAIN else {}, **PAGE)
else:
    kernels = Extension("logcore.kernels._compiled", [str(SOURCE)], optional=True)
    setup(ext_modules=[kernels], cmdclass={"build_ext": BuildKernels}, **PAGE)
