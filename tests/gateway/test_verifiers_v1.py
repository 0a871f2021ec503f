"""The package verifiers runs its own episodes, with the gateway as its model: JAXAGENT_VERIFIERS_PYTHON has it."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.gateway import world
from tests.gateway.scripted import Scripted

PYTHON = os.environ.get("JAXAGENT_VERIFIERS_PYTHON", "")
PROGRAM = Path(__file__).parent / "verifiers_v1.py"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="JAXAGENT_VERIFIERS_PYTHON names no interpreter that has verifiers 0.4")
@pytest.mark.parametrize(("index", "reward"), [(0, 2.0), (1, 0.0)])
def test_its_episode_is_a_session_and_its_reward_is_its_own(index, reward):
    policy = Scripted(world.tokenizer(), lambda context, turn: ["says what", "the quick brown fox"][turn])

    async def scene():
        session = world.session(policy)
        async with world.serving(session) as (gateway, (token,), _):
            process = await asyncio.create_subprocess_exec(
                *(PYTHON, PROGRAM, str(index)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "OPENAI_BASE_URL": f"{gateway.url}/v1", "OPENAI_API_KEY": token, "PYTHONPATH": ""},
            )
            out, told = await asyncio.wait_for(process.communicate(), 55)
        assert out.strip(), told.decode()[-2000:]
        return json.loads(out.decode().splitlines()[-1]), session.close()

    ended, trajectories = world.run(scene)
    assert ended == {"reward": reward, "error": ""}
    (trajectory,) = trajectories
    world.check(policy, trajectories)
    assert len(world.spans(trajectory)) == 2
