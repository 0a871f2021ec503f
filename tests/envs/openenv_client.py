"""The real package's own client, in its own Python: what it is paid for the same actions on the same server.

    python openenv_client.py URL '[[{"seed": 1}, [{"way": "north"}, ...], 60], ...]'

Prints for each episode the rewards, whether it was over, or what the client raised.
"""

import asyncio
import json
import sys

from openenv.core.generic_client import GenericEnvClient


async def play(url: str, reset: dict, moves: list, timeout_s: float) -> dict:
    rewards = []
    try:
        async with GenericEnvClient(base_url=url, message_timeout_s=timeout_s) as client:
            result = await client.reset(**reset)
            for move in moves:
                result = await client.step(move)
                rewards.append(result.reward)
        return {"rewards": rewards, "done": result.done, "error": ""}
    except Exception as failure:
        return {"rewards": rewards, "done": False, "error": f"{type(failure).__name__}: {failure}"}


async def main() -> None:
    print(json.dumps([await play(sys.argv[1], *case) for case in json.loads(sys.argv[2])]))


asyncio.run(main())
