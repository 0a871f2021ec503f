"""From the source: texts are UTF-8 whatever the locale, and model files have the permissions of any new file."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = [path for room in ("jaxagent", "launch", "data_pipelines", "configs", "benchmarks", "examples")
         for path in sorted((ROOT / room).rglob("*.py"))]  # fmt: skip


def _in_the_locale(call: ast.Call) -> bool:
    """Whether a call reads or writes text and names no encoding: more than ruff's PLW1514, any `.read_text()`."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given or None in given:
        return False
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in ("run", "Popen", "check_output", "check_call"):
        return any(word in given for word in ("text", "universal_newlines"))
    if name in ("read_text", "write_text"):
        return len(call.args) < 1 + (name == "write_text")
    if name not in ("open", "fdopen") or ast.unparse(call.func) == "tarfile.open":
        return False
    # `open(path, mode)` and `path.open(mode)`; of other objects' `open` (a gateway's, a store's) none has a mode.
    method = isinstance(call.func, ast.Attribute) and name == "open"
    mode = given.get("mode", next(iter(call.args[0 if method else 1 : 1 if method else 2]), None))
    text = mode.value if isinstance(mode, ast.Constant) else None
    if method:
        return isinstance(text, str) and bool(text) and set(text) <= set("rwax+t")
    return "b" not in (text or "r")


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("(folder / 'x').read_text()", True),
        ("path.write_text(text)", True),
        ("open(path)", True),
        ("open(path, 'a')", True),
        ("path.open('w')", True),
        ("os.fdopen(fd, 'w')", True),
        ("subprocess.run(command, text=True)", True),
        ("path.read_text('utf-8')", False),
        ("path.read_text(encoding='utf-8')", False),
        ("open(path, 'rb')", False),
        ("open(path, mode='ab', buffering=0)", False),
        ("path.open('rb')", False),
        ("driver.open('task', 0)", False),
        ("subprocess.run(command)", False),
    ],
)
def test_a_text_in_the_locale_is_seen(code, wrong):
    assert _in_the_locale(ast.parse(code, mode="eval").body) is wrong


def test_every_text_names_its_encoding_and_one_function_writes_weights():
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            if _in_the_locale(node):
                wrong.append(f"{where} {ast.unparse(node)[:60]}")
            # The library gives a file to its owner alone; `jaxagent.models.hf.save_file` mends that.
            if ast.unparse(node.func).endswith(("safetensors.numpy.save_file", "safetensors.torch.save_file")):
                wrong += [where] if path != ROOT / "jaxagent/models/hf.py" else []
    assert not wrong
