"""One small agent for each Python client: it is told of two tools, uses both, and says the answer.

Started in an environment that has the clients. Reads [[name, variables], ...] from standard input and lets one agent
after the other do its task, each with nothing but the variables that the gateway's agents set. Prints
{name: [answer, what went wrong]}. Nothing in the agents is adapted to the gateway.
"""

import asyncio
import json
import os
import sys
import traceback

QUESTION = "How much is 6 x 7, and 8 more?"
MODEL = "policy"


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def multiply_text(a: int, b: int) -> str:
    """Multiplies two numbers."""
    return str(a * b)


def add_text(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


TOOLS = {"multiply": multiply, "add": add}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
NESTED = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in TOOLS]
FLAT = [{"type": "function", "name": name, "parameters": SCHEMA} for name in TOOLS]
BLOCKS = [{"name": name, "input_schema": SCHEMA} for name in TOOLS]


def _chat(complete, model):
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        said = complete(model=model, messages=messages, tools=NESTED).choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return said.content
        for call in said.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def openai_chat():
    import openai

    return _chat(openai.OpenAI().chat.completions.create, MODEL)


def openai_responses():
    """With `previous_response_id`, as OpenAI's own pages show it."""
    import openai

    client, items, before = openai.OpenAI(), QUESTION, None
    while True:
        said = client.responses.create(model=MODEL, input=items, tools=FLAT, previous_response_id=before)
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return said.output_text
        items, before = [], said.id
        for call in calls:
            result = str(TOOLS[call.name](**json.loads(call.arguments)))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def anthropic_messages():
    import anthropic

    client, messages = anthropic.Anthropic(), [{"role": "user", "content": QUESTION}]
    while True:
        with client.messages.stream(model=MODEL, max_tokens=500, messages=messages, tools=BLOCKS) as stream:
            said = stream.get_final_message()
        messages.append({"role": "assistant", "content": said.content})
        calls = [block for block in said.content if block.type == "tool_use"]
        if not calls:
            return said.content[0].text
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(TOOLS[call.name](**call.input))}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


def anthropic_runner():
    import anthropic

    runner = anthropic.Anthropic().beta.messages.tool_runner(
        model=MODEL,
        max_tokens=500,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[anthropic.beta_tool(tool) for tool in (multiply_text, add_text)],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    return runner.until_done().content[0].text


def langgraph():
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model=MODEL), list(TOOLS.values()))
    return agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content


def langchain():
    """Tools by `bind_tools`, and the answer by `with_structured_output`, which demands a call."""
    import pydantic
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    class Answer(pydantic.BaseModel):
        """The answer."""

        number: int

    model, messages = ChatOpenAI(model=MODEL), [HumanMessage(QUESTION)]
    said = model.bind_tools(list(TOOLS.values()), tool_choice="any").invoke(messages)
    (call,) = said.tool_calls
    messages += [said, ToolMessage(str(TOOLS[call["name"]](**call["args"])), tool_call_id=call["id"])]
    structured = model.with_structured_output(Answer, method="function_calling", tools=list(TOOLS.values()))
    return str(structured.invoke(messages).number)


def _pydantic_ai(model, **more):
    from pydantic_ai import Agent

    return Agent(model, tools=list(TOOLS.values()), **more).run_sync(QUESTION).output


def pydantic_ai_chat():
    return _pydantic_ai(f"openai-chat:{MODEL}")


def pydantic_ai_responses():
    return _pydantic_ai(f"openai-responses:{MODEL}")


def pydantic_ai_anthropic():
    return _pydantic_ai(f"anthropic:{MODEL}")


def pydantic_ai_output():
    """The answer is a call of the tool `final_result`, demanded by tool_choice."""
    import pydantic

    class Answer(pydantic.BaseModel):
        number: int

    return str(_pydantic_ai(f"openai-chat:{MODEL}", output_type=Answer).number)


def _smolagents(kind):
    import smolagents

    model = smolagents.OpenAIServerModel(MODEL, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    return str(kind(tools=[smolagents.tool(tool) for tool in TOOLS.values()], model=model).run(QUESTION))


def smolagents_calls():
    import smolagents

    return _smolagents(smolagents.ToolCallingAgent)


def smolagents_code():
    import smolagents

    return _smolagents(smolagents.CodeAgent)


def litellm_openai():
    import litellm

    return _chat(litellm.completion, f"openai/{MODEL}")


def litellm_anthropic():
    import litellm

    return _chat(litellm.completion, f"anthropic/{MODEL}")


def _openai_agents(kind):
    import agents
    import openai

    agents.set_tracing_disabled(True)
    model = getattr(agents, kind)(model=MODEL, openai_client=openai.AsyncOpenAI())
    agent = agents.Agent(name="a", tools=[agents.function_tool(tool) for tool in TOOLS.values()], model=model)

    async def streamed():
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(streamed())


def openai_agents_chat():
    return _openai_agents("OpenAIChatCompletionsModel")


def openai_agents_responses():
    return _openai_agents("OpenAIResponsesModel")


def best_of_four():
    """Four requests at once and four samples of one request: no draw is given twice."""
    import openai

    async def ask():
        client = openai.AsyncOpenAI()
        asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
        one = await client.chat.completions.create(**asked, n=4)
        return sorted(choice.message.content for choice in one.choices)

    return " ".join(asyncio.run(ask()))


def result(name):
    try:
        return str(globals()[name]()), ""
    except Exception:
        return "", traceback.format_exc()


if __name__ == "__main__":
    done = {}
    for name, variables in json.load(sys.stdin):
        os.environ.update(variables)
        done[name] = result(name)
    print(json.dumps(done))
