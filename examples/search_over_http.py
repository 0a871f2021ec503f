"""Search-R1 played by another process, with the openai package and nothing of ours in between but HTTP.

    echo "a secret of 16 letters or more" > TOKEN; export PYTHONPATH=examples
    python -m jaxagent.service.server --store=runs/http/service.sqlite --token_file=TOKEN --port=8080 &
    python -m jaxagent.service.node --server=http://127.0.0.1:8080 --token_file=TOKEN --player=search_over_http:player \
        --config=examples/search_over_http.py --gateway_url=http://127.0.0.1:9000 --gateway_token_file=TOKEN \
        --max_run_workers=64 &
    python -m jaxagent.main --config=examples/search_over_http.py

The tasks, the search engine, the model and every hyper-parameter are those of `configs/search_r1.py`. Only who plays is
not: the trainer submits groups to a rollout service, the node takes them, asks the policy behind the trainer's gateway
as it would ask any model, searches, and sends back what each episode was worth. The tokens that are trained are those
that the engine sampled, kept by the gateway. With the laptop's exact numerics `logprob_gap/max` is 0.0, as it is when
the run plays for itself, and held-out answers gain as much (docs/recipes.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

from ml_collections import ConfigDict

from jaxagent.config import ConfigError
from jaxagent.configs import search_r1
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.search.environment import Search
from jaxagent.service.gateway_client import GatewayClient
from jaxagent.service.play import Here, Phases, Play, Work
from jaxagent.service.remote_rollout import ServiceConfig
from jaxagent.service.states import State
from jaxagent.types import Episode, StopReason

CLOSE_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteSearch(Search):
    """Search, played elsewhere."""

    service: ServiceConfig
    rollout = "jaxagent.service.remote_rollout:RemoteRollout"


def get_config(preset: str = "laptop") -> ConfigDict:
    """A preset of `configs/search_r1.py` whose episodes a rollout service plays."""
    config = search_r1.get_config(preset)
    config.workdir = "runs/http"
    config.env.name = "search_over_http:RemoteSearch"
    config.env.service = ConfigDict(
        {"url": "http://127.0.0.1:8080", "token_file": "TOKEN", "gateway_port": 9000, "gateway_token_file": "TOKEN"}
    )
    return config


@contextlib.contextmanager
def player(here: Here) -> Iterator[Play]:
    """Opens the search engine and one HTTP client; yields the function that plays a session."""
    try:
        import openai  # the trainer, which reads this file as its config, needs none
    except ImportError as error:
        raise ConfigError("The player speaks with the openai package: pip install openai") from error
    assert here.config is not None, "--config=examples/search_over_http.py"
    environment = here.config.env
    assert isinstance(environment, RemoteSearch)
    own = f"{here.config.workdir}_node"  # this host makes its passages for itself
    dataset = here.config.data.source.folder(own, here.config.data.seed, environment, print)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # or it writes a line for every request
    logging.getLogger("httpx").setLevel(logging.WARNING)
    gateway = GatewayClient(here.gateway_url, here.gateway_token)
    model = openai.AsyncOpenAI(base_url=f"{here.gateway_url}/v1", api_key="each session has its own", max_retries=2)

    with environment.open(Opening(dataset, (), here.run, print)) as begin:

        async def play(work: Work, phases: Phases) -> Episode:
            await phases.enter(State.RUNNING)
            session = await gateway.open(work.task.id, work.number, work.group_size, "")
            policy, attempt = model.with_options(api_key=session.token), begin(work.task)
            try:
                messages = [{"role": m.role, "content": m.content} for m in await attempt.start()]
                prompt, turns, ended = "".join(m["content"] for m in messages), [], None
                while ended is None:
                    try:
                        reply = await policy.chat.completions.create(model="policy", messages=messages)
                    except openai.BadRequestError:  # the conversation has no room left
                        ended = StopReason.TOKEN_LIMIT
                        break
                    choice = reply.choices[0]
                    action, shown = choice.message.content or "", ""
                    if choice.finish_reason == "length":
                        ended = StopReason.TOKEN_LIMIT
                    else:
                        step = await attempt.step(action)
                        ended, shown = step.stop_reason, step.observation.text if step.observation else ""
                    turns.append((action, shown))
                    messages += [{"role": "assistant", "content": action}, {"role": "user", "content": shown}]
                await phases.enter(State.EVALUATING)
                verdict = await attempt.verify(Transcript(prompt, tuple(turns), ended=ended))
                sampled = await gateway.trajectories(session)
            finally:
                await attempt.close()
                await gateway.remove(session)
            counters = {**attempt.counters, **sampled.counters}
            return Episode(
                work.task, work.number, sampled.trajectories, verdict.reward, verdict.components, ended, len(turns),
                counters,
            )  # fmt: skip

        yield play
    here.run(model.close(), CLOSE_TIMEOUT_S)
    here.run(gateway.close(), CLOSE_TIMEOUT_S)


if __name__ == "__main__":
    print(__doc__)
