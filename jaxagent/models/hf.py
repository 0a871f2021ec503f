"""Hugging Face folders in and out: config.json + safetensors <-> `Params`, straight into and out of shardings.

`load` reads only the slices a device needs, one array at a time, so the host never holds a second copy of the model.
`save` writes a folder that transformers loads; import and export together give back every tensor byte for byte.
We keep heads as axes of their own and inputs first ([E, H, D]); a checkpoint merges heads and puts outputs first
([H*D, E]). `ArraySpec.hf_dims` says which of our dimensions each stored dimension merges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import shutil
import stat
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxagent.config import ConfigError, ModelConfig, check_folder
from jaxagent.models import global_arrays, hf_config
from jaxagent.models.families import family_of
from jaxagent.models.params import ArraySpec, Params, param_specs
from jaxagent.models.spec import Computing, ModelSpec

# What belongs to the tokenizer and to generation, copied as it is.
ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
INDEX = "model.safetensors.index.json"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}  # of stored weights
ROWS_AT_ONCE = 8192  # of two tensors that are compared
FILE_BYTES = 4_000_000_000  # an exported model larger than this is split into several files


def read_spec(folder: str | pathlib.Path, model: ModelConfig | Computing) -> ModelSpec:
    """The spec of a Hugging Face folder, from its config.json.

    Raises:
      ConfigError: no such folder or file, or a model this code does not compute.
    """
    check_folder(folder)
    path = pathlib.Path(folder) / "config.json"
    return hf_config.spec_from_hf(read_json(path), model, str(path))


def load(folder: str | pathlib.Path, spec: ModelSpec, where: Params | None) -> Params:
    """Reads the weights of a Hugging Face folder.

    All names and shapes are checked before the first byte of weights is read.

    Args:
      folder: holds model.safetensors, or shards of it and their index.
      spec: `read_spec(folder, ...)`; arrays come in its param_dtype, padded vocabulary rows as zeros.
      where: `params.shardings(...)`; None puts everything on the default device.

    Raises:
      ConfigError: a missing file or tensor, a tensor of another shape, one that this model does not have, one that
        holds NaN or infinity, or a head of its own in a model whose head is tied.
    """
    if where is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        where = jax.tree.map(lambda _: device, param_specs(spec))
    with contextlib.ExitStack() as stack:
        tensors = _open(pathlib.Path(folder), stack)
        _check(tensors, spec)

        def read_array(array: ArraySpec, sharding: jax.sharding.Sharding) -> jax.Array:
            blocks: dict[tuple, np.ndarray] = {}  # devices that hold the same shard read it once

            def block(index: tuple[slice, ...]) -> np.ndarray:
                spans = tuple(s.indices(size)[:2] for s, size in zip(index, array.shape, strict=True))
                if spans not in blocks:
                    blocks[spans] = _read_block(tensors, array, spans)
                return blocks[spans]

            return jax.make_array_from_callback(array.shape, sharding, block)

        return jax.tree.map(read_array, param_specs(spec), where)


def save(
    folder: str | pathlib.Path,
    params: Params,
    spec: ModelSpec,
    dtype: str,
    assets: str | pathlib.Path = "",
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a folder that transformers loads: weights, config.json, tokenizer files.

    Of several processes each has to call this, and process 0 writes: one array of the model on its host at a time.
    config.json comes last, so a folder that was cut off while being written cannot be mistaken for a whole one.

    Args:
      folder: made if missing; files of an earlier export in it are replaced.
      params: the weights, in any sharding.
      spec: their spec.
      dtype: "float32" or "bfloat16", of the stored tensors.
      assets: folder whose tokenizer files are copied, and whose config.json is kept where the spec says nothing
        (special token ids); "" = none.
      file_bytes: largest size of one weights file.
    """
    if not global_arrays.writes():
        for weights in jax.tree.leaves(params):
            global_arrays.get(weights)
        return
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / "config.json", folder / INDEX, *folder.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    _save_weights(folder, params, spec, np.dtype(jax.numpy.dtype(dtype)), file_bytes)
    config = hf_config.spec_to_hf(spec, dtype)
    settings = {"pad_token_id": None}  # some families' classes take one that a small vocabulary does not have
    if assets:
        for name in ASSETS:
            if (pathlib.Path(assets) / name).exists() and pathlib.Path(assets).resolve() != folder.resolve():
                shutil.copyfile(pathlib.Path(assets) / name, folder / name)
        if (pathlib.Path(assets) / "config.json").exists():
            path = pathlib.Path(assets) / "config.json"
            settings |= hf_config.language_model(read_json(path), str(path))
    config = {k: v for k, v in settings.items() if k not in ("rope_parameters", "dtype")} | config
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def unread(folder: str | pathlib.Path, spec: ModelSpec) -> str:
    """One line about the weights of a folder that `load` leaves out, as their family says; "": none."""
    skips = family_of(spec.family).skips
    with contextlib.ExitStack() as stack:
        names = [name for name in _open(pathlib.Path(folder), stack) if name.startswith(skips)] if skips else []
    kinds = ", ".join(f"{skip}*" for skip in skips if any(name.startswith(skip) for name in names))
    return f"{folder}: {len(names)} tensors are not read, which no log-prob of text needs: {kinds}" if names else ""


