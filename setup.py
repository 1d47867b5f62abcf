"""Builds the native libraries; everything else about the package is in setup.cfg.

They have a C interface and are loaded with ctypes. So they need no Python header, and one wheel
serves every Python 3 on a platform.

The CUDA library is built where there is an nvcc, for every architecture that it knows. In a checkout
that would make each setup take minutes, so there it also takes a GPU to run it on. HVDC_CUDA=on
demands it, HVDC_CUDA=off leaves it out.

The long description is the README, which a package index shows without the other files. HVDC_ADDRESS is
the project's address, such as https://github.com/OWNER/NAME: links and pictures then lead there.
Without an address, only their texts are left.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARY = "libhvdc_cpu.so"
CUDA_LIBRARY = "libhvdc_cuda.so"


README = (ROOT / "README.md").read_text()
VERSION = re.search(r'__version__ = "(.*)"', (ROOT / "hvd_compress" / "__init__.py").read_text())[1]
ADDRESS = os.environ.get("HVDC_ADDRESS", "").rstrip("/")


def outside(link):
    """A link or picture of the README as it stands outside of the repository."""
    picture, text, target = link.groups()
    if re.match("https?:", target):
        return link[0]
    if not ADDRESS:
        return text
    kind = "raw" if picture else "blob"
    target = target if not target.startswith("#") else f"README.md{target}"
    return f"{picture}[{text}]({ADDRESS}/{kind}/v{VERSION}/{target})"


def cuda_option(in_checkout):
    """The value of HVDC_CUDA for cmake: ON, OFF or AUTO."""
    wanted = os.environ.get("HVDC_CUDA", "auto").upper()
    if wanted not in ("ON", "OFF", "AUTO"):
        raise SystemExit(f"HVDC_CUDA: expected on, off or auto, got {os.environ['HVDC_CUDA']}")
    if wanted == "AUTO" and in_checkout and not Path("/proc/driver/nvidia/version").exists():
        return "OFF"
    return wanted


class CMakeBuild(build_ext):
    """Lets cmake build the library, and tells setuptools where it lies."""

    def run(self):
        # The base class clears `inplace` while it builds, so it is noted here.
        self.in_checkout = bool(self.inplace)
        if self.in_checkout:
            (ROOT / "hvd_compress" / "lib").mkdir(exist_ok=True)
        super().run()
        if self.in_checkout:
            self.place_cuda_library()

    def place_cuda_library(self):
        """Copies it into the checkout, since setuptools knows of one library only; no old one stays."""
        built = Path(self.build_lib) / "hvd_compress" / "lib" / CUDA_LIBRARY
        placed = ROOT / "hvd_compress" / "lib" / CUDA_LIBRARY
        if cuda_option(in_checkout=True) == "OFF":
            built.unlink(missing_ok=True)
            placed.unlink(missing_ok=True)
        elif built.exists():
            self.copy_file(str(built), str(placed))

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split(".")[:-1], LIBRARY))

    def build_extension(self, ext):
        # An editable install keeps its build tree, so that the next one compiles only what changed;
        # setuptools' own build_temp would be a new temporary folder each time.
        build_dir = ROOT / "build" / "native" if self.in_checkout else Path(self.build_temp)
        package_dir = Path(self.get_ext_fullpath(ext.name)).resolve().parent.parent
        cuda = f"-DHVDC_CUDA={cuda_option(self.in_checkout)}"
        extra = [cuda, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
        # What a surrounding make hands down is not meant for the make that cmake starts.
        environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
        for arguments in (
            ["-S", str(ROOT), "-B", str(build_dir), "-DCMAKE_BUILD_TYPE=Release", *extra],
            ["--build", str(build_dir), "--parallel", str(len(os.sched_getaffinity(0)))],
            ["--install", str(build_dir), "--prefix", str(package_dir)],
        ):
            subprocess.run(["cmake", *arguments], check=True, env=environment)


class PlatformWheel(bdist_wheel):
    """A wheel for one platform, but for every Python 3 and its every ABI."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    long_description=re.sub(r"(!?)\[([^][]*)\]\((\S+?)\)", outside, README),
    long_description_content_type="text/markdown",
    project_urls={
        name: f"{ADDRESS}/blob/v{VERSION}/{file}"
        for name, file in (
            ("Source", "README.md"),
            ("Documentation", "docs/start.md"),
            ("Changelog", "CHANGELOG.md"),
        )
        if ADDRESS
    },
    ext_modules=[Extension("hvd_compress.lib.hvdc_cpu", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
    # pip reads this as a requirement of the build; a cmake that is there already is preferred.
    setup_requires=[] if shutil.which("cmake") else ["cmake>=3.18"],
)
