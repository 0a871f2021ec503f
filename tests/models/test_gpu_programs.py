"""The engine's and the trainer's programs, compiled for an H100 on a machine without one: what runs there.

Needs jax's CUDA plug-in (`pip install -e '.[cuda-plan]'`, or `.[cuda]`), and no GPU. XLA's compiled text names every
kernel that is launched; a kernel of Pallas carries its Triton program with it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import re
import types

import jax
import jax.numpy as jnp
import pytest

from jaxagent.config import LoraConfig, MeshConfig, parse
from jaxagent.configs import search_r1
from jaxagent.engine import executor, functions
from jaxagent.engine.executor import Sizes
from jaxagent.engine.lm import LanguageModel
from jaxagent.models import exact, lora, params, sharding, transformer
from jaxagent.models.blocks.experts import Experts
from jaxagent.models.blocks.routing import Routing
from jaxagent.plan import topology
from tests.models import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not topology.cuda_compiler_installed(), reason="jax's CUDA plug-in is not installed"),
]
PAGES, LAYERS, STEPS = 257, 2, 16
ROWS = jax.P(sharding.ROWS)
MOVES = (
    "bitcast", "broadcast", "concatenate", "copy", "dynamic-update-slice", "reshape", "select", "slice", "transpose",
)  # fmt: skip
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")  # launch nothing


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One program: its text, the instructions of each of its computations, and which computations loops run."""

    text: str
    computations: dict[str, list[str]]
    bodies: set[str]

    @classmethod
    def of(cls, text: str) -> Compiled:
        computations: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in text.splitlines():
            if started := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$", line):
                lines = computations.setdefault(started[1], [])
            elif " = " in line:
                lines.append(line.strip())
        return cls(text, computations, set(re.findall(r"body=%?([\w.-]+)", text)))

    def launched(self, scope: str = "") -> list[str]:
        """The instructions in loops that launch a kernel, of those that stand in `scope`."""
        lines = [line for name in self.bodies for line in self.computations[name]]
        return [line for line in lines if _operation(line) not in (*FREE, "while") and scope in line]

    def kernels(self) -> list[tuple[str, str]]:
        """Name and Triton program (or, without its addresses, the arithmetic) of every kernel of Pallas."""
        lines = [line for line in self.launched("pallas_call") if _operation(line) == "custom-call"]
        return [(re.search(r"/(\w+)/pallas_call", line)[1], _triton(line)) for line in lines]

    def fusions(self) -> set[str]:
        """What XLA fused in loops, where it computes with real numbers: each result as a formula over its inputs."""
        called = [re.search(r"calls=%?([\w.-]+)", line) for line in self.launched()]
        formulas = [formula for name in called if name for formula in _formulas(self.computations[name[1]])]
        return {formula for formula in formulas if "(" in formula}


def _formulas(lines: list[str]) -> list[str]:
    """The results in terms of inputs, where moving numbers about and computing with integers is no step."""
    formulas: dict[str, str] = {}
    for line in lines:
        name, kind, operation, operands = re.match(
            r"(?:ROOT )?(%\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:,|$)", line
        ).groups()
        of_operands = [formulas[operand] for operand in re.findall(r"%[\w.-]+", operands) if formulas[operand]]
        if operation == "tuple":  # the last one
            return of_operands
        real = re.match(r"b?f16|f32", kind)
        if not real:
            formulas[name] = ""
        elif operation in ("parameter", "gather", "dynamic-slice"):
            formulas[name] = real[0]
        elif operation == "constant":
            formulas[name] = operands
        elif operation in MOVES:
            formulas[name] = ", ".join(of_operands)
        else:
            formulas[name] = f"{real[0]} {operation}({', '.join(of_operands or ['integers'])})"
    return [formulas[name]]


def _operation(line: str) -> str:
    return re.search(r" = (?:\(.*?\)|\S+) ([\w-]+)\(", line)[1]