def save_file(tensors: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
    """Writes a safetensors file that has the permissions of any new file; the library's own are the owner's alone."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def _open(folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, tuple[str, Any]]:
    """Tensor name -> (file, lazy slice). Opens every weights file of the folder; reads headers only."""
    tensors: dict[str, tuple[str, Any]] = {}
    for name in _weight_files(folder):
        (folder / name).open("rb").close()  # safetensors would say that an unreadable file is none
        try:
            file = stack.enter_context(safetensors.safe_open(folder / name, framework="numpy"))
        except safetensors.SafetensorError as error:
            raise ConfigError(f"{folder / name} is not a whole safetensors file: {error}") from error
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            name_of_text = key.replace("model.language_model.", "model.", 1)  # in a model that sees
            for single, tensor in _of_experts(name_of_text, file.get_slice(key)):
                if single in tensors:
                    raise ConfigError(
                        f"{folder}: tensor '{single}' is in {tensors[single][0]} and in {name}. Delete the file of "
                        "another model."
                    )
                tensors[single] = name, tensor
    return tensors


@dataclasses.dataclass(frozen=True)
class _ExpertSlice:
    """One expert's matrix, rows `first` on, of a lazy tensor that holds those of all."""

    tensor: Any
    expert: int
    first: int
    rows: int

    def get_dtype(self) -> str:
        return self.tensor.get_dtype()

    def get_shape(self) -> list[int]:
        return [self.rows, self.tensor.get_shape()[2]]

    def __getitem__(self, where: tuple[slice, slice]) -> np.ndarray:
        start, stop, _ = where[0].indices(self.rows)
        rows = slice(self.first + start, self.first + stop)
        return self.tensor[self.expert : self.expert + 1, rows, where[1]][0]


def _of_experts(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """A stored tensor by its name; of one that holds a matrix of each expert these, named as released models do."""
    block, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
    shape = tensor.get_shape()
    if not parts or not block.endswith(".experts") or len(shape) != 3 or shape[1] % len(parts):
        yield name, tensor
        return
    experts, rows = shape[0], shape[1] // len(parts)
    for expert in range(experts):
        for i, part in enumerate(parts):
            yield f"{block}.{expert}.{part}.weight", _ExpertSlice(tensor, expert, i * rows, rows)


def _weight_files(folder: pathlib.Path) -> list[str]:
    """Names of the files with the folder's weights: those that the index names, else all."""
    single = "model.safetensors"
    if not (folder / INDEX).exists():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise ConfigError(f"{folder} has no *.safetensors file.")
        return names
    weight_map = read_json(folder / INDEX).get("weight_map")
    plain = isinstance(weight_map, dict) and all(
        isinstance(name, str) and name == pathlib.PurePath(name).name for name in weight_map.values()
    )
    if not weight_map or not plain:
        raise ConfigError(f"{folder / INDEX}: weight_map must say for each tensor in which file of the folder it is.")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if single in names or not (folder / single).exists():
        if missing:
            raise ConfigError(f"{folder / missing[0]} is missing: {INDEX} names it.")
        return names
    if len(missing) == len(names):  # transformers leaves an old index beside the one file that it writes
        return [single]
    raise ConfigError(
        f"{folder} holds {single} and, by {INDEX}, other weights files, too: two models. Delete the one, or the index."
    )


def _check(tensors: Mapping[str, tuple[str, Any]], spec: ModelSpec) -> None:
    """Raises ConfigError unless the files hold exactly the tensors of the model, in the right shapes and dtypes."""
    expected = set()
    for array in jax.tree.leaves(param_specs(spec)):
        for name in array.hf_names:
            if name not in tensors:
                where = ", ".join(sorted({file for file, _ in tensors.values()}))
                tied = " A model whose head is its embeddings has tie_word_embeddings = true in its config.json."
                raise ConfigError(f"Tensor '{name}' is missing from {where}.{tied if name == HEAD else ''}")
            file, tensor = tensors[name]
            if tensor.get_dtype() not in DTYPES:
                raise ConfigError(
                    f"{file}: tensor '{name}' is stored as {tensor.get_dtype()}; weights must be one of "
                    f"{', '.join(DTYPES.values())}."
                )
            if tuple(tensor.get_shape()) != array.hf_shape:
                raise ConfigError(
                    f"{file}: tensor '{name}' has shape {tuple(tensor.get_shape())}, config.json says {array.hf_shape}."
                )
            expected.add(name)
    # A layer behind the last that predicts a token more, for speculative decoding, has a projection of its own.
    beyond = f"model.layers.{spec.num_layers}."
    has_one = f"{beyond}eh_proj.weight" in tensors and "num_nextn_predict_layers" in family_of(spec.family).harmless
    for name, (file, _) in tensors.items():
        ignored = name.endswith("rotary_emb.inv_freq") or (name == HEAD and spec.tie_embeddings)
        ignored |= name.startswith(family_of(spec.family).skips)
        ignored |= has_one and name.startswith(beyond)
        if name not in expected and not ignored:
            raise ConfigError(f"{file}: tensor '{name}' is not part of a {spec.family} of {spec.num_layers} layers.")
    if spec.tie_embeddings and HEAD in tensors and not _equal(tensors[HEAD][1], tensors[EMBEDDINGS][1]):
        raise ConfigError(
            f"{tensors[HEAD][0]}: '{HEAD}' differs from '{EMBEDDINGS}', but config.json says tie_word_embeddings=true. "
            "Set it to false to use both, or delete the tensor."
        )


def _equal(a: Any, b: Any) -> bool:
    """Whether two stored tensors are the same, read a part at a time."""
    if a.get_shape() != b.get_shape():
        return False
    rows = a.get_shape()[0]
    parts = (slice(start, min(start + ROWS_AT_ONCE, rows)) for start in range(0, rows, ROWS_AT_ONCE))
    return all(np.array_equal(a[part], b[part]) for part in parts)


def _read_block(tensors: Mapping[str, tuple[str, Any]], array: ArraySpec, spans: tuple) -> np.ndarray:
    """One shard of one array, in its own dtype and layout. `spans` are (start, stop) per dimension."""
    dtype = np.dtype(jax.numpy.dtype(array.dtype))

    def single(name: str, spans: tuple) -> np.ndarray:
        file, lazy = tensors[name]
        tensor = lazy[stored_slices(array, spans)]
        if not _finite(tensor):
            raise ConfigError(f"{file}: tensor '{name}' holds numbers that are not finite (NaN or infinity).")
        return from_stored(tensor, array, spans).astype(dtype, copy=False)

    if not array.stacked:
        return np.ascontiguousarray(single(array.hf_name, spans))
    names = np.array(array.hf_names).reshape(array.shape[: array.stacks])
    names = names[tuple(slice(*span) for span in spans[: array.stacks])]
    block = np.empty([stop - start for start, stop in spans], dtype)
    for at, name in np.ndenumerate(names):
        block[at] = single(name, spans[array.stacks :])
    return block


# Of a float that is no number and no finite one all bits of the exponent are set. Integers are compared many times as
# fast as NumPy asks a bfloat16 whether it is finite.
_EXPONENTS = {"float32": (np.uint32, 0x7F800000), "bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00)}


def _finite(x: np.ndarray) -> bool:
    if x.dtype.name not in _EXPONENTS:
        return bool(np.isfinite(x).all())
    unsigned, exponent = _EXPONENTS[x.dtype.name]
    bits = np.ascontiguousarray(x).view(unsigned)
    return not ((bits & unsigned(exponent)) == unsigned(exponent)).any()


def _save_weights(folder: pathlib.Path, params: Params, spec: ModelSpec, dtype: np.dtype, file_bytes: int) -> None:
    """Writes one file, or numbered files and their index."""
    files: list[list[str]] = []  # names of the tensors of each file
    pending: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        save_file(pending, folder / f"model-{len(files)}.safetensors")
        files.append(list(pending))
        pending.clear()

    for name, tensor in _stored_tensors(params, spec, dtype):
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > file_bytes:
            flush()
        pending[name] = tensor
        total += tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / "model-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(files):
        final = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"model-{i}.safetensors").rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _stored_tensors(params: Params, spec: ModelSpec, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) as stored, one array of the model on the host at a time."""
    for array, weights in zip(jax.tree.leaves(param_specs(spec)), jax.tree.leaves(params), strict=True):
        host = global_arrays.get(weights)
        tensors = host.reshape(-1, *host.shape[array.stacks :])
        for name, single in zip(array.hf_names, tensors, strict=True):
            yield name, to_stored(single, array).astype(array.dtype_among(dtype), copy=False)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file; ConfigError if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        check_folder(path.parent)
        raise ConfigError(f"{path} does not exist.") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or brackets without end
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {str(content)[:40]!r}.")
    return content


Spans = tuple[tuple[int, int], ...]  # (start, stop) of each of our dimensions, those of layers and experts left out


def stored_slices(array: ArraySpec, spans: Spans) -> tuple[slice, ...]:
    """Which part of the stored tensor holds our `spans`. Padded vocabulary rows are not there: cut off."""
    sizes = array.shape[array.stacks :]
    slices = []
    for merged, length in zip(array.hf_dims, array.hf_shape, strict=True):
        inner = math.prod(sizes[d] for d in merged[1:])
        if any(spans[d] != (0, sizes[d]) for d in merged[1:]):
            raise ValueError(f"{array.hf_name}: only the first of the merged dimensions {merged} can be sliced")
        start, stop = spans[merged[0]]
        slices.append(slice(min(start * inner, length), min(stop * inner, length)))
    return tuple(slices)


def from_stored(tensor: np.ndarray, array: ArraySpec, spans: Spans) -> np.ndarray:
    """The stored part as our block of `spans`; padded vocabulary rows become zeros."""
    order = [d for merged in array.hf_dims for d in merged]
    lengths = [stop - start for start, stop in spans]
    sizes = [math.prod(lengths[d] for d in merged) for merged in array.hf_dims]
    if list(tensor.shape) != sizes:
        tensor = np.pad(tensor, [(0, want - have) for want, have in zip(sizes, tensor.shape, strict=True)])
    return tensor.reshape([lengths[d] for d in order]).transpose(np.argsort(order))


def to_stored(single: np.ndarray, array: ArraySpec) -> np.ndarray:
    """Our whole single-layer array as stored: contiguous, without padded vocabulary rows."""
    order = [d for merged in array.hf_dims for d in merged]
    merged = single.transpose(order).reshape([math.prod(single.shape[d] for d in dims) for dims in array.hf_dims])
    return np.ascontiguousarray(merged[tuple(slice(0, length) for length in array.hf_shape)])
