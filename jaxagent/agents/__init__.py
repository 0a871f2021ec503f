"""Agent programs that a rollout starts in a sandbox: Codex, Claude Code, any command line; one module each."""
