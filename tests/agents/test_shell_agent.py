"""Our shell agent's program, as a process, against a scripted server."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from jaxagent.agents.base import Where
from jaxagent.agents.shell import Shell
from jaxagent.envs.terminal import dialogue


class Server(http.server.ThreadingHTTPServer):
    """Answers request number n with `replies[n]`: a text, or a status code."""

    def __init__(self, replies):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.seen, self.tokens = list(replies), [], []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = self.server.replies[len(self.server.seen)]
        self.server.seen.append(body)
        self.server.tokens.append(self.headers["Authorization"])
        answer = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
        data = json.dumps({"error": "no"} if isinstance(reply, int) else answer).encode()
        self.send_response(reply if isinstance(reply, int) else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass


@pytest.fixture
def play(tmp_path):
    def run(replies, **fields):
        with Server(replies) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            agent = Shell(python=sys.executable, **fields)
            work = tmp_path / "work"
            work.mkdir()
            url = f"http://127.0.0.1:{server.server_port}"
            where = Where(url, "secret", "policy", "do {it}", str(work), str(tmp_path), 4096, 512)
            for path, data in agent.files(where).items():
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(data)
            env = {"PATH": os.environ["PATH"], "http_proxy": "http://127.0.0.1:1", **agent.env(where)}
            done = subprocess.run(
                agent.argv(where), cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
            )
            server.shutdown()
            run.server, run.work = server, work
            return done

    return run


def texts(body):
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_commands_are_run_where_the_task_is_until_the_policy_is_done(play):
    done = play(["<cmd>pwd; echo hi > f; exit 3</cmd>", "<cmd>cat f</cmd> ", "well <done> <cmd>rm f</cmd>"], system="S")
    assert done.returncode == 0, done.stderr
    server, work = play.server, play.work
    assert (work / "f").read_text() == "hi\n"  # what stands beside <done> is not run
    assert texts(server.seen[0]) == [("system", "S"), ("user", "do {it}")]
    assert texts(server.seen[2]) == [
        *texts(server.seen[0]),
        ("assistant", "<cmd>pwd; echo hi > f; exit 3</cmd>"),
        ("user", f"{work}\n[exit status 3]"),
        ("assistant", "<cmd>cat f</cmd> "),
        ("user", "hi\n[exit status 0]"),
    ]
    assert server.tokens == ["Bearer secret"] * 3 and server.seen[0]["model"] == "policy"


def test_a_command_cannot_keep_the_agent_waiting_nor_see_its_token(play):
    late = "sleep 100 & echo before; trap '' TERM INT; sleep 100"
    replies = [f"<cmd>{text}</cmd>" for text in (late, "sleep 9 & echo left", "env; cat", "kill -9 $$")]
    done = play([*replies, "no command", "<cmd>cut off", "<done>"], command_timeout_s=1.0)
    assert done.returncode == 0, done.stderr
    shown = [text for role, text in texts(play.server.seen[-1]) if role == "user"][1:]
    assert shown[0] == "before\n[stopped after 1 s]"
    assert shown[1] == "left\n[exit status 0]"
    assert "secret" not in shown[2] and shown[2].endswith("[exit status 0]")
    assert shown[3] == "\n[exit status 137]"
    assert shown[4] == shown[5] == Shell().no_command


def test_the_end_of_a_long_output_is_shown(play):
    replies = ["<cmd>seq 5000 | tr '\\n' ' '; printf é</cmd>", "<cmd>printf %0100d 0</cmd>", "<done>"]
    assert play(replies, output_chars=100).returncode == 0
    shown = [text for role, text in texts(play.server.seen[-1]) if role == "user"][1:]
    assert shown[0].startswith("[...] ") and "4999 5000 é\n[exit" in shown[0] and len(shown[0]) == 6 + 100 + 16
    assert shown[1].startswith("0" * 100 + "\n")


def test_the_words_of_the_built_in_dialogue(play):
    """What the policy is shown equals, byte for byte, what it would be shown without an agent program."""
    printed = ["printf 'a\\n  b\\n\\n'", ":", "echo oh; exit 2", "sleep 100"]
    words = {"shown": "<out>{output}</out>\n", "failed": "<out>{output}\n(exit_code={code})</out>\n"}
    words |= {"late": "<out>{output}\n(timed out)</out>\n"}
    replies = [dialogue.action("plain", command) for command in printed]
    assert play([*replies, dialogue.finish("plain")], command_timeout_s=1.0, **words).returncode == 0
    shown = [text for role, text in texts(play.server.seen[-1]) if role == "user"][1:]
    results = [("a\n  b", 0), ("", 0), ("oh", 2)]
    assert shown[:3] == [dialogue.observation("plain", "", *result) for result in results]
    assert shown[3] == dialogue.timed_out("plain", "", "", 1.0)


@pytest.mark.parametrize(
    ("replies", "status", "requests"),
    [
        (["<cmd>:</cmd>", "<cmd>:</cmd>", "never asked"], 0, 2),  # its turns are used up
        (["<cmd>:</cmd>", 403], 0, 2),  # its requests are used up
        ([400], 0, 1),  # no room in the context
        ([500, 503, "<done>"], 0, 3),
        ([401], 1, 1),
    ],
)
def test_how_it_ends(play, replies, status, requests):
    assert play(replies, max_turns=2).returncode == status
    assert len(play.server.seen) == requests


def test_nobody_listens(tmp_path, monkeypatch):
    from jaxagent.agents import shell_agent

    monkeypatch.setattr(time, "sleep", lambda s: None)
    status, told = shell_agent.ask({"url": "http://127.0.0.1:1", "model": "m"}, "token", [])
    assert status == 0 and "refused" in told.lower()
