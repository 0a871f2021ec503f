"""The first page's Python runs as it stands there, at tiny sizes."""

import re

import pytest

from jaxagent.config import flags
from tests.tiny_run import FLAGS, ROOT


@pytest.mark.slow
def test_the_snippet_plays_episodes(tmp_path, monkeypatch, capsys):
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    parse = flags.parse_argv
    small = [*FLAGS.split(), f"--config.workdir={tmp_path}"]
    monkeypatch.setattr(flags, "parse_argv", lambda argv: parse([*argv, *small]))
    exec(compile(snippet, "README.md", "exec"), {})
    told = [line for line in capsys.readouterr().out.splitlines() if "?" in line]
    assert len(told) == 4, told
    assert all(float(line.split()[-1]) < 0 for line in told)  # the log-prob of what was sampled
