"""A minimal shell agent that runs inside the sandbox: one file, the standard library, Chat Completions without tools.

    python3 shell_agent.py settings.json key

System prompt, task, then turn after turn: the reply's command is run by `sh -c`, and what it printed goes back as the
next user message. It ends when a reply says that it is done, or when the turns are used up. Nothing of the package is
imported: the sandbox does not have it. The fields of the settings are those of `shell.Shell`. The file `key` holds the
token and is removed: no command can read it there, in a variable, or in this program's memory.

Exit status: 0 when it ended by itself, also where the gateway says that tokens or requests are used up; 1 where the
gateway failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ANSWER_TIMEOUT_S = 3600  # the rollout's own deadlines are shorter
TRIES = 4  # of a request that found nobody listening, or the server at fault
BUDGET = (400, 403, 413)  # status codes that say: no more tokens, no more requests


def main() -> int:
    """Plays the whole conversation; returns the exit status."""
    with open(sys.argv[1], encoding="utf-8") as file:
        settings = json.load(file)
    close_memory()
    with open(sys.argv[2], encoding="utf-8") as file:
        token = file.read()
    os.remove(sys.argv[2])
    messages = [{"role": "system", "content": settings["system"]}] if settings["system"] else []
    messages.append({"role": "user", "content": settings["task"].format(instruction=settings["instruction"])})
    for turn in range(settings["max_turns"]):
        status, reply = ask(settings, token, messages)
        if status != 200:
            print(f"status {status}: {reply}", file=sys.stderr)
            return 0 if status in BUDGET else 1
        messages.append({"role": "assistant", "content": reply})
        print(f"--- turn {turn}\n{reply}", flush=True)
        if settings["done"] in reply:
            return 0
        if turn + 1 == settings["max_turns"]:
            break
        command = command_in(reply, settings["begin"], settings["end"])
        observation = run(command, settings) if command is not None else settings["no_command"]
        print(observation, flush=True)
        messages.append({"role": "user", "content": observation})
    return 0


def close_memory() -> None:
    """Keeps commands, which run as the same user, from reading this process: Linux's PR_SET_DUMPABLE = 4."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):  # some small Pythons come without it
        print("the memory of this program can be read by its commands", file=sys.stderr)


def command_in(reply: str, begin: str, end: str) -> str | None:
    """What stands between the first `begin` and the `end` after it; a reply that was cut off has no end."""
    _, opening, rest = reply.partition(begin)
    return rest.partition(end)[0].strip() if opening and end in rest else None


def run(command: str, settings: dict) -> str:
    """Runs a command and returns what the policy is shown of it."""
    with tempfile.TemporaryFile() as output:  # a pipe would stay open as long as anything that was left behind
        process = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(settings["command_timeout_s"])
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        size = output.seek(0, os.SEEK_END)
        most = settings["output_chars"]
        output.seek(max(0, size - 4 * most))  # UTF-8 has at most four bytes for a character
        text = output.read(4 * most).decode("utf-8", "replace").rstrip()
    if len(text) > most or size > 4 * most:
        text = settings["cut"] + text[len(text) - most :]
    if code is None:
        return settings["late"].format(output=text, timeout_s=settings["command_timeout_s"])
    words = settings["failed"] or settings["shown"] if code else settings["shown"]
    return words.format(output=text, code=code if code >= 0 else 128 - code)


def ask(settings: dict, token: str, messages: list) -> tuple[int, str]:
    """The assistant's next message, as (200, text); or the status and what the server says of it."""
    body = {"model": settings["model"], "messages": messages}
    request = urllib.request.Request(
        settings["url"] + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + token},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answer = 0, "no answer"
    for again in range(TRIES):
        try:
            with opener.open(request, timeout=ANSWER_TIMEOUT_S) as response:
                answer = json.load(response)
            return 200, answer["choices"][0]["message"]["content"] or ""
        except urllib.error.HTTPError as refused:
            answer = refused.code, refused.read(2000).decode("utf-8", "replace")
            if refused.code < 500:
                break
        except OSError as failure:
            answer = 0, str(failure)
        if again + 1 < TRIES:
            time.sleep(0.5 * 2**again)
    return answer


if __name__ == "__main__":
    sys.exit(main())
