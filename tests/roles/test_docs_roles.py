"""docs/roles.md: its scripted role plays, and its tables have every field of every choice that they describe."""

import asyncio
import dataclasses
import pathlib
import re

from jaxagent.config import RoleConfig
from jaxagent.envs.base import Message
from jaxagent.roles.engines import FrozenRole, PolicyRole
from jaxagent.roles.http import Http
from jaxagent.types import Task

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs/roles.md").read_text(encoding="utf-8")


def test_the_scripted_role_plays():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(compile(code, "roles.md", "exec"), names)
    role = names["Parrot"](times=3)
    with role.open("user", lambda coroutine, timeout_s: None, print) as speaker_at:
        speaker = speaker_at(Task("t", "", ()), 0, 1)
        reply = asyncio.run(speaker.reply((Message("user", "Hi!"),), (), 9))
    assert reply.text == "Hi! Hi! Hi!" and role.timeout_s == 60.0


def test_every_field_is_on_the_page():
    for choice in (RoleConfig, FrozenRole, PolicyRole, Http):
        for field in dataclasses.fields(choice):
            assert f"`{field.name}`" in PAGE, (choice, field.name)
