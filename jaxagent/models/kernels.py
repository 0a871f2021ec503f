"""Which attention kernel runs where, and why not the fast one: from platform, shapes and packages, never silently.

`attention.attend_pages` (engine, exact scoring), `attention.packed` and `context.packed` (training) ask here while they
are traced; `report` says the same in words when a run starts.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from jaxagent.models import gpu_calls, gpu_kernels, gpu_products, tpu_kernels
from jaxagent.models.params import param_specs
from jaxagent.models.sharding import CONTEXT

if TYPE_CHECKING:
    from jaxagent.models.spec import ModelSpec

_GPU = ("gpu", "cuda")
_exact = contextvars.ContextVar("_exact", default=False)
LONG_ROW = 2048  # tokens from which plain code's scores of whole rows are what memory goes into


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel, and on an accelerator the reason when it is not the accelerator's own."""

    # "xla" and, for long rows, "blocks" are plain code and run everywhere; "triton" and "tokamax" are for NVIDIA GPUs,
    # "mosaic" and "splash" for TPUs
    name: str
    because: str = ""


def platform() -> str:
    """The platform of the mesh in use (perhaps of a chip that this host does not have), else of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(device, "platform", None) or jax.default_backend()


def over_context() -> bool:
    """Whether the mesh in use splits the tokens of packed rows."""
    return jax.sharding.get_abstract_mesh().shape.get(CONTEXT, 1) > 1


def on_gpu() -> bool:
    """Whether the mesh in use is of NVIDIA GPUs."""
    return platform() in _GPU


def paged(on: str, head_dim: int, page_tokens: int) -> Choice:
    """Chooses the kernel for rows that attend to pages of the cache."""
    if on == "tpu":
        if not tpu_kernels.supports_pages(head_dim, page_tokens):
            return Choice("xla", f"head_dim {head_dim} and page_tokens {page_tokens} are not multiples of 128")
        return Choice("mosaic")
    if on not in _GPU:
        return Choice("xla")
    if not gpu_calls.AVAILABLE:
        return Choice("xla", "this version of jax has no Triton back end of Pallas")
    if not gpu_kernels.supports_pages(head_dim, page_tokens):
        return Choice("xla", f"head_dim {head_dim} and page_tokens {page_tokens} are not powers of two from 16 on")
    return Choice("triton")


def products(on: str, exact: bool) -> Choice:
    """Chooses what multiplies matrices, norms and takes log-probs in the engine and in exact scoring."""
    if on not in _GPU or not exact:
        return Choice("xla")
    if not gpu_calls.AVAILABLE:
        return Choice("xla", "this version of jax has no Triton back end of Pallas")
    return Choice("pinned")


@contextlib.contextmanager
def pinned(exact: bool = True) -> Iterator[None]:
    """While it is traced, the model multiplies and norms by what `products` chooses."""
    before = _exact.set(exact)
    try:
        with gpu_products.pinned(products(platform(), exact).name == "pinned"):
            yield
    finally:
        _exact.reset(before)


def are_exact() -> bool:
    """Whether what is traced must not depend on the mesh."""
    return _exact.get()


def packed(on: str, dtype: str, row_tokens: int, split: bool = False) -> Choice:
    """Chooses the attention kernel for packed training rows, `split` over the mesh's context axis or not."""
    plain = "blocks" if split or row_tokens >= LONG_ROW else "xla"
    if on == "tpu" and split:
        return Choice(plain, "splash takes the queries of whole rows, and mesh.context splits them")
    if on == "tpu":
        if row_tokens % tpu_kernels.LANES:
            return Choice(plain, f"rows of {row_tokens} tokens are not a multiple of 128")
        return Choice("splash")
    if on not in _GPU:
        return Choice(plain)
    if because := _without_tokamax(dtype):
        return Choice(plain, because)
    return Choice("tokamax")


def experts(on: str, dtype: str, exact: bool) -> Choice:
    """Chooses what multiplies rows with their experts' matrices: a loop over "tiles", or "tokamax" all in one."""
    if on not in _GPU or exact:
        return Choice("tiles")
    if because := _without_tokamax(dtype):
        return Choice("tiles", because)
    return Choice("tokamax")


def _without_tokamax(dtype: str) -> str:
    """Why none of tokamax's kernels runs on a GPU; "" where they do."""
    if dtype != "bfloat16":
        return f"the GPU's kernel takes bfloat16, not {dtype}"
    if not _has_tokamax():
        return "tokamax is not installed (pip install 'jaxagent[cuda]')"
    if because := _refused_tokamax():
        return because
    return "" if jax.default_backend() in _GPU else "tokamax compiles on the GPU itself only, not for a plan"


def prefixes(on: str, spec: ModelSpec, page_tokens: int, row_tokens: int, exact: bool) -> Choice:
    """Whether packed rows may be trees ("shared") or hold every sequence whole: only plain code knows their mask."""
    if over_context():
        return Choice("whole", "mesh.context splits rows, and plain code for shared beginnings takes them whole")
    if spec.has_memory:
        return Choice("whole", "a recurrent layer goes from each token of a row to the next")
    rows = packed(on, str(spec.compute_dtype), row_tokens).name
    if rows not in ("xla", "blocks"):
        return Choice("whole", f"{rows} has no mask for shared beginnings")
    pages = paged(on, spec.head_dim, page_tokens).name
    if exact and pages != "xla":
        return Choice("whole", f"exact scoring by {pages} takes sequences that lie in one piece")
    return Choice("shared")


def report(spec: ModelSpec, page_tokens: int, row_tokens: int, share_prefix: bool = False, exact: bool = False) -> str:
    """One line for the log: "attention: pages triton, packed rows tokamax", and prefixes where a config shares them."""
    on = platform()
    chosen = {
        "pages": paged(on, spec.head_dim, page_tokens),
        "packed rows": packed(on, str(spec.compute_dtype), row_tokens, over_context()),
    }
    if exact and on in _GPU:
        chosen["products"] = products(on, exact)
    if on in _GPU and any(array.stacks == 2 for array in jax.tree.leaves(param_specs(spec))):
        chosen["experts"] = experts(on, str(spec.compute_dtype), False)
    if spec.has_memory and on in _GPU:
        chosen["memories"] = Choice("xla", "token by token in the engine; whether bits agree was not tried")
    if share_prefix:
        chosen["prefixes"] = prefixes(on, spec, page_tokens, row_tokens, exact)
    if exact and over_context():
        chosen["exact scoring"] = Choice("whole rows", "on every device of mesh.context")
    words = [f"{what} {c.name}" + (f" ({c.because})" if c.because else "") for what, c in chosen.items()]
    return "attention: " + ", ".join(words)


@functools.cache
def _has_tokamax() -> bool:
    return importlib.util.find_spec("tokamax") is not None


@functools.cache
def _refused_tokamax() -> str:
    """Why the installed tokamax is not used; "" where it is."""
    try:
        version = importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:  # a copy that nobody installed
        return ""
    if tuple(map(int, re.findall(r"\d+", version)[:3])) >= (0, 0, 13):
        return ""
    return f"tokamax {version} masks wrongly backward; 0.0.13 is needed, which wants Python 3.12"
