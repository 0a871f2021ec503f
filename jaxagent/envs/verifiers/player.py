"""Plays tasksets of the package verifiers since 0.4 (`verifiers.v1`) for a run, in the package's own interpreter.

    PYTHON -P player.py SETTINGS      # reads requests, a JSON object a line, and writes answers, likewise

    {"do": "tasks", "split": "train"}                                     -> {"tasks": [{"prompt", "name", "key"}, ...]}
    {"id": 7, "do": "play", "split", "row", "url", "token"}               -> {"id": 7, "reward", "scores", "stop", ...}
    {"id": 7, "do": "stop"}                                               -> nothing; the episode is cancelled

An episode is the package's own `run_episode`: its harness, tools, limits and rewards. Its model is what answers at the
url. Everything else that is printed goes to standard error. This file imports nothing of jaxagent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import select
import sys
import threading
import time
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import default_harness_id, harness_class, load_environment, resolve_env_config

KEY = "JAXAGENT_EPISODE_%s_API_KEY"  # the package hands variables with API_KEY in their names to no program
STOP_S = 10.0  # for episodes to be cancelled when the run is gone
CLOUD = "prime"  # the package's own choice of a runtime: its maker's
REFUSED = {  # of the role that is the policy
    "model": "the policy is the model",
    "sampling": "rl.sampling says how the policy is sampled",
    "retries": "an attempt that failed would be trained on, too; here it is left out of its group",
}


def configured(settings: dict[str, Any]) -> tuple[vf.EnvConfig, str]:
    """The package's config of an environment, and the name of its role that is the policy.

    Raises ValueError: a setting that means nothing here, by its name.
    """
    raw = json.loads(json.dumps(settings["env"]))
    declared = agent_config_fields(resolve_env_config(raw))
    unset = [
        name for name, role in declared.items() if role.runtime.type == CLOUD and "runtime" not in role_of(raw, name)
    ]
    for name in unset:
        raw[name] = {**role_of(raw, name), "runtime": {"type": "subprocess"}}
    config = resolve_env_config(raw)
    roles = agent_config_fields(config)
    ours = [name for name, role in roles.items() if role.client is None]
    if len(ours) != 1:
        raise ValueError(
            f"{len(ours)} of its roles {sorted(roles)} are the policy ({', '.join(ours) or 'none'}); it must be one: "
            "give the others a client of their own"
        )
    if "retries" in raw:
        raise ValueError(f"retries: {REFUSED['retries']}")
    for name, reason in REFUSED.items():
        if name in role_of(raw, ours[0]):
            raise ValueError(f"{ours[0]}.{name}: {reason}")
    for name in unset:
        harness = roles[name].harness.id if roles[name].harness is not None else default_harness_id(config.taskset.id)
        if harness_class(harness).EXECUTES_CODE:
            raise ValueError(
                f"{name}.harness={harness!r} runs what the model says, on this machine and as you: name "
                f"{name}.runtime, such as {{'type': 'docker'}}, or {{'type': 'subprocess'}} where that is meant"
            )
    role = roles[ours[0]]
    if role.timeout.rollout is not None and role.timeout.rollout > settings["run_s"]:
        raise ValueError(
            f"{ours[0]}.timeout.rollout={role.timeout.rollout:g} is more than env.run_s={settings['run_s']:g}"
        )
    turns = min(filter(None, (role.max_turns, settings["max_turns"])))
    return config.model_copy(
        update={ours[0]: role.model_copy(update={"max_turns": turns, "retries": type(role.retries)()})}
    ), ours[0]


def role_of(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """What was set of a role."""
    return raw.get(name) or {}


class Split:
    """One environment of the package, and its tasks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._run_s, self._most = settings["run_s"], settings["num_tasks"]
        self._config, self._role = configured(settings)
        self._environment = load_environment(self._config)
        self._tasks: list[Any] | None = None
        self._serving = contextlib.AsyncExitStack()
        self._lock = asyncio.Lock()
        self._is_serving = False

    @property
    def tasks(self) -> list[Any]:
        """The first of its tasks; the package's order."""
        if self._tasks is None:
            self._tasks = list(itertools.islice(self._environment.taskset, self._most))
        return self._tasks

    def described(self) -> list[dict[str, Any]]:
        """Of each task, its words, its name, and a key that tasks of the same contents share."""
        rows = []
        for task in self.tasks:
            data = task.data.model_dump(mode="json", exclude={"idx", "id", "name"})
            key = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
            rows.append({"prompt": task.data.prompt_text, "name": task.data.id or task.data.name or "", "key": key})
        return rows

    async def play(self, request: dict[str, Any]) -> dict[str, Any]:
        """One episode: its reward, the parts of that, how it ended, and what failed."""
        async with self._lock:
            if not self._is_serving:
                await self._serving.enter_async_context(self._environment.serving())
                self._is_serving = True
        task = self.tasks[request["row"]]
        own = task.data.timeout.agent
        timeout = task.data.timeout.model_copy(update={"agent": min(own or self._run_s, self._run_s)})
        variable = KEY % request["id"]
        os.environ[variable] = request["token"]
        try:
            client = vf.EvalClientConfig(base_url=request["url"], api_key_var=variable)
            context = vf.ModelContext(model="policy", client=client)
            episode = await self._environment.run_episode(task.with_data(timeout=timeout), context)
        finally:
            del os.environ[variable]
        return self._result(episode)

    def _result(self, episode: Any) -> dict[str, Any]:
        traces = [trace for trace in episode.traces if trace.agent.name == self._role]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reasons = "; ".join(f"{error.type}: {error.message}"[:500] for error in errors[:2])
        if not episode.ok or len(traces) != 1:
            return {
                "error": reasons or f"the policy played {len(traces)} times in an episode; one reward is for one play"
            }
        (trace,) = traces
        unscored = [name for name, reward in trace.rewards.items() if reward is None]
        if unscored:
            return {"error": f"{trace.stop_condition}: {', '.join(unscored)} judged nothing"}
        scores = {name: value for name, value in trace.metrics.items() if value is not None}
        scores |= {name: reward.score for name, reward in trace.rewards.items()}
        return {"reward": trace.reward, "scores": scores, "stop": trace.stop_condition or "", "error": ""}

    async def close(self) -> None:
        """Gives back what the environment shares."""
        await self._serving.aclose()


