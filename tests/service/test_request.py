"""Submissions: what they mean, and that every mistake is one line naming the field."""

import json

import pytest

from jaxagent.data import codec
from jaxagent.fleet.wire import BadMessageError
from jaxagent.service.request import TaskRequest
from jaxagent.types import Task

LEAST = {"task_id": "t", "instruction": "do it"}


def test_the_least_submission_has_the_published_defaults():
    asked = TaskRequest.parse(json.dumps(LEAST).encode())
    assert (asked.num_samples, asked.timeout_s, asked.agent_timeout_s, asked.early_stop, asked.needed) == (
        1, 600.0, 600.0, 0, 0,
    )  # fmt: skip
    assert asked.task == Task("t", "do it", ())


def test_all_of_it():
    task = Task("row 7", "fix it", ("a",), metadata={"repo": "x"})
    row = {
        "task_id": "run:7.0",
        "task": codec.encode_task(task),
        "num_samples": 8,
        "first_sample": 40,
        "dispatch_priority": 100,
        "timeout_seconds": 2400,
        "min_complete_accept_fraction": 0.6,
        "callback_url": "http://trainer:9000/done?x=1",
        "metadata": {"agent_timeout": 1200, "note": "n"},
        "runtime": {"backend": "docker"},
        "agent": {"harness": "codex"},
    }
    asked = TaskRequest.of(row)
    assert (asked.needed, asked.early_stop, asked.agent_timeout_s) == (5, 7, 1200.0)
    sections = {"runtime": {"backend": "docker"}, "agent": {"harness": "codex"}}
    assert asked.task.metadata == {"repo": "x", "agent_timeout": 1200, "note": "n", **sections}
    assert (asked.task.id, asked.task.answers) == ("row 7", ("a",))
    other_order = TaskRequest.of(dict(reversed(row.items())))
    assert other_order.digest == asked.digest != TaskRequest.of({**row, "num_samples": 7}).digest
    assert TaskRequest.of({**row, "early_stop_min_usable_sessions": 0}).early_stop == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"task_id": ""}, "task_id"),
        ({"task_id": "a/b"}, "task_id"),
        ({"task_id": "../x"}, "task_id"),
        ({"task_id": "x" * 129}, "task_id"),
        ({"task_id": 7}, "task_id"),
        ({"instruction": ""}, "instruction"),
        ({"instruction": None}, "instruction"),
        ({"task": {}}, "instruction"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": True}, "num_samples"),
        ({"num_samples": 2.0}, "num_samples"),
        ({"num_samples": 10**9}, "num_samples"),
        ({"dispatch_priority": 101}, "dispatch_priority"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"timeout_seconds": "600"}, "timeout_seconds"),
        ({"timeout_seconds": 1e300}, "timeout_seconds"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"agent_timeout": -1}}, "metadata.agent_timeout"),
        ({"min_complete_accept_fraction": 1.1}, "min_complete_accept_fraction"),
        ({"min_complete_accept_fraction": 10**400}, "min_complete_accept_fraction"),
        ({"early_stop_min_usable_sessions": 2}, "early_stop_min_usable_sessions"),
        ({"num_samples": 8, "min_complete_accept_fraction": 0.5, "early_stop_min_usable_sessions": 3}, "needs 4"),
        ({"callback_url": "ftp://host/"}, "callback_url"),
        ({"callback_url": "http://"}, "callback_url"),
        ({"callback_url": "http://h:99999/"}, "callback_url"),
        ({"callback_url": "http://h/\n"}, "callback_url"),
        ({"callback_url": 7}, "callback_url"),
        ({"runtime": "docker"}, "runtime"),
        ({"num_sample": 8}, "num_sample"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(change, named):
    with pytest.raises(BadMessageError, match=named) as failure:
        TaskRequest.of(LEAST | change)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"task_id": "t", "metadata": {"x": 1e999}}']
)
def test_a_body_that_is_no_object_of_finite_numbers(raw):
    with pytest.raises(BadMessageError):
        TaskRequest.parse(raw.replace(b'"t"', b'"t", "instruction": "x"'))
