"""Tools of MCP servers, called by the policy."""
