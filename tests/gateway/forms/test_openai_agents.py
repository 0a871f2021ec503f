"""openai-agents does a task of two turns with a tool over the forms, as it would over OpenAI's server."""

import pytest

from jaxagent.gateway.chat import Call, ChatMessage, Reasoning, Text
from tests.gateway.forms.played import Played, listening, run

agents = pytest.importorskip("agents", reason="openai-agents is not installed")
openai = pytest.importorskip("openai", reason="the openai SDK is not installed")

WRITE = Call("write", {"path": "hello.txt", "text": "ä"}, "k1")
FIRST = [Reasoning("The file is missing."), Text("I write it."), WRITE]


def play(ask):
    """Writes a file, then says what the tool said."""
    said = [m for m in ask.messages if m.role == "tool"]
    return ([Text("The tool said: "), Text(said[-1].text)] if said else FIRST), {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_two_turns(api, stream):
    written = {}

    @agents.function_tool
    def write(path: str, text: str) -> str:
        """Writes a file.

        Args:
          path: Where.
          text: What.
        """
        written[path] = text
        return f"wrote {len(text)}"

    async def scene():
        agents.set_tracing_disabled(True)
        server = Played(play)
        async with listening(server) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=20)
            kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
            model = kind(model="toy", openai_client=client)
            agent = agents.Agent(name="a", instructions="You write files.", tools=[write], model=model)
            if stream:
                result = agents.Runner.run_streamed(agent, "Create hello.txt", max_turns=3)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, "Create hello.txt", max_turns=3)
            await client.close()
        assert result.final_output == "The tool said: wrote 1" and written == {"hello.txt": "ä"}
        assert not server.refused
        first, second = server.asks
        assert [t.name for t in first.tools] == ["write"] and first.tools == second.tools
        assert first.messages == (ChatMessage("system", "You write files."), ChatMessage("user", "Create hello.txt"))
        # The program sends back what it was sent: the second request goes on where the answer to the first ended.
        assert second.messages[:2] == first.messages
        answer, result = second.messages[2:]
        assert (answer.role, answer.text) == ("assistant", "I write it.")
        assert [(c.name, c.arguments) for c in answer.calls] == [(WRITE.name, WRITE.arguments)]
        assert result == ChatMessage("tool", "wrote 1", call_id=answer.calls[0].id, name="write")

    run(scene())
