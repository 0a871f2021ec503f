"""Rows of software tasks as they are published -> our own form of them, checked, in `metadata["coding"]`.

  SWE-bench, SWE-Gym   instance_id, problem_statement, FAIL_TO_PASS, PASS_TO_PASS (lists, or lists as text), test_patch
  Polar                prompt, metadata {instance {a SWE-bench row}, base_image or polar_image}
  R2E                  docker_image, problem_statement, expected_output_json
  slime                prompt, metadata {image, workdir, problem_statement, one of swepro, eval_cmd,
                       remote_env_info.f2p_script}; the first of these three counts

Our own form is a mapping. What is absent has its default; one `check_*` key says how an attempt is judged:

  image, workdir, python   of a container; where the repository is; the interpreter that runs tests
  archive, tools           tar files beside the data set: the repository, and a folder of Python packages for its tests
  files                    {path: text}, on top of the archive or alone
  setup                    shell commands, run before an agent comes and again before the judgement
  hidden                   paths that are removed before the agent comes
  patch, test_patch        the oracle's change; what is added before the tests run
  check_tests              {fail_to_pass, pass_to_pass, framework, command}: all of both lists must pass
  check_swepro             {fail_to_pass, pass_to_pass, run_script, parser_script, selected}
  check_status             {command} or {script}: exit status 0
  check_map                {command, expected}: the map test -> status must be exactly this
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent import types
from jaxagent.data import fields
from jaxagent.data.fields import RowError
from jaxagent.envs.forms import EACH, TEXT, shaped

KEY = "coding"
CHECKS = ("check_tests", "check_swepro", "check_status", "check_map")
FRAMEWORKS = ("pytest", "unittest")
_NAMES = {"fail_to_pass~": [TEXT], "pass_to_pass~": [TEXT]}
_FORM = {
    **dict.fromkeys(("image~", "workdir~", "python~", "archive~", "tools~", "patch~", "test_patch~"), str),
    **{"setup~": [TEXT], "hidden~": [TEXT], "files~": {EACH: str}},
    "check_tests~": {"framework~": FRAMEWORKS, "command~": str, **_NAMES},
    "check_swepro~": {"run_script": TEXT, "parser_script": TEXT, "selected~": [TEXT], **_NAMES},
    "check_status~": {"command~": str, "script~": str},
    "check_map~": {"command": TEXT, "expected": {EACH: str}},
}
_SWE_SMITH = "swesmith/"  # how the repositories of SWE-smith's rows begin
TESTBED = "/testbed"  # where the published images of SWE-bench, SWE-Gym and R2E have the repository
SWE_BENCH_PYTHON = "/opt/miniconda3/envs/testbed/bin/python"  # in the published images
_DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
_R2E_TESTS = ("run_tests.sh", "r2e_tests", "/r2e_tests")  # R2E-Gym keeps these from the agent
_R2E_COMMAND = "[ ! -d /r2e_tests ] || ln -sfn /r2e_tests r2e_tests; bash run_tests.sh"
IN_PATCH = re.compile(r"^diff --git a/.+ b/(.+)$", re.MULTILINE)


def is_published(row: Mapping[str, Any]) -> bool:
    """Whether a row has one of the published layouts."""
    if "instance_id" in row or "expected_output_json" in row:
        return True
    about = row.get("metadata")
    about = _object(about) if isinstance(about, str) else about
    return isinstance(about, Mapping) and any(k in about for k in ("instance", "swepro", "eval_cmd", "remote_env_info"))


def to_task(row: Mapping[str, Any]) -> types.Task:
    """Converts and checks a published row. Raises RowError: naming the column."""
    if "expected_output_json" in row:
        name, statement, kind, about = _r2e(row)
    elif "instance_id" in row and "metadata" not in row:
        name, statement, kind, about = _swe_bench(row, "")
    else:
        metadata = fields.json_object(row.get("metadata"))
        if "instance" in metadata:
            instance = metadata["instance"]
            instance = instance if not isinstance(instance, str) else _object(instance)
            name, statement, kind, about = _swe_bench(
                fields.mapping(instance, "metadata.instance"), "metadata.instance."
            )
            image = metadata.get("base_image") or metadata.get("polar_image")
            about = about | ({"image": image} if image else {})
        else:
            name, statement, kind, about = _slime(row, metadata)
    check(about, KEY)
    return types.Task(name, statement, (), kind, {KEY: about})


def check(about: Any, column: str) -> Mapping[str, Any]:
    """Our own form of a task, without what is null. Raises RowError, which names the key, for anything else."""
    about = shaped(about, _FORM, column)
    if not about.get("workdir", "/").startswith("/"):
        raise RowError(f"{column}.workdir", f"must be an absolute path, got {about['workdir']!r}")
    for path in filter(_leads_out, about.get("files", ())):
        raise RowError(f"{column}.files", f"must map relative paths to texts, not {path!r}")
    has = [key for key in CHECKS if key in about]
    if len(has) != 1:
        raise RowError(column, f"needs one of {', '.join(CHECKS)}; it has {', '.join(has) or 'none'}")
    (name,), inside, column = has, about[has[0]], f"{column}.{has[0]}"
    if name in ("check_tests", "check_swepro") and not (inside.get("fail_to_pass") or inside.get("pass_to_pass")):
        raise RowError(f"{column}.fail_to_pass", "no test is named, here or in pass_to_pass")
    if name == "check_status" and bool(inside.get("command")) == bool(inside.get("script")):
        raise RowError(column, "needs either a command or a script")
    if name == "check_map" and not inside["expected"]:
        raise RowError(f"{column}.expected", "must map the names of tests to their statuses")
    return about


def _swe_bench(row: Mapping[str, Any], prefix: str) -> tuple[str, str, str, dict[str, Any]]:
    """Names are in capitals, in SWE-bench Pro's rows in small letters."""
    name, statement = fields.text(row, "instance_id", prefix), _statement(row, prefix)
    repo = fields.text(row, "repo", prefix) if row.get("repo") else ""
    if repo.startswith(_SWE_SMITH):
        raise RowError(
            f"{prefix}repo",
            "is SWE-smith's: its `patch` puts the bug in and its image is without the bug, so that doing nothing would "
            "solve it. Bring the bug in with `setup`, in our own form (metadata.coding), and reverse the patch",
        )
    test_patch = fields.text(row, "test_patch", prefix, empty=True) if row.get("test_patch") else ""
    tests: dict[str, Any] = {}
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        column = key if key in row or key.lower() not in row else key.lower()
        tests[key.lower()] = names(fields.get(row, column, prefix), prefix + column)
    if not tests["fail_to_pass"] and not tests["pass_to_pass"]:
        raise RowError(f"{prefix}FAIL_TO_PASS", "no test is named, here or in PASS_TO_PASS")
    if row.get("test_command"):
        tests["command"] = fields.text(row, "test_command", prefix)
    elif repo == "django/django":  # its tests have a runner of their own, which takes modules
        tests |= {"framework": "unittest", "command": f"{_DJANGO} {' '.join(_django_modules(test_patch))}"}
    about: dict[str, Any] = {
        "image": row.get("image")
        or row.get("image_name")
        or row.get("docker_image")
        or "",  # the last is SWE-rebench's
        "workdir": row.get("workdir") or TESTBED,
        "python": row.get("python") or SWE_BENCH_PYTHON,
        "test_patch": test_patch,
        "patch": row.get("patch") or "",
        "check_tests": tests,
    }
    if row.get("before_repo_set_cmd"):
        about["setup"] = [fields.text(row, "before_repo_set_cmd", prefix)]
    return name, statement, repo or "swe_bench", about


