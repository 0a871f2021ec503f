"""Agents in a real browser: Chromium, sites that are answered in this process, pages as trees of elements."""