@functools.cache
def _triton(line: str) -> str:
    """The Triton program in the text of a custom call, with its grid and how it is to be compiled."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    before, escaped, after = re.search(r'backend_config=\{(.*?)ir = "((?:[^"\\]|\\.)*)"(.*)\}', line).groups()
    special = {"\\": b"\\", '"': b'"', "'": b"'", "n": b"\n"}

    def byte(escape: re.Match) -> str:
        return (special.get(escape[1]) or bytes.fromhex(escape[1])).decode("latin-1")

    raw = re.sub(r"\\([\\\"'n]|[0-9A-F]{2})", byte, escaped).encode("latin-1")
    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    with context:
        return f"{before}{after}\n{ir.Module.parse(raw)}"


def _arithmetic(program: str) -> list[str]:
    """The operations on real numbers of a Triton program, in their order, with their types."""
    found = re.findall(
        r"((?:arith\.\w+f|math\.\w+|tt\.dot|tt\.extern_elementwise|tt\.reduce)\b).*?: (.*f(?:16|32).*)", program
    )
    return [f"{operation} {types}" for operation, types in found]


def compiled(exact_numerics: bool, family: str, dtype: str) -> dict[str, Compiled]:
    """generate, prefill and scoring of a small model whose sizes are multiples of a kernel's tiles."""
    sizes = dict(vocab_size=2000, padded_vocab_size=2048, embed_dim=512, num_heads=8, head_dim=64, mlp_dim=4096)
    spec = tiny.spec(family=family, compute_dtype=dtype, num_layers=LAYERS, **sizes)
    raw = search_r1.get_config()
    raw.engine.update(slots=256, tile_rows=64, page_tokens=64, pages=PAGES - 1, prefill_tokens=256, cache_dtype=dtype)
    cfg = parse(raw).engine
    mesh, _ = topology.mesh_for(MeshConfig(1, 1, 1, 1), "h100")
    model = LanguageModel(spec, dtype, exact=exact_numerics)
    tiling = exact.Tiling(64, 64, dtype)

    def array(*shape: int, dtype=jnp.int32, rows: jax.P | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, rows or jax.P()))

    with jax.set_mesh(mesh):
        weights = params.abstract(spec, mesh, sharding.TRAIN)
        placed = jax.eval_shape(model.place, weights)
        s = Sizes.of(cfg, 1024, exact_numerics, model)
        state = jax.eval_shape(lambda: functions.init_state(model, s.all_slots, s.pages, s.page_tokens))
        stops = functions.StopTables(array(64, 2048, dtype=jnp.int16), array(2048, dtype=jnp.bool_))
        tables, rows = array(s.all_slots, s.table), array(s.prefill_tiles, s.tile_rows)
        own, lanes = array(s.prefill_tiles, s.tile_rows // s.share), array(s.slots // s.tile_rows, s.tile_rows)
        lowered = {
            "generate": executor.generate.lower(model, placed, stops, state, tables, lanes, array(), STEPS, False),
            "prefill": executor.prefill.lower(model, placed, state, tables, rows, rows, own, array()),
        }
        if exact_numerics:
            score = jax.jit(lambda w, *a: exact.packed_logprobs(w, spec, tiling, *a))
            packed = [array(2, n, rows=ROWS) for n in (640, 640, 300, 300)]
            lowered["scoring"] = score.lower(weights, *packed, array(2, 300, dtype=jnp.float32, rows=ROWS))
        return {name: Compiled.of(one.compile().as_text()) for name, one in lowered.items()}


@pytest.fixture(scope="module", params=[("qwen2", "bfloat16"), ("qwen3", "float32")], ids=lambda p: p[1])
def exact_programs(request):
    return compiled(True, *request.param)


def test_exact_numerics_are_the_same_kernels_in_every_program(exact_programs):
    kernels = {name: collections.Counter(program.kernels()) for name, program in exact_programs.items()}
    generate, prefill, scoring = (kernels[name] for name in ("generate", "prefill", "scoring"))
    names = collections.Counter()
    for (name, _), times in generate.items():
        names[name] += times
    assert names["product"] == 4 * LAYERS + 1 and names["row_logprobs"] == 1 and names["write_pages"] == LAYERS
    assert names["product_sum"] == LAYERS  # of the widest sum, the MLP's
    assert names["paged_attention"] == names["paged_attention_parts"] == LAYERS
    addressed = ("paged_attention", "paged_attention_parts", "write_pages")  # whose arrays have other sizes in scoring
    assert {k: n for k, n in generate.items() if k[0] not in addressed} == {
        k: n for k, n in scoring.items() if k[0] not in addressed
    }
    for name in addressed[:2]:
        arithmetic = [
            {tuple(_arithmetic(text)) for kernel, text in side if kernel == name} for side in kernels.values()
        ]
        assert len(set.union(*arithmetic)) == 1 and len(next(iter(arithmetic[0]))) > 10
    assert not prefill - generate


def test_exact_numerics_leave_xla_the_same_fusions_in_every_program(exact_programs):
    fusions = {name: program.fusions() for name, program in exact_programs.items()}
    assert len(fusions["prefill"]) >= 4
    for name in ("prefill", "scoring"):
        unlike = fusions[name] - fusions["generate"]
        assert not unlike, f"{name} computes what generate does not:\n" + "\n\n".join(unlike)


@pytest.fixture(scope="module")
def fast_programs():
    return compiled(False, "qwen2", "bfloat16")


def _check_launches(program: Compiled, most: int) -> None:
    """The cache is written in place by one kernel, and a layer launches `most` kernels or fewer."""
    names = collections.Counter(name for name, _ in program.kernels())
    assert names["write_pages"] == names["paged_attention"] == names["paged_attention_parts"] == LAYERS
    cache = re.compile(rf" = \(?(bf16|f32)\[{PAGES},")
    assert {_operation(line) for line in program.launched() if cache.search(line)} == {"custom-call"}
    layers = program.launched("/attention/") + program.launched("/swiglu/")
    assert len(layers) <= most * LAYERS, "\n".join(layers)


def test_a_layer_of_decode_launches_few_kernels_and_copies_no_cache(fast_programs):
    """Norm, q k v, their bias and rotation (3), write, attention (2), o, norm, gate and up, silu, down, sum: 14.

    XLA makes one product of q, k and v, and one of gate and up, and reads the weights where they lie.
    """
    _check_launches(fast_programs["generate"], 14)


def test_a_layer_of_exact_decode_launches_few_kernels_and_copies_no_cache(exact_programs):
    """The same without XLA's fusions: sums stand apart, down is in parts (2); with norms of q and k, which want their
    own arrays, 19."""
    _check_launches(exact_programs["generate"], 19)


def test_the_host_reads_nothing_between_two_tokens(fast_programs):
    """XLA knows how often the loop over tokens turns, and so launches all of them without asking the GPU."""
    assert f'"known_trip_count":{{"n":"{STEPS}"}}' in fast_programs["generate"].text.replace(" ", "")


def test_exact_numerics_leave_nothing_to_autotuning(exact_programs):
    for name, program in exact_programs.items():
        text = "\n".join(program.launched())
        assert not re.search(r"gemm|cublas|cudnn|\bdot\(|triton_softmax", text), name


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")
@pytest.mark.parametrize("adapters", [False, True], ids=["all", "adapters"])
def test_the_products_of_experts_are_tokamaxs_kernels(adapters, monkeypatch):
    """Forward and backward, on two devices that share the experts; beside adapters no gradient of a matrix is made.

    tokamax asks the default device what it is, which here says what it would on the card.
    """
    from jax.extend import backend

    card = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0", platform="gpu")
    mesh, _ = topology.mesh_for(MeshConfig(1, 1, 1, 1, 2), "h100")
    importlib.import_module("tokamax")
    monkeypatch.setattr(importlib.import_module("tokamax._src.ops.op"), "infer_devices", lambda *_, **__: [card])
    monkeypatch.setattr(backend, "get_default_device", lambda *_, **__: card)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    block, config = Experts(Routing(16, 4), mlp_dim=384), LoraConfig(16, 32.0, False, "gate_proj,up_proj,down_proj")
    spec = tiny.spec(compute_dtype="bfloat16", embed_dim=512, pattern=((block,),), num_layers=1)

    def loss(adapters, weights, x):
        weights = lora.adapt(weights, adapters, config) if adapters else weights
        layer = jax.tree.map(lambda w: w[0], weights.layers)
        layer = transformer._gather(params.param_specs(spec).layers, layer, spec, x)
        return (block.apply(layer, spec, x, None, None)[0].astype(jnp.float32) ** 2).sum()

    with jax.set_mesh(mesh):
        weights = params.abstract(spec, mesh, sharding.TRAIN)
        beside = params.abstract_of(lora.adapter_specs(spec, config), mesh, sharding.TRAIN) if adapters else {}
        x = jax.ShapeDtypeStruct(
            (1024, 512), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P(sharding.FLAT, None))
        )
        text = jax.jit(jax.grad(loss, 0 if adapters else 1)).lower(beside, weights, x).compile().as_text()
    shapes = collections.Counter(re.findall(r'(\S+\[[\d,]*\])\S* custom-call.*custom_call_target="mosaic_gpu', text))
    matrices = {"bf16[8,512,384]": 2, "bf16[8,384,512]": 1}
    made = {shape: count for shape, count in shapes.items() if shape in matrices}
    assert made == ({} if adapters else matrices) and shapes["bf16[4096,384]"] == (6 if adapters else 3)
    assert not re.search(r"bf16\[4096,384\]\S* (dot|fusion)\(.*kind=kGemm|cublas", text)