def _django_modules(test_patch: str) -> list[str]:
    paths = [path for path in IN_PATCH.findall(test_patch) if path.endswith(".py")]
    return sorted({path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in paths})


def _r2e(row: Mapping[str, Any]) -> tuple[str, str, str, dict[str, Any]]:
    image = fields.text(row, "docker_image")
    expected = fields.get(row, "expected_output_json")
    if isinstance(expected, str):
        expected = _object(expected)
        if expected is None:
            raise RowError("expected_output_json", "is no JSON object")
    about = {
        "image": image,
        "workdir": TESTBED,
        "hidden": list(_R2E_TESTS),
        "check_map": {"command": _R2E_COMMAND, "expected": fields.mapping(expected, "expected_output_json")},
    }
    repo = fields.text(row, "repo_name") if row.get("repo_name") else "r2e"
    name = fields.text(row, "instance_id") if row.get("instance_id") else f"{repo}/{row.get('commit_hash') or image}"
    return name, _statement(row, ""), repo, about


def _statement(row: Mapping[str, Any], prefix: str) -> str:
    statement = fields.text(row, "problem_statement", prefix, empty=True)
    if not statement.strip():
        raise fields.EmptyRow(f"{prefix}problem_statement", f"is empty, of instance '{row.get('instance_id')}'")
    return statement


