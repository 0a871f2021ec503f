"""A taskset of verifiers 0.4 with an environment of its own: a role of another name, judged at the end."""

import verifiers.v1 as vf
from letters_tasks import OneAnswer

__all__ = ["Judged", "Once", "Sentences"]


class Sentence(vf.Task[vf.TaskData]):
    pass


class Sentences(vf.Taskset[Sentence, vf.TasksetConfig]):
    def load(self):
        for letter in "abcdef":
            yield Sentence(vf.TaskData(prompt=f"Write with {letter}."), self.config.task)


class Once(OneAnswer):
    pass


class JudgedConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()


class Judged(vf.Env[JudgedConfig]):
    async def run(self, task, agents):
        await agents.writer.run(task)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("words", float(len(trace.last_reply.split())))
