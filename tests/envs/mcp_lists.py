"""MCP servers with lists of tools that the SDK's decorators do not make: python mcp_lists.py MODE [TEXT]."""

import asyncio
import sys

from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

mode, text = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
SCHEMA = {"type": "object", "properties": {}}


def tool(name, description="Says its name."):
    return Tool(name=name, description=description, input_schema=SCHEMA)


async def list_tools(context, params):
    page = int(params.cursor or 0) if params else 0
    if mode == "pages":
        return ListToolsResult(tools=[tool(f"tool{page}")], next_cursor=str(page + 1) if page < 4 else None)
    if mode == "endless":
        return ListToolsResult(tools=[tool(f"tool{page}")], next_cursor="1")
    if mode == "twice":
        return ListToolsResult(tools=[tool("one"), tool("one", "Another one.")])
    if mode == "name":
        return ListToolsResult(tools=[tool(text)])
    if mode == "parameter":
        schema = {"type": "object", "properties": {"a": {"type": "string", "description": text}}}
        return ListToolsResult(tools=[Tool(name="one", description="One.", input_schema=schema)])
    return ListToolsResult(tools=[tool("one", text)])


async def call_tool(context, params):
    return CallToolResult(content=[TextContent(type="text", text=params.name)])


async def main():
    server = Server("lists", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
