"""An agent that solves problems by calling experts of different price and skill."""
