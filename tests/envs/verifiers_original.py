"""Plays episodes of a taskset by the package verifiers alone, with a server that sends what a test says.

    python verifiers_original.py TASKSET AGENT CASES      # JSON: settings of the role, {name: [index, replies]}

A reply is [text, finish reason]; behind the last one the context is full. The last line printed is JSON: {name:
{reward, scores, stop, errors}}.
"""

import asyncio
import itertools
import json
import os
import sys

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

MESSAGE = {"message": "This model's maximum context length is 8 tokens", "code": "context_length_exceeded"}


async def main(taskset, agent, cases):
    left = []

    async def answer(request):
        if not left:
            return web.json_response({"error": MESSAGE}, status=400)
        text, reason = left.pop(0)
        message = {"role": "assistant", "content": text}
        choices = [{"index": 0, "message": message, "finish_reason": reason}]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "turn", "object": "chat.completion", "created": 0, "model": "m", "choices": choices}
        return web.json_response({**body, "usage": usage})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    settings = {"taskset": {"id": taskset}, "agent": {**agent, "runtime": {"type": "subprocess"}}}
    environment = load_environment(resolve_env_config(settings))
    os.environ["NO_KEY"] = "none"
    context = vf.ModelContext(model="m", client=vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"))
    results = {}
    async with environment.serving():
        for name, (index, replies) in cases.items():
            left[:] = replies
            task = next(itertools.islice(environment.taskset, index, None))
            episode = await environment.run_episode(task, context)
            (trace,) = episode.traces
            errors = [error.message for error in (*episode.errors, *trace.errors)]
            scores = {one: reward and reward.score for one, reward in trace.rewards.items()} | trace.metrics
            results[name] = {"reward": trace.reward, "scores": scores, "stop": trace.stop_condition, "errors": errors}
    await runner.cleanup()
    print(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(json.loads, sys.argv[2:])))