async def main(settings: dict[str, Any]) -> None:
    """Answers requests until there are no more, or nobody wants answers any longer."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    build = eval_client.build_async_httpx
    policy = build(vf.EvalClientConfig(base_url="http://127.0.0.1", api_key_var=KEY % 0))
    # The package keeps a client, with its connections and certificates, for each endpoint and key until it ends.
    ours, _, _ = KEY.partition("%")
    eval_client.build_async_httpx = lambda config: policy if config.api_key_var.startswith(ours) else build(config)
    watch = threading.Thread(target=_end_with_stdin, daemon=True)
    splits: dict[str, Split] = {}
    episodes: dict[int, asyncio.Task[None]] = {}

    def answer(request: dict[str, Any], content: dict[str, Any]) -> None:
        print(json.dumps({"id": request.get("id"), **content}), file=answers, flush=True)

    def split(name: str) -> Split:
        if name not in splits:
            splits[name] = Split({**settings, "env": settings["envs"][name]})
        return splits[name]

    async def play(request: dict[str, Any]) -> None:
        try:
            answer(request, await split(request["split"]).play(request))
        except Exception as failure:
            answer(request, {"error": _line(failure)})
        finally:
            episodes.pop(request["id"], None)

    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        if request["do"] == "play":
            if watch.ident is None:
                watch.start()
            episodes[request["id"]] = asyncio.create_task(play(request))
        elif request["do"] == "stop":
            if request["id"] in episodes:
                episodes[request["id"]].cancel()
        else:
            try:
                answer(request, {"tasks": split(request["split"]).described()})
            except Exception as failure:
                answer(request, {"error": _line(failure)})
    for episode in list(episodes.values()):
        episode.cancel()
    await asyncio.gather(*episodes.values(), return_exceptions=True)
    for one in splits.values():
        await one.close()


def _end_with_stdin() -> None:
    """Ends the process some time after its input: a taskset that blocks would keep it for ever."""
    end = select.poll()
    end.register(0, 0)  # no more than that nobody writes any longer
    end.poll()
    time.sleep(STOP_S)
    os._exit(1)


def _line(failure: Exception) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split()).removesuffix(".")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