def _slime(row: Mapping[str, Any], metadata: Mapping[str, Any]) -> tuple[str, str, str, dict[str, Any]]:
    rest = fields.mapping(metadata.get("remote_env_info") or {}, "metadata.remote_env_info")

    def either(key: str, other: str = "") -> Any:
        return metadata.get(key) or rest.get(other or key)

    about: dict[str, Any] = {}
    for key, value in (("image", either("image", "image_url")), ("workdir", either("workdir"))):
        if not isinstance(value, str) or not value.strip():
            raise RowError(f"metadata.{key}", "missing, and not in remote_env_info")
        about[key] = value
    setup = []
    if metadata.get("swepro"):
        pro = fields.mapping(metadata["swepro"], "metadata.swepro")
        about["check_swepro"] = {
            "fail_to_pass": names(pro.get("fail_to_pass") or [], "metadata.swepro.fail_to_pass"),
            "pass_to_pass": names(pro.get("pass_to_pass") or [], "metadata.swepro.pass_to_pass"),
            "selected": names(pro.get("selected_test_files") or [], "metadata.swepro.selected_test_files"),
            "run_script": fields.text(pro, "run_script_path", "metadata.swepro."),
            "parser_script": fields.text(pro, "parser_script_path", "metadata.swepro."),
        }
        if pro.get("before_repo_set_cmd"):
            setup.append(fields.text(pro, "before_repo_set_cmd", "metadata.swepro."))
    elif metadata.get("eval_cmd"):
        about["check_status"] = {"command": fields.text(metadata, "eval_cmd", "metadata.")}
    elif "f2p_script" not in rest:
        raise RowError(
            "metadata", "needs one of swepro, eval_cmd and remote_env_info.f2p_script: nothing judges the task"
        )
    else:
        about["check_status"] = {"script": fields.text(rest, "f2p_script", "metadata.remote_env_info.")}
    before = either("pre_commands") or []
    setup += [before.replace("\\n", "\n")] if isinstance(before, str) else fields.texts(before, "metadata.pre_commands")
    about["setup"] = setup
    statement = metadata.get("problem_statement") or _first_user_text(row.get("prompt"))
    if not isinstance(statement, str) or not statement.strip():
        raise RowError("metadata.problem_statement", "missing, and there is no prompt")
    label = row.get("label")
    name = either("instance_id") or (label if isinstance(label, str) and len(label) < 256 else "") or row.get("id")
    if not isinstance(name, str) or not name:
        raise RowError("metadata.instance_id", "missing; the task has no name")
    return name, statement, "software", about


def _first_user_text(prompt: Any) -> str:
    """The first user message of a prompt, or a prompt that is a text."""
    if isinstance(prompt, str):
        return prompt
    for message in prompt if isinstance(prompt, Sequence) else ():
        if isinstance(message, Mapping) and message.get("role") == "user" and isinstance(message.get("content"), str):
            return message["content"]
    return ""


def names(value: Any, column: str) -> list[str]:
    """A list of texts, or text that holds one as JSON or, as in SWE-bench Pro's rows, as Python writes it."""
    read = fields.texts_of_list(value, column) if isinstance(value, str) else value
    if read is None:
        raise RowError(column, f"must be a list, or text that holds one, got {fields.show(value)}")
    return list(fields.texts(read, column))


def _object(text: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, Mapping) else None


def _leads_out(path: Any) -> bool:
    parts = path.split("/") if isinstance(path, str) else [""]
    return parts[0] == "" or ".." in parts or ".git" in parts or "\0" in path
